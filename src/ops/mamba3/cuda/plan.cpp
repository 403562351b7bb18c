// What: sizes of lane cuda: chunk, segments, slices, and where each piece lies.
// Why: a pure function of problem and device; the workspace formula is this layout without memory.
// Never: reads a tensor, or lets a limit change a bit of a result.
#include "ops/mamba3/rows/plan.hpp"

#include <algorithm>
#include <cmath>

#include "core/arena.hpp"

namespace talea::mamba3::cuda {
namespace {

constexpr int64_t plain_rows = 64;        // of a chunk that nobody asked for
constexpr int64_t reserved_bytes = 1024;  // of shared memory, for sums over a block
constexpr int64_t most_slice = 8;

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Places arrays one behind the other: in shared memory while there is room.
class Room {
 public:
  explicit Room(int64_t budget) : budget_(budget) {}
  Place take(int64_t bytes) {
    bytes = up(bytes, 128);
    Place p;
    if (shared + bytes <= budget_) {
      p.at = shared;
      shared += bytes;
    } else {
      p.at = -1 - scratch;
      scratch += bytes;
    }
    return p;
  }
  int64_t shared = 0, scratch = 0;

 private:
  int64_t budget_;
};

Place behind(Place p, int64_t bytes) { return {p.at >= 0 ? p.at + bytes : p.at - bytes}; }

enum class Work { forward, states, backward };

ChunkPlaces places_of(const Problem& p, const Plan& plan, int64_t budget, Work work) {
  ChunkPlaces c;
  const bool narrow = plan.engine == Engine::bf16;
  const int64_t size = narrow ? 2 : 4, pad = narrow ? 8 : 4, C = plan.chunk, A = p.pairs;
  const int64_t M = up(C * p.rank, 16), N = up(p.state_dim, 16), P = up(p.head_dim, 16);
  c.rows = static_cast<int>(M);
  c.padded_columns = static_cast<int>(N);
  c.padded_values = static_cast<int>(P);
  c.pad = static_cast<int>(pad);
  Room room(std::max<int64_t>(budget - reserved_bytes, 0));
  const auto operand = [&](int64_t rows, int64_t columns) {
    return room.take(rows * (columns + pad) * size);
  };
  const auto wide = [&](int64_t rows, int64_t columns) {
    return room.take(rows * (columns + 4) * 4);
  };
  const bool back = work == Work::backward, rows = work != Work::states;
  const int64_t R = p.rank, parameters = R * (2 * p.state_dim + 3 * p.head_dim) + p.head_dim;
  c.tokens = room.take(12 * (C + 1) * 4);
  c.turns = room.take(A * 8);
  c.tainted = room.take(2 * A * 4);
  c.sums = room.take(M * 4);
  c.held = room.take((p.head_dim + p.state_dim) * 4);
  c.k = operand(M, N);
  if (back) {
    c.q = operand(M, N);
    c.scaled = operand(M, P);
  } else {  // the weighed values take the place of the queries
    c.q = c.scaled = operand(M, rows ? std::max(N, P) : P);
  }
  if (rows) {
    c.v = operand(M, P);
    c.seen = operand(M, M);
  }
  if (!back && !narrow) c.state = c.wide_state = wide(P, N);
  if (rows && (back || narrow)) c.state = operand(P, N);
  if (back) {
    c.row_sums = room.take(10 * M * 4);
    c.d_y = operand(M, P);
    c.weights = operand(M, M);
    if (narrow)
      c.upstream = operand(P, N);
    else
      c.upstream = c.wide_upstream = wide(P, N);
    c.scores = c.gradient = room.take(std::max(2 * M * (M + 4), M * (std::max(N, P) + 4)) * 4);
    c.products = behind(c.scores, M * (M + 4) * 4);
  }
  if (rows) c.y = wide(M, P);
  c.parameters = room.take(parameters * 4);
  if (rows) c.decays = room.take(C * C * 4);
  c.angle = room.take(C * A * 8);
  if (!back && narrow && !plan.keeps) c.wide_state = wide(P, N);
  if (back) {
    const int64_t parts = std::max<int64_t>(512, R * std::max(p.head_dim, p.state_dim));
    c.partial = room.take(std::max({3 * parts, 4 * M, 4 * (p.state_dim + 1)}) * 4);
    c.turn = room.take(C * A * 4);
    if (narrow) c.wide_upstream = wide(P, N);
    c.given = room.take(C * A * 4);
  }
  c.shared_bytes = room.shared;
  c.scratch_bytes = room.scratch;
  return c;
}

// bf16 rows that fill tiles of 16 are multiplied as they are; others cost little, and one product
// of tf32 rounds them less. States of fp16 rows leave its range, and one product of tf32 would lose
// digits that the rows have.
Engine engine_of(const Problem& p) {
  if (p.dtype != DType::bf16) return Engine::three_tf32;
  const bool fills = p.state_dim % 16 == 0 && p.head_dim % 16 == 0;
  return fills ? Engine::bf16 : Engine::tf32;
}

// Tensor cores read bf16 operands from shared memory alone.
bool operands_fit(const ChunkPlaces& c) {
  for (const Place p : {c.q, c.k, c.v, c.scaled, c.seen, c.state, c.d_y, c.weights, c.upstream})
    if (p.at < 0) return false;
  return true;
}

// Registers hold the state where two blocks share a multiprocessor, or one of twice the threads
// has room for it.
void choose_home(Plan& plan, const ChunkPlaces& c) {
  const int64_t tiles = int64_t{c.padded_values} / 16 * ((c.padded_columns + 31) / 32);
  const int64_t warps = (tiles + kept_tiles - 1) / kept_tiles;
  plan.keeps = plan.engine == Engine::bf16 && warps <= 16;
  plan.threads = plan.keeps && warps <= 8 ? 256 : 512;
}

void place_all(Plan& plan, const Problem& p, const DeviceFacts& device) {
  // The runtime takes a KiB of each block.
  const int64_t whole = device.shared_bytes, half = (whole + 1024) / 2 - 1024;
  plan.keeps = false;
  choose_home(plan, places_of(p, plan, whole, Work::forward));
  plan.forward = places_of(p, plan, plan.threads == 256 ? half : whole, Work::forward);
  if (plan.forward.scratch_bytes > 0) {
    plan.threads = 512;
    plan.forward = places_of(p, plan, whole, Work::forward);
  }
  plan.states = places_of(p, plan, whole, Work::states);
  plan.backward = places_of(p, plan, whole, Work::backward);
}

// The least memory that side by side keeps the multiprocessors busy, within the limit.
void choose_wave(Plan& plan, const Problem& p, const DeviceFacts& device) {
  const int64_t limit = p.options.workspace_limit_bytes, n = p.sequences;
  const int64_t target = 4 * std::max(device.sm_count, 1);
  const auto fits = [&] { return workspace_of(p, plan) <= limit; };
  plan.wave = std::min(n, (target + p.heads - 1) / std::max<int64_t>(p.heads, 1));
  while (plan.wave > 1 && !fits()) --plan.wave;
  while (plan.blocks > 1 && !fits()) plan.blocks = (plan.blocks + 1) / 2;
  // Waves of one size, and as many chunks of rows by head as fit.
  if (plan.wave > 0) {
    const int64_t waves = (n + plan.wave - 1) / plan.wave;
    plan.wave = (n + waves - 1) / waves;
  }
  while (plan.slice < std::min(plan.segment, most_slice)) {
    ++plan.slice;
    if (fits()) continue;
    --plan.slice;
    break;
  }
}

}  // namespace

Plan make_plan(const Problem& p, const DeviceFacts& device) {
  Plan plan;
  plan.engine = engine_of(p);
  plan.chunk = p.options.chunk > 0 ? p.options.chunk : std::max<int64_t>(plain_rows / p.rank, 1);
  plan.chunk = std::min(plan.chunk, std::max<int64_t>(most_rows / p.rank, 1));
  plan.chunks = (p.tokens + plan.chunk - 1) / plan.chunk;
  plan.segment = std::max<int64_t>(
      1, static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(plan.chunks)))));
  plan.segments = (plan.chunks + plan.segment - 1) / plan.segment;
  if (p.pass == Pass::step) return plan;  // rows/step.cu places nothing
  place_all(plan, p, device);
  const bool fits = p.backward() ? operands_fit(plan.backward) : operands_fit(plan.forward);
  if (plan.engine == Engine::bf16 && !fits) {
    plan.engine = Engine::tf32;
    place_all(plan, p, device);
  }
  plan.blocks = std::min<int64_t>(p.sequences * p.heads, int64_t{1} << 30);
  if (scratch_of(plan, p) > 0)
    plan.blocks = std::min<int64_t>(plan.blocks, 2 * std::max(device.sm_count, 1));
  if (p.backward()) {
    choose_wave(plan, p, device);
  } else {
    while (plan.blocks > 1 && workspace_of(p, plan) > p.options.workspace_limit_bytes)
      plan.blocks = (plan.blocks + 1) / 2;
  }
  return plan;
}

}  // namespace talea::mamba3::cuda
