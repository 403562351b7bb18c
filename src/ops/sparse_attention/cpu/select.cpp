// What: selection of lane cpu: keys packed once, scores of one query at a time, the largest of
// them.
// Why: the scores of a call never exist together; a thread holds one row of them.
// Never: selects by anything but the lane's own scores.
#include "ops/sparse_attention/cpu/select.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "device/cpu/gather_product.hpp"
#include "ops/sparse_attention/cpu/scores.hpp"

namespace talea::sparse_attention::cpu {
namespace {

int64_t panels_of(const Problem& p) {
  constexpr int64_t lanes = talea::cpu::max_lanes;
  return (p.keys + lanes - 1) / lanes * lanes;
}

struct Buffers {
  float *keys, *scales;  // of one batch entry
  struct Thread {
    float *q, *weights, *scores, *row;
    uint32_t* bits;
    int32_t* chosen;
  };
  Thread* threads;

  Buffers(const Problem& p, int count, Arena& arena) {
    const int64_t padded = panels_of(p);
    keys = arena.take<float>(padded * p.index_dim);
    scales = arena.take<float>(p.index_q_dtype == DType::f8_e4m3 ? padded : 0);
    threads = arena.take<Thread>(count);
    for (int i = 0; i < count; ++i) {
      Thread t;
      t.q = arena.take<float>(p.index_heads * p.index_dim);
      t.weights = arena.take<float>(p.index_heads);
      t.scores = arena.take<float>(padded);
      t.row = arena.take<float>(talea::cpu::max_lanes * p.index_dim);
      t.bits = arena.take<uint32_t>(padded);
      t.chosen = arena.take<int32_t>(std::min(p.slots, p.keys) + 1);
      if (threads) threads[i] = t;
    }
  }
};

void load_numbers(const View& v, int64_t first, int64_t n, float* to) {
  if (v.dtype == DType::f8_e4m3)
    talea::cpu::load_e4m3(v.address(first), n, 1, to);
  else
    talea::cpu::load_row(v.data, v.dtype, first, 1, n, to);
}

class Selection {
 public:
  Selection(const Call& c, int threads)
      : p_(c.problem),
        a_(c.args),
        threads_(threads),
        arena_(c.workspace),
        w_(p_, threads, arena_) {}

  int64_t run() {
    int64_t odd = 0;
    for (int64_t b = 0; b < p_.batch; ++b) {
#pragma omp parallel num_threads(threads_) reduction(+ : odd)
      {
        const Buffers::Thread& t = w_.threads[omp_get_thread_num()];
        const int64_t lanes = talea::cpu::lanes();
#pragma omp for schedule(static)
        for (int64_t first = 0; first < p_.keys; first += lanes)
          pack(b, first, std::min(lanes, p_.keys - first), t);
#pragma omp for schedule(static, 1)
        for (int64_t s = 0; s < p_.queries; ++s) query(b, s, t, odd);
      }
    }
    return odd;
  }

 private:
  void pack(int64_t b, int64_t first, int64_t n, const Buffers::Thread& t) const {
    const float* rows[talea::cpu::max_lanes];
    for (int64_t i = 0; i < n; ++i) {
      rows[i] = t.row + i * p_.index_dim;
      load_numbers(a_.index_k, a_.index_k.at(b, first + i), p_.index_dim, t.row + i * p_.index_dim);
      if (w_.scales) w_.scales[first + i] = static_cast<float>(a_.index_k_scale.get(b, first + i));
    }
    const int64_t panel = p_.index_dim * talea::cpu::lanes();
    talea::cpu::transpose_to_panels(rows, n, p_.index_dim, w_.keys + first * p_.index_dim, panel);
    for (int64_t i = n; w_.scales && i < talea::cpu::lanes(); ++i) w_.scales[first + i] = 0;
  }

  void query(int64_t b, int64_t s, const Buffers::Thread& t, int64_t& odd) const {
    const Bounds bounds = index_bounds(p_, a_, b, s);
    int64_t found = 0;
    if (bounds.begin < bounds.end) {
      for (int64_t h = 0; h < p_.index_heads; ++h) {
        load_numbers(a_.index_q, a_.index_q.at(b, s, h), p_.index_dim, t.q + h * p_.index_dim);
        t.weights[h] = static_cast<float>(a_.index_weights.get(b, s, h));
        if (a_.index_q_scale) t.weights[h] *= static_cast<float>(a_.index_q_scale.get(b, s, h));
      }
      const int64_t lanes = talea::cpu::lanes(), panel = bounds.begin / lanes;
      ScorePanels scores;
      scores.q = t.q;
      scores.weights = t.weights;
      scores.keys = w_.keys + panel * lanes * p_.index_dim;
      scores.key_scale = w_.scales ? w_.scales + panel * lanes : nullptr;
      scores.scores = t.scores + panel * lanes;
      scores.heads = p_.index_heads;
      scores.depth = p_.index_dim;
      scores.panels = (bounds.end + lanes - 1) / lanes - panel;
      scores.relu = p_.act == Activation::relu;
      score_panels(scores);
      found = select_largest(t.scores + bounds.begin, bounds.end - bounds.begin, p_.slots,
                             bounds.begin, t.bits, t.chosen, odd);
    }
    write(b, s, found, t);
  }

  void write(int64_t b, int64_t s, int64_t found, const Buffers::Thread& t) const {
    const int64_t filler = mutant(Mutant::sa17_slots_behind_are_zero) ? 0 : -1;
    const int64_t last = mutant(Mutant::sa13_slots_behind_not_written) ? found : p_.slots;
    for (int64_t k = 0; k < last; ++k) {
      const bool has = k < found;
      if (a_.selected)
        static_cast<int32_t*>(a_.selected.data)[a_.selected.at(b, s, 0, k)] =
            has ? t.chosen[k] : static_cast<int32_t>(filler);
      if (a_.selected_scores)
        static_cast<float*>(a_.selected_scores.data)[a_.selected_scores.at(b, s, 0, k)] =
            has ? t.scores[t.chosen[k]] : -INFINITY;
    }
    if (a_.selected_length)
      static_cast<int32_t*>(a_.selected_length.data)[a_.selected_length.at(b, s)] =
          static_cast<int32_t>(found);
  }

  const Problem& p_;
  const Args& a_;
  int threads_;
  Arena arena_;
  Buffers w_;
};

}  // namespace

int64_t select_bytes(const Problem& p, int threads) {
  Arena arena;
  Buffers(p, threads, arena);
  return arena.bytes();
}

void select(const Call& c, int threads) { c.result.nan_scores = Selection(c, threads).run(); }

}  // namespace talea::sparse_attention::cpu
