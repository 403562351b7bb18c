// What: tiles of 64 rows of a chunk in shared memory, and their products by warpgroups.
// Why: every operand of the scan is rows of 64 or 128 bf16 columns; one layout serves each product.
// Never: knows what a row means.
#pragma once

#include "device/sm90/ptx.cuh"
#include "device/sm90/wgmma_narrow.cuh"

namespace talea::mamba3::sm90 {

namespace hopper = talea::sm90;

inline constexpr int columns = 128, values = 64, rows = 64;  // N, P, m of this lane
inline constexpr int panel_bytes = 8192;                     // 64 rows of 64 columns
inline constexpr int wide_bytes = 2 * panel_bytes;           // 64 rows of 128 columns

// The same number, of which the compiler knows nothing: what is formed of it in a loop is formed
// anew each time, since registers that it would take from round to round are spilled.
__device__ __forceinline__ int formed_anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Byte of column `column` of row `row`: panels of 64 columns, pieces of 16 bytes swapped by row so
// that neither a row nor a column of pieces meets a bank twice.
__device__ __forceinline__ int place_of(int row, int column) {
  return (column >> 6) * panel_bytes + row * 128 + ((((column >> 3) & 7) ^ (row & 7)) << 4) +
         (column & 7) * 2;
}

// The warpgroup of a warp, known to be the same for all its lanes.
__device__ __forceinline__ int warpgroup() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
}

// An operand as the matrix units name it.
struct Operand {
  uint64_t descriptor;
  __device__ __forceinline__ explicit Operand(const void* tile)
      : descriptor(hopper::operand_descriptor(tile)) {}
  // Columns 16 k and on of every row.
  __device__ __forceinline__ uint64_t columns_at(int k) const {
    return descriptor + static_cast<uint64_t>(((k >> 2) * panel_bytes + (k & 3) * 32) >> 4);
  }
  // Rows 16 k and on, whole.
  __device__ __forceinline__ uint64_t rows_at(int k) const {
    return descriptor + static_cast<uint64_t>((k * 2048) >> 4);
  }
};

// d_ij = sum over `depth` columns of a_i b_j, or added to d.
template <int depth, bool adds>
__device__ __forceinline__ void rows_by_rows(float (&d)[32], Operand a, Operand b) {
#pragma unroll
  for (int k = 0; k < depth / 16; ++k) {
    if (k == 0 && !adds)
      hopper::wgmma_first_n64<0, 0, false>(d, a.columns_at(k), b.columns_at(k));
    else
      hopper::wgmma_n64<0, 0, false>(d, a.columns_at(k), b.columns_at(k));
  }
}
// Columns 16 `at` and on of it.
template <int depth>
__device__ __forceinline__ void rows_by_some_rows(float (&d)[8], Operand a, Operand b, int at) {
  const auto from = static_cast<uint64_t>(at * (2048 >> 4));
#pragma unroll
  for (int k = 0; k < depth / 16; ++k) {
    if (k == 0)
      hopper::wgmma_first_n16<0, false>(d, a.columns_at(k), b.columns_at(k) + from);
    else
      hopper::wgmma_add_n16<0, false>(d, a.columns_at(k), b.columns_at(k) + from);
  }
}
// d_ij += sum over 64 rows r of a_ri b_rj.
template <int width>
__device__ __forceinline__ void columns_by_columns(float (&d)[width / 2], Operand a, Operand b) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    hopper::multiply_tile<width, 1, 1, false>(d, a.rows_at(k), b.rows_at(k));
}
// d_ij += sum over 64 columns c of a_ic b_cj.
template <int width>
__device__ __forceinline__ void rows_by_columns(float (&d)[width / 2], Operand a, Operand b) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    hopper::multiply_tile<width, 0, 1, false>(d, a.columns_at(k), b.rows_at(k));
}
// The same, a in registers as an accumulator lies, rounded.
template <int width>
__device__ __forceinline__ void registers_by_columns(float (&d)[width / 2],
                                                     const uint32_t (&a)[4][4], Operand b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) hopper::multiply_registers<width, 1, false>(d, a[k], b.rows_at(k));
}

template <int count>
__device__ __forceinline__ void products_begin(float (&d)[count]) {
  hopper::hold_registers(d);
  hopper::warpgroup_arrive();
}
template <int count>
__device__ __forceinline__ void products_end(float (&d)[count]) {
  hopper::warpgroup_commit();
  hopper::warpgroup_wait<0>();
  hopper::hold_registers(d);
}

__device__ __forceinline__ uint32_t two_rounded(float a, float b) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ __forceinline__ float low_of(uint32_t both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(uint32_t both) {
  return __uint_as_float(both & 0xffff0000u);
}

// Where an accumulator's element lies: rows row() and row() + 8, columns column() + 8 j and the
// next; element 4 j + {0, 1} of the first row, + {2, 3} of the second.
__device__ __forceinline__ int own_row() {
  return (threadIdx.x & 127) / 32 * 16 + (threadIdx.x & 31) / 4;
}
__device__ __forceinline__ int own_column() { return (threadIdx.x & 3) * 2; }

// f(row, column, x, y) of each two neighbours of an accumulator.
template <int count, class F>
__device__ __forceinline__ void each_two(float (&d)[count], F f) {
  const int row = own_row(), column = own_column();
#pragma unroll
  for (int j = 0; j < count / 4; ++j) {
    f(row, column + 8 * j, d[4 * j], d[4 * j + 1]);
    f(row + 8, column + 8 * j, d[4 * j + 2], d[4 * j + 3]);
  }
}

// Four matrices of eight rows at once: two of columns 8 j and on, two of the next eight.
template <int count>
__device__ __forceinline__ void put_tile(char* tile, const float (&d)[count]) {
  const int lane = threadIdx.x & 31, row = (threadIdx.x & 127) / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < count / 4; j += 2)
    hopper::store_matrix_x4(
        tile + place_of(row, 8 * j + lane / 16 * 8), two_rounded(d[4 * j], d[4 * j + 1]),
        two_rounded(d[4 * j + 2], d[4 * j + 3]), two_rounded(d[4 * j + 4], d[4 * j + 5]),
        two_rounded(d[4 * j + 6], d[4 * j + 7]));
}

}  // namespace talea::mamba3::sm90
