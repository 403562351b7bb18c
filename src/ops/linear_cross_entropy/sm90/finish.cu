// From partial sums to losses and gradient factors, and the targets' own share of dW.
// Exists so that every CUDA lane ends a row by the algebra of dist/row_state.hpp, in fp64.
// Never forms p - 1 by subtraction and never adds in an order that timing could change.
#include <cuda_fp16.h>

#include <cub/block/block_reduce.cuh>

#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/sm90/device_vector.cuh"

namespace talea::lce {
namespace {

constexpr int kRows = 16, kLanes = 16;  // a block: 16 rows x 16 partial summations

__device__ RowState<double> state_of(const FinishParams& p, int row, double sum, double shifted,
                                     double shift) {
  RowState<double> s;
  s.has_target = p.rows.target[row] >= 0 ? 1.0 : 0.0;
  s.target = p.rows.target_logit[row];
  // The largest of the two parts stands for the maximum: both then lie in (0, 1].
  const double others_log = shift + log(sum);
  s.max = others_log;
  if (s.has_target != 0.0 && !(s.target <= others_log)) s.max = s.target;
  if (others_log != others_log) s.max = others_log;
  const double rescaled = s.max == -INFINITY || sum == 0.0 ? 0.0 : exp(shift - s.max);
  s.others = sum * rescaled;
  // sum e (z - shift) becomes sum e (z - max).
  s.shifted = rescaled * (shifted + sum * (shift - s.max));
  if (sum == 0.0) s.shifted = 0.0;
  if (p.row_class_sum) s.class_sum = p.row_class_sum[row];
  return s;
}

__device__ float finish_one(const FinishParams& p, int row, double sum, double shifted) {
  const int64_t token = p.rows.index[row];
  const int peak = p.rows.peak[row];
  const float shift2 = needs_repair(peak) ? decode_peak(peak) : p.rows.shift[row];
  const double shift = shift2 * 0.69314718055994530942;
  const RowState<double> state = state_of(p, row, sum, shifted, shift);
  const RowSummary<double> summary = summarise(state);
  LossTerms<double> terms = p.terms;
  terms.inverse_denominator = p.facts->inverse;
  if (p.sums) terms.class_weight_sum = p.sums[0];
  RowTerms<double> own;
  own.class_weight = p.row_class_weight[row];
  own.token_weight = read(p.token_weight, token, 1);
  own.upstream = read(p.upstream, token, 1);
  own.upstream_lse = read(p.upstream_lse, token, 0);
  const RowResult<double> r = finish_row(state, summary, terms, own);
  p.row_loss[row] = r.loss;
  write(p.loss, token, r.loss);
  write(p.lse, token, summary.lse);
  write(p.logprob, token, summary.logp_target);
  write(p.entropy, token, summary.entropy);
  const double scale = p.scale * (p.rows.scale ? static_cast<double>(p.rows.scale[row]) : 1.0);
  double slope = 1.0;
  if (p.softcap > 0) slope = 1.0 - (state.target / p.softcap) * (state.target / p.softcap);
  const auto factor = static_cast<float>(r.prob * scale * exp(shift - summary.lse));
  p.rows.factor[row] = factor;
  p.rows.target_factor[row] =
      static_cast<float>(state.has_target != 0.0 ? r.target * scale * slope : 0.0);
  if (p.row_smooth) p.row_smooth[row] = static_cast<float>(r.smooth * scale);
  return factor;
}

__global__ void __launch_bounds__(kRows* kLanes) finish_kernel(FinishParams p) {
  __shared__ double sums[kLanes][kRows], shifts[kLanes][kRows];
  __shared__ float factors[kRows];
  if (p.zeroed && blockIdx.x == 0 && threadIdx.x == 0) *p.zeroed = 0;
  const int lane = threadIdx.x / kRows, r = threadIdx.x % kRows;
  const int row = blockIdx.x * kRows + r;
  const int rows =
      min(static_cast<int>(p.chunk_rows), max(0, p.facts->valid - static_cast<int>(p.begin)));
  if (blockIdx.x * kRows >= rows) return;
  double sum = 0, shifted = 0;
  if (row < rows) {
    for (int tile = lane; tile < p.tiles; tile += kLanes) {
      sum += p.tile_sums[tile * p.tile_sums_stride + row];
      if (p.tile_shifted) shifted += p.tile_shifted[tile * p.tile_sums_stride + row] * kLn2;
    }
  }
  sums[lane][r] = sum;
  shifts[lane][r] = shifted;
  __syncthreads();
  if (lane == 0) {
    for (int i = 1; i < kLanes; ++i) sum += sums[i][r], shifted += shifts[i][r];
    factors[r] = row < rows ? finish_one(p, row, sum, shifted) : 0.f;
  }
  __syncthreads();
  if (!p.scaled) return;
  const int64_t vectors = p.hidden / 8;
  for (int i = 0; i < kRows && blockIdx.x * kRows + i < rows; ++i) {
    auto* x = static_cast<uint4*>(p.scaled) + (blockIdx.x * kRows + i) * vectors;
    const float f = factors[i];
    for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
      uint4 four = x[v];
      auto* pairs = reinterpret_cast<__nv_bfloat162*>(&four);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        pairs[k] = __floats2bfloat162_rn(f * __low2float(pairs[k]), f * __high2float(pairs[k]));
      x[v] = four;
    }
  }
}

__global__ void __launch_bounds__(1024) reduce_kernel(ReduceLossParams p) {
  using Sum = cub::BlockReduce<double, 1024>;
  __shared__ typename Sum::TempStorage shared;
  double sum = 0;
  for (int i = threadIdx.x; i < p.facts->valid; i += 1024) sum += p.row_loss[i];
  sum = Sum(shared).Sum(sum);
  if (threadIdx.x != 0) return;
  const bool empty = p.facts->valid + p.facts->poisoned == 0;
  if (p.facts->poisoned > 0) sum = NAN;
  if (p.reduction == 2) {
    sum /= p.facts->denominator;
    if (empty && !p.given) sum = p.zero_when_empty ? 0.0 : static_cast<double>(NAN);
  }
  write(p.loss, 0, sum);
}

// A block owns a run of equal targets and 256 columns; rows are added in ascending order.
__global__ void scatter_kernel(ScatterParams p) {
  const int64_t first = blockIdx.x;
  if (first >= p.facts->valid) return;
  const uint64_t target = p.sorted[first] >> 32;
  if (target == 0xffffffffu) return;
  if (first > 0 && p.sorted[first - 1] >> 32 == target) return;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * 2;
  if (column >= p.hidden) return;
  float a = 0, b = 0;
  const auto* x = static_cast<const __nv_bfloat16*>(p.x) + column;
#pragma unroll 4
  for (int64_t i = first; i < p.facts->valid; ++i) {
    const uint64_t key = p.sorted[i];
    if (key >> 32 != target) break;
    const auto row = static_cast<uint32_t>(key);
    const float f = p.rows.target_factor[row];
    const auto pair = *reinterpret_cast<const __nv_bfloat162*>(x + p.rows.index[row] * p.x_stride);
    a = fmaf(f, __low2float(pair), a);
    b = fmaf(f, __high2float(pair), b);
  }
  auto* to = reinterpret_cast<float2*>(p.dw + static_cast<int64_t>(target) * p.dw_stride + column);
  float2 have = *to;
  have.x += a, have.y += b;
  *to = have;
}

}  // namespace

void finish_rows(const FinishParams& p, cudaStream_t stream) {
  const int64_t blocks = (p.chunk_rows + kRows - 1) / kRows;
  if (blocks == 0) return;
  finish_kernel<<<static_cast<unsigned>(blocks), kRows * kLanes, 0, stream>>>(p);
  device::check_launch("finish_rows");
}

void reduce_loss(const ReduceLossParams& p, cudaStream_t stream) {
  reduce_kernel<<<1, 1024, 0, stream>>>(p);
  device::check_launch("reduce_loss");
}

void scatter_targets(const ScatterParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>((p.hidden + 255) / 256));
  scatter_kernel<<<grid, 128, 0, stream>>>(p);
  device::check_launch("scatter_targets");
}

}  // namespace talea::lce
