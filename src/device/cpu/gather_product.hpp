// What: products of rows found by address: gathered keys times heads, weighted sums of gathered
//       rows, and sums into gathered rows.
// Why: a row is read where it lies, once for all heads; every element is one sum in the order of
//      the depth, whatever the tile, the thread or the neighbours.
// Never: allocates, spawns threads or knows an operator.
#pragma once

#include <cstdint>

#include "device/cpu/tile_product.hpp"

namespace talea::cpu {

// C [rows, panels * lanes] = A [rows, depth] B. B lies in panels, as in TileProduct.
struct GatherProduct {
  const float* const* a = nullptr;  // each row of A
  const float* b = nullptr;
  int64_t b_panel = 0;  // floats from one panel of B to the next
  float* c = nullptr;   // element (i, lane j of panel n) at c + i * c_row + n * lanes() + j
  int64_t c_row = 0;
  int64_t rows = 0, panels = 0, depth = 0;
  const float* const* next = nullptr;  // rows of A of the next product, fetched ahead; null: none
  int64_t next_rows = 0;
};
void multiply(const GatherProduct& t);

// C [rows, columns] (+)= W [rows, depth] B [depth, columns]; rows of all three by address.
struct WeightedRows {
  const float* const* w = nullptr;  // element (i, k) at w[i][k * w_step]
  int64_t w_step = 1;
  const float* const* b = nullptr;
  float* const* c = nullptr;
  int64_t rows = 0, depth = 0;
  int64_t first = 0, columns = 0;  // columns [first, first + columns) of B and C
  bool accumulate = false;
  bool rows_outside = false;  // a block of rows through all columns before the next block
};
void multiply(const WeightedRows& t);

// n e4m3 bytes times a scale, in fp32; 0x7f and 0xff are NaN.
void load_e4m3(const void* src, int64_t n, float scale, float* dst);

// Rows of fp32 numbers [rows, depth] as panels of a right operand whose lanes are the rows: element
// (k, row) at dst[row / lanes * panel + k * lanes + row % lanes]; what fills the last panel is 0.
void transpose_to_panels(const float* const* src, int64_t rows, int64_t depth, float* dst,
                         int64_t panel);

}  // namespace talea::cpu
