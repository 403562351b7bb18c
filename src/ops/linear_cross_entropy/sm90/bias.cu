// The gradient of the bias: column sums of the buffer that the products read.
// Exists because db needs no product of its own. Never adds in an order that timing could change.
// Never multiplies by the logit scale: db is the sum of da itself.
#include "device/common/cuda_check.hpp"
#include "device/common/reduce.cuh"
#include "ops/linear_cross_entropy/sm90/device_vector.cuh"
#include "ops/linear_cross_entropy/sm90/wide.hpp"

namespace talea::lce {
namespace {

constexpr int kLanes = 32, kGroups = 16;  // a block: 64 columns, rows split in sixteen

__device__ __forceinline__ float over_scale(double scale, const RowBuffers& rows, int64_t row) {
  return static_cast<float>(1.0 /
                            (scale * (rows.scale ? static_cast<double>(rows.scale[row]) : 1.0)));
}

template <bool kF16>
__global__ void __launch_bounds__(kLanes* kGroups) bias_kernel(BiasParams p) {
  __shared__ float2 sums[kGroups][kLanes];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int column = (blockIdx.x * kLanes + lane) * 2;
  const int64_t rows = p.range.count();
  float2 sum{0, 0};
  if (column < p.vocab) {
#pragma unroll 4
    for (int64_t row = group; row < rows; row += kGroups) {
      const float f = p.rows.factor[row] * over_scale(p.scale, p.rows, row);
      float2 both = load_pair<kF16>(p.buffer, row * p.stride + column);
      if (p.term_offset > 0) {
        const float2 rest = load_pair<kF16>(p.buffer, row * p.stride + p.term_offset + column);
        both.x += rest.x, both.y += rest.y;
      }
      sum.x = fmaf(f, both.x, sum.x), sum.y = fmaf(f, both.y, sum.y);
    }
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group != 0 || column >= p.vocab) return;
  double x = p.first ? 0.0 : p.db[column];
  const bool two = column + 1 < p.vocab;
  double y = p.first || !two ? 0.0 : p.db[column + 1];
  for (int g = 0; g < kGroups; ++g) x += sums[g][lane].x, y += sums[g][lane].y;
  p.db[column] = x;
  if (two) p.db[column + 1] = y;
}

__global__ void target_kernel(BiasEndParams p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (first >= p.facts->valid) return;
  const uint64_t target = p.sorted[first] >> 32;
  if (target == 0xffffffffu) return;
  if (first > 0 && p.sorted[first - 1] >> 32 == target) return;
  double sum = p.db[target];
  for (int64_t i = first; i < p.facts->valid && p.sorted[i] >> 32 == target; ++i) {
    const auto row = static_cast<uint32_t>(p.sorted[i]);
    sum += static_cast<double>(p.rows.target_factor[row]) * over_scale(p.scale, p.rows, row);
  }
  p.db[target] = sum;
}

// sum over the rows of G eps / V
__global__ void __launch_bounds__(1024) smooth_kernel(BiasEndParams p) {
  __shared__ double shared[32];
  double sum = 0;
  for (int64_t row = threadIdx.x; row < p.facts->valid; row += 1024)
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
  const auto blocks = static_cast<unsigned>((p.vocab + 2 * kLanes - 1) / (2 * kLanes));
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
