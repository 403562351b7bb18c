// What: the checks of the sparse attention contract, and the facts of its index lists.
// Why: every lane starts from the same checked problem and the same rule of what is valid.
// Never: computes a score.
#pragma once

#include <cmath>

#include "core/fail.hpp"
#include "ops/sparse_attention/lane.hpp"
#include "ops/sparse_attention/rule.hpp"

namespace talea::sparse_attention {

// A call that all checks without data have passed: the problem as a value, its tensors in their
// places, and as they were given (the caller's structs live as long as the call).
struct CheckedCall {
  Problem problem;
  Args args;
  std::vector<NamedTensor> memory;      // every tensor, inputs first
  std::vector<NamedTensor> replicated;  // what ranks that cut heads must hold alike
};
CheckedCall checked(Pass pass, const Inputs& in, const Outputs& out, const Options& o,
                    const Ranks& ranks);
CheckedCall checked(const SelectInputs& in, const SelectOutputs& out, const SelectOptions& o,
                    const Ranks& ranks);
CheckedCall checked(const IndexLossInputs& in, const IndexLossOutputs& out,
                    const IndexLossOptions& o, const Ranks& ranks);

inline constexpr int64_t packed_bytes = 656, packed_dim = 576, packed_value_dim = 512;
inline constexpr int64_t packed_scales = 512, packed_rope = 528;  // byte offsets in a row
inline constexpr int64_t scale_tile = 128;                        // columns of one kv_scale
inline constexpr int most_threads = 4096;

// What the index lists of a call hold. Host tensors only.
struct SlotFacts {
  int64_t given = 0, valid = 0, foreign = 0;
  int64_t first_slot = -1, first_value = 0;  // of the foreign ones, the lowest flat slot
};
// Throws Error for a scale that a slot names and that is none.
SlotFacts examine(const Problem& p, const Args& a);
// Under IndexCheck::checked: batch, query, slot and value of the first foreign index, else "".
std::string refused_indices(const Problem& p, const SlotFacts& facts);
void add_to_status(const View& status, const SlotFacts& facts, int64_t nan_scores);
// cu_seqlens that run backwards or beyond the rows; scales that are no positive finite number.
void check_data(const Problem& p, const Args& a);

inline double tile_scale(double scale) {
  return mutant(Mutant::sa18_scale_exponent_only) ? std::exp2(std::floor(std::log2(scale))) : scale;
}

// Group of local head h.
inline int64_t group_of(const Problem& p, int64_t h) {
  return (p.head_begin + h) / (p.total_heads / p.groups);
}
// Local heads [first, last) of a group.
struct HeadRange {
  int64_t first = 0, last = 0;
};
HeadRange heads_of(const Problem& p, int64_t group);

// ln(e^lse + e^sink) and what follows from it. sink -Inf: none.
double log_add(double lse, double sink);

// ln of a sum, as base + rest: far from 0 one number would lose what each key weighs.
struct LogSum {
  double base = 0, rest = 0;
  double share(double x) const { return std::exp(x - base - rest); }
};
// ln(sum e^max + e^sink); max and sum of the logits of a row.
LogSum log_sum(double max, double sum, double sink);
double product_flops(const Problem& p);

// The least options.workspace_limit_bytes that the lane which would run can keep.
int64_t least_workspace_limit(const Problem& problem);

}  // namespace talea::sparse_attention
