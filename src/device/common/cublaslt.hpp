// What: matrix products through cuBLASLt, with the library found when the first product is asked.
// Why: one binary starts without CUDA, and a process that already holds a cuBLASLt shares it.
// Never: allocates device memory, synchronises, splits the inner dimension, or times algorithms.
#pragma once

#include <string>

#include "device/common/cuda_check.hpp"
#include "talea/tensor.hpp"

namespace talea::device {

inline constexpr int64_t product_workspace_bytes = int64_t{4} << 20;

// c = alpha * op(a) op(b) + beta * c, column-major as cuBLAS counts: a row-major matrix of row
// stride s is a column-major one with rows and columns exchanged and leading dimension s.
// Accumulates in fp32. in: fp32 (true fp32 arithmetic), bf16 or fp16; out: fp32 or `in`.
struct Product {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0, ldc = 0;
  DType in = DType::bf16, out = DType::f32;
  int alignment_a = 16, alignment_b = 16, alignment_c = 16;  // bytes, of addresses and columns
  // The algorithm is chosen for these sizes and kept for every other: an element's rounding then
  // does not depend on how many rows share its product. 0: the size itself.
  int64_t canonical_n = 0, canonical_k = 0;
  // Many products of one shape: element strides from one to the next of each matrix.
  int64_t batches = 1, stride_a = 0, stride_b = 0, stride_c = 0;
  // As canonical_n, for the number of products. 0: the number itself.
  int64_t canonical_batches = 0;
  // alpha and beta are fp32 numbers in device memory.
  bool device_scalars = false;
  // Which tiles stand first among the library's proposals. middle: where fp32 output is a large
  // share of the work, a tile whose store overlaps the next tile's main loop beats a larger one
  // (measured on an H200: 22 % for beta = 1). large, square, narrow: 256 x 128, 128 x 128 and
  // 128 x 160 in clusters of two at most, where few tiles have to fill whole waves: a cluster of
  // eight leaves the multiprocessors idle that its share of the chip cannot pair.
  enum class Tiles : int32_t { library, middle, large, square, narrow };
  Tiles tiles = Tiles::library;
  int64_t workspace_bytes = product_workspace_bytes;  // of ProductBuffers::workspace
  int multiprocessors = 0;                            // that the product may take; 0: all

  auto operator<=>(const Product&) const = default;
};

struct ProductBuffers {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  const float* alpha = nullptr;
  const float* beta = nullptr;
  void* workspace = nullptr;  // of Product::workspace_bytes, 256-byte aligned
};

// Empty where cuBLASLt can be loaded; otherwise what is missing.
const std::string& cublaslt_problem();

// "13.2.0" and the like; empty where there is none.
std::string cublaslt_version();

// The largest power of two, up to 16, that divides the address of every column.
int alignment_of(const void* address, int64_t leading, DType dtype);

// Queues the product on `stream` of the current device. Thread-safe.
void run_product(const Product& product, const ProductBuffers& buffers, cudaStream_t stream);

// For the bench: how many algorithms the library proposes, and one of them by number.
int proposed_algorithms(const Product& product);
std::string proposed_name(const Product& product, int which);
void run_proposed(const Product& product, int which, const ProductBuffers& buffers,
                  cudaStream_t stream);

}  // namespace talea::device
