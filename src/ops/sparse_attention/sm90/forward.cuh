// What: the kernel of lane sm90's forward pass, and its launch.
// Why: a block keeps one query and 64 of its heads at a time: one list of keys, never two a tile.
// Never: allocates or synchronises; a grid of many queries has no more blocks than the device has
// multiprocessors.
#pragma once

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/sm90/produce_packed.cuh"
#include "ops/sparse_attention/sm90/scores.cuh"

namespace talea::sparse_attention::sm90 {

// How often a barrier of keys is met: packed rows arrive by their threads, masks with them; those
// of the other block by their bytes, and what expects them.
template <int each, Rows kRows>
__device__ inline void begin_barriers(Beside& b) {
  constexpr int producers = producer_threads, warps = 4;
  ptx::barrier_init(&b.q_ready, producers + 1);
  ptx::barrier_init(&b.q_free, 2 * warps);
  for (int t = 0; t < 2; ++t) {
    for (int k = 0; k < 2 * each; ++k) {
      const int more = kRows == Rows::shared                   ? 1
                       : kRows == Rows::plain && k == t * each ? warps
                                                               : 0;
      ptx::barrier_init(&b.keys_ready[t][k], producers + more);
      ptx::barrier_init(&b.keys_free[t][k], kRows == Rows::shared ? 2 * warps : warps);
    }
    b.moved[t][0] = b.moved[t][1] = 0;
    ptx::barrier_init(&b.sums_ready[t], consumer_threads / 2);
    ptx::barrier_init(&b.weights_ready[t], consumer_threads / 2);
  }
  ptx::barrier_init_fence();
}

// A cluster's blocks write into each other's shared memory: between these two.
template <Rows kRows>
__device__ inline void meet() {
  if constexpr (kRows == Rows::shared)
    ptx::cluster_sync();
  else
    __syncthreads();
}

template <int kHalf, bool kF16, int kGroup, Rows kRows, bool kScores>
__device__ inline void consume(const Forward& f, const Tiles& tiles, Beside& beside, int thread) {
  if constexpr (kScores)
    WeightWriter<kHalf, kF16, kGroup, kRows>{{f, tiles, beside, thread}}.run();
  else
    Consumer<kHalf, kF16, kGroup, kRows>{f, tiles, beside, thread}.run();
}

template <int kHalf, bool kF16, Rows kRows, bool kScores>
__global__ __launch_bounds__(threads, 1) void forward_kernel(const __grid_constant__ Forward f) {
  // Registers of a thread that multiplies, and of one that fills tiles.
  constexpr int many = 208, few = 88;
  extern __shared__ __align__(1024) char shared[];
  const Tiles tiles{shared, tile_plan(f.dim, kHalf)};
  Beside& beside = tiles.beside();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x == 0)
    for (int i = 0; i < tiles.plan.ring; ++i)
      begin_barriers<parts_of_half(kHalf), kRows>(tiles.at(beside, i));
  meet<kRows>();
  if (group == 0) {
    ptx::raise_registers<many>();
    consume<kHalf, kF16, 0, kRows, kScores>(f, tiles, beside, thread);
  } else if (group == 1) {
    ptx::raise_registers<many>();
    consume<kHalf, kF16, 1, kRows, kScores>(f, tiles, beside, thread);
  } else {
    ptx::lower_registers<few>();
    if constexpr (kRows == Rows::plain)
      produce<kHalf>(f, tiles, beside, thread);
    else
      produce_packed<kHalf, kRows == Rows::shared>(f, tiles, beside, thread);
  }
  if constexpr (kRows == Rows::shared) ptx::cluster_sync();
}

template <int kHalf, bool kF16, Rows kRows = Rows::plain, bool kScores = false>
void launch_half(const Forward& f, unsigned blocks, cudaStream_t stream) {
  auto* kernel = forward_kernel<kHalf, kF16, kRows, kScores>;
  const auto bytes = static_cast<size_t>(shared_bytes(f.dim, kHalf));
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)),
                "sparse_attention: shared memory of forward");
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  if (kScores) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  } else {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 2;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  config.attrs = &attribute;
  config.numAttrs = kScores || kRows == Rows::shared ? 1 : 0;
  device::check(cudaLaunchKernelEx(&config, kernel, f), "sparse_attention: forward");
}

template <bool kF16, bool kScores = false>
void launch(const Forward& f, int half, unsigned blocks, cudaStream_t stream) {
  if (half == 64) return launch_half<64, kF16, Rows::plain, kScores>(f, blocks, stream);
  if (half == 128) return launch_half<128, kF16, Rows::plain, kScores>(f, blocks, stream);
  launch_half<256, kF16, Rows::plain, kScores>(f, blocks, stream);
}

}  // namespace talea::sparse_attention::sm90
