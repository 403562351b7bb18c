// What: the weights of a tile of few queries, formed where its scores are, once the maxima of the
// tiles before it are known; and the kernel that says of all tiles that nothing is known yet.
// Why: weights relative to what one block alone would have taken, formed once for all who sum.
// Never: rounds a weight but to the 16 bits that are multiplied, or waits for a tile of a later
// block: earlier ones run already.
#pragma once

#include "device/sm90/follow.cuh"
#include "ops/sparse_attention/sm90/store.cuh"

namespace talea::sparse_attention::sm90 {

// The bits of a maximum that is not known: a NaN that no operation forms.
inline constexpr uint32_t unknown = ~0u;

__device__ inline void load_relaxed(float2& x, const float2* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "@p ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];\n}"
      : "+f"(x.x), "+f"(x.y)
      : "l"(from), "r"(static_cast<int>(wanted)));
}
__device__ inline void store_relaxed(float2* to, float2 x) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x.x), "f"(x.y)
               : "memory");
}
__device__ inline bool is_known(float2 x) {
  return __float_as_uint(x.x) != unknown && __float_as_uint(x.y) != unknown;
}

// What sums of a thread's two rows are relative to after the pairs before a tile, pair by pair: see
// consume.cuh; and the largest score up to the tile.
struct Chain {
  float reference[2] = {-INFINITY, -INFINITY};
  float top[2] = {-INFINITY, -INFINITY};
  __device__ void pass(int row, float first, float second) {
    const float to = reference_of(reference[row], first);
    const float other = reference_of(reference[row], second);
    reference[row] = to < other ? other : to;
  }
};

// Maxima of so many tiles are read at once, those of a quad's rows by its four lanes.
inline constexpr int chained_tiles = 32;

// most: of this thread's rows of tile 0; all threads of a warp.
__device__ inline Chain chain_before(const float2* most, int tile) {
  const int lane = static_cast<int>(threadIdx.x) % 4,
            quad = static_cast<int>(threadIdx.x) % 32 - lane;
  Chain chain;
#pragma unroll 1
  for (int first = 0; first < tile; first += chained_tiles) {
    float2 x[chained_tiles / 4];
#pragma unroll
    for (int i = 0; i < chained_tiles / 4; ++i) {
      const float none = first + 4 * i + lane < tile ? __uint_as_float(unknown) : -INFINITY;
      x[i] = make_float2(none, none);
    }
    bool known = false;
    while (!known) {
#pragma unroll
      for (int i = 0; i < chained_tiles / 4; ++i)
        load_relaxed(x[i], most + (first + 4 * i + lane) * 32, !is_known(x[i]));
      known = true;
#pragma unroll
      for (int i = 0; i < chained_tiles / 4; ++i) known = known && is_known(x[i]);
      known = __all_sync(~0u, known);
    }
#pragma unroll
    for (int i = 0; i < chained_tiles / 4; ++i) {
      chain.top[0] = fmaxf(chain.top[0], x[i].x);
      chain.top[1] = fmaxf(chain.top[1], x[i].y);
    }
#pragma unroll
    for (int i = 0; i < chained_tiles / 2; ++i) {
      if (first + 2 * i + 1 >= tile) break;
      const int from = quad + i % 2 * 2;
      chain.pass(0, __shfl_sync(~0u, x[i / 2].x, from), __shfl_sync(~0u, x[i / 2].x, from + 1));
      chain.pass(1, __shfl_sync(~0u, x[i / 2].y, from), __shfl_sync(~0u, x[i / 2].y, from + 1));
    }
  }
#pragma unroll
  for (float& top : chain.top) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  }
  return chain;
}

// A row of a 16-bit operand of m64 x k64 from the registers of a quad of lanes to where a tile of
// shared memory holds it.
__device__ inline void write_operand_row(char* tile, const uint32_t (&p)[16], int row, int line,
                                         int lane) {
#pragma unroll
  for (int n = 0; n < 8; n += 4) {
    uint32_t piece[4] = {p[2 * n + row], p[2 * n + 2 + row], p[2 * n + 4 + row],
                         p[2 * n + 6 + row]};
    exchange(piece, lane);
    *reinterpret_cast<uint4*>(tile + line * 128 + ((n + lane) ^ (line % 8)) * 16) =
        make_uint4(piece[0], piece[1], piece[2], piece[3]);
  }
}

// s: a tile's scores as a warpgroup's registers hold them, -Inf where a slot is absent; any: a slot
// is valid; rows: list and tile of heads; thread: of the warpgroup; meanwhile: what there is to do
// until the maxima of other blocks are known. Begins after the earlier kernel.
template <bool kF16, class Meanwhile>
__device__ inline void write_weights(const Forward& f, float (&s)[32], bool any, int64_t rows,
                                     int tile, int thread, const Meanwhile& meanwhile) {
  const int lane = thread % 4, half = tile % 2;
  float2* all_most =
      reinterpret_cast<float2*>(f.stored.most) + rows * f.stored.tiles * 32 + thread / 4;
  float most[2];
  most_of(s, most);
  if (lane == 0) store_relaxed(all_most + tile * 32, make_float2(most[0], most[1]));
  meanwhile();
  const Chain chain = chain_before(all_most, tile);
  float to[2], part[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    to[i] = mutant(Mutant::few_own_reference) ? most[i] : reference_of(chain.reference[i], most[i]);
  const bool moved = __any_sync(~0u, to[0] != chain.reference[0] || to[1] != chain.reference[1]);
  uint32_t p[16];
  weigh<kF16>(s, to, part, p);
  char* pair = f.stored.weighed + (rows * f.segments + tile / 2) * weighed_bytes;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    write_operand_row(pair + half * chunk_bytes, p, i, thread / 32 * 16 + thread % 32 / 4 + 8 * i,
                      lane);
  reinterpret_cast<float2*>(pair + weight_parts_at)[half * 128 + thread] =
      make_float2(part[0], part[1]);
  if (lane == 0) {
    reinterpret_cast<float2*>(pair + weight_references_at)[half * 32 + thread / 4] =
        make_float2(to[0], to[1]);
    if (half == 1)
      reinterpret_cast<float2*>(pair + weight_top_at)[thread / 4] =
          make_float2(fmaxf(chain.top[0], most[0]), fmaxf(chain.top[1], most[1]));
  }
  if (thread % 32 == 0)
    reinterpret_cast<uint32_t*>(pair + weight_flags_at)[half * 4 + thread / 32] =
        (any ? flag_seen : 0) | (moved ? flag_moved : 0);
}

// What a warpgroup has written of a tile of a list may be read. barrier: of its own threads.
__device__ inline void count_written(const Forward& f, int64_t list, int barrier, int thread) {
  talea::sm90::fence_async_global();
  talea::sm90::named_barrier_sync(barrier, 128);
  if (thread == 0) talea::sm90::count_up(f.stored.written + list);
}

struct Unknown {
  int* written;
  uint4* most;
  int64_t lists, words;
};
static __global__ void unknown_kernel(const __grid_constant__ Unknown u) {
  talea::sm90::let_later_kernels_start();
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at < u.lists) u.written[at] = 0;
  if (at < u.words) u.most[at] = make_uint4(unknown, unknown, unknown, unknown);
}

// A multiprocessor keeps the share of shared memory that the next kernel needs.
inline void mark_unknown(const Forward& f, cudaStream_t stream) {
  constexpr int each = 256;
  const int64_t rows = f.work / f.segments, words = rows * f.stored.tiles * tile_heads / 4;
  device::check(cudaFuncSetAttribute(unknown_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared),
                "sparse_attention: few queries");
  talea::sm90::launch_following(
      unknown_kernel, {.blocks = (words + each - 1) / each, .threads = each, .follows = false},
      Unknown{f.stored.written, reinterpret_cast<uint4*>(f.stored.most), rows / f.head_tiles,
              words},
      stream, "sparse_attention: few queries");
}

}  // namespace talea::sparse_attention::sm90
