// What: foreign indices on a device: counted, told to the caller's status, refused where asked.
// Why: every CUDA lane counts by one rule, and only IndexCheck::checked ever waits for the device.
// Never: reads a key.
#include <algorithm>
#include <climits>

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/foreign.cuh"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int threads = 256;

__device__ SlotKind kind_of(const Tables& t, int64_t b, int64_t s, int64_t g, int64_t k) {
  const QueryRule query = query_rule(t, b, s);
  if (k >= query.slots) return SlotKind::absent;
  const int64_t index = integer_at(t.indices, offset(t.indices, b, s, g, k));
  return find_key(t.rule, query, k, index).kind;
}

__global__ void reset_kernel(Counters* counters) {
  counters->foreign = 0;
  counters->nan_scores = 0;
  counters->first = LLONG_MAX;
}

__global__ void write_status_kernel(const Counters* counters, Tables t, View status) {
  auto* to = static_cast<long long*>(status.data);
  const int64_t each = status.stride[0];
  to[0] += static_cast<long long>(counters->foreign);
  to[3 * each] += static_cast<long long>(counters->nan_scores);
  const int64_t first = counters->first;
  if (counters->foreign != 0 && (to[each] < 0 || first < to[each])) {
    const int64_t k = first % t.slots, g = first / t.slots % t.groups;
    const int64_t row = first / t.slots / t.groups;
    to[each] = first;
    to[2 * each] = integer_at(t.indices, offset(t.indices, row / t.queries, row % t.queries, g, k));
  }
}

__global__ void count_foreign_kernel(Tables t, int64_t all, Counters* counters) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t k = i % t.slots, g = i / t.slots % t.groups, row = i / t.slots / t.groups;
    const int64_t b = row / t.queries, s = row % t.queries;
    if (kind_of(t, b, s, g, k) == SlotKind::foreign) count(t, counters, b, s, g, k);
  }
}

void count_foreign(const Tables& tables, int64_t batch, Counters* counters, cudaStream_t stream) {
  const int64_t all = batch * tables.queries * tables.groups * tables.slots;
  if (all == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((all + threads - 1) / threads, 4096));
  count_foreign_kernel<<<blocks, threads, 0, stream>>>(tables, all, counters);
  device::check_launch("sparse_attention: count_foreign");
}

}  // namespace

void reset(Counters* counters, cudaStream_t stream) {
  reset_kernel<<<1, 1, 0, stream>>>(counters);
  device::check_launch("sparse_attention: reset");
}

void write_status(const Counters* counters, const Tables& tables, const View& status,
                  cudaStream_t stream) {
  write_status_kernel<<<1, 1, 0, stream>>>(counters, tables, status);
  device::check_launch("sparse_attention: write_status");
}

Foreign find_foreign(const Tables& tables, int64_t batch, Counters* counters, cudaStream_t stream) {
  count_foreign(tables, batch, counters, stream);
  Counters found;
  device::check(cudaMemcpyAsync(&found, counters, sizeof found, cudaMemcpyDeviceToHost, stream),
                "reading the count of foreign indices");
  device::check(cudaStreamSynchronize(stream), "index_check = checked");
  Foreign f;
  f.count = static_cast<int64_t>(found.foreign);
  if (f.count == 0) return f;
  f.slot = found.first % tables.slots;
  f.group = found.first / tables.slots % tables.groups;
  const int64_t row = found.first / tables.slots / tables.groups;
  f.batch = row / tables.queries;
  f.query = row % tables.queries;
  const View& v = tables.indices;
  const int64_t element = v.at(f.batch, f.query, f.group, f.slot);
  int32_t narrow = 0;
  const bool wide = v.dtype == DType::i64;
  device::check(cudaMemcpyAsync(wide ? static_cast<void*>(&f.value) : &narrow, v.address(element),
                                wide ? 8 : 4, cudaMemcpyDeviceToHost, stream),
                "reading a foreign index");
  device::check(cudaStreamSynchronize(stream), "index_check = checked");
  if (!wide) f.value = narrow;
  return f;
}

}  // namespace talea::sparse_attention::cuda
