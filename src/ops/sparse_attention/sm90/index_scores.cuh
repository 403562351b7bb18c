// What: the kernel of lane sm90's index scores: products of every head, activated and weighed in
// registers.
// Why: of [heads, queries, keys] products only the sums over heads are ever written.
// Never: lets NaN go lost in the activation, or lets heads that are not there weigh anything.
//
// Keys are the rows of a product, heads of several queries its columns: a thread has whole pieces
// of a sum over heads, and four lanes the rest. While one warpgroup weighs, the other multiplies.
#pragma once

#include "device/common/cuda_check.hpp"
#include "device/sm90/ptx.cuh"
#include "device/sm90/wgmma.cuh"
#include "ops/sparse_attention/sm90/index_tile.hpp"

namespace talea::sparse_attention::sm90 {

namespace index {

namespace ptx = talea::sm90;

struct Tiles {
  char* base;
  int chunks;
  static constexpr int rows_bytes = 128 * index_rows, keys_bytes = 128 * index_keys;
  __device__ char* q(int group, int chunk) const {
    return base + (group * chunks + chunk) * rows_bytes;
  }
  __device__ char* keys(int stage, int chunk) const {
    return q(index_groups, 0) + (stage * chunks + chunk) * keys_bytes;
  }
  __device__ IndexBeside& beside() const {
    return *reinterpret_cast<IndexBeside*>(keys(index_stages, 0));
  }
};

// Where the weight of row r lies: in the order in which a lane of four reads them.
__device__ inline int place_of_weight(int r) {
  return r / 16 * 16 + r % 8 / 2 * 4 + r / 8 % 2 * 2 + r % 2;
}

// Eight numbers of e4m3 in fp16: exact.
__device__ inline uint4 widened(const uint2& x) {
  const uint32_t pairs[4] = {x.x, x.x >> 16, x.y, x.y >> 16};
  uint32_t wide[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide[i]) : "h"(static_cast<uint16_t>(pairs[i])));
  return make_uint4(wide[0], wide[1], wide[2], wide[3]);
}

// Keys that a query of this unit may see, and its rows of q with their weights.
template <int kHeads, bool kF16>
__device__ inline void begin(const IndexScores& f, const Tiles& tiles, int64_t s) {
  IndexBeside& beside = tiles.beside();
  const int thread = threadIdx.x;
  constexpr int queries = index_rows / kHeads;
  for (int i = thread; i < index_groups * index_rows * tiles.chunks * 8; i += index_threads) {
    const int piece = i % 8, r = i / 8 % index_rows, c = i / (8 * index_rows);
    const int group = c / tiles.chunks, chunk = c % tiles.chunks;
    const int64_t query = s + group * queries + r / kHeads;
    const int head = r % kHeads, column = chunk * index_chunk_columns + piece * 8;
    const bool there = query < f.n && head < f.heads && column < f.dim;
    const int64_t at =
        there ? cuda::offset(f.q, f.b, f.s + query, f.head + head, column) : int64_t{0};
    const auto* from = static_cast<const char*>(f.q.data);
    char* to = tiles.q(group, chunk) + r * 128 + ((piece ^ (r % 8)) * 16);
    if (kF16 && f.e4m3)
      *reinterpret_cast<uint4*>(to) =
          there ? widened(*reinterpret_cast<const uint2*>(from + at)) : make_uint4(0, 0, 0, 0);
    else
      ptx::copy_16_bytes(ptx::smem_address(to), from + 2 * at, there);
  }
  for (int r = thread; r < index_groups * index_rows; r += index_threads) {
    const int64_t query = s + r / kHeads;
    const int64_t head = f.head + r % kHeads;
    float w = 0;
    if (query < f.n && r % kHeads < f.heads) {
      w = cuda::number_at(f.tables.weights, cuda::offset(f.tables.weights, f.b, f.s + query, head));
      if (f.tables.q_scale.present)
        w *= cuda::number_at(f.tables.q_scale,
                             cuda::offset(f.tables.q_scale, f.b, f.s + query, head));
    }
    beside.weights[0][place_of_weight(r)] = w;
  }
  if (thread == 0) beside.first = INT64_MAX, beside.last = 0;
  __syncthreads();
  if (thread < index_groups * queries && s + thread < f.n) {
    const Bounds bounds = cuda::index_bounds(f.tables, f.b, f.s + s + thread);
    if (bounds.begin < bounds.end) {
      atomicMin(reinterpret_cast<long long*>(&beside.first), static_cast<long long>(bounds.begin));
      atomicMax(reinterpret_cast<long long*>(&beside.last), static_cast<long long>(bounds.end));
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  ptx::fence_async_shared();
  __syncthreads();
}

// Sums of four lanes, of four queries each: lane l gets that of query l.
__device__ inline float sum_of_lane(float a, float b, float c, float d) {
  const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
  float low = upper ? c : a, high = upper ? d : b;
  low += __shfl_xor_sync(~0u, upper ? a : c, 2);
  high += __shfl_xor_sync(~0u, upper ? b : d, 2);
  return (odd ? high : low) + __shfl_xor_sync(~0u, odd ? low : high, 1);
}

__device__ inline float activated(float z, float floor) {
  float a;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(z), "f"(floor));
  return a;
}

// What a lane writes: keys of its row of a tile and 8 behind, of the queries lane % 4 of each four.
struct Writer {
  const IndexScores& f;
  const int64_t query;
  const int row;
  float* to;  // of its first query, in the tile at hand
  __device__ Writer(const IndexScores& scores, int64_t s, int64_t key)
      : f(scores),
        query(s + threadIdx.x % 4),
        row(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4),
        to(f.scores + query * f.stride + key + row) {}
  __device__ void advance(int keys) { to += keys; }
  // sum: this lane's part. left: keys from the tile's first on.
  // scale: of the keys, once the last head is in.
  template <int kQueries>
  __device__ void put(const float (&sum)[kQueries][2], int64_t left,
                      const float (&scale)[2]) const {
#pragma unroll
    for (int k = 0; k < kQueries; k += 4)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float whole = sum_of_lane(sum[k][r], sum[k + 1][r], sum[k + 2][r], sum[k + 3][r]);
        if (query + k >= f.n || row + 8 * r >= left) continue;
        float* at = to + k * f.stride + 8 * r;
        if (f.adds) whole = *at + whole;
        whole *= scale[r];
        if (mutant(Mutant::sa37_scores_zero_in_long_rows) && (at - f.scores) % f.stride >= 256)
          whole = 0;
        *at = whole;
      }
  }
};

// Of a key and of that 8 behind, read ahead of their products. 1 where more heads come.
struct KeyScales {
  const float* at = nullptr;
  int64_t stride = 0;
  __device__ KeyScales(const IndexScores& f, int64_t key) {
    const View& v = f.tables.k_scale;
    if (!f.last || !v.present) return;
    at = static_cast<const float*>(v.data) + cuda::offset(v, f.b, key);
    stride = v.stride[1];
  }
  __device__ void read(int64_t left, float (&scale)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) scale[r] = at && 8 * r < left ? at[8 * r * stride] : 1.0f;
  }
  __device__ void advance(int keys) {
    if (at) at += keys * stride;
  }
};

// kWhole: every column of a query is a head.
template <int kHeads, bool kF16, bool kWhole>
__device__ void consume(const IndexScores& f, const Tiles& tiles, int group, int64_t s,
                        int64_t begin, int64_t end) {
  constexpr int queries = index_rows / kHeads, blocks = kHeads / 8;
  IndexBeside& beside = tiles.beside();
  const int lane = threadIdx.x % 32;
  Writer writer(f, s + group * queries, begin);
  KeyScales scales(f, begin + writer.row);
  const auto* weights = reinterpret_cast<const float4*>(beside.weights[group]) + lane % 4;
  const uint64_t q = ptx::operand_descriptor(tiles.q(group, 0));
  const uint64_t keys = ptx::operand_descriptor(tiles.keys(0, 0));
  uint32_t there = 0;  // bit 2 n + e: whether column 8 n + 2 (lane % 4) + e is a head
  if constexpr (!kWhole)
    for (int n = 0; n < blocks; ++n)
      for (int e = 0; e < 2; ++e)
        there |= (8 * n + 2 * (lane % 4) + e < f.heads ? 1u : 0u) << (2 * n + e);
  const float floor = f.floor;
  const int turn = 1 + group, others_turn = 2 - group;
  if (group == 1) ptx::named_barrier_arrive(others_turn, 256);
  int stage = 0;
  uint32_t phase = 0;
  for (int64_t key = begin; key < end; key += index_keys) {
    float d[index_rows / 2], scale[2];
    scales.read(end - key - writer.row, scale);
    ptx::barrier_wait(&beside.full[stage], phase);
    ptx::named_barrier_sync(turn, 256);
    ptx::warpgroup_arrive();
    const uint64_t k = keys + stage * (tiles.chunks * Tiles::keys_bytes >> 4);
    ptx::wgmma_first_n256<0, 0, kF16>(d, k, q);
#pragma unroll
    for (int i = 1; i < 4; ++i) ptx::wgmma_n256<0, 0, kF16>(d, k + 2 * i, q + 2 * i);
    if (tiles.chunks > 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::wgmma_n256<0, 0, kF16>(d, k + (Tiles::keys_bytes >> 4) + 2 * i,
                                    q + (Tiles::rows_bytes >> 4) + 2 * i);
    }
    ptx::warpgroup_commit();
    ptx::named_barrier_arrive(others_turn, 256);
    ptx::warpgroup_wait<0>();
    ptx::hold_registers(d);
    if (lane == 0) ptx::barrier_arrive(&beside.empty[stage]);
    float sum[queries][2];
#pragma unroll
    for (int i = 0; i < queries; ++i) {
      sum[i][0] = sum[i][1] = 0;
#pragma unroll
      for (int n = 0; n < blocks; n += 2) {
        const float4 w = weights[(i * blocks + n) * 2];
        const float of[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int x = 0; x < 4; ++x)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float z = activated(d[4 * (i * blocks + n + x / 2) + 2 * r + x % 2], floor);
            if (!kWhole && !(there >> (2 * n + x) & 1)) z = 0;
            sum[i][r] = fmaf(of[x], z, sum[i][r]);
          }
      }
    }
    writer.put(sum, end - key, scale);
    writer.advance(index_keys);
    scales.advance(index_keys);
    if (++stage == index_stages) stage = 0, phase ^= 1;
  }
  if (group == 0) ptx::named_barrier_sync(turn, 256);  // the other's last word
}

__device__ inline void produce(const IndexScores& f, const Tiles& tiles, const CUtensorMap& map,
                               int64_t begin, int64_t end) {
  IndexBeside& beside = tiles.beside();
  int stage = 0;
  uint32_t phase = 1;
  for (int64_t key = begin; key < end; key += index_keys) {
    ptx::barrier_wait(&beside.empty[stage], phase);
    ptx::barrier_expect(&beside.full[stage],
                        static_cast<uint32_t>(tiles.chunks * Tiles::keys_bytes));
    for (int c = 0; c < tiles.chunks; ++c)
      ptx::load_tile(&map, &beside.full[stage], tiles.keys(stage, c), c * index_chunk_columns,
                     static_cast<int>(key));
    if (++stage == index_stages) stage = 0, phase ^= 1;
  }
}

}  // namespace index

template <int kHeads, bool kF16, bool kWhole>
__global__ __launch_bounds__(index_threads,
                             1) void index_kernel(const __grid_constant__ IndexScores f,
                                                  const __grid_constant__ CUtensorMap map) {
  namespace ptx = talea::sm90;
  extern __shared__ __align__(1024) char shared[];
  const index::Tiles tiles{shared, f.chunks};
  IndexBeside& beside = tiles.beside();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < index_stages; ++i) {
      ptx::barrier_init(&beside.full[i], 1);
      ptx::barrier_init(&beside.empty[i], 4 * index_groups);
    }
    ptx::barrier_init_fence();
  }
  const int64_t unit = blockIdx.x / f.query_blocks;
  const int64_t s = blockIdx.x % f.query_blocks * queries_of(kHeads);
  index::begin<kHeads, kF16>(f, tiles, s);
  const int64_t first = max(beside.first, unit * f.unit_keys);
  const int64_t last = min(beside.last, (unit + 1) * f.unit_keys);
  if (group < index_groups) {
    ptx::raise_registers<232>();
    index::consume<kHeads, kF16, kWhole>(f, tiles, group, s, first, last);
  } else {
    ptx::lower_registers<40>();
    if (threadIdx.x == index_groups * 128) index::produce(f, tiles, map, first, last);
  }
}

template <int kHeads, bool kF16, bool kWhole>
void launch_index_of(const IndexScores& f, int64_t units, const CUtensorMap& keys,
                     cudaStream_t stream) {
  auto* kernel = index_kernel<kHeads, kF16, kWhole>;
  const auto bytes = static_cast<size_t>(index_shared_bytes(f.dim));
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)),
                "sparse_attention: shared memory of index scores");
  kernel<<<static_cast<unsigned>(units * f.query_blocks), index_threads, bytes, stream>>>(f, keys);
  device::check_launch("sparse_attention: index scores");
}

template <bool kF16>
void launch_index(const IndexScores& f, int heads, int64_t units, const CUtensorMap& keys,
                  cudaStream_t stream) {
  const bool whole = f.heads == heads;
  if (heads == 64)
    return whole ? launch_index_of<64, kF16, true>(f, units, keys, stream)
                 : launch_index_of<64, kF16, false>(f, units, keys, stream);
  if (heads == 32)
    return whole ? launch_index_of<32, kF16, true>(f, units, keys, stream)
                 : launch_index_of<32, kF16, false>(f, units, keys, stream);
  return whole ? launch_index_of<16, kF16, true>(f, units, keys, stream)
               : launch_index_of<16, kF16, false>(f, units, keys, stream);
}

}  // namespace talea::sparse_attention::sm90
