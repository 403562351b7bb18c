// What: the invariants of the contract on drawn problems, on every lane.
// Why: they need no oracle, so they hold where an oracle and a lane could be wrong alike.
// Never: compares with a tolerance where the contract says bitwise.
#include <cmath>
#include <functional>

#include "support/hold.hpp"

namespace talea::testing {
namespace {

constexpr int cases = 150;

class Invariants : public LaneTest {
 protected:
  // Skips what the lane may decline; everything else must run.
  void hold_for(void (*bend)(Spec&), std::function<std::string(const Case&, const Spec&)> check) {
    hold(cases, bend, [&](const Spec& s) -> std::string {
      const Case c = fitted(lane(), make_case(s));
      if (!accepts(c)) return may_decline(lane(), c) ? "" : "declined";
      return check(c, s);
    });
  }
};
TALEA_EVERY_LANE(Invariants);

void hard_none(Spec& s) {
  s.soft = Soft::none;
  s.reduction = Reduction::none;
  s.poison = false;
  s.wants_rows = s.wants_dx = s.wants_dw = s.wants_db = true;
  if (s.types == Types::f64) s.types = Types::f32;  // lanes may decline fp64
}

// A copy of c with only the given rows, in the given order.
Case select(const Case& c, const std::vector<int64_t>& rows) {
  Case part = c;
  const auto n = static_cast<int64_t>(rows.size());
  const auto take = [&](Array& to, const Array& from) {
    if (!from.present() || from.shape().empty() || from.shape()[0] != c.tokens()) return;
    std::vector<int64_t> shape = from.shape();
    shape[0] = n;
    to = Array(from.dtype(), shape);
    const int64_t columns = shape.size() > 1 ? shape[1] : 1;
    for (int64_t t = 0; t < n; ++t)
      for (int64_t j = 0; j < columns; ++j)
        if (is_floating(from.dtype()))
          to.set(t, j, from.get(rows[static_cast<size_t>(t)], j));
        else
          to.set_integer(t, j, from.integer(rows[static_cast<size_t>(t)], j));
  };
  for (Array CaseInputs::*m :
       {&CaseInputs::hidden, &CaseInputs::targets, &CaseInputs::token_weight,
        &CaseInputs::token_scale, &CaseInputs::soft_target_ids, &CaseInputs::soft_target_probs,
        &CaseInputs::upstream, &CaseInputs::upstream_lse, &CaseInputs::upstream_entropy})
    take(part.in.*m, c.in.*m);
  for (Array CaseOutputs::*m :
       {&CaseOutputs::loss, &CaseOutputs::lse, &CaseOutputs::target_logprob, &CaseOutputs::entropy,
        &CaseOutputs::argmax, &CaseOutputs::topk_values, &CaseOutputs::topk_ids,
        &CaseOutputs::topk_logprobs, &CaseOutputs::dx})
    take(part.out.*m, c.out.*m);
  return part;
}

// Row a of one outcome against row b of another, bit for bit, in everything that belongs to a row.
std::string same_row(const CaseOutputs& x, int64_t a, const CaseOutputs& y, int64_t b) {
  std::string complaints;
  for (Array CaseOutputs::*m :
       {&CaseOutputs::loss, &CaseOutputs::lse, &CaseOutputs::target_logprob, &CaseOutputs::entropy,
        &CaseOutputs::argmax, &CaseOutputs::topk_values, &CaseOutputs::topk_ids,
        &CaseOutputs::topk_logprobs, &CaseOutputs::dx}) {
    const Array &p = x.*m, &q = y.*m;
    if (!p.present() || p.shape().empty()) continue;
    for (int64_t j = 0; j < (p.shape().size() > 1 ? p.shape()[1] : 1); ++j) {
      const bool floating = is_floating(p.dtype());
      const long double u = floating ? p.get(a, j) : p.integer(a, j);
      const long double v = floating ? q.get(b, j) : q.integer(b, j);
      if (!(u == v) && !(std::isnan(u) && std::isnan(v)))
        complaints += "rows " + std::to_string(a) + " and " + std::to_string(b) + " differ at " +
                      std::to_string(j) + ": " + std::to_string(static_cast<double>(u)) + ", " +
                      std::to_string(static_cast<double>(v)) + "\n";
    }
  }
  return complaints;
}

TEST_P(Invariants, ProbabilitiesAreProbabilities) {
  hold_for(hard_none, [&](const Case& c, const Spec&) -> std::string {
    const Outcome o = run(c);
    long double e = 1e-6L * (1 + std::log(static_cast<long double>(c.vocab())));
    // Eager arithmetic forms z - lse of two numbers that were rounded at their own size.
    if (is_yardstick_lane(lane())) e += 2 * 0x1p-24L * oracle(c).largest_logit;
    for (int64_t t = 0; t < c.tokens(); ++t) {
      if (!(o.out.target_logprob.get(t) <= 0)) return "logp > 0";
      if (!(o.out.entropy.get(t) >= -e)) return "entropy < 0";
      if (!(o.out.entropy.get(t) <= std::log(static_cast<long double>(c.vocab())) + e))
        return "entropy > log V";
    }
    return "";
  });
}

// Without smoothing weights and z-loss the gradient of the logits sums to 0 over the vocabulary.
TEST_P(Invariants, LogitGradientsSumToZero) {
  const auto bend = [](Spec& s) {
    hard_none(s);
    s.bias = true;
    s.class_weight = s.upstream_lse = s.accumulate = false;
    s.softcap = s.z_loss = 0;
    s.wide_gradients = true;
  };
  hold_for(bend, [&](const Case& c, const Spec&) -> std::string {
    const Outcome o = run(c);
    const Answer truth = oracle(c);
    long double sum = 0, size = 0;
    for (int64_t v = 0; v < c.vocab(); ++v) {
      sum += o.out.db.get(v);
      size += std::fabs(o.out.db.get(v));
    }
    const bool eager = is_yardstick_lane(lane());
    long double noise = 0;
    for (size_t v = 0; v < static_cast<size_t>(c.vocab()); ++v)
      noise += 0x1p-24L * (truth.db_floor[v] + (eager ? truth.db_subtracted[v] : 0));
    if (eager) {  // each dz is stored in 16 bits
      size = 0;
      for (const Real dz : truth.dz) size += std::fabs(dz);
    }
    const long double room = is_16bit(c.in.hidden.dtype()) ? 0x1p-8L * size + noise : noise;
    return std::fabs(sum) <= room ? "" : "sum " + std::to_string(static_cast<double>(sum));
  });
}

TEST_P(Invariants, TokensMayBePermuted) {
  hold_for(hard_none, [&](const Case& c, const Spec& s) -> std::string {
    std::vector<int64_t> order(static_cast<size_t>(c.tokens()));
    for (size_t t = 0; t < order.size(); ++t) order[t] = static_cast<int64_t>(t);
    Random random(s.seed + 1);
    for (size_t t = order.size(); t > 1; --t)
      std::swap(order[t - 1], order[static_cast<size_t>(random.below(static_cast<int64_t>(t)))]);
    const Case straight = select(c, [&] {
      std::vector<int64_t> same(order.size());
      for (size_t t = 0; t < same.size(); ++t) same[t] = static_cast<int64_t>(t);
      return same;
    }());
    const Outcome a = run(straight), b = run(select(c, order));
    std::string complaints;
    for (size_t t = 0; t < order.size(); ++t)
      complaints += same_row(a.out, order[t], b.out, static_cast<int64_t>(t));
    return complaints;
  });
}

// A row says the same alone, in a part and in the whole batch.
TEST_P(Invariants, RowsDoNotSeeTheirBatch) {
  hold_for(hard_none, [&](const Case& c, const Spec& s) -> std::string {
    if (c.tokens() < 2) return "";
    Random random(s.seed + 2);
    const int64_t begin = random.below(c.tokens()), rows = 1 + random.below(c.tokens() - begin);
    std::vector<int64_t> part, all;
    for (int64_t t = 0; t < c.tokens(); ++t) all.push_back(t);
    for (int64_t t = begin; t < begin + rows; ++t) part.push_back(t);
    const Outcome whole = run(select(c, all)), some = run(select(c, part));
    std::string complaints;
    for (int64_t t = 0; t < rows; ++t) complaints += same_row(whole.out, begin + t, some.out, t);
    return complaints;
  });
}

TEST_P(Invariants, PartsSumToTheWhole) {
  const auto bend = [](Spec& s) {
    hard_none(s);
    s.reduction = Reduction::sum;
    s.accumulate = true;  // the second part adds to the first
    s.wide_gradients = true;
  };
  hold_for(bend, [&](const Case& c, const Spec&) -> std::string {
    if (c.tokens() < 2) return "";
    std::vector<int64_t> first, second;
    for (int64_t t = 0; t < c.tokens(); ++t) (t < c.tokens() / 2 ? first : second).push_back(t);
    const Outcome a = run(select(c, first));
    Case rest = select(c, second);
    rest.out.dw = a.out.dw;
    rest.out.db = a.out.db;
    const Outcome b = run(rest);
    CaseOutputs joined;
    joined.dw = b.out.dw;
    joined.db = b.out.db;
    return judged(c, joined, b.result, yardsticks(c));
  });
}

// Renaming the classes renames the gradient rows; loss, lse and entropy stay.
TEST_P(Invariants, VocabularyMayBePermuted) {
  const auto bend = [](Spec& s) {
    hard_none(s);
    s.weight_view = View::contiguous;
    s.class_weight = s.bias = s.accumulate = s.ignore_inside = false;
    s.padding = 0;
  };
  hold_for(bend, [&](const Case& c, const Spec&) -> std::string {
    Case renamed = c;
    const int64_t v = c.vocab(), turn = v / 3;
    const auto name = [&](int64_t id) { return (id + turn) % v; };
    for (int64_t k = 0; k < v; ++k)
      for (int64_t i = 0; i < c.hidden(); ++i)
        renamed.in.weight.set(name(k), i, c.in.weight.get(k, i));
    for (int64_t t = 0; t < c.tokens(); ++t)
      if (c.in.targets.integer(t) != c.options.ignore_index)
        renamed.in.targets.set_integer(t, 0, name(c.in.targets.integer(t)));
    Outcome o = run(renamed);
    const Array turned = o.out.dw;
    for (int64_t k = 0; k < v; ++k)
      for (int64_t i = 0; i < c.hidden(); ++i) o.out.dw.set(k, i, turned.get(name(k), i));
    o.out.argmax = o.out.topk_ids = o.out.accuracy = Array();  // ids are renamed too
    return judged(c, o, yardsticks(c));
  });
}

// Adding one constant to every bias changes lse and nothing else.
TEST_P(Invariants, ConstantBiasShiftsOut) {
  const auto bend = [](Spec& s) {
    hard_none(s);
    s.types = Types::f32;
    s.bias = true;
    s.softcap = s.z_loss = 0;
    s.upstream_lse = false;
  };
  hold_for(bend, [&](const Case& c, const Spec&) -> std::string {
    Case shifted = c;
    // A power of two keeps the addition nearly exact; truth is taken at the shifted bias.
    for (int64_t v = 0; v < c.vocab(); ++v) shifted.in.bias.set(v, 0, c.in.bias.get(v) - 64);
    const Outcome o = run(shifted);
    Yardsticks y = yardsticks(shifted);
    const Answer before = oracle(c);
    for (size_t t = 0; t < before.loss.size(); ++t) {
      const long double moved = std::fabs(y.truth.loss[t] - before.loss[t]);
      if (!(moved <= 1e-5L * (64 + before.largest_logit))) return "the oracle's loss moved";
    }
    return judged(shifted, o, y);
  });
}

// A gradient is linear in its upstream; doubling is exact in binary.
TEST_P(Invariants, DoublingTheUpstreamDoublesTheGradient) {
  const auto bend = [](Spec& s) {
    hard_none(s);
    s.upstream = Upstream::strided;
    s.upstream_lse = s.upstream_entropy = s.accumulate = false;
    if (s.types == Types::f16 || s.types == Types::f16_f32) s.types = Types::bf16;  // subnormals
  };
  hold_for(bend, [&](const Case& c, const Spec&) -> std::string {
    Case twice = c;
    for (int64_t t = 0; t < c.tokens(); ++t) twice.in.upstream.set(t, 0, 2 * c.in.upstream.get(t));
    const Outcome a = run(c), b = run(twice);
    for (Array CaseOutputs::*m : {&CaseOutputs::dx, &CaseOutputs::dw, &CaseOutputs::db}) {
      const Array &x = a.out.*m, &y = b.out.*m;
      if (!x.present()) continue;
      for (int64_t i = 0; i < x.shape()[0]; ++i)
        for (int64_t j = 0; j < (x.shape().size() > 1 ? x.shape()[1] : 1); ++j)
          if (!(2 * x.get(i, j) == y.get(i, j)) && !(std::fabs(x.get(i, j)) < 1e-30L))
            return "not doubled: " + std::to_string(static_cast<double>(x.get(i, j)));
    }
    return "";
  });
}

}  // namespace
}  // namespace talea::testing
