// What: the targets' own share of a dW that chunks round, kept back and added once at the end.
// Why: it is most of what a target's row of dW holds; rounded by every chunk after its own, it
// would lose more than eager arithmetic does.
// Never: uses an atomic; the shares of one target are added in the order of the rows.
//
//   each chunk, before dW:   share[row] = dz[row, target];  dz[row, target] = 0
//   after the last:          next[row] = the next row of the same target; a head has none before
//   each head:               dW[target] += scale (share x + share x of the next + ...), rounded
//   once
#include "core/kernel_mutant.hpp"
#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/cuda/logit.cuh"

namespace talea::lce::cuda {
namespace {

constexpr int threads = 256;
constexpr int no_row = -1;

__global__ void keep_back_kernel(ChunkRows c, const RowFactors* factors, __nv_bfloat16* dz,
                                 int64_t stride, TargetShares shares) {
  const int64_t r = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (!is_row(c, r)) return;
  const int column = factors[r].target_column;
  __nv_bfloat16* own = dz + r * stride + column;
  shares.column[c.begin + r] = column;
  if (column < 0) return;
  const bool missed = mutant(KernelMutant::target_row_missed);
  shares.share[c.begin + r] = missed ? 0.f : __bfloat162float(*own);
  *own = __float2bfloat16(0.f);
}

// A warp a row.
__global__ void link_kernel(const BatchFacts* facts, TargetShares shares) {
  constexpr int warp = device::warp_size;
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / warp;
  const int lane = threadIdx.x % warp;
  const int64_t rows = facts->valid;
  if (row >= rows) return;
  const int column = shares.column[row];
  // The first of [begin, end) with this column, or -1.
  const auto found = [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += warp) {
      const bool same = at + lane < end && shares.column[at + lane] == column;
      const unsigned ballot = __ballot_sync(device::whole_warp, same);
      if (ballot != 0) return static_cast<int>(at + __ffs(static_cast<int>(ballot)) - 1);
    }
    return no_row;
  };
  const bool head = column >= 0 && found(0, row) == no_row;
  const int next = column >= 0 ? found(row + 1, rows) : no_row;
  if (lane != 0) return;
  shares.next[row] = next;
  shares.head[row] = head;
}

template <typename X>
__global__ void add_kernel(const BatchFacts* facts, const int64_t* order, TargetShares shares,
                           const X* x, int64_t stride0, int64_t stride1, int64_t hidden,
                           float scale, __nv_bfloat16* dw, int64_t dw_stride) {
  const int64_t head = blockIdx.x;
  if (head >= facts->valid || !shares.head[head]) return;
  const int64_t i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (i >= hidden) return;
  float sum = 0;
  for (int row = static_cast<int>(head); row != no_row; row = shares.next[row]) {
    // As the products read the row.
    const float value = __bfloat162float(
        __float2bfloat16(static_cast<float>(x[order[row] * stride0 + i * stride1])));
    sum = fmaf(shares.share[row], value, sum);
  }
  __nv_bfloat16* to = dw + shares.column[head] * dw_stride + i;
  *to = __float2bfloat16(fmaf(scale, sum, __bfloat162float(*to)));
}

}  // namespace

void keep_back_targets(const ChunkRows& c, const RowFactors* factors, void* dz, int64_t stride,
                       const TargetShares& shares, cudaStream_t stream) {
  keep_back_kernel<<<static_cast<unsigned>((c.rows + threads - 1) / threads), threads, 0, stream>>>(
      c, factors, static_cast<__nv_bfloat16*>(dz), stride, shares);
  device::check_launch("keep_back_targets");
}

void add_targets(const TargetSum& s, const TargetShares& shares, cudaStream_t stream) {
  if (s.tokens == 0 || s.hidden == 0) return;
  constexpr int64_t rows = threads / device::warp_size;
  link_kernel<<<static_cast<unsigned>((s.tokens + rows - 1) / rows), threads, 0, stream>>>(s.facts,
                                                                                           shares);
  device::check_launch("link rows of a target");
  const dim3 grid(static_cast<unsigned>(s.tokens),
                  static_cast<unsigned>((s.hidden + threads - 1) / threads));
  const auto launch = [&](const auto* x) {
    add_kernel<<<grid, threads, 0, stream>>>(s.facts, s.order, shares, x, s.x.stride0, s.x.stride1,
                                             s.hidden, s.scale, static_cast<__nv_bfloat16*>(s.dw),
                                             s.dw_stride);
  };
  if (s.x.dtype == DType::bf16)
    launch(static_cast<const __nv_bfloat16*>(s.x.data));
  else if (s.x.dtype == DType::f16)
    launch(static_cast<const __half*>(s.x.data));
  else
    launch(static_cast<const float*>(s.x.data));
  device::check_launch("add_targets");
}

}  // namespace talea::lce::cuda
