// What: a non-owning view of a dense or strided tensor in host or device memory.
// Why: one plain value describes every input and output of every operator.
// Never: allocates, frees or copies the memory it points to.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

namespace talea {

enum class DType : int32_t {
  f32 = 0,
  bf16 = 1,
  f16 = 2,
  f64 = 3,
  i32 = 4,
  i64 = 5,
  f8_e4m3 = 6,
  u8 = 7
};
enum class DeviceKind : int32_t { cpu = 0, cuda = 1 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f8_e4m3:
    case DType::u8:
      return 1;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f64:
    case DType::i64:
      return 8;
  }
  return 0;
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "fp32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "fp16";
    case DType::f64:
      return "fp64";
    case DType::i32:
      return "int32";
    case DType::i64:
      return "int64";
    case DType::f8_e4m3:
      return "fp8_e4m3";
    case DType::u8:
      return "uint8";
  }
  return "unknown";
}

constexpr bool is_floating(DType dtype) {
  return dtype != DType::i32 && dtype != DType::i64 && dtype != DType::u8;
}
constexpr bool is_16bit(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

inline constexpr int max_rank = 5;

// Strides count elements, not bytes; 0 (an expanded dimension) and negative strides are legal for
// inputs. A default-constructed Tensor is absent: an optional argument not given.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  int rank = 0;
  std::array<int64_t, max_rank> shape{};
  std::array<int64_t, max_rank> stride{};
  DeviceKind device = DeviceKind::cpu;
  int device_index = 0;
  bool present = false;

  explicit operator bool() const { return present; }

  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }

  bool contiguous() const {
    int64_t expected = 1;
    for (int i = rank - 1; i >= 0; --i) {
      if (shape[i] > 1 && stride[i] != expected) return false;
      expected *= shape[i];
    }
    return true;
  }
};

// A contiguous row-major view. `data` is not written through when the tensor is used as an input.
inline Tensor make_tensor(const void* data, DType dtype, std::initializer_list<int64_t> shape,
                          DeviceKind device = DeviceKind::cpu, int device_index = 0) {
  Tensor t;
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  for (int64_t extent : shape) t.shape[t.rank++] = extent;
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.stride[i] = stride;
    stride *= t.shape[i];
  }
  t.device = device;
  t.device_index = device_index;
  t.present = true;
  return t;
}

}  // namespace talea
