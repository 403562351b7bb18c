// What: rows of tokens on their way between tensors and what ranks sum, of host or device tensors.
// Why: the sums of a cut call are written once; where their memory lies is known here alone.
// Never: sums, or includes a CUDA header.
#pragma once

#include <array>

#include "talea/communicator.hpp"

namespace talea::mamba3 {

// Rows (r, g, n) of tokens from `first` on, `tokens` of them an entry of the batch.
struct RowsOfTokens {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t first = 0, tokens = 1;
  std::array<int64_t, 5> stride{};  // of entry, token, r, g, n
};
struct RowShape {
  int64_t r = 1, g = 1, n = 1;
};

struct RowsMoved {
  DeviceKind device = DeviceKind::cpu;
  int device_index = 0;
  Stream stream = nullptr;

  void clear(char* to, int64_t bytes) const;
  // Tokens [first, first + count), each number rounded to the type of `to`.
  void put(const RowsOfTokens& from, const RowsOfTokens& to, const RowShape& shape, int64_t first,
           int64_t count) const;
};

// On `device_index`, queued on the stream.
void clear_on_device(const RowsMoved& m, char* to, int64_t bytes);
void put_on_device(const RowsMoved& m, const RowsOfTokens& from, const RowsOfTokens& to,
                   const RowShape& shape, int64_t first, int64_t count);

}  // namespace talea::mamba3
