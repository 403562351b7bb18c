// What: what the device lanes lay out alike: sizes, buffers of the workspace, checkpoints.
// Why: the workspace formula is this layout without memory, for either lane.
// Never: reads a tensor, or chooses a size.
#include "ops/mamba3/rows/plan.hpp"

#include "core/arena.hpp"

namespace talea::mamba3::cuda {

const char* name_of(Engine engine) {
  switch (engine) {
    case Engine::three_tf32:
      return "fp32 as three products of tf32";
    case Engine::tf32:
      return "one product of tf32";
    case Engine::bf16:
      break;
  }
  return "bf16";
}

int64_t scratch_of(const Plan& plan, const Problem& p) {
  if (!p.backward()) return plan.forward.scratch_bytes;
  return std::max(plan.states.scratch_bytes, plan.backward.scratch_bytes);
}

Sizes sizes_of(const Problem& p, const Plan& plan) {
  Sizes s;
  s.batch = p.batch;
  s.tokens = p.tokens;
  s.sequences = p.pass == Pass::step ? p.batch : p.sequences;
  s.state_rows = p.state_rows;
  s.heads = static_cast<int>(p.heads);
  s.groups = static_cast<int>(p.groups);
  s.heads_per_group = static_cast<int>(p.heads_per_group);
  s.head_offset = static_cast<int>(p.head_offset);
  s.rank = static_cast<int>(p.rank);
  s.columns = static_cast<int>(p.state_dim);
  s.values = static_cast<int>(p.head_dim);
  s.pairs = static_cast<int>(p.pairs);
  s.halves = p.rotary_pairs == RotaryPairs::halves && p.state_dim % 2 == 0;
  s.head_norm = p.options.head_norm;
  s.reduce = p.reduce;
  s.packed = p.packed;
  s.step = p.pass == Pass::step;
  s.backward = p.backward();
  s.sum_angles = p.sum_angles;
  s.accumulate = p.out.d.accumulate_parameters;
  s.eps = static_cast<float>(p.options.norm_eps);
  s.reciprocal = static_cast<unsigned>(65536 / p.rank + 1);
  s.chunk = static_cast<int>(plan.chunk);
  s.segment = plan.segment;
  return s;
}

namespace {

// What is formed of the tokens of `count` chunks a unit, of which it has `most`.
void take_tokens(Arena& arena, const Problem& p, const Plan& plan, int64_t count, int64_t most,
                 UnitBuffers& u) {
  const int64_t units = plan.wave * p.heads;
  u.piece_turns = arena.take<uint64_t>(units * most * (plan.chunk / turn_tokens) * p.pairs);
  u.token_turns = arena.take<float>(units * count * plan.chunk * turned_pairs(p.pairs) * 2);
  u.token_steps = arena.take<char>(units * count * chunk_step_bytes(plan.chunk));
}

}  // namespace

Buffers lay_out(Arena& arena, const Problem& p, const Plan& plan) {
  Buffers b;
  const bool step = p.pass == Pass::step;
  b.ends = arena.take<int64_t>(step ? p.batch : p.packed ? p.sequences + 1 : 0);
  b.kept = arena.take<int64_t>(p.packed ? p.sequences + 1 : 0);
  b.status = arena.take<int64_t>(4);
  b.scratch = arena.take<char>(plan.blocks * scratch_of(plan, p));
  const int64_t units = plan.wave * p.heads, A = p.pairs, J = plan.segment;
  const int64_t size = int64_t{plan.backward.padded_columns} * plan.backward.padded_values;
  if (!p.backward()) {
    if (plan.ahead == 0 && !plan.hands) return b;
    b.units.upstream = arena.take<float>(units * size);
    if (plan.ahead == 0) {
      b.units.turns = arena.take<uint64_t>(units * A);
      return b;
    }
    take_tokens(arena, p, plan, plan.ahead, plan.chunks, b.units);
    return b;
  }
  const int64_t count = p.rank * (2 * p.state_dim + 3 * p.head_dim) + p.head_dim + 1;
  const int64_t places = plan.wave * plan.slice * plan.chunk;
  const bool apart = plan.parts > 0;  // a segment's chunks side by side
  const int64_t operand = plan.engine == Engine::bf16 ? 2 : 4;
  UnitBuffers& u = b.units;
  b.totals = arena.take<double>(p.heads * count);
  u.states = arena.take<float>(apart && p.in.saved ? 0 : units * plan.segments * size);
  u.turns = arena.take<uint64_t>(apart ? 0 : units * plan.segments * A);
  u.taints = arena.take<int>(apart ? 0 : units * plan.segments * A);
  u.inner = arena.take<char>(units * (J + 1) * size * operand);
  u.inner_turns = arena.take<uint64_t>(apart ? 0 : units * J * A);
  u.inner_taints = arena.take<int>(apart ? 0 : units * J * A);
  u.upstream = arena.take<float>(units * size);
  u.ends = arena.take<float>(apart ? 0 : units * 2 * A);
  u.pending = arena.take<Pending>(apart ? 0 : units);
  u.parameters = arena.take<double>(units * count);
  const int64_t by_head = apart ? (plan.parts > 1 ? p.groups * plan.parts : 0) : p.heads;
  u.dq = arena.take<float>(p.out.d.q ? places * by_head * p.rank * p.state_dim : 0);
  u.dk = arena.take<float>(p.out.d.k ? places * by_head * p.rank * p.state_dim : 0);
  u.dangles = arena.take<float>(p.sum_angles ? places * p.heads * A : 0);
  u.parts = static_cast<int>(plan.parts);
  u.slice = plan.slice;
  if (!apart) return b;
  u.inner_upstream = arena.take<char>(units * plan.slice * size * operand);
  take_tokens(arena, p, plan, J, plan.segments * J, u);
  u.head_parameters =
      arena.take<float>(p.heads * head_parameter_count(p.rank, p.state_dim, p.head_dim));
  u.edges = arena.take<Edge>(units * plan.segments * J);
  u.partial = arena.take<float>(units * plan.slice * count);
  return b;
}

int64_t workspace_of(const Problem& p, const Plan& plan) {
  Arena arena;
  lay_out(arena, p, plan);
  return arena.bytes();
}

int64_t saved_of(const Problem& p, const Plan& plan) {
  if (p.pass == Pass::step) return 0;
  const int64_t kept = p.packed ? plan.segments + 2 * p.sequences : p.sequences * plan.segments;
  return 4 * p.heads * p.head_dim * p.state_dim * kept;
}

}  // namespace talea::mamba3::cuda
