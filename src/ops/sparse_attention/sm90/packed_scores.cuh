// What: the kernel of few queries that scores a tile of packed keys for 128 heads, and leaves the
// tile's values dequantised for the blocks that sum them.
// Why: where queries are few, time is the chain of one block: list, rows, numbers, product. Here it
// is walked once, by small code.
// Never: scores in an order of columns other than that of consume.cuh.
#pragma once

#include "device/sm90/follow.cuh"
#include "ops/sparse_attention/sm90/produce_packed.cuh"
#include "ops/sparse_attention/sm90/scores.cuh"

namespace talea::sparse_attention::sm90 {

struct PackedScores {
  const Forward& f;
  char* base;
  const int64_t list;
  const int tile, head_tile;  // of keys; the first of two of heads
  const int group, thread;    // of the warpgroup
  const int64_t b, s;

  __device__ int key() const { return static_cast<int>(threadIdx.x) / 4; }
  __device__ char* q() const { return base + group * packed_tile_bytes; }
  __device__ char* keys() const { return base + 2 * packed_tile_bytes; }
  __device__ uint8_t* valid() const {
    return reinterpret_cast<uint8_t*>(keys() + packed_tile_bytes);
  }

  __device__ int64_t read_index(int64_t slot, int64_t slots) const {
    const View& v = f.tables.indices;
    return slot < slots ? cuda::integer_at(v, cuda::offset(v, b, s, 0) + slot * v.stride[3]) : -1;
  }
  // The row of this thread's key in bytes; -1: absent.
  __device__ int64_t find_row(const QueryRule& query, int64_t slot, int64_t index) const {
    if (slot >= query.slots) return -1;
    const bool counts = f.counters && head_tile == 0;
    const KeyRange range = key_range(f.tables.rule, query);
    if (range.known && !counts)
      return index >= range.low && index < range.high
                 ? cuda::offset(f.kv, query.batch, 0, 0) + (index + range.shift) * f.kv.stride[1]
                 : -1;
    const KeyRow found = find_key(f.tables.rule, query, slot, index);
    if (counts && thread % 4 == 0 && found.kind == SlotKind::foreign)
      cuda::count(f.tables, f.counters, b, s, 0, slot);
    return found.kind == SlotKind::valid ? cuda::offset(f.kv, found.outer, found.inner, 0) : -1;
  }
  // In the order in which they stand here: copies behind them wait for their turn.
  __device__ static uint4 load_words(const char* from, bool there) {
    uint4 x;
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ne.b32 p, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
        : "l"(from), "r"(static_cast<int>(there)));
    return x;
  }

  // Two pieces of eight columns, of chunk c: into the tile of keys, and among the values.
  __device__ void put(int c, const uint4& low, const uint4& high, char* values) const {
    const int row = key(), lane = thread % 4;
    char* to = keys() + c * chunk_bytes + row * 128;
    *reinterpret_cast<uint4*>(to + (2 * lane ^ row % 8) * 16) = low;
    *reinterpret_cast<uint4*>(to + ((2 * lane + 1) ^ row % 8) * 16) = high;
    if (head_tile != 0) return;
    char* slice = values + c % 4 * 4 * f.stored.tiles * slice_bytes + c / 4 * (slice_bytes / 2);
    *reinterpret_cast<uint4*>(slice + row / 4 % 2 * 16) = low;
    *reinterpret_cast<uint4*>(slice + (1 - row / 4 % 2) * 16) = high;
  }

  __device__ void run() const {
    const QueryRule query = cuda::query_rule(f.tables, b, s);
    if (tile / 2 >= pairs_of(query.slots)) return;
    const int64_t slot = int64_t{tile} * tile_keys + key();
    const int64_t index = read_index(slot, query.slots);
    const int heads =
        static_cast<int>(min(f.heads - (head_tile + group) * tile_heads, int64_t{tile_heads}));
    const bool scores = heads > 0;
    const Copier copier(thread, most_columns);
    const char* q_rows[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = thread / 8 + 16 * j;
      q_rows[j] = row < heads
                      ? static_cast<const char*>(f.q.data) +
                            2 * cuda::offset(f.q, b, s, (head_tile + group) * tile_heads + row)
                      : nullptr;
    }
    const uint32_t q_at = ptx::smem_address(q());
    // While the index is on its way.
    if (scores) copier.chunks<0, 2, true>(q_at, q_rows, packed_columns, f.q.data);
    const int64_t at = find_row(query, slot, index);
    const bool there = at >= 0;
    const char* from = static_cast<const char*>(f.kv.data) + (there ? at : 0);
    const int row = key(), lane = thread % 4;
    uint4 x[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] = load_words(from + lane * 16 + c * chunk_columns, there);
    const uint4 scale_words = load_words(from + packed_scales_at, there);
    const uint32_t rest_at = ptx::smem_address(keys() + 8 * chunk_bytes + row * 128);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      ptx::copy_16_bytes(rest_at + ((2 * lane + j) ^ row % 8) * 16,
                         from + packed_rest_at + (2 * lane + j) * 16, there);
    if (scores) copier.chunks<2, packed_columns - 2, true>(q_at, q_rows, packed_columns, f.q.data);
    uint32_t found = __ballot_sync(~0u, there), bits = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) bits |= (found >> (4 * j) & 1) << j;
    if (threadIdx.x % 32 == 0) valid()[threadIdx.x / 32] = static_cast<uint8_t>(bits);

    float scales[4] = {1, 1, 1, 1};
    if (there) {
      scales[0] = __uint_as_float(scale_words.x), scales[1] = __uint_as_float(scale_words.y);
      scales[2] = __uint_as_float(scale_words.z), scales[3] = __uint_as_float(scale_words.w);
    }
    uint32_t nans = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c)
      nans |= nans_of(x[c].x) | nans_of(x[c].y) | nans_of(x[c].z) | nans_of(x[c].w);
    const bool quick = __all_sync(~0u, is_short(scales[0]) & is_short(scales[1]) &
                                           is_short(scales[2]) & is_short(scales[3]) & (nans == 0));
    char* values = f.stored.values +
                   ((list * f.stored.slices + lane) * f.stored.tiles + tile) * slice_bytes +
                   row * 32;
    if (quick) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const uint32_t grown = grown_twice(scales[c / 2]);
        put(c, short_bf16_of(make_uint2(x[c].x, x[c].y), grown),
            short_bf16_of(make_uint2(x[c].z, x[c].w), grown), values);
      }
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c)
        put(c, bf16_of(x[c].x, x[c].y, scales[c / 2]), bf16_of(x[c].z, x[c].w, scales[c / 2]),
            values);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    ptx::fence_async_shared();
    __syncthreads();
    if (scores) score();
  }

  __device__ void score() const {
    float s[32];
    const uint64_t slots = *reinterpret_cast<const volatile uint64_t*>(valid());
    {
      const uint64_t a = ptx::operand_descriptor(q()), k = ptx::operand_descriptor(keys());
      constexpr int middle = 256 / chunk_columns, end = packed_columns;
      const bool second = tile % 2 != 0;
      ptx::warpgroup_arrive();
      multiply_scores<false, true>(s, a, k, second ? middle : 0, second ? end : middle);
      multiply_scores<false, false>(s, a, k, second ? 0 : middle, second ? middle : end);
      ptx::warpgroup_commit();
      ptx::warpgroup_wait<0>();
      ptx::hold_registers(s);
    }
    const int shift = thread % 4 * 2;
    const unsigned words[2] = {static_cast<unsigned>(slots) >> shift,
                               static_cast<unsigned>(slots >> 32) >> shift};
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool there = words[n / 4] >> (n % 4 * 8 + e % 2) & 1;
        s[4 * n + e] = there ? s[4 * n + e] * f.scale : -INFINITY;
      }
    const int64_t at = (list * f.head_tiles + head_tile + group) * f.stored.tiles + tile;
    auto* to = reinterpret_cast<float4*>(f.stored.scores + at * tile_scores) + thread;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      to[i * 128] = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    float most[2];
    most_of(s, most);
    if (thread % 4 == 0)
      reinterpret_cast<float2*>(f.stored.most)[at * 32 + thread / 4] =
          make_float2(most[0], most[1]);
    if (threadIdx.x == 0 && head_tile == 0) f.stored.valid[list * f.stored.tiles + tile] = slots;
  }
};

static __global__ __launch_bounds__(consumer_threads, 1) void packed_scores_kernel(
    const __grid_constant__ Forward f) {
  extern __shared__ __align__(1024) char shared[];
  ptx::let_later_kernels_start();
  const uint32_t halves = static_cast<uint32_t>(f.head_tiles + 1) / 2, tiles = f.stored.tiles;
  uint32_t rest = blockIdx.x;
  const int head_tile = static_cast<int>(rest % halves) * 2;
  rest /= halves;
  const int tile = static_cast<int>(rest % tiles);
  const uint32_t list = rest / tiles, queries = static_cast<uint32_t>(f.tables.queries);
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  PackedScores{f,
               shared,
               list,
               tile,
               head_tile,
               group,
               static_cast<int>(threadIdx.x) % 128,
               list / queries,
               list % queries}
      .run();
}

inline void launch_packed_scores(const Forward& f, unsigned blocks, cudaStream_t stream) {
  ptx::launch_following(packed_scores_kernel,
                        {.blocks = blocks,
                         .threads = consumer_threads,
                         .follows = false,
                         .shared_bytes = packed_scores_bytes},
                        f, stream, "sparse_attention: scores of packed rows");
}

}  // namespace talea::sparse_attention::sm90
