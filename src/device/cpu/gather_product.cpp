// What: gather_product.hpp in Highway, compiled once for each instruction set.
// Why: an index list names rows that lie anywhere; copying them first would cost what is saved.
// Never: lets the shape of a tile change the order in which an element is summed.
#include "device/cpu/gather_product.hpp"

#include <algorithm>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/gather_product.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace talea::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, max_lanes>;
using V = hn::Vec<D>;
constexpr int64_t width = hn::MaxLanes(D());
constexpr bool many_registers = HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON;
constexpr int block_rows = many_registers && width >= 8 ? 8 : 4;
constexpr int block_panels = 3;
constexpr int64_t line = 16;  // floats
// A long sum is one of sums of this many terms: its error does not grow with the depth.
constexpr int64_t depth_block = 8 * line;

// Rows of A in registers' worth of pointers, B in panels.
template <int MR, int NV>
HWY_NOINLINE void GatherBlock(const GatherProduct& t, const float* const* rows,
                              const float* HWY_RESTRICT b, float* c, const float* const* next) {
  const D d;
  const float* HWY_RESTRICT a[MR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) a[i] = rows[i];
  for (int64_t first = 0; first == 0 || first < t.depth; first += depth_block) {
    const int64_t last = HWY_MIN(first + depth_block, t.depth);
    V sum[MR][NV];
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) sum[i][n] = hn::Zero(d);
    for (int64_t k = first; k < last; k += line) {
      const int64_t end = HWY_MIN(k + line, last);
      if (next)
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) __builtin_prefetch(next[i] + k);
      for (int64_t j = k; j < end; ++j, b += width) {
        V column[NV];
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) column[n] = hn::LoadU(d, b + n * t.b_panel);
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) {
          const V left = hn::Set(d, a[i][j]);
#pragma GCC unroll 4
          for (int n = 0; n < NV; ++n) sum[i][n] = hn::MulAdd(left, column[n], sum[i][n]);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) {
        float* to = c + i * t.c_row + n * width;
        hn::StoreU(first > 0 ? hn::Add(hn::LoadU(d, to), sum[i][n]) : sum[i][n], d, to);
      }
  }
}

template <int NV>
void GatherPanels(const GatherProduct& t, int64_t panel) {
  const float* b = t.b + panel * t.b_panel;
  float* c = t.c + panel * width;
  const bool last = panel + NV == t.panels;  // fetches once, in the last round over the panels
  int64_t i = 0;
  for (; i + block_rows <= t.rows; i += block_rows) {
    const float* const* next = nullptr;
    if (i + 2 * block_rows <= t.rows)
      next = panel == 0 ? t.a + i + block_rows : nullptr;
    else if (last && t.next_rows >= block_rows)
      next = t.next;
    GatherBlock<block_rows, NV>(t, t.a + i, b, c + i * t.c_row, next);
  }
  for (; i < t.rows; ++i) GatherBlock<1, NV>(t, t.a + i, b, c + i * t.c_row, nullptr);
}

void Gather(const GatherProduct& t) {
  for (int64_t panel = 0; panel < t.panels;) {
    const int64_t left = t.panels - panel;
    const int64_t take = left == 4 ? 2 : left < block_panels ? left : block_panels;
    if (take == 3)
      GatherPanels<3>(t, panel);
    else if (take == 2)
      GatherPanels<2>(t, panel);
    else
      GatherPanels<1>(t, panel);
    panel += take;
  }
}

// One block of C in registers; DT: whole vectors, or single numbers at the right edge.
template <class DT, int MR, int NV>
HWY_NOINLINE void WeightedBlock(const WeightedRows& t, int64_t row, int64_t column) {
  const DT d;
  constexpr int64_t lanes = hn::MaxLanes(DT());
  const float* HWY_RESTRICT w[MR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) w[i] = t.w[row + i];
  hn::Vec<DT> sum[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) sum[i][n] = hn::Zero(d);
  const int64_t step = t.w_step;
  for (int64_t k = 0; k < t.depth; ++k) {
    const float* HWY_RESTRICT b = t.b[k] + column;
    hn::Vec<DT> right[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) right[n] = hn::LoadU(d, b + n * lanes);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const auto left = hn::Set(d, w[i][k * step]);
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) sum[i][n] = hn::MulAdd(left, right[n], sum[i][n]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) {
      float* to = t.c[row + i] + column + n * lanes;
      hn::StoreU(t.accumulate ? hn::Add(hn::LoadU(d, to), sum[i][n]) : sum[i][n], d, to);
    }
}

template <class DT, int MR>
HWY_INLINE void WeightedColumns(const WeightedRows& t, int64_t row, int64_t column, int64_t n) {
  if (n == 3)
    WeightedBlock<DT, MR, 3>(t, row, column);
  else if (n == 2)
    WeightedBlock<DT, MR, 2>(t, row, column);
  else
    WeightedBlock<DT, MR, 1>(t, row, column);
}

using One = hn::CappedTag<float, 1>;

// Columns [column, column + n vectors) of every row, or of the rows [row, last).
template <class DT>
void WeightedStrip(const WeightedRows& t, int64_t row, int64_t last, int64_t column, int64_t n) {
  for (; row + block_rows <= last; row += block_rows)
    WeightedColumns<DT, block_rows>(t, row, column, n);
  for (; row < last; ++row) WeightedColumns<DT, 1>(t, row, column, n);
}

void WeightedRange(const WeightedRows& t, int64_t row, int64_t last) {
  const int64_t end = t.first + t.columns;
  int64_t column = t.first;
  while (column + width <= end) {
    const int64_t left = (end - column) / width;
    const int64_t take = left == 4 ? 2 : left < block_panels ? left : block_panels;
    WeightedStrip<D>(t, row, last, column, take);
    column += take * width;
  }
  for (; column < end; ++column) WeightedStrip<One>(t, row, last, column, 1);
}

void Weighted(const WeightedRows& t) {
  if (!t.rows_outside) return WeightedRange(t, 0, t.rows);
  for (int64_t row = 0; row < t.rows; row += block_rows)
    WeightedRange(t, row, HWY_MIN(row + block_rows, t.rows));
}

// The byte shifted into the place of fp16's exponent and mantissa is the number times 2^-8,
// subnormal or not.
void LoadE4m3(const uint8_t* src, int64_t n, float scale, float* dst) {
  const D d;
  const hn::Rebind<uint8_t, D> d8;
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<hwy::float16_t, D> half;
  const auto one = [&](const uint8_t* from) HWY_ATTR {
    const auto bits = hn::PromoteTo(d16, hn::LoadU(d8, from));
    const auto magnitude = hn::And(bits, hn::Set(d16, 0x7f));
    const auto sign = hn::ShiftLeft<8>(hn::And(bits, hn::Set(d16, 0x80)));
    const auto number = hn::Or(sign, hn::ShiftLeft<7>(magnitude));
    const auto nan = hn::Set(d16, 0x7e00);
    const auto chosen = hn::IfThenElse(hn::Eq(magnitude, hn::Set(d16, 0x7f)), nan, number);
    const V x = hn::PromoteTo(d, hn::BitCast(half, chosen));
    return hn::Mul(hn::Mul(x, hn::Set(d, 256.0f)), hn::Set(d, scale));
  };
  int64_t i = 0;
  for (; i + width <= n; i += width) hn::StoreU(one(src + i), d, dst + i);
  if (i == n) return;
  HWY_ALIGN uint8_t rest[max_lanes] = {};
  HWY_ALIGN float numbers[max_lanes];
  for (int64_t j = i; j < n; ++j) rest[j - i] = src[j];
  hn::StoreU(one(rest), d, numbers);
  for (int64_t j = i; j < n; ++j) dst[j] = numbers[j - i];
}

}  // namespace HWY_NAMESPACE
}  // namespace talea::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace talea::cpu {

HWY_EXPORT(Gather);
HWY_EXPORT(Weighted);
HWY_EXPORT(LoadE4m3);

void multiply(const GatherProduct& t) { HWY_DYNAMIC_DISPATCH(Gather)(t); }
void multiply(const WeightedRows& t) { HWY_DYNAMIC_DISPATCH(Weighted)(t); }
void load_e4m3(const void* src, int64_t n, float scale, float* dst) {
  HWY_DYNAMIC_DISPATCH(LoadE4m3)(static_cast<const uint8_t*>(src), n, scale, dst);
}

void transpose_to_panels(const float* const* src, int64_t rows, int64_t depth, float* dst,
                         int64_t panel) {
  const int64_t width = lanes();
  for (int64_t first = 0; first < rows; first += width, dst += panel) {
    const int64_t some = std::min(width, rows - first);
    if (some < width) std::fill_n(dst, depth * width, 0.0f);
    // Pieces of a row, so that what is written stays in the first cache.
    for (int64_t k = 0; k < depth; k += 16)
      for (int64_t i = 0; i < some; ++i) {
        const float* from = src[first + i];
        const int64_t end = std::min(k + 16, depth);
        for (int64_t j = k; j < end; ++j) dst[j * width + i] = from[j];
      }
  }
}

}  // namespace talea::cpu
#endif
