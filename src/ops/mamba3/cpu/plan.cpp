// What: sizes of lane cpu: chunk, segments, what one thread and one head of a sequence work in.
// Why: the workspace formula is this layout run without memory.
// Never: a size that depends on the number of threads, but how many working sets there are.
#include "ops/mamba3/cpu/plan.hpp"

#include <algorithm>
#include <cmath>

#include "ops/mamba3/host_outputs.hpp"

namespace talea::mamba3::cpu {
namespace {

int64_t bytes_of(const Problem& p, const Plan& plan, bool saved) {
  Arena arena;
  Memory memory(arena, p, plan, saved);
  return arena.bytes();
}

// Each stride so many of the next, and at least `base`, that `levels` of them reach over all
// chunks.
void set_levels(Plan& plan, int levels, int64_t base) {
  plan.levels = levels;
  plan.base = base;
  const auto reach = [&] {
    int64_t all = 1;
    for (int k = 0; k < levels && all < plan.chunks; ++k) all *= plan.base;
    return all;
  };
  while (reach() < plan.chunks) ++plan.base;
  plan.stride.fill(1);
  for (int k = levels - 2; k >= 0; --k) plan.stride[k] = plan.stride[k + 1] * plan.base;
}

// A short sequence is one segment, and no state is computed twice; a longer one has as many
// segments as chunks in each. As few levels as the limit allows to a backward call on one thread,
// else those that need the least: forward and backward agree.
void choose_levels(Plan& plan, const Problem& p) {
  Problem backward = p;
  backward.pass = Pass::backward;
  backward.sum_angles = true;
  int least = 2;
  int64_t least_bytes = INT64_MAX;
  set_levels(plan, 2, std::min(plan.chunks, short_chunks));
  if (bytes_of(backward, plan, false) <= p.options.workspace_limit_bytes) return;
  for (int levels = 2; levels <= most_levels; ++levels) {
    set_levels(plan, levels, 1);
    const int64_t bytes = bytes_of(backward, plan, false);
    if (bytes <= p.options.workspace_limit_bytes) return;
    if (bytes < least_bytes) least = levels, least_bytes = bytes;
  }
  set_levels(plan, least, 1);
}

// Chunks side by side, where heads and sequences are too few for the threads.
void choose_schedule(Plan& plan, const Problem& p, int64_t threads, int64_t units) {
  const Schedule wanted = p.options.schedule;
  const bool work = p.backward() || p.out.out;
  if (wanted == Schedule::sequential || p.pass == Pass::step || !work || plan.levels > 2) return;
  if (wanted == Schedule::automatic && (units >= threads || plan.chunks < 2)) return;
  Plan parallel = plan;
  parallel.parallel = true;
  parallel.wave = p.sequences;
  parallel.threads = std::clamp<int64_t>(threads, 1, std::max<int64_t>(1, units * plan.segment()));
  const int64_t limit = p.options.workspace_limit_bytes;
  const auto over = [&] { return bytes_of(p, parallel, p.in.saved.present) > limit; };
  while (over() && parallel.threads > 1) --parallel.threads;
  if (!over()) plan = parallel;
}

}  // namespace

Plan make_plan(const Problem& p, const DeviceFacts& device) {
  Plan plan;
  const int64_t longest = std::max<int64_t>(p.tokens, 1);
  plan.rank = p.rank;
  plan.tokens = p.options.chunk > 0 ? p.options.chunk : std::max<int64_t>(1, 64 / p.rank);
  plan.tokens = std::min(plan.tokens, longest);
  plan.rows = plan.tokens * p.rank;
  plan.room = up16(plan.rows);
  plan.columns = up16(p.state_dim);
  plan.values = up16(p.head_dim);
  plan.pairs = up16(p.pairs);
  plan.turned =
      up16(std::max(plan.columns, std::max(2 * plan.pairs, p.state_dim / 2 + plan.pairs)));
  plan.chunks = (longest + plan.tokens - 1) / plan.tokens;
  choose_levels(plan, p);
  const Gradients& d = p.out.d;
  plan.needs_y = p.options.head_norm || d.mimo_out || (p.in.z && (d.z || d.mimo_z));
  const int64_t sequences = p.pass == Pass::step ? p.batch : p.sequences;
  const int64_t units = sequences * p.heads;
  const int64_t threads = p.options.threads > 0 ? p.options.threads : device.threads;
  plan.threads = std::clamp<int64_t>(threads, 1, std::max<int64_t>(1, units));
  choose_schedule(plan, p, threads, units);
  if (plan.parallel) return plan;
  const auto bytes = [&] { return bytes_of(p, plan, p.in.saved.present); };
  while (bytes() > p.options.workspace_limit_bytes && plan.threads > 1) --plan.threads;
  if (!p.backward()) return plan;
  // As many sequences side by side as give every thread work, within the limit.
  const int64_t wanted = (4 * plan.threads + p.heads - 1) / std::max<int64_t>(p.heads, 1);
  for (; plan.wave < std::min(wanted, sequences); ++plan.wave) {
    ++plan.wave;
    const bool fits = bytes() <= p.options.workspace_limit_bytes;
    --plan.wave;
    if (!fits) break;
  }
  return plan;
}

int64_t workspace_of(const Problem& p, const Plan& plan) {
  return bytes_of(p, plan, p.in.saved.present);
}

int64_t saved_of(const Problem& p, const Plan& plan) {
  const int64_t one = plan.tokens * plan.segment();
  const int64_t states =
      p.packed ? p.tokens / one + p.sequences : p.sequences * ((p.tokens + one - 1) / one);
  return 4 * p.heads * p.head_dim * p.state_dim * states;
}

std::vector<ProductFact> products_of(const Problem& p, const Plan& plan) {
  const auto real = [](int64_t x) { return static_cast<double>(x); };
  const double heads = real(p.batch) * real(p.tokens) * real(p.heads);
  const double N = real(p.state_dim), P = real(p.head_dim), R = real(p.rank);
  const double square = 2 * real(plan.rows) * R, linear = 2 * R * N * P;
  std::vector<ProductFact> list;
  const auto product = [&](const char* name, double count, double flops) {
    list.push_back({name, count, heads * flops * count});
  };
  product("Q K^T", 1, square * N);
  if (!p.backward()) {
    product("(Q K^T) V", 1, square * P);
    product("Q h^T", 1, linear), product("V^T K", 1, linear);
    return list;
  }
  product("dO V^T", 1, square * P);
  const double outputs = plan.parallel ? 2 : 1;
  if (plan.needs_y) product("(Q K^T) V", outputs, square * P), product("Q h^T", outputs, linear);
  product("W K", 1, square * N), product("W^T Q", 1, square * N);
  product("(Q K^T)^T dO", 1, square * P);
  product("dO h", 1, linear), product("V E", 1, linear), product("K E^T", 1, linear);
  product("dO^T Q", 1, linear);
  product("V^T K", p.in.saved ? plan.levels - 1 : plan.levels, linear);
  return list;
}

ThreadMemory::ThreadMemory(Arena& arena, const Problem& p, const Plan& plan) {
  const auto some_of = [&](int64_t n) { return arena.take<float>(n); };
  const int64_t C = up16(plan.tokens + 1), N = plan.columns, P = plan.values, m = plan.room;
  const int64_t R = p.rank, A = plan.pairs;
  for (float** t : {&dt, &lambda, &other, &gamma, &b, &s, &adt, &high, &low, &left, &right, &some})
    *t = some_of(C);
  left_rows = some_of(m), right_rows = some_of(m), key_rows = some_of(m);
  rates = some_of(C * A), tanh = some_of(C * A);
  cosine = some_of(plan.tokens * plan.turned + 32), sine = some_of(plan.tokens * plan.turned + 32);
  decay = some_of(plan.tokens * C);
  q_bias = some_of(R * N), k_bias = some_of(R * N);
  mimo_v = some_of(R * P), mimo_z = some_of(R * P), mimo_out = some_of(R * P), weight = some_of(P);
  raw = some_of(m * std::max(N, P)), v_raw = some_of(plan.tokens * P);
  z_raw = some_of(plan.tokens * P);
  q = some_of(m * N), k = some_of(m * N), kt = some_of(m * N);
  v = some_of(m * P), scaled = some_of(m * P);
  scores = some_of(m * m), seen = some_of(m * m);
  y = some_of(m * P), out = some_of(m * P), state = some_of(plan.state());
  joined = some_of(plan.state());
  high_turn = arena.take<uint32_t>(A), low_turn = arena.take<uint32_t>(A), taint = some_of(A);
  scratch = some_of(std::max(2 * (N + 32), m));
  vt = o = w = w_decay = w_seen = transposed = dy = dv = dz = slope = nullptr;
  turn = ds = anchor = extra = parameters = sum = nullptr;
  dot = turned = nullptr;
  pointers = nullptr;
  if (!p.backward()) return;
  slope = some_of(C * A);
  vt = some_of(m * P), o = some_of(m * P);
  w = some_of(m * m), w_decay = some_of(m * m), w_seen = some_of(m * m);
  transposed = some_of(plan.state());
  dy = some_of(m * P), dv = some_of(m * P), dz = some_of(plan.tokens * P);
  turn = some_of(plan.tokens * N), ds = some_of(C), anchor = some_of(N);
  dot = arena.take<double>(C), turned = arena.take<double>(N);
  extra = some_of(R * N);
  parameters = some_of(R * (2 * N + 3 * P) + P + 16);
  sum = some_of(std::max(R * N, A));
  pointers = arena.take<const float*>(p.heads);
}

HeadMemory::HeadMemory(Arena& arena, const Problem& p, const Plan& plan, bool saved) {
  const auto some_of = [&](int64_t n) { return arena.take<float>(n); };
  const int64_t N = plan.columns, A = plan.pairs, J = plan.side_by_side();
  const bool back = p.backward();
  for (int k = 0; k < most_levels; ++k) {
    const bool used = k < plan.levels && (back || k > 0);
    const int64_t count = used ? plan.states_of(k) : 0;
    states[k] = some_of(k == 0 && saved ? 0 : count * plan.state());
    turns[k] = arena.take<uint32_t>(count * 3 * A);
  }
  gradient = some_of(back ? plan.state() : 0);
  gradients = some_of(back && plan.parallel ? (J + 1) * plan.state() : 0);
  decays = some_of(plan.parallel ? J : 0);
  first_anchor = arena.take<double>(back ? N : 0), last_turn = arena.take<double>(back ? N : 0);
  dq = some_of(back ? J * plan.room * N : 0), dk = some_of(back ? J * plan.room * N : 0);
  dangle = some_of(back && p.sum_angles ? J * plan.tokens * A : 0);
  sums = some_of(back && plan.parallel ? J * plan.parameters() : 0);
  left = arena.take<ChunkLeft>(back ? J : 0);
  parameters = arena.take<double>(back ? plan.parameters() + 16 : 0);
  pending = {};
}

Memory::Memory(Arena& arena, const Problem& p, const Plan& plan, bool saved) {
  const int64_t units = p.backward() || plan.parallel ? plan.wave * p.heads : 0;
  ends = arena.take<int64_t>(std::max(p.sequences, p.batch) + 1);
  parameters = arena.take<double>(p.backward() ? p.heads * parameter_count(p) : 0);
  threads = arena.take<ThreadMemory>(plan.threads);
  heads = arena.take<HeadMemory>(units);
  for (int64_t i = 0; i < plan.threads; ++i) {
    const ThreadMemory one(arena, p, plan);
    if (threads) threads[i] = one;
  }
  for (int64_t i = 0; i < units; ++i) {
    const HeadMemory one(arena, p, plan, saved);
    if (heads) heads[i] = one;
  }
}

}  // namespace talea::mamba3::cpu
