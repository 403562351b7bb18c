// What: rows of fp16 between the logits product and the gradient products: one power of two for all
// tiles of a row, and the exponent with which the rows of X enter dW.
// Why: fp16 ends at 65504 and thins out below 6e-5; a row's maximum is known once its logits are.
// Never: touches a row of the buffer whose first words told its maximum well enough.
#include "device/common/reduce.cuh"
#include "device/sm90/follow.cuh"
#include "ops/linear_cross_entropy/sm90/pack.cuh"
#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"

namespace talea::lce {
namespace {

constexpr int kThreads = 256, kWidth = 8, kPieces = 4;
constexpr int kMostExponent = 100;  // its power and the inverse are normal numbers of fp32

// By which this row, times its factor, stays below 2^15.
__device__ int exponent_of(const HalfParams& p, int64_t row) {
  __shared__ float warps[kThreads / 32];
  const auto* x = static_cast<const uint4*>(p.x) + row * (p.hidden / kWidth);
  float most = 0;
  for (int64_t v = threadIdx.x; v < p.hidden / kWidth; v += kThreads) {
    const uint4 four = x[v];
    for (const uint32_t word : {four.x, four.y, four.z, four.w}) {
      const float2 both = unpack<true>(word);
      most = fmaxf(most, fmaxf(fabsf(both.x), fabsf(both.y)));
    }
  }
  most = device::block_reduce(most, device::Max(), warps) * fabsf(p.rows.factor[row]);
  return most > 0 && most < INFINITY ? min(14 - ilogbf(most), kMostExponent) : kMostExponent;
}

__device__ uint32_t times(uint32_t both, float f) {
  const float2 x = unpack<true>(both);
  return pack<true>(f * x.x, f * x.y);
}

// A block a row:
//   least_exponent = min over the rows of what X [row, hidden] factor[row] leaves room for
//   buffer [row, vocab] *= 2^(tile_raises [tile, row] - row_raise[row]), where the row was raised
__global__ void __launch_bounds__(kThreads) even_out_kernel(HalfParams p) {
  talea::sm90::begin_after_earlier_kernels();
  const int64_t row = blockIdx.x;
  if (row >= p.range.count()) return;
  if (p.x) {
    const int exponent = exponent_of(p, row);
    if (threadIdx.x == 0) atomicMin(p.least_exponent, exponent);
  }
  const int raise = p.row_raise[row];
  if (raise == 0) return;
  auto* words = reinterpret_cast<uint4*>(p.buffer + row * p.stride);
  const int all = (p.vocab + kWidth - 1) / kWidth;  // the last one lies within the row's stride
  for (int base = threadIdx.x; base < all; base += kThreads * kPieces) {
    uint4 pieces[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (base + i * kThreads < all) pieces[i] = words[base + i * kThreads];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = base + i * kThreads;
      if (at >= all) break;
      const int64_t tile = at * kWidth / p.tile_columns;
      const float f = power_of_two(p.tile_raises[tile * p.raise_stride + row] - raise);
      const uint4 v = pieces[i];
      words[at] = {times(v.x, f), times(v.y, f), times(v.z, f), times(v.w, f)};
    }
  }
}

}  // namespace

void even_out(const HalfParams& p, cudaStream_t stream) {
  if (p.range.rows == 0 || p.vocab == 0) return;
  talea::sm90::launch_following(even_out_kernel, {p.range.rows, kThreads}, p, stream, "even_out");
}

}  // namespace talea::lce
