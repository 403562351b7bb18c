// What: the backward pass of lane cpu.
// Why: threads own queries while weights are formed, then rows of kv while dkv is summed: each key
//      takes its (query, slot) in one order, for any number of threads.
// Never: adds into a row from two threads, or rounds a sum before it is whole.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "ops/sparse_attention/cpu/attention.hpp"
#include "ops/sparse_attention/mutants.hpp"

namespace talea::sparse_attention::cpu {
namespace {

// Once a query's weights are formed, kMax and kSum hold what exp(s - lse) and exp(s - Lt) are
// multiplied by.
enum HeadNumber { kMax, kLse, kSum, kWhole, kDelta, kDLse };

// From here on an lse of fp32 loses too much of what each key weighs: up to 2^-24 of itself.
constexpr float far_from_zero = 128;
bool is_far(float lse) { return std::isfinite(lse) && std::abs(lse) > far_from_zero; }

float* numbers(const ThreadBuffers& w, int64_t padded, int64_t which) {
  return w.heads + which * padded;
}

}  // namespace

// Delta of each head by the product that forms dP: the same terms in the same order, so that
// nothing is left of dP - Delta where a row attends to one key. Only the diagonal of heads x heads
// is used.
void Attention::deltas(int64_t heads, const ThreadBuffers& w, float* delta) const {
  const int64_t lanes = talea::cpu::lanes(), v = p_.value_dim;
  const float* rows[talea::cpu::max_lanes];
  float squares[talea::cpu::max_lanes * talea::cpu::max_lanes];
  for (int64_t first = 0; first < heads; first += lanes) {
    const int64_t n = std::min(lanes, heads - first);
    for (int64_t i = 0; i < n; ++i) rows[i] = w.o + (first + i) * v;
    talea::cpu::GatherProduct t;
    t.a = rows;
    t.b = w.d_o + first * v;
    t.b_panel = v * lanes;
    t.c = squares;
    t.c_row = lanes;
    t.rows = n;
    t.panels = 1;
    t.depth = v;
    talea::cpu::multiply(t);
    for (int64_t i = 0; i < n; ++i) delta[first + i] = squares[i * lanes + i];
  }
}

// lse, Lt, Delta of each head, panels of d_o, and what the sink takes.
void Attention::prepare_heads(const Cursor& at, int64_t place, const ThreadBuffers& w) const {
  const int64_t heads = at.count(), wide = padded(at), v = p_.value_dim;
  const float** rows = w.pointers + 2 * plan_.tile;
  float *lse = numbers(w, wide, kLse), *whole = numbers(w, wide, kWhole);
  float *delta = numbers(w, wide, kDelta), *d_lse = numbers(w, wide, kDLse);
  for (int64_t i = 0; i < heads && a_.saved_o; ++i) {
    const int64_t h = at.heads.first + i;
    float* o = w.o + i * v;
    talea::cpu::load_row(a_.saved_o.data, a_.saved_o.dtype, a_.saved_o.at(at.b, at.s, h), 1, v, o);
    const bool exact = a_.saved_o_residual && !mutant(Mutant::sa24_residual_ignored);
    for (int64_t c = 0; exact && c < v; ++c)
      o[c] += static_cast<float>(a_.saved_o_residual.get(at.b, at.s, h, c));
    lse[i] = static_cast<float>(a_.saved_lse.get(at.b, at.s, h));
  }
  if (a_.saved_o && std::any_of(lse, lse + heads, is_far)) measure_heads(at, w);
  for (int64_t i = heads; i < wide; ++i) lse[i] = whole[i] = delta[i] = d_lse[i] = 0;
  if (a_.d_o) {
    head_rows(a_.d_o, at, v, w.rows, rows);
    talea::cpu::transpose_to_panels(rows, heads, v, w.d_o, v * talea::cpu::lanes());
  } else {
    std::fill_n(w.d_o, wide * v, 0.0f);
  }
  if (a_.d_o) deltas(heads, w, delta);
  for (int64_t i = 0; i < heads; ++i) {
    const int64_t h = at.heads.first + i;
    const double sink = a_.sink ? a_.sink.get(h) : -INFINITY;
    const double all = log_add(static_cast<double>(lse[i]), sink);
    const double d = a_.d_o ? dot(w.o + i * v, rows[i], v) : 0;
    whole[i] = mutant(Mutant::sa22_sink_missing_backward) ? lse[i] : static_cast<float>(all);
    if (!a_.d_o) delta[i] = 0;
    d_lse[i] = a_.d_lse ? static_cast<float>(a_.d_lse.get(at.b, at.s, h)) : 0;
    const bool none = lse[i] == INFINITY || sink == -INFINITY;
    layout_.chunk.sink[place * p_.heads + h] =
        none ? 0 : -(sink == INFINITY ? 1 : std::exp(sink - all)) * d;
  }
}

// Largest logit of each head and the sum beside it, as forward has them.
void Attention::measure_heads(Cursor at, const ThreadBuffers& w) const {
  const int64_t wide = padded(at);
  float *max = numbers(w, wide, kMax), *sum = numbers(w, wide, kSum);
  std::fill_n(max, wide, -INFINITY);
  std::fill_n(sum, wide, 0.0f);
  while (const int64_t n = next_tile(at, w.pointers, nullptr, w.rows)) {
    product(w.pointers, n, wide, w.q, p_.dim, w.scores, nullptr, 0);
    softmax_tile({w.scores, n, wide, static_cast<float>(p_.scale)}, max, sum,
                 numbers(w, wide, kWhole));
  }
}

// Weights of heads far from 0 by their own maximum and sum, where the lse is the row's own.
void Attention::far_heads(const Cursor& at, int64_t place, const ThreadBuffers& w) const {
  const int64_t heads = at.count(), wide = padded(at), v = p_.value_dim;
  const float** rows = w.pointers + 2 * plan_.tile;
  float *max = numbers(w, wide, kMax), *sum = numbers(w, wide, kSum);
  float *lse = numbers(w, wide, kLse), *whole = numbers(w, wide, kWhole);
  for (int64_t i = 0; i < wide; ++i) {
    const double most = static_cast<double>(max[i]), total = static_cast<double>(sum[i]);
    max[i] = sum[i] = 1;
    if (i >= heads || !is_far(lse[i]) || !is_own(static_cast<double>(lse[i]), most, total))
      continue;
    const int64_t h = at.heads.first + i;
    const double sink = a_.sink ? a_.sink.get(h) : -INFINITY;
    const LogSum all = log_sum(most, total, sink);
    lse[i] = static_cast<float>(most);
    max[i] = static_cast<float>(1 / total);
    whole[i] = static_cast<float>(all.base);
    sum[i] = static_cast<float>(std::exp(-all.rest));
    if (a_.d_o && std::isfinite(sink))
      layout_.chunk.sink[place * p_.heads + h] = -all.share(sink) * dot(w.o + i * v, rows[i], v);
  }
}

void Attention::keep_weights(const Cursor& at, int64_t list, int64_t first, int64_t n,
                             const ThreadBuffers& w) const {
  const int64_t heads = at.count(), wide = padded(at);
  float* to = layout_.chunk.weights + (list * p_.slots + first) * 2 * plan_.heads;
  for (int64_t j = 0; j < n; ++j, to += 2 * plan_.heads) {
    std::copy_n(w.d_scores + j * wide, heads, to);
    std::copy_n(w.scores + j * wide, heads, to + heads);
  }
}

void Attention::backward_query(Cursor at, int64_t place, const ThreadBuffers& w) const {
  const int64_t heads = at.count(), wide = padded(at), list = place * p_.groups + at.g;
  layout_.chunk.count[list] = 0;
  if (heads == 0) return;
  const float** tile = w.pointers;
  const float** ahead = tile + plan_.tile;
  const float** rows = ahead + plan_.tile;
  if (plan_.repeats_forward) {
    forward_query(at, w);
  } else {
    head_rows(a_.q, at, p_.dim, w.rows, rows);
    talea::cpu::transpose_to_panels(rows, heads, p_.dim, w.q, p_.dim * talea::cpu::lanes());
  }
  prepare_heads(at, place, w);
  const float* const lse = numbers(w, wide, kLse);
  const bool far = std::any_of(lse, lse + heads, is_far);
  if (far && !mutant(Mutant::sa22_sink_missing_backward)) {
    far_heads(at, place, w);
  } else {
    std::fill_n(numbers(w, wide, kMax), wide, 1.0f);
    std::fill_n(numbers(w, wide, kSum), wide, 1.0f);
  }
  const bool direct = a_.dq && a_.dq.dtype == DType::f32;
  for (int64_t i = 0; i < heads; ++i) {
    rows[i] = w.d_scores + i;
    w.targets[i] = direct
                       ? static_cast<float*>(a_.dq.data) + a_.dq.at(at.b, at.s, at.heads.first + i)
                   : a_.dq ? w.dq + i * p_.dim
                           : nullptr;
    if (a_.dq) std::fill_n(w.targets[i], p_.dim, 0.0f);
  }
  int64_t valid = 0, n = 0, more = 0;
  int64_t* const named = p_.wants_dkv ? layout_.chunk.rows + list * p_.slots : nullptr;
  if (p_.wants_dq || p_.wants_dkv) n = next_tile(at, tile, named, w.rows);
  for (; n > 0; n = more) {
    int64_t* const next_rows = named ? named + valid + n : nullptr;
    more = plan_.in_place ? next_tile(at, ahead, next_rows, nullptr) : 0;
    product(tile, n, wide, w.q, p_.dim, w.scores, ahead, more);
    product(tile, n, wide, w.d_o, p_.value_dim, w.d_scores, nullptr, 0);
    gradient_tile(
        {{w.scores, n, wide, static_cast<float>(p_.scale)},
         w.d_scores,
         numbers(w, wide, kWhole),
         numbers(w, wide, kSum),
         numbers(w, wide, kDelta),
         numbers(w, wide, kLse),
         numbers(w, wide, kMax),
         a_.d_lse && !mutant(Mutant::sa38_d_lse_dropped) ? numbers(w, wide, kDLse) : nullptr});
    if (p_.wants_dkv) keep_weights(at, list, valid, n, w);
    if (a_.dq) {
      talea::cpu::WeightedRows t;
      t.w = rows;
      t.w_step = wide;
      t.b = tile;
      t.c = w.targets;
      t.rows = heads;
      t.depth = n;
      t.columns = p_.dim;
      t.accumulate = valid > 0;
      talea::cpu::multiply(t);
    }
    valid += n;
    if (plan_.in_place)
      std::swap(tile, ahead);
    else
      more = next_tile(at, tile, next_rows, w.rows);
  }
  layout_.chunk.count[list] = p_.wants_dkv ? valid : 0;
  if (mutant(Mutant::sa40_gradient_has_a_factor))
    for (int64_t i = 0; a_.dq && i < heads; ++i) scale_row(w.targets[i], p_.dim, 1.005f);
  for (int64_t i = 0; a_.dq && !direct && i < heads; ++i)
    talea::cpu::store_row(w.targets[i], p_.dim, a_.dq.data, a_.dq.dtype,
                          a_.dq.at(at.b, at.s, at.heads.first + i), 1);
}

float* Attention::dkv_row(int64_t base, int64_t row, int64_t g) const {
  if (plan_.dkv_in_workspace) return layout_.dkv + ((row - base) * p_.groups + g) * p_.dim;
  return static_cast<float*>(a_.dkv.data) + a_.dkv.at(row / plan_.inner, row % plan_.inner, g);
}

// Ranges of rows with about equal numbers of contributions, one a thread.
void Attention::cut_rows(int64_t first, int64_t queries, std::vector<int64_t>& cuts) const {
  const Chunk& chunk = layout_.chunk;
  const int64_t total = plan_.outer * plan_.inner;
  const int64_t each = std::max<int64_t>((total + row_bins - 1) / row_bins, 1);
  std::fill_n(chunk.bins, row_bins, 0);
  int64_t all = 0;
  for (int64_t list = first * p_.groups; list < (first + queries) * p_.groups; ++list) {
    all += chunk.count[list];
    for (int64_t i = 0; i < chunk.count[list]; ++i)
      ++chunk.bins[chunk.rows[list * p_.slots + i] / each];
  }
  cuts.assign(static_cast<size_t>(plan_.threads) + 1, total);
  cuts[0] = 0;
  int64_t seen = 0;
  size_t next = 1;
  for (int64_t bin = 0; bin < row_bins && next < cuts.size() - 1; ++bin) {
    seen += chunk.bins[bin];
    while (next < cuts.size() - 1 && seen * plan_.threads >= all * static_cast<int64_t>(next))
      cuts[next++] = std::min((bin + 1) * each, total);
  }
}

// Adds the chunk's contributions to rows [low, high), in the order of (query, slot).
void Attention::sum_keys(int64_t first, int64_t queries, int64_t low, int64_t high, int64_t base,
                         const ThreadBuffers& w) const {
  const Chunk& chunk = layout_.chunk;
  const bool backwards = mutant(Mutant::sa28_order_by_threads) && plan_.threads % 2 == 0;
  for (int64_t i = 0; i < queries; ++i)
    for (int64_t g = 0; g < p_.groups; ++g) {
      const int64_t q = backwards ? queries - 1 - i : i;
      const int64_t list = q * p_.groups + g;
      const float** weights = w.pointers;
      int64_t n = 0;
      for (int64_t k = 0; k < chunk.count[list]; ++k) {
        const int64_t row = chunk.rows[list * p_.slots + k];
        if (row < low || row >= high) continue;
        weights[n] = chunk.weights + (list * p_.slots + k) * 2 * plan_.heads;
        w.targets[n++] = dkv_row(base, row, g);
      }
      if (n == 0) continue;
      const int64_t at_row = first + q;
      const Cursor at = start(at_row / p_.queries, at_row % p_.queries, g);
      const int64_t heads = at.count();
      const float** rows = w.pointers + n;
      head_rows(a_.q, at, p_.dim, w.rows, rows);
      if (a_.d_o) head_rows(a_.d_o, at, p_.value_dim, w.rows + heads * p_.dim, rows + heads);
      talea::cpu::WeightedRows t;
      t.w = weights;
      t.b = rows;
      t.c = w.targets;
      t.rows = n;
      t.depth = a_.d_o ? 2 * heads : heads;
      t.columns = p_.value_dim;
      if (mutant(Mutant::sa27_sum_drops_elements)) t.columns -= t.columns % 4 ? 1 : 0;
      t.accumulate = t.rows_outside = true;
      talea::cpu::multiply(t);
      t.depth = heads;
      t.first = p_.value_dim;
      t.columns = p_.dim - p_.value_dim;
      if (t.columns > 0) talea::cpu::multiply(t);
      for (int64_t k = 0; mutant(Mutant::sa25_dkv_in_16_bits) && k < n; ++k)
        for (int64_t x = 0; x < p_.dim; ++x)
          w.targets[k][x] = bf16_to_float(float_to_bf16(w.targets[k][x]));
    }
}

void Attention::clear_dkv(int64_t base, int64_t rows, int thread) const {
  if (a_.accumulate_dkv && !plan_.dkv_in_workspace) return;
  const int64_t threads = omp_get_num_threads();
  const int64_t low = rows * thread / threads, high = rows * (thread + 1) / threads;
  for (int64_t row = low; row < high; ++row)
    for (int64_t g = 0; g < p_.groups; ++g) std::fill_n(dkv_row(base, base + row, g), p_.dim, 0.0f);
}

void Attention::round_dkv(int64_t base, int64_t row) const {
  for (int64_t g = 0; g < p_.groups; ++g)
    talea::cpu::store_row(dkv_row(base, row, g), p_.dim, a_.dkv.data, a_.dkv.dtype,
                          a_.dkv.at(row / plan_.inner, row % plan_.inner, g), 1);
}

// Queries [first, last), whose keys are the rows from base on.
void Attention::backward_entry(int64_t base, int64_t first, int64_t last) {
  const int64_t rows = plan_.entries * plan_.inner;
  std::vector<int64_t> cuts;
#pragma omp parallel num_threads(plan_.threads)
  {
    const int thread = omp_get_thread_num();
    const ThreadBuffers& w = layout_.threads[thread];
    if (a_.dkv) clear_dkv(base, rows, thread);
    for (int64_t at = first; at < last; at += plan_.chunk) {
      const int64_t queries = std::min(plan_.chunk, last - at);
#pragma omp for schedule(static, 1)
      for (int64_t q = 0; q < queries; ++q)
        for (int64_t g = 0; g < p_.groups; ++g)
          backward_query(start((at + q) / p_.queries, (at + q) % p_.queries, g), q, w);
#pragma omp single
      {
        for (int64_t q = 0; q < queries; ++q)
          for (int64_t h = 0; h < p_.heads; ++h)
            d_sink_[static_cast<size_t>(h)] += layout_.chunk.sink[q * p_.heads + h];
        if (a_.dkv) cut_rows(0, queries, cuts);
      }
      if (a_.dkv) {
        // There may be fewer threads than were asked for.
        for (auto own = static_cast<size_t>(thread); own + 1 < cuts.size();
             own += static_cast<size_t>(omp_get_num_threads()))
          sum_keys(at, queries, cuts[own], cuts[own + 1], base, w);
      }
#pragma omp barrier
    }
    if (plan_.dkv_in_workspace) {
#pragma omp barrier
#pragma omp for schedule(static)
      for (int64_t row = base; row < base + rows; ++row) round_dkv(base, row);
    }
  }
}

void Attention::backward() {
  d_sink_.assign(static_cast<size_t>(p_.heads), 0);
  if (is_paged(p_)) {
    backward_entry(0, 0, p_.batch * p_.queries);
  } else {
    for (int64_t b = 0; b < p_.batch; ++b)
      backward_entry(b * plan_.inner, b * p_.queries, (b + 1) * p_.queries);
  }
  for (int64_t h = 0; a_.d_sink && h < p_.heads; ++h)
    a_.d_sink.put(d_sink_[static_cast<size_t>(h)], h);
}

}  // namespace talea::sparse_attention::cpu
