// What: a host tensor of any dtype, rank and memory order inside a guarded block of bytes.
// Why: oracle, yardstick and lanes start from the same bytes, and any byte touched beside is seen.
// Never: shares code with src/; its own conversions are checked against the library's.
#include "yardsticks/mamba3/host_tensor.hpp"

#include <bit>
#include <cmath>
#include <cstring>

namespace talea::yardsticks::mamba3 {
namespace {

constexpr std::byte untouched{0xA5};

// Nearest multiple of the spacing of numbers with `digits` bits behind the leading one.
double to_digits(double value, int digits, int lowest_exponent) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), lowest_exponent);
  const double spacing = std::ldexp(1.0, exponent - digits);
  return std::nearbyint(value / spacing) * spacing;
}

}  // namespace

double rounded(DType dtype, double value) {
  switch (dtype) {
    case DType::f32:
      return static_cast<float>(value);
    case DType::bf16: {
      const double near = to_digits(value, 7, -126);
      return std::abs(near) > 0x1.fep127 ? std::copysign(INFINITY, near) : near;
    }
    case DType::f16: {
      const double near = to_digits(value, 10, -14);
      return std::abs(near) > 65504 ? std::copysign(INFINITY, near) : near;
    }
    default:
      return value;
  }
}

HostTensor::HostTensor(DType dtype, std::vector<int64_t> shape, const Layout& layout)
    : present_(true), dtype_(dtype), shape_(std::move(shape)) {
  const int rank = static_cast<int>(shape_.size());
  std::vector<int> order = layout.order;
  if (static_cast<int>(order.size()) != rank) {
    order.resize(shape_.size());
    for (int i = 0; i < rank; ++i) order[static_cast<size_t>(i)] = i;
  }
  stride_.assign(shape_.size(), 0);
  int64_t reach = 1;
  for (int i = rank - 1; i >= 0; --i) {
    const auto axis = static_cast<size_t>(order[static_cast<size_t>(i)]);
    if (static_cast<int>(axis) == layout.expanded) continue;
    stride_[axis] = reach;
    reach *= std::max<int64_t>(shape_[axis], 1);
    if (i == rank - 1) reach += layout.gap;
  }
  const int64_t size = size_of(dtype_);
  first_ = guard_bytes / size + layout.skew;
  block_.assign(static_cast<size_t>(first_ * size + reach * size + guard_bytes), untouched);
  for (int64_t i = 0; i < elements(); ++i) set(i, 0);
}

int64_t HostTensor::elements() const {
  int64_t n = 1;
  for (const int64_t e : shape_) n *= e;
  return n;
}

int64_t HostTensor::position(int64_t flat) const {
  int64_t at = first_;
  for (size_t axis = shape_.size(); axis-- > 0;) {
    at += flat % shape_[axis] * stride_[axis];
    flat /= shape_[axis];
  }
  return at;
}

double HostTensor::get(int64_t flat) const {
  const std::byte* from = block_.data() + position(flat) * size_of(dtype_);
  const auto read = [&](auto value) {
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  switch (dtype_) {
    case DType::f64:
      return read(double{});
    case DType::f32:
      return read(float{});
    case DType::bf16:
      return std::bit_cast<float>(uint32_t{read(uint16_t{})} << 16);
    case DType::f16: {
      const uint16_t bits = read(uint16_t{});
      const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
      double value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(mantissa, -24)
                                     : std::ldexp(1024 + mantissa, exponent - 25);
      return bits & 0x8000 ? -value : value;
    }
    case DType::i32:
      return read(int32_t{});
    case DType::i64:
      return static_cast<double>(read(int64_t{}));
    default:
      return static_cast<double>(read(uint8_t{}));
  }
}

void HostTensor::set(int64_t flat, double value) {
  std::byte* to = block_.data() + position(flat) * size_of(dtype_);
  const auto write = [&](auto v) { std::memcpy(to, &v, sizeof v); };
  const double near = rounded(dtype_, value);
  switch (dtype_) {
    case DType::f64:
      return write(value);
    case DType::f32:
      return write(static_cast<float>(value));
    case DType::bf16:
      return write(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(near)) >> 16));
    case DType::f16: {
      const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
      const double size = std::abs(near);
      uint16_t bits = 0;
      if (std::isnan(size))
        bits = 0x7e00;
      else if (std::isinf(size))
        bits = 0x7c00;
      else if (size < std::ldexp(1.0, -14))
        bits = static_cast<uint16_t>(std::ldexp(size, 24));
      else
        bits =
            static_cast<uint16_t>(((std::ilogb(size) + 15) << 10) +
                                  static_cast<int>(std::ldexp(size, 10 - std::ilogb(size))) - 1024);
      return write(static_cast<uint16_t>(sign | bits));
    }
    case DType::i32:
      return write(static_cast<int32_t>(value));
    case DType::i64:
      return write(static_cast<int64_t>(value));
    default:
      return write(static_cast<uint8_t>(value));
  }
}

std::vector<double> HostTensor::values() const {
  std::vector<double> v(static_cast<size_t>(elements()));
  for (int64_t i = 0; i < elements(); ++i) v[static_cast<size_t>(i)] = get(i);
  return v;
}

Tensor HostTensor::view() const {
  Tensor t;
  if (!present_) return t;
  t.present = true;
  t.dtype = dtype_;
  t.rank = static_cast<int>(shape_.size());
  t.data = const_cast<std::byte*>(block_.data()) + first_ * size_of(dtype_);
  for (int i = 0; i < t.rank; ++i) {
    t.shape[static_cast<size_t>(i)] = shape_[static_cast<size_t>(i)];
    t.stride[static_cast<size_t>(i)] = stride_[static_cast<size_t>(i)];
  }
  return t;
}

bool HostTensor::guards_intact() const {
  const int64_t size = size_of(dtype_);
  std::vector<bool> inside(block_.size(), false);
  for (int64_t i = 0; i < elements(); ++i)
    for (int64_t b = 0; b < size; ++b) inside[static_cast<size_t>(position(i) * size + b)] = true;
  for (size_t i = 0; i < block_.size(); ++i)
    if (!inside[i] && block_[i] != untouched) return false;
  return true;
}

}  // namespace talea::yardsticks::mamba3
