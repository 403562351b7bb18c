// What: the warpgroup of the backward pass that forms S and dP of a tile, P and dS.
// Why: P and dS go through shared memory to what sums dkv, and from registers to dq.
// Never: writes P and dS before those of the tile before have been read.
//
// P and dS lie in shared memory as [head, key].
#pragma once

#include "ops/sparse_attention/sm90/backward_consume.cuh"

namespace talea::sparse_attention::sm90 {

// Warpgroup 0: S and dP, P and dS.
template <int kFirst, int kSecond, bool kF16, bool kAdds>
struct BackwardScores : BackwardConsumer<kFirst, kSecond, kF16, kAdds, 0> {
  using Base = BackwardConsumer<kFirst, kSecond, kF16, kAdds, 0>;
  using Base::beside;
  using Base::chunk;
  using Base::p;
  using Base::row;
  using Base::thread;
  using Base::tiles;
  using Base::tiles_done;
  // Of a thread's two rows: p = e^(s - base) 2^-less, P = share p, dS = p (slope dP + more).
  float base[2], less[2], share[2], slope[2], more[2];

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

  __device__ void begin_work(const Work& w) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = row() + 8 * i;
      base[i] = INFINITY, less[i] = p.exponent, share[i] = 0;
      if (r < w.heads) {
        const float lse = lse_of(w, r);
        // All logits are -Inf beside a finite sink: nothing weighs anything.
        base[i] = lse == -INFINITY && !p.d_lse.present ? INFINITY : lse;
        share[i] = p.f.sink.present ? share_beside(sink_of(w, r), lse, 1) : 1;
      }
      find_slope(w, i);
    }
  }
  __device__ void find_slope(const Work& w, int i) {
    const int r = row() + 8 * i;
    slope[i] = more[i] = 0;
    if (r >= w.heads) return;
    const int64_t h = w.head + r;
    const float d_lse =
        p.d_lse.present ? cuda::number_at(p.d_lse, cuda::offset(p.d_lse, w.b, w.s, h)) : 0.0f;
    const float delta = p.delta[(w.b * p.f.tables.queries + w.s) * p.f.heads + h];
    slope[i] = p.f.scale * share[i];
    more[i] = p.f.scale * (d_lse - share[i] * delta);
  }

  __device__ uint64_t valid() const {
    return *const_cast<volatile uint64_t*>(&beside.valid[tiles_done % 2]);
  }

  // Begins S of the tile, chunks of columns as they arrive.
  __device__ void begin_scores(float (&s)[32]) {
    const uint64_t left = ptx::operand_descriptor(tiles.queries());
    const uint64_t right = ptx::operand_descriptor(tiles.keys());
#pragma unroll
    for (int k = 0; k < backward_parts; ++k) {
      const Part part = backward_part<kFirst, kSecond, kAdds>(k);
      this->wait_keys(k);
      ptx::warpgroup_arrive();
#pragma unroll
      for (int c = part.first; c < part.last; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (k + c + i == 0)
            ptx::wgmma_first_n64<0, 0, kF16>(s, left, right);
          else
            ptx::wgmma_n64<0, 0, kF16>(s, left + c * chunk + 2 * i, right + c * chunk + 2 * i);
    }
    ptx::warpgroup_commit();
  }
  // Begins dP; its keys are there.
  __device__ void begin_slopes(float (&dp)[32]) {
    const uint64_t left = ptx::operand_descriptor(tiles.upstream());
    uint64_t right = ptx::operand_descriptor(tiles.keys());
    asm volatile("" : "+l"(right));  // those of S stand in registers otherwise
    ptx::warpgroup_arrive();
#pragma unroll
    for (int c = 0; c < tiles.values; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (c + i == 0)
          ptx::wgmma_first_n64<0, 0, kF16>(dp, left, right);
        else
          ptx::wgmma_n64<0, 0, kF16>(dp, left + c * chunk + 2 * i, right + c * chunk + 2 * i);
    ptx::warpgroup_commit();
  }

  // A pass over the keys of a work that lies far from 0. Where a row's lse is its own, its own
  // maximum and sum serve in its place: they know what an fp32 lse no longer does.
  __device__ void measure(const Work& w, int count) {
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile, ++tiles_done) {
      add_tile(most, sum);
      ptx::named_barrier_sync(keys_measured, consumer_threads);
      this->release_all_keys();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      use_measured(w, row() + 8 * i, i, most[i], sum[i]);
      find_slope(w, i);
    }
  }
  __device__ void add_tile(float (&most)[2], float (&sum)[2]) {
    float s[32];
    begin_scores(s);
    ptx::warpgroup_wait<0>();
    ptx::hold_registers(s);
    scale_and_mask(s, valid(), p.f.scale);
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
    if (!(fabsf(lse) >= far_from_zero && fabsf(lse) < INFINITY && most > -INFINITY &&
          is_own(static_cast<double>(lse), static_cast<double>(most), static_cast<double>(sum))))
      return;
    base[i] = most;
    share[i] = share_beside(sink, most, sum);
    less[i] = p.exponent + log2f(sum);
    if (p.sink_share && thread % 4 == 0)
      p.sink_share[(w.b * p.f.tables.queries + w.s) * p.f.heads + w.head + r] =
          1.0f / (1.0f + sum * expf(most - sink));
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

  // P is weighed while dP is formed.
  __device__ void one_tile(int64_t, int) {
    float s[32], dp[32];
    uint32_t ds[16], weights[16];
    begin_scores(s);
    begin_slopes(dp);
    ptx::warpgroup_wait<1>();
    ptx::hold_registers(s);
    scale_and_mask(s, valid(), p.f.scale);
#pragma unroll
    for (int i = 0; i < 32; ++i)
      s[i] = ptx::exp2_fast(fmaf(s[i] - base[i / 2 % 2], log2_e, -less[i / 2 % 2]));
    ptx::warpgroup_wait<0>();
    ptx::hold_registers(dp);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int e = i % 2;
      weights[i] = packed<kF16>(s[2 * i] * share[e], s[2 * i + 1] * share[e]);
      ds[i] = packed<kF16>(s[2 * i] * fmaf(slope[e], dp[2 * i], more[e]),
                           s[2 * i + 1] * fmaf(slope[e], dp[2 * i + 1], more[e]));
    }
    ptx::barrier_wait(&beside.weights_free, (tiles_done & 1) ^ 1);
    put_matrix(tiles.weights(), weights);
    put_matrix(tiles.slopes(), ds);
    ptx::fence_async_shared();
    ptx::named_barrier_arrive(weights_written, consumer_threads);
    this->begin_dq(ds);
    constexpr int lent = lent_chunks(kAdds, kFirst + kSecond);
    if constexpr (lent == 0) {
      this->template end_dq<0>();
    } else {
      static_assert(lent == 2);
      Lines lines = this->lines_of(0);
      ptx::named_barrier_sync(weights_whole, 128);  // of this warpgroup: all have written
      this->begin_dkv(s, 0);
      this->template end_dq<1>();
      this->begin_dkv(dp, 1);
      ptx::warpgroup_wait<1>();
      ptx::hold_registers(s);
      this->add_dkv(lines, s, 0);
      ptx::warpgroup_wait<0>();
      ptx::hold_registers(dp);
      this->add_dkv(lines, dp, 1);
    }
  }
};

}  // namespace talea::sparse_attention::sm90
