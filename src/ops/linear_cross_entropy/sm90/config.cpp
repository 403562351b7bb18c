// What: how lane sm90 runs a problem: its chunk, its schedule, its workspace.
// Why: these are pure functions of (problem, device facts), tested without a GPU; which problems it
// takes: decline.cpp.
// Never: touches a device.
#include "ops/linear_cross_entropy/sm90/config.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/fail.hpp"
#include "ops/linear_cross_entropy/forced.hpp"
#include "ops/linear_cross_entropy/memory_speed.hpp"
#include "ops/linear_cross_entropy/outputs.hpp"
#include "ops/linear_cross_entropy/sm90/cost.hpp"
#include "ops/linear_cross_entropy/sm90/layout.hpp"
#include "ops/linear_cross_entropy/sm90/products.hpp"
#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"

namespace talea::lce::sm90 {
namespace {

// Under a larger cap exp(z - shift) could underflow where smoothing still needs the logit.
constexpr double kLargestSmoothedCap = 43;
constexpr int64_t kSmallWeight = int64_t{1} << 17;  // elements
constexpr int64_t kLeastSliced = int64_t{1} << 26;  // elements of a weight
constexpr int64_t kEvenRows = 1024;  // chunks of up to so many need not be whole pairs of tiles
constexpr int64_t kAheadRows = 512;  // up to so many a chunk the next chunk's logits run ahead

// What a tile of dW takes beside its multiplications, in rows of them: read off one H200, dW alone
// and by how much the pairs that start early end late.
int64_t way_out_rows(const Config& c) {
  if (c.dw != DwOutput::split) return c.dw == DwOutput::in_place ? 150 : 90;
  return c.rest_bits == 0 ? 90 : c.sums_in_codes() ? 200 : 290;
}

// How dX and dW share the device. Short chunks make dW wait for memory, so there dX takes some of
// the multiprocessors, in whole waves, and dW the rest from the start. Long chunks let dX use all
// of them, and dW fills the last wave.
void share_device(const Problem& p, Config& c) {
  const int64_t pairs = c.blocks / 2;
  c.dx_blocks = c.blocks;
  if (p.wants_dx)
    c.dx_tile = dx_tiles(p, c, static_cast<double>(pairs), std::min(c.chunk_rows, p.tokens)).tile;
  if (!p.wants_dx || !p.wants_dw) return;
  const int64_t columns = dx_tile_columns(c.dx_tile);
  const int64_t tiles =
      (c.chunk_rows + kPairRows - 1) / kPairRows * ((p.hidden + columns - 1) / columns);
  int64_t dx_pairs = pairs, waves = (tiles + pairs - 1) / pairs;
  if (c.chunk_rows <= 1024 && p.world == 1) {  // with more ranks dW waits for dX
    // A wave of dX takes as long on few multiprocessors as on many.
    const double d = static_cast<double>(p.hidden), v = static_cast<double>(p.vocab_local);
    const double wave = 2 * 256.0 * static_cast<double>(columns) * v / dx_wave_flops(c.dx_tile),
                 additions =
                     (c.dw == DwOutput::split ? bytes_added(p, c, false) / kRates.added_split_bytes
                                              : 8 / kRates.added_bytes) *
                     d * v / c.memory;
    const double products = 2 * static_cast<double>(c.chunk_rows) * d * v / kRates.flops;
    const double alone = std::max(products, additions) + 0.15 * std::min(products, additions);
    double best = 0;
    const int64_t least = waves;
    for (int64_t w = least; w <= 8 * least; ++w) {
      const int64_t needed = (tiles + w - 1) / w;
      const double beside = static_cast<double>(pairs - needed) / static_cast<double>(pairs);
      const double rate = std::min(beside / products, 1 / additions);
      const double dx = static_cast<double>(w) * wave;
      const double total = dx + std::max(0.0, 1 - dx * rate) * alone;
      if (w == least || total < best) best = total, dx_pairs = needed, waves = w;
    }
  }
  c.dx_blocks = static_cast<int>(2 * dx_pairs);
  // One dX tile against one dW tile: 128 x 256 x vocab (or half) and 192 x 128 x rows
  // multiplications, and of dW the way out. Below some 768 rows a dW tile takes the time of its
  // additions, however few its multiplications.
  const int64_t ahead =
      p.vocab_local * columns / (192 * std::max<int64_t>(c.chunk_rows + way_out_rows(c), 768));
  const int64_t last = tiles % pairs;  // pairs at work in dX's last wave
  c.dw_early = static_cast<int>(dx_pairs < pairs ? pairs - dx_pairs : last > 0 ? pairs - last : 0);
  c.dw_head_start = static_cast<int>(dx_pairs < pairs ? waves * ahead : ahead);
}

// The fewest blocks that need no more waves of tiles: with several ranks the sum of the first half
// has the rest to itself while the second is multiplied. Fewer than four are not worth the cut.
void part_dx(const Problem& p, Config& c) {
  const int64_t pairs = c.blocks / 2, columns = (p.hidden + 255) / 256;
  const int64_t half = round_up(c.chunk_rows / 2, kPairRows);
  const auto tiles = [&](int64_t rows) { return (rows + kPairRows - 1) / kPairRows * columns; };
  const auto waves = [](int64_t t, int64_t on) { return (t + on - 1) / on; };
  c.dx_part_rows = c.chunk_rows, c.dx_part_blocks = c.blocks;
  if (!c.exchange_dx || half >= c.chunk_rows) return;
  const int64_t first = tiles(half), second = tiles(c.chunk_rows - half);
  int64_t fewest = pairs;
  const auto both = [&](int64_t on) { return waves(first, on) + waves(second, on); };
  while (fewest > 1 && both(fewest - 1) <= waves(first + second, pairs)) --fewest;
  if (pairs - fewest < 2 || both(fewest) > waves(first + second, pairs)) return;
  c.dx_part_rows = half, c.dx_part_blocks = static_cast<int>(2 * fewest);
}

int64_t kept_rest(const Problem& p, const Config& c) {
  return p.wants_rest && c.dw == DwOutput::split ? Rest::bytes(p.vocab_local, p.hidden, c.rest_bits)
                                                 : 0;
}

// All that counts against the limit: the workspace, and what waits for a late factor.
int64_t taken(const Problem& p, const Config& c) {
  Arena counting;
  lay_out(p, c, counting);
  return counting.bytes() + kept_beside(p) - p.rest_bytes + kept_rest(p, c);
}

bool within_limit(const Problem& p, const Config& c) {
  return taken(p, c) <= p.options.workspace_limit_bytes;
}

// Short chunks leave dW waiting for the way out of its multiprocessors while the rest is idle or
// multiplies for dX: there the logits of the next chunk run beside it. Where every row's buffer is
// read by these products alone, and where the second buffer of rows fits. A dW in codes waits for
// its arithmetic, not for memory: it is slower so.
void run_ahead(const Problem& p, Config& c) {
  if (!forced.ahead.value_or(true)) return;
  if (c.is_wide() || c.is_transformed() || c.general || c.full || c.by_slices() ||
      c.dw == DwOutput::direct || c.sums_in_codes() || p.world > 1 || !p.wants_dx || !p.wants_dw ||
      p.wants_db || c.state_rows < c.chunk_rows || c.chunk_rows >= p.tokens ||
      c.chunk_rows > kAheadRows || c.dx_blocks > c.blocks / 2 ||
      (5 * c.dx_blocks < 2 * c.blocks &&
       dx_tiles(p, c, c.blocks / 2.0, c.chunk_rows).wave_ms >
           1))  // a dX of fewer tiles takes longer than all beside it
    return;
  c.schedule = Schedule::chunks_ahead;
  if (!within_limit(p, c)) c.schedule = Schedule::chunks;
  if (!c.runs_ahead()) return;
  // A third of the tiles, as measured with 512 rows of 4096 elements.
  const int64_t tiles = (c.chunk_rows + kPairRows - 1) / kPairRows * c.tiles;
  const int64_t early = std::max(1, c.dx_blocks / 2);
  c.logits_head_start = static_cast<int>((2 * tiles + 3 * early) / (6 * early));
}

// Sets the chunk and how many of its rows form their states at once: all, or where that makes room
// for the chunk 1024, 512 or 256, which fill the device nearly as well. Says whether the workspace
// fits.
bool fits(const Problem& p, Config& c, int64_t rows) {
  c.chunk_rows = c.state_rows = rows;
  if (within_limit(p, c)) return true;
  if (c.is_wide() || c.exp_stride == 0 || p.world > 1) return false;
  for (const int64_t part : {1024, 512, 256}) {
    if (part >= rows) continue;
    c.state_rows = part;
    if (within_limit(p, c)) return true;
  }
  return false;
}

// The fastest chunk within the limit; the smallest, where none is. Rows come in pairs of tiles; of
// short chunks, where the next whole pair is too much, even ones of a few rows less are nearly as
// good.
void choose_chunk(const Problem& p, const DeviceFacts& device, Config& c) {
  // Codes are of several chunks.
  const int64_t longest = c.sums_in_codes() ? (p.tokens + 1) / 2 : p.tokens;
  const int64_t most = round_up(std::max<int64_t>(longest, 1), kPairRows);
  Config best = c;
  best.chunk_rows = best.state_rows = kPairRows;
  best.ms = cost(p, device, c, kPairRows);
  const auto consider = [&](int64_t rows) {
    if (!fits(p, c, rows)) return false;
    c.ms = cost(p, device, c, rows);
    Config run = c;
    share_device(p, run);
    run_ahead(p, run);
    if (run.runs_ahead()) c.ms = cost_ahead(p, c);
    if (c.ms < best.ms) best = c;
    return true;
  };
  for (int64_t rows = 2 * kPairRows; rows <= std::min<int64_t>(most, 65536); rows += kPairRows)
    if (!consider(rows)) break;
  if (!c.is_wide() && c.exp_stride > 0 && p.world == 1)
    for (int64_t chunks = round_up(p.tokens, kPairRows) / kPairRows; chunks > 1; --chunks) {
      const int64_t rows = round_up((p.tokens + chunks - 1) / chunks, 32);
      if (rows > kEvenRows || (rows % kPairRows != 0 && !consider(rows))) break;
    }
  c = best;
}

// The gradient of each word needs only its row's lse: not what ranks exchange, not the best words,
// which are found in whole rows, and not what needs fp32 logits.
bool slices_can(const Problem& p, const Config& c) {
  return p.backward() && (p.wants_dx || p.wants_dw) && !c.is_wide() && c.kept == 0 &&
         p.world == 1 && p.tokens <= (int64_t{1} << 20) && forced.slices.value_or(true);
}

bool saved_are_enough(const Problem& p) {
  return p.has_saved && !p.has_upstream_entropy && !p.wants_loss && !p.wants_lse &&
         !p.wants_logprob && !p.wants_entropy && !p.wants_argmax && !p.wants_accuracy &&
         p.top_k == 0;
}

// The fastest slices that the room allows; the least, where it allows none.
Config by_slices(const Problem& p, const DeviceFacts& device, const Config& c) {
  Config s = c;
  s.chunk_rows = p.tokens;
  s.state_rows = std::min<int64_t>(2048, round_up(p.tokens, kPairRows));
  s.full = p.options.label_smoothing > 0 && p.options.softcap > 0;
  if (s.path == Path::transformed) s.path = Path::folded;
  if (s.smoothing == Smoothing::rank_one) s.smoothing = Smoothing::by_sums;
  if (p.wants_dw && is_16bit(p.dw_dtype)) s.dw = DwOutput::direct;
  s.x_in_dx = p.wants_dx && is_16bit(p.dx_dtype), s.sums_in_dx = false;
  s.schedule = saved_are_enough(p) ? Schedule::slices_saved : Schedule::slices;
  const int64_t all = round_up(p.vocab_local, 384), least = std::min<int64_t>(all, 1536);
  Config best;
  for (int64_t words = least; words <= all; words += 384) {
    s.slice_words = s.exp_stride = words;
    if (words > least && !within_limit(p, s)) break;
    for (const DxTile tile : {DxTile::tall, DxTile::square}) {
      s.dx_tile = tile, s.ms = slice_cost(p, device, s, words);
      if (best.slice_words == 0 || s.ms < best.ms) best = s;
    }
  }
  return best;
}

Config by_chunks(const Problem& p, const DeviceFacts& device, Config c) {
  choose_chunk(p, device, c);
  return c;
}

// dW rounded by the product itself: one chunk holds every row.
Config in_one_chunk(const Problem& p, const DeviceFacts& device, Config c) {
  c.dw = DwOutput::direct;
  c.chunk_rows = c.state_rows = round_up(p.tokens, kPairRows);
  c.ms = cost(p, device, c, c.chunk_rows);
  return c;
}

// Each chunk rounds a code: by so many as the relative L2 has to spare (docs/decisions/0013). One
// chunk has nothing to sum.
constexpr int64_t kMostCodes = 16;
bool codes_can(const Problem& p, const Config& c) {
  const int64_t chunks = (p.tokens + c.chunk_rows - 1) / c.chunk_rows;
  return chunks > 1 && chunks <= kMostCodes;
}

Config in_codes(const Problem& p, const DeviceFacts& device, Config c, int64_t rows) {
  c.dw = DwOutput::split, c.rest_bits = Rest::kExponents;
  c.chunk_rows = c.state_rows = rows;
  c.ms = cost(p, device, c, rows);
  return c;
}

// The ways to the problem's gradients by chunks of rows. A 16-bit dW is rounded once: by the
// product itself, from a sum that keeps more bits beside it, or from an fp32 sum in the workspace.
std::vector<Config> ways_by_chunks(const Problem& p, const DeviceFacts& device, const Config& c) {
  if (!p.wants_dw || !is_16bit(p.dw_dtype)) return {by_chunks(p, device, c)};
  std::vector<Config> ways;
  Config way = c;
  if (forced.codes.value_or(false) && !c.f16 && p.options.dw_sum == DType::f32) {
    way = in_codes(p, device, c, kPairRows);
    if (codes_can(p, way) && within_limit(p, way) && p.rest_bytes <= kept_rest(p, way))
      return {way};
    way = c;
  }
  if (!c.f16) {
    way.dw = DwOutput::split;
    for (const int bits : {8, 4, Rest::kExponents, 0}) {
      if ((bits == 0) != (p.options.dw_sum != DType::f32)) continue;
      // There the targets are in the product, and each chunk after would round their share.
      if (bits == 0 && c.is_wide()) continue;
      way.rest_bits = bits;
      if (p.rest_bytes != 0 && p.rest_bytes != kept_rest(p, way)) continue;
      const Config made = by_chunks(p, device, way);
      if (made.sums_in_codes() && !codes_can(p, made)) continue;
      ways.push_back(made);
    }
  }
  if (p.wants_rest) return ways;
  if (p.tokens <= 65536) ways.push_back(in_one_chunk(p, device, c));
  way = c;
  way.dw = DwOutput::workspace;
  ways.push_back(by_chunks(p, device, way));
  return ways;
}

// The fastest way within the limit. Where none is: the one that asks for the least.
void choose_schedule(const Problem& p, const DeviceFacts& device, Config& c) {
  std::vector<Config> ways = ways_by_chunks(p, device, c);
  const bool rounds = p.wants_dw && is_16bit(p.dw_dtype);
  // Where neither dW nor the states ask for slices, dX keeps its bits over all limits unless much
  // is to be gained.
  const bool gains = kLeastSliced <= p.vocab_local * p.hidden;
  if (slices_can(p, c) && !p.wants_rest && !forced.codes.value_or(false) &&
      ((rounds && p.options.dw_sum == DType::f32) || saved_are_enough(p) || gains)) {
    ways.push_back(by_slices(p, device, c));
    if (forced.slices.value_or(false) && within_limit(p, ways.back())) {
      c = ways.back();
      return;
    }
  }
  const Config* best = nullptr;
  for (const Config& way : ways)
    if (within_limit(p, way) && (!best || way.ms < best->ms)) best = &way;
  for (size_t i = 0; i < ways.size() && !(best && within_limit(p, *best)); ++i)
    if (!best || taken(p, ways[i]) < taken(p, *best)) best = &ways[i];
  require(best, ErrorKind::usage, "dw_rest: {} bytes; rest_bytes() says how many there are",
          p.rest_bytes);
  c = *best;
}

}  // namespace

// Ranks of one call must cut it alike, whatever shard each holds: all plan for an even shard. A
// rank with a larger one needs more than the limit.
static Problem planned(Problem p) {
  if (p.world == 1) return p;
  const int64_t own = p.vocab_local;
  p.vocab_local = (p.vocab + p.world - 1) / p.world;
  for (const int bits : {8, 4, Rest::kExponents, 0})
    if (p.rest_bytes > 0 && p.rest_bytes == Rest::bytes(own, p.hidden, bits))
      p.rest_bytes = Rest::bytes(p.vocab_local, p.hidden, bits);
  return p;
}

// One read of the weight in waves of tiles, a tile a pair of blocks. Half of the pairs ask for as
// much as the memory gives; fewer take longer for what is left.
static int64_t tile_columns(const Problem& p, const Config& c) {
  if (!c.online || p.tokens > kFewRows) return kLogitsTile;
  const auto time = [&](int64_t columns) {
    const int64_t pairs = c.blocks / 2, tiles = (p.vocab_local + columns - 1) / columns;
    const double last = static_cast<double>(tiles % pairs) / static_cast<double>(pairs);
    const double waves = static_cast<double>(tiles / pairs) + (last > 0 ? std::max(last, 0.5) : 0);
    return waves * static_cast<double>(columns);
  };
  return time(kWideLogitsTile) < time(kLogitsTile) ? kWideLogitsTile : kLogitsTile;
}

// A row's sums of tiles take no more than its dX: so the last rows of dX hold those of a chunk.
static bool dx_holds_sums(const Problem& p, const Config& c) {
  return p.wants_dx && p.world == 1 && !c.is_wide() && c.kept == 0 && !p.wants_entropy &&
         !p.has_upstream_entropy && (p.options.label_smoothing == 0 || c.sums_weight()) &&
         p.dx_row_stride == p.hidden && c.tiles * 4 <= p.hidden * size_of(p.dx_dtype);
}

// Without dW a chunk's rows serve its logits alone, which are over before its dX is written.
static bool dx_holds_x(const Problem& p, const Config& c) {
  return p.wants_dx && !p.wants_dw && !p.wants_db && p.world == 1 && !c.is_wide() && c.kept == 0 &&
         !c.sums_weight() && is_16bit(p.dx_dtype);
}

static Config decide(const Problem& p, const DeviceFacts& device) {
  Config c;
  const Options& o = p.options;
  c.blocks = std::max(2, device.sm_count / 2 * 2);
  c.memory = memory_speed(p, device);
  c.f16 = p.hidden_dtype == DType::f16;
  c.kept = candidates_kept(p);
  const bool smooth = o.label_smoothing > 0, capped = o.softcap > 0;
  bool wide = c.f16 || !p.has_targets || (smooth && o.softcap > kLargestSmoothedCap);
  // Not by the number of tokens: a row's dX must not depend on the others.
  c.two_terms = forced.two_terms.value_or(p.vocab * p.hidden <= kSmallWeight);
  wide = wide || c.two_terms || forced.wide.value_or(false);
  const bool transform = !wide && p.backward() &&
                         (p.has_upstream_entropy || (capped && (smooth || c.kept > 0)) ||
                          forced.transform.value_or(false));
  c.path = wide ? Path::wide : transform ? Path::transformed : Path::folded;
  c.full = !wide && (c.kept > 0 || transform || (smooth && capped));
  c.general = p.has_bias || o.softcap > 0 || p.has_token_scale || o.logit_scale <= 0 ||
              p.wants_entropy || p.has_upstream_entropy;
  c.online = !wide && !c.full && !p.backward() && p.tokens <= kFewTokens;
  if (smooth && !capped && !wide)
    c.smoothing = transform ? Smoothing::by_sums : Smoothing::rank_one;
  c.gather_tokens = p.world > 1 && p.sequence_parallel;
  c.exchange_dx = p.world > 1 && !p.sequence_parallel && p.wants_dx;
  c.bf16_sum = c.exchange_dx && p.dx_sum == DType::bf16;
  if (p.has_targets && (p.wants_dw || p.wants_db)) c.sort_bytes = sort_scratch_bytes(p.tokens);
  auto sized = [&](const Problem& q, Config to) {
    to.tile_columns = tile_columns(q, c);
    to.tiles = (q.vocab_local + to.tile_columns - 1) / to.tile_columns;
    if (p.backward() || wide || c.kept > 0)  // rows of whole 256 bytes, as the cache fetches them
      to.exp_stride = round_up(q.vocab_local, 128) * (c.two_terms ? 3 : wide ? 2 : 1);
    return to;
  };
  const Problem even = planned(p);
  c = sized(even, c);
  c.x_in_dx = dx_holds_x(p, c);
  c.sums_in_dx = !c.x_in_dx && dx_holds_sums(p, c);
  choose_schedule(even, device, c);
  const double ms = c.ms;
  if (!c.by_slices()) c = sized(p, c);
  if (!c.by_slices()) share_device(p, c);
  run_ahead(p, c);
  part_dx(p, c);
  c.chunks = (p.tokens + c.chunk_rows - 1) / c.chunk_rows;
  c.ms = ms;
  return c;
}

bool keeps_dx_rest(const Problem& p) { return p.world == 1 && p.hidden_dtype == DType::bf16; }

// A call asks several times for the same plan, and a step of training for the same few.
Config config(const Problem& p, const DeviceFacts& device) {
  struct Kept {
    Problem problem;
    int sm_count = 0;
    double memory = 1;
    Forced way;
    Config config;
  };
  constexpr size_t kMost = 8;
  thread_local std::vector<Kept> kept;
  thread_local size_t next = 0;
  const double memory = memory_speed(p, device);
  for (const Kept& k : kept)
    if (k.sm_count == device.sm_count && k.memory == memory && k.way == forced && k.problem == p)
      return k.config;
  Kept made{p, device.sm_count, memory, forced, decide(p, device)};
  if (kept.size() < kMost)
    kept.push_back(made);
  else
    kept[next++ % kMost] = made;
  return made.config;
}

// Whether backward is sooner done by slices that form the logits again than these chunks are.
static bool again_is_faster(const Problem& p, const DeviceFacts& device, const Config& c) {
  if (!slices_can(p, c) || !p.has_targets || p.vocab_local * p.hidden < kLeastSliced) return false;
  Problem q = p;
  q.wants_rest = q.wants_dx_rest = q.late_factor = q.wants_loss = false;
  q.rest_bytes = 0, q.has_saved = true;
  const Config slices = by_slices(q, device, c);
  return slices.from_saved() && within_limit(q, slices) &&
         slices.ms + product_flops_of_one(p) / kRates.flops < c.ms;
}

int64_t rest_bytes(const Problem& p, const DeviceFacts& device, const Config& c) {
  if (!p.wants_rest) return 0;
  // As ranks plan for an even shard, they keep a rest where one has room.
  const Problem even = planned(p);
  const bool fits = within_limit(even, p.world == 1 ? c : config(even, device));
  return fits && !again_is_faster(p, device, c) ? kept_rest(p, c) : 0;
}

}  // namespace talea::lce::sm90
