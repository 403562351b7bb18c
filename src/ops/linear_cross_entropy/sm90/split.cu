// What: what is added to, and what multiplies, dW outside of its product.
// Why: the targets' share, and a factor that comes after the call, meet every digit kept.
// Never: adds in an order that timing could change.
#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/rows/tokens.cuh"
#include "ops/linear_cross_entropy/sm90/block_float.hpp"
#include "ops/linear_cross_entropy/sm90/pair.cuh"
#include "ops/linear_cross_entropy/sm90/runs.cuh"

namespace talea::lce {
namespace {

// Where the rest of the pair (row, column), column even, lies: one byte (4 bits each) or two.
__device__ int64_t rest_byte(const Rest& rest, int64_t row, int64_t column) {
  const int64_t piece = row / 16 * Rest::pieces(rest.columns) + column / 64;
  const int half = row % 16 / 8, j = column % 64 / 8;
  const int lane = row % 8 * 4 + column % 8 / 2;
  const int64_t at = piece * 128 * rest.bits;
  if (rest.bits == 8) return at + j / 4 * 512 + lane * 16 + j % 4 * 4 + 2 * half;
  return at + lane * 16 + j / 2 * 4 + j % 2 * 2 + half;
}

__device__ void add_to_pair(const SplitScatterParams& p, int64_t row, int64_t column, float2 x) {
  auto* both = reinterpret_cast<uint32_t*>(p.dw + row * p.dw_stride + column);
  char* rest = static_cast<char*>(p.rest.data) + rest_byte(p.rest, row, column);
  uint32_t low = 0, high = 0;
  float2 old;
  if (p.rest.bits == 8) {
    auto* bytes = reinterpret_cast<uint8_t*>(rest);
    old = sm90::Pair<8>::join(*both, uint32_t{bytes[0]} << 8, uint32_t{bytes[1]} << 8);
    *both = sm90::Pair<8>::part({old.x + x.x, old.y + x.y}, low, high);
    bytes[0] = static_cast<uint8_t>(low >> 8), bytes[1] = static_cast<uint8_t>(high >> 8);
  } else if (p.rest.bits == 4) {
    auto* byte = reinterpret_cast<uint8_t*>(rest);
    old = sm90::Pair<4>::join(*both, (*byte & 15u) << 12, (*byte >> 4) << 12);
    *both = sm90::Pair<4>::part({old.x + x.x, old.y + x.y}, low, high);
    *byte = static_cast<uint8_t>(low >> 12 | (high >> 12) << 4);
  } else {
    old = unpack<false>(*both);
    *both = pack<false>(old.x + x.x, old.y + x.y);
  }
}

// The targets' own share: a block owns a run of equal targets and 1024 columns, a thread eight of
// them.
constexpr int kShareThreads = 128, kShareColumns = 8;
struct Share {
  int64_t target = -1, column = 0;  // -1: nothing to add
  float sum[kShareColumns] = {};
};
template <bool kF16>
__device__ Share share_of(const ScatterParams& p) {
  Share own;
  own.column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kShareColumns;
  if (own.column >= p.hidden) return own;
  own.target = run_at(p.sorted, blockIdx.x, p.facts->in_use);
  if (own.target < 0) return own;
  over_run(p.sorted, blockIdx.x, p.facts->in_use, own.target, [&](uint32_t row) {
    const float f = p.rows.target_factor[row];
    const uint4 eight = *reinterpret_cast<const uint4*>(
        static_cast<const uint16_t*>(p.x) + p.rows.index[row] * p.x_stride + own.column);
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<kF16>(words[i]);
      own.sum[2 * i] = fmaf(f, x.x, own.sum[2 * i]);
      own.sum[2 * i + 1] = fmaf(f, x.y, own.sum[2 * i + 1]);
    }
  });
  return own;
}

template <bool kF16>
__global__ void scatter_kernel(ScatterParams p) {
  const Share own = share_of<kF16>(p);
  if (own.target < 0) return;
  auto* to = reinterpret_cast<float4*>(p.dw + own.target * p.dw_stride + own.column);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* sum = own.sum + 4 * i;
    float4 have = to[i];
    have.x += sum[0], have.y += sum[1], have.z += sum[2], have.w += sum[3];
    to[i] = have;
  }
}

__global__ void split_scatter_kernel(SplitScatterParams p) {
  const Share own = share_of<false>(p.rows);
  if (own.target < 0) return;
#pragma unroll
  for (int i = 0; i < kShareColumns; i += 2)
    add_to_pair(p, own.target, own.column + i, {own.sum[i], own.sum[i + 1]});
}

__device__ uint8_t* exponent_of(const Rest& rest, int64_t row, int64_t column) {
  return static_cast<uint8_t*>(rest.data) + Rest::exponent_at(row, column, rest.columns);
}

// Sixteen lanes have a row's block of codes: its exponent changes with its largest sum.
__global__ void coded_scatter_kernel(SplitScatterParams p) {
  using sm90::BlockFloat;
  static_assert(16 * kShareColumns == Rest::kTileColumns);
  Share own = share_of<false>(p.rows);
  const bool inside = own.target >= 0;  // the last columns may end within the block
  uint8_t* exponent = nullptr;
  uint4* codes = nullptr;
  if (inside) {
    exponent = exponent_of(p.rest, own.target, own.column);
    codes = reinterpret_cast<uint4*>(p.dw + own.target * p.dw_stride + own.column);
    const uint4 old = *codes;
    const uint32_t words[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = BlockFloat::values(words[i], *exponent);
      own.sum[2 * i] += x.x, own.sum[2 * i + 1] += x.y;
    }
  }
  float most = 0;
  for (const float x : own.sum) most = sm90::larger(most, x);
  for (int other = 8; other > 0; other /= 2)
    most = sm90::larger(most, __shfl_xor_sync(~0u, most, other));
  if (!inside) return;
  const uint32_t now = BlockFloat::exponent(most);
  const auto pair = [&](int i) { return BlockFloat::pair({own.sum[i], own.sum[i + 1]}, now); };
  *codes = {pair(0), pair(2), pair(4), pair(6)};
  if (threadIdx.x % 16 == 0) *exponent = static_cast<uint8_t>(now);
}

// A warp a piece; 1 is no factor, and costs a launch alone.
template <int kBits>
__global__ void __launch_bounds__(256) factor_kernel(LateWeightParams p) {
  const auto factor = static_cast<float>(read(p.factor, 0, 1));
  if (factor == 1.f) return;
  const int lane = threadIdx.x % 32;
  const int64_t pieces = Rest::pieces(p.hidden), all = (p.vocab + 15) / 16 * pieces;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / 32;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; i < all;
       i += warps) {
    uint32_t rest[kBits + 1];
    const auto* words =
        reinterpret_cast<const uint4*>(static_cast<char*>(p.rest.data) + i * 128 * kBits) + lane;
#pragma unroll
    for (int q = 0; q < kBits / 4; ++q) {
      const uint4 four = words[32 * q];
      rest[4 * q] = four.x, rest[4 * q + 1] = four.y;
      rest[4 * q + 2] = four.z, rest[4 * q + 3] = four.w;
    }
    const int64_t row = i / pieces * 16 + lane / 4, column = i % pieces * 64 + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t c = column + 8 * j;
        if (row + 8 * h >= p.vocab || c >= p.hidden) continue;
        auto* both = reinterpret_cast<uint32_t*>(p.dw + (row + 8 * h) * p.dw_stride + c);
        uint32_t r[2] = {0, 0};
#pragma unroll
        for (int e = 0; e < 2; ++e) r[e] = sm90::Pair<kBits>::digits(rest, 4 * j + 2 * h + e);
        const float2 x = sm90::Pair<kBits>::join(*both, r[0], r[1]);
        *both = pack<false>(x.x * factor, x.y * factor);
      }
  }
}

// Eight codes become bf16, whatever the factor. Rows that were never formed are 0 and stay so.
__device__ uint4 finished_codes(const uint4& codes, uint32_t exponent, float factor) {
  const auto times = [&](uint32_t both) {
    const float2 x = sm90::BlockFloat::values(both, exponent);
    return pack<false>(x.x == 0 ? 0 : x.x * factor, x.y == 0 ? 0 : x.y * factor);
  };
  return {times(codes.x), times(codes.y), times(codes.z), times(codes.w)};
}

// So many threads a row, and two groups of eight each at once: as many bytes asked for as the
// memory takes time to bring.
__global__ void __launch_bounds__(256) coded_factor_kernel(LateWeightParams p) {
  const auto factor = static_cast<float>(read(p.factor, 0, 1));
  const int groups = static_cast<int>(p.hidden / 8);
  int threads = 256;
  while (threads > 16 && threads >= groups) threads /= 2;
  const int64_t rows = 256 / threads;
  for (int64_t row = blockIdx.x * rows + threadIdx.x / threads; row < p.vocab;
       row += gridDim.x * rows) {
    auto* words = reinterpret_cast<uint4*>(p.dw + row * p.dw_stride);
    for (int i = static_cast<int>(threadIdx.x) % threads; i < groups; i += 2 * threads) {
      const int other = i + threads < groups ? i + threads : i;
      const uint4 a = words[i], b = words[other];
      const uint32_t of_a = *exponent_of(p.rest, row, 8 * i),
                     of_b = *exponent_of(p.rest, row, 8 * other);
      words[i] = finished_codes(a, of_a, factor);
      if (other != i) words[other] = finished_codes(b, of_b, factor);
    }
  }
}

__global__ void __launch_bounds__(256) row_factor_kernel(LateRowsParams p) {
  for (int64_t i = blockIdx.x; i < p.rows; i += gridDim.x) {
    const auto factor = static_cast<float>(read(p.factor, i, 1));
    for (int64_t j = 8 * threadIdx.x; j < p.hidden; j += 8 * blockDim.x) {
      auto* words = reinterpret_cast<uint4*>(p.dx + i * p.dx_stride + j);
      *words = finished_codes(
          *words, p.exponents[i * p.exponents_stride + j / sm90::BlockFloat::kElements], factor);
    }
  }
}

}  // namespace

void multiply_split_rows(const LateRowsParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.hidden == 0) return;
  const auto blocks = static_cast<unsigned>(p.rows < 8192 ? p.rows : 8192);
  row_factor_kernel<<<blocks, 256, 0, stream>>>(p);
  device::check_launch("multiply_split_rows");
}

static dim3 grid_of(const ScatterParams& p) {
  return {static_cast<unsigned>(p.tokens), static_cast<unsigned>((p.hidden + 1023) / 1024)};
}

void scatter_targets(const ScatterParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  auto* kernel = p.f16 ? scatter_kernel<true> : scatter_kernel<false>;
  kernel<<<grid_of(p), kShareThreads, 0, stream>>>(p);
  device::check_launch("scatter_targets");
}

void scatter_targets(const SplitScatterParams& p, cudaStream_t stream) {
  if (p.rows.tokens == 0) return;
  auto* kernel = p.rest.is_coded() ? coded_scatter_kernel : split_scatter_kernel;
  kernel<<<grid_of(p.rows), kShareThreads, 0, stream>>>(p);
  device::check_launch("scatter_targets");
}

void multiply_split(const LateWeightParams& p, cudaStream_t stream) {
  if (p.vocab == 0 || p.hidden == 0) return;
  auto* kernel = p.rest.is_coded()  ? coded_factor_kernel
                 : p.rest.bits == 8 ? factor_kernel<8>
                 : p.rest.bits == 4 ? factor_kernel<4>
                                    : factor_kernel<0>;
  kernel<<<1056, 256, 0, stream>>>(p);
  device::check_launch("multiply_split");
}

}  // namespace talea::lce
