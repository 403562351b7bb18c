// The kernels between the products: what the targets say, moves of rows, the finish of the rows.
// Exists so that the lane has one meaning of ignored, poisoned and valid rows. Never allocates or
// synchronises: counts stay in device memory and grids cover the whole batch.
#pragma once
#include "algebra/top_k.hpp"
#include "device/common/view.cuh"
#include "ops/linear_cross_entropy/finish.hpp"
#include "ops/linear_cross_entropy/sm90/rows.hpp"
#include "talea/linear_cross_entropy.hpp"

namespace talea::lce {

// Up to so many, a loss alone is bound by one read of the weight: a shift found beforehand costs
// more than tiles with maxima of their own do.
inline constexpr int64_t kFewTokens = 256;

// One of the caller's per-token tensors, any stride; absent reads as `absent`.
struct DeviceVector {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride = 0;
};
DeviceVector device_vector(const Tensor& t);  // rank 0 or 1

// What the targets say about the batch; everything after reads it.
struct BatchFacts {
  int64_t counts[4];  // valid, ignored, out of range, in partition: for the caller
  int valid, poisoned, ignored, in_partition;
  int first_bad,
      first_bad_scale;  // token, or INT_MAX: a foreign target, a scale of 0 or not finite
  int64_t first_bad_value;
  int64_t first_bad_weight;  // class, or -1
  double weights[3];         // valid, weighted, present: summed over the batch ranks if asked
  double class_weight_sum, class_weight_max;  // over the whole vocabulary
  double denominator, inverse;
  int empty;  // no row that is not ignored, in the denominator's scope
};

// Which rows count.
struct TargetRule {
  int64_t vocab = 0, vocab_begin = 0, vocab_local = 0, ignore_index = 0;
  DeviceVector targets, token_scale;
  device::View soft_ids;  // sparse soft targets
  int64_t soft_k = 0;
};

// targets.cu
// Per token, before any row is left out: what the shift product needs.
struct TokenParams {
  int64_t tokens = 0;
  TargetRule rule;
  int* target = nullptr;   // local id, or -1
  float* scale = nullptr;  // or null
};
void prepare_tokens(const TokenParams& p, cudaStream_t stream);

struct CompactParams {
  int64_t tokens = 0;
  TargetRule rule;
  DeviceVector class_weight, token_weight;
  const float* token_shift = nullptr;  // per token; null: no shift
  RowBuffers rows;
  float* row_class_weight = nullptr;  // c_y per compacted row
  BatchFacts* facts = nullptr;
  uint64_t* sort_keys = nullptr;  // (target, compacted row) of every row; unused entries ~0
  // The denominator, where nothing has to be added to the facts before it: as form_denominator.
  bool forms_denominator = false;
  int denominator = 3;
  double given = 0;
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

// Sums the class weights into the facts; a weight out of contract poisons the whole call.
void sum_class_weights(const DeviceVector& weights, int64_t vocab, BatchFacts* facts,
                       cudaStream_t stream);

// The denominator from facts->weights. 0 valid, 1 weighted, 2 given, 3 none (sum, none).
void form_denominator(BatchFacts* facts, int denominator, double given, cudaStream_t stream);

// By targets in [0, vocab).
void sort_keys(const uint64_t* from, uint64_t* to, int64_t tokens, int64_t vocab, void* scratch,
               int64_t scratch_bytes, cudaStream_t stream);
// A bound on what the radix sort asks for: a second copy of the keys, histograms, look-back.
inline int64_t sort_scratch_bytes(int64_t tokens) { return 12 * tokens + (int64_t{1} << 20); }

// move.cu
// Everything an ignored or poisoned row shows: zeros, or NaN; ids are -1.
struct BlankParams {
  int64_t tokens = 0;
  TargetRule rule;
  DeviceVector loss, lse, logprob, entropy, argmax;
  device::View topk_values, topk_ids, topk_logprobs;
  int64_t top_k = 0;
  device::View dx;
  int64_t hidden = 0;
  bool poison_dx = true;
};
void blank_rows(const BlankParams& p, cudaStream_t stream);

// Rows [begin, begin + rows) of the compacted order into a dense buffer; past the end rows are 0 as
// far as the tiles of a product reach. Without an index: rows begin, begin + 1, ...
struct GatherParams {
  const void* hidden = nullptr;
  int64_t stride = 0, columns = 0;
  const int* index = nullptr;
  RowRange range;
  void* to = nullptr;
  int64_t to_stride = 0;
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
  device::View to;
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
  device::View to;          // bf16 or fp32, column stride 1
  uint8_t* rest = nullptr;  // of a bf16 dX, [tokens, hidden], or null
};
void end_rows(const EndRowsParams& p, cudaStream_t stream);

// A vector of any dtype and stride into fp32.
void convert_vector(const DeviceVector& from, int64_t first, int64_t count, float* to,
                    cudaStream_t stream);

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
  int64_t tile_sums_stride = 0;
  int tiles = 0;
  const RowState<double>* states = nullptr;
  int parts = 0;
  RowState<double>* own_states = nullptr;  // given: only write the state, for an exchange
  LossTerms<double> terms;                 // denominator and class weights are taken from facts
  double scale = 1, softcap = 0;
  bool soft = false, has_targets = true;
  bool shifted_buffer = true;  // the buffer holds exp(z - shift); otherwise fp32 logits became da
  bool f16 = false;
  DeviceVector token_weight, upstream, upstream_lse, upstream_entropy;
  DeviceVector loss, lse, logprob, entropy;  // per token, where requested
  double* row_loss = nullptr;                // per compacted row, for the scalar
  double* row_lse = nullptr;                 // per compacted row of the chunk, or null
  const float* row_class_sum = nullptr;      // per compacted row, with rank-one smoothing
  float* row_smooth = nullptr;               // s G_t eps / V, with rank-one smoothing
  const float* target_slope = nullptr;       // [range.rows], or from the target's logit
  float* db_factor = nullptr;                // [range.rows]: factor over logit scale, or null
  RowFactors* factors = nullptr;             // for a pass that forms da, or null
  int* least_exponent = nullptr;             // fp16
  void* scaled = nullptr;                    // the gathered rows, multiplied in place by f; or null
  int64_t hidden = 0;
  int* zeroed = nullptr;  // two counters for the kernels that follow, or null
};
void finish_rows(const FinishParams& p, cudaStream_t stream);

// states[row] from the lse and the target's log-probability of an earlier call.
struct SavedParams {
  RowBuffers rows;
  RowRange range;
  DeviceVector lse, logprob;  // per token
  RowState<double>* states = nullptr;
};
void restore_states(const SavedParams& p, cudaStream_t stream);

struct ReduceParams {
  const BatchFacts* facts = nullptr;
  const double* row_loss = nullptr;
  const int8_t* hit = nullptr;
  DeviceVector loss, accuracy;  // scalars, where requested
  int reduction = 0;            // 0: no scalar loss, 1 sum, 2 mean
  bool zero_when_empty = false, given = false;
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
