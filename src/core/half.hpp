// What: host conversions of bf16, fp16 and FP8, and typed loads and stores of single tensor
// elements.
// Why: the reference lane, the tests and the readers share one definition of rounding.
// Never: used in a hot loop; lanes convert whole tiles themselves.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "talea/tensor.hpp"

namespace talea {

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Round to nearest even; NaN stays a quiet NaN.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  return sign ? -magnitude : magnitude;
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {  // below the smallest normal: one rounding on a fixed-point grid
    const float scaled = std::bit_cast<float>(magnitude) * 16777216.0f;  // exact, unit 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(scaled)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// OCP E4M3: bias 7, no infinity, 0x7f and 0xff are NaN, the largest number is 448.
inline float e4m3_to_float(uint8_t bits) {
  const uint32_t exponent = (bits >> 3) & 0xfu, mantissa = bits & 7u;
  float magnitude = NAN;
  if ((bits & 0x7fu) != 0x7fu)
    magnitude = exponent == 0
                    ? std::ldexp(static_cast<float>(mantissa), -9)
                    : std::ldexp(static_cast<float>(8 + mantissa), static_cast<int>(exponent) - 10);
  return bits & 0x80u ? -magnitude : magnitude;
}

// Round to nearest even; what rounds beyond 448 is NaN, as in PyTorch.
inline uint8_t float_to_e4m3(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::abs(value);
  if (!(magnitude <= 464.0f)) return sign | 0x7f;
  if (magnitude < 0x1p-6f)  // below the smallest normal: one rounding on a grid of 2^-9
    return static_cast<uint8_t>(sign | static_cast<uint8_t>(std::nearbyint(magnitude * 512.0f)));
  const uint32_t bits = std::bit_cast<uint32_t>(magnitude);
  const uint32_t rounded = bits + 0x7ffffu + ((bits >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded - 0x3c000000u) >> 20));
}

// A double rounded once to bf16 or fp16 (through odd-rounded float, so that no double rounding).
inline float round_to_odd_float(double value) {
  const float nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || std::isnan(value) || std::isinf(nearest))
    return nearest;
  if (std::bit_cast<uint32_t>(nearest) & 1u) return nearest;
  const bool above = static_cast<double>(nearest) > value;
  return std::nextafter(nearest, above ? -INFINITY : INFINITY);
}

inline double load_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[index];
    case DType::f64:
      return static_cast<const double*>(data)[index];
    case DType::bf16:
      return bf16_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::f16:
      return f16_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::i32:
      return static_cast<const int32_t*>(data)[index];
    case DType::i64:
      return static_cast<double>(static_cast<const int64_t*>(data)[index]);
    case DType::f8_e4m3:
      return e4m3_to_float(static_cast<const uint8_t*>(data)[index]);
    case DType::u8:
      return static_cast<const uint8_t*>(data)[index];
  }
  return NAN;
}

inline void store_element(void* data, DType dtype, int64_t index, double value) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case DType::f64:
      static_cast<double*>(data)[index] = value;
      break;
    case DType::bf16:
      static_cast<uint16_t*>(data)[index] = float_to_bf16(round_to_odd_float(value));
      break;
    case DType::f16:
      static_cast<uint16_t*>(data)[index] = float_to_f16(round_to_odd_float(value));
      break;
    case DType::i32:
      static_cast<int32_t*>(data)[index] = static_cast<int32_t>(value);
      break;
    case DType::i64:
      static_cast<int64_t*>(data)[index] = static_cast<int64_t>(value);
      break;
    case DType::f8_e4m3:
      static_cast<uint8_t*>(data)[index] = float_to_e4m3(round_to_odd_float(value));
      break;
    case DType::u8:
      static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(value);
      break;
  }
}

inline int64_t load_index(const void* data, DType dtype, int64_t index) {
  return dtype == DType::i32 ? static_cast<const int32_t*>(data)[index]
                             : static_cast<const int64_t*>(data)[index];
}

inline double at(const Tensor& t, int64_t i) {
  return load_element(t.data, t.dtype, i * t.stride[0]);
}
inline double at(const Tensor& t, int64_t i, int64_t j) {
  return load_element(t.data, t.dtype, i * t.stride[0] + j * t.stride[1]);
}
inline void put(const Tensor& t, int64_t i, double v) {
  store_element(t.data, t.dtype, t.rank == 0 ? 0 : i * t.stride[0], v);
}
inline void put(const Tensor& t, int64_t i, int64_t j, double v) {
  store_element(t.data, t.dtype, i * t.stride[0] + j * t.stride[1], v);
}
inline int64_t index_at(const Tensor& t, int64_t i) {
  return load_index(t.data, t.dtype, i * t.stride[0]);
}
inline int64_t index_at(const Tensor& t, int64_t i, int64_t j) {
  return load_index(t.data, t.dtype, i * t.stride[0] + j * t.stride[1]);
}

}  // namespace talea
