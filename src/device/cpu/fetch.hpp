// What: fetches memory that comes next, a few lines at a time, while a register kernel runs.
// Why: far rows are near when their turn comes; in bursts the lines on their way would keep the
//      product's own loads waiting.
// Never: changes a result.
#pragma once

#include <algorithm>

#include "device/cpu/tile_product.hpp"

namespace talea::cpu {

class Fetch {
 public:
  // calls: how often Some() will be called, about.
  Fetch(const Ahead& ahead, int64_t calls)
      : at_(static_cast<const char*>(ahead.first)), ahead_(ahead) {
    const int64_t lines = (ahead_.row_bytes + line - 1) / line * ahead_.rows;
    lines_ = (lines + calls) / std::max<int64_t>(1, calls);
  }
  __attribute__((always_inline)) void Some() {
    for (int64_t i = 0; i < lines_ && row_ < ahead_.rows; ++i) {
      __builtin_prefetch(at_ + byte_, 0, 2);
      byte_ += line;
      if (byte_ < ahead_.row_bytes) continue;
      byte_ = 0;
      ++row_;
      at_ += ahead_.stride_bytes;
    }
  }
  static constexpr int64_t every = 16;  // steps of the product from one call to the next

 private:
  static constexpr int64_t line = 64;
  const char* at_;
  const Ahead ahead_;
  int64_t lines_, row_ = 0, byte_ = 0;
};

}  // namespace talea::cpu
