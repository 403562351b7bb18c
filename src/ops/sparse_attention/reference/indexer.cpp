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
void load_heads(const Problem& p, const Args& a, int64_t b, int64_t s, List<double>& q) {
  q.resize(static_cast<size_t>(p.index_heads * p.index_dim));
  for (int64_t h = 0; h < p.index_heads; ++h)
    load_vector(a.index_q, a.index_q.at(b, s, h), p.index_dim, q.data() + h * p.index_dim);
}

// The products of one key with all heads of a query.
struct Products {
  List<double> key, z;

  Products(const Problem& p, Arena& arena) : key(arena, p.index_dim), z(arena, p.index_heads) {}
};

void multiply(const Problem& p, const Args& a, int64_t b, int64_t j, const List<double>& q,
              Products& to) {
  to.key.resize(static_cast<size_t>(p.index_dim));
  to.z.resize(static_cast<size_t>(p.index_heads));
  load_vector(a.index_k, a.index_k.at(b, j), p.index_dim, to.key.data());
  for (int64_t h = 0; h < p.index_heads; ++h)
    to.z[static_cast<size_t>(h)] = dot(q.data() + h * p.index_dim, to.key.data(), p.index_dim);
}

struct Gradients {
  List<double> q, w, k;  // k: [batch, keys, index dim], or nothing
};

// One query of the loss: its keys, their logits, teacher and gradient of the logits; and what all
// share.
struct LossRow {
  List<ValidSlot> slots;
  List<int64_t> keys;
  List<double> logits, teacher, gradient, attention_logits, rows, q, index_q;
  Products products;
  Gradients to;

  static int64_t most(const Problem& p) {
    return p.loss_keys == LossKeys::dense ? p.keys : p.slots;
  }
  LossRow(const Problem& p, Arena& arena)
      : slots(arena, p.loss_keys == LossKeys::dense ? 0 : p.slots),
        keys(arena, most(p)),
        logits(arena, most(p)),
        teacher(arena, most(p)),
        gradient(arena, most(p)),
        attention_logits(arena, most(p)),
        rows(arena, most(p) * p.dim),
        q(arena, p.dim),
        index_q(arena, p.index_heads * p.index_dim),
        products(p, arena),
        to{{arena, p.index_heads * p.index_dim},
           {arena, p.index_heads},
           {arena, p.wants_dindex_k ? p.batch * p.keys_stored * p.index_dim : 0}} {}
};

void find_keys(const Problem& p, const Args& a, int64_t b, int64_t s, LossRow& r) {
  r.keys.clear();
  if (p.loss_keys == LossKeys::dense) {
    const Bounds bounds = index_bounds(p, a, b, s);
    for (int64_t j = bounds.begin; j < bounds.end; ++j) r.keys.push_back(j);
    return;
  }
  valid_slots(p, a, b, s, 0, r.slots);
  for (const ValidSlot& v : r.slots) r.keys.push_back(v.row.inner);
}

// Sum over heads of the attention's probabilities over the row's keys, not yet normalised.
void teach(const Problem& p, const Args& a, int64_t b, int64_t s, LossRow& r) {
  const size_t n = r.keys.size();
  r.teacher.assign(n, 0);
  List<double>&rows = r.rows, &q = r.q, &z = r.attention_logits;
  rows.resize(n * static_cast<size_t>(p.dim));
  q.resize(static_cast<size_t>(p.dim));
  z.resize(n);
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

void chain(const Problem& p, const Args& a, int64_t b, int64_t s, LossRow& r) {
  const List<double>& q = r.index_q;
  Gradients& to = r.to;
  Products& z = r.products;
  to.q.assign(q.size(), 0);
  to.w.assign(static_cast<size_t>(p.index_heads), 0);
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
        if (!to.k.empty())
          to.k[static_cast<size_t>((b * p.keys_stored + r.keys[i]) * p.index_dim + c)] +=
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

// All that a selection keeps.
struct Candidates {
  List<double> q;
  Products products;
  List<Scored<double>> list;

  Candidates(const Problem& p, Arena& arena)
      : q(arena, p.index_heads * p.index_dim), products(p, arena), list(arena, p.keys) {}
};

}  // namespace

int64_t index_bytes(const Problem& p) {
  Arena arena;
  if (p.pass == Pass::select)
    static_cast<void>(Candidates(p, arena));
  else
    static_cast<void>(LossRow(p, arena));
  return arena.bytes();
}

void select(const Call& c) {
  const Problem& p = c.problem;
  const Args& a = c.args;
  Arena arena(c.workspace);
  Candidates found_keys(p, arena);
  List<Scored<double>>& list = found_keys.list;
  Products& z = found_keys.products;
  c.result.nan_scores = 0;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t s = 0; s < p.queries; ++s) {
      load_heads(p, a, b, s, found_keys.q);
      const Bounds bounds = index_bounds(p, a, b, s);
      list.clear();
      for (int64_t j = bounds.begin; j < bounds.end; ++j) {
        multiply(p, a, b, j, found_keys.q, z);
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
  Arena arena(c.workspace);
  LossRow r(p, arena);
  List<double>& dk = r.to.k;
  if (a.dindex_k) dk.assign(static_cast<size_t>(p.batch * p.keys_stored * p.index_dim), 0);
  double total = 0;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t s = 0; s < p.queries; ++s) {
      find_keys(p, a, b, s, r);
      load_heads(p, a, b, s, r.index_q);
      teach(p, a, b, s, r);
      sum_teacher(c, {r.teacher.data(), r.teacher.size()});
      r.logits.clear();
      for (const int64_t j : r.keys) {
        multiply(p, a, b, j, r.index_q, r.products);
        r.logits.push_back(index_logit(p, a, b, s, j, r.products.z.data()));
      }
      const double weight = row_weight(a, b, s) * scale.factor;
      const size_t n = r.keys.size();
      r.gradient.resize(n);
      total +=
          divergence({r.logits.data(), n}, {r.teacher.data(), n}, weight, {r.gradient.data(), n});
      chain(p, a, b, s, r);
      write_gradients(p, a, b, s, r.to);
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
