// What: a batch of library products of one shape, fp32 out.
// Why: the passes of lane cuda name matrices and leave alignments and rounding to one place.
// Never: lets the rounding of an element depend on how many matrices share a call.
#include "ops/sparse_attention/cuda/batched.hpp"

#include <algorithm>
#include <cstddef>

namespace talea::sparse_attention::cuda {
namespace {

constexpr int64_t summed_columns = 128;  // of fp32 rows, by one product

}  // namespace

void multiply(const Batched& x, DType in, void* workspace, cudaStream_t stream) {
  if (x.m == 0 || x.n == 0 || x.k == 0) return;
  device::Product product;
  product.transpose_a = x.transpose_a;
  product.transpose_b = x.transpose_b;
  product.m = x.m;
  product.n = x.n;
  product.k = x.k;
  product.lda = x.lda;
  product.ldb = x.ldb;
  product.ldc = x.ldc;
  product.in = in;
  product.out = DType::f32;
  product.batches = x.batches;
  product.stride_a = x.stride_a;
  product.stride_b = x.stride_b;
  product.stride_c = x.stride_c;
  product.canonical_n = x.canonical_n;
  product.canonical_k = x.canonical_k;
  product.canonical_batches = 2;  // an element's rounding does not depend on the chunk
  product.alignment_a = device::alignment_of(x.a, x.lda | x.stride_a, in);
  product.alignment_b = device::alignment_of(x.b, x.ldb | x.stride_b, in);
  product.alignment_c = device::alignment_of(x.c, x.ldc | x.stride_c, DType::f32);
  device::ProductBuffers buffers;
  buffers.a = x.a;
  buffers.b = x.b;
  buffers.c = x.c;
  buffers.alpha = &x.alpha;
  buffers.beta = &x.beta;
  buffers.workspace = workspace;
  device::run_product(product, buffers, stream);
}

void multiply_apart(Batched x, DType in, void* workspace, cudaStream_t stream) {
  const int64_t columns = x.k;
  const bool apart = in == DType::f32 && columns > 2 * summed_columns;
  const auto* a = static_cast<const std::byte*>(x.a);
  const auto* b = static_cast<const std::byte*>(x.b);
  for (int64_t first = 0; first < columns; first += x.k) {
    x.k = apart ? std::min(summed_columns, columns - first) : columns;
    x.a = a + first * size_of(in);
    x.b = b + first * size_of(in);
    multiply(x, in, workspace, stream);
    x.beta = 1;
  }
}

}  // namespace talea::sparse_attention::cuda
