// What: the two warpgroups of lane sm90 that multiply: scores, softmax, weighted values.
// Why: each forms the weights of one tile of a pair and half of the output's columns of both.
// Never: waits for a tile it has not released in the order that the producer fills them.
//
// Of a pair of tiles, warpgroup 0 scores the first and warpgroup 1 the second, each relative to the
// reference of the sums so far or a later one of its own. The other one reads weights and
// references from shared memory. Values are the rows of the same tile, read column-major.
#pragma once

#include "device/sm90/wgmma_narrow.cuh"
#include "ops/sparse_attention/sm90/arrive.cuh"
#include "ops/sparse_attention/sm90/store.cuh"

namespace talea::sparse_attention::sm90 {

namespace ptx = talea::sm90;

// Chunks [first, last), one at least where kFirst, of the columns of s = q k^T; kFirst: s held
// nothing.
template <bool kF16, bool kFirst>
__device__ inline void multiply_scores(float (&s)[32], uint64_t q, uint64_t k, int first,
                                       int last) {
  constexpr uint64_t chunk = chunk_bytes >> 4;
  int c = first;
  if constexpr (kFirst) {
    ptx::wgmma_first_n64<0, 0, kF16>(s, q + c * chunk, k + c * chunk);
#pragma unroll
    for (int i = 1; i < 4; ++i)
      ptx::wgmma_n64<0, 0, kF16>(s, q + c * chunk + 2 * i, k + c * chunk + 2 * i);
    ++c;
  }
#pragma unroll 1
  for (; c < last; ++c)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::wgmma_n64<0, 0, kF16>(s, q + c * chunk + 2 * i, k + c * chunk + 2 * i);
}

// Of kHalf columns of the output.
template <int kHalf, bool kF16, int kGroup, Rows kRows = Rows::plain>
struct Consumer {
  static constexpr int parts = parts_of_half(kHalf), columns = kHalf / parts;
  using Shared = std::conditional_t<kRows == Rows::stored, StoredTiles, Tiles>;
  static constexpr uint64_t step = 2048 >> 4;  // sixteen keys of the values

  const Forward& f;
  const Shared tiles;
  Beside& beside;
  const int thread;  // of the warpgroup
  uint32_t works = 0, works_met = 0, pairs_done = 0;
  float o[parts][columns / 2];
  RowPair rows;
  float pending[2];  // what the output is still to be multiplied by

  __device__ int row() const { return thread / 32 * 16 + thread % 32 / 4; }
  __device__ void hold() {
#pragma unroll
    for (int i = 0; i < parts; ++i) ptx::hold_registers(o[i]);
  }
  __device__ void multiply(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < parts; ++i) multiply_rows(o[i], factor);
  }

  // Scores of a half of the columns of this warpgroup's tile. The half that is filled first comes
  // first: that of its own values, or where all columns lie in half 0, that.
  template <bool kFirst>
  __device__ void score(float (&s)[32]) {
    const uint64_t q = ptx::operand_descriptor(tiles.base);
    const uint64_t k = ptx::operand_descriptor(tiles.keys(kGroup, pairs_done));
    const bool turned = kGroup == 1 && tiles.plan.columns <= kHalf / chunk_columns;
    const int half = (kFirst ? kGroup : 1 - kGroup) ^ (turned ? 1 : 0);
    auto& ready = tiles.at(beside, pairs_done).keys_ready;
    const uint32_t phase = tiles.phase(pairs_done);
    if (turned && kFirst) ptx::barrier_wait(&ready[1][parts], phase);
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const Part part = part_of<kHalf>(tiles.plan, half * parts + i);
      ptx::barrier_wait(&ready[kGroup][half * parts + i], phase);
      ptx::fence_async_shared();
      ptx::warpgroup_arrive();
      if (i == 0)
        multiply_scores<kF16, kFirst>(s, q, k, part.first, part.last);
      else
        multiply_scores<kF16, false>(s, q, k, part.first, part.last);
    }
    ptx::warpgroup_commit();
  }

  // This warpgroup's columns of the values of a tile, a part of them.
  __device__ uint64_t values(int tile, int part) const {
    return ptx::operand_descriptor(tiles.keys(tile, pairs_done) +
                                   (kGroup * kHalf + part * columns) / chunk_columns * chunk_bytes);
  }
  __device__ void add_own(const uint32_t (&p)[16]) {
    hold();
    ptx::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const uint64_t v = values(kGroup, i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t a[4] = {p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]};
        ptx::multiply_registers<columns, 1, kF16>(o[i], a, v + j * step);
      }
      ptx::warpgroup_commit();
    }
  }
  __device__ void add_other() {
    const uint64_t p = ptx::operand_descriptor(tiles.weights(1 - kGroup, pairs_done));
    hold();
    ptx::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const uint64_t v = values(1 - kGroup, i);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        ptx::multiply_tile<columns, 0, 1, kF16>(o[i], p + 2 * j, v + j * step);
      ptx::warpgroup_commit();
    }
  }
  // Waits until all but the latest `pending` groups of products are done, part by part of these
  // columns, and releases the parts of a tile of a pair.
  template <int kPending>
  __device__ void release(int tile, uint32_t pair) {
    if constexpr (parts == 2) {
      ptx::warpgroup_wait<kPending + 1>();
      arrive_warp(&tiles.at(beside, pair).keys_free[tile][kGroup * parts]);
    }
    ptx::warpgroup_wait<kPending>();
    free_part(tile, kGroup * parts + parts - 1, pair);
  }
  // To what fills the tile: both blocks of a cluster.
  __device__ void free_part(int tile, int part, uint32_t pair) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    if constexpr (kRows == Rows::shared) {
      ptx::barrier_arrive_at(&beside.keys_free[tile][part], 0);
      ptx::barrier_arrive_at(&beside.keys_free[tile][part], 1);
    } else {
      ptx::barrier_arrive(&tiles.at(beside, pair).keys_free[tile][part]);
    }
  }

  // The slots of this warpgroup's tile that are valid.
  __device__ uint64_t valid() const {
    const volatile uint32_t* v = tiles.at(beside, pairs_done).valid[kGroup];
    uint32_t low = v[0] | v[1] << 16, high = v[2] | v[3] << 16;
    if constexpr (kRows == Rows::shared) low |= v[4] | v[5] << 16, high |= v[6] | v[7] << 16;
    return low | uint64_t{high} << 32;
  }

  // The weights of a tile; what the output so far becomes by their reference. For the other
  // warpgroup: weights, references, and whether one of them moved.
  __device__ bool softmax(float (&s)[32], uint32_t (&p)[16]) {
    float factor[2];
    const uint64_t slots = valid();
    scale_and_mask(s, slots, f.scale);
    weights_of<kF16>(s, rows, factor, p);
    const int lane = thread % 32, line = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    char* to = tiles.weights(kGroup, pairs_done) + line * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      ptx::store_matrix_x4(to + (((2 * j + lane / 16) ^ (line % 8)) * 16), p[4 * j], p[4 * j + 1],
                           p[4 * j + 2], p[4 * j + 3]);
    if (lane % 4 == 0) {
      float(&reference)[tile_heads] = beside.reference[pairs_done % 2][kGroup];
      reference[row()] = rows.reference[0];
      reference[row() + 8] = rows.reference[1];
      if (factor[0] != 1.0f || factor[1] != 1.0f)
        beside.moved[pairs_done % 2][kGroup] = pairs_done + 1;
    }
    ptx::fence_async_shared();
    ptx::barrier_arrive(&tiles.at(beside, pairs_done).weights_ready[kGroup]);
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] *= pending[i];
    multiply(factor);
    return slots != 0;
  }

  // Adds what the other warpgroup weighs. Where no row of either moved its reference, which all
  // threads of a warpgroup see alike, the products follow the earlier ones at once.
  __device__ void add_others_tile() {
    auto& ready = tiles.at(beside, pairs_done).weights_ready;
    ptx::barrier_wait(&ready[kGroup], tiles.phase(pairs_done));
    ptx::barrier_wait(&ready[1 - kGroup], tiles.phase(pairs_done));
    const volatile uint32_t* moved = beside.moved[pairs_done % 2];
    const bool same = moved[0] != pairs_done + 1 && moved[1] != pairs_done + 1;
    pending[0] = pending[1] = 1;
    if (__shfl_sync(~0u, same, 0)) {
      add_other();
      return;
    }
    float before[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float other = beside.reference[pairs_done % 2][1 - kGroup][row() + 8 * i];
      const Meeting m = meeting_of(rows.reference[i], other);
      before[i] = m.before;
      pending[i] = m.after;
      if (rows.reference[i] < other) {
        rows.reference[i] = other;
        rows.sum[i] *= m.before;
      }
    }
    ptx::warpgroup_wait<0>();
    hold();
    multiply(before);
    add_other();
  }

  // The tile of this warpgroup is the first of a pair.
  __device__ bool first_of_pairs(int pairs) {
    bool seen = false;
    for (int pair = 0; pair < pairs; ++pair, ++pairs_done) {
      float s[32];
      uint32_t p[16];
      score<true>(s);
      if (pair > 0) release<1>(1, pairs_done - 1);
      score<false>(s);
      ptx::warpgroup_wait<0>();
      ptx::hold_registers(s);
      if (pair + 1 == pairs) arrive_warp(&beside.q_free);
      seen |= softmax(s, p);
      add_own(p);
      release<0>(0, pairs_done);
      add_others_tile();
    }
    ptx::warpgroup_wait<0>();
    hold();
    if (pairs > 0) release<0>(1, pairs_done - 1);
    return seen;
  }

  // The second.
  __device__ bool second_of_pairs(int pairs) {
    bool seen = false;
    for (int pair = 0; pair < pairs; ++pair, ++pairs_done) {
      float s[32];
      uint32_t p[16];
      score<true>(s);
      score<false>(s);
      ptx::warpgroup_wait<0>();
      ptx::hold_registers(s);
      if (pair + 1 == pairs) arrive_warp(&beside.q_free);
      seen |= softmax(s, p);
      add_own(p);
      add_others_tile();
      release<parts>(1, pairs_done);
      release<0>(0, pairs_done);
      hold();
    }
    return seen;
  }

  // Sums of both warpgroups, then what is left to write of a row.
  __device__ void finish(const Work& w, bool seen, bool met) {
    float top[2], sum[2];
    bool any = false;
    for (int i = 0; i < 2; ++i) {
      sum[i] = rows.sum[i] + __shfl_xor_sync(~0u, rows.sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
      top[i] = rows.top[i];
    }
    if (met) {  // there was a pair of tiles
      if (thread % 4 == 0)
        for (int i = 0; i < 2; ++i) {
          beside.sum[kGroup][row() + 8 * i] = sum[i];
          beside.top[kGroup][row() + 8 * i] = top[i];
        }
      if (thread == 0) beside.seen[kGroup] = seen;
      ptx::barrier_arrive(&beside.sums_ready[kGroup]);
      for (uint64_t& sums : beside.sums_ready) ptx::barrier_wait(&sums, works_met & 1);
      ++works_met;
      for (int i = 0; i < 2; ++i) {
        const int r = row() + 8 * i;
        sum[i] = beside.sum[0][r] + beside.sum[1][r];
        top[i] = fmaxf(beside.top[0][r], beside.top[1][r]);
      }
      any = beside.seen[0] || beside.seen[1];
    }
    float factor[2];
    for (int i = 0; i < 2; ++i) {
      const int r = row() + 8 * i;
      const bool own = r < w.heads;
      const float sink = f.sink.present && own
                             ? cuda::number_at(f.sink, cuda::offset(f.sink, w.head + r))
                             : -INFINITY;
      const RowEnd end = end_of(sum[i], rows.reference[i], top[i], any, sink);
      factor[i] = end.factor * pending[i];
      if (kGroup != 0 || !own || thread % 4 != 0 || !tiles.writes_rows()) continue;
      if (f.lse.present) cuda::put(f.lse, cuda::offset(f.lse, w.b, w.s, w.head + r), end.lse);
      if (f.row_max.present)
        cuda::put(f.row_max, cuda::offset(f.row_max, w.b, w.s, w.head + r), end.top);
    }
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) {
      float& x = o[i / (columns / 2)][i % (columns / 2)];
      x = factor[i / 2 % 2] == 0 ? 0.0f : x * factor[i / 2 % 2];
    }
    if (f.o.present) store(f.o, f.o_words, w);
    if (!f.o_residual.present) return;
    const bool wide = f.o.present && !is_16bit(f.o.dtype);  // then nothing is left
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) {
      float& x = o[i / (columns / 2)][i % (columns / 2)];
      x -= wide ? x : rounded_16<kF16>(x);
    }
    store(f.o_residual, f.residual_words, w);
  }

  __device__ void store(const View& to, bool words, const Work& w) {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int first = tiles.first_column(kGroup, kHalf) + part * columns;
      Where at[2];
      for (int i = 0; i < 2; ++i) {
        const int r = row() + 8 * i;
        if (r >= w.heads) continue;
        at[i].begin = cuda::offset(to, w.b, w.s, w.head + r) + first;
        at[i].left = static_cast<int>(f.value_dim) - first;
      }
      store_rows<columns, kF16>(to, words, o[part], at);
    }
  }

  __device__ void begin_rows() {
    rows = RowPair{};
    pending[0] = pending[1] = 1;
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) o[i / (columns / 2)][i % (columns / 2)] = 0;
  }
  __device__ bool sum_pairs(int pairs) {
    if constexpr (kGroup == 0)
      return first_of_pairs(pairs);
    else
      return second_of_pairs(pairs);
  }
  __device__ void run() {
    for (int64_t number = blockIdx.x; number < f.work; number += gridDim.x, ++works) {
      ptx::barrier_wait(&beside.q_ready, works & 1);
      const int pairs = __shfl_sync(~0u, *const_cast<volatile int*>(&beside.pairs), 0);
      ptx::fence_async_shared();
      begin_rows();
      const bool seen = sum_pairs(pairs);
      if (pairs == 0) arrive_warp(&beside.q_free);
      finish(work_of(f, number), seen, pairs > 0);
    }
  }
};

}  // namespace talea::sparse_attention::sm90
