// What: the fit of times to those of an H200 (docs/h200.md).
// Why: pure functions of (problem, device facts, plan), tested without a GPU.
// Never: takes a decision; config.cpp does.
#include "ops/linear_cross_entropy/sm90/cost.hpp"

#include <algorithm>
#include <cmath>

#include "ops/linear_cross_entropy/forced.hpp"
#include "ops/linear_cross_entropy/sm90/layout.hpp"
#include "ops/linear_cross_entropy/sm90/products.hpp"

namespace talea::lce::sm90 {

constexpr double kBesideProducts = 0.12;  // ms of a pass over rows: launches, sorting, ends
constexpr double kNarrow = 1.04;          // the time of two narrow tiles, in square ones

double bytes_added(const Problem& p, const Config& c, bool first) {
  if (c.dw == DwOutput::direct || p.dw_dtype == DType::f16) return 2;
  if (c.dw == DwOutput::split)
    return (2 +
            static_cast<double>(Rest::piece_bytes(c.rest_bits)) / (Rest::kRows * Rest::kColumns)) *
           (first ? 1 : 2);
  return first && !p.accumulate_dw ? 4 : 8;
}

// How much longer a tile takes than at the sustained rate of all multiprocessors, where nothing
// runs beside it and so many are at work: the fewer, the higher the chip's clock; the tall tile
// reads shared memory more often. Fitted to dX of a frozen head on an H200.
static double slowed(DxTile tile, double busy) {
  if (tile == DxTile::tall) return 0.72 + 0.4 * busy;
  if (tile == DxTile::narrow) return 0.56 + 0.52 * busy;
  return std::clamp(0.70 + 0.67 * (busy - 0.36), 0.70, 1.0);
}

static DxTiles tiles_of(DxTile tile, const Problem& p, double pairs, int64_t rows) {
  const auto up = [](int64_t a, int64_t b) { return static_cast<double>((a + b - 1) / b); };
  const int64_t height = dx_tile_rows(tile), width = dx_tile_columns(tile);
  const double tiles = up(rows, height) * up(p.hidden, width);
  const double one = 2 * static_cast<double>(height * width) * static_cast<double>(p.vocab_local);
  DxTiles t{.tile = tile};
  t.waves = std::ceil(tiles / pairs);
  t.busy = tiles / (t.waves * pairs);
  const bool alone = !p.wants_dw && p.world == 1;
  const double small = tile == DxTile::narrow ? kNarrow : 1;
  t.wave_ms =
      one * pairs / kRates.flops * (alone ? slowed(tile, t.busy) : small * (0.78 + 0.22 * t.busy));
  return t;
}

double dx_wave_flops(DxTile tile) {
  return tile == DxTile::narrow ? kRates.dx_wave_flops / kNarrow : kRates.dx_wave_flops;
}

// dW alone; and what dX of these tiles takes, with what is left of dW behind it.
static double dw_ms(const Problem& p, const Config& c, int64_t rows, bool first) {
  if (!p.wants_dw) return 0;
  const double dv = static_cast<double>(p.hidden) * static_cast<double>(p.vocab_local);
  const double one = 2 * static_cast<double>(round_up(rows, kPairRows)) * dv / kRates.flops;
  const double added = bytes_added(p, c, first) * dv / (kRates.bytes * c.memory);
  return std::max(one, added) + 0.65 * added * std::min(1.0, added / one);
}
static double with_dw(const DxTiles& t, double dw) {
  return t.waves * t.wave_ms + std::max(0.0, dw - 0.7 * (1 - t.busy) * t.waves * t.wave_ms);
}

DxTiles dx_tiles(const Problem& p, const Config& c, double pairs, int64_t rows) {
  DxTiles best = tiles_of(DxTile::square, p, pairs, rows);
  if (p.world > 1) return best;
  const double dw = dw_ms(p, c, rows, false);
  const auto consider = [&](DxTile tile, double gain) {
    const DxTiles t = tiles_of(tile, p, pairs, rows);
    if (with_dw(t, dw) < gain * with_dw(best, dw)) best = t;
  };
  if (!p.wants_dw) consider(DxTile::tall, 1);
  if (!c.f16 && forced.narrow.value_or(true)) consider(DxTile::narrow, 0.95);
  return best;
}

namespace {

// Milliseconds of one chunk, fitted to those of an H200 (docs/h200.md): the logits; dX in waves of
// tiles as long as the vocabulary, beside which dW takes what they leave; dW's additions, hidden
// the better the longer the chunk.
double chunk_ms(const Problem& p, const DeviceFacts& device, const Config& c, int64_t rows,
                bool first) {
  const double pairs = static_cast<double>(device.sm_count / 2);
  const double d = static_cast<double>(p.hidden), v = static_cast<double>(p.vocab_local);
  double one = 2 * static_cast<double>(round_up(rows, kPairRows)) * d * v / kRates.flops,
         more = kBesideProducts;
  if (c.exp_stride == 0) {  // nothing beside the logits: their last wave counts
    more = 0.03;
    const double tiles = static_cast<double>((rows + kPairRows - 1) / kPairRows * c.tiles);
    one = std::ceil(tiles / pairs) * 2 * kPairRows * static_cast<double>(c.tile_columns) * d *
          pairs / kRates.flops;
  }
  const double dw = dw_ms(p, c, rows, first);
  double ms = one + more;
  ms += p.wants_dx ? with_dw(dx_tiles(p, c, pairs, rows), dw) : dw;
  // Long chunks leave less of the buffer in the cache.
  if (p.world > 1) return ms;  // there fewer exchanges are worth more
  return ms * (1 + 0.02 * std::max(0.0, std::log2(static_cast<double>(rows) / 4096)));
}

}  // namespace

double cost(const Problem& p, const DeviceFacts& device, const Config& c, int64_t rows) {
  const int64_t full = p.tokens / rows, rest = p.tokens % rows;
  const double dv = static_cast<double>(p.hidden) * static_cast<double>(p.vocab_local);
  const double pass = dv / (kRates.bytes * c.memory);  // a byte of each element of dW
  double ms = c.dw == DwOutput::workspace ? 6 * pass : 0.0;
  if (c.sums_in_codes() && p.wants_rest) ms += 4 * pass;  // read once more, by its factor
  if (rest > 0) ms += chunk_ms(p, device, c, rest, full == 0);
  if (full > 0) ms += chunk_ms(p, device, c, rows, true);
  if (full > 1) ms += static_cast<double>(full - 1) * chunk_ms(p, device, c, rows, false);
  return ms;
}

double cost_ahead(const Problem& p, const Config& c) {
  const double rows = static_cast<double>(c.chunk_rows),
               chunks = std::ceil(static_cast<double>(p.tokens) / rows);
  const double products = 3 * product_flops_of_one(p) / kRates.flops * chunks *
                          static_cast<double>(round_up(c.chunk_rows, kPairRows)) /
                          static_cast<double>(p.tokens);
  return std::min(c.ms, std::max(0.85 * c.ms, 1.19 * products));
}

double slice_cost(const Problem& p, const DeviceFacts& device, const Config& c, int64_t words) {
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t pairs = device.sm_count / 2;
  const double rate = kRates.flops / static_cast<double>(pairs), d = static_cast<double>(p.hidden);
  const double n = static_cast<double>(p.tokens), v = static_cast<double>(p.vocab_local);
  const int64_t rows = dx_tile_rows(c.dx_tile), columns = dx_tile_columns(c.dx_tile);
  const auto slice_ms = [&](int64_t w) {
    const int64_t logits = up(up(p.tokens, kPairRows) * up(w, kLogitsTile), pairs);
    const int64_t dx = p.wants_dx ? up(p.tokens, rows) * up(p.hidden, columns) : 0;
    const int64_t dw = p.wants_dw ? up(w, 384) * up(p.hidden, 128) : 0;
    // Where dX ends first, a pair begins its tiles of dW; the first of them have one more.
    const bool dx_late = dx % pairs > 0, dw_late = dw % pairs > pairs - dx % pairs;
    const auto length = [&](int64_t of_dx, int64_t of_dw) {
      return static_cast<double>(rows * columns * of_dx * w) +
             384.0 * 128 * static_cast<double>(of_dw) * n;
    };
    const double longest = dw_late ? length(dx / pairs + 1, dw / pairs + 1)
                                   : std::max(length(dx / pairs, up(dw, pairs)),
                                              length(dx / pairs + dx_late, dw / pairs));
    return static_cast<double>(logits) * 2 * kPairRows * kLogitsTile * d / rate +
           2 * longest / rate + 0.05;
  };
  const int64_t full = p.vocab_local / words, rest = p.vocab_local % words;
  const double states = c.from_saved() ? 0 : kBesideProducts + 2 * n * d * v / kRates.flops;
  return states + static_cast<double>(full) * slice_ms(words) + (rest > 0 ? slice_ms(rest) : 0);
}

}  // namespace talea::lce::sm90
