// What: the parts of the index loss that every host lane shares.
// Why: padding rows, ranks and scopes change N and nothing else.
// Never: puts an epsilon under a logarithm or a normaliser.
#include "ops/sparse_attention/index_loss.hpp"

#include <algorithm>
#include <cmath>

namespace talea::sparse_attention {
namespace {

bool has_key(const Call& c, const KeyRule& rule, int64_t b, int64_t s) {
  const Problem& p = c.problem;
  if (p.loss_keys == LossKeys::dense) {
    const Bounds bounds = index_bounds(p, c.args, b, s);
    return bounds.begin < bounds.end;
  }
  const QueryRule query = query_rule(p, c.args, b, s);
  for (int64_t k = 0; k < query.slots; ++k)
    if (find_key(rule, query, k, c.args.indices.integer(b, s, 0, k)).kind == SlotKind::valid)
      return true;
  return false;
}

}  // namespace

LossScale loss_scale(const Call& c) {
  const Problem& p = c.problem;
  LossScale scale;
  if (p.denominator == LossDenominator::given) {
    scale.rows = p.denominator_value;
  } else {
    const KeyRule rule = key_rule(p);
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t s = 0; s < p.queries; ++s)
        scale.rows += row_weight(c.args, b, s) != 0 && has_key(c, rule, b, s);
    if (p.denominator_scope == LossScope::global)
      for (Communicator* group : {&c.sequence, &c.batch})
        if (group->size() > 1) {
          group->all_reduce_sum(&scale.rows, 1, DType::f64, c.stream);
          c.result.exchanges.push_back("all_reduce_sum of the counted rows, 8 bytes");
        }
  }
  scale.factor = scale.rows > 0 ? p.coeff / scale.rows : 0;
  if (mutant(Mutant::sa35_loss_not_divided)) scale.factor = p.coeff;
  return scale;
}

void sum_teacher(const Call& c, std::span<double> teacher) {
  if (c.heads.size() == 1) return;
  if (!teacher.empty())
    c.heads.all_reduce_sum(teacher.data(), static_cast<int64_t>(teacher.size()), DType::f64,
                           c.stream);
}

double divergence(std::span<const double> logits, std::span<const double> teacher, double weight,
                  std::span<double> gradient) {
  double mass = 0, max = -INFINITY, sum = 0, loss = 0;
  if (weight == 0) {
    std::fill(gradient.begin(), gradient.end(), 0);
    return 0;
  }
  for (const double t : teacher) mass += t;
  if (mutant(Mutant::sa39_epsilon_in_the_loss)) mass += 1e-3;
  for (const double z : logits) max = z > max || std::isnan(z) ? z : max;
  for (const double z : logits) sum += std::exp(z - max);
  const double lse = max + std::log(sum);
  for (size_t i = 0; i < teacher.size(); ++i) {
    const double t = teacher[i] / mass, log_p = logits[i] - lse;
    gradient[i] = weight * (std::exp(log_p) - t);
    if (t != 0) loss += t * (std::log(t) - log_p);
  }
  return weight * loss;
}

void finish_loss(const Call& c, const LossScale& scale, double total) {
  const Problem& p = c.problem;
  if (p.denominator_scope == LossScope::global && c.sequence.size() > 1) {
    c.sequence.all_reduce_sum(&total, 1, DType::f64, c.stream);
    c.result.exchanges.push_back("all_reduce_sum of the loss, 8 bytes");
  }
  if (c.args.loss) c.args.loss.put(total, 0);
  c.result.loss = total;
  c.result.denominator = scale.rows;
  c.result.denominator_kind = p.denominator == LossDenominator::given ? "given" : "valid rows";
  c.result.denominator_scope = p.denominator_scope == LossScope::global ? "global" : "local";
}

}  // namespace talea::sparse_attention
