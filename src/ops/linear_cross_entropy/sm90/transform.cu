// What: exp(z - shift) becomes da in the 16-bit buffer, in place.
// Why: some gradients are no product of a row's and a word's factor; the logit comes back from its
// exponential, within the rounding that the buffer has anyway.
// Never: touches the target's element, which stays 0.
#include "core/kernel_mutant.hpp"
#include "device/common/cuda_check.hpp"
#include "device/sm90/follow.cuh"
#include "ops/linear_cross_entropy/sm90/pack.cuh"
#include "ops/linear_cross_entropy/sm90/wide.hpp"

namespace talea::lce {
namespace {

constexpr int kThreads = 256, kWidth = 8, kPieces = 4;  // a block: 8192 columns of one row

// The row's factors with everything folded that does not depend on the word.
struct Folded {
  float prob, smooth, entropy, offset, slope, base;

  __device__ Folded(const RowFactors& f, float softcap) {
    prob = f.prob * f.inverse * f.scale;
    smooth = f.smooth * f.scale;
    entropy = f.entropy_up * f.inverse * f.scale;
    offset = f.offset;
    slope = softcap > 0 ? kLn2 / softcap : 0.f;  // of tanh, by log2 e
    base = softcap > 0 ? f.base / softcap : 0.f;
  }
};

template <bool kEntropy>
__device__ __forceinline__ float gradient_of(const Folded& f, float e, float c) {
  // The least normal number stands for an underflow: its terms weigh nothing either way.
  const float x2 = __log2f(fmaxf(e, 0x1p-126f)), t = fmaf(x2, f.slope, f.base);
  float da = fmaf(f.prob, e, -f.smooth * c);
  if (kEntropy) da = fmaf(-f.entropy * e, fmaf(x2, kLn2, f.offset), da);
  return mutant(Mutant::softcap_no_derivative) ? da : da * fmaf(-t, t, 1.f);
}

template <bool kEntropy, bool kClasses>
__global__ void __launch_bounds__(kThreads) transform_kernel(TransformParams p) {
  talea::sm90::begin_after_earlier_kernels();
  const int64_t row = blockIdx.x;
  if (row >= p.range.count()) return;
  const Folded f(p.factors[row], p.softcap);
  const int target = p.target[row];
  auto* words = reinterpret_cast<uint4*>(p.buffer + row * p.stride);
  // From the last columns to the first: the product before has just written the last ones, the
  // product after begins with the first, and the cache holds some of either.
  const int layer = gridDim.y - 1 - blockIdx.y;
  const int begin = layer * (kThreads * kPieces) + threadIdx.x;
  uint4 pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
    if ((begin + i * kThreads) * kWidth < p.vocab) pieces[i] = words[begin + i * kThreads];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int first = (begin + i * kThreads) * kWidth;
    if (first >= p.vocab) return;
    const uint32_t in[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
    float da[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float2 both = unpack<false>(in[j / 2]);
      const float c = kClasses ? p.class_weight[min(first + j, p.vocab - 1)] : 1.f;
      da[j] = gradient_of<kEntropy>(f, j % 2 ? both.y : both.x, c);
    }
    if (static_cast<unsigned>(target - first) < kWidth) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (first + j == target) da[j] = 0.f;
    }
    words[begin + i * kThreads] = {pack<false>(da[0], da[1]), pack<false>(da[2], da[3]),
                                   pack<false>(da[4], da[5]), pack<false>(da[6], da[7])};
  }
}

}  // namespace

void transform_rows(const TransformParams& p, cudaStream_t stream) {
  if (p.range.rows == 0 || p.vocab == 0) return;
  constexpr int kColumns = kThreads * kWidth * kPieces;
  auto* kernel =
      p.entropy ? (p.class_weight ? transform_kernel<true, true> : transform_kernel<true, false>)
                : (p.class_weight ? transform_kernel<false, true> : transform_kernel<false, false>);
  for (int runs = mutant(KernelMutant::pass_run_twice) ? 2 : 1; runs > 0; --runs)
    talea::sm90::launch_following(
        kernel, {p.range.rows, kThreads, true, (p.vocab + kColumns - 1) / kColumns}, p, stream,
        "transform_rows");
}

}  // namespace talea::lce
