// What: how lane sm90 cuts a selection: heads of a product, chunks of queries, units of keys; and
// what it declines.
// Why: a pure function of the problem and the device, tested without one; the workspace formula is
// the layout code run without memory.
// Never: reads a tensor.
#pragma once

#include <optional>
#include <string>

#include "core/arena.hpp"
#include "core/device_facts.hpp"
#include "ops/sparse_attention/sm90/index_tile.hpp"

namespace talea::sparse_attention::sm90 {

struct IndexConfig {
  int heads = 0;          // of a query in a product: 16, 32 or 64; more heads are added to it
  int64_t rows = 0;       // queries of a chunk: their scores lie in the workspace
  int64_t stride = 0;     // of a row of scores
  int64_t unit_keys = 0;  // of a block
  int64_t pitch = 0;      // keys of e4m3 that TMA cannot read where they lie: bytes of a row's copy
  int64_t packed = 0;     // bytes of a batch entry's copied rows
};

struct IndexRoom {
  cuda::Counters* counters = nullptr;
  float* scores = nullptr;  // [rows, stride]
  char* keys = nullptr;     // [keys, pitch]
};
IndexRoom lay_out(Arena& arena, const IndexConfig& c);
int64_t bytes_of(const IndexConfig& c);

std::optional<std::string> decline_index(const Problem& p);
IndexConfig index_config(const Problem& p, const DeviceFacts& d);

}  // namespace talea::sparse_attention::sm90
