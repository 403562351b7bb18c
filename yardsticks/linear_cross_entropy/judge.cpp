// What: judges every output of a case: values, exact zeros, ranking.
// Why: see compare.hpp; one rule for every lane, the suite and `talea check`.
// Never: calls a lane.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "yardsticks/linear_cross_entropy/compare.hpp"

namespace talea::testing {
namespace {

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

// What is NaN or infinite makes elements that are so, too, and those have no error to be judged.
double finite(Real x) { return std::isfinite(x) ? double(x) : 0; }

// Rows of a matrix, and the products of each two of them.
struct Rows {
  int64_t columns = 0;
  std::vector<double> values;

  int64_t count() const { return int64_t(values.size()) / columns; }
  double product(int64_t n, int64_t m) const {
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i)
      sum += values[size_t(n * columns + i)] * values[size_t(m * columns + i)];
    return sum;
  }
  // The sum over all pairs of rows of their product's square: the same of the columns.
  double gram_square() const {
    double sum = 0;
    if (count() <= columns) {
      for (int64_t n = 0; n < count(); ++n)
        for (int64_t m = 0; m <= n; ++m) sum += (m < n ? 2 : 1) * product(n, m) * product(n, m);
      return sum;
    }
    std::vector<double> gram(size_t(columns * columns), 0);
    for (int64_t n = 0; n < count(); ++n)
      for (int64_t i = 0; i < columns; ++i) {
        const double* row = values.data() + n * columns;
        for (int64_t j = 0; j <= i; ++j) gram[size_t(i * columns + j)] += row[i] * row[j];
      }
    for (int64_t i = 0; i < columns; ++i)
      for (int64_t j = 0; j <= i; ++j)
        sum += (j < i ? 2 : 1) * gram[size_t(i * columns + j)] * gram[size_t(i * columns + j)];
    return sum;
  }

  // Over how many directions up to 1,024 of the rows are spread: 1 where all are alike.
  double directions() const {
    Rows some{columns, {}};
    const int64_t step = (count() + 1023) / 1024;
    double sum = 0;
    for (int64_t n = 0; n < count(); n += step) {
      sum += product(n, n);
      const auto row = values.begin() + n * columns;
      some.values.insert(some.values.end(), row, row + columns);
    }
    return sum > 0 ? sum * sum / some.gram_square() : 0;
  }
};

struct Judge {
  const Case& c;
  const CaseOutputs& ours;
  const Yardsticks& y;
  Standing standing;
  Real e;
  std::string complaints;
  std::vector<Real> sizes_of_row{};  // the magnitudes of a row's factors, added up

  void tensor(const std::string& name, const Array& array) {
    if (!array.present()) return;
    if (is_gradient(name) && compare_mutant == CompareMutant::only_losses) return;
    std::vector<const std::vector<Real>*> eager;
    for (const Answer& a : y.eager) eager.push_back(&values_of(a, name));
    Rule rule;
    rule.e = e;
    rule.unit = unit();
    rule.worst_use = &used().floor;
    std::vector<Real> floor, walk;
    if (is_gradient(name)) {
      const Answer& a = y.truth;
      floor = floor_of(name, name == "dx" ? a.dx_floor : name == "dw" ? a.dw_floor : a.db_floor);
      walk = floor_of(name, name == "dx" ? a.dx_walk : name == "dw" ? a.dw_walk : a.db_walk);
      rule.floor = &floor;
      if (!walk.empty()) rule.walk = &walk;
      rule.worst_times = is_16bit(c.in.hidden.dtype()) ? 2 : 0;
      // The lane that is eager on purpose cannot be asked to beat eager in every drawing.
      if (rule.worst_times > 0 && name != "db") rule.l2_times = is_product() ? 1 : 2;
      if (rounds_once() && !(some_once() && name == "db")) {  // which sums what is not rounded
        if (name != "db") rule.luck = luck_of_terms(name);
        rule.terms = [this, name](int64_t k) { return rounded_terms(name, k); };
      }
    } else {
      rule.floor_magnitude = y.truth.largest_logit;
      if (name == "lse" && !y.truth.lse_walk.empty()) rule.walk = &y.truth.lse_walk;
      // z_y and lse, each of logits that this lane rounds by its definition.
      if (logit_unit() > unit()) rule.e += 2 * logit_unit();
    }
    complaints += compare(name, array, values_of(y.truth, name), eager, rule);
  }

  bool is_product() const { return standing != Standing::yardstick; }
  Used& used() const { return is_product() ? used_by_products : used_by_yardstick; }

  std::vector<Real> floor_of(const std::string& name, std::vector<Real> floor) const {
    const Answer& a = y.truth;
    const auto& more = name == "dx"   ? a.dx_subtracted
                       : name == "dw" ? a.dw_subtracted
                                      : a.db_subtracted;
    for (size_t k = 0; !is_product() && k < floor.size(); ++k) floor[k] += more[k] / floor_share;
    if (name == "dx" && rounds_once() && a.rows_alike && !floor.empty()) roundings_alike(floor);
    return floor;
  }

  // The rest is section 4 of decision 0007.
  bool some_once() const { return standing == Standing::small_terms; }
  bool rounds_once() const {
    return (standing == Standing::one_term || some_once()) && is_16bit(c.in.hidden.dtype());
  }
  // Half a step of the one rounding of this logit's gradient; none where two terms of it are kept.
  Real once(int64_t t, int64_t v) const {
    const auto cell = size_t(t * c.vocab() + v);
    if (!some_once()) return half_step(c.in.hidden.dtype(), y.truth.sizes[cell]);
    const Real size = y.truth.factors[cell];
    return size > sizes_of_row[size_t(t)] / 64 ? Real(0) : half_step(c.in.hidden.dtype(), size);
  }

  // Of a weight whose rows are the same numbers all terms round alike, and nothing averages out.
  void roundings_alike(std::vector<Real>& floor) const {
    for (int64_t t = 0; t < c.tokens(); ++t) {
      Real sum = 0;
      for (int64_t v = 0; v < c.vocab(); ++v) sum += once(t, v);
      for (int64_t i = 0; i < c.hidden(); ++i)
        floor[size_t(t * c.hidden() + i)] += sum / unit() * std::fabs(Real(c.in.weight.get(0, i)));
    }
  }

  Real hidden(int64_t t, int64_t i) const { return c.in.hidden.get(t, i); }
  Real weight(int64_t v, int64_t i) const { return c.in.weight.get(v, i); }

  // The same of this gradient times any factor of its row, which is what some lanes round: the
  // step is largest where that lies at the low end of a binade.
  Real once_scaled(int64_t t, int64_t v) const {
    if (some_once()) return once(t, v);
    const Real size = y.truth.sizes[size_t(t * c.vocab() + v)];
    const Real unit = c.in.hidden.dtype() == DType::bf16 ? 0x1p-8L : 0x1p-11L;
    return std::max(once(t, v), unit * std::fabs(size));
  }

  // An element is a sum of terms, each off by a number spread evenly over its half step: five
  // deviations of their sum, and never more than all of them rounded the worst way. In bf16 a term
  // of dW may be rounded once more: the row's factor times its row of hidden, an operand as well.
  Real rounded_terms(const std::string& name, int64_t k) const {
    Real most = 0, squares = 0;
    const auto add = [&](Real half, Real factor) {
      most += finite(half * std::fabs(factor));
      squares += finite(half * half * factor * factor / 3);
    };
    const int64_t row = name == "db" ? k : k / c.hidden(), i = k % c.hidden();
    if (name == "dx")
      for (int64_t v = 0; v < c.vocab(); ++v) add(once_scaled(row, v), weight(v, i));
    const bool twice = name == "dw" && c.in.hidden.dtype() == DType::bf16 && !some_once();
    for (int64_t t = 0; name != "dx" && row < c.vocab() && t < c.tokens(); ++t) {
      add(once_scaled(t, row), name == "db" ? Real(1) : hidden(t, i));
      if (twice) add(once_scaled(t, row), hidden(t, i));
    }
    return std::min(most, 5 * std::sqrt(squares));
  }

  // Five deviations of the difference of two draws of a gradient's squared L2 error; none where
  // more than 1,024 independent roundings make it up. A row of dW is a sum of rows of hidden, one a
  // token, each times a number that is off by one rounding; a row of dX is one of rows of the
  // weight, a word each. The variance of its square is a sum over pairs of those rows.
  Real luck_of_terms(const std::string& name) const {
    const bool by_word = name == "dx";
    const int64_t outer = by_word ? c.tokens() : c.vocab(), d = c.hidden(),
                  inner = by_word ? c.vocab() : c.tokens();
    Rows all{d, std::vector<double>(size_t(inner * d))}, scaled{d, {}};
    std::vector<double> own;
    for (int64_t n = 0; n < inner; ++n) {
      for (int64_t i = 0; i < d; ++i)
        all.values[size_t(n * d + i)] = finite(by_word ? weight(n, i) : hidden(n, i));
      own.push_back(all.product(n, n));
    }
    const auto half = [&](int64_t m, int64_t n) {
      return finite(by_word ? once(m, n) : once(n, m));
    };
    std::vector<double> means(size_t(outer), 0);
    double mean = 0, squares = 0;
    for (int64_t m = 0; m < outer; ++m) {
      for (int64_t n = 0; n < inner; ++n)
        means[size_t(m)] += half(m, n) * half(m, n) * own[size_t(n)] / 3;
      mean += means[size_t(m)], squares += means[size_t(m)] * means[size_t(m)];
    }
    if (squares == 0) return 0;
    // Far more rows and directions than that need no pairs to be counted.
    if (mean * mean / squares * all.directions() >= 4 * 1024) return 0;
    double variance = 0, most = 0;
    for (int64_t m = 0; m < outer; ++m) {
      double worst = 0;
      scaled.values.clear();
      for (int64_t n = 0; n < inner && means[size_t(m)] > 0; ++n) {
        const double s = half(m, n), size = s * s * own[size_t(n)];
        if (s == 0) continue;
        worst += std::sqrt(size);
        variance += (4.0 / 45 - 2.0 / 9) * size * size;  // a row's own pair, for its share below
        for (int64_t i = 0; i < d; ++i) scaled.values.push_back(s * all.values[size_t(n * d + i)]);
      }
      most += worst * worst;
      variance += 2.0 / 9 * scaled.gram_square();
    }
    const double effective = mean * mean / (1.25 * variance);
    return effective >= 1024 ? 0 : std::min(most, 5 * std::sqrt(2 * variance));
  }

  // What one rounding is: of fp32 where the softmax reads the accumulator (fp64 for fp64 problems).
  Real unit() const { return c.in.hidden.dtype() == DType::f64 ? 0x1p-53L : 0x1p-24L; }
  // Eager arithmetic, and so the lane that is meant to be it, rounds 16-bit logits after every
  // operator: product, scale, bias, softcap.
  Real logit_unit() const {
    const DType dtype = c.in.hidden.dtype();
    if (is_product() || !is_16bit(dtype)) return unit();
    const bool scaled = c.options.logit_scale != 1 || c.in.token_scale.present();
    const int operators = 1 + scaled + c.in.bias.present() + (c.options.softcap > 0);
    return operators * (dtype == DType::bf16 ? 0x1p-8L : 0x1p-11L);
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
        // Values belong to the ids beside them.
        const bool named = ranked && ours.topk_ids.present();
        const int64_t id = named ? ours.topk_ids.integer(t, j) : best[size_t(j)];
        if (id < -!ranked || id >= c.vocab()) continue;  // told above
        near(t, j, id, "topk_values", ours.topk_values, Real(0));
        near(t, j, id, "topk_logprobs", ours.topk_logprobs, Real(1));
      }
    }
  }

  // In roundings of fp32 (of fp64 for its problems).
  Real walk(int64_t t, int64_t v) const {
    std::vector<Real> x, w;
    for (int64_t i = 0; i < c.hidden(); ++i) x.push_back(hidden(t, i)), w.push_back(weight(v, i));
    return logit_walk(c, t, v, x.data(), w.data());
  }
  Real logit(int64_t t, int64_t v) const { return y.truth.logits[size_t(t * c.vocab() + v)]; }
  // The right id, or one whose true logit cannot be told apart at the working precision.
  void place(int64_t t, const char* name, int64_t id, int64_t want, bool ranked) {
    bool holds = id == want;
    if (!holds && ranked && id >= 0 && id < c.vocab()) {
      // Each of the two logits is rounded: once, or on the way of its sum. Exact ties:
      // edges_test.cpp.
      const Real gap = std::fabs(logit(t, id) - logit(t, want));
      const Real sums = 5 * floor_share * unit() * std::hypot(walk(t, id), walk(t, want));
      const Real room = std::max(2 * logit_unit() * y.truth.row_largest[size_t(t)], sums);
      holds = gap <= room;
      if (holds) used().tie = std::max(used().tie, gap / room);
    }
    require(holds, fmt::format("{}: row {} says {}, truth {}", name, t, id, want));
  }

  // A logit, or with `shift` 1 its log-probability: the elementwise rule, as for lse.
  void near(int64_t t, int64_t j, int64_t id, const char* name, const Array& a, Real shift) {
    if (!a.present()) return;
    Real want = y.truth.rows[size_t(t)] == Row::ignored ? Real(0) : Real(NAN), room = 0;
    if (id >= 0) {
      want = logit(t, id) - shift * y.truth.lse[size_t(t)];
      for (const Answer& other : y.eager) {
        const Real z = other.logits[size_t(t * c.vocab() + id)];
        const Real error = std::fabs(z - shift * other.lse[size_t(t)] - want);
        if (std::isfinite(error)) room = std::max(room, error);
      }
      const Real plain = e * std::max(y.truth.largest_logit, std::fabs(want));
      const Real error = std::fabs(a.get(t, j) - want);
      // A logit whose terms cancel: `e` of what they leave does not cover the sums on the way.
      const Real walked = error > room + plain ? 5 * floor_share * unit() * walk(t, id) : Real(0);
      if (walked > plain && error <= room + walked)
        used().logit = std::max(used().logit, (error - room) / walked);
      room += std::max(plain, walked);
      if (!ours.topk_ids.present() || !is_product())
        room += 2 * logit_unit() * y.truth.row_largest[size_t(t)];
    }
    const Real got = a.get(t, j);
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

std::string judge(const Case& c, const CaseOutputs& ours, const Yardsticks& y, Standing standing) {
  Judge j{c, ours, y, standing, is_16bit(c.in.hidden.dtype()) ? 1e-4L : 1e-6L, ""};
  for (size_t first = 0; standing == Standing::small_terms && first < y.truth.factors.size();
       first += size_t(c.vocab()))
    j.sizes_of_row.push_back(std::accumulate(y.truth.factors.begin() + int64_t(first),
                                             y.truth.factors.begin() + int64_t(first) + c.vocab(),
                                             Real(0)));
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

}  // namespace talea::testing
