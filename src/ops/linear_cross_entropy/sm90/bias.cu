// What: the gradient of the bias: column sums of the buffer that the products read.
// Why: db needs no product of its own; it is the sum of da itself, without the logit scale.
// Never: adds in an order that timing could change.
#include "device/common/cuda_check.hpp"
#include "device/common/reduce.cuh"
#include "ops/linear_cross_entropy/sm90/pack.cuh"
#include "ops/linear_cross_entropy/sm90/runs.cuh"
#include "ops/linear_cross_entropy/sm90/wide.hpp"

namespace talea::lce {
namespace {

constexpr int kLanes = 32, kWidth = 8,
              kGroups = 16;  // a block: 256 columns, rows in sixteen groups
constexpr int kColumns = kLanes * kWidth;

__device__ __forceinline__ float over_scale(double scale, const RowBuffers& rows, int64_t row) {
  const double own = rows.scale ? static_cast<double>(rows.scale[row]) : 1.0;
  return static_cast<float>(1.0 / (scale * own));
}

template <bool kF16>
__device__ __forceinline__ void add_piece(const uint16_t* from, float f, float (&sums)[kWidth]) {
  const uint4 four = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = unpack<kF16>(words[i]);
    sums[2 * i] = fmaf(f, both.x, sums[2 * i]);
    sums[2 * i + 1] = fmaf(f, both.y, sums[2 * i + 1]);
  }
}

template <bool kF16>
__global__ void __launch_bounds__(kLanes* kGroups) bias_kernel(BiasParams p) {
  __shared__ float sums[kGroups][kColumns];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int first = blockIdx.x * kColumns + lane * kWidth;
  const int64_t rows = p.range.count();
  const auto* buffer = static_cast<const uint16_t*>(p.buffer) + first;
  float own[kWidth] = {};
  if (first < p.vocab) {
#pragma unroll 4
    for (int64_t row = group; row < rows; row += kGroups) {
      const float f = p.db_factor[row];
      add_piece<kF16>(buffer + row * p.stride, f, own);
      if (p.term_offset > 0) add_piece<kF16>(buffer + row * p.stride + p.term_offset, f, own);
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[group][lane * kWidth + i] = own[i];
  __syncthreads();
  const int column = blockIdx.x * kColumns + threadIdx.x;
  if (threadIdx.x >= kColumns || column >= p.vocab) return;
  double all = p.first ? 0.0 : p.db[column];
  for (int g = 0; g < kGroups; ++g) all += sums[g][threadIdx.x];
  p.db[column] = all;
}

__global__ void target_kernel(BiasEndParams p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t target = run_at(p.sorted, first, p.facts->in_use);
  if (target < 0) return;
  double sum = p.db[target];
  over_run(p.sorted, first, p.facts->in_use, target, [&](uint32_t row) {
    sum += static_cast<double>(p.rows.target_factor[row]) * over_scale(p.scale, p.rows, row);
  });
  p.db[target] = sum;
}

// sum over the rows of G eps / V
__global__ void __launch_bounds__(1024) smooth_kernel(BiasEndParams p) {
  __shared__ double shared[32];
  double sum = 0;
  for (int64_t row = threadIdx.x; row < p.facts->in_use; row += 1024)
    sum += static_cast<double>(p.row_smooth[row]) * over_scale(p.scale, p.rows, row);
  sum = device::block_reduce(sum, device::Sum(), shared);
  if (threadIdx.x == 0) *p.smooth_sum = sum;
}

__global__ void end_kernel(BiasEndParams p) {
  const int64_t v = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (v >= p.stored || (p.accumulate && v >= p.vocab)) return;
  double sum = 0;
  if (v < p.vocab) {
    sum = p.db[v];
    if (p.row_smooth) sum -= (p.class_weight ? p.class_weight[v] : 1.0) * *p.smooth_sum;
    if (p.accumulate) sum += p.to.load(v);
  }
  p.to.store(v, sum);
}

}  // namespace

void add_bias_gradient(const BiasParams& p, cudaStream_t stream) {
  if (p.vocab == 0) return;
  const auto blocks = static_cast<unsigned>((p.vocab + kColumns - 1) / kColumns);
  auto* kernel = p.f16 ? bias_kernel<true> : bias_kernel<false>;
  kernel<<<blocks, kLanes * kGroups, 0, stream>>>(p);
  device::check_launch("add_bias_gradient");
}

void end_bias_gradient(const BiasEndParams& p, cudaStream_t stream) {
  if (p.sorted) {
    target_kernel<<<static_cast<unsigned>((p.tokens + 255) / 256), 256, 0, stream>>>(p);
    device::check_launch("bias gradient of the targets");
  }
  if (p.row_smooth) {
    smooth_kernel<<<1, 1024, 0, stream>>>(p);
    device::check_launch("bias gradient of the smoothing");
  }
  if (p.stored == 0) return;
  end_kernel<<<static_cast<unsigned>((p.stored + 255) / 256), 256, 0, stream>>>(p);
  device::check_launch("end_bias_gradient");
}

}  // namespace talea::lce
