// What: the forward kernel of narrow rows: one warpgroup gathers, scores and sums for a query and 64
// of its heads, and a multiprocessor has several such blocks.
// Why: a list of few short rows is a chain of waits; other blocks work while one waits.
// Never: sums in an order other than that of the two warpgroups of consume.cuh: the bits are theirs.
#pragma once

#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/sm90/narrow_store.cuh"
#include "ops/sparse_attention/sm90/narrow_sums.cuh"

namespace talea::sparse_attention::sm90 {

template <class S>
__device__ inline void begin_narrow_barriers() {
  if (ptx::smem_address(narrow_memory) != narrow_begin) __trap();
  constexpr int warps = producer_threads / 32;
  NarrowBeside& beside = S::beside();
  ptx::barrier_init(&beside.q_ready, producer_threads);
  for (uint64_t& ready : beside.keys_ready) ptx::barrier_init(&ready, producer_threads + warps);
  ptx::barrier_init_fence();
}

template <class S>
__global__ __launch_bounds__(producer_threads, narrow_blocks(S::wide)) void narrow_kernel(
    const __grid_constant__ Forward f) {
  const int thread = static_cast<int>(threadIdx.x);
  NarrowGather<S> gather{{f, thread}};
  {
    const Work w = narrow_work(f);
    if (thread == 0) {
      begin_narrow_barriers<S>();
      gather.open(w);
    }
    gather.copy_q(w);
  }
  __syncthreads();
  NarrowBeside& beside = S::beside();
  ptx::barrier_arrive_after_copies(&beside.q_ready);
  const int pairs = beside.list.pairs;
  gather.begin();
  if (pairs > 0) {
    gather.next();
    gather.template copy<0>(0);
    gather.template copy<1>(0);
  }
  NarrowSums<S> sums{{}, gather};
  sums.begin_rows();
  ptx::barrier_wait(&beside.q_ready, 0);
  const bool seen = sums.sum_pairs(pairs);
  finish_narrow<S>(f, gather.work(), thread, seen, sums);
}

template <int kColumns, int kSteps, bool kWide, int kRows, bool kF16>
void launch_narrow_of(const Forward& f, unsigned blocks, cudaStream_t stream) {
  auto* kernel = narrow_kernel<NarrowShape<kColumns, kSteps, kWide, kRows, kF16>>;
  const auto bytes = static_cast<size_t>(
      narrow_shared_bytes(f.dim, f.value_dim, std::min(f.heads, f.group_heads)));
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)),
                "sparse_attention: shared memory of narrow rows");
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared),
                "sparse_attention: shared memory of narrow rows");
  kernel<<<blocks, producer_threads, bytes, stream>>>(f);
  device::check_launch("sparse_attention: forward of narrow rows");
}

template <int kSteps, int kRows, bool kF16>
void launch_narrow_steps(const Forward& f, unsigned blocks, cudaStream_t stream) {
  const bool wide = narrow_wide(f.dim, f.value_dim);
  switch (narrow_columns(f.dim)) {
    case 1:
      return launch_narrow_of<1, kSteps, false, kRows, kF16>(f, blocks, stream);
    case 2:
      return wide ? launch_narrow_of<2, kSteps, true, kRows, kF16>(f, blocks, stream)
                  : launch_narrow_of<2, kSteps, false, kRows, kF16>(f, blocks, stream);
    default:
      return launch_narrow_of<3, kSteps, true, kRows, kF16>(f, blocks, stream);
  }
}

template <int kRows, bool kF16>
void launch_narrow_rows(const Forward& f, unsigned blocks, cudaStream_t stream) {
  (f.dim - 1) % chunk_columns < chunk_columns / 2
      ? launch_narrow_steps<2, kRows, kF16>(f, blocks, stream)
      : launch_narrow_steps<4, kRows, kF16>(f, blocks, stream);
}

template <bool kF16>
void launch_narrow(const Forward& f, unsigned blocks, cudaStream_t stream) {
  std::min(f.heads, f.group_heads) <= tile_heads / 2
      ? launch_narrow_rows<1, kF16>(f, blocks, stream)
      : launch_narrow_rows<2, kF16>(f, blocks, stream);
}

}  // namespace talea::sparse_attention::sm90
