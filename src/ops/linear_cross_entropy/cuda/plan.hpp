// What: how lane cuda cuts a problem: rows of a chunk, buffers, columns of a product. Pure.
// Why: explain, the workspace formula and the run read the same value, tested without a GPU.
// Never: touches a device.
#pragma once

#include <vector>

#include "core/arena.hpp"
#include "device/common/cublaslt.hpp"
#include "ops/linear_cross_entropy/cuda/chunk.hpp"
#include "ops/linear_cross_entropy/rows/call.hpp"

namespace talea::lce::cuda {

struct Plan {
  DType compute = DType::bf16;  // of the operands of the products
  int64_t granule_rows = 128;   // every product's rows are a multiple of it
  int64_t chunk_rows = 0, chunks = 0;
  bool over_limit = false;     // even the smallest chunk needs more than the caller's limit
  bool with_gradient = false;  // a chunk's dz is formed; otherwise its logits are only read
  int64_t panel_columns = 0;   // whose logits are in the buffer at once: all, with a gradient
  int64_t logits_stride = 0;   // elements from row to row of logits and of dz
  int64_t x_stride = 0;        // elements from row to row of the gathered hidden rows
  int64_t dx_stride = 0;       // floats from row to row of the chunk's dX
  int64_t parts = 0;           // of a row, each reduced by one block
  bool choose_tiles = false;   // Hopper: tiles by measurement, not by the library's first choice
  double memory = 1;           // the device's beside an H200's
  int multiprocessors = 0;     // Hopper, 16 bits: rows by whole waves over them; otherwise 0
  int64_t kept = 0;            // candidates a row
  bool dw_in_place = false;    // products add straight into the caller's dw
  bool dw_direct = false;  // the products write the caller's 16-bit dw: one chunk, rounded once;
                           // or each chunk adds to it (dw_sum)
  bool targets_apart = false;  // there the targets' own share is added once, after all chunks
  bool copies_weight = false;  // its strides suit no product: a dense copy in the workspace
  // cuBLASLt multiplies a number of columns that does not fill 16 bytes an order of magnitude
  // slower: the last of them then have products of their own, padded to tail_width.
  int64_t tail = 0;
  // Small weights: dz is kept in two 16-bit terms and multiplied twice, since in a small gradient
  // one rounding shows. Large ones: one term.
  bool two_terms = false;
  int64_t dx_panel = 0;        // columns of one dX product; fp32 sums panels
  bool gather_tokens = false;  // sequence parallel: all ranks' rows are gathered first
  bool scaled_rows = false;    // fp16: each row of dz carries a power of two
};

inline constexpr int64_t tail_width = 64;

// A chunk's dz lies dense in 16 bits at the head of its buffer; the fp32 logits of one piece of the
// chunk after the other lie at the buffer's end, and become dz before the next piece is multiplied.
// The last pieces are small, so that the buffer is little larger than dz, and the products of the
// gradients see two thirds more rows than fp32 logits of all of them would leave room for.
struct Piece {
  int64_t begin = 0, rows = 0;  // of the chunk
  int64_t source = 0;           // where its logits lie, in rows of dz
};
std::vector<Piece> pieces(const Plan& plan, int64_t rows, int64_t buffer_rows);
int64_t buffer_rows(const Plan& plan, int64_t rows);  // in rows of dz

Plan plan(const Problem& p, const DeviceFacts& device);

// Milliseconds of training by an H200's rates and the device's memory, to compare plans of a
// problem; 0: not known.
double predicted_ms(const Problem& p, const Plan& plan);

// The columns one after the other whose logits share the buffer.
std::vector<Panel> panels(const Problem& p, const Plan& plan);

// The pieces of the workspace; also its formula.
struct Buffers {
  BatchFacts* facts;  // first: its counts are readable by the caller once the stream has run
  LossTerms<double>* terms;
  TargetPartial* partials;
  RowKind* kind;
  int64_t* order;
  double* row_loss;
  int8_t* hit;
  float *bias, *class_weight;
  double* db;
  float* dw;
  char* weight;
  char* tail_weight;  // rows of the tail, and zeros up to tail_width
  float* tail_dw;     // their gradient, where the others' is added to the caller's
  TargetShares shares;
  char* x_all;
  float* dx_all;
  char* products;
  // One chunk:
  char* dz;  // and the logits of a piece
  char* x;
  float* dx;
  RowState<double>*partial_states, *own_states, *all_states;
  Candidate<float>*partial_best, *own_best, *all_best;
  char* rest;  // second terms of dz
  float* sparse_logits;
  RowFactors* factors;
  float* scalars;  // fp16: {alpha, beta of the first term, 1} of dW

  Buffers(Arena& a, const Problem& p, const Plan& plan, int64_t rows);
};

// Of the workspace, by the layout code.
int64_t bytes_of(const Problem& p, const Plan& plan);

// What kernels read of the call.
Shape shape_of(const Call& call, const Plan& plan, const Buffers& b);

std::optional<std::string> decline(const Problem& p, const DeviceFacts& device);
std::vector<std::string> details(const Problem& p, const Planned& planned);
// Fills what the result says of the run. counted: the host has read the token counts.
void report(const Call& call, const Plan& plan, const Buffers& b, int64_t chunks, bool counted);

}  // namespace talea::lce::cuda
