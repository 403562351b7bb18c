// What: the fp32 sums of dkv: cleared before, and rounded into the caller's dkv after.
// Why: every CUDA lane sums in fp32 whatever the caller's type is.
// Never: allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/sparse_attention/tables.cuh"

namespace talea::sparse_attention::cuda {

// extent: outer, inner, groups, columns, as of dkv.
void fill_zero(const View& v, const int64_t (&extent)[4], cudaStream_t stream);
void convert(const View& from, const View& to, const int64_t (&extent)[4], cudaStream_t stream);

}  // namespace talea::sparse_attention::cuda
