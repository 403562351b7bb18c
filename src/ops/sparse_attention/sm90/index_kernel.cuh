// What: the kernel of lane sm90's index scores, and its launch.
// Why: one kernel body for all types; what multiplies is a role of its own.
// Never: holds a product or a rule of scores.
#pragma once

#include "ops/sparse_attention/sm90/index_e4m3.cuh"

namespace talea::sparse_attention::sm90 {

template <int kHeads, IndexType kType, bool kWhole>
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
  index::begin<kHeads, kType == IndexType::e4m3>(f, tiles, s);
  const int64_t first = max(beside.first, unit * f.unit_keys);
  const int64_t last = min(beside.last, (unit + 1) * f.unit_keys);
  if (group < index_groups) {
    ptx::raise_registers<232>();
    if constexpr (kType == IndexType::e4m3)
      index::consume_e4m3<kHeads>(f, tiles, group, s, first, last);
    else
      index::consume<kHeads, kType == IndexType::f16, kWhole>(f, tiles, group, s, first, last);
  } else {
    ptx::lower_registers<40>();
    if (threadIdx.x == index_groups * 128) index::produce(f, tiles, map, first, last);
  }
}

template <int kHeads, IndexType kType, bool kWhole>
void launch_index_of(const IndexScores& f, int64_t units, const CUtensorMap& keys,
                     cudaStream_t stream) {
  auto* kernel = index_kernel<kHeads, kType, kWhole>;
  const auto bytes = static_cast<size_t>(index_shared_bytes(f.chunks));
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)),
                "sparse_attention: shared memory of index scores");
  kernel<<<static_cast<unsigned>(units * f.query_blocks), index_threads, bytes, stream>>>(f, keys);
  device::check_launch("sparse_attention: index scores");
}

template <int kHeads, IndexType kType>
void launch_index_with(const IndexScores& f, int64_t units, const CUtensorMap& keys,
                       cudaStream_t stream) {
  if constexpr (kType != IndexType::e4m3)
    if (f.heads < kHeads) return launch_index_of<kHeads, kType, false>(f, units, keys, stream);
  launch_index_of<kHeads, kType, true>(f, units, keys, stream);
}

template <IndexType kType>
void launch_index(const IndexScores& f, int heads, int64_t units, const CUtensorMap& keys,
                  cudaStream_t stream) {
  if (heads == 64) return launch_index_with<64, kType>(f, units, keys, stream);
  if (heads == 32) return launch_index_with<32, kType>(f, units, keys, stream);
  launch_index_with<16, kType>(f, units, keys, stream);
}

}  // namespace talea::sparse_attention::sm90
