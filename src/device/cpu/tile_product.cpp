// What: the register kernel of tile_product.hpp, compiled once for each instruction set.
// Why: a library's product packs into hidden memory and lets its tail kernels change a row's bits
//      (docs/decisions/0001-own-tile-product.md).
// Never: lets the shape of a tile change the order in which an element is summed.
#include "device/cpu/tile_product.hpp"

#include "core/half.hpp"
#include "device/cpu/fetch.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/tile_product.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace talea::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, max_lanes>;
using V = hn::Vec<D>;
constexpr int64_t width = hn::MaxLanes(D());
// Registers: MR * NV sums, NV columns of B, one broadcast of A.
constexpr bool many_registers = HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON;
constexpr int block_rows = many_registers && width >= 8 ? 8 : 4;
constexpr int block_panels = 3;

template <int MR, int NV>
struct Sums {
  V v[MR][NV];
};

template <int MR, int NV>
HWY_INLINE void Step(Sums<MR, NV>& sums, const float* HWY_RESTRICT a, int64_t a_row,
                     const float* HWY_RESTRICT b, int64_t b_panel) {
  const D d;
  V column[NV];
#pragma GCC unroll 4
  for (int n = 0; n < NV; ++n) column[n] = hn::Load(d, b + n * b_panel);
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
    const V left = hn::Set(d, a[i * a_row]);
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) sums.v[i][n] = hn::MulAdd(left, column[n], sums.v[i][n]);
  }
}

// One block of registers: rows [0, MR) and panels [0, NV), the whole depth.
template <LeftForm F, int MR, int NV>
HWY_NOINLINE void Block(const TileProduct& t, const float* HWY_RESTRICT a,
                        const float* HWY_RESTRICT b, float* HWY_RESTRICT c, int64_t c_row,
                        int64_t c_panel, bool accumulate, Fetch& fetch) {
  const D d;
  Sums<MR, NV> sums;
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) sums.v[i][n] = hn::Zero(d);
  if (accumulate) {  // C is read only after the sums: by then it has come from wherever it was
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) __builtin_prefetch(c + i * c_row + n * c_panel, 1);
  }
  const int64_t b_panel = t.b_panel;
  constexpr int64_t every = F == LeftForm::panel ? width : Fetch::every;
  for (int64_t k = 0; k < t.depth; k += every) {
    fetch.Some();
    const int64_t run = HWY_MIN(every, t.depth - k);
    if constexpr (F == LeftForm::row_major) {
      for (int64_t j = 0; j < run; ++j, b += width)
        Step<MR, NV>(sums, a + k + j, t.a_stride, b, b_panel);
    } else if constexpr (F == LeftForm::panel_transposed) {
      for (int64_t j = 0; j < run; ++j, a += width, b += width)
        Step<MR, NV>(sums, a, 1, b, b_panel);
    } else {
      for (int64_t j = 0; j < run; ++j, b += width) Step<MR, NV>(sums, a + j, width, b, b_panel);
      a += t.a_stride;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) {
      float* to = c + i * c_row + n * c_panel;
      hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, to), sums.v[i][n]) : sums.v[i][n], d, to);
    }
}

// A block whose last panel reaches over the edge of C goes through a small buffer.
template <LeftForm F, int MR, int NV>
HWY_NOINLINE void EdgeBlock(const TileProduct& t, const float* a, const float* b, float* c,
                            Fetch& fetch) {
  HWY_ALIGN float buffer[MR * NV * max_lanes];
  Block<F, MR, NV>(t, a, b, buffer, NV * width, width, false, fetch);
  for (int i = 0; i < MR; ++i)
    for (int n = 0; n < NV; ++n) {
      const int64_t columns = n == NV - 1 ? t.last_columns : width;
      float* to = c + i * t.c_row + n * t.c_panel;
      const float* from = buffer + (i * NV + n) * width;
      for (int64_t j = 0; j < columns; ++j) to[j] = t.accumulate ? to[j] + from[j] : from[j];
    }
}

template <LeftForm F, int MR, int NV>
HWY_INLINE void Rows(const TileProduct& t, int64_t panel, int64_t row, Fetch& fetch) {
  const float* a = t.a;
  if constexpr (F == LeftForm::row_major)
    a += row * t.a_stride;
  else if constexpr (F == LeftForm::panel)
    a += row * width;
  else
    a += row / width * t.a_stride + row % width;
  const float* b = t.b + panel * t.b_panel;
  float* c = t.c + row * t.c_row + panel * t.c_panel;
  if (t.last_columns > 0 && panel + NV == t.panels)
    EdgeBlock<F, MR, NV>(t, a, b, c, fetch);
  else
    Block<F, MR, NV>(t, a, b, c, t.c_row, t.c_panel, t.accumulate, fetch);
}

template <LeftForm F, int NV>
void Panels(const TileProduct& t, int64_t panel, Fetch& fetch) {
  int64_t row = 0;
  for (; row + block_rows <= t.rows; row += block_rows)
    Rows<F, block_rows, NV>(t, panel, row, fetch);
  for (; row < t.rows; ++row) Rows<F, 1, NV>(t, panel, row, fetch);
}

template <LeftForm F>
void All(const TileProduct& t) {
  Fetch fetch(t.ahead, (t.rows / block_rows) * ((t.panels + block_panels - 1) / block_panels) *
                           ((t.depth + Fetch::every - 1) / Fetch::every));
  for (int64_t panel = 0; panel < t.panels;) {
    const int64_t left = t.panels - panel;
    const int64_t take = left == 4 ? 2 : left < block_panels ? left : block_panels;
    if (take == 3)
      Panels<F, 3>(t, panel, fetch);
    else if (take == 2)
      Panels<F, 2>(t, panel, fetch);
    else
      Panels<F, 1>(t, panel, fetch);
    panel += take;
  }
}

void Multiply(const TileProduct& t) {
  switch (t.form) {
    case LeftForm::row_major:
      return All<LeftForm::row_major>(t);
    case LeftForm::panel:
      return All<LeftForm::panel>(t);
    case LeftForm::panel_transposed:
      return All<LeftForm::panel_transposed>(t);
  }
}

int64_t Lanes() { return width; }
const char* IsaName() { return hwy::TargetName(HWY_TARGET); }

// One vector of a contiguous row as fp32.
HWY_INLINE V Widened(const float* from) { return hn::LoadU(D(), from); }
HWY_INLINE V Widened(const uint16_t* from) {  // bf16
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
}
HWY_INLINE V Widened(const hwy::float16_t* from) {
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(D(), hn::LoadU(d16, from));
}

// Whole vectors of contiguous rows, the one of columns [i, i + width) to dst + i * step. Returns
// the first column not done; what is left over goes element by element in the caller.
template <typename T>
int64_t LoadVectors(const RowBlock& b, float* dst, int64_t step, int64_t row_step) {
  const D d;
  const int64_t whole = b.n / width * width;
  for (int64_t k = 0; whole > 0 && k < b.rows; ++k, dst += row_step) {
    // Formed for what is read alone: of nothing, and of one row, a stride may be any number.
    const T* const from = static_cast<const T*>(b.src) + b.first + k * b.row_stride;
    for (int64_t i = 0; i < whole; i += width) hn::StoreU(Widened(from + i), d, dst + i * step);
  }
  return whole;
}

int64_t LoadContiguous(const RowBlock& b, float* dst, int64_t step, int64_t row_step) {
  if (b.dtype == DType::f32) return LoadVectors<float>(b, dst, step, row_step);
  if (b.dtype == DType::bf16) return LoadVectors<uint16_t>(b, dst, step, row_step);
  if (b.dtype == DType::f16) return LoadVectors<hwy::float16_t>(b, dst, step, row_step);
  return 0;
}

// Rounded to nearest even, NaN to a quiet NaN: bit for bit as core/half.hpp has it.
HWY_INLINE void Narrow(V x, uint16_t* to) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::BitCast(du, x), high = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(high, hn::Set(du, 1u));
  const auto near = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu))));
  const auto quiet = hn::Or(high, hn::Set(du, 0x40u));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(x));
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, hn::IfThenElse(is_nan, quiet, near))), d16, to);
}

// Whole vectors of a contiguous 16-bit row; returns how many elements.
int64_t StoreContiguous(const float* src, int64_t n, uint16_t* to, bool bf16) {
  const D d;
  const hn::Rebind<hwy::float16_t, D> half;
  int64_t i = 0;
  if (bf16)
    for (; i + width <= n; i += width) Narrow(hn::LoadU(d, src + i), to + i);
  else
    for (; i + width <= n; i += width)
      hn::StoreU(hn::DemoteTo(half, hn::LoadU(d, src + i)), half,
                 reinterpret_cast<hwy::float16_t*>(to + i));
  return i;
}

}  // namespace HWY_NAMESPACE
}  // namespace talea::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace talea::cpu {

HWY_EXPORT(Multiply);
HWY_EXPORT(Lanes);
HWY_EXPORT(IsaName);
HWY_EXPORT(LoadContiguous);
HWY_EXPORT(StoreContiguous);

int64_t lanes() { return HWY_DYNAMIC_DISPATCH(Lanes)(); }
const char* isa_name() { return HWY_DYNAMIC_DISPATCH(IsaName)(); }
void multiply(const TileProduct& t) { HWY_DYNAMIC_DISPATCH(Multiply)(t); }

void load_row(const void* src, DType dtype, int64_t first, int64_t stride, int64_t n, float* dst) {
  int64_t i = 0;
  if (stride == 1)
    i = HWY_DYNAMIC_DISPATCH(LoadContiguous)({src, dtype, first, 0, 1, 1, n}, dst, 1, 0);
  if (dtype == DType::f32)
    for (; i < n; ++i) dst[i] = static_cast<const float*>(src)[first + i * stride];
  for (; i < n; ++i) dst[i] = static_cast<float>(load_element(src, dtype, first + i * stride));
}

void load_panels(const RowBlock& b, float* dst, int64_t panel) {
  const int64_t width = lanes(), padded = (b.n + width - 1) / width * width;
  // A vector is a panel's row: from one to the next are `panel` floats of dst, `width` of the row.
  const int64_t done =
      b.stride == 1 ? HWY_DYNAMIC_DISPATCH(LoadContiguous)(b, dst, panel / width, width) : 0;
  for (int64_t k = 0; k < b.rows; ++k)
    for (int64_t j = done; j < padded; ++j) {
      const int64_t at = b.first + k * b.row_stride + j * b.stride;
      dst[j / width * panel + k * width + j % width] =
          j < b.n ? static_cast<float>(load_element(b.src, b.dtype, at)) : 0.0f;
    }
}

void store_row(const float* src, int64_t n, void* dst, DType dtype, int64_t first, int64_t stride) {
  if (n == 0) return;
  if (dtype == DType::f32) {
    float* to = static_cast<float*>(dst) + first;
    for (int64_t i = 0; i < n; ++i) to[i * stride] = src[i];
  } else if (is_16bit(dtype)) {
    const bool bf16 = dtype == DType::bf16;
    uint16_t* to = static_cast<uint16_t*>(dst) + first;
    int64_t i = stride == 1 ? HWY_DYNAMIC_DISPATCH(StoreContiguous)(src, n, to, bf16) : 0;
    for (; i < n; ++i) to[i * stride] = bf16 ? float_to_bf16(src[i]) : float_to_f16(src[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) store_element(dst, dtype, first + i * stride, double{src[i]});
  }
}

}  // namespace talea::cpu
#endif
