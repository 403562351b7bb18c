// What: tensors of any shape, stride, rank and dtype from a fuzzer's bytes, with memory of their
// own.
// Why: the fuzzers of every operator bend tensors alike.
// Never: gives a tensor a byte more than its view reaches: the address sanitizer is the judge.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>

#include "talea/call.hpp"
#include "talea/tensor.hpp"

namespace talea::fuzz {

constexpr int64_t most_bytes = 1 << 16;

// The workspace of a call, not a byte more, filled with 0xFF.
class Room {
 public:
  static constexpr int64_t most = 1 << 24;
  explicit Room(int64_t bytes)
      : bytes_(bytes), memory_(std::malloc(std::max<size_t>(1, static_cast<size_t>(bytes)))) {
    std::memset(memory_, 0xff, static_cast<size_t>(bytes));
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room() { std::free(memory_); }
  Workspace get() const { return {memory_, bytes_}; }

 private:
  int64_t bytes_;
  void* memory_;
};

class Input {
 public:
  Input(const uint8_t* data, size_t size) : bytes_(data, size) {}

  int64_t of(int64_t low, int64_t high) { return bytes_.ConsumeIntegralInRange(low, high); }
  bool rarely() { return of(0, 31) == 31; }
  bool maybe() { return bytes_.ConsumeBool(); }
  template <typename Enum>
  Enum option(Enum last) {  // now and then one that does not exist
    return static_cast<Enum>(of(0, static_cast<int64_t>(last) + (rarely() ? 1 : 0)));
  }

  // The shape, or one bent in an extent, a stride, the rank or the dtype. What no buffer can hold
  // has an address without memory, and may_run() is false from then on; so it is where steps of 0
  // make more elements of a buffer than any run gets through.
  Tensor tensor(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = make_tensor(nullptr, rarely() ? static_cast<DType>(of(0, 7)) : dtype, shape);
    if (rarely() && t.rank > 0) --t.rank;
    if (t.rank > 0 && rarely()) t.shape[of(0, t.rank - 1)] = of(-1, 9);
    if (t.rank > 0 && rarely()) t.shape[of(0, t.rank - 1)] = bytes_.ConsumeIntegral<int64_t>();
    if (t.rank > 0 && rarely()) t.stride[of(0, t.rank - 1)] = of(-8, 200);
    if (t.rank > 0 && rarely()) t.stride[of(0, t.rank - 1)] = bytes_.ConsumeIntegral<int64_t>();
    give_memory(t);
    return t;
  }
  bool may_run() const { return may_run_; }
  void must_not_run() { may_run_ = false; }

 private:
  void give_memory(Tensor& t) {
    static char nowhere[16] = {};
    double low = 0, high = 0, steps = 1;
    bool empty = false;
    for (int i = 0; i < t.rank; ++i) {
      empty = empty || t.shape[i] <= 0;
      steps *= std::max(static_cast<double>(t.shape[i]), 1.0);
      const double reach = (static_cast<double>(t.shape[i]) - 1) * static_cast<double>(t.stride[i]);
      (reach < 0 ? low : high) += reach;
    }
    if (empty) low = high = 0;
    if (steps > static_cast<double>(most_bytes)) may_run_ = false;
    const double bytes = empty ? 0 : (high - low + 1) * static_cast<double>(size_of(t.dtype));
    if (bytes > static_cast<double>(most_bytes)) {
      may_run_ = false;
      t.data = nowhere;
      return;
    }
    // The last byte of the view is the last one of the allocation.
    buffers_.emplace_back(std::malloc(std::max<size_t>(static_cast<size_t>(bytes), 1)), std::free);
    char* const base = static_cast<char*>(buffers_.back().get());
    const std::string some = bytes_.ConsumeBytesAsString(static_cast<size_t>(of(0, 48)));
    for (size_t i = 0; i < static_cast<size_t>(bytes); ++i)
      base[i] = some.empty() ? '\x3c' : some[i % some.size()];
    t.data = base - static_cast<int64_t>(low) * size_of(t.dtype);
  }

  FuzzedDataProvider bytes_;
  std::deque<std::unique_ptr<void, void (*)(void*)>> buffers_;
  bool may_run_ = true;
};

}  // namespace talea::fuzz
