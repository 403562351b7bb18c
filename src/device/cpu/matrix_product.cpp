// What: cuts a matrix product into packed tiles for tile_product.
// Why: one place knows how operands of any layout become rows and panels.
// Never: splits the sum of an element between threads.
#include "device/cpu/matrix_product.hpp"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "device/cpu/tile_product.hpp"

namespace talea::cpu {
namespace {

constexpr int64_t rows_block = 256, depth_block = 256, columns_block = 192;

// Panels of B [depth, columns] from row k0 and column j0; columns beyond n are zero.
void pack_panels(const MatrixProduct& p, int64_t k0, int64_t depth, int64_t j0, int64_t columns,
                 float* to, float* row) {
  const int64_t width = lanes(), wanted = std::min(columns, p.n - j0);
  const MatrixView& b = p.b;
  if (b.col_stride == 1 || b.row_stride != 1) {
    std::fill_n(row, columns, 0.0f);
    for (int64_t k = 0; k < depth; ++k) {
      load_row(b.data, b.dtype, (k0 + k) * b.row_stride + j0 * b.col_stride, b.col_stride, wanted,
               row);
      for (int64_t j = 0; j < columns; j += width)
        std::memcpy(to + j * depth + k * width, row + j, sizeof(float) * width);
    }
    return;
  }
  for (int64_t j = 0; j < columns; ++j) {
    if (j < wanted)
      load_row(b.data, b.dtype, k0 + (j0 + j) * b.col_stride, 1, depth, row);
    else
      std::fill_n(row, depth, 0.0f);
    float* panel = to + j / width * width * depth + j % width;
    for (int64_t k = 0; k < depth; ++k) panel[k * width] = row[k];
  }
}

// Rows of A as the tile kernel wants them: in place, or packed into `to`.
void left_operand(const MatrixProduct& p, int64_t i0, int64_t rows, int64_t k0, int64_t depth,
                  float* to, TileProduct& t) {
  const MatrixView& a = p.a;
  const int64_t first = i0 * a.row_stride + k0 * a.col_stride, width = lanes();
  if (a.dtype == DType::f32 && a.col_stride == 1) {
    t.form = LeftForm::row_major;
    t.a = static_cast<const float*>(a.data) + first;
    t.a_stride = a.row_stride;
  } else if (a.row_stride == 1 && rows == rows_block) {
    t.form = LeftForm::panel_transposed;
    t.a = to;
    t.a_stride = depth * width;
    for (int64_t k = 0; k < depth; ++k) {
      float row[rows_block];
      load_row(a.data, a.dtype, first + k * a.col_stride, 1, rows, row);
      for (int64_t i = 0; i < rows; i += width)
        std::memcpy(to + i * depth + k * width, row + i, sizeof(float) * width);
    }
  } else {
    t.form = LeftForm::row_major;
    t.a = to;
    t.a_stride = depth;
    for (int64_t i = 0; i < rows; ++i)
      load_row(a.data, a.dtype, first + i * a.row_stride, a.col_stride, depth, to + i * depth);
  }
}

// Columns [j0, j0 + columns) of rows [i_begin, i_end), the whole depth.
void column_block(const MatrixProduct& p, int64_t i_begin, int64_t i_end, int64_t j0,
                  float* scratch) {
  float* a_pack = scratch;
  float* b_pack = a_pack + rows_block * depth_block;
  float* row = b_pack + depth_block * columns_block;
  const int64_t wanted = std::min(columns_block, p.n - j0), width = lanes();
  const int64_t panels = (wanted + width - 1) / width;
  int64_t k = 0;
  do {
    TileProduct t;
    t.depth = std::min(depth_block, p.k - k);
    pack_panels(p, k, t.depth, j0, panels * width, b_pack, row);
    t.b = b_pack;
    t.b_panel = t.depth * width;
    t.panels = panels;
    t.last_columns = wanted % width;
    t.c_row = p.c_stride;
    t.c_panel = width;
    t.accumulate = p.accumulate || k > 0;
    for (int64_t i = i_begin; i < i_end; i += rows_block) {
      t.rows = std::min(rows_block, i_end - i);
      left_operand(p, i, t.rows, k, t.depth, a_pack, t);
      t.c = p.c + i * p.c_stride + j0;
      multiply(t);
    }
    k += depth_block;
  } while (k < p.k);
}

}  // namespace

void matrix_product(const MatrixProduct& p) {
  if (p.m == 0 || p.n == 0) return;
  const int64_t column_blocks = (p.n + columns_block - 1) / columns_block;
  const int64_t row_units = (p.m + rows_block - 1) / rows_block;
  const int64_t wanted = std::max<int64_t>(1, 4 * p.threads / column_blocks);
  const int64_t rows = (row_units + wanted - 1) / wanted * rows_block;
  const int64_t row_groups = (p.m + rows - 1) / rows;
#pragma omp parallel for schedule(dynamic) num_threads(p.threads)
  for (int64_t task = 0; task < column_blocks * row_groups; ++task) {
    const int64_t i = task % row_groups * rows;
    column_block(p, i, std::min(i + rows, p.m), task / row_groups * columns_block,
                 p.scratch + omp_get_thread_num() * matrix_product_scratch);
  }
}

}  // namespace talea::cpu
