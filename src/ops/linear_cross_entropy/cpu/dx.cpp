// What: the backward phases of a chunk in steps of a few tiles, and the product for dX.
// Why: dX sums over the vocabulary: it follows close behind the tiles while they are near.
// Never: lets steps, threads or blocks change the order in which an element is summed.
#include <omp.h>

#include <algorithm>

#include "core/half.hpp"
#include "core/mutant.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/linear_cross_entropy/cpu/run.hpp"

namespace talea::lce::cpu {

// Part of the weight that comes next, where its rows lie in one piece each.
Ahead Run::weight_ahead(int64_t v0, int64_t rows, int64_t column, int64_t columns) const {
  const Tensor& w = c_.in.weight;
  rows = std::min(rows, plan_.columns - v0);
  if (rows <= 0 || columns <= 0 || w.stride[1] != 1) return {};
  const int64_t size = size_of(w.dtype);
  return {static_cast<const char*>(w.data) + (v0 * w.stride[0] + column) * size, rows,
          columns * size, w.stride[0] * size};
}

// Columns [begin, end) of the vocabulary into a block of dX: one step of its sums.
template <class Kind>
void Run::dx_block(const DxBlock& block, int64_t begin, int64_t end, float* slice_begin) {
  const Scratch s(slice_begin, p_, plan_);
  const Tensor& w = c_.in.weight;
  const int64_t wanted = std::min(block.columns, p_.hidden - block.column);
  auto* pack = reinterpret_cast<typename Kind::Number*>(s.pack);
  typename Kind::Product t;
  t.form = LeftForm::panel_transposed;
  t.a_stride = panel_floats();
  t.b = pack;
  t.c = b_.dx + block.row * plan_.hidden_padded + block.column;
  t.c_row = plan_.hidden_padded;
  t.c_panel = lanes_;
  t.rows = block.rows;
  t.panels = block.columns / lanes_;
  int64_t v0 = begin;
  do {
    const int64_t depth = std::min(Kind::dx_step, end - v0);
    t.depth = Kind::depth(depth);
    t.b_panel = t.depth * lanes_;
    Kind::load({w.data, w.dtype, v0 * w.stride[0] + block.column * w.stride[1], w.stride[0],
                w.stride[1], depth, wanted},
               pack, t.b_panel);
    const int64_t next = v0 + Kind::dx_step;
    t.ahead = weight_ahead(next, std::min(Kind::dx_step, end - next), block.column, wanted);
    t.a = logit(block.row, v0);
    t.accumulate = v0 > 0;
    multiply(t);
    if constexpr (Kind::rounds) {
      const int64_t tile = v0 / tile_columns;  // a step is a tile
      for (int64_t r = 0; r < std::min(block.rows, chunk_.rows - block.row); ++r)
        for_rest(tile, block.row + r,
                 [&](int64_t v, float rest) { add_row(t, v, rest, t.c + r * t.c_row); });
    }
    if (mutant(Mutant::b14_dx_summed_in_16_bits))
      for (int64_t r = 0; r < t.rows; ++r)
        for (int64_t i = 0; i < block.columns; ++i)
          t.c[r * t.c_row + i] = bf16_to_float(float_to_bf16(t.c[r * t.c_row + i]));
    v0 = next;
  } while (v0 < end);
}

// Every element of dX is one chain over the vocabulary: tasks may be cut to suit the threads.
void Run::dx(int64_t begin, int64_t end) {
  const int64_t width = plan_.hidden_padded, threads = plan_.threads;
  // Columns first: every row block packs the weight anew.
  int64_t column_blocks = blocks(width, dx_columns);
  while (column_blocks % threads != 0 && width / (column_blocks + 1) >= 96) ++column_blocks;
  const int64_t columns = round_up(blocks(width, column_blocks), max_lanes);
  column_blocks = blocks(width, columns);
  const int64_t wanted = blocks(threads, column_blocks);
  const int64_t rows = std::max(3 * max_lanes, round_up(blocks(chunk_.padded, wanted), max_lanes));
  const int64_t row_blocks = blocks(chunk_.padded, rows);
#pragma omp parallel for schedule(dynamic) num_threads(plan_.threads)
  for (int64_t task = 0; task < column_blocks * row_blocks; ++task) {
    const int64_t row = task % row_blocks * rows, column = task / row_blocks * columns;
    const DxBlock block = {row, std::min(rows, chunk_.padded - row), column,
                           std::min(columns, width - column)};
    float* scratch = slice(omp_get_thread_num());
    plan_.native_bf16 ? dx_block<PairKind>(block, begin, end, scratch)
                      : dx_block<WideKind>(block, begin, end, scratch);
  }
}

// A few tiles at a time: dX finds their gradient in the cache that the threads share.
void Run::backward() {
  const int64_t tile_bytes = chunk_.padded * tile_columns * static_cast<int64_t>(sizeof(float));
  const int64_t step = plan_.recompute
                           ? plan_.window_tiles
                           : std::max<int64_t>(4 * plan_.threads, gradient_bytes / tile_bytes);
  int64_t tile = 0;
  do {
    const int64_t end = std::min(tile + step, plan_.tiles);
    if (plan_.recompute) window_ = tile;
    gradients(tile, end);
    if (p_.wants_dx) dx(tile * tile_columns, std::min(end * tile_columns, plan_.columns));
    tile = end;
  } while (tile < plan_.tiles);
  window_ = 0;
  if (p_.wants_dx) store_dx();
}

}  // namespace talea::lce::cpu
