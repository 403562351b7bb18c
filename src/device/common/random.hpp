// What: fills device tensors with normal numbers and ids that depend on seed and index alone.
// Why: benches and tests need gigabytes of random data without crossing the bus.
// Never: used by a lane.
#pragma once

#include <cuda_runtime_api.h>

#include "talea/tensor.hpp"

namespace talea::device {

void fill_normal(void* to, DType dtype, int64_t count, uint64_t seed, float deviation,
                 cudaStream_t stream);
void fill_ids(int64_t* to, int64_t count, uint64_t seed, int64_t bound, cudaStream_t stream);

}  // namespace talea::device
