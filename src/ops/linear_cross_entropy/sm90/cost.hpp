// What: what lane sm90 expects a plan to cost, and what it knows of a chip.
// Why: config.cpp compares plans by it; the fit is read and changed apart from the choices.
// Never: touches a device.
#pragma once

#include "ops/linear_cross_entropy/sm90/config.hpp"

namespace talea::lce::sm90 {

constexpr int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
constexpr int64_t kPairRows = 256;  // rows of the two stacked tiles of a pair of blocks

// What is known of a chip: sustained rates of one H200, a millisecond. Only their proportions
// decide anything; those of memory are times Config::memory, which is 1 there.
struct Rates {
  double flops = 665e9;              // of large products on all multiprocessors
  double dx_wave_flops = 10.0e9;     // of one wave of dX tiles, on however few of them
  double bytes = 4.0e9;              // of memory, read or written
  double added_bytes = 2.55e9;       // of an fp32 dW that products add to
  double added_split_bytes = 3.2e9;  // of one in 16 bits and a rest
};
constexpr Rates kRates;

// How the tiles of a dX product of so many rows fill the device.
struct DxTiles {
  double waves = 0, busy = 0;  // of them, the share of the multiprocessors at work
  double wave_ms = 0;          // fewer at work run faster: the chip is bound by its power
  DxTile tile = DxTile::square;
};
// Of the shape that takes less time, what the dW of plan c leaves to run behind it included.
DxTiles dx_tiles(const Problem& p, const Config& c, double pairs, int64_t rows);
// Flops of one wave of tiles of dX, a millisecond, on however few multiprocessors.
double dx_wave_flops(DxTile tile);

// Bytes that the products of a chunk move to add to dW, an element; `first`: they overwrite it.
double bytes_added(const Problem& p, const Config& c, bool first);
// Milliseconds of a call by chunks of `rows`.
double cost(const Problem& p, const DeviceFacts& device, const Config& c, int64_t rows);
// Of the same chunks c.ms takes, with the logits of each beside dW of the one before.
double cost_ahead(const Problem& p, const Config& c);
// Milliseconds of the gradients by slices of `words`: the logits in waves; dX and dW in tiles a
// pair of blocks, of which those that end dX first take one more of dW. Row states known beforehand
// cost nothing.
double slice_cost(const Problem& p, const DeviceFacts& device, const Config& c, int64_t words);

}  // namespace talea::lce::sm90
