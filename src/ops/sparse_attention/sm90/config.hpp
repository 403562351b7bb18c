// What: how lane sm90 cuts a forward call: tiles, shared memory, blocks; and what it declines.
// Why: a pure function of the problem and the device, tested without one.
// Never: reads a tensor.
#pragma once

#include <optional>
#include <string>

#include "core/arena.hpp"
#include "core/device_facts.hpp"
#include "ops/sparse_attention/sm90/tile.hpp"

namespace talea::sparse_attention::sm90 {

struct Config {
  int half = 0;            // columns of the output of one of the two warpgroups: 64, 128 or 256
  int64_t head_tiles = 0;  // of a group
  int64_t work = 0;        // queries x groups x head tiles x segments
  int64_t blocks = 0;      // persistent; of few queries, of the kernel that weighs; or all of them
  int64_t shared_bytes = 0;
  bool counts = false;     // foreign indices, in the workspace
  bool narrow = false;     // rows of which a multiprocessor has several blocks, a warpgroup each
  bool few_heads = false;  // keys as rows of the products: the same bits
  Rows rows = Rows::plain;
  // Few queries: of a list, a pair of tiles of keys each, whose weights lie in the workspace until
  // blocks of `slices` of the columns sum values by them. 1: a block has a whole list.
  int64_t segments = 1;
  int slices = 0;
  int64_t lists = 0;
};

struct Room {
  cuda::Counters* counters = nullptr;
  Stored stored;
};
Room lay_out(Arena& arena, const Config& c);
int64_t bytes_of(const Config& c);

std::optional<std::string> decline(const Problem& p, const DeviceFacts& d);
Config config(const Problem& p, const DeviceFacts& d);

}  // namespace talea::sparse_attention::sm90
