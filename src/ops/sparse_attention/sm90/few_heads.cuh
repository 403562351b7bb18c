// What: the forward kernel of up to 16 heads of a group: keys are the rows of its products.
// Why: tensor cores multiply 64 rows at least; few heads as rows would leave most of them empty.
// Never: sums in an order other than that of the two warpgroups of consume.cuh: the bits are theirs.
//
// S^T = K q^T of a tile of 64 keys, a warpgroup a tile of a pair; then o^T += V^T P^T, half of the
// columns each. A thread's accumulators are of two rows, r and r + 8 of its warp's 16, and of four
// heads: d[4 n + 2 i + e] of row r + 8 i and head 8 n + 2 (lane % 4) + e, which is number 2 n + e.
#pragma once

#include "device/common/cuda_check.hpp"
#include "device/sm90/wgmma_narrow.cuh"
#include "ops/sparse_attention/sm90/arrive.cuh"
#include "ops/sparse_attention/sm90/few_heads_produce.cuh"
#include "ops/sparse_attention/sm90/few_heads_store.cuh"

namespace talea::sparse_attention::sm90 {

namespace ptx = talea::sm90;

template <bool kF16, int kGroup>
struct FewHeads {
  static constexpr int half = 256, blocks = half / 64;  // of this warpgroup's columns of the output
  static constexpr uint64_t chunk = chunk_bytes >> 4, q_chunk = ring_q_chunk_bytes >> 4,
                            step = 2048 >> 4;  // sixteen keys of the values

  const Forward& f;
  const Ring ring;
  RingBeside& beside;
  const int thread;  // of the warpgroup
  uint32_t works = 0, works_met = 0, pairs_done = 0;
  float o[blocks][8];
  float reference[4], top[4], pending[4];  // of the thread's four heads
  // Of head lane % 16: the weights of the keys of which warp / 2 of eight is this warp's number.
  float sum, sum_reference;

  __device__ int warp() const { return thread / 32; }
  __device__ int lane() const { return thread % 32; }
  __device__ int head(int n, int e) const { return 8 * n + thread % 4 * 2 + e; }
  __device__ void hold() {
#pragma unroll
    for (int b = 0; b < blocks; ++b) ptx::hold_registers(o[b]);
  }
  __device__ void multiply(const float (&factor)[4]) {
    const bool one = factor[0] == 1 && factor[1] == 1 && factor[2] == 1 && factor[3] == 1;
    if (__all_sync(~0u, one)) return;
#pragma unroll
    for (int i = 0; i < 8 * blocks; ++i) o[i / 8][i % 8] *= factor[i / 4 % 2 * 2 + i % 2];
  }

  // Scores of a half of the columns of this warpgroup's tile: as in consume.cuh, that of its own
  // values first.
  template <bool kFirst>
  __device__ void score(float (&s)[8]) {
    constexpr int half = kFirst ? kGroup : 1 - kGroup, part = ring_part(kGroup, half);
    const uint64_t k = ptx::operand_descriptor(ring.base);
    const uint64_t q = ptx::operand_descriptor(ring.q());
    ring.wait(beside.keys_ready, pairs_done, part);
    ptx::fence_async_shared();
    ptx::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < (half == 0 ? 4 : 5); ++i) {
      const int c = half * 4 + i;
      const uint64_t a = k + ring.chunk_at(pairs_done, ring_first(part) + i) * chunk;
      const uint64_t b = q + c * q_chunk;
      if (kFirst && i == 0)
        ptx::wgmma_first_n16<0, kF16>(s, a, b);
      else
        ptx::wgmma_add_n16<0, kF16>(s, a, b);
#pragma unroll
      for (int j = 1; j < 4; ++j) ptx::wgmma_add_n16<0, kF16>(s, a + 2 * j, b + 2 * j);
    }
    ptx::warpgroup_commit();
  }

  // Queues the products of a tile's weights and this warpgroup's columns of its values.
  __device__ void add(int tile) {
    const uint64_t p = ptx::operand_descriptor(ring.weights(tile));
    const uint64_t k = ptx::operand_descriptor(ring.base);
    uint64_t v[blocks];
#pragma unroll
    for (int i = 0; i < blocks; ++i)
      v[i] = k + ring.chunk_at(pairs_done, ring_first(ring_part(tile, kGroup)) + i) * chunk;
    hold();
    ptx::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < blocks; ++i)
        ptx::wgmma_add_n16<1, kF16>(o[i], v[i] + j * step, p + 2 * j);
    ptx::warpgroup_commit();
  }
  // Waits until all but the latest `pending` groups of products are done; releases the values of a
  // tile of a pair.
  template <int kPending>
  __device__ void release(int tile, uint32_t pair) {
    ptx::warpgroup_wait<kPending>();
    arrive_warp(&beside.keys_free[pair & 1][ring_part(tile, kGroup)]);
  }

  // The slots of this warpgroup's tile that are valid.
  __device__ uint64_t valid() const {
    const volatile uint32_t* v = beside.valid[pairs_done & 1][kGroup];
    const uint32_t low = v[0] | v[1] << 16, high = v[2] | v[3] << 16;
    return low | uint64_t{high} << 32;
  }
  // Scores, scaled, of slots that are valid; -Inf of others.
  __device__ void scale_and_mask(float (&s)[8], uint64_t slots) const {
    const int rows = lane() / 4, bit = rows / 4 * 16 + warp() * 4 + rows % 4;
    const bool there[2] = {(slots >> bit & 1) != 0, (slots >> (bit + 32) & 1) != 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i] = there[i / 2 % 2] ? __fmul_rn(s[i], f.scale) : -INFINITY;
  }

  // The largest score of a tile of the thread's four heads. Of the eight lanes that have them, each
  // keeps one head of its warp's 16 keys; the four warps meet in shared memory.
  __device__ void most_of(const float (&s)[8], float (&most)[4]) {
    float x[4];
#pragma unroll
    for (int h = 0; h < 4; ++h) x[h] = fmaxf(s[h / 2 * 4 + h % 2], s[h / 2 * 4 + 2 + h % 2]);
    const bool n = (lane() & 16) != 0, e = (lane() & 8) != 0;
    float y[2], z;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      y[i] = fmaxf(n ? x[2 + i] : x[i], __shfl_xor_sync(~0u, n ? x[i] : x[2 + i], 16));
    z = fmaxf(e ? y[1] : y[0], __shfl_xor_sync(~0u, e ? y[0] : y[1], 8));
    z = fmaxf(z, __shfl_xor_sync(~0u, z, 4));
    if ((lane() & 4) == 0) beside.most[kGroup][head(n, e)][warp()] = z;
    ptx::named_barrier_sync(1 + kGroup, 128);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const float4 all = *reinterpret_cast<const float4*>(beside.most[kGroup][head(h / 2, h % 2)]);
      most[h] = fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w));
    }
  }

  // The weights of a tile, for both warpgroups: rounded, a row a head; references, and whether one
  // of them moved. In fp32 for sum_own().
  __device__ bool softmax(float (&s)[8]) {
    const uint64_t slots = valid();
    float most[4], factor[4];
    scale_and_mask(s, slots);
    most_of(s, most);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      top[h] = fmaxf(top[h], most[h]);
      const float to = reference_of(reference[h], most[h]);
      factor[h] = change_of(reference[h], to);
      reference[h] = to;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i] = power(s[i] - base_of(reference[i / 4 * 2 + i % 2]));
    // The other warpgroup has read the weights of the pair before.
    ring.wait(beside.keys_free, pairs_done - 1, ring_part(kGroup, 1 - kGroup));
    const int line = lane() / 16 * 8 + lane() % 8, piece = warp() * 2 + lane() / 8 % 2;
    ptx::store_matrix_x4_transposed(ring.weights(kGroup) + line * 128 + (piece ^ lane() % 8) * 16,
                                    packed<kF16>(s[0], s[1]), packed<kF16>(s[2], s[3]),
                                    packed<kF16>(s[4], s[5]), packed<kF16>(s[6], s[7]));
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<float2*>(exact(warp() * 16 + lane() / 4 + 8 * i, head(n, 0))) =
            make_float2(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]);
    if (thread < 4) {
      bool moved = false;
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        beside.reference[pairs_done % 2][kGroup][head(h / 2, h % 2)] = reference[h];
        moved |= factor[h] != 1.0f;
      }
      if (moved) beside.moved[pairs_done % 2][kGroup] = pairs_done + 1;
    }
    ptx::fence_async_shared();
    ptx::barrier_arrive(&beside.weights_ready[kGroup]);
#pragma unroll
    for (int h = 0; h < 4; ++h) factor[h] *= pending[h];
    multiply(factor);
    ptx::barrier_wait(&beside.weights_ready[kGroup], pairs_done & 1);
    return slots != 0;
  }

  // Where the weight of a key and head lies in fp32. Rows and halves of rows change places so that
  // neither those who write nor those who read meet in a bank.
  __device__ float* exact(int key, int head) const {
    return ring.exact(kGroup) + (key ^ (key >> 4 & 1)) * most_few_heads +
           (head ^ (key >> 1 & 1) * 8);
  }
  // The sum of this warpgroup's tile, each head's by four warps and two lanes, in the order in
  // which the four lanes of consume.cuh form it.
  __device__ void sum_own() {
    const int h = lane() % 16, first = lane() / 16 * 2;
    float of[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int key = (first + j) * 8 + warp() * 2;
      of[j] = *exact(key, h) + *exact(key + 1, h);
      of[j] += *exact(key + 32, h);
      of[j] += *exact(key + 33, h);
    }
    float part = of[0] + of[1];
    part += __shfl_xor_sync(~0u, part, 16);
    const float to = beside.reference[pairs_done % 2][kGroup][h];
    sum = __fmaf_rn(sum, change_of(sum_reference, to), part);
    sum_reference = to;
  }
  __device__ void add_own() {
    add(kGroup);
    sum_own();
  }

  // Adds what the other warpgroup weighs, as in consume.cuh.
  __device__ void add_others_tile() {
    ptx::barrier_wait(&beside.weights_ready[1 - kGroup], pairs_done & 1);
    const volatile uint32_t* moved = beside.moved[pairs_done % 2];
    const bool same = moved[0] != pairs_done + 1 && moved[1] != pairs_done + 1;
#pragma unroll
    for (int h = 0; h < 4; ++h) pending[h] = 1;
    if (__shfl_sync(~0u, same, 0)) {
      add(1 - kGroup);
      return;
    }
    const float(&others)[most_few_heads] = beside.reference[pairs_done % 2][1 - kGroup];
    float before[4];
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const float other = others[head(h / 2, h % 2)];
      const Meeting m = meeting_of(reference[h], other);
      before[h] = m.before;
      pending[h] = m.after;
      if (reference[h] < other) reference[h] = other;
    }
    const float other = others[lane() % 16];
    if (sum_reference < other) {
      sum *= meeting_of(sum_reference, other).before;
      sum_reference = other;
    }
    ptx::warpgroup_wait<0>();
    hold();
    multiply(before);
    add(1 - kGroup);
  }

  // The scores of a pair are done.
  __device__ void scores_done(float (&s)[8], bool last) {
    ptx::warpgroup_wait<0>();
    ptx::hold_registers(s);
    hold();
    if (last) arrive_warp(&beside.q_free);
  }
  // The tile of this warpgroup is the first of a pair.
  __device__ bool first_of_pairs(int pairs) {
    bool seen = false;
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair, ++pairs_done) {
      float s[8];
      score<true>(s);
      if (pair > 0) release<1>(1, pairs_done - 1);
      score<false>(s);
      scores_done(s, pair + 1 == pairs);
      seen |= softmax(s);
      add_own();
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
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair, ++pairs_done) {
      float s[8];
      score<true>(s);
      score<false>(s);
      scores_done(s, pair + 1 == pairs);
      seen |= softmax(s);
      add_own();
      add_others_tile();
      release<1>(1, pairs_done);
      release<0>(0, pairs_done);
      hold();
    }
    return seen;
  }

  // Sums of both warpgroups, then what is left to write of the heads.
  __device__ void finish(const Work& w, bool seen, bool met) {
    const int h = lane() % 16;
    float total = 0, most = -INFINITY;
    bool any = false;
    if (met) {  // there was a pair of tiles
      if (lane() < 16) beside.sum[kGroup][warp()][h] = sum;
      if (thread < 4)
#pragma unroll
        for (int i = 0; i < 4; ++i) beside.top[kGroup][head(i / 2, i % 2)] = top[i];
      if (thread == 0) beside.seen[kGroup] = seen;
      ptx::barrier_arrive(&beside.sums_ready[kGroup]);
      for (uint64_t& sums : beside.sums_ready) ptx::barrier_wait(&sums, works_met & 1);
      ++works_met;
      float of[2];
#pragma unroll
      for (int g = 0; g < 2; ++g)
        of[g] = (beside.sum[g][0][h] + beside.sum[g][1][h]) +
                (beside.sum[g][2][h] + beside.sum[g][3][h]);
      total = of[0] + of[1];
      most = fmaxf(beside.top[0][h], beside.top[1][h]);
      any = beside.seen[0] || beside.seen[1];
    }
    const bool own = h < w.heads;
    const float sink = f.sink.present && own
                           ? cuda::number_at(f.sink, cuda::offset(f.sink, w.head + h))
                           : -INFINITY;
    const RowEnd end = end_of(total, sum_reference, most, any, sink);
    if (kGroup == 0 && own && thread < 16) {
      if (f.lse.present) cuda::put(f.lse, cuda::offset(f.lse, w.b, w.s, w.head + h), end.lse);
      if (f.row_max.present)
        cuda::put(f.row_max, cuda::offset(f.row_max, w.b, w.s, w.head + h), end.top);
    }
    float factor[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      factor[i] = __shfl_sync(~0u, end.factor, head(i / 2, i % 2)) * pending[i];
#pragma unroll
    for (int i = 0; i < 8 * blocks; ++i) {
      const float by = factor[i / 4 % 2 * 2 + i % 2];
      o[i / 8][i % 8] = by == 0 ? 0.0f : o[i / 8][i % 8] * by;
    }
    if (f.o.present) store(f.o, f.o_words, w);
    if (!f.o_residual.present) return;
    const bool wide = f.o.present && !is_16bit(f.o.dtype);  // then nothing is left
#pragma unroll
    for (int i = 0; i < 8 * blocks; ++i) {
      float& x = o[i / 8][i % 8];
      x -= wide ? x : rounded_16<kF16>(x);
    }
    store(f.o_residual, f.residual_words, w);
  }

  __device__ void store(const View& to, bool words, const Work& w) const {
    store_heads<kF16>(to, words, w, kGroup * half, static_cast<int>(f.value_dim) - kGroup * half,
                      thread, o);
  }

  __device__ void begin_rows() {
#pragma unroll
    for (int h = 0; h < 4; ++h) reference[h] = top[h] = -INFINITY, pending[h] = 1;
    sum = 0, sum_reference = -INFINITY;
#pragma unroll
    for (int i = 0; i < 8 * blocks; ++i) o[i / 8][i % 8] = 0;
  }
  __device__ void run() {
    for (int64_t number = blockIdx.x; number < f.work; number += gridDim.x, ++works) {
      ptx::barrier_wait(&beside.q_ready, works & 1);
      const int pairs = __shfl_sync(~0u, *const_cast<volatile int*>(&beside.pairs), 0);
      ptx::fence_async_shared();
      begin_rows();
      const bool seen = kGroup == 0 ? first_of_pairs(pairs) : second_of_pairs(pairs);
      if (pairs == 0) arrive_warp(&beside.q_free);
      finish(work_of(f, number), seen, pairs > 0);
    }
  }
};

// How often a barrier is met.
__device__ inline void begin_ring_barriers(RingBeside& b) {
  constexpr int warps = 4;
  ptx::barrier_init(&b.q_ready, producer_threads + 1);
  ptx::barrier_init(&b.q_free, 2 * warps);
  for (int t = 0; t < 2; ++t) {
    for (int part = 0; part < 4; ++part) {
      ptx::barrier_init(&b.keys_ready[t][part], producer_threads + (part < 2 ? warps : 0));
      ptx::barrier_init(&b.keys_free[t][part], warps);
    }
    b.moved[t][0] = b.moved[t][1] = 0;
    ptx::barrier_init(&b.sums_ready[t], consumer_threads / 2);
    ptx::barrier_init(&b.weights_ready[t], consumer_threads / 2);
  }
  ptx::barrier_init_fence();
}

template <bool kF16>
__global__ __launch_bounds__(threads, 1) void few_heads_kernel(const __grid_constant__ Forward f) {
  extern __shared__ __align__(1024) char shared[];
  const Ring ring{shared};
  RingBeside& beside = *reinterpret_cast<RingBeside*>(shared + ring_beside_at);
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x == 0) begin_ring_barriers(beside);
  __syncthreads();
  if (group == 0)
    FewHeads<kF16, 0>{f, ring, beside, thread}.run();
  else if (group == 1)
    FewHeads<kF16, 1>{f, ring, beside, thread}.run();
  else
    fill_ring(f, ring, beside, thread);
}

template <bool kF16>
void launch_few_heads(const Forward& f, unsigned blocks, cudaStream_t stream) {
  auto* kernel = few_heads_kernel<kF16>;
  const auto bytes = static_cast<size_t>(ring_shared_bytes());
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)),
                "sparse_attention: shared memory of few heads");
  kernel<<<blocks, threads, bytes, stream>>>(f);
  device::check_launch("sparse_attention: forward of few heads");
}

}  // namespace talea::sparse_attention::sm90
