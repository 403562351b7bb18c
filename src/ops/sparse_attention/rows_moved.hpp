// What: rows on their way between tensors and what ranks exchange, of host or device tensors.
// Why: the exchanges of a cut call are written once; where their memory lies is known here alone.
// Never: exchanges, or includes a CUDA header.
#pragma once

#include <array>

#include "ops/sparse_attention/args.hpp"
#include "talea/communicator.hpp"

namespace talea::sparse_attention {

// rows x groups x bytes, dense in each group: a group lies behind the one before in `to`, and
// from_group bytes behind it in `from`.
struct RowBlock {
  char* to = nullptr;
  const char* from = nullptr;
  int64_t rows = 0, groups = 1, bytes = 0;
  int64_t to_row = 0, from_row = 0, from_group = 0;  // bytes from one to the next
};

struct RowsMoved {
  DeviceKind device = DeviceKind::cpu;
  int device_index = 0;
  Stream stream = nullptr;

  void copy(const RowBlock& b) const;
  void clear(char* to, int64_t bytes) const;
  // Sums of fp32 or fp64 into the caller's type, or added to what stands there.
  void put(const View& from, const View& to, const std::array<int64_t, 4>& extent, bool adds) const;
};

// On `device_index`, queued on the stream.
void copy_on_device(const RowsMoved& m, const RowBlock& b);
void clear_on_device(const RowsMoved& m, char* to, int64_t bytes);
void put_on_device(const RowsMoved& m, const View& from, const View& to,
                   const std::array<int64_t, 4>& extent, bool adds);

}  // namespace talea::sparse_attention
