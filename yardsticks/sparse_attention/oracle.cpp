// What: the truth of a case in fp64: dense over keys, each weighed by how often it is named.
// Why: section 4 of the contract, derived a second time in another form than the lanes'.
// Never: shares code with src.
#include "yardsticks/sparse_attention/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

namespace talea::yardsticks::sparse_attention {
namespace {

// The sequence of query s: rows [first, last) of kv and the query's number within it.
struct Own {
  int64_t first = 0, last = 0, number = 0;
};

Own own_sequence(const Case& c, int64_t b, int64_t s) {
  if (c.table) return {0, std::max<int64_t>(c.lengths.integer(b), 0), s};
  if (!c.cu_q) return {0, c.kv.shape()[1], s};
  for (int64_t i = 0; i + 1 < c.cu_q.shape()[0]; ++i)
    if (s >= c.cu_q.integer(i) && s < c.cu_q.integer(i + 1))
      return {c.cu_k.integer(i), c.cu_k.integer(i + 1), s - c.cu_q.integer(i)};
  return {};
}

}  // namespace

int64_t named_row(const Case& c, int64_t b, int64_t s, int64_t g, int64_t k) {
  constexpr int64_t absent = -1, foreign = -2;
  if (c.topk_length && k >= c.topk_length.integer(b, s)) return absent;
  const int64_t index = c.indices.integer(b, s, g, k), inner = c.kv.shape()[1];
  if (index == -1) return absent;
  if (c.options.index_space == sa::IndexSpace::slots)
    return index < 0 || index >= c.kv.shape()[0] * inner ? foreign : index;
  const Own own = own_sequence(c, b, s);
  int64_t position = index;
  if (c.options.index_space == sa::IndexSpace::rows) {
    if (index < 0 || index >= inner) return foreign;
    if (index < own.first || index >= own.last) return absent;
    position = index - own.first;
  } else if (index < 0 || index >= own.last - own.first) {
    return foreign;
  }
  int64_t page = 0;
  if (c.table) {
    if (position / inner >= c.table.shape()[1]) return foreign;
    page = c.table.integer(b, position / inner);
    if (page < 0 || page >= c.kv.shape()[0]) return foreign;
  }
  const int64_t at =
      c.positions ? c.positions.integer(b, s) : c.options.q_position_base + own.number;
  if (c.options.causal && position > at) return absent;
  return c.table ? page * inner + position % inner : b * inner + own.first + position;
}

double kv_value(const Case& c, int64_t row, int64_t g, int64_t column) {
  const int64_t o = row / c.kv.shape()[1], r = row % c.kv.shape()[1];
  if (c.options.kv_storage == sa::KvStorage::fp8_656) {
    const std::byte* at = c.kv.bytes(o, r, g);
    if (column >= 512) return decode(DType::bf16, at + 528 + 2 * (column - 512));
    float scale;
    std::memcpy(&scale, at + 512 + 4 * (column / 128), 4);
    return static_cast<double>(scale) * decode(DType::f8_e4m3, at + column);
  }
  const double x = c.kv.get(o, r, g, column);
  if (!c.kv_scale) return x;
  const size_t rank = c.kv_scale.shape().size();
  return x * c.kv_scale.get(rank ? o : 0, rank ? r : 0, rank == 3 ? column / 128 : 0);
}

double q_value(const Case& c, int64_t b, int64_t s, int64_t h, int64_t column) {
  const double x = c.q.get(b, s, h, column);
  return c.q_scale ? x * c.q_scale.get(b, s, h) : x;
}

namespace {

struct Weighed {
  int64_t row = 0;
  double times = 0;
};

// The keys of a query and group, each once.
std::vector<Weighed> keys_of(const Case& c, int64_t b, int64_t s, int64_t g, Numbers& n) {
  std::map<int64_t, double> times;
  for (int64_t k = 0; k < c.slots(); ++k) {
    const int64_t row = named_row(c, b, s, g, k);
    if (row >= 0) ++times[row], ++n.valid;
    if (row != -2) continue;
    ++n.foreign;
    if (n.first_foreign < 0)
      n.first_foreign = ((b * c.queries() + s) * c.groups() + g) * c.slots() + k;
  }
  std::vector<Weighed> list;
  for (const auto& [row, count] : times) list.push_back({row, count});
  return list;
}

// One (query, head), dense over its keys.
struct Head {
  size_t at = 0;  // of [B, S, H]
  std::vector<double> q, d_o, score, p, with_sink;
  double max = -INFINITY, lse = INFINITY, sink = -INFINITY, sink_share = 0;
  std::vector<double> o;
};

void scores(const Case& c, const std::vector<Weighed>& keys, const std::vector<double>& rows,
            Head& r, Numbers& n) {
  const auto d = static_cast<size_t>(c.dim());
  r.score.assign(keys.size(), 0);
  r.max = -INFINITY;
  for (size_t i = 0; i < keys.size(); ++i) {
    for (size_t x = 0; x < d; ++x) r.score[i] += r.q[x] * rows[i * d + x];
    r.score[i] *= c.scale();
    if (!(r.score[i] <= r.max)) r.max = std::isnan(r.max) ? r.max : r.score[i];
    if (std::isfinite(r.score[i]))
      n.largest_logit = std::max(n.largest_logit, std::abs(r.score[i]));
  }
}

void probabilities(const Case& c, const std::vector<Weighed>& keys, const std::vector<double>& rows,
                   Head& r) {
  const auto d = static_cast<size_t>(c.dim()), v = static_cast<size_t>(c.value_dim());
  r.o.assign(v, 0);
  r.p.assign(keys.size(), 0);
  r.with_sink.assign(keys.size(), 0);
  r.lse = INFINITY;
  r.sink_share = 0;
  if (keys.empty()) return;
  const bool sunk = r.sink > -INFINITY;
  if (r.max == -INFINITY && sunk) {
    r.lse = -INFINITY;
    r.sink_share = 1;
    for (double& p : r.p) p = NAN;  // exp(-Inf - lse): only d_lse meets it
    return;
  }
  double sum = 0;
  for (size_t i = 0; i < keys.size(); ++i) sum += keys[i].times * std::exp(r.score[i] - r.max);
  r.lse = std::isnan(sum) ? NAN : r.max + std::log(sum);
  // The share that the sink leaves: 1 / (1 + e^(sink - lse)).
  const double left = sunk || std::isnan(r.sink) ? 1 / (1 + std::exp(r.sink - r.lse)) : 1;
  r.sink_share = sunk || std::isnan(r.sink) ? 1 / (1 + std::exp(r.lse - r.sink)) : 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    r.p[i] = std::exp(r.score[i] - r.max) / sum;
    r.with_sink[i] = r.p[i] * left;
    for (size_t x = 0; x < v; ++x) r.o[x] += keys[i].times * r.with_sink[i] * rows[i * d + x];
  }
}

void gradients(const Case& c, const std::vector<Weighed>& keys, const std::vector<double>& rows,
               const Head& r, double d_lse, int64_t g, double* dq, Numbers& n, int64_t h,
               const StoredO* stored) {
  const auto d = static_cast<size_t>(c.dim()), v = static_cast<size_t>(c.value_dim());
  double delta = 0;
  for (size_t x = 0; x < v; ++x) {
    const size_t at = r.at * v + x;
    double o = stored ? stored->o[at] : r.o[x];
    if (stored && !stored->residual.empty()) o += stored->residual[at];
    delta += o * r.d_o[x];
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    double dp = 0;
    for (size_t x = 0; x < v; ++x) dp += r.d_o[x] * rows[i * d + x];
    const double term = std::abs(c.scale() * r.with_sink[i] * dp);
    if (std::isfinite(term))
      for (size_t x = 0; x < d; ++x) {
        n.dq_term = std::max(n.dq_term, term * std::abs(rows[i * d + x]));
        n.dkv_term = std::max(n.dkv_term, term * std::abs(r.q[x]));
      }
    double ds = r.with_sink[i] * (dp - delta);
    if (c.d_lse) ds += r.p[i] * d_lse;
    ds *= keys[i].times * c.scale();
    double* dk = n.dkv.data() + (keys[i].row * c.groups() + g) * c.dim();
    for (size_t x = 0; x < d; ++x) {
      dq[x] += ds * rows[i * d + x];
      dk[x] += ds * r.q[x];
      if (x < v) dk[x] += keys[i].times * r.with_sink[i] * r.d_o[x];
    }
  }
  if (keys.empty() || !c.sink) return;
  n.d_sink[static_cast<size_t>(h)] -= r.sink_share * delta;
  n.d_sink_squares[static_cast<size_t>(h)] += r.sink_share * delta * r.sink_share * delta;
}

void size_numbers(const Case& c, Numbers& n) {
  const auto rows = static_cast<size_t>(c.batch() * c.queries() * c.heads());
  n.lse.assign(rows, 0);
  n.row_max.assign(rows, 0);
  n.dq.assign(rows * static_cast<size_t>(c.dim()), 0);
  n.o.assign(rows * static_cast<size_t>(c.value_dim()), 0);
  n.dkv.assign(static_cast<size_t>(c.kv.shape()[0] * c.kv.shape()[1] * c.groups() * c.dim()), 0);
  n.d_sink.assign(static_cast<size_t>(c.heads()), 0);
  n.d_sink_squares = n.d_sink;
}

}  // namespace

Numbers truth(const Case& c, const StoredO* stored) {
  Numbers n;
  size_numbers(c, n);
  Head r;
  const auto d = static_cast<size_t>(c.dim()), v = static_cast<size_t>(c.value_dim());
  const int64_t share = c.heads() / std::max<int64_t>(c.groups(), 1);
  for (int64_t b = 0; b < c.batch(); ++b)
    for (int64_t s = 0; s < c.queries(); ++s)
      for (int64_t g = 0; g < c.groups(); ++g) {
        const std::vector<Weighed> keys = keys_of(c, b, s, g, n);
        std::vector<double> rows(keys.size() * d);
        for (size_t i = 0; i < keys.size(); ++i)
          for (size_t x = 0; x < d; ++x)
            rows[i * d + x] = kv_value(c, keys[i].row, g, static_cast<int64_t>(x));
        for (int64_t h = g * share; h < (g + 1) * share; ++h) {
          const auto at = static_cast<size_t>((b * c.queries() + s) * c.heads() + h);
          r.at = at;
          r.q.assign(d, 0);
          for (size_t x = 0; x < d; ++x) r.q[x] = q_value(c, b, s, h, static_cast<int64_t>(x));
          r.sink = c.sink ? c.sink.get(h) : -INFINITY;
          scores(c, keys, rows, r, n);
          probabilities(c, keys, rows, r);
          n.lse[at] = r.lse;
          n.row_max[at] = r.max;
          std::copy(r.o.begin(), r.o.end(), n.o.begin() + static_cast<int64_t>(at * v));
          if (!c.backward()) continue;
          r.d_o.assign(v, 0);
          for (size_t x = 0; x < v && c.d_o; ++x)
            r.d_o[x] = c.d_o.get(b, s, h, static_cast<int64_t>(x));
          gradients(c, keys, rows, r, c.d_lse ? c.d_lse.get(b, s, h) : 0, g, n.dq.data() + at * d,
                    n, h, c.saved ? stored : nullptr);
        }
      }
  if (c.accumulate) {
    const std::vector<double> before = c.dkv_before.numbers();
    for (size_t i = 0; i < before.size(); ++i) n.dkv[i] += before[i];
  }
  return n;
}

}  // namespace talea::yardsticks::sparse_attention
