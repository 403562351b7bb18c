// What: one problem of the scan as a value: host inputs by name, options, wanted outputs.
// Why: the oracle, the yardstick and every lane start from the same bytes.
// Never: knows a lane.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "talea/mamba3.hpp"
#include "yardsticks/mamba3/host_tensor.hpp"

namespace talea::yardsticks::mamba3 {

struct Sizes {
  int64_t B = 1, S = 1, H = 1, G = 1, N = 2, P = 1, R = 1, A = 0;
  bool rank_axis = false;  // with R = 1: q is [B, S, 1, G, N]
  bool shared_angles = false;
};

using Tensors = std::map<std::string, HostTensor>;

struct Case {
  Sizes size;
  DType dtype = DType::f32;
  // q, k, ..., cu_seqlens, initial_*, and for backward d_out, d_final_*.
  Tensors in;
  std::vector<int64_t> cu;         // with cu_seqlens; the entries of `in`
  std::set<std::string> absent_d;  // gradients nobody asks for
  bool accumulate = false;
  bool fp32_outputs = false;  // all outputs in fp32 rather than the dtype of their twins
  Layout rows{};              // of q, k, d_q, d_k
  talea::mamba3::Options options;

  bool has(const std::string& name) const { return in.count(name) > 0; }
  bool reduce() const { return size.R == 1 || has("mimo_out"); }
  bool halves() const;
  int64_t sequences() const {
    return has("cu_seqlens") ? static_cast<int64_t>(cu.size()) - 1 : size.B;
  }
};

// The shape of each tensor of the interface, inputs and outputs ("out", "final_ssm", "d_q", ...).
std::vector<int64_t> shape_of(const Case& c, const std::string& name);

// Its dtype as an output of a call on this case.
DType output_dtype(const Case& c, const std::string& name);

// Names of all outputs of forward; of all gradients that the case's inputs have.
std::vector<std::string> forward_outputs(const Case& c);
std::vector<std::string> backward_outputs(const Case& c);

// Views by name into the structs of the interface.
talea::mamba3::Inputs inputs_of(const Tensors& in, bool backward);
talea::mamba3::Outputs outputs_of(const Tensors& out, bool backward);

}  // namespace talea::yardsticks::mamba3
