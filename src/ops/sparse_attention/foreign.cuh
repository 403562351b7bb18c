// What: foreign indices on a device: counted, told to the caller's status, refused where asked.
// Why: every CUDA lane counts by one rule, and only IndexCheck::checked ever waits for the device.
// Never: reads a key.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/sparse_attention/tables.cuh"

namespace talea::sparse_attention::cuda {

// Counts over the whole call, in the workspace; written to the caller's status at the end.
struct Counters {
  unsigned long long foreign = 0, nan_scores = 0;
  long long first = 0;  // lowest flat slot of a foreign index; INT64_MAX: none
};
void reset(Counters* counters, cudaStream_t stream);
void write_status(const Counters* counters, const Tables& tables, const View& status,
                  cudaStream_t stream);

// Counts over a whole call before it, and waits for the device.
struct Foreign {
  int64_t count = 0;
  int64_t batch = 0, query = 0, group = 0, slot = 0, value = 0;  // of the first, where there is one
};
Foreign find_foreign(const Tables& tables, int64_t batch, Counters* counters, cudaStream_t stream);

#ifdef __CUDACC__

__device__ inline void count(const Tables& t, Counters* counters, int64_t b, int64_t s, int64_t g,
                             int64_t k) {
  atomicAdd(&counters->foreign, 1ull);
  const int64_t flat = ((b * t.queries + s) * t.groups + g) * t.slots + k;
  atomicMin(&counters->first, static_cast<long long>(flat));
}

#endif

}  // namespace talea::sparse_attention::cuda
