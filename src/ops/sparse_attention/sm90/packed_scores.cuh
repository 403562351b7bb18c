// What: the kernel of few queries that scores a tile of packed keys for 128 heads, and leaves its
// weights, and its values dequantised, for the blocks that sum them.
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

  // One instruction of all lanes, whatever they store.
  __device__ static void store_words(char* to, const uint4& x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
  }

  // Two pieces of eight columns of each of four chunks, the first of them `first`: into the tile of
  // keys, and among the values.
  __device__ void put(const uint4 (&x)[8], int first) const {
    const int row = key(), lane = thread % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      *reinterpret_cast<uint4*>(keys() + (first + i / 2) * chunk_bytes + row * 128 +
                                ((2 * lane + i % 2) ^ row % 8) * 16) = x[i];
  }
  // Lanes of two rows next to each other exchange pieces: each sector is written as a whole.
  __device__ void leave(const uint4 (&x)[8], int first, char* values) const {
    if (head_tile != 0) return;
    const bool odd = key() % 2 != 0;
    char* to = values + first / 4 * (slice_bytes / 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 own = odd ? x[2 * i + 1] : x[2 * i];
      uint4 others = odd ? x[2 * i] : x[2 * i + 1];
      for (uint32_t* word : {&others.x, &others.y, &others.z, &others.w})
        *word = __shfl_xor_sync(~0u, *word, 4);
      char* row = to + i * 4 * f.stored.tiles * slice_bytes;
      store_words(row, odd ? others : own);
      store_words(row + 32, odd ? own : others);
    }
  }

  __device__ int heads() const {
    return static_cast<int>(min(f.heads - (head_tile + group) * tile_heads, int64_t{tile_heads}));
  }

  // The warpgroup that copies q of both tiles of heads, which nothing but the call decides.
  __device__ void copy_q(uint64_t* ready) const {
    const Copier copier(thread, most_columns);
    const char* rows[4];
    const auto* first = static_cast<const char*>(f.q.data) + 2 * cuda::offset(f.q, b, s, 0);
    const int64_t step = 2 * f.q.stride[2];
#pragma unroll 1
    for (int t = 0; t < 2; ++t) {
      const int64_t head = (head_tile + t) * tile_heads + thread / 8;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        rows[j] = head + 16 * j < f.heads ? first + (head + 16 * j) * step : nullptr;
      if (head - thread / 8 < f.heads)
        copier.chunks<0, packed_columns, true>(ptx::smem_address(base + t * packed_tile_bytes),
                                               rows, packed_columns, f.q.data);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    ptx::fence_async_shared();
    ptx::barrier_arrive(ready);
  }

  // A thread's sixteen columns of each of four chunks, the first of them `first`.
  __device__ static void convert(uint4 (&to)[8], const uint4* x, int first,
                                 const float (&scales)[4], bool quick) {
    const float scale[2] = {first == 0 ? scales[0] : scales[2], first == 0 ? scales[1] : scales[3]};
    if (quick) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t grown = grown_twice(scale[i / 2]);
        to[2 * i] = short_bf16_of(make_uint2(x[i].x, x[i].y), grown);
        to[2 * i + 1] = short_bf16_of(make_uint2(x[i].z, x[i].w), grown);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[2 * i] = bf16_of(x[i].x, x[i].y, scale[i / 2]);
        to[2 * i + 1] = bf16_of(x[i].z, x[i].w, scale[i / 2]);
      }
    }
  }

  __device__ void run(uint64_t* q_ready) const {
    const QueryRule query = cuda::query_rule(f.tables, b, s);
    if (tile / 2 >= pairs_of(query.slots)) return ptx::wait_for_earlier_kernels();
    const int64_t slot = int64_t{tile} * tile_keys + key();
    const int64_t at = find_row(query, slot, read_index(slot, query.slots));
    const bool scores = heads() > 0, there = at >= 0;
    const char* from = static_cast<const char*>(f.kv.data) + (there ? at : 0);
    const int row = key(), lane = thread % 4;
    // The half of the columns that is multiplied first: see consume.cuh.
    const int half = tile % 2 * 4;
    uint4 x[8];
#pragma unroll
    for (int c = 0; c < 8; ++c)
      x[c] = load_words(from + lane * 16 + (c < 4 ? half + c : c - half) * chunk_columns, there);
    const uint4 scale_words = load_words(from + packed_scales_at, there);
    const uint32_t rest_at = ptx::smem_address(keys() + 8 * chunk_bytes + row * 128);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      ptx::copy_16_bytes(rest_at + ((2 * lane + j) ^ row % 8) * 16,
                         from + packed_rest_at + (2 * lane + j) * 16, there);
    uint32_t found = __ballot_sync(~0u, there), bits = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) bits |= (found >> (4 * j) & 1) << j;
    if (threadIdx.x % 32 == 0) valid()[threadIdx.x / 32] = static_cast<uint8_t>(bits);
    char* values = f.stored.values +
                   ((list * f.stored.slices + lane) * f.stored.tiles + tile) * slice_bytes +
                   row / 2 * 64 + (row ^ row / 4) % 2 * 16;
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
    uint4 numbers[2][8];
    convert(numbers[0], x, half, scales, quick);
    put(numbers[0], half);
    asm volatile("cp.async.wait_all;" ::: "memory");
    ptx::fence_async_shared();
    ptx::named_barrier_sync(1, consumer_threads);
    const uint64_t a = ptx::operand_descriptor(q()), k = ptx::operand_descriptor(keys());
    constexpr int middle = 256 / chunk_columns;
    float product[32];
    if (scores) {
      ptx::barrier_wait(q_ready, 0);
      ptx::fence_async_shared();
      ptx::warpgroup_arrive();
      multiply_scores<false, true>(product, a, k, half, half == 0 ? middle : packed_columns);
      ptx::warpgroup_commit();
    }
    convert(numbers[1], x + 4, 4 - half, scales, quick);
    put(numbers[1], 4 - half);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(1, consumer_threads);
    if (scores) {
      ptx::warpgroup_arrive();
      multiply_scores<false, false>(product, a, k, 4 - half, half == 0 ? packed_columns : middle);
      ptx::warpgroup_commit();
      ptx::warpgroup_wait<0>();
      ptx::hold_registers(product);
    }
    // Values leave while maxima are on their way, behind all fences, which would wait for them.
    const auto leave_values = [&] {
      leave(numbers[0], half, values);
      leave(numbers[1], 4 - half, values);
    };
    ptx::begin_after_earlier_kernels();
    if (scores)
      write(product, leave_values);
    else
      leave_values();
    count_written(f, list, 2 + group, thread);
  }

  // Absent keys have no score; then weights.
  template <class Meanwhile>
  __device__ void write(float (&s)[32], const Meanwhile& meanwhile) const {
    const uint64_t slots = *reinterpret_cast<const volatile uint64_t*>(valid());
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
    write_weights<false>(f, s, slots != 0, list * f.head_tiles + head_tile + group, tile, thread,
                         meanwhile);
  }
};

static __global__ __launch_bounds__(threads, 1) void packed_scores_kernel(
    const __grid_constant__ Forward f) {
  extern __shared__ __align__(1024) char shared[];
  auto* q_ready = reinterpret_cast<uint64_t*>(shared + 3 * packed_tile_bytes + 8);
  if (threadIdx.x == 0) {
    ptx::barrier_init(q_ready, producer_threads);
    ptx::barrier_init_fence();
  }
  const uint32_t halves = static_cast<uint32_t>(f.head_tiles + 1) / 2, tiles = f.stored.tiles;
  uint32_t rest = blockIdx.x;
  const int head_tile = halves == 1 ? 0 : static_cast<int>(rest % halves) * 2;
  rest /= halves;
  const int tile = static_cast<int>(rest % tiles);
  const uint32_t list = rest / tiles, queries = static_cast<uint32_t>(f.tables.queries);
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const PackedScores p{f,     shared, list,           tile,          head_tile,
                       group, thread, list / queries, list % queries};
  __syncthreads();
  if (group == 2)
    p.copy_q(q_ready);
  else
    p.run(q_ready);
}

inline void launch_packed_scores(const Forward& f, unsigned blocks, cudaStream_t stream) {
  ptx::launch_following(packed_scores_kernel,
                        {.blocks = blocks, .threads = threads, .shared_bytes = packed_scores_bytes},
                        f, stream, "sparse_attention: scores of packed rows");
}

}  // namespace talea::sparse_attention::sm90
