// What: the matrix product of one cache-sized tile of bf16 numbers, summed in fp32.
// Why: AVX512-BF16 does two multiply-adds per lane at once; each element of C is one chain of such
//      pairs in the order of k, whatever the tile, the thread or the neighbours.
// Never: allocates, spawns threads, or runs where native_bf16() is false.
#pragma once

#include <cstdint>

#include "device/cpu/tile_product.hpp"

namespace talea::cpu {

// The CPU has the instruction, and no ceiling forbids it: neither limit_isa() nor oneDNN's own
// (DNNL_MAX_CPU_ISA). Does not change while the process runs.
bool native_bf16();

// A right operand holds two steps of k side by side: element (k, j) of a panel is number
// k / 2 * 32 + j * 2 + k % 2. The depth is even; what fills it up is 0.
//
// A left operand is bf16 in row-major order, or a panel of twins: fp32 numbers (k, row) at
// [k * 16 + row] that narrow_to_twins() replaced in place, two k at a time, by 32 pairs of bf16.
// The first 64 bytes pair the two k of a row (LeftForm::panel_transposed: rows of C are the
// panel's rows), the second 64 the neighbouring rows of a k (LeftForm::panel: rows of C are k).
struct PairProduct {
  LeftForm form = LeftForm::row_major;
  const void* a = nullptr;
  int64_t a_stride = 0;  // row_major: bf16 numbers of a row; else floats of a panel of twins
  const uint16_t* b = nullptr;
  int64_t b_panel = 0;  // numbers from one panel of B to the next
  float* c = nullptr;   // as in TileProduct
  int64_t c_row = 0, c_panel = 0;
  int64_t rows = 0, panels = 0, depth = 0;
  int64_t last_columns = 0;
  bool accumulate = false;
  Ahead ahead;
};
void multiply(const PairProduct& t);

// What rounding takes away from numbers that outweigh their row, up to `most` of a row and tile:
// each the column in the high half and the remainder as bf16 in the low half; 0 ends the list.
struct Remainders {
  static constexpr int64_t most = 8;
  static int64_t column(uint32_t entry) { return entry >> 16; }
  static float value(uint32_t entry);
};

// Rounds to nearest even. An odd last column is paired with zeros; there must be room for it.
// Numbers above `large` (per row of the panel) leave a remainder in rest[row * most].
void narrow_to_twins(float* panel, int64_t columns, const float* large, uint32_t* rest);

// c += factor * row k of a right operand. c: t.panels panels of t.c_panel floats, as in t.
void add_row(const PairProduct& t, int64_t k, float factor, float* c);

// Rows of bf16 numbers as a right operand whose k are the rows.
void load_pairs(const RowBlock& block, uint16_t* dst, int64_t panel);

}  // namespace talea::cpu
