// What: scores, selections and the index loss in fp64, and the judgement of a lane's.
// Why: the rule of section 1 of the contract, derived a second time.
// Never: shares code with src.
#include <algorithm>
#include <cmath>
#include <set>

#include "yardsticks/sparse_attention/index_case.hpp"

namespace talea::yardsticks::sparse_attention {
namespace {

double q_number(const IndexCase& c, int64_t b, int64_t s, int64_t h, int64_t x) {
  return c.q.get(b, s, h, x) * (c.q_scale ? c.q_scale.get(b, s, h) : 1);
}
double k_number(const IndexCase& c, int64_t b, int64_t j, int64_t x) {
  return c.k.get(b, j, x) * (c.k_scale ? c.k_scale.get(b, j) : 1);
}

// rough: of dequantised values rounded to bf16, as eager code multiplies FP8.
double product(const IndexCase& c, int64_t b, int64_t s, int64_t h, int64_t j, bool rough = false) {
  double z = 0;
  for (int64_t x = 0; x < c.dim(); ++x) {
    const double q = q_number(c, b, s, h, x), k = k_number(c, b, j, x);
    z += rough ? rounded(DType::bf16, q) * rounded(DType::bf16, k) : q * k;
  }
  return z;
}

double active(const IndexCase& c, double z) {
  const bool relu = (c.attention_q ? c.loss.act : c.options.act) == sa::Activation::relu;
  return relu && z <= 0 ? 0 : z;
}

// Sum of the magnitudes of what a score adds up.
double magnitude(const IndexCase& c, int64_t b, int64_t s, int64_t j) {
  double sum = 0;
  for (int64_t h = 0; h < c.heads(); ++h) {
    double z = 0;
    for (int64_t x = 0; x < c.dim(); ++x)
      z += std::abs(q_number(c, b, s, h, x) * k_number(c, b, j, x));
    sum += std::abs(c.weights.get(b, s, h)) * z;
  }
  return sum;
}

double score(const IndexCase& c, int64_t b, int64_t s, int64_t j, bool rough) {
  double sum = 0;
  for (int64_t h = 0; h < c.heads(); ++h)
    sum += c.weights.get(b, s, h) * active(c, product(c, b, s, h, j, rough));
  return sum;
}

double largest_score(const IndexCase& c) {
  double most = 0;
  for (int64_t b = 0; b < c.batch(); ++b)
    for (int64_t s = 0; s < c.queries(); ++s) {
      const auto [low, high] = key_bounds(c, b, s);
      for (int64_t j = low; j < high; ++j) most = std::max(most, std::abs(index_score(c, b, s, j)));
    }
  return most;
}

}  // namespace

std::pair<int64_t, int64_t> key_bounds(const IndexCase& c, int64_t b, int64_t s) {
  int64_t first = 0, last = c.keys(), number = s;
  if (c.cu_q) {
    first = last = 0;
    for (int64_t i = 0; i + 1 < c.cu_q.shape()[0]; ++i)
      if (s >= c.cu_q.integer(i) && s < c.cu_q.integer(i + 1)) {
        first = c.cu_k.integer(i), last = c.cu_k.integer(i + 1);
        number = s - c.cu_q.integer(i);
      }
  }
  int64_t low = first, high = last;
  if (c.begin) low = std::max(low, c.begin.integer(b, s));
  if (c.end) high = std::min(high, c.end.integer(b, s));
  const int64_t base = c.options.q_position_base;
  if (c.options.causal) {
    const int64_t t = c.positions ? c.positions.integer(b, s) : base + number;
    high = std::min(high, first + (t + 1) / c.options.key_stride);
  }
  return {low, std::max(low, high)};
}

double index_score(const IndexCase& c, int64_t b, int64_t s, int64_t j) {
  return score(c, b, s, j, false);
}

std::string judge_selection(const IndexCase& c, const Selected& got, bool narrow_sums) {
  const double largest = narrow_sums ? largest_score(c) : 0;
  const auto room_of = [&](int64_t b, int64_t s, int64_t j) {
    if (!narrow_sums) return 1e-6 * magnitude(c, b, s, j);
    return std::abs(score(c, b, s, j, true) - index_score(c, b, s, j)) + 1e-4 * largest;
  };
  std::string where;
  const auto complain = [&](const std::string& text) { return got.damage + where + text; };
  if (!got.damage.empty()) return got.damage;
  for (int64_t b = 0; b < c.batch(); ++b)
    for (int64_t s = 0; s < c.queries(); ++s) {
      where = "batch " + std::to_string(b) + " query " + std::to_string(s) + ": ";
      const auto at = static_cast<size_t>(b * c.queries() + s);
      const auto [low, high] = key_bounds(c, b, s);
      const int64_t n = got.length[at], want = std::min(c.top_k, high - low);
      if (n != want) return complain(std::to_string(n) + " selected for " + std::to_string(want));
      std::set<int64_t> chosen;
      double least = INFINITY, room = 0;
      for (int64_t k = 0; k < c.top_k; ++k) {
        const auto slot = at * static_cast<size_t>(c.top_k) + static_cast<size_t>(k);
        const int64_t j = got.indices[slot];
        if (k >= n) {
          if (j != -1 || got.scores[slot] != -INFINITY) return complain("a slot behind is not -1");
          continue;
        }
        if (j < low || j >= high) return complain("a key outside the bounds");
        if (k > 0 && j <= got.indices[slot - 1]) return complain("not ascending");
        const double right = index_score(c, b, s, j), e = room_of(b, s, j);
        if (!(std::abs(got.scores[slot] - right) <= e)) return complain("a score is wrong");
        chosen.insert(j);
        least = std::min(least, right);
        room = std::max(room, e);
      }
      for (int64_t j = low; j < high; ++j)
        if (!chosen.count(j) && n > 0 && index_score(c, b, s, j) > least + room + room_of(b, s, j))
          return complain("key " + std::to_string(j) + " is larger than one selected");
    }
  return "";
}

namespace {

std::vector<int64_t> loss_keys(const IndexCase& c, int64_t b, int64_t s) {
  std::vector<int64_t> keys;
  if (c.indices) {
    for (int64_t k = 0; k < c.indices.shape()[3]; ++k) {
      const int64_t j = c.indices.integer(b, s, 0, k);
      const bool sees = !c.loss.causal ||
                        j <= (c.positions ? c.positions.integer(b, s) : c.loss.q_position_base + s);
      if (j >= 0 && j < c.keys() && sees) keys.push_back(j);
    }
    return keys;
  }
  const auto [low, high] = key_bounds(c, b, s);
  for (int64_t j = low; j < high; ++j) keys.push_back(j);
  return keys;
}

// softmax over the keys of one attention head.
std::vector<double> attention(const IndexCase& c, const std::vector<int64_t>& keys, int64_t b,
                              int64_t s, int64_t h) {
  const int64_t d = c.attention_q.shape()[3];
  std::vector<double> p;
  double max = -INFINITY, sum = 0;
  for (const int64_t j : keys) {
    double z = 0;
    for (int64_t x = 0; x < d; ++x) z += c.attention_q.get(b, s, h, x) * c.kv.get(b, j, 0, x);
    p.push_back(z * (c.loss.scale == 0 ? 1 / std::sqrt(static_cast<double>(d)) : c.loss.scale));
    max = std::max(max, p.back());
  }
  for (double& x : p) sum += x = std::exp(x - max);
  for (double& x : p) x /= sum;
  return p;
}

}  // namespace

LossNumbers loss_truth(const IndexCase& c) {
  LossNumbers n;
  n.dq.assign(static_cast<size_t>(c.q.elements()), 0);
  n.dk.assign(static_cast<size_t>(c.k.elements()), 0);
  n.dw.assign(static_cast<size_t>(c.weights.elements()), 0);
  double rows = 0;
  for (int64_t b = 0; b < c.batch(); ++b)
    for (int64_t s = 0; s < c.queries(); ++s)
      rows += (!c.row_weight || c.row_weight.get(b, s) != 0) && !loss_keys(c, b, s).empty();
  if (c.loss.denominator == sa::LossDenominator::given) rows = c.loss.denominator_value;
  for (int64_t b = 0; b < c.batch(); ++b)
    for (int64_t s = 0; s < c.queries(); ++s) {
      const std::vector<int64_t> keys = loss_keys(c, b, s);
      const double weight =
          rows > 0 ? c.loss.coeff / rows * (c.row_weight ? c.row_weight.get(b, s) : 1) : 0;
      if (keys.empty() || weight == 0) continue;
      std::vector<double> teacher(keys.size()), score;
      for (int64_t h = 0; h < c.attention_q.shape()[2]; ++h) {
        const std::vector<double> p = attention(c, keys, b, s, h);
        for (size_t i = 0; i < keys.size(); ++i)
          teacher[i] += p[i] / static_cast<double>(c.attention_q.shape()[2]);
      }
      double max = -INFINITY, sum = 0;
      for (const int64_t j : keys)
        score.push_back(index_score(c, b, s, j)), max = std::max(max, score.back());
      for (const double x : score) sum += std::exp(x - max);
      for (size_t i = 0; i < keys.size(); ++i) {
        const double log_p = score[i] - max - std::log(sum);
        if (teacher[i] > 0) n.loss += weight * teacher[i] * (std::log(teacher[i]) - log_p);
        const double g = weight * (std::exp(log_p) - teacher[i]);
        for (int64_t h = 0; h < c.heads(); ++h) {
          const double z = product(c, b, s, h, keys[i]), w = c.weights.get(b, s, h);
          const auto at = static_cast<size_t>((b * c.queries() + s) * c.heads() + h);
          n.dw[at] += g * active(c, z);
          if (active(c, z) != z) continue;
          for (int64_t x = 0; x < c.dim(); ++x) {
            n.dq[at * static_cast<size_t>(c.dim()) + static_cast<size_t>(x)] +=
                g * w * k_number(c, b, keys[i], x);
            n.dk[static_cast<size_t>((b * c.keys() + keys[i]) * c.dim() + x)] +=
                g * w * q_number(c, b, s, h, x);
          }
        }
      }
    }
  return n;
}

std::string judge_loss(const IndexCase& c, const LossNumbers& ours) {
  const LossNumbers right = loss_truth(c);
  std::string text;
  if (!(std::abs(ours.loss - right.loss) <= 1e-5 * std::max(std::abs(right.loss), 1e-3)))
    text += "loss " + std::to_string(ours.loss) + " for " + std::to_string(right.loss) + "; ";
  const auto check = [&](const char* name, const std::vector<double>& a,
                         const std::vector<double>& b) {
    double largest = 1e-6;
    for (const double x : b) largest = std::max(largest, std::abs(x));
    for (size_t i = 0; i < b.size(); ++i)
      if (!(std::abs(a[i] - b[i]) <= 2e-5 * largest)) {
        text += std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(a[i]) +
                " for " + std::to_string(b[i]) + "; ";
        return;
      }
  };
  check("dindex_q", ours.dq, right.dq);
  check("dindex_k", ours.dk, right.dk);
  check("dindex_weights", ours.dw, right.dw);
  return text;
}

}  // namespace talea::yardsticks::sparse_attention
