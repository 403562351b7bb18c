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
  float to[2] = {-INFINITY, -INFINITY};  // of the tiles of the pair at hand
  __device__ void meet(float first, float second) {
    to[0] = reference_of(reference, first);
    to[1] = reference_of(reference, second);
  }
  __device__ float of(int tile) const { return tile == 0 ? to[0] : to[1]; }
  __device__ bool moves() const { return to[0] != reference || to[1] != reference; }
  __device__ void pass() { reference = to[0] < to[1] ? to[1] : to[0]; }
};

// As weigh() of rows.cuh, of one of a thread's two rows.
template <bool kF16>
__device__ inline float weigh_row(float (&s)[16], float reference, uint32_t (&p)[8]) {
  const float base = base_of(reference);
  float of[4] = {};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 2 * n; e < 2 * n + 2; ++e) {
      s[e] = power(s[e] - base);
      of[n % 4] += s[e];
    }
    p[n] = packed<kF16>(s[2 * n], s[2 * n + 1]);
  }
  return (of[0] + of[1]) + (of[2] + of[3]);
}

// A row of a 16-bit operand of m64 x k64 from the registers of a quad of lanes to where a tile of
// shared memory holds it.
__device__ inline void write_operand_row(char* tile, const uint32_t (&p)[8], int line, int lane) {
#pragma unroll
  for (int n = 0; n < 8; n += 4) {
    uint32_t piece[4] = {p[n], p[n + 1], p[n + 2], p[n + 3]};
    exchange(piece, lane);
    *reinterpret_cast<uint4*>(tile + line * 128 + ((n + lane) ^ (line % 8)) * 16) =
        make_uint4(piece[0], piece[1], piece[2], piece[3]);
  }
}

// Maxima of so many pairs are read at once: few trips to memory.
inline constexpr int chained_pairs = 16;
// A warpgroup has one of a tile's rows r and r + 8 of each thread's two, for both of a pair's
// tiles.
inline constexpr int weigh_threads = 512;

template <bool kF16>
__global__ __launch_bounds__(weigh_threads,
                             2) void weigh_kernel(const __grid_constant__ Forward f) {
  __shared__ float most[chained_pairs * 128];
  ptx::let_later_kernels_start();
  const Stored& stored = f.stored;
  const Work w = work_of(f, blockIdx.x);
  const int row = static_cast<int>(threadIdx.x) / 256,
            tile = static_cast<int>(threadIdx.x) / 128 % 2;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 4;
  const int own = thread / 4 * 2 + row;  // where this row's numbers lie among a tile's
  const int pair = w.segment;
  const bool there = pair < pairs_of(cuda::query_rule(f.tables, w.b, w.s).slots);
  const int64_t list = w.b * f.tables.queries + w.s, rows = list * f.head_tiles + w.tile;
  const auto* scores = reinterpret_cast<const float2*>(
                           stored.scores + (rows * stored.tiles + 2 * pair + tile) * tile_scores) +
                       thread * 2 + row;
  const float* all_most = stored.most + rows * stored.tiles * 64;
  const uint64_t* valid = stored.valid + list * stored.tiles + 2 * pair;
  char* to = stored.weighed + (rows * f.segments + pair) * weighed_bytes;
  ptx::wait_for_earlier_kernels();
  if (!there) return;
  float s[16];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 x = scores[n * 256];
    s[2 * n] = x.x, s[2 * n + 1] = x.y;
  }
  uint32_t flags = 0;
  if (threadIdx.x == 0)
    flags = (valid[0] != 0 ? flag_seen : 0) | (valid[1] != 0 ? 2 * flag_seen : 0);
  Chain chain;
  float top = -INFINITY;
  for (int first = 0; first <= pair; first += chained_pairs) {
    const int count = min(pair + 1 - first, chained_pairs);
    if (first > 0) __syncthreads();
    const int at = 4 * static_cast<int>(threadIdx.x);
    if (at < count * 128)
      *reinterpret_cast<float4*>(most + at) =
          *reinterpret_cast<const float4*>(all_most + first * 128 + at);
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const float a = most[i * 128 + own], b = most[i * 128 + 64 + own];
      chain.pass();
      chain.meet(a, b);
      top = fmaxf(top, fmaxf(a, b));
    }
  }
  static_assert(chained_pairs * 128 == 4 * weigh_threads);
  float reference = chain.of(tile);
  if (mutant(Mutant::few_own_reference)) {
    const float* of_pair = most + pair % chained_pairs * 128;
    reference = of_pair[tile * 64 + own];
  }
  uint32_t p[8];
  const float part = weigh_row<kF16>(s, reference, p);
  write_operand_row(to + tile * chunk_bytes, p, thread / 32 * 16 + thread % 32 / 4 + 8 * row, lane);
  reinterpret_cast<float*>(to + weight_parts_at)[(tile * 128 + thread) * 2 + row] = part;
  if (lane == 0) {
    reinterpret_cast<float*>(to + weight_references_at)[tile * 64 + own] = chain.of(tile);
    if (tile == 0) reinterpret_cast<float*>(to + weight_top_at)[own] = top;
  }
  const bool moved = __syncthreads_or(chain.moves());
  if (threadIdx.x == 0)
    *reinterpret_cast<uint32_t*>(to + weight_flags_at) = flags | (moved ? flag_moved : 0);
}

template <bool kF16>
void launch_weigh(const Forward& f, cudaStream_t stream) {
  ptx::launch_following(weigh_kernel<kF16>, {.blocks = f.work, .threads = weigh_threads}, f, stream,
                        "sparse_attention: weights");
}

}  // namespace talea::sparse_attention::sm90
