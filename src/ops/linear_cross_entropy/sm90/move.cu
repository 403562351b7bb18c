// What: moves between the caller's tensors and the workspace: gathered rows, scaled rows, dX.
// Why: TMA reads dense 16-bit rows of whole 16-byte pieces, so they move eight elements at a time
// and keep their dtype; the caller sees each value rounded once.
// Never: changes the order of the rows.
#include "core/kernel_mutant.hpp"
#include "device/sm90/follow.cuh"
#include "ops/linear_cross_entropy/sm90/block_float.hpp"
#include "ops/linear_cross_entropy/sm90/pack.cuh"
#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"

namespace talea::lce {
namespace {

// columns % 8 == 0 and 16-byte aligned rows: what TMA needs anyway.
constexpr int64_t kTileRows = 256;  // rows of the two stacked tiles of a pair of blocks

__global__ void gather_kernel(GatherParams p) {
  talea::sm90::begin_after_earlier_kernels();
  const int64_t row = blockIdx.x, rows = p.range.in_use ? p.range.count() : p.range.rows;
  const bool real = row < rows;
  if (row >= (rows + kTileRows - 1) / kTileRows * kTileRows) return;
  const int64_t first = p.to_rows > 0 ? p.to_rows - rows : 0;
  const int64_t vectors = p.columns / 8;
  auto* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.to) + (first + row) * p.to_stride);
  if (!real) {
    if (p.to_rows > 0) return;
    for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) to[i] = uint4{0, 0, 0, 0};
    return;
  }
  const int64_t place =
      p.range.begin + (mutant(KernelMutant::gather_row_before) && row > 0 ? row - 1 : row);
  const int64_t source = p.index ? p.index[place] : place;
  const auto* from =
      reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.hidden) + source * p.stride);
  for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) to[i] = from[i];
}

template <bool kF16>
__global__ void scale_kernel(ScaleParams p) {
  const int64_t row = blockIdx.x;
  if (p.least && row == 0 && threadIdx.x == 0) *p.undo = exp2f(static_cast<float>(-*p.least));
  if (row >= p.range.count()) return;
  const float f =
      p.factors ? exp2f(static_cast<float>(*p.least - p.factors[row].exponent)) : p.factor[row];
  auto* x = static_cast<uint4*>(p.x) + row * (p.hidden / 8);
  for (int64_t v = threadIdx.x; v < p.hidden / 8; v += blockDim.x) {
    uint4 four = x[v];
    auto* words = reinterpret_cast<uint32_t*>(&four);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 both = unpack<kF16>(words[k]);
      words[k] = pack<kF16>(f * both.x, f * both.y);
    }
    x[v] = four;
  }
}

// hidden is a multiple of 8, and a row of `from` is aligned to 16 bytes.
template <bool kBf16>
__device__ void load_eight(const void* from, int64_t at, float (&x)[8]) {
  if constexpr (kBf16) {
    const uint4 v = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + at);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 both = unpack<false>(words[k]);
      x[2 * k] = both.x, x[2 * k + 1] = both.y;
    }
  } else {
    const auto* f = reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
    const float4 a = f[0], b = f[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
}

template <bool kBf16>
__global__ void scatter_rows_kernel(ScatterRowsParams p) {
  const int64_t row = blockIdx.x;
  if (row >= (p.range.in_use ? p.range.count() : p.range.rows)) return;
  const int64_t t = p.index ? p.index[row] : p.range.begin + row;
  for (int64_t d = int64_t{8} * threadIdx.x; d < p.hidden; d += int64_t{8} * blockDim.x) {
    float x[8];
    load_eight<kBf16>(p.from, row * p.hidden + d, x);
    if (p.to.dtype == DType::bf16 && p.to.stride1 == 1) {  // its rows are aligned, too
      const uint4 v = {pack<false>(x[0], x[1]), pack<false>(x[2], x[3]), pack<false>(x[4], x[5]),
                       pack<false>(x[6], x[7])};
      auto* to = static_cast<uint16_t*>(p.to.data) + t * p.to.stride0 + d;
      *reinterpret_cast<uint4*>(to) = v;
      continue;
    }
    if (p.to.dtype == DType::f32 && p.to.stride1 == 1) {
      auto* to = reinterpret_cast<float4*>(static_cast<float*>(p.to.data) + t * p.to.stride0 + d);
      to[0] = {x[0], x[1], x[2], x[3]};
      to[1] = {x[4], x[5], x[6], x[7]};
      continue;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) p.to.store(t, d + k, x[k]);
  }
}

__global__ void end_rows_kernel(EndRowsParams p) {
  using sm90::BlockFloat;
  const int64_t row = blockIdx.x;
  if (row >= p.range.count()) return;
  const int target = p.rows.target[row];
  const float factor = p.rows.target_factor[row];
  const int64_t to = p.rows.index[row] * p.to.stride0, word = target * p.weight_stride;
  const int lane = threadIdx.x % 32;  // a warp has a block of codes at once
  for (int64_t first = threadIdx.x / 32 * 64; first < p.hidden; first += 2 * blockDim.x) {
    const int64_t d = first + 2 * lane;
    float2 x{0, 0};
    if (d < p.hidden) {
      x = *reinterpret_cast<const float2*>(p.sum + row * p.hidden + d);
      if (target >= 0) {
        const float2 w = load_pair<false>(p.weight, word + d);
        x.x = fmaf(factor, w.x, x.x), x.y = fmaf(factor, w.y, x.y);
      }
    }
    uint32_t both = pack<false>(x.x, x.y);
    if (p.exponents) {
      const float most = sm90::largest_of_warp(sm90::larger(sm90::larger(0, x.x), x.y));
      const uint32_t exponent = BlockFloat::exponent(most);
      both = BlockFloat::pair(x, exponent);
      if (lane == 0)
        p.exponents[p.rows.index[row] * BlockFloat::blocks(p.hidden) + first / 64] =
            static_cast<uint8_t>(exponent);
    }
    if (d >= p.hidden) continue;
    if (p.to.dtype == DType::f32)
      *reinterpret_cast<float2*>(static_cast<float*>(p.to.data) + to + d) = x;
    else
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.to.data) + to + d) = both;
  }
}

}  // namespace

void gather_rows(const GatherParams& p, cudaStream_t stream) {
  if (p.range.rows == 0) return;
  talea::sm90::launch_following(gather_kernel, {p.range.rows, 128, p.follows}, p, stream,
                                "gather_rows");
}

void scale_rows(const ScaleParams& p, cudaStream_t stream) {
  if (p.range.rows == 0) return;
  auto* kernel = p.f16 ? scale_kernel<true> : scale_kernel<false>;
  kernel<<<static_cast<unsigned>(p.range.rows), 128, 0, stream>>>(p);
  device::check_launch("scale_rows");
}

void scatter_rows(const ScatterRowsParams& p, cudaStream_t stream) {
  if (p.range.rows == 0) return;
  auto* kernel = p.bf16 ? scatter_rows_kernel<true> : scatter_rows_kernel<false>;
  kernel<<<static_cast<unsigned>(p.range.rows), 256, 0, stream>>>(p);
  device::check_launch("scatter_rows");
}

void end_rows(const EndRowsParams& p, cudaStream_t stream) {
  if (p.range.rows == 0) return;
  end_rows_kernel<<<static_cast<unsigned>(p.range.rows), 256, 0, stream>>>(p);
  device::check_launch("end_rows");
}

}  // namespace talea::lce
