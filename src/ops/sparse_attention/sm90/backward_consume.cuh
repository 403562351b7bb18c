// What: the two warpgroups of the backward pass that multiply: S and dP, P and dS, dq.
// Why: one forms P of a tile of keys, the other dS; each sums its own columns of dq.
// Never: waits for keys it has not released in the order that they are filled.
//
// P and dS lie in shared memory as [head, key], and go from there to the workspace as they lie:
// what sums dkv reads them. Until dS stands in its place, what rounding left of P does: P and that
// are what warpgroup 0 takes P from.
#pragma once

#include "device/sm90/wgmma.cuh"
#include "ops/sparse_attention/sm90/backward_give.cuh"
#include "ops/sparse_attention/sm90/backward_work.cuh"
#include "ops/sparse_attention/sm90/store.cuh"

namespace talea::sparse_attention::sm90 {

namespace ptx = talea::sm90;

template <bool kF16>
__device__ inline float2 unpacked(uint32_t bits) {
  if constexpr (kF16)
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  else
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

// Named barriers of the two warpgroups.
enum BackwardBarrier : int { tiles_free = 1, weights_there, weights_read, slopes_there };

// kAdds: dkv of a block's heads is added to its rows here.
template <int kFirst, int kSecond, bool kF16, int kGroup, bool kAdds>
struct BackwardConsumer {
  static constexpr int own = kGroup == 0 ? kFirst : kSecond;
  static constexpr int begin = kGroup == 0 ? 0 : kFirst;  // the first of its chunks
  static constexpr uint64_t chunk = chunk_bytes >> 4, step = 2048 >> 4;

  const Backward& p;
  const BackwardTiles<kFirst, kSecond> tiles;
  BackwardBeside& beside;
  const int thread;  // of the warpgroup
  uint32_t works = 0, tiles_done = 0;
  float dq[own][32];
  // Of a thread's two rows. Group 0: dS = P (a dP + b). Group 1: p = e^(s - a) 2^-c, P = b p.
  float a[2], b[2], c[2];

  __device__ int row() const { return thread / 32 * 16 + thread % 32 / 4; }
  __device__ static void arrive_warp(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
  }

  __device__ float lse_of(const Work& w, int r) const {
    return cuda::number_at(p.f.lse, cuda::offset(p.f.lse, w.b, w.s, w.head + r));
  }
  __device__ float sink_of(const Work& w, int r) const {
    return p.f.sink.present ? cuda::number_at(p.f.sink, cuda::offset(p.f.sink, w.head + r))
                            : -INFINITY;
  }
  // What sum e^most leaves e^sink of their sum.
  __device__ static float share_beside(float sink, float most, float sum) {
    return most == INFINITY ? 1.0f : 1.0f / (1.0f + expf(sink - most) / sum);
  }

  // measured: what the other group knows of rows far from 0 lies beside.
  __device__ void read_rows(const Work& w, bool measured) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = row() + 8 * i;
      a[i] = kGroup == 0 ? 0 : INFINITY, b[i] = 0, c[i] = p.exponent;
      if (r >= w.heads) continue;
      const int64_t h = w.head + r;
      const float lse = lse_of(w, r);
      float share = 1;  // of the keys beside the sink
      if (p.f.sink.present)
        share = measured ? beside.share[r] : share_beside(sink_of(w, r), lse, 1);
      const float d_lse =
          p.d_lse.present ? cuda::number_at(p.d_lse, cuda::offset(p.d_lse, w.b, w.s, h)) : 0.0f;
      if constexpr (kGroup == 0) {
        const float delta = p.delta[(w.b * p.f.tables.queries + w.s) * p.f.heads + h];
        a[i] = p.f.scale * share;
        b[i] = p.f.scale * (d_lse - share * delta);
      } else {
        // All logits are -Inf beside a finite sink: nothing weighs anything.
        a[i] = lse == -INFINITY && !p.d_lse.present ? INFINITY : lse;
        b[i] = share;
      }
    }
  }

  // The products of 64 rows and the tile's keys, chunks of columns as they arrive.
  template <int kChunks>
  __device__ void compare(float (&s)[32], const char* rows) {
    const uint64_t left = ptx::operand_descriptor(rows);
    const uint64_t right = ptx::operand_descriptor(tiles.keys());
#pragma unroll
    for (int k = 0; k < backward_parts; ++k) {
      const Part part = backward_part<kFirst, kSecond>(k);
      if (part.first >= kChunks) break;
      ptx::barrier_wait(&beside.keys_ready[k], tiles_done & 1);
      ptx::fence_async_shared();
      ptx::warpgroup_arrive();
#pragma unroll
      for (int c = part.first; c < part.last && c < kChunks; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (c + i == 0)
            ptx::wgmma_first_n64<0, 0, kF16>(s, left, right);
          else
            ptx::wgmma_n64<0, 0, kF16>(s, left + c * chunk + 2 * i, right + c * chunk + 2 * i);
    }
    ptx::warpgroup_commit();
    ptx::warpgroup_wait<0>();
    ptx::hold_registers(s);
  }

  // A pass over the keys of a work that lies far from 0. Where a row's lse is its own, its own
  // maximum and sum serve in its place: they know what an fp32 lse no longer does.
  __device__ void measure(const Work& w, int count) {
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile, ++tiles_done) {
      if constexpr (kGroup == 1) add_tile(most, sum);
      ptx::named_barrier_sync(slopes_there, consumer_threads);  // the keys have been read
      arrive_warp(&beside.keys_free[2 * kGroup]);
      arrive_warp(&beside.keys_free[2 * kGroup + 1]);
    }
    if constexpr (kGroup == 1) {
#pragma unroll
      for (int i = 0; i < 2; ++i) use_measured(w, row() + 8 * i, i, most[i], sum[i]);
    }
    ptx::named_barrier_sync(slopes_there, consumer_threads);
    if constexpr (kGroup == 0) read_rows(w, true);
  }

  __device__ void add_tile(float (&most)[2], float (&sum)[2]) {
    float s[32];
    compare<tiles.columns>(s, tiles.queries());
    scale_and_mask(s, *const_cast<volatile uint64_t*>(&beside.valid[tiles_done % 2]), p.f.scale);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float to = most[i], part = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) to = fmaxf(to, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
      to = fmaxf(to, __shfl_xor_sync(~0u, to, 1));
      to = fmaxf(to, __shfl_xor_sync(~0u, to, 2));
#pragma unroll
      for (int n = 0; n < 8; ++n)
        part += power(s[4 * n + 2 * i] - base_of(to)) + power(s[4 * n + 2 * i + 1] - base_of(to));
      sum[i] = sum[i] * change_of(most[i], to) + part;
      most[i] = to;
    }
  }

  __device__ void use_measured(const Work& w, int r, int i, float most, float sum) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (r >= w.heads) return;
    const float lse = lse_of(w, r), sink = sink_of(w, r);
    if (fabsf(lse) >= far_from_zero && fabsf(lse) < INFINITY && most > -INFINITY &&
        is_own(static_cast<double>(lse), static_cast<double>(most), static_cast<double>(sum))) {
      a[i] = most;
      b[i] = share_beside(sink, most, sum);
      c[i] = p.exponent + log2f(sum);
      if (p.sink_share && thread % 4 == 0)
        p.sink_share[(w.b * p.f.tables.queries + w.s) * p.f.heads + w.head + r] =
            1.0f / (1.0f + sum * expf(most - sink));
    }
    if (thread % 4 == 0) beside.share[r] = b[i];
  }

  __device__ char* matrix_at(char* tile, int j) const {
    const int lane = thread % 32, line = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    return tile + line * 128 + (((2 * j + lane / 16) ^ (line % 8)) * 16);
  }
  __device__ void put_matrix(char* tile, const uint32_t (&x)[16]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      ptx::store_matrix_x4(matrix_at(tile, j), x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
  }

  // P of the tile.
  __device__ void form_weights(float (&s)[32]) {
    uint32_t whole[16], rest[16], kept[16];
    scale_and_mask(s, *const_cast<volatile uint64_t*>(&beside.valid[tiles_done % 2]), p.f.scale);
    const bool sink = p.f.sink.present;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        x[e] = ptx::exp2_fast(fmaf(s[2 * i + e] - a[i % 2], log2_e, -c[i % 2]));
      whole[i] = packed<kF16>(x[0], x[1]);
      const float2 y = unpacked<kF16>(whole[i]);
      rest[i] = packed<kF16>(x[0] - y.x, x[1] - y.y);
      if (sink) kept[i] = packed<kF16>(x[0] * b[i % 2], x[1] * b[i % 2]);
    }
    ptx::named_barrier_sync(tiles_free, consumer_threads);
    put_matrix(tiles.weights(), whole);
    put_matrix(tiles.slopes(), rest);
    ptx::named_barrier_arrive(weights_there, consumer_threads);
    if (sink) {
      ptx::named_barrier_sync(weights_read, consumer_threads);
      put_matrix(tiles.weights(), kept);
    }
    ptx::fence_async_shared();
  }

  // dS of the tile from dP.
  __device__ void form_slopes(const float (&s)[32], uint32_t (&ds)[16]) {
    ptx::named_barrier_sync(weights_there, consumer_threads);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t whole[4], rest[4];
      ptx::load_matrix_x4(whole, matrix_at(tiles.weights(), j));
      ptx::load_matrix_x4(rest, matrix_at(tiles.slopes(), j));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 x = unpacked<kF16>(whole[k]), y = unpacked<kF16>(rest[k]);
        const int i = 4 * j + k, e = k % 2;
        ds[i] = packed<kF16>((x.x + y.x) * fmaf(a[e], s[2 * i], b[e]),
                             (x.y + y.y) * fmaf(a[e], s[2 * i + 1], b[e]));
      }
    }
    if (p.f.sink.present) ptx::named_barrier_arrive(weights_read, consumer_threads);
    __syncwarp();  // a warp reads what itself overwrites
    put_matrix(tiles.slopes(), ds);
    ptx::fence_async_shared();
  }

  // dq += dS K, this warpgroup's columns; what of the keys they are is released as it is read.
  __device__ void add_dq(const uint32_t (&ds)[16]) {
    constexpr int half = (own + 1) / 2;  // as backward_part cuts them
#pragma unroll
    for (int i = 0; i < own; ++i) ptx::hold_registers(dq[i]);
    ptx::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const uint64_t k = ptx::operand_descriptor(tiles.keys() + (begin + i) * chunk_bytes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t left[4] = {ds[4 * j], ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]};
        ptx::multiply_registers<64, 1, kF16>(dq[i], left, k + j * step);
      }
      if (i + 1 == half) ptx::warpgroup_commit();
    }
    ptx::warpgroup_commit();
    ptx::warpgroup_wait<1>();
    arrive_warp(&beside.keys_free[2 * kGroup]);
    ptx::warpgroup_wait<0>();
    arrive_warp(&beside.keys_free[2 * kGroup + 1]);
#pragma unroll
    for (int i = 0; i < own; ++i) ptx::hold_registers(dq[i]);
  }

  __device__ void one_tile(int64_t number, int tile) {
    float s[32];
    uint32_t ds[16];
    if constexpr (kGroup == 0) {
      ptx::named_barrier_arrive(tiles_free, consumer_threads);
      compare<tiles.values>(s, tiles.upstream());
      form_slopes(s, ds);
      ptx::named_barrier_sync(slopes_there, consumer_threads);
    } else {
      compare<tiles.columns>(s, tiles.queries());
      if (!kAdds && thread == 0) ptx::store_wait_read<0>();
      form_weights(s);
      ptx::named_barrier_sync(slopes_there, consumer_threads);
      if (!kAdds && thread == 0 && p.wants_dkv) {
        ptx::store_bytes(p.weights + weights_at(p, number, tile), tiles.weights(), weights_bytes);
        ptx::store_commit();
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t x[4];
        ptx::load_matrix_x4(x, matrix_at(tiles.slopes(), j));
#pragma unroll
        for (int k = 0; k < 4; ++k) ds[4 * j + k] = x[k];
      }
    }
    add_dq(ds);
    if constexpr (kAdds) add_dkv();
  }

  // dkv of the tile, this warpgroup's columns: dS^T q, and of values + P^T d_o. The next keys are
  // on their way meanwhile.
  __device__ void add_dkv() {
    float* to[2][2];  // as give() takes them
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const int line = thread / 32 * 16 + thread % 32 / 8 * 2 + turn + 8 * e;
        const int64_t row = *const_cast<volatile int64_t*>(&beside.rows[tiles_done % 2][line]);
        to[e][turn] = row < 0 ? nullptr : static_cast<float*>(p.sums.data) + row;
      }
    const uint64_t ds = ptx::operand_descriptor(tiles.slopes());
    const uint64_t weights = ptx::operand_descriptor(tiles.weights());
#pragma unroll 1
    for (int c = begin; c < begin + own; ++c) {
      float x[32];
      const uint64_t q = ptx::operand_descriptor(tiles.queries() + c * chunk_bytes);
      ptx::warpgroup_arrive();
      ptx::wgmma_first_n64<1, 1, kF16>(x, ds, q);
#pragma unroll
      for (int j = 1; j < 4; ++j) ptx::wgmma_n64<1, 1, kF16>(x, ds + j * step, q + j * step);
      if (c < tiles.values) {
        const uint64_t d_o = ptx::operand_descriptor(tiles.upstream() + c * chunk_bytes);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          ptx::wgmma_n64<1, 1, kF16>(x, weights + j * step, d_o + j * step);
      }
      ptx::warpgroup_commit();
      ptx::warpgroup_wait<0>();
      ptx::hold_registers(x);
      if (c * chunk_columns < p.f.dim) give(p, thread, x, c, to);
    }
  }

  __device__ void store_dq(const Work& w) {
    const View& to = p.dq;
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const int first = (begin + i) * chunk_columns;
      Where at[2];
      for (int e = 0; e < 2; ++e) {
        const int r = row() + 8 * e;
        if (r >= w.heads) continue;
        at[e].begin = cuda::offset(to, w.b, w.s, w.head + r) + first;
        at[e].left = static_cast<int>(p.f.dim) - first;
      }
#pragma unroll
      for (int k = 0; k < 32; ++k) dq[i][k] *= p.grown;
      store_rows<64, kF16>(to, p.dq_words, dq[i], at);
    }
  }

  __device__ void run() {
    const int64_t end = p.last_list * p.f.head_tiles;
    for (int64_t number = p.first_list * p.f.head_tiles + blockIdx.x; number < end;
         number += gridDim.x, ++works) {
      const Work w = work_of(p.f, number);
      read_rows(w, false);
      ptx::barrier_wait(&beside.q_ready, works & 1);
      ptx::fence_async_shared();
      const int count = __shfl_sync(~0u, *const_cast<volatile int*>(&beside.tiles), 0);
      if (__shfl_sync(~0u, *const_cast<volatile int*>(&beside.far), 0)) measure(w, count);
#pragma unroll
      for (int i = 0; i < own; ++i)
#pragma unroll
        for (int k = 0; k < 32; ++k) dq[i][k] = 0;
      for (int tile = 0; tile < count; ++tile, ++tiles_done) one_tile(number, tile);
      arrive_warp(&beside.q_free);
      if (p.dq.present) {
#pragma unroll
        for (int i = 0; i < own; ++i) ptx::hold_registers(dq[i]);
        store_dq(w);
      }
    }
    if (!kAdds && kGroup == 1 && thread == 0) ptx::store_wait_all();
  }
};

}  // namespace talea::sparse_attention::sm90
