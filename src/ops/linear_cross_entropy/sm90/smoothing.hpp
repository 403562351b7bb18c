// What: the rank-one share of label smoothing: column sums, row dots, and the one rounding of dW.
// Why: sum_v c_v z_v = x . (sum_v c_v w_v): smoothing needs no pass over the logits.
// Never: adds in an order that timing could change.
#pragma once
#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"

namespace talea::lce {

// sum[d] = sum_v c_v w_vd; sums[0] = sum_v c_v, sums[1] = sum_v c_v b_v.
struct WeightSumParams {
  const void* weight = nullptr;
  int64_t stride = 0, vocab = 0, hidden = 0;
  const float *class_weight = nullptr, *bias = nullptr;  // local, or null for ones and zeros
  float* parts = nullptr;                                // [256][hidden]
  float* sum = nullptr;
  double* sums = nullptr;
};
void weight_sums(const WeightSumParams& p, cudaStream_t stream);

// out[row] = scale x_row . vector + sums[1]
struct RowDotParams {
  const void* x = nullptr;  // the chunk's rows
  int64_t stride = 0;
  int64_t hidden = 0, capacity = 0, begin = 0;
  const BatchFacts* facts = nullptr;
  const float* vector = nullptr;
  const double* sums = nullptr;
  double scale = 1;
  const float* row_scale = nullptr;
  float* out = nullptr;
};
void row_dots(const RowDotParams& p, cudaStream_t stream);

// out[d] = sum over the chunk's rows of factor x
struct WeightedRowsParams {
  const void* x = nullptr;
  int64_t stride = 0, hidden = 0;
  const int* index = nullptr;
  const BatchFacts* facts = nullptr;
  int64_t begin = 0, capacity = 0;
  const float* factor = nullptr;
  float* parts = nullptr;  // [256][hidden]
  float* out = nullptr;
};
void weighted_rows(const WeightedRowsParams& p, cudaStream_t stream);

struct RoundParams {
  const float* from = nullptr;
  int64_t rows = 0, columns = 0;
  void* to = nullptr;  // 16-bit
  bool f16 = false;
  int64_t to_stride = 0;
};
void round_rows(const RoundParams& p, cudaStream_t stream);

}  // namespace talea::lce
