// What: a batch of library products of one shape, fp32 out.
// Why: the passes of lane cuda name matrices and leave alignments and rounding to one place.
// Never: lets the rounding of an element depend on how many matrices share a call.
#pragma once

#include "device/common/cublaslt.hpp"

namespace talea::sparse_attention::cuda {

// Products of a batch of small matrices that lie one behind the other.
struct Batched {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0, ldc = 0;
  int64_t stride_a = 0, stride_b = 0, stride_c = 0, batches = 1;
  const void* a = nullptr;
  const void* b = nullptr;
  float* c = nullptr;
  float alpha = 1, beta = 0;
  // As device::Product: the algorithm is chosen for these sizes and kept for every other.
  int64_t canonical_n = 0, canonical_k = 0;
};

// workspace: of device::product_workspace_bytes.
void multiply(const Batched& product, DType in, void* workspace, cudaStream_t stream);
// The same in pieces of 128 terms where a sum in fp32 has more: logits in fp32 keep six digits, a
// sum of many products loses them, sums of some do not. a is transposed, b is not.
void multiply_apart(Batched product, DType in, void* workspace, cudaStream_t stream);

}  // namespace talea::sparse_attention::cuda
