// What: how a kernel over heads of sequences is launched: blocks, shared memory, its engine.
// Why: forward, states and backward are three files of kernels with one way in.
// Never: waits for a kernel.
#pragma once

#include <algorithm>
#include <type_traits>

#include "device/common/cuda_check.hpp"
#include "ops/mamba3/cuda/machine.hpp"
#include "ops/mamba3/cuda/team.cuh"
#include "ops/mamba3/cuda/walk.hpp"

namespace talea::mamba3::cuda {

inline constexpr int block_threads = 512;

struct Fp32 {
  using Type = float;
  using Team = DeviceTeam<float, 3>;
};
struct Tf32 {
  using Type = float;
  using Team = DeviceTeam<float, 1>;
};
struct Narrow {
  using Type = Bf16;
  using Team = DeviceTeam<Bf16, 1>;
};

// f(Fp32{}) and so on.
template <class F>
void with_engine(Engine engine, F f) {
  if (engine == Engine::three_tf32) return f(Fp32{});
  if (engine == Engine::tf32) return f(Tf32{});
  f(Narrow{});
}

template <class Kernel, class... Rest>
void launch_units(const char* name, Kernel* kernel, const Launch& at, const ChunkPlaces& places,
                  int64_t units, const Rest&... rest) {
  if (units <= 0) return;
  const auto bytes = static_cast<int>(places.shared_bytes);
  device::check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                name);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(units, at.plan.blocks));
  kernel<<<blocks, block_threads, static_cast<size_t>(bytes), at.stream>>>(
      rest..., places, at.buffers.scratch, units);
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
