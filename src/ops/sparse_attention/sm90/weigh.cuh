// What: the kernel of few queries that weighs the scores of a pair of tiles, once the maxima of all
// tiles are known.
// Why: weights relative to what one block alone would have taken, formed once for all who sum.
// Never: rounds a weight but to the 16 bits that are multiplied.
#pragma once

#include "device/common/cuda_check.hpp"
#include "device/sm90/follow.cuh"
#include "ops/sparse_attention/sm90/store.cuh"

namespace talea::sparse_attention::sm90 {

// What sums of a row are relative to, pair by pair: see consume.cuh.
struct Chain {
  float reference = -INFINITY;
  float to[2];  // of the tiles of the pair at hand
  __device__ void meet(float first, float second) {
    to[0] = reference_of(reference, first);
    to[1] = reference_of(reference, second);
  }
  __device__ float of(int tile) const { return tile == 0 ? to[0] : to[1]; }
  __device__ bool moves() const { return to[0] != reference || to[1] != reference; }
  __device__ void pass() { reference = to[0] < to[1] ? to[1] : to[0]; }
};

// The registers of a warpgroup, a 16-bit operand of m64 x k64, as a tile of shared memory holds it.
__device__ inline void write_operand(char* tile, const uint32_t (&p)[16], int thread) {
  const int lane = thread % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int line = thread / 32 * 16 + thread % 32 / 4 + 8 * i;
#pragma unroll
    for (int n = 0; n < 8; n += 4) {
      uint32_t piece[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) piece[j] = p[2 * (n + j) + i];
      exchange(piece, lane);
      *reinterpret_cast<uint4*>(tile + line * 128 + ((n + lane) ^ (line % 8)) * 16) =
          make_uint4(piece[0], piece[1], piece[2], piece[3]);
    }
  }
}

// Chains and maxima of many pairs are read at once, so that few trips to memory are made.
inline constexpr int chained_pairs = 16;

template <bool kF16>
__global__ __launch_bounds__(consumer_threads) void weigh_kernel(
    const __grid_constant__ Forward f) {
  __shared__ float2 most[chained_pairs * 64];
  ptx::let_later_kernels_start();
  const Stored& stored = f.stored;
  const Work w = work_of(f, blockIdx.x);
  const int tile = static_cast<int>(threadIdx.x) / 128;
  const int thread = static_cast<int>(threadIdx.x) % 128, quad = thread / 4;
  const int pair = w.segment;
  const bool there = pair < pairs_of(cuda::query_rule(f.tables, w.b, w.s).slots);
  const int64_t list = w.b * f.tables.queries + w.s, rows = list * f.head_tiles + w.tile;
  const auto* scores = reinterpret_cast<const float4*>(
                           stored.scores + (rows * stored.tiles + 2 * pair + tile) * tile_scores) +
                       thread;
  const auto* all_most = reinterpret_cast<const float2*>(stored.most) + rows * stored.tiles * 32;
  const uint64_t* valid = stored.valid + list * stored.tiles + 2 * pair;
  char* to = stored.weighed + (rows * f.segments + pair) * weighed_bytes;
  ptx::wait_for_earlier_kernels();
  if (!there) return;
  float s[32];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 x = scores[i * 128];
    s[4 * i] = x.x, s[4 * i + 1] = x.y, s[4 * i + 2] = x.z, s[4 * i + 3] = x.w;
  }
  uint32_t flags = 0;
  if (threadIdx.x == 0)
    flags = (valid[0] != 0 ? flag_seen : 0) | (valid[1] != 0 ? 2 * flag_seen : 0);
  Chain chain[2];
  float top[2] = {-INFINITY, -INFINITY};
  for (int first = 0; first <= pair; first += chained_pairs) {
    const int count = min(pair + 1 - first, chained_pairs);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < chained_pairs * 64 / consumer_threads; ++i) {
      const int at = i * consumer_threads + static_cast<int>(threadIdx.x);
      if (at < count * 64) most[at] = all_most[first * 64 + at];
    }
    __syncthreads();
#pragma unroll 2
    for (int i = 0; i < count; ++i) {
      const float2 a = most[i * 64 + quad], b = most[i * 64 + 32 + quad];
      chain[0].meet(a.x, b.x);
      chain[1].meet(a.y, b.y);
      top[0] = fmaxf(top[0], fmaxf(a.x, b.x));
      top[1] = fmaxf(top[1], fmaxf(a.y, b.y));
      if (first + i == pair) break;
      for (Chain& c : chain) c.pass();
    }
  }
  const float reference[2] = {chain[0].of(tile), chain[1].of(tile)};
  float part[2];
  uint32_t p[16];
  if (mutant(Mutant::few_own_reference)) {
    float own[2];
    most_of(s, own);
    weigh<kF16>(s, own, part, p);
  } else {
    weigh<kF16>(s, reference, part, p);
  }
  write_operand(to + tile * chunk_bytes, p, thread);
  reinterpret_cast<float2*>(to + weight_parts_at)[tile * 128 + thread] =
      make_float2(part[0], part[1]);
  if (thread % 4 == 0) {
    reinterpret_cast<float2*>(to + weight_references_at)[tile * 32 + quad] =
        make_float2(reference[0], reference[1]);
    if (tile == 0)
      reinterpret_cast<float2*>(to + weight_top_at)[quad] = make_float2(top[0], top[1]);
  }
  const bool moved = __syncthreads_or(chain[0].moves() || chain[1].moves());
  if (threadIdx.x == 0)
    *reinterpret_cast<uint32_t*>(to + weight_flags_at) = flags | (moved ? flag_moved : 0);
}

template <bool kF16>
void launch_weigh(const Forward& f, cudaStream_t stream) {
  ptx::launch_following(weigh_kernel<kF16>, {.blocks = f.work, .threads = consumer_threads}, f,
                        stream, "sparse_attention: weights");
}

}  // namespace talea::sparse_attention::sm90
