// What: the index loss of lane cpu: teacher and scores, the divergence, the chain to the indexer.
// Why: a chunk of queries at a time; its length is a function of the problem, since ranks that cut
//      heads sum the teacher of a chunk together.
// Never: forms [queries, keys] for more than a chunk.
#include "ops/sparse_attention/cpu/loss.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/sparse_attention/cpu/attention.hpp"
#include "ops/sparse_attention/cpu/loss_pass.hpp"
#include "ops/sparse_attention/index_loss.hpp"

namespace talea::sparse_attention::cpu {
namespace {

constexpr int64_t tile = 64;
constexpr int64_t chunk_bytes = int64_t{4} << 20;

int64_t keys_of_a_query(const Problem& p) {
  return p.loss_keys == LossKeys::dense ? p.keys : p.slots;
}

int64_t chunk_of(const Problem& p) {
  const int64_t query = keys_of_a_query(p) * (24 + 4 * p.index_heads);
  return std::clamp<int64_t>(chunk_bytes / std::max<int64_t>(query, 1), 1, 64);
}

struct Buffers {
  struct Thread {
    float *q, *index_q, *rows, *heads_room, *scores, *numbers, *weights, *dw, *dq;
    const float** pointers;
    float** targets;
  };
  Thread* threads;
  int64_t *keys, *count;     // [chunk, keys of a query], [chunk]
  double *teacher, *logits;  // the same; logits become their gradients
  double* loss;              // [chunk]
  float* weights;            // [chunk, keys of a query, index heads]
  float* dk;                 // of one batch entry, where dindex_k is narrower

  Buffers(const Problem& p, int threads_wanted, Arena& arena) {
    const int64_t heads = padded_heads(p.heads), index = padded_heads(p.index_heads);
    const int64_t most = keys_of_a_query(p), chunk = chunk_of(p);
    threads = arena.take<Thread>(threads_wanted);
    for (int i = 0; i < threads_wanted; ++i) {
      Thread t;
      t.q = arena.take<float>(heads * p.dim);
      t.index_q = arena.take<float>(index * p.index_dim);
      t.rows = arena.take<float>(tile * std::max(p.dim, p.index_dim));
      t.heads_room = arena.take<float>(std::max(p.heads * p.dim, p.index_heads * p.index_dim));
      t.scores = arena.take<float>(tile * std::max(heads, index));
      t.numbers = arena.take<float>(3 * heads);
      t.weights = arena.take<float>(index);
      t.dw = arena.take<float>(index);
      t.dq = arena.take<float>(p.index_heads * p.index_dim);
      t.pointers = arena.take<const float*>(2 * most + 2 * (tile + heads + index));
      t.targets = arena.take<float*>(std::max(most, p.index_heads));
      if (threads) threads[i] = t;
    }
    keys = arena.take<int64_t>(chunk * most);
    count = arena.take<int64_t>(chunk);
    teacher = arena.take<double>(chunk * most);
    logits = arena.take<double>(chunk * most);
    loss = arena.take<double>(chunk);
    weights = arena.take<float>(p.wants_dindex_k ? chunk * most * p.index_heads : 0);
    const bool narrow = p.wants_dindex_k && p.dindex_k_dtype != DType::f32;
    dk = arena.take<float>(narrow ? p.keys * p.index_dim : 0);
  }
};

class IndexLoss {
 public:
  IndexLoss(const Call& c, int threads)
      : c_(c),
        p_(c.problem),
        a_(c.args),
        threads_(threads),
        arena_(c.workspace),
        w_(p_, threads, arena_),
        scale_(loss_scale(c)),
        rule_(key_rule(p_)),
        most_(keys_of_a_query(p_)) {}

  void run() {
    double total = 0;
    for (int64_t b = 0; b < p_.batch; ++b) {
      clear(b);
      for (int64_t s = 0; s < p_.queries; s += chunk_of(p_))
        total += chunk(b, s, std::min(chunk_of(p_), p_.queries - s));
      for (int64_t j = 0; w_.dk && j < p_.keys; ++j)
        talea::cpu::store_row(w_.dk + j * p_.index_dim, p_.index_dim, a_.dindex_k.data,
                              a_.dindex_k.dtype, a_.dindex_k.at(b, j), 1);
    }
    finish_loss(c_, scale_, total);
  }

 private:
  using Thread = Buffers::Thread;

  float* dk_row(int64_t b, int64_t j) const {
    if (w_.dk) return w_.dk + j * p_.index_dim;
    return static_cast<float*>(a_.dindex_k.data) + a_.dindex_k.at(b, j);
  }

  void clear(int64_t b) const {
    if (!a_.dindex_k || (a_.accumulate_dindex_k && !w_.dk)) return;
    for (int64_t j = 0; j < p_.keys; ++j) std::fill_n(dk_row(b, j), p_.index_dim, 0.0f);
  }

  double chunk(int64_t b, int64_t first, int64_t queries) {
#pragma omp parallel for schedule(static, 1) num_threads(threads_)
    for (int64_t i = 0; i < queries; ++i) scores(b, first + i, i, w_.threads[omp_get_thread_num()]);
    if (c_.heads.size() > 1) sum_teacher(c_, {w_.teacher, static_cast<size_t>(queries * most_)});
#pragma omp parallel for schedule(static, 1) num_threads(threads_)
    for (int64_t i = 0; i < queries; ++i)
      gradients(b, first + i, i, w_.threads[omp_get_thread_num()]);
    if (a_.dindex_k) {
#pragma omp parallel for schedule(static, 1) num_threads(threads_)
      for (int part = 0; part < threads_; ++part)
        sum_keys(b, first, queries, p_.keys * part / threads_, p_.keys * (part + 1) / threads_,
                 w_.threads[omp_get_thread_num()]);
    }
    double total = 0;
    for (int64_t i = 0; i < queries; ++i) total += w_.loss[i];
    return total;
  }

  int64_t find_keys(int64_t b, int64_t s, int64_t* to) const {
    int64_t n = 0;
    if (p_.loss_keys == LossKeys::dense) {
      const Bounds bounds = index_bounds(p_, a_, b, s);
      for (int64_t j = bounds.begin; j < bounds.end; ++j) to[n++] = j;
      return n;
    }
    const QueryRule query = query_rule(p_, a_, b, s);
    for (int64_t k = 0; k < query.slots; ++k) {
      const KeyRow row = find_key(rule_, query, k, a_.indices.integer(b, list_of(s), 0, k));
      if (row.kind == SlotKind::valid) to[n++] = row.inner;
    }
    return n;
  }

  // Heads as panels; the rows stay in `to`, widened into room where they must be.
  void panels(const View& v, const View& v_scale, int64_t b, int64_t s, int64_t heads,
              int64_t columns, float* room, const float** to, float* panel) const {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t first = v.at(b, s, h);
      to[h] = room + h * columns;
      if (v.dtype == DType::f32)
        to[h] = static_cast<const float*>(v.data) + first;
      else if (v.dtype == DType::f8_e4m3)
        talea::cpu::load_e4m3(v.address(first), columns, static_cast<float>(v_scale.get(b, s, h)),
                              room + h * columns);
      else
        talea::cpu::load_row(v.data, v.dtype, first, 1, columns, room + h * columns);
    }
    if (panel)
      talea::cpu::transpose_to_panels(to, heads, columns, panel, columns * talea::cpu::lanes());
  }

  void index_panels(int64_t b, int64_t s, const Thread& t, const float** to, float* panel) const {
    panels(a_.index_q, a_.index_q_scale, b, s, p_.index_heads, p_.index_dim, t.heads_room, to,
           panel);
  }

  // Rows of kv or index_k of keys [0, n).
  void kv_rows(int64_t b, const int64_t* keys, int64_t n, const Thread& t, const float** to) const {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = t.rows + i * p_.dim;
      if (a_.kv.dtype == DType::f32)
        to[i] = static_cast<const float*>(a_.kv.data) + a_.kv.at(b, keys[i]);
      else
        load_key_row(p_, a_, {SlotKind::valid, b, keys[i]}, 0, t.rows + i * p_.dim);
    }
  }
  void index_rows(int64_t b, const int64_t* keys, int64_t n, const Thread& t,
                  const float** to) const {
    const View& v = a_.index_k;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t first = v.at(b, keys[i]);
      float* room = t.rows + i * p_.index_dim;
      to[i] = room;
      if (v.dtype == DType::f32)
        to[i] = static_cast<const float*>(v.data) + first;
      else if (v.dtype == DType::f8_e4m3)
        talea::cpu::load_e4m3(v.address(first), p_.index_dim,
                              static_cast<float>(a_.index_k_scale.get(b, keys[i])), room);
      else
        talea::cpu::load_row(v.data, v.dtype, first, 1, p_.index_dim, room);
    }
  }

  static LossTile product(const float* const* rows, int64_t n, const float* panel, int64_t heads,
                          int64_t depth, float* to) {
    const int64_t lanes = talea::cpu::lanes(), padded = (heads + lanes - 1) / lanes * lanes;
    talea::cpu::GatherProduct t;
    t.a = rows;
    t.b = panel;
    t.b_panel = depth * lanes;
    t.c = to;
    t.c_row = padded;
    t.panels = padded / lanes;
    t.rows = n;
    t.depth = depth;
    talea::cpu::multiply(t);
    return {to, n, heads, padded};
  }

  void load_weights(int64_t b, int64_t s, const Thread& t) const {
    std::fill_n(t.weights, padded_heads(p_.index_heads), 0.0f);
    for (int64_t h = 0; h < p_.index_heads; ++h)
      t.weights[h] = static_cast<float>(a_.index_weights.get(b, s, h));
  }

  // The lse of each head over the keys: given, or by a pass of its own.
  void normalise(int64_t b, int64_t s, const int64_t* keys, int64_t n, const Thread& t,
                 const float** rows) const {
    const int64_t wide = padded_heads(p_.heads);
    float *max = t.numbers, *sum = max + wide, *factor = sum + wide;
    if (a_.saved_lse) {
      for (int64_t h = 0; h < p_.heads; ++h) sum[h] = static_cast<float>(a_.saved_lse.get(b, s, h));
      return;
    }
    std::fill_n(max, wide, -INFINITY);
    std::fill_n(sum, wide, 0.0f);
    for (int64_t i = 0; i < n; i += tile) {
      const int64_t some = std::min(tile, n - i);
      kv_rows(b, keys + i, some, t, rows);
      const LossTile z = product(rows, some, t.q, p_.heads, p_.dim, t.scores);
      softmax_tile({z.s, some, z.padded, static_cast<float>(p_.scale)}, max, sum, factor);
    }
    for (int64_t h = 0; h < p_.heads; ++h) sum[h] = max[h] + std::log(sum[h]);
  }

  void scores(int64_t b, int64_t s, int64_t place, const Thread& t) const {
    int64_t* keys = w_.keys + place * most_;
    double *teacher = w_.teacher + place * most_, *logits = w_.logits + place * most_;
    const int64_t n = w_.count[place] = find_keys(b, s, keys);
    std::fill_n(teacher, most_, 0.0);
    const float** rows = t.pointers;
    const float** heads = rows + tile;
    panels(a_.q, a_.q_scale, b, s, p_.heads, p_.dim, t.heads_room, heads, t.q);
    index_panels(b, s, t, heads, t.index_q);
    load_weights(b, s, t);
    normalise(b, s, keys, n, t, rows);
    const float* lse = t.numbers + padded_heads(p_.heads);
    for (int64_t i = 0; i < n; i += tile) {
      const int64_t some = std::min(tile, n - i);
      kv_rows(b, keys + i, some, t, rows);
      teacher_tile(product(rows, some, t.q, p_.heads, p_.dim, t.scores),
                   static_cast<float>(p_.scale), lse, teacher + i);
      index_rows(b, keys + i, some, t, rows);
      score_tile(product(rows, some, t.index_q, p_.index_heads, p_.index_dim, t.scores), t.weights,
                 p_.act == Activation::relu, logits + i);
    }
  }

  void gradients(int64_t b, int64_t s, int64_t place, const Thread& t) const {
    const auto n = static_cast<size_t>(w_.count[place]);
    const int64_t* keys = w_.keys + place * most_;
    double* logits = w_.logits + place * most_;
    w_.loss[place] = divergence({logits, n}, {w_.teacher + place * most_, n},
                                row_weight(a_, b, s) * scale_.factor, {logits, n});
    const float** rows = t.pointers;
    const float** heads = rows + tile;
    index_panels(b, s, t, heads, t.index_q);
    load_weights(b, s, t);
    const int64_t wide = padded_heads(p_.index_heads);
    std::fill_n(t.dw, wide, 0.0f);
    std::fill_n(t.dq, p_.index_heads * p_.index_dim, 0.0f);
    const float** columns = heads;
    for (int64_t h = 0; h < p_.index_heads; ++h) {
      columns[h] = t.scores + h;
      t.targets[h] = t.dq + h * p_.index_dim;
    }
    for (int64_t i = 0; i < w_.count[place]; i += tile) {
      const int64_t some = std::min(tile, w_.count[place] - i);
      index_rows(b, keys + i, some, t, rows);
      const LossTile z = product(rows, some, t.index_q, p_.index_heads, p_.index_dim, t.scores);
      chain_tile(z, logits + i, t.weights, p_.act == Activation::relu, t.dw);
      talea::cpu::WeightedRows sum;
      sum.w = columns;
      sum.w_step = z.padded;
      sum.b = rows;
      sum.c = t.targets;
      sum.rows = p_.index_heads;
      sum.depth = some;
      sum.columns = p_.index_dim;
      sum.accumulate = true;
      if (a_.dindex_q) talea::cpu::multiply(sum);
      for (int64_t j = 0; w_.weights && j < some; ++j)
        std::copy_n(z.s + j * z.padded, p_.index_heads,
                    w_.weights + (place * most_ + i + j) * p_.index_heads);
    }
    for (int64_t h = 0; h < p_.index_heads; ++h) {
      if (a_.dindex_weights) a_.dindex_weights.put(static_cast<double>(t.dw[h]), b, s, h);
      if (a_.dindex_q)
        talea::cpu::store_row(t.dq + h * p_.index_dim, p_.index_dim, a_.dindex_q.data,
                              a_.dindex_q.dtype, a_.dindex_q.at(b, s, h), 1);
    }
  }

  // Adds the chunk's contributions to keys [low, high), in the order of (query, slot).
  void sum_keys(int64_t b, int64_t first, int64_t queries, int64_t low, int64_t high,
                const Thread& t) const {
    for (int64_t i = 0; i < queries; ++i) {
      int64_t n = 0;
      for (int64_t k = 0; k < w_.count[i]; ++k) {
        const int64_t j = w_.keys[i * most_ + k];
        if (j < low || j >= high) continue;
        t.pointers[n] = w_.weights + (i * most_ + k) * p_.index_heads;
        t.targets[n++] = dk_row(b, j);
      }
      if (n == 0) continue;
      const float** rows = t.pointers + n;
      index_panels(b, first + i, t, rows, nullptr);
      talea::cpu::WeightedRows sum;
      sum.w = t.pointers;
      sum.b = rows;
      sum.c = t.targets;
      sum.rows = n;
      sum.depth = p_.index_heads;
      sum.columns = p_.index_dim;
      sum.accumulate = sum.rows_outside = true;
      talea::cpu::multiply(sum);
    }
  }

  const Call& c_;
  const Problem& p_;
  const Args& a_;
  int threads_;
  Arena arena_;
  Buffers w_;
  LossScale scale_;
  KeyRule rule_;
  int64_t most_;
};

}  // namespace

int64_t loss_bytes(const Problem& p, int threads) {
  Arena arena;
  Buffers(p, threads, arena);
  return arena.bytes();
}

void index_loss(const Call& c, int threads) {
  IndexLoss(c, threads).run();
  Result& r = c.result;
  r.accumulator_dq = r.accumulator_dkv = "fp32";
  r.dkv_order = "heads of a slot, then (query, slot) of each key";
}

}  // namespace talea::sparse_attention::cpu
