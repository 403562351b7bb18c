// What: what ignored and poisoned tokens show: zeros, or NaN.
// Why: they take no part in a chunk; one pass over all tokens writes their outputs.
// Never: touches a valid token.
#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/rows/tokens.cuh"

namespace talea::lce {
namespace {

// One block a token.
__global__ void __launch_bounds__(128) blank_kernel(BlankParams p) {
  const int64_t t = blockIdx.x;
  const RowKind kind = p.kinds ? p.kinds[t] : kind_of(p.rule, t);
  if (kind == RowKind::valid) return;
  const double x = kind == RowKind::poisoned ? static_cast<double>(NAN) : 0.0;
  if (threadIdx.x == 0) {
    write_blank(p.out, t, x);
    if (p.row_loss) p.row_loss[t] = x;
    if (p.hit) p.hit[t] = 0;
  }
  if (!p.dx) return;
  const double dx = p.poison_dx ? x : 0.0;
  for (int64_t d = threadIdx.x; d < p.hidden; d += blockDim.x) p.dx.store(t, d, dx);
  if (!p.dx_exponents) return;
  for (int64_t b = threadIdx.x; b < p.dx_blocks; b += blockDim.x)
    p.dx_exponents[t * p.dx_blocks + b] = p.plain;
}

}  // namespace

void blank_tokens(const BlankParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  blank_kernel<<<static_cast<unsigned>(p.tokens), 128, 0, stream>>>(p);
  device::check_launch("blank_tokens");
}

}  // namespace talea::lce
