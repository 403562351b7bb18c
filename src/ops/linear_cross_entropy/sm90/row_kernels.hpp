// The kernels between the products: compaction, gather, finish of the rows, the targets' share of
// dW. Exists so that every CUDA lane shares one meaning of ignored, poisoned and valid rows. Never
// allocates or synchronises: counts stay in device memory and grids cover the whole batch.
#pragma once
#include "ops/linear_cross_entropy/finish.hpp"
#include "ops/linear_cross_entropy/sm90/rows.hpp"
#include "talea/tensor.hpp"

namespace talea::lce {

// One of the caller's per-token tensors, any stride; absent reads as `absent`.
struct DeviceVector {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride = 0;
};
DeviceVector device_vector(const Tensor& t);  // rank 0 or 1

// What the targets say about the batch; written by compact_rows, read by everything after.
struct BatchFacts {
  int valid = 0;     // rows that are multiplied
  int poisoned = 0;  // rows with a target out of range
  double denominator = 1;
  double inverse = 1;  // 1 / denominator; 0 where nothing is valid
};

// Per token, before any row is left out: what the shift product needs.
struct TokenParams {
  int64_t tokens = 0, vocab = 0, vocab_begin = 0, vocab_local = 0, ignore_index = 0;
  DeviceVector targets, token_scale;
  int* target = nullptr;   // local id, or -1
  float* scale = nullptr;  // or null
};
void prepare_tokens(const TokenParams& p, cudaStream_t stream);

struct CompactParams {
  int64_t tokens = 0, vocab = 0, vocab_begin = 0, vocab_local = 0, ignore_index = 0;
  DeviceVector targets, class_weight, token_weight, token_scale;
  const float* token_shift = nullptr;  // per token; null: no shift
  int denominator = 0;                 // 0 valid, 1 weighted, 2 given, 3 none (sum, none)
  double denominator_value = 0;
  RowBuffers rows;
  float* row_class_weight = nullptr;  // c_y per compacted row
  BatchFacts* facts = nullptr;
  uint64_t* sort_keys = nullptr;  // (target, compacted row) of every row; unused entries ~0
};
void compact_rows(const CompactParams& p, cudaStream_t stream);

// Everything an ignored or poisoned row shows: zeros, or NaN.
struct BlankParams {
  int64_t tokens = 0, vocab = 0, ignore_index = 0, hidden = 0, dx_stride = 0;
  DeviceVector targets, loss, lse, logprob, entropy;
  void* dx = nullptr;  // 16-bit
};
void blank_rows(const BlankParams& p, cudaStream_t stream);

// Rows [begin, begin + rows) of the compacted order into a dense buffer; rows past the end are 0.
struct GatherParams {
  const void* hidden = nullptr;
  int64_t stride = 0, columns = 0;
  const int* index = nullptr;
  const BatchFacts* facts = nullptr;
  int64_t begin = 0, rows = 0;
  void* to = nullptr;
};
void gather_rows(const GatherParams& p, cudaStream_t stream);

struct FinishParams {
  RowBuffers rows;  // at the chunk's first row
  const float* row_class_weight = nullptr;
  int64_t begin = 0, chunk_rows = 0;
  const BatchFacts* facts = nullptr;
  const float* tile_sums = nullptr;
  const float* tile_shifted = nullptr;  // for the entropy, or null
  int64_t tile_sums_stride = 0;
  int tiles = 0;
  LossTerms<double> terms;       // inverse_denominator is taken from facts
  const double* sums = nullptr;  // with smoothing: sums[0] = sum_v c_v
  double scale = 1, softcap = 0;
  DeviceVector token_weight, upstream, upstream_lse;
  DeviceVector loss, lse, logprob, entropy;  // per token, where requested
  double* row_loss = nullptr;                // per compacted row, for the scalar
  const float* row_class_sum = nullptr;      // per compacted row, with smoothing
  float* row_smooth = nullptr;               // s G_t eps / V, with smoothing
  void* scaled = nullptr;                    // the gathered rows, multiplied in place by f; or null
  int64_t hidden = 0;
  int* zeroed = nullptr;  // a counter for the kernels that follow, or null
};
void finish_rows(const FinishParams& p, cudaStream_t stream);

struct ReduceLossParams {
  const BatchFacts* facts = nullptr;
  const double* row_loss = nullptr;
  DeviceVector loss;  // scalar
  int reduction = 0;  // 1 sum, 2 mean
  bool zero_when_empty = false, given = false;
};
void reduce_loss(const ReduceLossParams& p, cudaStream_t stream);

// dW[y] += coefficient * x for every row, by runs of equal targets in the order of the rows.
struct ScatterParams {
  const uint64_t* sorted = nullptr;
  int64_t tokens = 0, hidden = 0;
  const BatchFacts* facts = nullptr;
  RowBuffers rows;
  const void* x = nullptr;  // original rows
  int64_t x_stride = 0;
  float* dw = nullptr;
  int64_t dw_stride = 0;
};
void scatter_targets(const ScatterParams& p, cudaStream_t stream);

// A bound on what the radix sort asks for: a second copy of the keys, histograms, look-back.
inline int64_t sort_scratch_bytes(int64_t tokens) { return 12 * tokens + (int64_t{1} << 20); }
void sort_keys(const uint64_t* from, uint64_t* to, int64_t tokens, void* scratch,
               int64_t scratch_bytes, cudaStream_t stream);

}  // namespace talea::lce
