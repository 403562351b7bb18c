// What: how the kernels of lane sm90 are launched: by rank, and by how many pairs turn.
// Why: forward, states and gradients are three files of kernels with one way in.
// Never: waits for a kernel.
#pragma once

#include <type_traits>

#include "device/common/cuda_check.hpp"
#include "device/sm90/ptx.cuh"
#include "ops/mamba3/mutants.hpp"
#include "ops/mamba3/sm90/machine.hpp"

namespace talea::mamba3::sm90 {

// f(rank, blocks of 32 pairs) as constants; eight: of eight rows a token, too.
template <bool eight, class F>
void with_shape(const cuda::Sizes& s, F f) {
  const auto by_rank = [&](auto blocks) {
    if (s.rank == 1) return f(std::integral_constant<int, 1>{}, blocks);
    if (s.rank == 2) return f(std::integral_constant<int, 2>{}, blocks);
    if constexpr (eight)
      if (s.rank == 8) return f(std::integral_constant<int, 8>{}, blocks);
    f(std::integral_constant<int, 4>{}, blocks);
  };
  if (s.pairs <= 32) return by_rank(std::integral_constant<int, 1>{});
  by_rank(std::integral_constant<int, 2>{});
}

// The same, and which columns a pair has.
template <bool eight, class F>
void with_turns(const cuda::Sizes& s, F f) {
  with_shape<eight>(s, [&](auto rank, auto blocks) {
    if (s.halves) return f(rank, blocks, std::true_type{});
    f(rank, blocks, std::false_type{});
  });
}

// One of a template that may take more: the compiler is told which.
template <class... Arguments>
using KernelOf = void (*)(Arguments...);

// The first line of a kernel that may run beside the one before it in the stream: it neither reads
// what that one writes nor writes what that one reads, and that one has waited for all earlier
// ones. It ends behind it, so that the next kernel comes after both. crowds: blocks of the next
// one, which would wait beside both, might lie where some hinder each other once they run: none is
// launched.
class BesideEarlierKernel {
 public:
  __device__ __forceinline__ BesideEarlierKernel(bool beside, bool crowds) : beside_(beside) {
    if (!beside) talea::sm90::wait_for_earlier_kernels();
    if (!beside || !crowds) talea::sm90::let_later_kernels_start();
  }
  __device__ __forceinline__ ~BesideEarlierKernel() {
    if (beside_ && blockIdx.x == 0) talea::sm90::wait_for_earlier_kernels();
  }
  BesideEarlierKernel(const BesideEarlierKernel&) = delete;
  BesideEarlierKernel& operator=(const BesideEarlierKernel&) = delete;

 private:
  const bool beside_;
};

// A bug that shows where a kernel is late: without it the kernel may win the race.
__device__ __forceinline__ void hold_back(ScanMutant bug) {
  if (mutant(bug))
    for (int i = 0; i < 4; ++i) __nanosleep(500000);
}

// The kernel may start while the one before it in the stream ends: it begins with
// hopper::begin_after_earlier_kernels(), or is one that may run beside it.
template <class Kernel, class... Rest>
void launch(const char* name, Kernel* kernel, dim3 blocks, int threads, size_t shared_bytes,
            cudaStream_t stream, const Rest&... rest) {
  if (shared_bytes > 0)
    device::check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(shared_bytes)),
                  name);
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  device::check(cudaLaunchKernelEx(&config, kernel, rest...), name);
}
template <class Kernel, class... Rest>
void launch(const char* name, Kernel* kernel, int64_t blocks, int threads, size_t shared_bytes,
            cudaStream_t stream, const Rest&... rest) {
  // Blocks that begin while others end lie where there is room: a kernel of as many as there are
  // multiprocessors asks for so much that none has two while another has none.
  constexpr size_t alone = (228 << 10) / 2;
  if (blocks <= processors && shared_bytes > alone / 2 && shared_bytes < alone)
    shared_bytes = alone;
  if (blocks > 0)
    launch(name, kernel, dim3(static_cast<unsigned>(blocks)), threads, shared_bytes, stream,
           rest...);
}

}  // namespace talea::mamba3::sm90
