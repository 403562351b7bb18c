// What: the kernels between the products: compaction, moves of rows, the finish of the rows.
// Why: the products of this lane read 16-bit rows by TMA and sums per tile, so how rows lie and are
// summed is its own; what a row means comes from rows/.
// Never: allocates or synchronises: counts stay in device memory and grids cover the whole batch.
#pragma once
#include "algebra/top_k.hpp"
#include "ops/linear_cross_entropy/rows/tokens.hpp"
#include "ops/linear_cross_entropy/sm90/rows.hpp"

namespace talea::lce {

// Up to so many, a loss alone is bound by one read of the weight: a shift found beforehand costs
// more than tiles with maxima of their own do.
inline constexpr int64_t kFewTokens = 256;

// targets.cu
// Per token, before any row is left out: what the shift product needs.
struct TokenParams {
  int64_t tokens = 0;
  TokenRule rule;
  int* target = nullptr;   // local id, or -1
  float* scale = nullptr;  // or null
};
void prepare_tokens(const TokenParams& p, cudaStream_t stream);

struct CompactParams {
  int64_t tokens = 0;
  TokenRule rule;
  View class_weight, token_weight;
  const float* token_shift = nullptr;  // per token; null: no shift
  RowBuffers rows;
  float* row_class_weight = nullptr;  // c_y per compacted row
  BatchFacts* facts = nullptr;
  uint64_t* sort_keys = nullptr;  // (target, compacted row) of every row; unused entries ~0
  MeanRule mean;                  // M holds unless the facts are added to before end_facts
};
void compact_rows(const CompactParams& p, cudaStream_t stream);

// At most kFewTokens: the above, and the rows gathered to `to` in the same launch; the places after
// the last one hold zeros.
struct FewRowsParams {
  CompactParams compact;
  const void* hidden = nullptr;
  int64_t stride = 0, columns = 0;
  void* to = nullptr;  // dense, [places, columns]
  int64_t places = 0;
  int* zeroed = nullptr;  // a counter for the kernels that follow
  bool follows = false;   // launched ahead of the end of what is before it: not into a capture
};
void find_few_rows(const FewRowsParams& p, cudaStream_t stream);

// Shifts found after the rows were compacted.
struct SpreadParams {
  int64_t tokens = 0;
  const BatchFacts* facts = nullptr;
  const int* index = nullptr;
  const float* token_shift = nullptr;
  float* shift = nullptr;
};
void spread_shifts(const SpreadParams& p, cudaStream_t stream);

// By targets in [0, vocab).
void sort_keys(const uint64_t* from, uint64_t* to, int64_t tokens, int64_t vocab, void* scratch,
               int64_t scratch_bytes, cudaStream_t stream);
// A bound on what the radix sort asks for: a second copy of the keys, histograms, look-back.
inline int64_t sort_scratch_bytes(int64_t tokens) { return 12 * tokens + (int64_t{1} << 20); }

// move.cu
// Rows [begin, begin + rows) of the compacted order into a dense buffer; past the end rows are 0 as
// far as the tiles of a product reach. Without an index: rows begin, begin + 1, ...
struct GatherParams {
  const void* hidden = nullptr;
  int64_t stride = 0, columns = 0;
  const int* index = nullptr;
  RowRange range;
  void* to = nullptr;
  int64_t to_stride = 0;
  int64_t to_rows = 0;   // given: they are the last of so many, and nothing follows them
  bool follows = false;  // the kernel before it in the stream is one of this lane's
};
void gather_rows(const GatherParams& p, cudaStream_t stream);

// x[row] *= factor[row], or, where exponents are given, 2^(least exponent - its own).
struct ScaleParams {
  void* x = nullptr;
  bool f16 = false;
  int64_t hidden = 0;
  RowRange range;
  const float* factor = nullptr;
  const RowFactors* factors = nullptr;
  const int* least = nullptr;
  float* undo = nullptr;  // 2^-least, for the product
};
void scale_rows(const ScaleParams& p, cudaStream_t stream);

// Compact rows, fp32 or bf16, to the caller's dX; without an index row i goes to row i.
struct ScatterRowsParams {
  const void* from = nullptr;
  bool bf16 = false;  // of `from`
  int64_t hidden = 0;
  const int* index = nullptr;
  RowRange range;
  View to;
};
void scatter_rows(const ScatterRowsParams& p, cudaStream_t stream);

// By slices: dX = the fp32 sum and the target's own term, rounded once, to the row's place.
struct EndRowsParams {
  const float* sum = nullptr;
  int64_t hidden = 0;
  RowBuffers rows;
  RowRange range;
  const void* weight = nullptr;  // bf16
  int64_t weight_stride = 0;
  View to;                       // bf16 or fp32, column stride 1
  uint8_t* exponents = nullptr;  // of a bf16 dX in codes, [tokens, blocks], or null
};
void end_rows(const EndRowsParams& p, cudaStream_t stream);

// finish.cu
struct FinishParams {
  RowBuffers rows;  // at the chunk's first row
  RowRange range;
  const float* row_class_weight = nullptr;
  const BatchFacts* facts = nullptr;
  // Either the sums of the tiles, or complete states, [parts][range.rows].
  const float* tile_sums = nullptr;
  const float* tile_shifted = nullptr;  // for the entropy, or null
  const float* tile_classes = nullptr;  // sums of c z, or null
  const float* tile_maxima = nullptr;   // given: what each tile's sums are relative to, log2 units
  TilePlaces places;
  int tiles = 0;
  const RowState<double>* states = nullptr;
  int parts = 0;
  RowState<double>* own_states = nullptr;  // given: only write the state, for an exchange
  LossTerms<double> terms;                 // without what the facts add
  double scale = 1, softcap = 0;
  bool shifted_buffer = true;  // the buffer holds exp(z - shift); otherwise fp32 logits became da
  bool f16 = false;
  TokenTerms own;
  TokenOutputs out;
  double* row_loss = nullptr;            // per compacted row, for the scalar
  double* row_lse = nullptr;             // per compacted row of the chunk, or null
  const float* row_class_sum = nullptr;  // per compacted row, with rank-one smoothing
  float* row_smooth = nullptr;           // s G_t eps / V, with rank-one smoothing
  const float* target_slope = nullptr;   // [range.rows], or from the target's logit
  float* db_factor = nullptr;            // [range.rows]: factor over logit scale, or null
  RowFactors* factors = nullptr;         // for a pass that forms da, or null
  int* least_exponent = nullptr;         // fp16
  void* scaled = nullptr;                // the gathered rows, multiplied in place by f; or null
  int64_t hidden = 0;
  int* zeroed = nullptr;  // two counters for the kernels that follow, or null
};
void finish_rows(const FinishParams& p, cudaStream_t stream);

// states[row] from the lse and the target's log-probability of an earlier call.
struct SavedParams {
  RowBuffers rows;
  RowRange range;
  View lse, logprob;  // per token
  RowState<double>* states = nullptr;
};
void restore_states(const SavedParams& p, cudaStream_t stream);

struct ReduceParams {
  const BatchFacts* facts = nullptr;
  const double* row_loss = nullptr;
  const int8_t* hit = nullptr;
  View loss, accuracy;  // scalars, where requested
  MeanRule mean;
  bool follows = false;  // the kernel before it in the stream is one of this lane's
};
void reduce_scalars(const ReduceParams& p, cudaStream_t stream);

// At most kFewTokens whose tiles have maxima of their own: their ends and the scalar in one launch.
// tickets: a zeroed counter, by which the last row knows itself; null: no scalar.
struct EndFewParams {
  FinishParams finish;
  ReduceParams reduce;
  int* tickets = nullptr;
};
void end_few_rows(const EndFewParams& p, int64_t rows, cudaStream_t stream);

// split.cu
// dW[y] += coefficient * x for every row, by runs of equal targets in the order of the rows.
struct ScatterParams {
  const uint64_t* sorted = nullptr;
  int64_t tokens = 0, hidden = 0;
  const BatchFacts* facts = nullptr;
  RowBuffers rows;
  const void* x = nullptr;  // original rows
  int64_t x_stride = 0;
  bool f16 = false;
  float* dw = nullptr;
  int64_t dw_stride = 0;
};
void scatter_targets(const ScatterParams& p, cudaStream_t stream);

}  // namespace talea::lce
