// What: rows on their way between tensors and what ranks exchange, by kernels on the caller's stream.
// Why: the exchanges of a cut call queue their work like any other, also under a capture.
// Never: allocates, synchronises or exchanges.
#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/rows_moved.hpp"
#include "ops/sparse_attention/tables.cuh"

namespace talea::sparse_attention {
namespace {

constexpr int threads = 256;

unsigned blocks_of(int64_t all) {
  return static_cast<unsigned>(std::min<int64_t>((all + threads - 1) / threads, 65536));
}

template <class Word>
__global__ void copy_kernel(RowBlock b, int64_t words, int64_t all) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t c = i % words, g = i / words % b.groups, row = i / words / b.groups;
    *reinterpret_cast<Word*>(b.to + row * b.to_row + g * b.bytes + c * int64_t{sizeof(Word)}) =
        *reinterpret_cast<const Word*>(b.from + row * b.from_row + g * b.from_group +
                                       c * int64_t{sizeof(Word)});
  }
}

template <class Word>
bool copied_by(const RowBlock& b, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(b.to) | reinterpret_cast<uintptr_t>(b.from) |
                    static_cast<uintptr_t>(b.bytes | b.to_row | b.from_row | b.from_group);
  if (bits % sizeof(Word) != 0) return false;
  const int64_t words = b.bytes / int64_t{sizeof(Word)}, all = b.rows * b.groups * words;
  copy_kernel<Word><<<blocks_of(all), threads, 0, stream>>>(b, words, all);
  return true;
}

struct Extent {
  int64_t n[4];
};
__global__ void put_kernel(View from, View to, Extent e, bool adds, int64_t all) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t c = i % e.n[3], g = i / e.n[3] % e.n[2], row = i / e.n[3] / e.n[2] % e.n[1];
    const int64_t o = i / e.n[3] / e.n[2] / e.n[1];
    const int64_t at = cuda::offset(to, o, row, g, c);
    const float x = cuda::number_at(from, cuda::offset(from, o, row, g, c));
    cuda::put(to, at, adds ? cuda::number_at(to, at) + x : x);
  }
}

}  // namespace

void copy_on_device(const RowsMoved& m, const RowBlock& b) {
  if (b.rows * b.groups * b.bytes == 0) return;
  const device::DeviceGuard guard(m.device_index);
  const cudaStream_t stream = device::cuda_stream(m.stream);
  if (!copied_by<uint4>(b, stream) && !copied_by<uint32_t>(b, stream) &&
      !copied_by<uint16_t>(b, stream))
    copied_by<uint8_t>(b, stream);
  device::check_launch("sparse_attention: rows that ranks exchange");
}

void clear_on_device(const RowsMoved& m, char* to, int64_t bytes) {
  if (bytes == 0) return;
  const device::DeviceGuard guard(m.device_index);
  device::check(cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), device::cuda_stream(m.stream)),
                "sparse_attention: rows that ranks exchange");
}

void put_on_device(const RowsMoved& m, const View& from, const View& to,
                   const std::array<int64_t, 4>& extent, bool adds) {
  const Extent e = {{extent[0], extent[1], extent[2], extent[3]}};
  const int64_t all = e.n[0] * e.n[1] * e.n[2] * e.n[3];
  if (all == 0) return;
  const device::DeviceGuard guard(m.device_index);
  put_kernel<<<blocks_of(all), threads, 0, device::cuda_stream(m.stream)>>>(from, to, e, adds, all);
  device::check_launch("sparse_attention: sums of the ranks");
}

}  // namespace talea::sparse_attention
