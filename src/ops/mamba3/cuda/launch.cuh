// What: how a kernel over heads of sequences is launched: blocks, shared memory, its engine.
// Why: forward, states and backward are three files of kernels with one way in.
// Never: waits for a kernel.
#pragma once

#include <algorithm>
#include <type_traits>

#include "device/common/cuda_check.hpp"
#include "ops/mamba3/cuda/machine.hpp"
#include "ops/mamba3/cuda/walk.hpp"
#include "ops/mamba3/rows/team.cuh"

namespace talea::mamba3::cuda {

inline constexpr int most_threads = 512;

template <class T, int products, int kept_by_warp>
struct EngineOf {
  using Type = T;
  using Team = DeviceTeam<T, products>;
  static constexpr int kept = kept_by_warp;
};
using Fp32 = EngineOf<float, 3, 0>;
using Tf32 = EngineOf<float, 1, 0>;
using Narrow = EngineOf<Bf16, 1, 0>;
using NarrowKept = EngineOf<Bf16, 1, kept_tiles>;

// f(Fp32{}) and so on; `keeps`: whether the kernel can hold a state in registers.
template <bool keeps, class F>
void with_engine(const Plan& plan, F f) {
  if (plan.engine == Engine::three_tf32) return f(Fp32{});
  if (plan.engine == Engine::tf32) return f(Tf32{});
  if constexpr (keeps)
    if (plan.keeps) return f(NarrowKept{});
  f(Narrow{});
}

template <class Kernel, class... Rest>
void launch_units(const char* name, Kernel* kernel, const Launch& at, const ChunkPlaces& places,
                  int64_t units, int threads, const Rest&... rest) {
  if (units <= 0) return;
  const auto bytes = static_cast<int>(places.shared_bytes);
  device::check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                name);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(units, at.plan.blocks));
  kernel<<<blocks, threads, static_cast<size_t>(bytes), at.stream>>>(rest..., places,
                                                                     at.buffers.scratch, units);
  device::check_launch(name);
}

#ifdef __CUDACC__
// f(shared, scratch, unit, its number) of each unit of this block that has a row of states.
template <class Team, class F>
__device__ __forceinline__ void each_unit(const Args& a, int64_t first, const ChunkPlaces& places,
                                          char* scratch, int64_t units, F f) {
  extern __shared__ __align__(128) char shared[];
  __shared__ double sums[32];
  Team team{sums};
  char* const own = scratch + int64_t{blockIdx.x} * places.scratch_bytes;
  for (int64_t number = blockIdx.x; number < units; number += gridDim.x) {
    const Unit u =
        unit_of(a, first + number / a.size.heads, static_cast<int>(number % a.size.heads));
    if (u.row < 0) continue;
    f(team, shared, own, u, number);
    __syncthreads();
  }
}
#endif

}  // namespace talea::mamba3::cuda
