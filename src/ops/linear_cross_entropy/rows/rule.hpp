// What: the rules of a row that need no tensor: does it count, what does it weigh, by what does the
// batch divide, how far does fp16 reach. Host and device compile the same functions.
// Why: a row means the same in every lane, and a rule is changed in one place.
// Never: reads a tensor: callers hand in what they have read.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "algebra/row_state.hpp"
#include "core/mutant.hpp"
#include "ops/linear_cross_entropy/rows/finish.hpp"
#include "talea/linear_cross_entropy.hpp"

namespace talea::lce {

enum class RowKind : int8_t { valid, ignored, poisoned };

// Which ids are entries of the vocabulary, and which one says that there is none.
struct IdRule {
  int64_t end = 0;  // of the vocabulary over all ranks
  int64_t ignore_index = 0;
};

inline IdRule id_rule(const LinearCrossEntropyProblem& p) {
  return {mutant(Mutant::b8_sentinel_matches_padding) ? p.vocab_stored : p.vocab,
          p.options.ignore_index};
}

TALEA_HOST_DEVICE constexpr bool is_inside(const IdRule& r, int64_t id) {
  return id >= 0 && id < r.end;
}

TALEA_HOST_DEVICE constexpr RowKind kind_of_id(const IdRule& r, int64_t id) {
  if (id == r.ignore_index) return RowKind::ignored;
  return is_inside(r, id) ? RowKind::valid : RowKind::poisoned;
}

// A row of sparse soft targets is ignored as a whole: every id is ignore_index. id_at(j): its j-th.
template <class IdAt>
TALEA_HOST_DEVICE constexpr RowKind kind_of_ids(const IdRule& r, int64_t count, IdAt id_at) {
  if (count == 0) return RowKind::valid;
  bool all_ignored = true, all_inside = true;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t id = id_at(j);
    all_ignored = all_ignored && id == r.ignore_index;
    all_inside = all_inside && is_inside(r, id);
  }
  if (all_ignored) return RowKind::ignored;
  return all_inside ? RowKind::valid : RowKind::poisoned;
}

// A stretch of the vocabulary: a rank's shard, or the columns that lie in a buffer.
struct Columns {
  int64_t begin = 0, count = 0;

  // Where the id lies in it, or -1.
  TALEA_HOST_DEVICE constexpr int64_t of(int64_t id) const {
    return id >= begin && id < begin + count ? id - begin : -1;
  }
};

// Lanes compute in fp32: a factor beyond its normal numbers would become 0 or infinite there.
TALEA_HOST_DEVICE constexpr bool is_normal_fp32(double x) {
  using Limits = std::numeric_limits<float>;
  const auto f = static_cast<float>(x < 0 ? -x : x);
  return f >= Limits::min() && f <= Limits::max();
}
TALEA_HOST_DEVICE constexpr bool is_scale(double token_scale, double logit_scale) {
  return is_normal_fp32(token_scale) && is_normal_fp32(token_scale * logit_scale);
}
TALEA_HOST_DEVICE constexpr bool is_class_weight(double c) {
  return c >= 0 && c <= std::numeric_limits<double>::max();
}

// What a row adds to the denominator of a mean: its target's class weight, where there is one, and
// that times its token weight. A poisoned row counts: the mean must show that it was there.
TALEA_HOST_DEVICE inline double counted_weight(RowKind kind, double class_weight) {
  if (kind == RowKind::ignored) return 0;
  if (kind == RowKind::valid) return class_weight;
  return mutant(Mutant::b24_invalid_leaves_denominator) ? 0 : 1;
}

// How the rows' losses become one.
struct MeanRule {
  Reduction reduction = Reduction::mean;
  Denominator denominator = Denominator::valid;
  OnEmpty on_empty = OnEmpty::nan;
  double given = 0;
};

inline MeanRule mean_rule(const LinearCrossEntropyOptions& o) {
  return {o.reduction, o.denominator, o.on_empty, o.denominator_value};
}

// M of the mean from the sums over the rows; 1 for sum and none.
TALEA_HOST_DEVICE constexpr double denominator_of(const MeanRule& r, double valid_weight,
                                                  double weighted) {
  if (r.reduction != Reduction::mean) return 1;
  if (r.denominator == Denominator::given) return r.given;
  return r.denominator == Denominator::valid ? valid_weight : weighted;
}

// The scalar loss from the sum of l_t. empty: no row of the denominator's scope counts. A given
// denominator makes the mean of nothing 0 / M, which is 0; only a counted one is empty.
TALEA_HOST_DEVICE constexpr double reduced(const MeanRule& r, double sum, double denominator,
                                           bool empty) {
  if (r.reduction == Reduction::sum) return sum;
  if (empty && r.denominator != Denominator::given)
    return r.on_empty == OnEmpty::nan ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  return sum / denominator;
}

// An element of a row's dz is no larger, times `scale` of its token. class_weight_max: of all.
TALEA_HOST_DEVICE inline double largest_element(const RowResult<double>& g, double soft_mass,
                                                double class_weight_max, double vocab,
                                                double scale) {
  return std::fabs(scale) *
         (std::fabs(g.prob) + std::fabs(g.target) + std::fabs(g.smooth) * class_weight_max +
          std::fabs(g.soft) * std::fmax(class_weight_max, std::fabs(soft_mass)) +
          std::fabs(g.entropy_up) * (1 + std::log(vocab)));
}

// fp16 ends at 65504 and thins out below 6e-5: the row is stored times the power of two that brings
// its largest possible element to 2^11 .. 2^12. `widest` either way; a row of zeros takes it: it
// never holds the other rows down.
TALEA_HOST_DEVICE inline int storage_exponent(double largest, int widest) {
  if (largest == 0) return widest;
  if (!(largest > 0) || std::isinf(largest)) return 0;
  int exponent = 0;
  std::frexp(largest, &exponent);  // largest < 2^exponent
  exponent = 12 - exponent;
  return exponent < -widest ? -widest : exponent > widest ? widest : exponent;
}

}  // namespace talea::lce
