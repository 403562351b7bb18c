// What: adds the contributions of slots to the rows of dkv they name, in a fixed order.
// Why: no two runs may differ: slots are sorted by row, stably, and each row has one adder.
// Never: uses floating atomics, but under `atomic`, which was asked for by name.
#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/cuda/kernels.hpp"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int threads = 256;

// Slots without a row sort behind all others.
int sorted_bits(int64_t all_rows) { return std::bit_width(static_cast<uint64_t>(all_rows)); }

__global__ void number_kernel(Chunk c, const int64_t* rows, int64_t all_rows, uint64_t* keys,
                              uint32_t* slots) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= c.n * c.padded) return;
  keys[i] = static_cast<uint64_t>(rows[i] < 0 ? all_rows : rows[i]);
  slots[i] = static_cast<uint32_t>(i);
}

// A block an entry of the sorted list; only the first entry of a row works.
__global__ void segments_kernel(Scatter t, Chunk c, const uint64_t* keys, const uint32_t* slots,
                                const float* contributions) {
  const int64_t all = c.n * c.padded;
  for (int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const uint64_t row = keys[i];
    if (row >= static_cast<uint64_t>(t.all_rows)) return;
    if (i > 0 && keys[i - 1] == row) continue;
    const auto outer = static_cast<int64_t>(row) / t.inner_rows;
    const auto inner = static_cast<int64_t>(row) % t.inner_rows;
    float* to = static_cast<float*>(t.sums.data) + offset(t.sums, outer, inner, c.g);
    const int64_t columns = t.dim - (mutant(Mutant::sa27_sum_drops_elements) && t.dim % 64 ? 1 : 0);
    for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
      float sum = to[column * t.sums.stride[3]];
      for (int64_t j = i; j < all && keys[j] == row; ++j)
        sum += contributions[slots[j] * t.dim + column];
      to[column * t.sums.stride[3]] = sum;
    }
  }
}

__global__ void atomic_kernel(Scatter t, Chunk c, const int64_t* rows, const float* contributions) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= c.n * c.padded * t.dim) return;
  const int64_t row = rows[i / t.dim], column = i % t.dim;
  if (row < 0) return;
  atomicAdd(static_cast<float*>(t.sums.data) +
                offset(t.sums, row / t.inner_rows, row % t.inner_rows, c.g, column),
            contributions[i]);
}

}  // namespace

int64_t sort_bytes(int64_t slots, int64_t all_rows) {
  size_t bytes = 0;
  const uint64_t* keys = nullptr;
  const uint32_t* values = nullptr;
  device::check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, const_cast<uint64_t*>(keys),
                                                values, const_cast<uint32_t*>(values), slots, 0,
                                                sorted_bits(all_rows)),
                "sparse_attention: size of the sort");
  return static_cast<int64_t>(bytes);
}

void scatter(const Scatter& t, const Chunk& chunk, const int64_t* rows, const float* contributions,
             const SortBuffers& sort, cudaStream_t stream) {
  const int64_t slots = chunk.n * chunk.padded;
  if (slots == 0) return;
  if (t.atomic) {
    const auto blocks = static_cast<unsigned>((slots * t.dim + threads - 1) / threads);
    atomic_kernel<<<blocks, threads, 0, stream>>>(t, chunk, rows, contributions);
    return device::check_launch("sparse_attention: add by atomics");
  }
  const auto blocks = static_cast<unsigned>((slots + threads - 1) / threads);
  number_kernel<<<blocks, threads, 0, stream>>>(chunk, rows, t.all_rows, sort.keys, sort.slots);
  device::check_launch("sparse_attention: number the slots");
  auto bytes = static_cast<size_t>(sort.scratch_bytes);
  device::check(
      cub::DeviceRadixSort::SortPairs(sort.scratch, bytes, sort.keys, sort.sorted_keys, sort.slots,
                                      sort.sorted_slots, slots, 0, sorted_bits(t.all_rows), stream),
      "sparse_attention: sort");
  const auto entries = static_cast<unsigned>(std::min<int64_t>(slots, int64_t{1} << 30));
  segments_kernel<<<entries, 128, 0, stream>>>(t, chunk, sort.sorted_keys, sort.sorted_slots,
                                               contributions);
  device::check_launch("sparse_attention: add segments");
}

}  // namespace talea::sparse_attention::cuda
