// What: how the kernels of lane sm90 are launched: by rank, and by how many pairs turn.
// Why: forward, states and gradients are three files of kernels with one way in.
// Never: waits for a kernel.
#pragma once

#include <type_traits>

#include "device/common/cuda_check.hpp"
#include "ops/mamba3/sm90/machine.hpp"

namespace talea::mamba3::sm90 {

// f(rank, blocks of 32 pairs) as constants.
template <class F>
void with_shape(const cuda::Sizes& s, F f) {
  const auto by_rank = [&](auto blocks) {
    if (s.rank == 1) return f(std::integral_constant<int, 1>{}, blocks);
    if (s.rank == 2) return f(std::integral_constant<int, 2>{}, blocks);
    f(std::integral_constant<int, 4>{}, blocks);
  };
  if (s.pairs <= 32) return by_rank(std::integral_constant<int, 1>{});
  by_rank(std::integral_constant<int, 2>{});
}

// The same, and which columns a pair has.
template <class F>
void with_turns(const cuda::Sizes& s, F f) {
  with_shape(s, [&](auto rank, auto blocks) {
    if (s.halves) return f(rank, blocks, std::true_type{});
    f(rank, blocks, std::false_type{});
  });
}

template <class Kernel, class... Rest>
void launch(const char* name, Kernel* kernel, int64_t blocks, int threads, size_t shared_bytes,
            cudaStream_t stream, const Rest&... rest) {
  if (blocks <= 0) return;
  device::check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(shared_bytes)),
                name);
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(rest...);
  device::check_launch(name);
}

}  // namespace talea::mamba3::sm90
