// What: the passes over a chunk whose logits lie in fp32: row states, da in place, candidates, db.
// Why: some options need every logit after the row is known: fp16, soft targets, small weights.
// Never: runs where the folded path can: it costs a pass and half of the chunk's rows.
#pragma once
#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"

namespace talea::lce {

struct WideParams {
  // [rows][stride]: accumulators, then da in 16 bits from the row's start; what that rounding left,
  // as a second term, lies behind the `columns` accumulators of a row.
  float* logits = nullptr;
  int64_t stride = 0;   // floats
  int64_t columns = 0;  // a multiple of 64
  bool two_terms = false;
  RowRange range;
  RowBuffers rows;  // at the chunk's first row
  LogitRule rule;
  int vocab = 0;  // local
  int64_t vocab_begin = 0;
  const float* class_weight = nullptr;  // local, or null
  SoftTargets soft = SoftTargets::none;
  View soft_probs, soft_ids;
  int64_t soft_k = 0;
  bool entropy = false, class_sum = false, f16 = false;
  float* target_slope = nullptr;   // [rows]: d z / d a at the target
  float* sparse_logits = nullptr;  // [rows][soft_k]: accumulators of the listed words
  const RowFactors* factors = nullptr;
};

// states[row] from the row's logits; listed words of sparse targets are kept.
void state_rows(const WideParams& p, RowState<double>* states, cudaStream_t stream);
// The k best words of every row, in falling order, ties to the lowest id.
void rank_rows(const WideParams& p, int64_t kept, Candidate<float>* best, cudaStream_t stream);
// Logits become da, in place; rows past those in use become 0.
void form_gradient(const WideParams& p, cudaStream_t stream);

// exp(z - shift) in bf16 becomes da, in place.
struct TransformParams {
  uint16_t* buffer = nullptr;
  int64_t stride = 0;
  RowRange range;
  const int* target = nullptr;  // at the chunk's first row
  const RowFactors* factors = nullptr;
  float softcap = 0;
  const float* class_weight = nullptr;  // local, or null
  int vocab = 0;
  bool entropy = false;  // its gradient is wanted
};
void transform_rows(const TransformParams& p, cudaStream_t stream);

// The k best words where the buffer holds exp(z - shift): the maxima of the tiles say where they
// can be, the buffer which they can be, and a product of the row and the word's weight their logit.
struct BestParams {
  const uint16_t* buffer = nullptr;
  int64_t stride = 0;
  RowRange range;
  RowBuffers rows;  // at the chunk's first row
  LogitRule rule;
  int vocab = 0;
  int64_t vocab_begin = 0;
  const float* tile_peaks = nullptr;
  int64_t tile_stride = 0;
  int tiles = 0, tile_columns = 0;
  const void *x = nullptr, *weight = nullptr;  // bf16; x: the chunk's gathered rows
  int64_t hidden = 0, weight_stride = 0;
  int64_t kept = 0;                  // at most 32
  Candidate<float>* best = nullptr;  // [rows][kept]
};
void rank_rows(const BestParams& p, cudaStream_t stream);

// The candidates of all ranks, [parts][rows][kept], become the outputs of the rows.
struct RankedParams {
  RowRange range;
  const int* index = nullptr;  // at the chunk's first row
  const Candidate<float>* best = nullptr;
  int parts = 1;
  int64_t kept = 0;
  const double* lse = nullptr;  // per row of the chunk
  View targets;
  TokenOutputs out;
  int8_t* hit = nullptr;  // per compacted row, at the chunk's first row
};
void write_ranked(const RankedParams& p, cudaStream_t stream);

// db[v] += sum over the chunk's rows of the buffer's element times the row's factor.
struct BiasParams {
  const void* buffer = nullptr;  // 16-bit [rows][stride]
  int64_t stride = 0;
  bool f16 = false;
  RowRange range;
  int vocab = 0;
  int term_offset = 0;               // of a second term; 0: none
  const float* db_factor = nullptr;  // per row of the chunk: from the buffer's element to da
  bool first = false;                // overwrites
  double* db = nullptr;
};
void add_bias_gradient(const BiasParams& p, cudaStream_t stream);

// The targets' own share, the rank-one smoothing term, then to the caller's dtype.
struct BiasEndParams {
  const uint64_t* sorted = nullptr;  // or null
  const BatchFacts* facts = nullptr;
  RowBuffers rows;
  const float* row_smooth = nullptr;    // with rank-one smoothing
  const float* class_weight = nullptr;  // local
  double scale = 1;
  int64_t vocab = 0, stored = 0;
  int64_t tokens = 0;
  bool accumulate = false;
  double *db = nullptr, *smooth_sum = nullptr;
  View to;
};
void end_bias_gradient(const BiasEndParams& p, cudaStream_t stream);

}  // namespace talea::lce
