// What: the kernel of lane sm90's forward pass, and its launch.
// Why: a block keeps one query and 64 of its heads at a time: one list of keys, never two a tile.
// Never: allocates or synchronises; a grid has no more blocks than the device has multiprocessors.
#pragma once

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/sm90/consume.cuh"
#include "ops/sparse_attention/sm90/produce_packed.cuh"

namespace talea::sparse_attention::sm90 {

template <int each>
__device__ inline void begin_barriers(Beside& b) {
  constexpr int producers = producer_threads, warps = 4;
  ptx::barrier_init(&b.q_ready, producers + 1);
  ptx::barrier_init(&b.q_free, 2 * warps);
  for (int t = 0; t < 2; ++t) {
    for (int k = 0; k < 2 * each; ++k) {
      ptx::barrier_init(&b.keys_ready[t][k], producers + (k == t * each ? warps : 0));
      ptx::barrier_init(&b.keys_free[t][k], warps);
    }
    b.moved[t][0] = b.moved[t][1] = 0;
    ptx::barrier_init(&b.sums_ready[t], consumer_threads / 2);
    ptx::barrier_init(&b.weights_ready[t], consumer_threads / 2);
  }
  ptx::barrier_init_fence();
}

// kPacked: rows of 656 bytes.
template <int kHalf, bool kF16, bool kPacked>
__global__ __launch_bounds__(threads, 1) void forward_kernel(const __grid_constant__ Forward f) {
  extern __shared__ __align__(1024) char shared[];
  const Tiles tiles{shared, tile_plan(f.dim, kHalf)};
  Beside& beside = tiles.beside();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x == 0) begin_barriers<parts_of_half(kHalf)>(beside);
  __syncthreads();
  if (group == 0) {
    ptx::raise_registers<216>();
    Consumer<kHalf, kF16, 0>{f, tiles, beside, thread}.run();
  } else if (group == 1) {
    ptx::raise_registers<216>();
    Consumer<kHalf, kF16, 1>{f, tiles, beside, thread}.run();
  } else {
    ptx::lower_registers<72>();
    if constexpr (kPacked)
      produce_packed<kHalf>(f, tiles, beside, thread);
    else
      produce<kHalf>(f, tiles, beside, thread);
  }
}

template <int kHalf, bool kF16, bool kPacked = false>
void launch_half(const Forward& f, unsigned blocks, cudaStream_t stream) {
  auto* kernel = forward_kernel<kHalf, kF16, kPacked>;
  const auto bytes = static_cast<size_t>(shared_bytes(f.dim, kHalf));
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)),
                "sparse_attention: shared memory of forward");
  kernel<<<blocks, threads, bytes, stream>>>(f);
  device::check_launch("sparse_attention: forward");
}

template <bool kF16>
void launch(const Forward& f, int half, unsigned blocks, cudaStream_t stream) {
  if (half == 64) return launch_half<64, kF16>(f, blocks, stream);
  if (half == 128) return launch_half<128, kF16>(f, blocks, stream);
  launch_half<256, kF16>(f, blocks, stream);
}

}  // namespace talea::sparse_attention::sm90
