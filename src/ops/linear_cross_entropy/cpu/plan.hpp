// What: the sizes a call of lane cpu works with, and its workspace laid out.
// Why: a pure function of problem and facts; the formula and the pointers come from the same code.
// Never: touches data.
#pragma once

#include "core/arena.hpp"
#include "ops/linear_cross_entropy/cpu/row_pass.hpp"
#include "ops/linear_cross_entropy/outputs.hpp"

namespace talea::lce::cpu {

// Fixed on every machine: results must not depend on threads, limit or instruction set more than
// the contract allows.
inline constexpr int64_t tile_columns = 256;  // vocabulary entries of a tile
inline constexpr int64_t dx_depth = 128;      // the same for dX, whose sums run over the vocabulary
inline constexpr int64_t dx_pair_depth = 256;  // in bf16 pairs
inline constexpr int64_t depth_block = 256;    // multiply-adds per element before a sum is stored
inline constexpr int64_t pair_depth_block = 384;  // the same in bf16 pairs, at most
inline constexpr int64_t tile_rows = 384;         // rows of a logits tile
inline constexpr int64_t dx_columns = 384;        // columns of dX of one task, at most
inline constexpr int64_t dw_columns = 192;        // columns of dW that stay in cache between blocks
inline constexpr int64_t gradient_bytes = int64_t{8} << 20;  // between the passes for dW and dX
inline constexpr int64_t most_chunk_rows = 1024;
// bf16 products want at least a tile of the vocabulary: with fewer factors in a row their roundings
// do not average out, and there is little time to save.
inline constexpr int64_t native_columns = tile_columns;
static_assert(tile_columns % dx_depth == 0 && tile_columns % dx_pair_depth == 0,
              "a step of dX must not cut a sum");
// 16-bit dW that cannot be rounded from one chunk: chunks smaller than this cost more than logits
// that are multiplied twice.
inline constexpr int64_t fewest_chunk_rows = 256;
inline constexpr double flops_per_thread = 4e6;

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
constexpr int64_t blocks(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// Rows that the products read or add to where they lie; others go through a thread's scratch.
inline bool weight_in_place(const Problem& p, bool native_bf16) {
  if (p.weight_col_stride != 1) return false;
  return native_bf16 ? p.hidden % 2 == 0 : p.weight_dtype == DType::f32;
}
inline bool dw_in_place(const Problem& p) {
  return p.dw_dtype == DType::f32 && (p.dw_col_stride == 1 || p.hidden == 1);
}

struct Plan {
  int threads = 1;
  bool native_bf16 = false;    // products of bf16 pairs; else of fp32, 16-bit tensors widened
  int64_t columns = 0;         // logical vocabulary of this rank
  int64_t columns_stored = 0;  // padded
  int64_t tiles = 0;           // of the vocabulary
  // Logits are kept for so many tiles at a time: all, or a window that moves over the vocabulary
  // once for the sums and once more, multiplied again, for the gradients.
  int64_t window_tiles = 0, window_columns = 0;
  bool recompute = false;
  int64_t hidden_padded = 0;
  int64_t chunk_rows = 0;        // at most; a multiple of 16
  bool dw_in_workspace = false;  // 16-bit dW over several chunks: fp32 sums, rounded once
  int64_t bytes = 0;             // above the caller's limit where no plan can keep it
};
Plan make_plan(const Problem& p, const DeviceFacts& device);

// Numbers per row of the chunk that the gradient pass reads.
struct RowFactors {
  float *max, *prob, *prob_low, *target, *smooth, *smooth_low, *soft;
  float *entropy_weight, *entropy_offset, *scale;
  float* large;            // gradient factors above this leave a remainder when they are rounded
  RowResult<double>* all;  // the same unrounded, for single entries
  double* sum;             // of exp(z - max)
  int64_t* local_target;   // column of this rank, or -1
};

// Partial states of the tiles of a window: [tile][row] each.
struct Partials {
  float *max, *others, *shifted, *class_sum, *soft_sum, *soft_mass;
};

struct Buffers {
  int64_t* active;  // valid rows in rising order
  float* z;         // panels of logits, later of da: [row panel][window_columns][lanes]
  float* xt;        // hidden, rows as lanes: [row panel][hidden][lanes]
  float* xs;        // hidden, columns as lanes: [hidden panel][rows][lanes]
  uint16_t *xt_pairs, *xs_pairs;  // the same as right operands of bf16 pairs
  uint32_t*
      rest;   // what rounding gradient factors to bf16 leaves: [window tile][row][Remainders::most]
  float* dx;  // [rows][hidden_padded]
  float* dw;  // [columns][hidden], where dw_in_workspace
  float* db;  // [columns]
  RowFactors factors;
  Partials partials;
  RowState<double>*states, *all_states;
  double* loss;
  Best* best_found;
  Candidate<double>*best, *all_best;
  int32_t* soft_order;     // sparse soft targets of a chunk, sorted by tile
  int64_t* soft_offsets;   // [tiles + 1]
  float* soft_logits;      // logits at those entries, before the softcap
  char* gathered;          // hidden of all ranks under sequence_parallel
  float *dx_all, *dx_own;  // the same for dX
  float* scratch;          // one slice a thread
  int64_t scratch_floats;

  Buffers(Arena& arena, const Problem& p, const Plan& plan);
};

// What a thread's slice of scratch holds.
struct Scratch {
  float *pack, *row, *bias, *class_weight, *soft, *capped, *db_lanes;
  Scratch(float* slice, const Problem& p, const Plan& plan);
  int64_t floats;
};

}  // namespace talea::lce::cpu
