// What: what lane sm90 takes, and how it cuts it: chunk, segments, slices, sequences side by side.
// Why: a pure function of problem and device, tested without a GPU.
// Never: reads a tensor, or lets a limit change a bit of a result.
#include "ops/mamba3/sm90/config.hpp"

#include <algorithm>
#include <cmath>

#include "core/fail.hpp"

namespace talea::mamba3::sm90 {
namespace {

constexpr int64_t rows = 64, columns = 128, values = 64;
constexpr int64_t slice_chunks = 4;  // whose rows by head lie in the cache until they are summed

// Why rows of `t` are not read in pieces of `bytes`; empty: they are.
std::string not_in_pieces(const char* name, const Tensor& t, int64_t bytes) {
  if (!t) return "";
  const int64_t pieces = bytes / size_of(t.dtype);
  const auto stride = [&](int i) { return t.stride[static_cast<size_t>(i)]; };
  if (t.shape[static_cast<size_t>(t.rank - 1)] > 1 && stride(t.rank - 1) != 1)
    return fmt::format("{}: last stride {}, must be 1", name, stride(t.rank - 1));
  for (int i = 0; i + 1 < t.rank; ++i)
    if (t.shape[static_cast<size_t>(i)] > 1 && stride(i) % pieces != 0)
      return fmt::format("{}: stride {} of axis {}, must be a multiple of {}", name, stride(i), i,
                         pieces);
  return "";
}

std::string states_asked(const Problem& p) {
  const auto any = [](const States& s) { return s.angle || s.ssm || s.k || s.v; };
  if (any(p.in.initial_states)) return "initial states";
  if (any(p.out.final_states)) return "final states";
  if (any(p.in.d_final_states)) return "gradients of final states";
  if (any(p.out.d.initial_states)) return "gradients of initial states";
  return "";
}

}  // namespace

std::optional<std::string> declined(const Problem& p, const DeviceFacts&) {
  if (p.dtype != DType::bf16) return fmt::format("{} q: bf16 alone", name_of(p.dtype));
  if (p.pass == Pass::step) return "a step";
  if (p.heads_world > 1 || p.sequence_world > 1)
    return "heads or tokens over several ranks are for host tensors";
  if (p.state_dim != columns || p.head_dim != values)
    return fmt::format("N = {}, P = {}: {} and {} alone", p.state_dim, p.head_dim, columns, values);
  if (p.rank != 1 && p.rank != 2 && p.rank != 4)
    return fmt::format("R = {}: 1, 2 and 4 alone", p.rank);
  if (p.pairs % 2 != 0) return fmt::format("A = {}: even numbers alone", p.pairs);
  if (p.options.chunk > 0 && p.options.chunk * p.rank != rows)
    return fmt::format("chunk = {} tokens of rank {}: {} rows alone", p.options.chunk, p.rank,
                       rows);
  if (p.options.head_norm) return "head_norm";
  if (const std::string states = states_asked(p); !states.empty()) return states;
  if (!p.backward() && !p.out.out) return "no out";
  for (const auto& [name, tensor, bytes] :
       {std::tuple<const char*, const Tensor&, int64_t>{"q", p.in.q, 16},
        {"k", p.in.k, 16},
        {"v", p.in.v, 16},
        {"z", p.in.z, 16},
        {"out", p.out.out, 16},
        {"d_v", p.out.d.v, 16},
        {"d_z", p.out.d.z, 16}})
    if (std::string why = not_in_pieces(name, tensor, bytes); !why.empty()) return why;
  if (p.alignment_bytes < 16)
    return fmt::format("rows on {} bytes, must be on 16", p.alignment_bytes);
  if (p.tokens >= int64_t{1} << 31 || p.sequences * p.heads >= int64_t{1} << 31)
    return "2^31 tokens, or heads of sequences";
  return std::nullopt;
}

cuda::Plan make_plan(const Problem& p, const DeviceFacts& device) {
  cuda::Plan plan;
  plan.engine = cuda::Engine::bf16;
  plan.keeps = true;
  plan.threads = 256;
  plan.chunk = rows / p.rank;
  plan.chunks = (p.tokens + plan.chunk - 1) / plan.chunk;
  plan.segment = std::max<int64_t>(
      1, static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(plan.chunks)))));
  plan.segments = (plan.chunks + plan.segment - 1) / plan.segment;
  plan.slice = std::min(slice_chunks, plan.segment);
  plan.blocks = p.sequences * p.heads;
  for (cuda::ChunkPlaces* places : {&plan.forward, &plan.states, &plan.backward}) {
    places->rows = static_cast<int>(rows);
    places->padded_columns = static_cast<int>(columns);
    places->padded_values = static_cast<int>(values);
  }
  if (!p.backward()) return plan;
  // A block of backward has a multiprocessor to itself.
  const int64_t side_by_side = device.sm_count / std::max<int64_t>(p.heads, 1);
  plan.wave = std::min(p.sequences, std::max<int64_t>(side_by_side, 1));
  while (plan.wave > 1 && cuda::workspace_of(p, plan) > p.options.workspace_limit_bytes)
    --plan.wave;
  return plan;
}

}  // namespace talea::mamba3::sm90
