// What: zeros of parts of groups whose heads other ranks have, or of groups that no head here reads.
// Why: the gradients' blocks are of heads; sums over parts, and the ranks' sums, read what others
//      would have left.
// Never: runs where every group has its heads here.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/rows/sums.hpp"
#include "ops/mamba3/sm90/machine.hpp"

namespace talea::mamba3::sm90 {
namespace {

constexpr int threads = 128;  // columns at a time

__global__ void __launch_bounds__(threads)
    rows_kernel(const __grid_constant__ Args a, const __grid_constant__ Wave w, int heads,
                int columns) {
  const cuda::Sizes& s = a.size;
  const auto g = static_cast<int>(blockIdx.x % s.groups);
  const int64_t row = blockIdx.x / s.groups;
  const int begin = g * s.heads_per_group - s.head_offset;
  if (begin + s.heads_per_group > 0 && begin < heads) return;
  const cuda::SliceToken token = cuda::slice_token(a, w, row / s.rank);
  if (token.token < 0) return;
  const auto r = static_cast<int>(row % s.rank);
  for (auto c = static_cast<int>(threadIdx.x); c < columns; c += threads)
    for (const cuda::View* to : {&a.grad.q, &a.grad.k})
      if (to->data) cuda::store(*to, cuda::at(*to, token.batch, token.token, r, g, c), 0.0f);
}

void clear(float* to, int64_t count, cudaStream_t stream) {
  if (!to || count == 0) return;
  device::check(cudaMemsetAsync(to, 0, static_cast<size_t>(count) * sizeof(float), stream),
                "mamba3: parts without heads");
}

}  // namespace

void launch_without_heads(const Args& a, const Cut& cut, const Wave& w, const UnitBuffers& b,
                          cudaStream_t stream) {
  const cuda::Sizes& s = a.size;
  const int heads = cut.heads_of(s);
  if (s.head_offset == 0 && heads == s.groups * s.heads_per_group) return;
  const int64_t places = (w.last - w.first) * w.slice_chunks * s.chunk;
  const int64_t rows = places * s.rank * s.groups, lines = int64_t{s.groups} * b.parts;
  if (gradients_ahead(cut, s.rank, s.pairs)) clear(b.dangles, places * lines * s.pairs, stream);
  if (b.parts > 1) {
    clear(b.dq, (rows << cut.part_bits) * b.parts * s.columns, stream);
    clear(b.dk, (rows << cut.part_bits) * b.parts * s.columns, stream);
    return;
  }
  if (rows == 0 || (!a.grad.q.data && !a.grad.k.data)) return;
  rows_kernel<<<static_cast<unsigned>(rows), threads, 0, stream>>>(
      a, w, heads, cut.whole ? s.columns : cut.columns);
  device::check_launch("mamba3: groups without heads");
}

}  // namespace talea::mamba3::sm90
