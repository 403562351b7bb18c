// What: the matrix product of one cache-sized tile, in fp32, on whatever vectors the CPU has.
// Why: every element of C is one chain of multiply-adds in the order of k, whatever the tile, the
//      thread or the neighbours; that is what makes results independent of all of them.
// Never: allocates, spawns threads or knows an operator.
#pragma once

#include <cstdint>

#include "talea/tensor.hpp"

namespace talea::cpu {

// Matrices that a vector loop reads lie in panels: `lanes()` columns side by side, element (k, j)
// of a panel at k * lanes() + j. Sizes that a workspace formula needs are padded to max_lanes.
inline constexpr int64_t max_lanes = 16;
int64_t lanes();
const char* isa_name();

// How element (i, k) of the left operand is found.
enum class LeftForm {
  row_major,         // a + i * a_stride + k
  panel,             // a + (k / lanes) * a_stride + i * lanes + k % lanes
  panel_transposed,  // a + (i / lanes) * a_stride + k * lanes + i % lanes; rows % lanes == 0
};

// Memory that the work after a product reads first: fetched a few lines at a time while the product
// runs, so that far rows are near when their turn comes. A hint; it changes no result.
struct Ahead {
  const void* first = nullptr;
  int64_t rows = 0, row_bytes = 0, stride_bytes = 0;
};

// C (+)= A [rows, depth] times B [depth, panels * lanes].
struct TileProduct {
  LeftForm form = LeftForm::row_major;
  const float* a = nullptr;
  int64_t a_stride = 0;
  const float* b = nullptr;
  int64_t b_panel = 0;  // floats from one panel of B to the next
  float* c = nullptr;   // element (i, j of panel n) at c + i * c_row + n * c_panel + j
  int64_t c_row = 0, c_panel = 0;
  int64_t rows = 0, panels = 0, depth = 0;
  int64_t last_columns = 0;  // columns of C in the last panel; 0: all of them
  bool accumulate = false;
  Ahead ahead;
};
void multiply(const TileProduct& t);

// n elements of a strided row as fp32; exact for fp32, bf16 and fp16.
void load_row(const void* src, DType dtype, int64_t first, int64_t stride, int64_t n, float* dst);
// The same for `rows` rows at once, laid out as a right operand: element (k, j) at
// dst[j / lanes * panel + k * lanes + j % lanes]; the last panel is filled up with 0.
struct RowBlock {
  const void* src = nullptr;
  DType dtype = DType::f32;
  int64_t first = 0, row_stride = 0, stride = 1, rows = 0, n = 0;
};
void load_panels(const RowBlock& block, float* dst, int64_t panel);
// n fp32 numbers, rounded once to the dtype of a strided row.
void store_row(const float* src, int64_t n, void* dst, DType dtype, int64_t first, int64_t stride);

}  // namespace talea::cpu
