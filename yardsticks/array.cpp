// What: layout, element access and 16-bit conversions of the test arrays.
// Why: the oracle reads inputs through code that the library does not use.
// Never: fast.
#include "yardsticks/array.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace talea::testing {
namespace {

struct Format {
  int mantissa_bits;  // stored
  int min_exponent;   // of the smallest normal
  int max_exponent;
};

constexpr Format bf16_format{7, -126, 127};
constexpr Format f16_format{10, -14, 15};

// By the definition: sign, exponent field, mantissa field.
double decode16(Format f, uint16_t bits) {
  const int exponent_bits = 15 - f.mantissa_bits;
  const int field = (bits >> f.mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << f.mantissa_bits) - 1);
  const double sign = (bits & 0x8000) ? -1.0 : 1.0;
  if (field == (1 << exponent_bits) - 1)
    return mantissa ? std::nan("") : sign * static_cast<double>(INFINITY);
  if (field == 0) return sign * std::ldexp(mantissa, f.min_exponent - f.mantissa_bits);
  return sign * std::ldexp((1 << f.mantissa_bits) + mantissa,
                           field - 1 + f.min_exponent - f.mantissa_bits);
}

// The same, once for every number there is: the yardsticks read each many times.
double decode_known(Format f, uint16_t bits) {
  static const auto table_of = [](Format g) {
    std::vector<double> all(size_t{1} << 16);
    for (size_t b = 0; b < all.size(); ++b) all[b] = decode16(g, static_cast<uint16_t>(b));
    return all;
  };
  static const std::vector<double> bf16 = table_of(bf16_format), f16 = table_of(f16_format);
  return (f.mantissa_bits == bf16_format.mantissa_bits ? bf16 : f16)[bits];
}

// To the nearest, ties to even, in the bits of a double; nothing of so small a number is left out.
uint16_t encode16(Format f, double value, uint16_t sign) {
  const auto bits = std::bit_cast<uint64_t>(std::fabs(value));
  const int own = static_cast<int>(bits >> 52) - 1023;
  const int exponent = std::max(own, f.min_exponent);
  const int shift = 52 - f.mantissa_bits + exponent - own;
  if (own > f.max_exponent || shift > 60)  // beyond all, or nearer to 0 than to the least
    return own > 0 ? sign | (((1 << (15 - f.mantissa_bits)) - 1) << f.mantissa_bits) : sign;
  const uint64_t whole = (bits & ((uint64_t{1} << 52) - 1)) | uint64_t{1} << 52;
  const uint64_t rest = whole & ((uint64_t{1} << shift) - 1), half = uint64_t{1} << (shift - 1);
  uint64_t units = whole >> shift;
  if (rest > half || (rest == half && units % 2 != 0)) ++units;
  // A round up to the next power of two carries into the exponent, beyond the last to infinity.
  return static_cast<uint16_t>(
      sign | (units + (static_cast<uint64_t>(exponent - f.min_exponent) << f.mantissa_bits)));
}

uint16_t encode16(Format f, long double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const int all_ones = ((1 << (15 - f.mantissa_bits)) - 1) << f.mantissa_bits;
  if (std::isnan(value)) return static_cast<uint16_t>(all_ones | (1 << (f.mantissa_bits - 1)));
  const long double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | all_ones);
  if (magnitude == 0) return sign;
  // Most numbers are those of a double: x87 takes ten times as long for the same.
  const auto narrow = static_cast<double>(value);
  if (static_cast<long double>(narrow) == value && magnitude >= 0x1p-1022L)
    return encode16(f, narrow, sign);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent - 1, f.min_exponent);
  // In units of the last place; a round up to the next power of two carries into the exponent.
  const long double exact = std::ldexp(magnitude, f.mantissa_bits - exponent);
  long long units = static_cast<long long>(exact);  // cut off; to the nearest, ties to even
  const long double rest = exact - static_cast<long double>(units);
  if (rest > 0.5L || (rest == 0.5L && units % 2 != 0)) ++units;
  long long bits = units + (static_cast<long long>(exponent - f.min_exponent) << f.mantissa_bits);
  if (bits > all_ones) bits = all_ones;
  return static_cast<uint16_t>(sign | bits);
}

}  // namespace

const char* name_of(View view) {
  constexpr const char* names[] = {"contiguous", "padded_rows", "transposed",
                                   "expanded",   "reversed",    "strided_columns"};
  return names[static_cast<int>(view)];
}

double decode(DType dtype, const void* data, int64_t index) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[index];
    case DType::f64:
      return static_cast<const double*>(data)[index];
    case DType::bf16:
      return decode_known(bf16_format, static_cast<const uint16_t*>(data)[index]);
    case DType::f16:
      return decode_known(f16_format, static_cast<const uint16_t*>(data)[index]);
    case DType::i32:
      return static_cast<const int32_t*>(data)[index];
    case DType::i64:
      return static_cast<double>(static_cast<const int64_t*>(data)[index]);
    case DType::f8_e4m3:  // not of this operator
    case DType::u8:
      break;
  }
  return std::nan("");
}

void encode(DType dtype, void* data, int64_t index, long double value) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      return;
    case DType::f64:
      static_cast<double*>(data)[index] = static_cast<double>(value);
      return;
    case DType::bf16:
      static_cast<uint16_t*>(data)[index] = encode16(bf16_format, value);
      return;
    case DType::f16:
      static_cast<uint16_t*>(data)[index] = encode16(f16_format, value);
      return;
    case DType::i32:
      static_cast<int32_t*>(data)[index] = static_cast<int32_t>(value);
      return;
    case DType::i64:
      static_cast<int64_t*>(data)[index] = static_cast<int64_t>(value);
      return;
    case DType::f8_e4m3:
    case DType::u8:
      return;
  }
}

long double rounded(DType dtype, long double value) {
  alignas(8) unsigned char cell[8];
  encode(dtype, cell, 0, value);
  return decode(dtype, cell, 0);
}

Array::Array(DType dtype, std::vector<int64_t> shape, View view, int64_t skew)
    : present_(true), dtype_(dtype), shape_(std::move(shape)) {
  const int64_t rows = shape_.size() > 0 ? shape_[0] : 1;
  const int64_t columns = shape_.size() > 1 ? shape_[1] : 1;
  const bool matrix = shape_.size() == 2;
  int64_t row = matrix ? columns : 1, column = 1, cells = rows * columns;
  first_ = guard_bytes / size_of(dtype) + skew;
  switch (view) {
    case View::contiguous:
      break;
    case View::padded_rows:
      row += 3;
      cells = rows * row;
      break;
    case View::transposed:
      if (matrix) {
        row = 1;
        column = rows;
      }
      break;
    case View::expanded:
      row = 0;
      cells = columns;
      break;
    case View::reversed:
      first_ += rows > 0 ? (rows - 1) * row : 0;
      row = -row;
      break;
    case View::strided_columns:
      if (matrix) {
        column = 2;
        row = 2 * columns + 1;
      } else {
        row = 2;
      }
      cells = rows * row + 2;
      break;
  }
  if (shape_.size() == 1) stride_ = {row};
  if (matrix) stride_ = {row, column};
  const int64_t bytes = (cells + skew) * size_of(dtype) + 2 * guard_bytes;
  // What is not written must not look right: NaN in every floating dtype, and no id of any row
  // (-1 is what a row without a ranking is given).
  block_.assign(static_cast<size_t>(bytes), std::byte(is_floating(dtype) ? 0xff : 0xa5));
}

int64_t Array::elements() const {
  int64_t n = 1;
  for (int64_t extent : shape_) n *= extent;
  return n;
}

int64_t Array::position(int64_t i, int64_t j) const {
  return first_ + (shape_.size() > 0 ? i * stride_[0] : 0) +
         (shape_.size() > 1 ? j * stride_[1] : 0);
}

long double Array::get(int64_t i, int64_t j) const {
  return decode(dtype_, block_.data(), position(i, j));
}

int64_t Array::integer(int64_t i, int64_t j) const {
  const int64_t p = position(i, j);
  return dtype_ == DType::i32 ? reinterpret_cast<const int32_t*>(block_.data())[p]
                              : reinterpret_cast<const int64_t*>(block_.data())[p];
}

void Array::set(int64_t i, int64_t j, long double value) {
  encode(dtype_, block_.data(), position(i, j), value);
}

void Array::set_integer(int64_t i, int64_t j, int64_t value) {
  const int64_t p = position(i, j);
  if (dtype_ == DType::i32)
    reinterpret_cast<int32_t*>(block_.data())[p] = static_cast<int32_t>(value);
  else
    reinterpret_cast<int64_t*>(block_.data())[p] = value;
}

Tensor Array::at(void* base, DeviceKind device, int device_index) const {
  if (!present_) return {};
  Tensor t;
  t.data = static_cast<char*>(base) + first_ * size_of(dtype_);
  t.dtype = dtype_;
  t.rank = static_cast<int>(shape_.size());
  for (int d = 0; d < t.rank; ++d) {
    t.shape[d] = shape_[static_cast<size_t>(d)];
    t.stride[d] = stride_[static_cast<size_t>(d)];
  }
  t.device = device;
  t.device_index = device_index;
  t.present = true;
  return t;
}

std::vector<bool> Array::outside() const {
  std::vector<bool> free(block_.size(), true);
  const int64_t rows = shape_.size() > 0 ? shape_[0] : 1;
  const int64_t columns = shape_.size() > 1 ? shape_[1] : 1;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t b = 0; b < size_of(dtype_); ++b)
        free[static_cast<size_t>(position(i, j) * size_of(dtype_) + b)] = false;
  return free;
}

}  // namespace talea::testing
