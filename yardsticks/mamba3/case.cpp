// What: one problem of the scan as a value: host inputs by name, options, wanted outputs.
// Why: the oracle, the yardstick and every lane start from the same bytes.
// Never: knows a lane.
#include "yardsticks/mamba3/case.hpp"

#include <algorithm>
#include <stdexcept>

namespace talea::yardsticks::mamba3 {
namespace {

using talea::mamba3::Gradients;
using talea::mamba3::Inputs;
using talea::mamba3::Outputs;
using talea::mamba3::RotaryPairs;
using talea::mamba3::States;

template <typename S>
using Names = std::vector<std::pair<const char*, Tensor S::*>>;

const Names<Inputs> inputs = {{"q", &Inputs::q},
                              {"k", &Inputs::k},
                              {"v", &Inputs::v},
                              {"z", &Inputs::z},
                              {"adt", &Inputs::adt},
                              {"dt", &Inputs::dt},
                              {"trap", &Inputs::trap},
                              {"angles", &Inputs::angles},
                              {"q_bias", &Inputs::q_bias},
                              {"k_bias", &Inputs::k_bias},
                              {"d", &Inputs::d},
                              {"mimo_v", &Inputs::mimo_v},
                              {"mimo_z", &Inputs::mimo_z},
                              {"mimo_out", &Inputs::mimo_out},
                              {"norm_weight", &Inputs::norm_weight},
                              {"cu_seqlens", &Inputs::cu_seqlens}};
const Names<Gradients> gradients = {{"q", &Gradients::q},
                                    {"k", &Gradients::k},
                                    {"v", &Gradients::v},
                                    {"z", &Gradients::z},
                                    {"adt", &Gradients::adt},
                                    {"dt", &Gradients::dt},
                                    {"trap", &Gradients::trap},
                                    {"angles", &Gradients::angles},
                                    {"q_bias", &Gradients::q_bias},
                                    {"k_bias", &Gradients::k_bias},
                                    {"d", &Gradients::d},
                                    {"mimo_v", &Gradients::mimo_v},
                                    {"mimo_z", &Gradients::mimo_z},
                                    {"mimo_out", &Gradients::mimo_out},
                                    {"norm_weight", &Gradients::norm_weight}};
const Names<States> states = {
    {"angle", &States::angle}, {"ssm", &States::ssm}, {"k", &States::k}, {"v", &States::v}};

Tensor view_of(const Tensors& from, const std::string& name) {
  const auto at = from.find(name);
  return at == from.end() ? Tensor{} : at->second.view();
}

void fill(States& s, const Tensors& from, const std::string& prefix) {
  for (const auto& [name, member] : states) s.*member = view_of(from, prefix + name);
}

bool starts_with(const std::string& s, const char* prefix) { return s.rfind(prefix, 0) == 0; }

}  // namespace

bool Case::halves() const {
  if (options.rotary_pairs == RotaryPairs::automatic) return size.rank_axis || size.R > 1;
  return options.rotary_pairs == RotaryPairs::halves;
}

std::vector<int64_t> shape_of(const Case& c, const std::string& name) {
  const Sizes& s = c.size;
  const bool ranked = s.rank_axis || s.R > 1;
  if (name == "saved" || name == "status") throw std::logic_error(name);
  std::string of =
      starts_with(name, "d_") && name != "d_out" && name != "d" ? name.substr(2) : name;
  if (of == "out" || of == "d_out")
    return c.reduce() ? std::vector{s.B, s.S, s.H, s.P} : std::vector{s.B, s.S, s.R, s.H, s.P};
  if (of == "q" || of == "k")
    return ranked ? std::vector{s.B, s.S, s.R, s.G, s.N} : std::vector{s.B, s.S, s.G, s.N};
  if (of == "v" || of == "z") return {s.B, s.S, s.H, s.P};
  if (of == "adt" || of == "dt" || of == "trap") return {s.B, s.H, s.S};
  if (of == "angles") return {s.B, s.S, s.shared_angles ? 1 : s.H, s.A};
  if (of == "q_bias" || of == "k_bias")
    return ranked ? std::vector{s.H, s.R, s.N} : std::vector{s.H, s.N};
  if (of == "d") return {s.H};
  if (starts_with(of, "mimo_")) return {s.H, s.R, s.P};
  if (of == "norm_weight") return {s.H, s.P};
  if (of == "cu_seqlens") return {static_cast<int64_t>(c.cu.size())};
  const std::string state = of.substr(of.rfind('_') + 1);
  const int64_t n = c.sequences();
  if (state == "angle") return {n, s.H, s.A};
  if (state == "ssm") return {n, s.H, s.P, s.N};
  if (state == "k") return ranked ? std::vector{n, s.R, s.H, s.N} : std::vector{n, s.H, s.N};
  if (state == "v") return {n, s.H, s.P};
  throw std::logic_error(name);
}

DType output_dtype(const Case& c, const std::string& name) {
  const DType plain = c.dtype == DType::f64 ? DType::f64 : DType::f32;
  if (c.fp32_outputs || name.find("final_") != std::string::npos) return plain;
  if (name == "out") return c.dtype;
  const auto twin = c.in.find(name.substr(2));
  if (c.accumulate && name != "d_q" && name != "d_k" && twin->second.shape()[0] == c.size.H)
    return plain;
  return twin->second.dtype();
}

std::vector<std::string> forward_outputs(const Case&) {
  return {"out", "final_angle", "final_ssm", "final_k", "final_v"};
}

std::vector<std::string> backward_outputs(const Case& c) {
  std::vector<std::string> names;
  for (const auto& entry : gradients)
    if (c.has(entry.first)) names.push_back(std::string("d_") + entry.first);
  for (const auto& entry : states)
    if (c.has(std::string("initial_") + entry.first))
      names.push_back(std::string("d_initial_") + entry.first);
  std::erase_if(names, [&](const std::string& n) { return c.absent_d.count(n) > 0; });
  return names;
}

Inputs inputs_of(const Tensors& in, bool backward) {
  Inputs i;
  for (const auto& [name, member] : inputs) i.*member = view_of(in, name);
  fill(i.initial_states, in, "initial_");
  if (!backward) return i;
  i.d_out = view_of(in, "d_out");
  i.saved = view_of(in, "saved");
  fill(i.d_final_states, in, "d_final_");
  return i;
}

Outputs outputs_of(const Tensors& out, bool backward) {
  Outputs o;
  o.status = view_of(out, "status");
  if (!backward) {
    o.out = view_of(out, "out");
    o.saved = view_of(out, "saved");
    fill(o.final_states, out, "final_");
    return o;
  }
  for (const auto& [name, member] : gradients) o.d.*member = view_of(out, std::string("d_") + name);
  fill(o.d.initial_states, out, "d_initial_");
  return o;
}

}  // namespace talea::yardsticks::mamba3
