// What: the kernel of a step, and how many entries a block of it has.
// Why: biases and projections of a head are read once for several entries.
// Never: allocates or synchronises.
#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "ops/mamba3/rows/step.cuh"
#include "ops/mamba3/rows/step.hpp"

namespace talea::mamba3::cuda {
namespace {

constexpr int64_t most_entries = 65535;  // side by side
constexpr int64_t most_each = 16;        // entries of a block
constexpr int64_t processors = 132;      // of the chips that this is tuned for

template <class Step>
__global__ void __launch_bounds__(one_step::threads, Step::blocks)
    step_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(16) float shared[];
  Step step(a, shared, static_cast<int>(blockIdx.x));
  step.run(blockIdx.y, a.size.sequences, gridDim.y);
}

// The rounds of blocks times what a block takes are least: its entries, and half of one to begin.
int64_t entries_of_a_block(const Sizes& s, int64_t side_by_side) {
  int64_t best = 1, least = 0;
  for (int64_t each = 1; each <= std::min<int64_t>(s.sequences, most_each); ++each) {
    const int64_t blocks = s.heads * ((s.sequences + each - 1) / each);
    const int64_t takes = (blocks + side_by_side - 1) / side_by_side * (2 * each + 1);
    if (each == 1 || takes < least) best = each, least = takes;
  }
  return best;
}

template <class Step>
void launch(const Args& a, cudaStream_t stream) {
  const auto kernel = step_kernel<Step>;
  const size_t bytes = sizeof(float) * Step::shared_floats;
  device::check(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "mamba3: step");
  const int64_t each = entries_of_a_block(a.size, processors * Step::blocks);
  const int64_t along = std::min((a.size.sequences + each - 1) / each, most_entries);
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
