// What: the forward kernel of narrow rows: one warpgroup gathers, scores and sums for a query and 64
// of its heads, and a multiprocessor has several such blocks.
// Why: a list of few short rows is a chain of waits; other blocks work while one waits.
// Never: sums in an order other than that of the two warpgroups of consume.cuh: the bits are theirs.
#pragma once

#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/sm90/consume.cuh"
#include "ops/sparse_attention/sm90/produce.cuh"

namespace talea::sparse_attention::sm90 {

// As work_of(), of fewer than 2^31 works. Formed anew where it is asked for: registers hold sums.
__device__ inline Work narrow_work(const Forward& f) {
  Work w;
  uint32_t number = blockIdx.x;
  asm volatile("" : "+r"(number));
  const auto tiles = static_cast<uint32_t>(f.head_tiles);
  const auto groups = static_cast<uint32_t>(f.tables.groups);
  const auto queries = static_cast<uint32_t>(f.tables.queries);
  uint32_t rest = number / tiles;
  w.tile = static_cast<int>(number - rest * tiles);
  const uint32_t query = rest / groups;
  w.g = rest - query * groups;
  w.b = query / queries;
  w.s = query - static_cast<uint32_t>(w.b) * queries;
  const int64_t begin = w.g * f.group_heads - f.head_begin;
  const int64_t first = begin > 0 ? begin : 0;
  const int64_t last = min(begin + f.group_heads, f.heads);
  w.head = first + w.tile * tile_heads;
  w.heads = static_cast<int>(min(last - w.head, int64_t{tile_heads}));
  return w;
}

// The two warpgroups of consume.cuh have the same references after each pair of tiles: theirs is
// one here. kColumns: chunks of a row; kWide: of values, two instead of one.
// kRows: of a thread; 1 for up to 32 heads, eight of a warp.
template <int kColumns, bool kWide, int kRows, bool kF16>
struct NarrowBlock {
  static constexpr uint64_t chunk = chunk_bytes >> 4, step = 2048 >> 4;
  static constexpr int half = 64, halves = kWide ? 2 : 1;  // of the values, 64 columns each

  const Forward& f;
  char* base;
  NarrowBeside& beside;
  const int thread;
  uint32_t pairs_done = 0;
  float o[halves][half / 2];
  float reference[2], top[2], sum[2][2], pending[2][2];  // [row]; sum, pending: [tile][row]

  // The head of row `line` of a warp's 16, of the work's.
  __device__ static int head_of(int warp, int line) {
    if (kRows == 2) return warp * 16 + line;
    return line < 8 ? warp * 8 + line : tile_heads;
  }
  __device__ int head(int i) const { return head_of(thread / 32, thread % 32 / 4 + 8 * i); }
  __device__ char* keys(int tile) const { return base + (1 + tile) * kColumns * chunk_bytes; }

  // Whether a list is as long as any and names all rows: what its query brings need not be read.
  __device__ bool is_plain() const {
    const cuda::Tables& t = f.tables;
    return key_range({}, {}).known && t.rule.space == IndexSpace::rows && !t.rule.causal &&
           !t.has_block_table && t.sequences == 0 && !t.topk_length.present && !f.counters;
  }
  // By one thread.
  __device__ void open(const Work& w) {
    const cuda::Tables& t = f.tables;
    NarrowList& l = beside.list;
    const bool counts = f.counters && w.tile == 0;
    if (is_plain()) {
      l.query.batch = w.b;
      l.query.slots = t.slots;
      l.range = {true, 0, t.rule.keys, 0};
    } else {
      l.query = cuda::query_rule(t, w.b, w.s);
      l.range = key_range(t.rule, l.query);
      if (counts) l.range.known = false;
    }
    l.slots = static_cast<int>(l.query.slots);
    l.pairs = w.heads > 0 || counts ? pairs_of(l.query.slots) : 0;
    l.indices = static_cast<const char*>(t.indices.data) +
                cuda::offset(t.indices, w.b, w.s, w.g) * (t.indices.dtype == DType::i32 ? 4 : 8);
    l.keys = static_cast<const char*>(f.kv.data) + 2 * cuda::offset(f.kv, l.query.batch, 0, w.g);
  }

  // This lane's row of a pair; null: absent.
  __device__ const char* find_row(int pair) const {
    const NarrowList& l = beside.list;
    const int slot = pair * 2 * tile_keys + slot_of_lane(thread / 32, thread % 32);
    if (slot >= l.slots) return nullptr;
    const View& v = f.tables.indices;
    const int64_t at = slot * v.stride[3];
    const int64_t index = v.dtype == DType::i32 ? reinterpret_cast<const int32_t*>(l.indices)[at]
                                                : reinterpret_cast<const int64_t*>(l.indices)[at];
    if (l.range.known)
      return index >= l.range.low && index < l.range.high
                 ? l.keys + (index + l.range.shift) * f.kv.stride[1] * 2
                 : nullptr;
    const KeyRow found = find_key(f.tables.rule, l.query, slot, index);
    const Work w = narrow_work(f);
    if (f.counters && w.tile == 0 && found.kind == SlotKind::foreign)
      cuda::count(f.tables, f.counters, w.b, w.s, w.g, slot);
    if (found.kind != SlotKind::valid) return nullptr;
    return static_cast<const char*>(f.kv.data) +
           2 * cuda::offset(f.kv, found.outer, found.inner, w.g);
  }

  // Begins to copy both tiles of a pair.
  __device__ void copy(const char* row) {
    const int warp = thread / 32, lane = thread % 32;
    const unsigned valid = __ballot_sync(~0u, row != nullptr);
    const Copier copier(thread, f.dim);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const char* rows[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        rows[j] = reinterpret_cast<const char*>(
            __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), t * 16 + j * 4 + lane / 8));
      copier.template chunks<0, kColumns>(ptx::smem_address(keys(t)), rows, kColumns, f.q.data);
      ptx::barrier_arrive_after_copies(&beside.keys_ready[t]);
      if (lane != 0) continue;
      beside.valid[t][warp] = valid >> (16 * t) & 0xffff;
      ptx::barrier_arrive(&beside.keys_ready[t]);
    }
  }

  // Scores of tile kTile, chunks in the order of consume.cuh. Waits for all products.
  template <int kTile>
  __device__ void score(float (&s)[32]) {
    const uint64_t q = ptx::operand_descriptor(base);
    const uint64_t k = ptx::operand_descriptor(keys(kTile));
    ptx::barrier_wait(&beside.keys_ready[kTile], pairs_done & 1);
    ptx::fence_async_shared();
    ptx::warpgroup_arrive();
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int c = (n + kTile) % kColumns;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (n + i == 0)
          ptx::wgmma_first_n64<0, 0, kF16>(s, q + c * chunk, k + c * chunk);
        else
          ptx::wgmma_n64<0, 0, kF16>(s, q + c * chunk + 2 * i, k + c * chunk + 2 * i);
    }
    ptx::warpgroup_commit();
    ptx::warpgroup_wait<0>();
    ptx::hold_registers(s);
    hold();
  }

  // p: the weights of a tile, relative to `to`. Whether a slot is valid.
  template <int kTile>
  __device__ bool weigh_tile(uint32_t (&p)[16], float (&to)[2], float (&part)[2]) {
    float s[32], most[2];
    score<kTile>(s);
    const volatile uint32_t* v = beside.valid[kTile];
    const uint32_t low = v[0] | v[1] << 16, high = v[2] | v[3] << 16;
    scale_and_mask(s, low | uint64_t{high} << 32, f.scale);
    most_of<kRows>(s, most);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      top[i] = fmaxf(top[i], most[i]);
      to[i] = reference_of(reference[i], most[i]);
    }
    weigh<kF16, kRows>(s, to, part, p);
    return (low | high) != 0;
  }

  __device__ void hold() {
#pragma unroll
    for (int h = 0; h < halves; ++h) ptx::hold_registers(o[h]);
  }
  // Queues the products of weights and a half of a tile's values.
  __device__ void add(int h, const uint32_t (&p)[16], int tile) {
    const uint64_t v = ptx::operand_descriptor(keys(tile) + h * chunk_bytes);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t a[4] = {p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]};
      ptx::multiply_registers<half, 1, kF16>(o[h], a, v + j * step);
    }
  }
  __device__ void begin_products() {
    hold();
    ptx::warpgroup_arrive();
  }

  // Half h of the values first takes tile h, as the warpgroup does that weighs that tile: before,
  // by what its sums change; then the other tile.
  __device__ void own_tile_first(int h, const float (&to)[2], const float (&part)[2]) {
    float factor[2] = {1, 1};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      factor[i] = change_of(reference[i], to[i]);
      sum[h][i] = __fmaf_rn(sum[h][i], factor[i], part[i]);
      factor[i] *= pending[h][i];
    }
    if (h < halves) multiply_rows(o[h < halves ? h : 0], factor);
  }
  __device__ void others_tile_next(int h, const float (&own)[2], const float (&other)[2]) {
    float before[2] = {1, 1};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Meeting m = meeting_of(own[i], other[i]);
      before[i] = m.before;
      pending[h][i] = m.after;
      if (own[i] < other[i]) sum[h][i] *= m.before;
    }
    if (h < halves) multiply_rows(o[h < halves ? h : 0], before);
  }

  // Whether a slot was valid.
  __device__ bool sum_pairs(int pairs) {
    bool seen = false;
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair, ++pairs_done) {
      uint32_t p[2][16];
      float to[2][2], part[2];
      seen |= weigh_tile<0>(p[0], to[0], part);
      own_tile_first(0, to[0], part);
      begin_products();
      add(0, p[0], 0);
      ptx::warpgroup_commit();
      seen |= weigh_tile<1>(p[1], to[1], part);
      own_tile_first(1, to[1], part);
      others_tile_next(0, to[0], to[1]);
      begin_products();
      add(0, p[1], 1);
      if constexpr (kWide) {
        add(1, p[1], 1);
        ptx::warpgroup_commit();
        ptx::warpgroup_wait<0>();
        hold();
      }
      others_tile_next(1, to[1], to[0]);
      if constexpr (kWide) {
        begin_products();
        add(1, p[0], 0);
      }
      ptx::warpgroup_commit();
#pragma unroll
      for (int i = 0; i < kRows; ++i) reference[i] = to[0][i] < to[1][i] ? to[1][i] : to[0][i];
      const char* next = pair + 1 < pairs ? find_row(pair + 1) : nullptr;
      ptx::warpgroup_wait<0>();
      hold();
      if (pair + 1 == pairs) continue;
      __syncthreads();  // all have read the tiles
      copy(next);
    }
    return seen;
  }

  __device__ void store(const View& to, bool words, const Work& w) {
#pragma unroll
    for (int h = 0; h < halves; ++h) {
      Where at[2];
      for (int i = 0; i < kRows; ++i) {
        const int r = head(i);
        if (r >= w.heads) continue;
        at[i].begin = cuda::offset(to, w.b, w.s, w.head + r) + h * half;
        at[i].left = static_cast<int>(f.value_dim) - h * half;
      }
      store_rows<half, kF16>(to, words, o[h], at);
    }
  }

  __device__ void finish(const Work& w, bool any) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float all[2];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        all[t] = sum[t][i] + __shfl_xor_sync(~0u, sum[t][i], 1);
        all[t] += __shfl_xor_sync(~0u, all[t], 2);
      }
      const int r = head(i);
      const bool own = r < w.heads;
      const float sink = f.sink.present && own
                             ? cuda::number_at(f.sink, cuda::offset(f.sink, w.head + r))
                             : -INFINITY;
      const RowEnd end = end_of(all[0] + all[1], reference[i], top[i], any, sink);
#pragma unroll
      for (int h = 0; h < halves; ++h) {
        const float factor = end.factor * pending[h][i];
#pragma unroll
        for (int k = 0; k < half / 2; ++k)
          if (k / 2 % 2 == i) o[h][k] = factor == 0 ? 0.0f : o[h][k] * factor;
      }
      if (!own || thread % 4 != 0) continue;
      if (f.lse.present) cuda::put(f.lse, cuda::offset(f.lse, w.b, w.s, w.head + r), end.lse);
      if (f.row_max.present)
        cuda::put(f.row_max, cuda::offset(f.row_max, w.b, w.s, w.head + r), end.top);
    }
    if (f.o.present) store(f.o, f.o_words, w);
    if (!f.o_residual.present) return;
    const bool wide = f.o.present && !is_16bit(f.o.dtype);  // then nothing is left
#pragma unroll
    for (int h = 0; h < halves; ++h)
#pragma unroll
      for (float& x : o[h]) x -= wide ? x : rounded_16<kF16>(x);
    store(f.o_residual, f.residual_words, w);
  }

  __device__ void begin_rows() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reference[i] = top[i] = -INFINITY;
      sum[0][i] = sum[1][i] = 0;
      pending[0][i] = pending[1][i] = 1;
    }
#pragma unroll
    for (int h = 0; h < halves; ++h)
#pragma unroll
      for (float& x : o[h]) x = 0;
  }

  __device__ void copy_q(const Work& w) const {
    const char* rows[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = head_of(j, thread / 8);
      rows[j] = r < w.heads ? static_cast<const char*>(f.q.data) +
                                  2 * cuda::offset(f.q, w.b, w.s, w.head + r)
                            : nullptr;
    }
    Copier(thread, f.dim).chunks<0, kColumns>(ptx::smem_address(base), rows, kColumns, f.q.data);
  }
  __device__ void run() {
    const Work w = narrow_work(f);
    copy_q(w);
    if (thread == 0) {
      constexpr int warps = producer_threads / 32;
      ptx::barrier_init(&beside.q_ready, producer_threads);
      for (uint64_t& ready : beside.keys_ready) ptx::barrier_init(&ready, producer_threads + warps);
      ptx::barrier_init_fence();
      open(w);
    }
    __syncthreads();
    ptx::barrier_arrive_after_copies(&beside.q_ready);
    const int pairs = beside.list.pairs;
    if (pairs > 0) copy(find_row(0));
    begin_rows();
    ptx::barrier_wait(&beside.q_ready, 0);
    const bool seen = sum_pairs(pairs);
    finish(narrow_work(f), seen);
  }
};

template <int kColumns, bool kWide, int kRows, bool kF16>
__global__ __launch_bounds__(producer_threads, narrow_blocks(kWide)) void narrow_kernel(
    const __grid_constant__ Forward f) {
  extern __shared__ __align__(1024) char shared[];
  auto& beside = *reinterpret_cast<NarrowBeside*>(shared + 3 * kColumns * chunk_bytes);
  NarrowBlock<kColumns, kWide, kRows, kF16>{f, shared, beside, static_cast<int>(threadIdx.x)}.run();
}

template <int kColumns, bool kWide, int kRows, bool kF16>
void launch_narrow_of(const Forward& f, unsigned blocks, cudaStream_t stream) {
  auto* kernel = narrow_kernel<kColumns, kWide, kRows, kF16>;
  const auto bytes = static_cast<size_t>(narrow_shared_bytes(f.dim));
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)),
                "sparse_attention: shared memory of narrow rows");
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared),
                "sparse_attention: shared memory of narrow rows");
  kernel<<<blocks, producer_threads, bytes, stream>>>(f);
  device::check_launch("sparse_attention: forward of narrow rows");
}

template <int kRows, bool kF16>
void launch_narrow_rows(const Forward& f, unsigned blocks, cudaStream_t stream) {
  const bool wide = narrow_wide(f.dim, f.value_dim);
  switch (narrow_columns(f.dim)) {
    case 1:
      return launch_narrow_of<1, false, kRows, kF16>(f, blocks, stream);
    case 2:
      return wide ? launch_narrow_of<2, true, kRows, kF16>(f, blocks, stream)
                  : launch_narrow_of<2, false, kRows, kF16>(f, blocks, stream);
    default:
      return launch_narrow_of<3, true, kRows, kF16>(f, blocks, stream);
  }
}

template <bool kF16>
void launch_narrow(const Forward& f, unsigned blocks, cudaStream_t stream) {
  std::min(f.heads, f.group_heads) <= tile_heads / 2
      ? launch_narrow_rows<1, kF16>(f, blocks, stream)
      : launch_narrow_rows<2, kF16>(f, blocks, stream);
}

}  // namespace talea::sparse_attention::sm90
