// What: the values that the kernels of lane cuda share, and their launches.
// Why: host code and kernels read one definition.
// Never: decides sizes; plan.hpp does.
#pragma once

#include <cuda_runtime_api.h>

#include "algebra/top_k.hpp"
#include "ops/linear_cross_entropy/rows/tokens.hpp"

namespace talea::lce::cuda {

inline constexpr int64_t part_columns = 16384;  // of a row, reduced by one block
inline constexpr int64_t examined_rows = 256;   // of the targets, by one block

struct TargetPartial {
  TokenSums sums;
  int64_t offset;  // of this block's first valid row in the order
};

// Row r of a chunk is token order[begin + r], where begin + r < facts->valid; beyond: nothing.
struct ChunkRows {
  const BatchFacts* facts;
  const int64_t* order;
  int64_t begin, rows;
};

// The columns whose logits are in the buffer, in whole parts; with a gradient always all of them.
struct Panel {
  int64_t begin, columns, parts;
};

// What the gradient of one row needs, in the precision of the pass.
struct RowFactors {
  float max, inverse_sum, mean_distance;
  float prob, target, smooth, soft, entropy_up;
  float stored;           // dz is stored times this: token scale, and for fp16 a power of two
  float dx;               // the row of dX is the product's row times this
  float x;                // fp16: the hidden row enters dW times this
  float db;               // the row enters db times this
  int32_t target_column;  // local, or -1
};

// Everything of the problem that kernels read; copied into each launch.
struct Shape {
  int64_t tokens, hidden, vocab, vocab_begin, vocab_local;
  int64_t logits_stride, parts, kept, soft_k;
  float softcap, cap_exponent;  // cap_exponent: 2 log2(e) / softcap
  double logit_scale;
  SoftTargets soft;
  int32_t scaled_rows;
  int32_t fast_exp;  // 16-bit problems: exp to 2^-22, below the rounding of their operands
  int32_t fast_cap;  // 16-bit problems with a cap up to 256
  const float *bias, *class_weight;  // fp32, local columns; null: none
  TokenRule rule;
  TokenTerms terms;
  TokenOutputs out;
  MeanRule mean;
  LossTerms<double> loss_terms;
  View class_weights, soft_probs;
  View loss, accuracy;  // scalars
};

// targets.cu
void examine_targets(const Shape& s, BatchFacts* facts, TargetPartial* partials, RowKind* kind,
                     int64_t* order, cudaStream_t stream);
void write_scalars(const Shape& s, const BatchFacts* facts, const double* row_loss,
                   const int8_t* hit, cudaStream_t stream);

// states.cu: also the best candidates of every part, where `best` is given.
void reduce_rows(const Shape& s, const ChunkRows& c, const Panel& panel, const float* logits,
                 RowState<double>* partial, Candidate<float>* best, cudaStream_t stream);
// Also adds the sparse soft targets' part, one more state a row, where there are any.
void read_sparse(const Shape& s, const ChunkRows& c, const Panel& panel, const float* logits,
                 float* sparse_logits, RowState<double>* partial, cudaStream_t stream);

// finish_chunk.cu: states and candidates lie [parts][rows]. collapse merges them to one a row
// (before an exchange between ranks); finish writes the outputs of the rows and what their gradient
// needs.
void collapse(const Shape& s, const ChunkRows& c, int64_t parts, int64_t best_parts,
              const RowState<double>* states, const Candidate<float>* best,
              RowState<double>* own_states, Candidate<float>* own_best, cudaStream_t stream);
struct Finished {
  RowFactors* factors;
  double* row_loss;
  int8_t* hit;
};
void finish_rows(const Shape& s, const ChunkRows& c, const LossTerms<double>* terms, int64_t parts,
                 int64_t best_parts, const RowState<double>* states, const Candidate<float>* best,
                 const Finished& out, cudaStream_t stream);
// fp16: the power of two of each row of x, and {alpha, beta} of dW.
void balance_rows(const ChunkRows& c, RowFactors* factors, float* scalars, bool add, float scale,
                  cudaStream_t stream);

// gradient.cu: the fp32 logits of a piece become dz, dense rows of the products' dtype. dz may lie
// in the same buffer: row r of dz `lead` + r rows of dz before the logits of row r, or the same
// row.
struct Gradient {
  const float* logits;
  void* dz;
  void* rest;    // what rounding left of dz, in the same dtype and layout; null: not kept
  DType dtype;   // of dz
  int64_t lead;  // rows of dz between its first row and the first logits; 0: the same rows in fp32
};
void form_gradient(const Shape& s, const ChunkRows& c, const Gradient& g,
                   const float* sparse_logits, const RowFactors* factors, cudaStream_t stream);
// Over the dz of a whole chunk.
void add_bias_gradient(const Shape& s, const ChunkRows& c, const Gradient& g,
                       const RowFactors* factors, double* db, cudaStream_t stream);

// targets_apart.cu: the targets' own share of a bf16 dW that chunks round. One each of a valid row.
struct TargetShares {
  float* share = nullptr;
  int32_t *column = nullptr, *next = nullptr;
  int8_t* head = nullptr;
};
void keep_back_targets(const ChunkRows& c, const RowFactors* factors, void* dz, int64_t stride,
                       const TargetShares& shares, cudaStream_t stream);
struct TargetSum {
  const BatchFacts* facts;
  const int64_t* order;
  View x;
  int64_t tokens, hidden;
  float scale;
  void* dw;
  int64_t dw_stride;
};
void add_targets(const TargetSum& s, const TargetShares& shares, cudaStream_t stream);

// move.cu
// Rows of `from` by the order, zero beyond the valid rows; order null: row r is token begin + r.
void gather_rows(const ChunkRows& c, const View& from, int64_t hidden, DType compute, void* to,
                 int64_t stride, cudaStream_t stream);
void scale_rows(const ChunkRows& c, const RowFactors* factors, int64_t hidden, void* x,
                int64_t stride, cudaStream_t stream);
void scatter_dx(const ChunkRows& c, const RowFactors* factors, const float* from, int64_t stride,
                int64_t hidden, const View& to, cudaStream_t stream);
void copy_matrix(const float* from, int64_t stride, int64_t rows, int64_t columns, const View& to,
                 cudaStream_t stream);
// Rows >= `local` of the gradient are padding: 0 unless accumulating.
void store_dw(const float* from, int64_t local, int64_t stored, int64_t hidden, bool accumulate,
              const View& to, cudaStream_t stream);
void store_db(const double* from, int64_t local, int64_t stored, bool accumulate, const View& to,
              cudaStream_t stream);

}  // namespace talea::lce::cuda
