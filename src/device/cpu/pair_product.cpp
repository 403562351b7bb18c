// What: pair_product.hpp in AVX-512 intrinsics; Highway 1.0.3 has no target with this instruction.
// Why: the fp32 kernel of tile_product.cpp, with pairs in place of numbers.
// Never: lets the shape of a tile change the order in which an element is summed.
#include "device/cpu/pair_product.hpp"

#include <algorithm>
#include <cmath>

#include "core/fail.hpp"
#include "core/half.hpp"
#include "device/cpu/fetch.hpp"
#include "device/cpu/onednn.hpp"
#include "hwy/base.h"

#if HWY_ARCH_X86_64
#include <immintrin.h>

#if HWY_COMPILER_GCC_ACTUAL  // its own header leaves what a mask never lets through uninitialised
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
namespace talea::cpu {
namespace {

constexpr int64_t width = 16;
constexpr int64_t twin_bytes = 2 * width * 4;  // of two k
constexpr int block_rows = 8, block_panels = 3;

HWY_INLINE __m512bh pair_of(const char* at) {
  int32_t both;
  __builtin_memcpy(&both, at, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

// Bytes from row 0 of a block to row i.
template <LeftForm F>
HWY_INLINE int64_t left_row(const PairProduct& t, int64_t i) {
  if constexpr (F == LeftForm::row_major) return i * t.a_stride * 2;
  if constexpr (F == LeftForm::panel_transposed) return i / width * t.a_stride * 4 + i % width * 4;
  return i / 2 * twin_bytes + twin_bytes / 2 + i % 2 * (twin_bytes / 4);
}

template <int MR, int NV>
struct Sums {
  __m512 v[MR][NV];
};

// `row(i)`: bytes from a to row i of the block.
template <int MR, int NV, class Row>
HWY_INLINE void step(Sums<MR, NV>& sums, const char* a, Row row, const uint16_t* b,
                     int64_t b_panel) {
  __m512bh column[NV];
#pragma GCC unroll 4
  for (int n = 0; n < NV; ++n) column[n] = (__m512bh)_mm512_load_si512(b + n * b_panel);
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
    const __m512bh left = pair_of(a + row(i));
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) sums.v[i][n] = _mm512_dpbf16_ps(sums.v[i][n], left, column[n]);
  }
}

struct Target {
  float* c;
  int64_t row, panel;
  bool accumulate;
};

template <LeftForm F, int MR, int NV>
HWY_NOINLINE void block(const PairProduct& t, const char* a, const uint16_t* b, const Target& to,
                        Fetch& fetch) {
  Sums<MR, NV> sums;
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) sums.v[i][n] = _mm512_setzero_ps();
  if (to.accumulate) {
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) __builtin_prefetch(to.c + i * to.row + n * to.panel, 1);
  }
  const int64_t b_panel = t.b_panel, pairs = t.depth / 2, a_row = t.a_stride * 2;
  constexpr int64_t every = F == LeftForm::panel ? width / 2 : Fetch::every;
  for (int64_t k = 0; k < pairs; k += every) {
    fetch.Some();
    const int64_t run = std::min(every, pairs - k);
    for (int64_t j = 0; j < run; ++j, b += 2 * width) {
      if constexpr (F == LeftForm::row_major)
        step<MR, NV>(
            sums, a + 4 * (k + j), [=](int i) { return i * a_row; }, b, b_panel);
      else if constexpr (F == LeftForm::panel_transposed)
        step<MR, NV>(
            sums, a + (k + j) * twin_bytes, [](int i) { return int64_t{i} * 4; }, b, b_panel);
      else
        step<MR, NV>(
            sums, a + 4 * j, [](int i) { return i / 2 * twin_bytes + i % 2 * (twin_bytes / 4); }, b,
            b_panel);
    }
    if constexpr (F == LeftForm::panel) a += t.a_stride * 4;
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) {
      float* at = to.c + i * to.row + n * to.panel;
      const __m512 sum = sums.v[i][n];
      _mm512_storeu_ps(at, to.accumulate ? _mm512_add_ps(_mm512_loadu_ps(at), sum) : sum);
    }
}

// A block whose last panel reaches over the edge of C goes through a small buffer.
template <LeftForm F, int MR, int NV>
HWY_NOINLINE void edge_block(const PairProduct& t, const char* a, const uint16_t* b,
                             const Target& to, Fetch& fetch) {
  alignas(64) float buffer[MR * NV * width];
  block<F, MR, NV>(t, a, b, {buffer, NV * width, width, false}, fetch);
  for (int i = 0; i < MR; ++i)
    for (int n = 0; n < NV; ++n) {
      const int64_t columns = n == NV - 1 ? t.last_columns : width;
      float* at = to.c + i * to.row + n * to.panel;
      const float* from = buffer + (i * NV + n) * width;
      for (int64_t j = 0; j < columns; ++j) at[j] = to.accumulate ? at[j] + from[j] : from[j];
    }
}

template <LeftForm F, int MR, int NV>
HWY_INLINE void rows(const PairProduct& t, int64_t panel, int64_t row, Fetch& fetch) {
  const char* a = static_cast<const char*>(t.a) + left_row<F>(t, row);
  const uint16_t* b = t.b + panel * t.b_panel;
  const Target to = {t.c + row * t.c_row + panel * t.c_panel, t.c_row, t.c_panel, t.accumulate};
  if (t.last_columns > 0 && panel + NV == t.panels)
    edge_block<F, MR, NV>(t, a, b, to, fetch);
  else
    block<F, MR, NV>(t, a, b, to, fetch);
}

template <LeftForm F, int NV>
void panels(const PairProduct& t, int64_t panel, Fetch& fetch) {
  int64_t row = 0;
  for (; row + block_rows <= t.rows; row += block_rows)
    rows<F, block_rows, NV>(t, panel, row, fetch);
  for (; row < t.rows; ++row) rows<F, 1, NV>(t, panel, row, fetch);
}

template <LeftForm F>
void all(const PairProduct& t) {
  Fetch fetch(t.ahead, (t.rows / block_rows) * ((t.panels + block_panels - 1) / block_panels) *
                           ((t.depth / 2 + Fetch::every - 1) / Fetch::every));
  for (int64_t panel = 0; panel < t.panels;) {
    const int64_t left = t.panels - panel;
    const int64_t take = left == 4 ? 2 : std::min<int64_t>(left, block_panels);
    if (take == 3)
      panels<F, 3>(t, panel, fetch);
    else if (take == 2)
      panels<F, 2>(t, panel, fetch);
    else
      panels<F, 1>(t, panel, fetch);
    panel += take;
  }
}

// bf16 in the low half of each lane: to nearest even, NaN to a quiet NaN, as core/half.hpp has it.
// The CPU's own conversion takes numbers below 2^-126 for 0.
HWY_INLINE __m512i rounded(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i carry = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, carry), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(near, nan, high, _mm512_set1_epi32(0x40));
}

// One entry a large number of column v, as far as there is room.
void keep_rest(__m512 exact, __m512i near, __mmask16 large, int64_t v, uint32_t* rest) {
  alignas(64) float remainder[width];
  _mm512_store_ps(remainder,
                  _mm512_sub_ps(exact, _mm512_castsi512_ps(_mm512_slli_epi32(near, 16))));
  for (uint32_t left = large; left != 0; left &= left - 1) {
    const int row = __builtin_ctz(left);
    if (!(std::abs(remainder[row]) < INFINITY)) continue;  // beyond bf16's range, or infinite
    const uint32_t low = float_to_bf16(remainder[row]);
    uint32_t* list = rest + row * Remainders::most;
    for (int64_t i = 0; low != 0 && low != 0x8000 && i < Remainders::most; ++i)
      if (list[i] == 0) {
        list[i] = static_cast<uint32_t>(v) << 16 | low;
        break;
      }
  }
}

HWY_INLINE __m512i narrow_one(const float* from, int64_t v, __m512 large, uint32_t* rest) {
  const __m512 exact = _mm512_loadu_ps(from);
  const __m512i near = rounded(exact);
  const __mmask16 outweighs = _mm512_cmp_ps_mask(_mm512_abs_ps(exact), large, _CMP_GT_OQ);
  if (HWY_UNLIKELY(outweighs != 0)) keep_rest(exact, near, outweighs, v, rest);
  return near;
}

void narrow(float* panel, int64_t columns, const float* large_of_rows, uint32_t* rest) {
  const __m512 large = _mm512_loadu_ps(large_of_rows);
  std::fill_n(rest, width * Remainders::most, 0u);
  for (int64_t v = 0; v < columns; v += 2, panel += 2 * width) {
    const __m512i first = narrow_one(panel, v, large, rest);
    const __m512i second =
        v + 1 < columns ? narrow_one(panel + width, v + 1, large, rest) : _mm512_setzero_si512();
    _mm512_storeu_si512(panel, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
    const __m512i rows = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(first)),
                                            _mm512_cvtepi32_epi16(second), 1);
    _mm512_storeu_si512(panel + width, rows);
  }
}

void add(const PairProduct& t, int64_t k, float factor, float* c) {
  const __m512 by = _mm512_set1_ps(factor);
  for (int64_t n = 0; n < t.panels; ++n) {
    const __m512i both = _mm512_loadu_si512(t.b + n * t.b_panel + k / 2 * 2 * width);
    const __m512i high = k % 2 == 0 ? _mm512_slli_epi32(both, 16)
                                    : _mm512_and_si512(both, _mm512_set1_epi32(~0xffff));
    const int64_t columns = n == t.panels - 1 && t.last_columns > 0 ? t.last_columns : width;
    const auto wanted = static_cast<__mmask16>((1u << columns) - 1);
    float* to = c + n * t.c_panel;
    const __m512 sum =
        _mm512_fmadd_ps(by, _mm512_castsi512_ps(high), _mm512_maskz_loadu_ps(wanted, to));
    _mm512_mask_storeu_ps(to, wanted, sum);
  }
}

HWY_INLINE __m512i sixteen(const uint16_t* from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Whole vectors of contiguous rows; returns the first column not done.
int64_t load_whole_pairs(const RowBlock& b, uint16_t* dst, int64_t panel) {
  const auto* src = static_cast<const uint16_t*>(b.src) + b.first;
  const int64_t whole = b.n / width * width;
  for (int64_t k = 0; k < b.rows; k += 2)
    for (int64_t j = 0; j < whole; j += width) {
      const uint16_t* at = src + k * b.row_stride + j;
      const __m512i second = k + 1 < b.rows ? _mm512_slli_epi32(sixteen(at + b.row_stride), 16)
                                            : _mm512_setzero_si512();
      _mm512_storeu_si512(dst + j / width * panel + k * width,
                          _mm512_or_si512(sixteen(at), second));
    }
  return whole;
}

}  // namespace
}  // namespace talea::cpu
HWY_POP_ATTRIBUTES
#endif

namespace talea::cpu {

float Remainders::value(uint32_t entry) { return bf16_to_float(static_cast<uint16_t>(entry)); }

#if HWY_ARCH_X86_64

bool native_bf16() {
  static const bool has = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           lanes() == width && onednn_may_use_bf16();
  }();
  return has;
}

void multiply(const PairProduct& t) {
  switch (t.form) {
    case LeftForm::row_major:
      return all<LeftForm::row_major>(t);
    case LeftForm::panel:
      return all<LeftForm::panel>(t);
    case LeftForm::panel_transposed:
      return all<LeftForm::panel_transposed>(t);
  }
}

void narrow_to_twins(float* panel, int64_t columns, const float* large, uint32_t* rest) {
  narrow(panel, columns, large, rest);
}
void add_row(const PairProduct& t, int64_t k, float factor, float* c) { add(t, k, factor, c); }

void load_pairs(const RowBlock& b, uint16_t* dst, int64_t panel) {
  const int64_t padded = (b.n + width - 1) / width * width;
  const auto* src = static_cast<const uint16_t*>(b.src);
  const int64_t done = b.stride == 1 ? load_whole_pairs(b, dst, panel) : 0;
  for (int64_t k = 0; k < b.rows + b.rows % 2; ++k)
    for (int64_t j = done; j < padded; ++j)
      dst[j / width * panel + k / 2 * 2 * width + j % width * 2 + k % 2] =
          k < b.rows && j < b.n ? src[b.first + k * b.row_stride + j * b.stride] : uint16_t{0};
}

#else

bool native_bf16() { return false; }
void multiply(const PairProduct&) { fail(ErrorKind::runtime, "no bf16 products on this CPU"); }
void narrow_to_twins(float*, int64_t, const float*, uint32_t*) {
  fail(ErrorKind::runtime, "no bf16 products on this CPU");
}
void add_row(const PairProduct&, int64_t, float, float*) {
  fail(ErrorKind::runtime, "no bf16 products on this CPU");
}
void load_pairs(const RowBlock&, uint16_t*, int64_t) {
  fail(ErrorKind::runtime, "no bf16 products on this CPU");
}

#endif

}  // namespace talea::cpu
