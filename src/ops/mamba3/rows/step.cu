// What: the kernel of a step, and how many entries a block of it has.
// Why: biases and projections of a head are read once for several entries.
// Never: allocates or synchronises.
#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "ops/mamba3/rows/step.hpp"
#include "ops/mamba3/rows/step_entries.cuh"

namespace talea::mamba3::cuda {
namespace {

constexpr int64_t most_entries = 65535;  // side by side
constexpr int64_t most_each = 16;        // of entries of a block
constexpr int64_t processors = 132;      // of the chips that this is tuned for

template <class Step>
__global__ void __launch_bounds__(one_step::threads, Step::blocks)
    step_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(16) float shared[];
  Step step(a, shared, static_cast<int>(blockIdx.x));
  step.run(blockIdx.y, gridDim.y);
}

template <class Step>
void launch(const Args& a, cudaStream_t stream) {
  const auto kernel = step_kernel<Step>;
  const size_t bytes = sizeof(float) * Step::shared_floats;
  device::check(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "mamba3: step");
  // A block waits for its first entry as long as it takes for half of one.
  const auto blocks = [&](int64_t each) { return (a.size.sequences + each - 1) / each; };
  const auto halves = [&](int64_t each) {
    constexpr int64_t round = processors * Step::blocks;
    return (a.size.heads * blocks(each) + round - 1) / round * (2 * each + 1);
  };
  int64_t best = 1;
  for (int64_t each = 2; each <= most_each; ++each)
    if (halves(each) < halves(best)) best = each;
  const int64_t along = std::min(blocks(best), most_entries);
  const dim3 grid(static_cast<unsigned>(a.size.heads), static_cast<unsigned>(along));
  kernel<<<grid, one_step::threads, bytes, stream>>>(a);
  device::check_launch("mamba3: step");
}

}  // namespace

void launch_step(const Args& a, cudaStream_t stream) {
  if (a.size.heads == 0 || a.size.sequences == 0) return;
  one_step::with_step(a, [&](auto step) { launch<typename decltype(step)::type>(a, stream); });
}

}  // namespace talea::mamba3::cuda
