// What: forward and backward of the contract in fp64 loops over slots.
// Why: a formula that can be read beside section 4 of the contract.
// Never: fast.
#include <algorithm>
#include <cmath>

#include "ops/sparse_attention/reference/reference.hpp"

namespace talea::sparse_attention::reference {
namespace {

// All that one query and group share: the keys of its valid slots.
struct Keys {
  List<ValidSlot> slots;
  List<double> rows;  // [valid, dim]
};

void load_keys(const Problem& p, const Args& a, int64_t b, int64_t s, int64_t g, Keys& keys) {
  valid_slots(p, a, b, s, g, keys.slots);
  keys.rows.resize(keys.slots.size() * static_cast<size_t>(p.dim));
  for (size_t i = 0; i < keys.slots.size(); ++i)
    load_key(p, a, keys.slots[i].row, g, keys.rows.data() + i * static_cast<size_t>(p.dim));
}

double dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

struct Row {
  List<double> q, logits, o;
  double max = -INFINITY, lse = INFINITY, sink = -INFINITY;
  double sum = 0;               // of exp(logit - max)
  LogSum all = {}, whole = {};  // lse; with the sink
};

// lse and row_max never feel the sink; a NaN row has lse NaN.
void softmax(const Problem& p, const Keys& keys, Row& r) {
  const size_t n = keys.slots.size();
  r.o.assign(static_cast<size_t>(p.value_dim), 0);
  r.max = -INFINITY;
  r.lse = INFINITY;
  r.sum = 0;
  r.all = r.whole = {INFINITY, 0};
  if (n == 0) return;
  for (const double s : r.logits) r.max = s > r.max || std::isnan(s) ? s : r.max;
  const bool weightless = r.max == -INFINITY && r.sink > -INFINITY;
  if (weightless) {
    r.lse = -INFINITY;
    r.all = {-INFINITY, 0};
    r.whole = {r.sink, 0};
    return;
  }
  for (const double s : r.logits) r.sum += std::exp(s - r.max);
  r.lse = std::isnan(r.sum) ? NAN : r.max + std::log(r.sum);
  r.all = log_sum(r.max, r.sum, -INFINITY);
  r.whole = log_sum(r.max, r.sum, r.sink);
  for (size_t i = 0; i < n; ++i) {
    const double weight = r.whole.share(r.logits[i]);
    const double* v = keys.rows.data() + i * static_cast<size_t>(p.dim);
    for (int64_t c = 0; c < p.value_dim; ++c) r.o[static_cast<size_t>(c)] += weight * v[c];
  }
  if (!std::isnan(r.whole.base)) return;
  std::fill(r.o.begin(), r.o.end(), NAN);
}

void logits(const Call& c, const Keys& keys, int64_t b, int64_t s, int64_t h, Row& r) {
  const Problem& p = c.problem;
  r.q.resize(static_cast<size_t>(p.dim));
  load_query(p, c.args, b, s, h, r.q.data());
  r.sink = c.args.sink ? c.args.sink.get(h) : -INFINITY;
  r.logits.resize(keys.slots.size());
  for (size_t i = 0; i < r.logits.size(); ++i)
    r.logits[i] =
        p.scale * dot(r.q.data(), keys.rows.data() + i * static_cast<size_t>(p.dim), p.dim);
}

void write_row(const Args& a, int64_t b, int64_t s, int64_t h, const Row& r) {
  for (size_t c = 0; c < r.o.size(); ++c) {
    const auto column = static_cast<int64_t>(c);
    if (a.o) a.o.put(r.o[c], b, s, h, column);
    if (a.o_residual) a.o_residual.put(r.o[c] - a.o.get(b, s, h, column), b, s, h, column);
  }
  if (a.lse) a.lse.put(r.lse, b, s, h);
  if (a.row_max) a.row_max.put(r.max, b, s, h);
}

// The sum of gradients of kv in fp64, [outer, inner, group, dim].
struct KeyGradient {
  int64_t outer = 0, inner = 0;
  List<double> sum;
};

struct Upstream {
  List<double> d_o;
  double d_lse = 0;
};

// All that a call keeps, in the workspace.
struct Room {
  Keys keys;
  Row row;
  Upstream up;
  List<double> dq, d_sink;
  KeyGradient dkv;

  Room(const Problem& p, Arena& arena)
      : keys{{arena, p.slots}, {arena, p.slots * p.dim}},
        row{.q = {arena, p.dim}, .logits = {arena, p.slots}, .o = {arena, p.value_dim}},
        up{{arena, p.pass == Pass::backward ? p.value_dim : 0}},
        dq(arena, p.pass == Pass::backward ? p.dim : 0),
        d_sink(arena, p.pass == Pass::backward ? p.heads : 0),
        dkv{.outer = is_paged(p) ? p.pages : p.batch,
            .inner = is_paged(p) ? p.page_rows : p.keys_stored,
            .sum = {arena, dkv_elements(p)}} {}

  static int64_t dkv_elements(const Problem& p) {
    if (p.pass != Pass::backward || !p.wants_dkv) return 0;
    return (is_paged(p) ? p.pages * p.page_rows : p.batch * p.keys_stored) * p.groups * p.dim;
  }
};

// Adds one (query, head) to dkv and dq; returns its share of d_sink.
double backward_row(const Problem& p, const Keys& keys, const Row& r, const Upstream& up, int64_t g,
                    List<double>& dq, KeyGradient& dkv) {
  const int64_t d = p.dim, v = p.value_dim;
  const double delta = dot(r.o.data(), up.d_o.data(), v);
  for (size_t i = 0; i < keys.slots.size(); ++i) {
    const double* k = keys.rows.data() + i * static_cast<size_t>(d);
    const double weight = r.whole.share(r.logits[i]);
    double ds = weight * (dot(up.d_o.data(), k, v) - delta);
    if (p.has_d_lse) ds += r.all.share(r.logits[i]) * up.d_lse;
    const KeyRow& row = keys.slots[i].row;
    for (int64_t c = 0; c < d; ++c) dq[static_cast<size_t>(c)] += p.scale * ds * k[c];
    if (dkv.sum.empty()) continue;
    double* to = dkv.sum.data() + ((row.outer * dkv.inner + row.inner) * p.groups + g) * d;
    for (int64_t c = 0; c < d; ++c) to[c] += p.scale * ds * r.q[static_cast<size_t>(c)];
    for (int64_t c = 0; c < v; ++c) to[c] += weight * up.d_o[static_cast<size_t>(c)];
  }
  if (keys.slots.empty() || !(r.sink > -INFINITY || std::isnan(r.sink))) return 0;
  return -(r.sink == INFINITY ? 1.0 : r.whole.share(r.sink)) * delta;
}

void read_saved(const Args& a, int64_t b, int64_t s, int64_t h, Row& r) {
  for (size_t c = 0; c < r.o.size(); ++c) {
    const auto column = static_cast<int64_t>(c);
    r.o[c] = a.saved_o.get(b, s, h, column);
    if (a.saved_o_residual) r.o[c] += a.saved_o_residual.get(b, s, h, column);
  }
  r.lse = a.saved_lse.get(b, s, h);
  if (is_own(r.lse, r.max, r.sum)) return;
  r.all = {r.lse, 0};
  r.whole = {log_add(r.lse, r.sink), 0};
}

void backward_query(const Call& c, int64_t b, int64_t s, int64_t g, Room& room) {
  const Problem& p = c.problem;
  const Args& a = c.args;
  const Keys& keys = room.keys;
  Row& r = room.row;
  Upstream& up = room.up;
  List<double>& dq = room.dq;
  const HeadRange heads = heads_of(p, g);
  for (int64_t h = heads.first; h < heads.last; ++h) {
    logits(c, keys, b, s, h, r);
    softmax(p, keys, r);
    if (a.saved_o) read_saved(a, b, s, h, r);
    up.d_o.assign(static_cast<size_t>(p.value_dim), 0);
    if (a.d_o) load_vector(a.d_o, a.d_o.at(b, s, h), p.value_dim, up.d_o.data());
    up.d_lse = a.d_lse ? a.d_lse.get(b, s, h) : 0;
    dq.assign(static_cast<size_t>(p.dim), 0);
    room.d_sink[static_cast<size_t>(h)] += backward_row(p, keys, r, up, g, dq, room.dkv);
    for (int64_t i = 0; a.dq && i < p.dim; ++i) a.dq.put(dq[static_cast<size_t>(i)], b, s, h, i);
  }
}

void write_dkv(const Problem& p, const Args& a, const KeyGradient& dkv) {
  for (int64_t o = 0; o < dkv.outer; ++o)
    for (int64_t r = 0; r < dkv.inner; ++r)
      for (int64_t g = 0; g < p.groups; ++g)
        for (int64_t c = 0; c < p.dim; ++c) {
          const double sum =
              dkv.sum[static_cast<size_t>(((o * dkv.inner + r) * p.groups + g) * p.dim + c)];
          a.dkv.put(a.accumulate_dkv ? a.dkv.get(o, r, g, c) + sum : sum, o, r, g, c);
        }
}

}  // namespace

int64_t attention_bytes(const Problem& p) {
  Arena arena;
  const Room room(p, arena);
  return arena.bytes();
}

void forward(const Call& c) {
  const Problem& p = c.problem;
  Arena arena(c.workspace);
  Room room(p, arena);
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t s = 0; s < p.queries; ++s)
      for (int64_t g = 0; g < p.groups; ++g) {
        load_keys(p, c.args, b, s, g, room.keys);
        const HeadRange heads = heads_of(p, g);
        for (int64_t h = heads.first; h < heads.last; ++h) {
          logits(c, room.keys, b, s, h, room.row);
          softmax(p, room.keys, room.row);
          write_row(c.args, b, s, h, room.row);
        }
      }
}

void backward(const Call& c) {
  const Problem& p = c.problem;
  Arena arena(c.workspace);
  Room room(p, arena);
  room.dkv.sum.assign(static_cast<size_t>(Room::dkv_elements(p)), 0);
  room.d_sink.assign(static_cast<size_t>(p.heads), 0);
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t s = 0; s < p.queries; ++s)
      for (int64_t g = 0; g < p.groups; ++g) {
        load_keys(p, c.args, b, s, g, room.keys);
        backward_query(c, b, s, g, room);
      }
  if (c.args.dkv) write_dkv(p, c.args, room.dkv);
  for (int64_t h = 0; c.args.d_sink && h < p.heads; ++h)
    c.args.d_sink.put(room.d_sink[static_cast<size_t>(h)], h);
}

}  // namespace talea::sparse_attention::reference
