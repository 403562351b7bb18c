// What: the kernel of lane sm90's backward pass, and its launch.
// Why: a block keeps q and d_o of one query and 64 of its heads on chip while its keys pass by.
// Never: allocates or synchronises; a grid has no more blocks than the device has multiprocessors.
#pragma once

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/sm90/backward_add.cuh"
#include "ops/sparse_attention/sm90/backward_produce.cuh"
#include "ops/sparse_attention/sm90/backward_scores.cuh"

namespace talea::sparse_attention::sm90 {

__device__ inline void begin_barriers(BackwardBeside& b) {
  constexpr int warps = 4;
  ptx::barrier_init(&b.q_ready, producer_threads + 1);
  ptx::barrier_init(&b.q_free, 2 * warps);
  ptx::barrier_init(&b.weights_free, warps);
  for (int k = 0; k < backward_parts; ++k)
    ptx::barrier_init(&b.keys_ready[k], producer_threads + (k == 0 ? warps : 0));
  for (uint64_t& part : b.keys_free) ptx::barrier_init(&part, warps);
  ptx::barrier_init_fence();
}

template <int kFirst, int kSecond, bool kF16, bool kAdds>
__global__ __launch_bounds__(threads, 1) void backward_kernel(const __grid_constant__ Backward p) {
  extern __shared__ __align__(1024) char shared[];
  const BackwardTiles<kFirst, kSecond> tiles{shared};
  BackwardBeside& beside = tiles.beside();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x == 0) begin_barriers(beside);
  __syncthreads();
  // 504 registers are a block's, of three threads of its warpgroups.
  if (group == 0) {
    ptx::raise_registers<224>();
    BackwardScores<kFirst, kSecond, kF16, kAdds> role{{p, tiles, beside, thread}};
    role.run(role);
  } else if (group == 1) {
    ptx::raise_registers<kAdds ? 232 : 216>();
    BackwardSums<kFirst, kSecond, kF16, kAdds> role{{p, tiles, beside, thread}};
    role.run(role);
    if (!kAdds && thread == 0) ptx::store_wait_all();
  } else {
    ptx::lower_registers<kAdds ? 48 : 64>();
    produce_backward<kFirst, kSecond, kAdds>(p, tiles, beside, thread);
  }
}

template <int kWidth, bool kF16, bool kAdds>
void launch_width(const Backward& p, unsigned blocks, cudaStream_t stream) {
  constexpr BackwardChunks chunks = backward_chunks[kWidth];
  auto* kernel = backward_kernel<chunks.first, chunks.second, kF16, kAdds>;
  const auto bytes = static_cast<size_t>(backward_shared_bytes(p.f.dim));
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)),
                "sparse_attention: shared memory of backward");
  kernel<<<blocks, threads, bytes, stream>>>(p);
  device::check_launch("sparse_attention: backward");
}

template <int kWidth, bool kF16>
void launch_width(const Backward& p, unsigned blocks, cudaStream_t stream) {
  p.adds ? launch_width<kWidth, kF16, true>(p, blocks, stream)
         : launch_width<kWidth, kF16, false>(p, blocks, stream);
}

template <bool kF16>
void launch_backward(const Backward& p, unsigned blocks, cudaStream_t stream) {
  switch (width_of(p.f.dim)) {
    case 0:
      return launch_width<0, kF16>(p, blocks, stream);
    case 1:
      return launch_width<1, kF16>(p, blocks, stream);
    case 2:
      return launch_width<2, kF16>(p, blocks, stream);
    default:
      return launch_width<3, kF16>(p, blocks, stream);
  }
}

}  // namespace talea::sparse_attention::sm90
