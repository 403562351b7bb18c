// What: all_gather, all_reduce and reduce_scatter of host memory in chunks of one block.
// Why: sums run over the ranks in rank order for every element, so they repeat bit for bit.
// Never: knows how a block travels.
#include "dist/host_collectives.hpp"

#include <algorithm>
#include <cstring>

#include "core/fail.hpp"
#include "core/mutant.hpp"

namespace talea {
namespace {

constexpr int64_t largest_element_bytes = 8;

template <typename T>
void sum_in_order(const std::vector<const char*>& parts, char* into, int64_t count, int first) {
  const int ranks = static_cast<int>(parts.size());
  T* out = reinterpret_cast<T*>(into);
  for (int64_t i = 0; i < count; ++i) {
    T sum = reinterpret_cast<const T*>(parts[first])[i];
    for (int r = 1; r < ranks; ++r)
      sum += reinterpret_cast<const T*>(parts[(first + r) % ranks])[i];
    out[i] = sum;
  }
}

void sum_blocks(const std::vector<const char*>& parts, char* into, int64_t count, DType dtype,
                int rank) {
  const int first = mutant(Mutant::b17_unordered_sum) ? rank : 0;
  switch (dtype) {
    case DType::f32:
      return sum_in_order<float>(parts, into, count, first);
    case DType::f64:
      return sum_in_order<double>(parts, into, count, first);
    case DType::i64:
      return sum_in_order<int64_t>(parts, into, count, first);
    default:
      fail(ErrorKind::usage, "dtype = {}: host ranks sum fp32, fp64 and int64", name_of(dtype));
  }
}

}  // namespace

HostCommunicator::HostCommunicator(int rank, int size)
    : rank_(rank),
      size_(size),
      block_bytes_(block_bytes(size)),
      scratch_(static_cast<size_t>(size * block_bytes_)),
      own_(static_cast<size_t>(std::max(block_bytes_, size * largest_element_bytes))) {}

void HostCommunicator::all_gather(const void* send, void* recv, int64_t bytes, Stream) {
  // Own bytes go to their place first: `send` may lie anywhere inside `recv`.
  const char* from = static_cast<const char*>(send);
  char* to = static_cast<char*>(recv);
  std::vector<const void*> out(static_cast<size_t>(size_));
  std::vector<void*> in(static_cast<size_t>(size_));
  if (to + rank_ * bytes != from && bytes > 0)
    std::memmove(to + rank_ * bytes, from, static_cast<size_t>(bytes));
  from = to + rank_ * bytes;
  for (int64_t begin = 0; begin < bytes; begin += block_bytes_) {
    for (int r = 0; r < size_; ++r) {
      out[r] = from + begin;
      in[r] = to + r * bytes + begin;
    }
    exchange(out.data(), in.data(), std::min(block_bytes_, bytes - begin), "all_gather");
  }
}

void HostCommunicator::scatter_sums(const std::vector<const char*>& blocks, char* recv,
                                    int64_t count, DType dtype, const char* what) {
  const int64_t element = size_of(dtype), step = block_bytes_ / element;
  std::vector<const void*> out(static_cast<size_t>(size_));
  std::vector<void*> in(static_cast<size_t>(size_));
  std::vector<const char*> parts(static_cast<size_t>(size_));
  for (int64_t begin = 0; begin < count; begin += step) {
    const int64_t now = std::min(step, count - begin);
    for (int r = 0; r < size_; ++r) {
      out[r] = blocks[r] + begin * element;
      in[r] = slot(r);
      parts[r] = slot(r);
    }
    exchange(out.data(), in.data(), now * element, what);
    sum_blocks(parts, recv + begin * element, now, dtype, rank_);
  }
}

void HostCommunicator::reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                                          Stream) {
  std::vector<const char*> blocks(static_cast<size_t>(size_));
  for (int r = 0; r < size_; ++r)
    blocks[r] = static_cast<const char*>(send) + r * count * size_of(dtype);
  scatter_sums(blocks, static_cast<char*>(recv), count, dtype, "reduce_scatter_sum");
}

void HostCommunicator::all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) {
  // Every rank sums one slice, then all gather the slices.
  const int64_t element = size_of(dtype), slice_most = block_bytes_ / element;
  char* data = static_cast<char*>(buffer);
  std::vector<const char*> blocks(static_cast<size_t>(size_));
  int64_t begin = 0;
  while (count - begin >= size_) {
    const int64_t slice = std::min(slice_most, (count - begin) / size_);
    for (int r = 0; r < size_; ++r) blocks[r] = data + (begin + r * slice) * element;
    scatter_sums(blocks, own_.data(), slice, dtype, "all_reduce_sum");
    all_gather(own_.data(), data + begin * element, slice * element, stream);
    begin += slice * size_;
  }
  if (begin == count) return;
  // Fewer elements than ranks are left: every rank sums all of them.
  std::fill(blocks.begin(), blocks.end(), data + begin * element);
  scatter_sums(blocks, own_.data(), count - begin, dtype, "all_reduce_sum");
  std::memcpy(data + begin * element, own_.data(), static_cast<size_t>((count - begin) * element));
}

}  // namespace talea
