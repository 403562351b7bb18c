// What: how lane cuda cuts a problem: rows of a chunk, buffers, products. A pure function.
// Why: explain, the workspace formula and the run read the same value, tested without a GPU.
// Never: touches a device.
#pragma once

#include "core/arena.hpp"
#include "device/common/cublaslt.hpp"
#include "ops/linear_cross_entropy/cuda/chunk.hpp"
#include "ops/linear_cross_entropy/lane.hpp"

namespace talea::lce::cuda {

struct Plan {
  DType compute = DType::bf16;  // of the operands of the products
  int64_t granule_rows = 128;   // every product's rows are a multiple of it
  int64_t chunk_rows = 0, chunks = 0;
  int64_t logits_stride = 0;   // floats from row to row of the chunk's logits
  int64_t x_stride = 0;        // elements from row to row of the gathered hidden rows
  int64_t dx_stride = 0;       // floats from row to row of the chunk's dX
  int64_t parts = 0;           // of a row, each reduced by one block
  bool middle_tiles = false;   // of the products that store fp32
  int64_t kept = 0;            // candidates a row
  bool dw_in_place = false;    // products add straight into the caller's dw
  bool dw_direct = false;      // one chunk: the product writes the caller's 16-bit dw, rounded once
  bool copies_weight = false;  // its strides suit no product: a dense copy in the workspace
  // Small weights: dz is kept in two 16-bit terms and multiplied twice, since in a small gradient
  // one rounding shows. Large ones: one term.
  bool two_terms = false;
  int64_t dx_panel = 0;        // columns of one dX product; fp32 sums panels
  bool gather_tokens = false;  // sequence parallel: all ranks' rows are gathered first
  bool scaled_rows = false;    // fp16: each row of dz carries a power of two
};

// sm: compute capability, 90 for Hopper; it chooses tiles, never sizes.
Plan plan(const Problem& p, int sm);

// The pieces of the workspace; also its formula.
struct Buffers {
  Totals* totals;  // first: its counts are readable by the caller once the stream has run
  Terms* terms;
  TargetPartial* partials;
  int8_t* kind;
  int64_t* order;
  double* row_loss;
  int8_t* hit;
  float *bias, *class_weight;
  double* db;
  float* dw;
  char* weight;
  char* x_all;
  float* dx_all;
  char* products;
  // One chunk:
  float* logits;
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

int64_t workspace_bytes(const Problem& p);

// The three products over `rows` rows.
device::Product logits_product(const Problem& p, const Plan& plan, int64_t rows);
device::Product dx_product(const Problem& p, const Plan& plan, int64_t rows, int64_t columns,
                           bool second_term);
device::Product dw_product(const Problem& p, const Plan& plan, int64_t rows, int64_t dw_stride,
                           bool second_term);

std::optional<std::string> decline(const Problem& p, const DeviceFacts& device);

}  // namespace talea::lce::cuda
