// What: the checks that need data, and what the targets say about the batch.
// Why: ignored, out-of-range and empty batches mean the same in every lane.
// Never: reads hidden, weight or bias.
#include "core/fail.hpp"
#include "core/half.hpp"
#include "core/mutant.hpp"
#include "ops/linear_cross_entropy/contract.hpp"

namespace talea::lce {
namespace {

void check_weights(const char* name, const Tensor& t) {
  for (int64_t v = 0; t && v < t.shape[0]; ++v) {
    const double c = at(t, v);
    require(is_class_weight(c), ErrorKind::invalid_data, "{}[{}] = {}: must be finite and >= 0",
            name, v, c);
  }
}

void check_scales(const Tensor& t, double logit_scale) {
  for (int64_t i = 0; t && i < t.shape[0]; ++i) {
    const double s = at(t, i);
    require(
        is_scale(s, logit_scale), ErrorKind::invalid_data,
        "token_scale[{}] = {}: must be finite and not 0, within fp32, also times logit_scale {}", i,
        s, logit_scale);
  }
}

}  // namespace

RowKind row_kind(const Problem& p, const Inputs& in, int64_t t) {
  const IdRule ids = id_rule(p);
  if (p.has_targets) return kind_of_id(ids, index_at(in.targets, t));
  const int64_t listed = p.soft_targets == SoftTargets::sparse ? p.soft_k : 0;
  return kind_of_ids(ids, listed, [&](int64_t j) { return index_at(in.soft_target_ids, t, j); });
}

TargetFacts examine(const Problem& p, const Inputs& in) {
  check_weights("class_weight", in.class_weight);
  check_scales(in.token_scale, p.options.logit_scale);
  TargetFacts f;
  f.class_weight_sum = static_cast<double>(p.vocab);
  if (in.class_weight) {
    f.class_weight_sum = 0;
    for (int64_t v = 0; v < p.vocab; ++v) f.class_weight_sum += at(in.class_weight, v);
  }
  const bool checked = p.options.target_check != TargetCheck::poison;
  const Columns shard{p.vocab_begin, p.vocab_local};
  for (int64_t t = 0; t < p.tokens; ++t) {
    const RowKind kind = row_kind(p, in, t);
    if (kind == RowKind::ignored) {
      ++f.ignored;
      continue;
    }
    if (kind == RowKind::poisoned) {
      if (checked && p.has_targets)
        fail(ErrorKind::invalid_data, "targets[{}] = {}: outside [0, {}) and not ignore_index {}",
             t, index_at(in.targets, t), p.vocab, p.options.ignore_index);
      if (checked) {
        int64_t j = 0;
        while (is_inside({p.vocab, 0}, index_at(in.soft_target_ids, t, j))) ++j;
        fail(ErrorKind::invalid_data, "soft_target_ids[{}, {}] = {}: outside [0, {})", t, j,
             index_at(in.soft_target_ids, t, j), p.vocab);
      }
    }
    ++(kind == RowKind::valid ? f.valid : f.out_of_range);
    double c = 1;
    if (p.has_targets && kind == RowKind::valid) {
      const int64_t y = index_at(in.targets, t);
      if (in.class_weight) c = at(in.class_weight, y);
      f.in_partition += shard.of(y) >= 0;
    }
    const double counted = counted_weight(kind, c);
    f.valid_weight += counted;
    f.weighted += counted * (in.token_weight ? at(in.token_weight, t) : 1.0);
  }
  return f;
}

Normaliser normaliser(const Problem& p, const TargetFacts& facts, Communicator& batch) {
  const bool global =
      p.options.denominator_scope == DenominatorScope::global && !mutant(Mutant::b20_local_mean);
  double sums[3] = {facts.valid_weight, facts.weighted,
                    static_cast<double>(facts.valid + facts.out_of_range)};
  if (global) batch.all_reduce_sum(sums, 3, DType::f64, nullptr);
  Normaliser m;
  m.empty = sums[2] == 0;
  MeanRule mean = mean_rule(p.options);
  if (mutant(Mutant::b23_mean_of_means) && mean.denominator == Denominator::given)
    mean.denominator = Denominator::valid;
  m.denominator = denominator_of(mean, sums[0], sums[1]);
  m.inverse = 1.0 / m.denominator;
  return m;
}

double reduce_loss(const Problem& p, const Normaliser& m, double sum) {
  return reduced(mean_rule(p.options), sum, m.denominator, m.empty);
}

double upstream_at(const Inputs& in, int64_t t) {
  if (!in.upstream) return 1.0;
  if (in.upstream.rank == 0) return load_element(in.upstream.data, in.upstream.dtype, 0);
  if (mutant(Mutant::b1_upstream_first_only)) return at(in.upstream, 0);
  if (mutant(Mutant::b2_upstream_stride_ignored))
    return load_element(in.upstream.data, in.upstream.dtype, t);
  return at(in.upstream, t);
}

void record(const TargetFacts& facts, const Normaliser& m, Result& result) {
  result.valid_tokens = facts.valid;
  result.ignored_tokens = facts.ignored;
  result.out_of_range_tokens = facts.out_of_range;
  result.targets_in_partition = facts.in_partition;
  result.denominator = m.denominator;
}

}  // namespace talea::lce
