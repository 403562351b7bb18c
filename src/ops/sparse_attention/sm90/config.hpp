// What: how lane sm90 cuts a forward call: tiles, shared memory, blocks; and what it declines.
// Why: a pure function of the problem and the device, tested without one.
// Never: reads a tensor.
#pragma once

#include <optional>
#include <string>

#include "core/device_facts.hpp"
#include "ops/sparse_attention/sm90/tile.hpp"

namespace talea::sparse_attention::sm90 {

struct Config {
  int half = 0;            // columns of the output of one of the two warpgroups: 64, 128 or 256
  int64_t head_tiles = 0;  // of a group
  int64_t work = 0;        // queries x groups x head tiles
  int64_t blocks = 0;      // persistent
  int64_t shared_bytes = 0;
  bool counts = false;  // foreign indices, in the workspace
};

std::optional<std::string> decline(const Problem& p, const DeviceFacts& d);
Config config(const Problem& p, const DeviceFacts& d);

}  // namespace talea::sparse_attention::sm90
