// What: the elementwise rule, the exact zeros and the ranking.
// Why: see compare.hpp; every comparison is of the form !(error <= bound).
// Never: calls a lane.
#include "support/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "support/eager.hpp"

namespace talea::testing {
namespace {

constexpr int64_t l2_elements = 4096;  // below, a relative L2 is a draw of few numbers

int64_t columns_of(const Array& a) { return a.shape().size() > 1 ? a.shape()[1] : 1; }

Real element(const Array& a, int64_t k) {
  const int64_t columns = columns_of(a);
  return a.get(k / columns, k % columns);
}

Real l2(const std::vector<Real>& values, const std::vector<Real>& truth) {
  Real error = 0, norm = 0;
  for (size_t k = 0; k < truth.size(); ++k) {
    if (!std::isfinite(truth[k])) continue;
    error += (values[k] - truth[k]) * (values[k] - truth[k]);
    norm += truth[k] * truth[k];
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

// NaN against NaN, an infinity against the same infinity, finite against finite.
bool same_kind(Real ours, Real truth) {
  if (std::isnan(truth)) return std::isnan(ours);
  if (std::isinf(truth)) return ours == truth;
  return std::isfinite(ours);
}

bool is_gradient(const std::string& name) { return name == "dx" || name == "dw" || name == "db"; }

const std::vector<Real>& values_of(const Answer& a, const std::string& name) {
  if (name == "loss") return a.loss;
  if (name == "lse") return a.lse;
  if (name == "target_logprob") return a.target_logprob;
  if (name == "entropy") return a.entropy;
  if (name == "dx") return a.dx;
  if (name == "dw") return a.dw;
  return a.db;
}

// Ids of a row in falling order of its true logits, ties to the lowest id.
std::vector<int64_t> ranking(const Case& c, const Answer& truth, int64_t t, int64_t k) {
  std::vector<int64_t> ids(static_cast<size_t>(c.vocab()));
  for (size_t v = 0; v < ids.size(); ++v) ids[v] = static_cast<int64_t>(v);
  const Real* z = truth.logits.data() + t * c.vocab();
  std::partial_sort(ids.begin(), ids.begin() + k, ids.end(),
                    [&](int64_t a, int64_t b) { return z[a] > z[b] || (z[a] == z[b] && a < b); });
  ids.resize(static_cast<size_t>(k));
  return ids;
}

struct Judge {
  const Case& c;
  const CaseOutputs& ours;
  const Yardsticks& y;
  Standing standing;
  Real e;
  std::string complaints;

  void tensor(const std::string& name, const Array& array) {
    if (!array.present()) return;
    if (is_gradient(name) && compare_mutant == CompareMutant::only_losses) return;
    std::vector<const std::vector<Real>*> eager;
    for (const Answer& a : y.eager) eager.push_back(&values_of(a, name));
    const bool rounded_gradient = is_gradient(name) && is_16bit(c.in.hidden.dtype());
    Rule rule{e, is_gradient(name) ? Real(0) : y.truth.largest_logit, noise(name),
              rounded_gradient ? 2 : 0, rounded_gradient};
    if (standing == Standing::yardstick) rule.worst_times = 3, rule.l2 = false;
    if (standing == Standing::yardstick && is_16bit(c.in.hidden.dtype()) && !is_gradient(name))
      rule.e = precision() * (4 + y.truth.largest_logit);
    complaints += compare(name, array, values_of(y.truth, name), eager, rule);
  }

  // Each term carries the rounding of its logit, |z| u, and a few u of its own; summing n of them
  // in turn adds sqrt(n) u (the usual statistical bound).
  Real noise(const std::string& name) const {
    const Answer& a = y.truth;
    if (!is_gradient(name) && name != "loss") return 0;
    const Real terms = name == "dx"   ? a.dx_terms
                       : name == "dw" ? a.dw_terms
                       : name == "db" ? a.db_terms
                                      : a.loss_terms;
    const Real count = static_cast<Real>(name == "dx" ? c.vocab() : c.tokens());
    Real unit = c.in.hidden.dtype() == DType::f64 ? 0x1p-53L : 0x1p-24L;
    if (standing == Standing::yardstick && is_16bit(c.in.hidden.dtype())) unit = precision();
    return std::isfinite(terms) ? unit * (4 + a.largest_logit + std::sqrt(count)) * terms : Real(0);
  }

  void require(bool holds, const std::string& text) {
    if (!holds) complaints += text + "\n";
  }

  // Rows that took no part, and rows of the vocabulary that do not exist.
  void zeros() {
    for (int64_t t = 0; ours.dx.present() && t < c.tokens(); ++t)
      for (int64_t i = 0; y.truth.rows[size_t(t)] == Row::ignored && i < c.hidden(); ++i)
        require(ours.dx.get(t, i) == 0, fmt::format("dx[{}, {}] of an ignored row is not 0", t, i));
    for (int64_t v = c.vocab(); v < c.vocab_stored(); ++v) {
      for (int64_t i = 0; ours.dw.present() && i < c.hidden(); ++i) {
        const Real want = c.accumulate_dw ? c.out.dw.get(v, i) : 0;
        require(ours.dw.get(v, i) == want, fmt::format("dw[{}, {}] of padding changed", v, i));
      }
      const Real want = ours.db.present() && c.accumulate_db ? c.out.db.get(v) : 0;
      require(!ours.db.present() || ours.db.get(v) == want,
              fmt::format("db[{}] of padding changed", v));
    }
  }

  void ranks() {
    const int64_t k = c.top_k();
    for (int64_t t = 0; t < c.tokens(); ++t) {
      const bool ranked =
          y.truth.rows[size_t(t)] == Row::valid && !std::isnan(y.truth.lse[size_t(t)]);
      const auto best = ranked ? ranking(c, y.truth, t, std::max<int64_t>(k, 1))
                               : std::vector<int64_t>(size_t(std::max<int64_t>(k, 1)), -1);
      if (ours.argmax.present()) place(t, "argmax", ours.argmax.integer(t), best[0], ranked);
      for (int64_t j = 0; ours.topk_ids.present() && j < k; ++j)
        place(t, "topk_ids", ours.topk_ids.integer(t, j), best[size_t(j)], ranked);
      std::set<int64_t> distinct;
      for (int64_t j = 0; ranked && ours.topk_ids.present() && j < k; ++j)
        require(distinct.insert(ours.topk_ids.integer(t, j)).second,
                fmt::format("topk_ids of row {} repeat an id", t));
      for (int64_t j = 0; j < k; ++j) {
        const Real none = y.truth.rows[size_t(t)] == Row::ignored ? Real(0) : Real(NAN);
        const Real z = ranked ? logit(t, best[size_t(j)]) : none;
        near(t, "topk_values", ours.topk_values, j, z, precision());
        const Real logp = ranked ? z - y.truth.lse[size_t(t)] : none;
        near(t, "topk_logprobs", ours.topk_logprobs, j, logp, 2 * precision());  // of two numbers
      }
    }
  }

  Real logit(int64_t t, int64_t v) const { return y.truth.logits[size_t(t * c.vocab() + v)]; }
  // Eager arithmetic rounds the logits of 16-bit problems between any two operators: product,
  // scale, bias and the three of the softcap, each by 2^-9 (bf16) or 2^-12 (fp16) at most.
  Real precision() const {
    if (standing == Standing::product) return e;
    const DType dtype = c.in.hidden.dtype();
    return dtype == DType::bf16 ? 0x1p-6L : dtype == DType::f16 ? 0x1p-9L : e;
  }
  Real slack() const { return 2 * precision() * y.truth.largest_logit; }

  // The right id, or one whose true logit cannot be told apart at the working precision.
  void place(int64_t t, const char* name, int64_t id, int64_t want, bool ranked) {
    bool holds = id == want;
    if (!holds && ranked && id >= 0 && id < c.vocab()) {
      holds = std::fabs(logit(t, id) - logit(t, want)) <= slack();  // exact ties: edges_test.cpp
    }
    require(holds, fmt::format("{}: row {} says {}, truth {}", name, t, id, want));
  }

  void near(int64_t t, const char* name, const Array& a, int64_t j, Real want, Real share) {
    if (!a.present()) return;
    const Real got = a.get(t, j);
    const Real room = share * std::max(y.truth.largest_logit, std::fabs(want));
    const bool holds =
        same_kind(got, want) && (!std::isfinite(want) || std::fabs(got - want) <= room);
    require(holds, fmt::format("{}[{}, {}] = {}, truth {}", name, t, j, double(got), double(want)));
  }

  void accuracy() {
    if (!ours.accuracy.present()) return;
    Real hits = 0, valid = 0;
    for (int64_t t = 0; t < c.tokens(); ++t) {
      if (y.truth.rows[size_t(t)] != Row::valid) continue;
      valid += 1;
      // Near ties are judged at argmax; accuracy must agree with what argmax says.
      const int64_t id = ours.argmax.present() ? ours.argmax.integer(t) : y.truth.argmax[size_t(t)];
      hits += id == c.in.targets.integer(t);
    }
    const Real want = hits / valid, got = ours.accuracy.get();
    require(same_kind(got, want) && (!std::isfinite(want) || std::fabs(got - want) <= 1e-6L),
            fmt::format("accuracy = {}, truth {}", double(got), double(want)));
  }
};

}  // namespace

Yardsticks yardsticks(const Case& c) { return {oracle(c), {eager(c, false), eager(c, true)}}; }

std::string compare(const std::string& name, const Array& ours, const std::vector<Real>& truth,
                    const std::vector<const std::vector<Real>*>& eager, const Rule& rule) {
  const auto count = static_cast<int64_t>(truth.size());
  if (ours.elements() != count)
    return fmt::format("{}: {} elements, truth {}\n", name, ours.elements(), count);
  // What the output's dtype cannot hold is an infinity in the truth as well.
  std::vector<Real> held(truth), values(truth);
  Real magnitude = rule.floor_magnitude, worst_eager = 0;
  std::vector<Real> eager_error(truth.size(), 0);
  for (int64_t k = 0; k < count; ++k) {
    const auto i = static_cast<size_t>(k);
    values[i] = element(ours, k);
    if (std::isinf(rounded(ours.dtype(), truth[i]))) held[i] = rounded(ours.dtype(), truth[i]);
    if (!std::isfinite(held[i])) continue;
    magnitude = std::max(magnitude, std::fabs(held[i]));
    for (const auto* other : eager) {
      const Real error = std::fabs((*other)[i] - held[i]);
      if (std::isfinite(error)) eager_error[i] = std::max(eager_error[i], error);
    }
    worst_eager = std::max(worst_eager, eager_error[i]);
  }
  Real e = rule.e * magnitude + rule.noise;
  if (compare_mutant == CompareMutant::tolerance_cannot_fail) e = 50 * magnitude;
  for (int64_t k = 0; k < count; ++k) {
    const auto i = static_cast<size_t>(k);
    const bool blind = compare_mutant == CompareMutant::nan_passes;
    if (!same_kind(values[i], held[i]) && !(blind && std::isnan(values[i])))
      return fmt::format("{}[{}] = {}, truth {}\n", name, k, double(values[i]), double(held[i]));
    if (!std::isfinite(held[i])) continue;
    const Real error = std::fabs(values[i] - held[i]);
    const Real bound =
        rule.worst_times > 0 ? rule.worst_times * worst_eager + e : eager_error[i] + e;
    const bool fails = blind ? error > bound : !(error <= bound);
    if (fails)
      return fmt::format(
          "{}[{}] = {:.9g}, truth {:.9g}: error {:.3g} > bound {:.3g}, magnitude "
          "{:.3g}\n",
          name, k, double(values[i]), double(held[i]), double(error), double(bound),
          double(magnitude));
  }
  if (rule.l2 && count >= l2_elements && compare_mutant != CompareMutant::luck_of_one) {
    Real yard = 0;
    for (const auto* other : eager) yard = std::max(yard, l2(*other, held));
    const Real own = l2(values, held);
    if (!(own <= yard))
      return fmt::format("{}: relative L2 {:.4g}, eager {:.4g}\n", name, double(own), double(yard));
  }
  return "";
}

std::string judge(const Case& c, const CaseOutputs& ours, const Yardsticks& y, Standing standing) {
  Judge j{c, ours, y, standing, is_16bit(c.in.hidden.dtype()) ? 1e-4L : 1e-6L, ""};
  j.tensor("loss", ours.loss);
  j.tensor("lse", ours.lse);
  j.tensor("target_logprob", ours.target_logprob);
  j.tensor("entropy", ours.entropy);
  j.tensor("dx", ours.dx);
  j.tensor("dw", ours.dw);
  j.tensor("db", ours.db);
  j.zeros();
  j.ranks();
  j.accuracy();
  return j.complaints;
}

std::string same_bits(const std::string& name, const Array& a, const Array& b) {
  if (a.present() != b.present() || a.dtype() != b.dtype() || a.shape() != b.shape())
    return name + ": not the same kind of tensor\n";
  for (int64_t k = 0; a.present() && k < a.elements(); ++k) {
    if (is_floating(a.dtype())) {
      const Real x = element(a, k), y = element(b, k);
      const bool same =
          (std::isnan(x) && std::isnan(y)) || (x == y && std::signbit(x) == std::signbit(y));
      if (!same)
        return fmt::format("{}[{}]: {:.17g} and {:.17g} differ\n", name, k, double(x), double(y));
    } else if (a.integer(k / columns_of(a), k % columns_of(a)) !=
               b.integer(k / columns_of(b), k % columns_of(b))) {
      return fmt::format("{}[{}]: ids differ\n", name, k);
    }
  }
  return "";
}

std::string same_bits(const CaseOutputs& a, const CaseOutputs& b) {
  std::string complaints;
  for (const auto& [name, member] : CaseOutputs::members)
    complaints += same_bits(name, a.*member, b.*member);
  return complaints;
}

Real relative_l2(const Array& ours, const std::vector<Real>& truth) {
  std::vector<Real> values(truth);
  for (size_t k = 0; k < truth.size(); ++k) values[k] = element(ours, static_cast<int64_t>(k));
  return l2(values, truth);
}

}  // namespace talea::testing
