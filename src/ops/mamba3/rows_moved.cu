// What: rows of tokens on their way between tensors and what ranks sum, by kernels on the caller's
//       stream.
// Why: the sums of a cut call queue their work like any other, also under a capture.
// Never: allocates, synchronises or sums.
#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "ops/mamba3/pieces.hpp"
#include "ops/mamba3/rows_moved.hpp"

namespace talea::mamba3 {
namespace {

constexpr int threads = 256;

struct Side {
  PieceView view;  // of entry, token, r, g
  int64_t n = 1, first = 0, tokens = 1;

  explicit Side(const RowsOfTokens& rows)
      : n(rows.stride[4]), first(rows.first), tokens(rows.tokens) {
    view.data = rows.data;
    view.dtype = rows.dtype;
    for (size_t i = 0; i < 4; ++i) view.stride[i] = rows.stride[i];
  }
  __device__ __forceinline__ int64_t place(int64_t token, int64_t r, int64_t g, int64_t i) const {
    return at(view, (token - first) / tokens, (token - first) % tokens, r, g) + i * n;
  }
};

__global__ void __launch_bounds__(threads)
    put_kernel(const __grid_constant__ Side from, const __grid_constant__ Side to,
               const __grid_constant__ RowShape shape, int64_t first, int64_t all) {
  for (int64_t item = blockIdx.x * int64_t{threads} + threadIdx.x; item < all;
       item += int64_t{gridDim.x} * threads) {
    const int64_t n = item % shape.n, line = item / shape.n;
    const int64_t g = line % shape.g, r = line / shape.g % shape.r;
    const int64_t token = first + line / shape.g / shape.r;
    put_element(to.view, to.place(token, r, g, n), element(from.view, from.place(token, r, g, n)));
  }
}

}  // namespace

void clear_on_device(const RowsMoved& m, char* to, int64_t bytes) {
  if (bytes == 0) return;
  const device::DeviceGuard guard(m.device_index);
  device::check(cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), device::cuda_stream(m.stream)),
                "mamba3: rows that ranks sum");
}

void put_on_device(const RowsMoved& m, const RowsOfTokens& from, const RowsOfTokens& to,
                   const RowShape& shape, int64_t first, int64_t count) {
  const int64_t all = count * shape.r * shape.g * shape.n;
  if (all == 0) return;
  const device::DeviceGuard guard(m.device_index);
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>((all + threads - 1) / threads, 65536));
  put_kernel<<<blocks, threads, 0, device::cuda_stream(m.stream)>>>(Side(from), Side(to), shape,
                                                                    first, all);
  device::check_launch("mamba3: rows that ranks sum");
}

}  // namespace talea::mamba3
