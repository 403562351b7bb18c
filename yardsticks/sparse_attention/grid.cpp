// What: layout, element access and the small formats of the yardstick's tensors.
// Why: a wrong conversion in the library must not be repeated here.
// Never: fast.
#include "yardsticks/sparse_attention/grid.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace talea::yardsticks::sparse_attention {
namespace {

struct Format {
  int exponent_bits, mantissa_bits, bias;
  bool has_infinity;
};
constexpr Format bf16_format{8, 7, 127, true};
constexpr Format f16_format{5, 10, 15, true};
constexpr Format e4m3_format{4, 3, 7, false};  // all ones alone is NaN

double decode_small(const Format& f, unsigned bits) {
  const unsigned top = (1u << f.exponent_bits) - 1, most = (1u << f.mantissa_bits) - 1;
  const unsigned field = bits >> f.mantissa_bits & top, mantissa = bits & most;
  const double sign = bits >> (f.exponent_bits + f.mantissa_bits) & 1 ? -1 : 1;
  if (field == top && f.has_infinity) return mantissa ? std::nan("") : sign * INFINITY;
  if (field == top && mantissa == most) return std::nan("");
  if (field == 0) return sign * std::ldexp(mantissa, 1 - f.bias - f.mantissa_bits);
  return sign * std::ldexp((1u << f.mantissa_bits) + mantissa,
                           static_cast<int>(field) - f.bias - f.mantissa_bits);
}

unsigned encode_small(const Format& f, double value) {
  const unsigned top = (1u << f.exponent_bits) - 1, most = (1u << f.mantissa_bits) - 1;
  const unsigned sign = std::signbit(value) ? 1u << (f.exponent_bits + f.mantissa_bits) : 0;
  const unsigned nan = top << f.mantissa_bits | most;
  if (std::isnan(value)) return nan;
  const double magnitude = std::abs(value);
  const unsigned infinite = f.has_infinity ? top << f.mantissa_bits : nan;
  if (std::isinf(magnitude)) return sign | infinite;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - f.bias);
  const double units = std::nearbyint(std::ldexp(magnitude, f.mantissa_bits - exponent));
  const unsigned bits = static_cast<unsigned>(units) +
                        (static_cast<unsigned>(exponent - 1 + f.bias) << f.mantissa_bits);
  return sign | std::min(bits, infinite);
}

template <typename T>
T read(const std::byte* at) {
  T x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

}  // namespace

double decode(DType dtype, const std::byte* at) {
  switch (dtype) {
    case DType::f32:
      return static_cast<double>(read<float>(at));
    case DType::f64:
      return read<double>(at);
    case DType::bf16:
      return decode_small(bf16_format, read<uint16_t>(at));
    case DType::f16:
      return decode_small(f16_format, read<uint16_t>(at));
    case DType::f8_e4m3:
      return decode_small(e4m3_format, read<uint8_t>(at));
    case DType::i32:
      return read<int32_t>(at);
    case DType::i64:
      return static_cast<double>(read<int64_t>(at));
    case DType::u8:
      return read<uint8_t>(at);
  }
  return std::nan("");
}

void encode(DType dtype, std::byte* at, double value) {
  const auto write = [&](auto x) { std::memcpy(at, &x, sizeof x); };
  switch (dtype) {
    case DType::f32:
      return write(static_cast<float>(value));
    case DType::f64:
      return write(value);
    case DType::bf16:
      return write(static_cast<uint16_t>(encode_small(bf16_format, value)));
    case DType::f16:
      return write(static_cast<uint16_t>(encode_small(f16_format, value)));
    case DType::f8_e4m3:
      return write(static_cast<uint8_t>(encode_small(e4m3_format, value)));
    case DType::i32:
      return write(static_cast<int32_t>(value));
    case DType::i64:
      return write(static_cast<int64_t>(value));
    case DType::u8:
      return write(static_cast<uint8_t>(value));
  }
}

double rounded(DType dtype, double value) {
  std::byte cell[8];
  encode(dtype, cell, value);
  return decode(dtype, cell);
}

Grid::Grid(DType dtype, std::vector<int64_t> shape, Lay lay)
    : present_(true), dtype_(dtype), shape_(std::move(shape)) {
  const auto n = static_cast<int>(shape_.size());
  std::vector<int> order;  // outermost first
  for (int d = 0; d < n; ++d) order.push_back(d);
  if (lay == Lay::swapped && n >= 3) std::swap(order[0], order[1]);
  int64_t stride = 1;
  for (int i = n - 1; i >= 0; --i) {
    const auto d = static_cast<size_t>(order[static_cast<size_t>(i)]);
    stride_[d] = stride;
    stride *= std::max<int64_t>(shape_[d], 1);
    if (lay == Lay::padded && i == n - 1) stride += 16;  // rows stay on 16 bytes
    if (lay == Lay::expanded && i == 0 && n >= 2) {
      stride /= std::max<int64_t>(shape_[d], 1);
      stride_[d] = 0;
    }
  }
  memory_.resize(static_cast<size_t>(stride * size_of(dtype) + 2 * guard));
  fill_bytes(0);
}

int64_t Grid::elements() const {
  int64_t n = 1;
  for (const int64_t extent : shape_) n *= extent;
  return n;
}

int64_t Grid::position(int64_t i, int64_t j, int64_t k, int64_t l) const {
  return (i * stride_[0] + j * stride_[1] + k * stride_[2] + l * stride_[3]) * size_of(dtype_) +
         guard;
}

std::byte* Grid::bytes(int64_t i, int64_t j, int64_t k, int64_t l) {
  return memory_.data() + position(i, j, k, l);
}
const std::byte* Grid::bytes(int64_t i, int64_t j, int64_t k, int64_t l) const {
  return memory_.data() + position(i, j, k, l);
}
double Grid::get(int64_t i, int64_t j, int64_t k, int64_t l) const {
  return decode(dtype_, bytes(i, j, k, l));
}
int64_t Grid::integer(int64_t i, int64_t j, int64_t k, int64_t l) const {
  const std::byte* at = bytes(i, j, k, l);
  return dtype_ == DType::i64 ? read<int64_t>(at) : read<int32_t>(at);
}
void Grid::put(double v, int64_t i, int64_t j, int64_t k, int64_t l) {
  encode(dtype_, bytes(i, j, k, l), v);
}
void Grid::put_integer(int64_t v, int64_t i, int64_t j, int64_t k, int64_t l) {
  if (dtype_ == DType::i64) {
    std::memcpy(bytes(i, j, k, l), &v, sizeof v);
  } else {
    const auto narrow = static_cast<int32_t>(v);
    std::memcpy(bytes(i, j, k, l), &narrow, sizeof narrow);
  }
}

Tensor Grid::tensor(std::vector<int> without, void* data) const {
  Tensor t;
  if (!present_) return t;
  t.data = data ? data : const_cast<std::byte*>(bytes());
  t.dtype = dtype_;
  t.present = true;
  for (int d = 0; d < static_cast<int>(shape_.size()); ++d) {
    if (std::find(without.begin(), without.end(), d) != without.end()) continue;
    t.shape[t.rank] = shape_[static_cast<size_t>(d)];
    t.stride[t.rank++] = stride_[static_cast<size_t>(d)];
  }
  return t;
}

void Grid::fill_bytes(unsigned char value) {
  std::fill(memory_.begin(), memory_.end(), static_cast<std::byte>(value));
}

namespace {
template <typename F>
void each(const std::vector<int64_t>& shape, F f) {
  std::array<int64_t, 4> n = {1, 1, 1, 1};
  for (size_t d = 0; d < shape.size(); ++d) n[d] = shape[d];
  for (int64_t i = 0; i < n[0]; ++i)
    for (int64_t j = 0; j < n[1]; ++j)
      for (int64_t k = 0; k < n[2]; ++k)
        for (int64_t l = 0; l < n[3]; ++l) f(i, j, k, l);
}
}  // namespace

std::vector<std::byte> Grid::outside() const {
  std::vector<std::byte> rest = memory_;
  each(shape_, [&](int64_t i, int64_t j, int64_t k, int64_t l) {
    std::memset(rest.data() + position(i, j, k, l), 0, static_cast<size_t>(size_of(dtype_)));
  });
  return rest;
}

std::vector<double> Grid::numbers() const {
  std::vector<double> all;
  if (!present_) return all;
  all.reserve(static_cast<size_t>(elements()));
  each(shape_, [&](int64_t i, int64_t j, int64_t k, int64_t l) { all.push_back(get(i, j, k, l)); });
  return all;
}

}  // namespace talea::yardsticks::sparse_attention
