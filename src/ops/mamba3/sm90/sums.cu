// What: rows of d_q and d_k by head, summed over the heads of each group; angles over all heads.
// Why: heads follow each other in fixed order; four columns a thread keep the memory busy.
// Never: sums with atomics.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/rows/chunk.hpp"
#include "ops/mamba3/rows/sums.hpp"
#include "ops/mamba3/sm90/machine.hpp"

namespace talea::mamba3::sm90 {
namespace {

constexpr int threads = 256, pieces = 32;  // of four columns

// A warp a row of a group: q's in the first half of the grid's y, then k's.
__global__ void __launch_bounds__(threads)
    sums_kernel(const __grid_constant__ Args a, const __grid_constant__ Wave w,
                const __grid_constant__ UnitBuffers b, int64_t items) {
  const cuda::Sizes& s = a.size;
  const cuda::View& to = blockIdx.y == 0 ? a.grad.q : a.grad.k;
  const float* const from = blockIdx.y == 0 ? b.dq : b.dk;
  if (!to.data) return;
  const int piece = threadIdx.x % pieces;
  for (int64_t item = (blockIdx.x * int64_t{threads} + threadIdx.x) / pieces; item < items;
       item += int64_t{gridDim.x} * (threads / pieces)) {
    const auto g = static_cast<int>(item % s.groups);
    const int64_t row = item / s.groups, place = row / s.rank;
    const auto r = static_cast<int>(row % s.rank);
    const cuda::SliceToken token = cuda::slice_token(a, w, place);
    if (token.token < 0) continue;
    int first = g * s.heads_per_group - s.head_offset, last = first + s.heads_per_group;
    first = first < 0 ? 0 : first;
    last = last < s.heads ? last : s.heads;
    const auto* at = reinterpret_cast<const float4*>(from + row * s.heads * s.columns) + piece;
    float4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int h = first; h < last; ++h) {
      const float4 x = __ldcs(at + h * pieces);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    const int64_t out = cuda::at(to, token.batch, token.token, r, g, 4 * piece);
    if (to.dtype == DType::bf16 && to.stride[4] == 1) {
      const __nv_bfloat162 low = __floats2bfloat162_rn(sum.x, sum.y);
      const __nv_bfloat162 high = __floats2bfloat162_rn(sum.z, sum.w);
      auto* const own = static_cast<__nv_bfloat16*>(to.data) + out;
      if (reinterpret_cast<uintptr_t>(own) % 8 == 0) {
        *reinterpret_cast<uint2*>(own) = {*reinterpret_cast<const uint32_t*>(&low),
                                          *reinterpret_cast<const uint32_t*>(&high)};
        continue;
      }
    }
    cuda::store(to, out, sum.x);
    cuda::store(to, out + to.stride[4], sum.y);
    cuda::store(to, out + 2 * to.stride[4], sum.z);
    cuda::store(to, out + 3 * to.stride[4], sum.w);
  }
}

// A block a token, a warp an eighth of its heads: d_angles over heads that share them.
__global__ void __launch_bounds__(threads)
    angles_kernel(const __grid_constant__ Args a, const __grid_constant__ Wave w,
                  const float* from) {
  constexpr int parts = threads / 32;
  __shared__ float sums[parts][64];
  const cuda::Sizes& s = a.size;
  const int64_t place = blockIdx.x;
  const cuda::SliceToken token = cuda::slice_token(a, w, place);
  if (token.token < 0) return;
  const int part = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* const row = from + place * s.heads * s.pairs;
  for (int i = lane; i < s.pairs; i += 32) {
    float sum = 0;
#pragma unroll 8
    for (int h = part; h < s.heads; h += parts) sum += row[int64_t{h} * s.pairs + i];
    sums[part][i] = sum;
  }
  __syncthreads();
  const int i = threadIdx.x;
  if (i >= s.pairs) return;
  float sum = 0;
#pragma unroll
  for (int j = 0; j < parts; ++j) sum += sums[j][i];
  cuda::store(a.grad.angles, cuda::at(a.grad.angles, token.batch, token.token, 0, i), sum);
}

}  // namespace

void launch_sums(const Args& a, const Wave& w, const UnitBuffers& b, cudaStream_t stream) {
  const int64_t places = (w.last - w.first) * w.slice_chunks * a.size.chunk;
  if (a.size.sum_angles && a.grad.angles.data && places * a.size.pairs > 0) {
    angles_kernel<<<static_cast<unsigned>(places), threads, 0, stream>>>(a, w, b.dangles);
    device::check_launch("mamba3: sums of angles");
  }
  const int64_t items = places * a.size.rank * a.size.groups;
  if (items == 0 || (!a.grad.q.data && !a.grad.k.data)) return;
  const int64_t blocks = (items * pieces + threads - 1) / threads;
  const dim3 grid(static_cast<unsigned>(blocks < 1 << 20 ? blocks : 1 << 20), 2);
  sums_kernel<<<grid, threads, 0, stream>>>(a, w, b, items);
  device::check_launch("mamba3: sums of rows");
}

}  // namespace talea::mamba3::sm90
