// What: the rank-one share of label smoothing: column sums, row dots, and the one rounding of dW.
// Why: sum_v c_v z_v = x . (sum_v c_v w_v): smoothing needs no pass over the logits.
// Never: adds in an order that timing could change.
#include <cuda_fp16.h>

#include <cub/block/block_reduce.cuh>

#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/sm90/pack.cuh"
#include "ops/linear_cross_entropy/sm90/smoothing.hpp"

namespace talea::lce {
namespace {

constexpr int kParts = 256, kThreads = 128;  // a thread owns two columns

// parts[y][d] = sum over the y-th stretch of rows
__global__ void weight_part_kernel(WeightSumParams p) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 2;
  if (column >= p.hidden) return;
  const int64_t each = (p.vocab + kParts - 1) / kParts;
  const int64_t end = min(p.vocab, (blockIdx.y + 1) * each);
  float a = 0, b = 0;
#pragma unroll 8
  for (int64_t v = blockIdx.y * each; v < end; ++v) {
    const float c = p.class_weight ? p.class_weight[v] : 1.f;
    const auto w = *reinterpret_cast<const __nv_bfloat162*>(
        static_cast<const __nv_bfloat16*>(p.weight) + v * p.stride + column);
    a = fmaf(c, __low2float(w), a), b = fmaf(c, __high2float(w), b);
  }
  *reinterpret_cast<float2*>(p.parts + blockIdx.y * p.hidden + column) = {a, b};
}

__global__ void row_part_kernel(WeightedRowsParams p) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 2;
  if (column >= p.hidden) return;
  const int64_t rows = max(int64_t{0}, min(p.capacity, p.facts->in_use - p.begin));
  const int64_t each = (rows + kParts - 1) / kParts;
  const int64_t end = min(rows, (blockIdx.y + 1) * each);
  float a = 0, b = 0;
  for (int64_t r = blockIdx.y * each; r < end; ++r) {
    const auto x = *reinterpret_cast<const __nv_bfloat162*>(static_cast<const __nv_bfloat16*>(p.x) +
                                                            p.index[r] * p.stride + column);
    a = fmaf(p.factor[r], __low2float(x), a), b = fmaf(p.factor[r], __high2float(x), b);
  }
  *reinterpret_cast<float2*>(p.parts + blockIdx.y * p.hidden + column) = {a, b};
}

__global__ void add_parts_kernel(const float* parts, int64_t hidden, float* sum) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= hidden) return;
  double total = 0;
  for (int i = 0; i < kParts; ++i) total += parts[i * hidden + column];
  sum[column] = static_cast<float>(total);
}

__global__ void __launch_bounds__(1024) scalar_sums_kernel(WeightSumParams p) {
  using Sum = cub::BlockReduce<double, 1024>;
  __shared__ typename Sum::TempStorage shared;
  double weights = 0, biases = 0;
  for (int64_t v = threadIdx.x; v < p.vocab; v += 1024) {
    const double c = p.class_weight ? p.class_weight[v] : 1.0;
    weights += c;
    biases += c * (p.bias ? p.bias[v] : 0.0);
  }
  weights = Sum(shared).Sum(weights);
  __syncthreads();
  biases = Sum(shared).Sum(biases);
  if (threadIdx.x == 0) p.sums[0] = weights, p.sums[1] = biases;
}

__global__ void row_dot_kernel(RowDotParams p) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= p.capacity || row >= p.facts->in_use - p.begin) return;
  const auto* x = static_cast<const __nv_bfloat16*>(p.x) + row * p.stride;
  float sum = 0;
  for (int64_t d = threadIdx.x % 32 * 2; d < p.hidden; d += 64) {
    const auto pair = *reinterpret_cast<const __nv_bfloat162*>(x + d);
    const float2 u = *reinterpret_cast<const float2*>(p.vector + d);
    sum = fmaf(__low2float(pair), u.x, sum);
    sum = fmaf(__high2float(pair), u.y, sum);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 != 0) return;
  const double scale = p.scale * (p.row_scale ? static_cast<double>(p.row_scale[row]) : 1.0);
  p.out[row] = static_cast<float>(sum * scale + p.sums[1]);
}

template <bool kF16>
__global__ void round_kernel(RoundParams p) {
  const int64_t row = blockIdx.x;
  const float4* from = reinterpret_cast<const float4*>(p.from + row * p.columns);
  auto* to = reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.to) + row * p.to_stride);
  for (int64_t i = threadIdx.x; i < p.columns / 4; i += blockDim.x) {
    const float4 v = from[i];
    to[i] = {pack<kF16>(v.x, v.y), pack<kF16>(v.z, v.w)};
  }
}

unsigned column_blocks(int64_t hidden) {
  return static_cast<unsigned>((hidden + 2 * kThreads - 1) / (2 * kThreads));
}

}  // namespace

void weight_sums(const WeightSumParams& p, cudaStream_t stream) {
  weight_part_kernel<<<dim3(column_blocks(p.hidden), kParts), kThreads, 0, stream>>>(p);
  add_parts_kernel<<<2 * column_blocks(p.hidden), kThreads, 0, stream>>>(p.parts, p.hidden, p.sum);
  scalar_sums_kernel<<<1, 1024, 0, stream>>>(p);
  device::check_launch("weight_sums");
}

void row_dots(const RowDotParams& p, cudaStream_t stream) {
  row_dot_kernel<<<static_cast<unsigned>((p.capacity + 7) / 8), 256, 0, stream>>>(p);
  device::check_launch("row_dots");
}

void weighted_rows(const WeightedRowsParams& p, cudaStream_t stream) {
  row_part_kernel<<<dim3(column_blocks(p.hidden), kParts), kThreads, 0, stream>>>(p);
  add_parts_kernel<<<2 * column_blocks(p.hidden), kThreads, 0, stream>>>(p.parts, p.hidden, p.out);
  device::check_launch("weighted_rows");
}

void round_rows(const RoundParams& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  auto* kernel = p.f16 ? round_kernel<true> : round_kernel<false>;
  kernel<<<static_cast<unsigned>(p.rows), 256, 0, stream>>>(p);
  device::check_launch("round_rows");
}

}  // namespace talea::lce
