// What: selection and index loss of the contract in fp64 loops.
// Why: a formula that can be read beside section 1 of the contract.
// Never: fast, and never with an epsilon under a logarithm or a normaliser.
#include <algorithm>
#include <cmath>

#include "ops/sparse_attention/index_loss.hpp"
#include "ops/sparse_attention/reference/reference.hpp"
#include "ops/sparse_attention/select_rule.hpp"

namespace talea::sparse_attention::reference {
namespace {

double dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

// index_q of one query, all heads: [index heads, index dim].
std::vector<double> query_heads(const Problem& p, const Args& a, int64_t b, int64_t s) {
  std::vector<double> q(static_cast<size_t>(p.index_heads * p.index_dim));
  for (int64_t h = 0; h < p.index_heads; ++h)
    load_vector(a.index_q, a.index_q.at(b, s, h), p.index_dim, q.data() + h * p.index_dim);
  return q;
}

// The products of one key with all heads of a query.
struct Products {
  std::vector<double> key, z;
};

void multiply(const Problem& p, const Args& a, int64_t b, int64_t j, const std::vector<double>& q,
              Products& to) {
  to.key.resize(static_cast<size_t>(p.index_dim));
  to.z.resize(static_cast<size_t>(p.index_heads));
  load_vector(a.index_k, a.index_k.at(b, j), p.index_dim, to.key.data());
  for (int64_t h = 0; h < p.index_heads; ++h)
    to.z[static_cast<size_t>(h)] = dot(q.data() + h * p.index_dim, to.key.data(), p.index_dim);
}

// One query of the loss: its keys, their logits, teacher and gradient of the logits.
struct LossRow {
  std::vector<int64_t> keys;
  std::vector<double> logits, teacher, gradient;
};

void find_keys(const Problem& p, const Args& a, int64_t b, int64_t s, LossRow& r) {
  r.keys.clear();
  if (p.loss_keys == LossKeys::dense) {
    const Bounds bounds = index_bounds(p, a, b, s);
    for (int64_t j = bounds.begin; j < bounds.end; ++j) r.keys.push_back(j);
    return;
  }
  std::vector<ValidSlot> slots;
  valid_slots(p, a, b, s, 0, slots);
  for (const ValidSlot& v : slots) r.keys.push_back(v.row.inner);
}

// Sum over heads of the attention's probabilities over the row's keys, not yet normalised.
void teach(const Problem& p, const Args& a, int64_t b, int64_t s, LossRow& r) {
  const size_t n = r.keys.size();
  r.teacher.assign(n, 0);
  std::vector<double> rows(n * static_cast<size_t>(p.dim)), q(static_cast<size_t>(p.dim)), z(n);
  for (size_t i = 0; i < n; ++i)
    load_key(p, a, {SlotKind::valid, b, r.keys[i]}, 0, rows.data() + i * q.size());
  for (int64_t h = 0; h < p.heads; ++h) {
    load_query(p, a, b, s, h, q.data());
    double max = -INFINITY, sum = 0;
    for (size_t i = 0; i < n; ++i) {
      z[i] = p.scale * dot(q.data(), rows.data() + i * q.size(), p.dim);
      max = z[i] > max || std::isnan(z[i]) ? z[i] : max;
    }
    for (size_t i = 0; i < n; ++i) sum += std::exp(z[i] - max);
    LogSum all = log_sum(max, sum, -INFINITY);
    if (a.saved_lse && !is_own(a.saved_lse.get(b, s, h), max, sum))
      all = {a.saved_lse.get(b, s, h), 0};
    for (size_t i = 0; i < n; ++i) r.teacher[i] += all.share(z[i]);
  }
}

struct Gradients {
  std::vector<double> q, w;
  std::vector<double>* k = nullptr;  // [batch, keys, index dim]
};

void chain(const Problem& p, const Args& a, int64_t b, int64_t s, const LossRow& r,
           const std::vector<double>& q, Gradients& to) {
  to.q.assign(q.size(), 0);
  to.w.assign(static_cast<size_t>(p.index_heads), 0);
  Products z;
  for (size_t i = 0; i < r.keys.size(); ++i) {
    multiply(p, a, b, r.keys[i], q, z);
    const double k_scale = a.index_k_scale ? a.index_k_scale.get(b, r.keys[i]) : 1;
    for (int64_t h = 0; h < p.index_heads; ++h) {
      const double q_scale = a.index_q_scale ? a.index_q_scale.get(b, s, h) : 1;
      const double product = z.z[static_cast<size_t>(h)];
      const bool cut = p.act == Activation::relu && product <= 0;
      to.w[static_cast<size_t>(h)] += r.gradient[i] * k_scale * q_scale * (cut ? 0 : product);
      if (cut) continue;
      // Of the dequantised values: scale times what lies in memory.
      const double dz = r.gradient[i] * a.index_weights.get(b, s, h);
      for (int64_t c = 0; c < p.index_dim; ++c) {
        const auto at = static_cast<size_t>(h * p.index_dim + c);
        to.q[at] += dz * k_scale * z.key[static_cast<size_t>(c)];
        if (to.k)
          (*to.k)[static_cast<size_t>((b * p.keys_stored + r.keys[i]) * p.index_dim + c)] +=
              dz * q_scale * q[at];
      }
    }
  }
}

void write_gradients(const Problem& p, const Args& a, int64_t b, int64_t s, const Gradients& g) {
  for (int64_t h = 0; h < p.index_heads; ++h) {
    if (a.dindex_weights) a.dindex_weights.put(g.w[static_cast<size_t>(h)], b, s, h);
    for (int64_t c = 0; a.dindex_q && c < p.index_dim; ++c)
      a.dindex_q.put(g.q[static_cast<size_t>(h * p.index_dim + c)], b, s, h, c);
  }
}

}  // namespace

void select(const Call& c) {
  const Problem& p = c.problem;
  const Args& a = c.args;
  Products z;
  std::vector<Scored<double>> list;
  c.result.nan_scores = 0;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t s = 0; s < p.queries; ++s) {
      const std::vector<double> q = query_heads(p, a, b, s);
      const Bounds bounds = index_bounds(p, a, b, s);
      list.clear();
      for (int64_t j = bounds.begin; j < bounds.end; ++j) {
        multiply(p, a, b, j, q, z);
        list.push_back({index_logit(p, a, b, s, j, z.z.data()), j});
      }
      c.result.nan_scores += select_top(list, p.slots);
      for (int64_t k = 0; k < p.slots; ++k) {
        const bool has = k < static_cast<int64_t>(list.size());
        const Scored<double> found = has ? list[static_cast<size_t>(k)] : Scored<double>{};
        if (a.selected)
          store_element(a.selected.data, a.selected.dtype, a.selected.at(b, s, 0, k),
                        has ? static_cast<double>(found.key) : -1);
        if (a.selected_scores) a.selected_scores.put(has ? found.score : -INFINITY, b, s, 0, k);
      }
      if (a.selected_length) a.selected_length.put(static_cast<double>(list.size()), b, s);
    }
}

void index_loss(const Call& c) {
  const Problem& p = c.problem;
  const Args& a = c.args;
  const LossScale scale = loss_scale(c);
  std::vector<double> dk;
  if (a.dindex_k) dk.assign(static_cast<size_t>(p.batch * p.keys_stored * p.index_dim), 0);
  LossRow r;
  Gradients to;
  to.k = a.dindex_k ? &dk : nullptr;
  Products z;
  double total = 0;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t s = 0; s < p.queries; ++s) {
      find_keys(p, a, b, s, r);
      const std::vector<double> q = query_heads(p, a, b, s);
      teach(p, a, b, s, r);
      sum_teacher(c, r.teacher);
      r.logits.clear();
      for (const int64_t j : r.keys) {
        multiply(p, a, b, j, q, z);
        r.logits.push_back(index_logit(p, a, b, s, j, z.z.data()));
      }
      const double weight = row_weight(a, b, s) * scale.factor;
      r.gradient = r.logits;
      total += divergence(r.logits, r.teacher, weight, r.gradient);
      chain(p, a, b, s, r, q, to);
      write_gradients(p, a, b, s, to);
    }
  finish_loss(c, scale, total);
  if (!a.dindex_k) return;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t j = 0; j < p.keys_stored; ++j)
      for (int64_t i = 0; i < p.index_dim; ++i) {
        const double sum = dk[static_cast<size_t>((b * p.keys_stored + j) * p.index_dim + i)];
        a.dindex_k.put(a.accumulate_dindex_k ? a.dindex_k.get(b, j, 0, i) + sum : sum, b, j, 0, i);
      }
}

}  // namespace talea::sparse_attention::reference
