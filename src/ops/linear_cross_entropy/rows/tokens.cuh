// What: how kernels of the device lanes ask the rules about a token, and write what it shows.
// Why: each lane's kernels walk over rows in their own way; what a row means stands here.
// Never: loops over rows; synchronises threads, but for those of one warp that share a row.
#pragma once

#include "device/common/reduce.cuh"
#include "ops/linear_cross_entropy/rows/tokens.hpp"

namespace talea::lce {

__device__ __forceinline__ double read(const View& v, int64_t i, double absent) {
  return v.data ? v.load(i) : absent;
}
__device__ __forceinline__ void write(const View& v, int64_t i, double x) {
  if (v.data) v.store(i, x);
}

__device__ __forceinline__ RowKind kind_of_target(const TokenRule& r, int64_t t) {
  if (r.targets.data) return kind_of_id(r.ids, r.targets.load_index(t));
  return kind_of_ids(r.ids, r.soft_k, [&](int64_t j) { return r.soft_ids.load_index(t, j); });
}
__device__ __forceinline__ bool scale_is_bad(const TokenRule& r, int64_t t) {
  return r.token_scale.data && !is_scale(r.token_scale.load(t), r.logit_scale);
}
__device__ __forceinline__ RowKind kind_of(const TokenRule& r, int64_t t) {
  const RowKind kind = kind_of_target(r, t);
  return kind == RowKind::valid && scale_is_bad(r, t) ? RowKind::poisoned : kind;
}
// The target's column of this rank's shard, or -1.
__device__ __forceinline__ int64_t target_column(const TokenRule& r, int64_t t) {
  return r.targets.data ? r.shard.of(r.targets.load_index(t)) : -1;
}

// What one token adds to the facts of its batch.
struct TokenFacts {
  RowKind kind = RowKind::ignored;
  bool foreign = false, bad_scale = false;  // why it is poisoned
  int64_t column = -1;                      // of its target in this rank's shard
  double class_weight = 1, counted = 0, weighted = 0;

  TokenFacts() = default;
  __device__ TokenFacts(const TokenRule& r, const View& class_weights, const View& token_weight,
                        int64_t t)
      : kind(kind_of_target(r, t)) {
    foreign = kind == RowKind::poisoned;
    bad_scale = kind == RowKind::valid && scale_is_bad(r, t);
    if (bad_scale) kind = RowKind::poisoned;
    if (kind == RowKind::ignored) return;
    if (kind == RowKind::valid && r.targets.data) {
      const int64_t y = r.targets.load_index(t);
      class_weight = read(class_weights, y, 1);
      column = r.shard.of(y);
    }
    counted = counted_weight(kind, class_weight);
    weighted = counted * read(token_weight, t, 1);
  }
};

__device__ __forceinline__ void add(TokenSums& s, const TokenFacts& own, int64_t t) {
  s.valid += own.kind == RowKind::valid;
  s.ignored += own.kind == RowKind::ignored;
  s.out_of_range += own.kind == RowKind::poisoned;
  s.in_partition += own.column >= 0;
  if (own.foreign) s.first_bad = device::Min()(s.first_bad, t);
  if (own.bad_scale) s.first_bad_scale = device::Min()(s.first_bad_scale, t);
  s.counted += own.counted, s.weighted += own.weighted;
}
__device__ __forceinline__ void add(TokenSums& s, const TokenSums& o) {
  s.valid += o.valid, s.ignored += o.ignored, s.out_of_range += o.out_of_range;
  s.in_partition += o.in_partition;
  s.first_bad = device::Min()(s.first_bad, o.first_bad);
  s.first_bad_scale = device::Min()(s.first_bad_scale, o.first_bad_scale);
  s.counted += o.counted, s.weighted += o.weighted;
}
// Every thread of the block gets the sums of all; shared: a number a warp of each type.
__device__ __forceinline__ TokenSums over_block(const TokenSums& own, int64_t* integers,
                                                double* doubles) {
  using device::block_reduce;
  TokenSums s;
  s.valid = block_reduce(own.valid, device::Sum(), integers);
  s.ignored = block_reduce(own.ignored, device::Sum(), integers);
  s.out_of_range = block_reduce(own.out_of_range, device::Sum(), integers);
  s.in_partition = block_reduce(own.in_partition, device::Sum(), integers);
  s.first_bad = block_reduce(own.first_bad, device::Min(), integers);
  s.first_bad_scale = block_reduce(own.first_bad_scale, device::Min(), integers);
  s.counted = block_reduce(own.counted, device::Sum(), doubles);
  s.weighted = block_reduce(own.weighted, device::Sum(), doubles);
  return s;
}

// The facts of the batch but for M, as if no class had a weight.
__device__ __forceinline__ BatchFacts batch_facts(const TokenSums& s, const TokenRule& rule) {
  BatchFacts f{};
  f.valid = s.valid, f.ignored = s.ignored, f.out_of_range = s.out_of_range;
  f.in_partition = s.in_partition;
  f.first_bad = s.first_bad, f.first_bad_scale = s.first_bad_scale;
  f.first_bad_weight = BatchFacts::kNone;
  if (f.first_bad != BatchFacts::kNone && rule.targets.data)
    f.first_bad_value = rule.targets.load_index(f.first_bad);
  f.valid_weight = s.counted, f.weighted = s.weighted;
  f.present = static_cast<double>(s.valid + s.out_of_range);
  f.class_weight_sum = static_cast<double>(rule.ids.end);
  f.class_weight_max = 1;
  f.in_use = static_cast<int>(s.valid);
  return f;
}

// M and its inverse. A class weight out of contract reaches the gradient of every reduction.
__device__ __forceinline__ void set_denominator(BatchFacts& f, const MeanRule& mean) {
  f.denominator = denominator_of(mean, f.valid_weight, f.weighted);
  f.empty = f.present == 0;
  f.inverse = f.first_bad_weight != BatchFacts::kNone ? static_cast<double>(NAN)
              : f.valid == 0                          ? 0.0
                                                      : 1.0 / f.denominator;
}

// class_weight: of the row's target.
__device__ __forceinline__ RowTerms<double> row_terms(const TokenTerms& in, int64_t t,
                                                      double class_weight) {
  RowTerms<double> own;
  own.soft = in.soft;
  own.class_weight = class_weight;
  own.token_weight = read(in.token_weight, t, 1);
  own.upstream = in.has_targets || in.soft ? read(in.upstream, t, 1) : 0.0;
  own.upstream_lse = read(in.upstream_lse, t, 0);
  own.upstream_entropy = read(in.upstream_entropy, t, 0);
  return own;
}

__device__ __forceinline__ void write_row(const TokenOutputs& out, int64_t t,
                                          const RowSummary<double>& row, double loss) {
  write(out.loss, t, loss);
  write(out.lse, t, row.lse);
  write(out.logprob, t, row.logp_target);
  write(out.entropy, t, row.entropy);
}

// The j-th best of a row; a row whose lse is NaN has none.
__device__ __forceinline__ void write_candidate(const TokenOutputs& out, int64_t t, int64_t j,
                                                float value, int64_t id, double lse) {
  const bool ranked = lse == lse;
  const auto nan = static_cast<double>(NAN);
  if (j == 0 && out.argmax) out.argmax.store(t, ranked ? static_cast<double>(id) : -1.0);
  if (j >= out.top_k) return;
  if (out.topk_values) out.topk_values.store(t, j, ranked ? value : nan);
  if (out.topk_ids) out.topk_ids.store(t, j, ranked ? static_cast<double>(id) : -1.0);
  if (out.topk_logprobs) out.topk_logprobs.store(t, j, ranked ? value - lse : nan);
}

// What a token that is not valid shows.
__device__ __forceinline__ void write_blank(const TokenOutputs& out, int64_t t, double x) {
  write(out.loss, t, x);
  write(out.lse, t, x);
  write(out.logprob, t, x);
  write(out.entropy, t, x);
  write(out.argmax, t, -1);
  for (int64_t j = 0; j < out.top_k; ++j) {
    if (out.topk_values) out.topk_values.store(t, j, x);
    if (out.topk_ids) out.topk_ids.store(t, j, -1);
    if (out.topk_logprobs) out.topk_logprobs.store(t, j, x);
  }
}

// The scalars, by the one thread that has the sums over the rows.
__device__ __forceinline__ void write_scalars(const View& loss, const View& accuracy,
                                              const BatchFacts& f, const MeanRule& mean, double sum,
                                              double hits) {
  if (accuracy.data) accuracy.store(0, hits / static_cast<double>(f.valid));
  if (loss.data) loss.store(0, reduced(mean, sum, f.denominator, f.empty != 0));
}

// The listed words of a row of sparse soft targets.
struct SparseRow {
  View ids, probs;
  int64_t count = 0, token = 0;
  Columns columns;  // those whose logits are here

  // Of the j-th: its column, or -1.
  __device__ int64_t column(int64_t j) const { return columns.of(ids.load_index(token, j)); }

  // The whole warp: sum of c q z and of c q over the listed words. logit_at(j, column) may keep
  // what it reads; `first` to the last lane of the warp.
  template <class LogitAt, class WeightAt>
  __device__ void sums(LogitAt logit_at, WeightAt weight_at, double& sum, double& mass) const {
    sum = mass = 0;
    for (int64_t j = threadIdx.x % device::warp_size; j < count; j += device::warp_size) {
      const int64_t here = column(j);
      if (here < 0) continue;
      const double z = logit_at(j, here), q = probs.load(token, j), cq = q * weight_at(here);
      if (q != 0) sum += cq * z;
      mass += cq;
    }
    sum = device::warp_reduce(sum, device::Sum());
    mass = device::warp_reduce(mass, device::Sum());
  }

  // Repeated ids add up: the whole q of the j-th id. False where an earlier place names it already.
  __device__ bool is_first(int64_t j, double& q) const {
    const int64_t id = ids.load_index(token, j);
    q = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (ids.load_index(token, i) != id) continue;
      if (i < j) return false;
      q += probs.load(token, i);
    }
    return true;
  }
};

}  // namespace talea::lce
