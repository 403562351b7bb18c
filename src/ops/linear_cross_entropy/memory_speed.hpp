// What: how fast a device's memory is, beside that of an H200.
// Why: the lanes' predictions were fitted to an H200; where sums wait for memory, what a plan costs
// on another chip follows its memory.
// Never: differs between ranks: they cut a call alike, whatever chips they have.
#pragma once

#include "core/device_facts.hpp"
#include "ops/linear_cross_entropy/lane.hpp"

namespace talea::lce {

// The time of an addition is half the memory's, half the cache's: so the plans that were timed on
// an H100 are told apart.
inline double memory_speed(const Problem& p, const DeviceFacts& device) {
  constexpr double h200 = 3201.0 * 6144;  // MHz, bits
  if (p.world > 1 || device.memory_mhz <= 0 || device.memory_bus_bits <= 0) return 1;
  return 2 / (1 + h200 / (static_cast<double>(device.memory_mhz) * device.memory_bus_bits));
}

}  // namespace talea::lce
