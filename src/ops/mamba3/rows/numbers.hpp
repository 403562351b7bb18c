// What: numbers of the scan in fp32: turns, their sines, gates, elements of any dtype.
// Why: one text for the device and for a test on a host.
// Never: compiled for both at once: a host file has no device code, a device file no host code.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/mutant.hpp"
#include "ops/mamba3/rows/args.hpp"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define TALEA_SCAN __device__ __forceinline__
// Before a loop. A chunk runs through all of a kernel once: what does not fit in the cache of
// instructions is fetched anew each time, and costs more than a branch.
#define TALEA_ROLLED _Pragma("unroll 1")
#else
#include "core/half.hpp"
#define TALEA_SCAN inline
#define TALEA_ROLLED
#endif

namespace talea::mamba3::cuda {

#ifdef __CUDACC__
using Bf16 = __nv_bfloat16;
TALEA_SCAN float widen(float x) { return x; }
TALEA_SCAN float widen(Bf16 x) { return __bfloat162float(x); }
TALEA_SCAN void narrow(float x, float& to) { to = x; }
TALEA_SCAN void narrow(float x, Bf16& to) { to = __float2bfloat16_rn(x); }
TALEA_SCAN float number(const Bf16* from, int64_t at) { return __bfloat162float(from[at]); }
TALEA_SCAN float number(const __half* from, int64_t at) { return __half2float(from[at]); }
using Half = __half;
TALEA_SCAN void put(Bf16* to, int64_t at, float x) { to[at] = __float2bfloat16_rn(x); }
TALEA_SCAN void put(Half* to, int64_t at, float x) { to[at] = __float2half_rn(x); }
TALEA_SCAN void sine_cosine_pi(float x, float& sine, float& cosine) {
  sincospif(x, &sine, &cosine);
}
TALEA_SCAN int64_t nearest_integer(float x) { return __float2ll_rn(x); }
#else
struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
TALEA_SCAN float widen(float x) { return x; }
TALEA_SCAN float widen(Bf16 x) { return bf16_to_float(x.bits); }
TALEA_SCAN void narrow(float x, float& to) { to = x; }
TALEA_SCAN void narrow(float x, Bf16& to) { to.bits = float_to_bf16(x); }
TALEA_SCAN float number(const Bf16* from, int64_t at) { return bf16_to_float(from[at].bits); }
TALEA_SCAN float number(const Half* from, int64_t at) { return f16_to_float(from[at].bits); }
TALEA_SCAN void put(Bf16* to, int64_t at, float x) { to[at].bits = float_to_bf16(x); }
TALEA_SCAN void put(Half* to, int64_t at, float x) { to[at].bits = float_to_f16(x); }
TALEA_SCAN void sine_cosine_pi(float x, float& sine, float& cosine) {
  constexpr double pi = 3.14159265358979323846;
  sine = static_cast<float>(std::sin(pi * static_cast<double>(x)));
  cosine = static_cast<float>(std::cos(pi * static_cast<double>(x)));
}
TALEA_SCAN int64_t nearest_integer(float x) { return static_cast<int64_t>(std::nearbyint(x)); }
#endif

TALEA_SCAN float load(const View& v, int64_t at) {
  if (v.dtype == DType::bf16) return number(static_cast<const Bf16*>(v.data), at);
  if (v.dtype == DType::f16) return number(static_cast<const Half*>(v.data), at);
  return static_cast<const float*>(v.data)[at];
}

// An element as it lies in memory, of a tensor that the call does not write: what is read before it
// is used can be under way together.
TALEA_SCAN uint32_t bits_at(const View& v, int64_t at) {
#ifdef __CUDACC__
  if (v.dtype == DType::f32) return __ldg(static_cast<const uint32_t*>(v.data) + at);
  return __ldg(static_cast<const uint16_t*>(v.data) + at);
#else
  uint32_t bits = 0;
  const int64_t size = size_of(v.dtype);
  std::memcpy(&bits, static_cast<const char*>(v.data) + at * size, static_cast<size_t>(size));
  return bits;
#endif
}
TALEA_SCAN float float_of(uint32_t bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}
TALEA_SCAN float half_of(uint32_t bits) {
#ifdef __CUDACC__
  return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
#else
  return f16_to_float(static_cast<uint16_t>(bits));
#endif
}
TALEA_SCAN float number_of(DType dtype, uint32_t bits) {
  return dtype == DType::f32    ? float_of(bits)
         : dtype == DType::bf16 ? float_of(bits << 16)
                                : half_of(bits);
}
TALEA_SCAN float read(const View& v, int64_t at) { return number_of(v.dtype, bits_at(v, at)); }

struct Two {
  float a, b;
};
// Two neighbours at an even place (Sizes::even_rows).
struct TwoBits {
  uint32_t low, high;
};
TALEA_SCAN TwoBits two_bits_at(const View& v, int64_t at) {
#ifdef __CUDACC__
  if (v.dtype == DType::f32) {
    const uint2 x =
        __ldg(reinterpret_cast<const uint2*>(static_cast<const uint32_t*>(v.data) + at));
    return {x.x, x.y};
  }
  return {__ldg(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(v.data) + at)), 0};
#else
  if (v.dtype == DType::f32) return {bits_at(v, at), bits_at(v, at + 1)};
  return {bits_at(v, at) | bits_at(v, at + 1) << 16, 0};
#endif
}
TALEA_SCAN Two two_of(DType dtype, TwoBits x) {
  if (dtype == DType::f32) return {float_of(x.low), float_of(x.high)};
  if (dtype == DType::bf16) return {float_of(x.low << 16), float_of(x.low & 0xffff0000u)};
  return {half_of(x.low & 0xffffu), half_of(x.low >> 16)};
}
#ifdef __CUDACC__
TALEA_SCAN void put_two(Bf16* to, Two x) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x.a, x.b);
}
TALEA_SCAN void put_two(float* to, Two x) { *reinterpret_cast<float2*>(to) = {x.a, x.b}; }
#else
template <class T>
TALEA_SCAN void put_two(T* to, Two x) {
  narrow(x.a, to[0]), narrow(x.b, to[1]);
}
#endif

TALEA_SCAN void store(const View& v, int64_t at, float x) {
  if (v.dtype == DType::bf16) return put(static_cast<Bf16*>(v.data), at, x);
  if (v.dtype == DType::f16) return put(static_cast<Half*>(v.data), at, x);
  static_cast<float*>(v.data)[at] = x;
}
TALEA_SCAN int64_t at(const View& v, int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0,
                      int64_t e = 0) {
  return a * v.stride[0] + b * v.stride[1] + c * v.stride[2] + d * v.stride[3] + e * v.stride[4];
}
TALEA_SCAN float load_or(float neutral, const View& v, int64_t place) {
  return v.data ? load(v, place) : neutral;
}
TALEA_SCAN float read_or(float neutral, const View& v, int64_t place) {
  return v.data ? read(v, place) : neutral;
}

// Not finite: what adds nothing and taints its pair from there on. No finite number becomes it.
constexpr uint64_t no_turn = 0x7fffffffffffffffu;

// A number of turns, modulo one, in units of 2^-64.
TALEA_SCAN uint64_t to_turn(float turns) {
  if (!(fabsf(turns) <= 3.0e38f)) return no_turn;
  float rest = turns - rintf(turns);
  if (rest >= 0.5f) rest = -0.5f;
  return static_cast<uint64_t>(nearest_integer(rest * 18446744073709551616.0f));
}

// 1 - tanh^2 without the difference, of which nothing is left where tanh is near 1.
TALEA_SCAN float slope_of_tanh(float x) {
  const float e = expf(-2 * fabsf(x)), by = 1 / (1 + e);
  return 4 * e * by * by;
}

// The octant by integers, the rest in fp32.
TALEA_SCAN void sine_cosine(uint64_t turn, float& sine, float& cosine) {
  const auto high = static_cast<uint32_t>(turn >> 32);
  const uint32_t quadrant = (high + (1u << 29)) >> 30;
  const auto rest = static_cast<int32_t>(high - (quadrant << 30));
  float s, c;
  sine_cosine_pi(static_cast<float>(rest) * 4.656612873077392578125e-10f, s, c);  // 2^-31
  sine = (quadrant & 1) ? c : s;
  cosine = (quadrant & 1) ? s : c;
  if (quadrant & 2) sine = -sine;
  if ((quadrant + 1) & 2) cosine = -cosine;
}

// In [0, 2 pi) as fp32.
TALEA_SCAN float radians(uint64_t turn) {
  const double angle =
      static_cast<double>(turn) * 5.421010862427522170037e-20 * 6.283185307179586476925286766559;
  const auto rounded = static_cast<float>(angle);
  return rounded < 6.2831855f ? rounded : 0.0f;
}
// Of an angle in radians, as the other lanes have it: reduced in fp64.
TALEA_SCAN uint64_t turn_of_radians(float angle) {
  if (!(fabsf(angle) <= 3.0e38f)) return no_turn;
  const double turns = static_cast<double>(angle) / 6.283185307179586476925286766559;
  double rest = turns - rint(turns);
  if (rest >= 0.5) rest -= 1;
  return static_cast<uint64_t>(static_cast<int64_t>(rint(rest * 18446744073709551616.0)));
}

TALEA_SCAN float sigmoid(float x) {
#ifdef __CUDACC__
  return __fdividef(1.0f, 1.0f + expf(-x));
#else
  return 1.0f / (1.0f + expf(-x));
#endif
}
// What of x is left behind a decay of a: nothing behind a reset, not 0 * Inf.
TALEA_SCAN float left_of(float a, float x) { return a == 0 ? 0.0f : a * x; }

// The columns of pair i. Without an even N only neighbours are pairs.
struct PairColumns {
  int u, w;
};
TALEA_SCAN PairColumns pair_columns(const Sizes& s, int i) {
  if (s.halves) return {i, i + s.columns / 2};
  return {2 * i, 2 * i + 1};
}
TALEA_SCAN int parameter_count(const Sizes& s) {
  return s.rank * (2 * s.columns + 3 * s.values) + s.values + 1;
}
TALEA_SCAN int64_t chunks_of(const Sizes& s, int64_t tokens) {
  return (tokens + s.chunk - 1) / s.chunk;
}
TALEA_SCAN int64_t group_of(const Sizes& s, int64_t head) {
  return (s.head_offset + head) / s.heads_per_group;
}

// Rows of K and M of a product that some row tile needs: all, or what rows of tokens reach.
struct Span {
  enum Kind { all, up_to_token, from_token } kind = all;
  int depth = 0;
  int rank = 1;
  TALEA_SCAN int begin(int row) const {
    return kind == from_token ? row / rank * rank / 16 * 16 : 0;
  }
  TALEA_SCAN int end(int row) const {  // row: the first of its tile of 16
    if (kind != up_to_token) return depth;
    const int last = ((row + 15) / rank + 1) * rank;
    const int whole = (last + 15) / 16 * 16;
    return whole < depth ? whole : depth;
  }
};

// An operand of type T: element (i, k) at i * stride + k, or with `across` at k * stride + i.
template <class T, bool across>
struct Operand {
  const T* data;
  int stride;
};
template <class T>
using Rows = Operand<T, false>;
template <class T>
using Columns = Operand<T, true>;

}  // namespace talea::mamba3::cuda
