// What: rows of fp16 between the logits product and the gradient products: one power of two for all
// tiles of a row, the factor of a row with likely words, and the exponent of the rows that enter
// dW.
// Why: fp16 ends at 65504 and thins out below 6e-5; a row's maximum is known once its logits are.
// So is what its words' gradients are: the likely ones are rounded once, as in eager arithmetic.
// Never: touches a row of the buffer whose first words told its maximum well enough and in which no
// tile has much of the probability.
#include "core/kernel_mutant.hpp"
#include "device/common/reduce.cuh"
#include "device/sm90/follow.cuh"
#include "ops/linear_cross_entropy/sm90/pack.cuh"
#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"

namespace talea::lce {
namespace {

constexpr int kThreads = 256, kWidth = 8, kPieces = 4;
constexpr int kMostExponent = 100;  // its power and the inverse are normal numbers of fp32

__device__ const uint16_t* row_of_x(const HalfParams& p, int64_t row) {
  const int64_t used = *p.range.in_use - p.range.begin;
  const int64_t first = p.x_rows > 0 ? p.x_rows - min(p.x_rows, used) : 0;
  return static_cast<const uint16_t*>(p.x) + (first + row) * p.x_stride;
}

// By which this row, times its factor, stays below 2^15.
__device__ int exponent_of(const HalfParams& p, int64_t row) {
  __shared__ float warps[kThreads / 32];
  const auto* x = reinterpret_cast<const uint4*>(row_of_x(p, row));
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

__device__ uint32_t times(uint32_t both, float f, float& most) {
  const float2 x = unpack<true>(both);
  most = fmaxf(most, fmaxf(f * x.x, f * x.y));
  return pack<true>(f * x.x, f * x.y);
}

// The words of a row that are formed anew.
struct Words {
  int count, words[kMostExactWords];

  // Of eight, as they were stored.
  __device__ void add(uint4 v, int first, int vocab) {
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 x = unpack<true>(pairs[i / 2]);
      if (first + i >= vocab || !((i % 2 == 0 ? x.x : x.y) >= kLeastExact)) continue;
      const int place = atomicAdd(&count, 1);  // whichever: each is a word of its own
      if (place < kMostExactWords) words[place] = first + i;
    }
  }
};

// The whole warp: x . w of one word, in a fixed order.
__device__ float dot(const HalfParams& p, int64_t row, int64_t word) {
  const uint16_t* x = row_of_x(p, row);
  const uint16_t* w = static_cast<const uint16_t*>(p.weight) + word * p.weight_stride;
  float sum = 0;
#pragma unroll 4
  for (int64_t d = threadIdx.x % 32 * kWidth; d < p.hidden; d += 32 * kWidth) {
    const uint4 a = *reinterpret_cast<const uint4*>(x + d);
    const uint4 b = *reinterpret_cast<const uint4*>(w + d);
    const uint32_t as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 u = unpack<true>(as[i]), v = unpack<true>(bs[i]);
      sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
  }
  return device::warp_reduce(sum, device::Sum());
}

// A warp a word: what the buffer holds of it is rounded once.
__device__ void form_anew(const HalfParams& p, int64_t row, float exact, int raise,
                          const Words& found) {
  const int peak = p.rows.peak[row];
  const float shift =
      (needs_repair(peak) ? decode_peak(peak) : p.rows.shift[row]) + static_cast<float>(raise);
  const int count = min(found.count, kMostExactWords);
  for (int i = static_cast<int>(threadIdx.x) / 32; i < count; i += kThreads / 32) {
    const int word = found.words[i];
    const float e = exact * exp2f(fmaf(dot(p, row, word), p.scale2, -shift));
    if (threadIdx.x % 32 == 0)
      p.buffer[row * p.stride + word] = static_cast<uint16_t>(pack<true>(e, 0.f));
  }
}

// A block a row:
//   least_exponent = min over the rows of what X [row, hidden] factor[row] leaves room for
//   buffer [row, vocab] *= 2^(tile_raises [tile, row] - row_raise[row]) row_exact[row],
//                                        where the row was raised or has a row_exact other than 0
//   of its words of kLeastExact and more: = row_exact[row] exp2(scale2 X [row] . W [word] - shift)
__global__ void __launch_bounds__(kThreads) even_out_kernel(HalfParams p) {
  __shared__ Words found;
  talea::sm90::begin_after_earlier_kernels();
  const int64_t row = blockIdx.x;
  if (row >= p.range.count()) return;
  if (p.least_exponent) {
    const int exponent = exponent_of(p, row);
    if (threadIdx.x == 0) atomicMin(p.least_exponent, exponent);
  }
  const int raise = p.row_raise[row];
  const float exact = p.row_exact[row];
  if (raise == 0 && exact == 0) return;
  if (threadIdx.x == 0) found.count = 0;
  __syncthreads();
  const float all_times = exact == 0 ? 1.f : exact;
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
      const float f = all_times * power_of_two(p.tile_raises[tile * p.raise_stride + row] - raise);
      float most = 0;
      const uint4 v = pieces[i];
      const uint4 to = {times(v.x, f, most), times(v.y, f, most), times(v.z, f, most),
                        times(v.w, f, most)};
      words[at] = to;
      if (exact != 0 && most >= kLeastExact / 2) found.add(to, at * kWidth, p.vocab);
    }
  }
  if (exact == 0) return;
  __syncthreads();
  form_anew(p, row, exact, raise, found);
}

}  // namespace

void even_out(const HalfParams& p, cudaStream_t stream) {
  if (p.range.rows == 0 || p.vocab == 0) return;
  talea::sm90::launch_following(even_out_kernel, {p.range.rows, kThreads}, p, stream, "even_out");
}

}  // namespace talea::lce
