// What: what the device lanes lay out alike: sizes, buffers of the workspace, checkpoints.
// Why: the workspace formula is this layout without memory, for either lane.
// Never: reads a tensor, or chooses a size.
#include "ops/mamba3/rows/plan.hpp"

#include <algorithm>

#include "core/arena.hpp"
#include "ops/mamba3/mutants.hpp"
#include "ops/mamba3/rows/sums.hpp"

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

Problem in_units(const Problem& p, const Plan& plan) {
  Problem of = p;
  if (plan.values == 0) return of;
  const int64_t parts = std::max<int64_t>(p.state_dim / plan.columns, 1);
  of.heads *= parts * (p.head_dim / plan.values);
  if (parts > 1) of.pairs = plan.columns / 2;
  of.state_dim = plan.columns;
  of.head_dim = plan.values;
  return of;
}

Cut cut_of(const Problem& p, const Plan& plan) {
  Cut cut;
  if (plan.values == 0) return cut;
  cut.whole = false;
  while (plan.values << cut.slab_bits < p.head_dim) ++cut.slab_bits;
  while (plan.columns << cut.part_bits < p.state_dim) ++cut.part_bits;
  cut.columns = static_cast<int>(p.state_dim);
  cut.pairs = static_cast<int>(p.pairs);
  const bool halves = p.rotary_pairs == RotaryPairs::halves;
  cut.panel_apart = static_cast<int>(halves ? p.state_dim / 2 : plan.columns / 2);
  cut.part_apart = static_cast<int>(halves ? plan.columns / 2 : plan.columns);
  return cut;
}

Sizes sizes_of(const Problem& real, const Plan& plan) {
  const Problem p = in_units(real, plan);
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
  s.segment = plan.rounds > 0 ? plan.room : plan.segment;
  s.kept_every = kept_every(plan);
  return s;
}

// Every sequence with a token has a chunk that may be of one token.
int64_t most_chunks(const Problem& p, int64_t chunk) {
  const int64_t n = std::min(p.sequences, p.tokens);
  return (p.tokens + n * (chunk - 1)) / chunk;
}

int64_t most_rounds(const Problem& p, const Plan& plan) {
  // A sequence finds a round too full to be cut once, and not where it is the first.
  const int64_t chunks = most_chunks(p, plan.chunk), n = std::min(p.sequences, p.tokens);
  const int64_t least = least_chunks(plan.room, plan.cut_every);
  const int64_t early = std::clamp<int64_t>(n - 1, 0, chunks / least);
  const int64_t full = early + (chunks - early * least) / (plan.room - plan.cut_every + 1);
  const int64_t stretches = n + full;
  return full + (plan.abreast < std::min(plan.room, n) ? stretches / plan.abreast : 0) + 1;
}

namespace {

// What is formed of the tokens of `count` chunks a unit, of which it has `most`.
void take_tokens(Arena& arena, const Problem& p, const Plan& plan, const Cut& cut, int64_t count,
                 int64_t most, UnitBuffers& u) {
  const int64_t units = plan.wave * (p.heads >> cut.slab_bits);  // which turn alike
  if (plan.rounds > 0) most = most_chunks(p, plan.chunk);
  if (plan.by_segment) u.segment_turns = arena.take<uint64_t>(units * plan.segments * p.pairs);
  u.piece_turns =
      arena.take<uint64_t>(units * most * (plan.chunk / turn_tokens(plan.chunk)) * p.pairs);
  u.token_turns = arena.take<float>(units * count * plan.chunk * turned_pairs(p.pairs) * 2);
  u.token_steps = arena.take<char>(units * count * chunk_step_bytes(plan.chunk));
  if (!plan.beside) return;
  u.token_turns_beside = arena.take<float>(units * count * plan.chunk * turned_pairs(p.pairs) * 2);
  u.token_steps_beside = arena.take<char>(units * count * chunk_step_bytes(plan.chunk));
  if (mutant(ScanMutant::m3_one_place_of_tokens))
    u.token_turns_beside = u.token_turns, u.token_steps_beside = u.token_steps;
}

// Backward of states: before each sequence of a round, `homes` numbers; and what lies behind each.
void take_handed(Arena& arena, const Problem& p, const Plan& plan, int64_t homes, UnitBuffers& u) {
  const States& d = p.in.d_final_states;
  const int64_t heads = p.sequences * p.heads;
  u.first_states = arena.take<float>(homes);
  u.ordinals = arena.take<int32_t>(homes > 0 ? most_chunks(p, plan.chunk) : 0);
  u.ends = arena.take<float>(d.angle || d.ssm || d.k || d.v ? heads * p.pairs : 0);
  u.last_keys = arena.take<float>(d.k ? heads * p.rank * p.state_dim : 0);
}

// A sequence that is cut at any chunk fills its round. In groups: by round of a group, and by
// group.
int64_t most_states(const Problem& p, const Plan& plan) {
  if (plan.group > 0) return plan.group + plan.rounds / plan.group + 1;
  return most_chunks(p, plan.chunk) / plan.room;
}

PackRounds take_rounds(Arena& arena, const Problem& p, const Plan& plan) {
  PackRounds pack;
  if (plan.rounds == 0) return pack;
  pack.most_rounds = plan.rounds;
  pack.most_chunks = most_chunks(p, plan.chunk);
  pack.most_states = most_states(p, plan);
  pack.most_stretches = std::min(p.sequences, p.tokens) + plan.rounds;  // each round cuts one
  pack.room = static_cast<int32_t>(plan.room);
  pack.abreast = static_cast<int32_t>(plan.abreast);
  pack.group = static_cast<int32_t>(plan.group);
  pack.every = static_cast<int32_t>(plan.cut_every);
  pack.rounds = arena.take<Round>(plan.rounds + 1);
  pack.stretches = arena.take<Stretch>(pack.most_stretches);
  pack.by_length = arena.take<Stretch>(pack.most_stretches);
  pack.chunks = arena.take<PackedChunk>(pack.most_chunks);
  pack.before = arena.take<int32_t>(p.sequences + 1);
  return pack;
}

}  // namespace

Buffers lay_out(Arena& arena, const Problem& real, const Plan& plan) {
  const Problem p = in_units(real, plan);
  Buffers b;
  Cut& cut = b.cut = cut_of(real, plan);
  const bool step = p.pass == Pass::step;
  b.ends = arena.take<int64_t>(step ? p.batch : p.packed ? p.sequences + 1 : 0);
  b.kept = arena.take<int64_t>(p.packed ? p.sequences + 1 : 0);
  b.status = arena.take<int64_t>(4);
  b.scratch = arena.take<char>(plan.blocks * scratch_of(plan, p));
  b.pack = take_rounds(arena, p, plan);
  const bool rounds = plan.rounds > 0;
  const int64_t units = plan.wave * p.heads, A = p.pairs;
  const int64_t J = rounds ? plan.room : plan.segment;
  const int64_t segments = rounds ? plan.rounds : plan.segments;
  const int64_t size = int64_t{plan.backward.padded_columns} * plan.backward.padded_values;
  if (!p.backward()) {
    b.units.rates = arena.take<float>(plan.rates ? p.batch * p.tokens * p.pairs : 0);
    if (plan.ahead == 0 && !plan.hands) return b;
    // Of a pack: the states of a round, where they are handed, and what crosses its ends.
    // Stretches side by side hand on by turns in two places behind that of the first state.
    const int64_t homes = rounds && plan.ahead > 0 ? 2 + (plan.hands ? plan.abreast : 0)
                          : plan.stretch > 0       ? 3
                                                   : 1;
    b.units.upstream = arena.take<float>(homes * units * size);
    if (plan.ahead == 0) {
      b.units.turns = arena.take<uint64_t>(units * A);
      return b;
    }
    take_tokens(arena, p, plan, cut, plan.ahead, plan.chunks, b.units);
    if (plan.stretch > 0) {
      b.units.stretch = static_cast<int>(plan.stretch);
      b.units.abreast = static_cast<int>(plan.abreast);
      b.units.stretches = arena.take<float>(units * plan.abreast * size);
      b.units.head_parameters =
          arena.take<float>(p.heads * head_parameter_count(p.rank, p.state_dim, p.head_dim));
    }
    return b;
  }
  const int64_t count = p.rank * (2 * p.state_dim + 3 * p.head_dim) + p.head_dim + 1;
  const int64_t places = plan.wave * plan.slice * plan.chunk;
  const bool apart = plan.parts > 0;  // a segment's chunks side by side
  const int64_t operand = plan.engine == Engine::bf16 ? 2 : 4;
  UnitBuffers& u = b.units;
  b.totals = arena.take<double>(p.heads * count);
  const bool kept = apart && p.in.saved && plan.uses_saved;
  const int64_t states = rounds ? most_states(p, plan) : plan.segments;
  u.states = arena.take<float>(kept ? 0 : units * states * size);
  u.turns = arena.take<uint64_t>(apart ? 0 : units * plan.segments * A);
  u.taints = arena.take<int>(apart ? 0 : units * plan.segments * A);
  // Of a pack whose states are handed, each stretch has a state of its own behind its chunks.
  const int64_t stretches = rounds && plan.hands ? plan.abreast : 0;
  u.inner = arena.take<char>(units * (J + std::max<int64_t>(stretches, 1)) * size * operand);
  u.inner_turns = arena.take<uint64_t>(apart ? 0 : units * J * A);
  u.inner_taints = arena.take<int>(apart ? 0 : units * J * A);
  u.upstream = arena.take<float>(((rounds ? 2 : 1) + stretches) * units * size);
  u.ends = arena.take<float>(apart ? 0 : units * 2 * A);
  u.pending = arena.take<Pending>(apart ? 0 : units);
  u.parameters = arena.take<double>(units * count);
  const int64_t parts = p.groups * plan.parts;
  const int64_t by_head = apart ? (plan.parts > 1 ? parts << cut.part_bits : 0) : p.heads;
  u.dq = arena.take<float>(p.out.d.q ? places * by_head * p.rank * p.state_dim : 0);
  u.dk = arena.take<float>(p.out.d.k ? places * by_head * p.rank * p.state_dim : 0);
  // A line a part of a group, of whose heads other ranks may have some, or a head.
  const bool by_part = apart && gradients_ahead(cut, p.rank, p.pairs);
  const int64_t lines = by_part ? parts : std::max(p.heads, parts);
  u.dangles = arena.take<float>(p.sum_angles ? places * lines * A : 0);
  u.parts = static_cast<int>(plan.parts);
  u.slice = plan.slice;
  if (!apart) return b;
  u.inner_upstream = arena.take<char>(units * plan.slice * size * operand);
  take_tokens(arena, p, plan, cut, J, plan.by_segment ? J : segments * J, u);
  u.head_parameters =
      arena.take<float>(p.heads * head_parameter_count(p.rank, p.state_dim, p.head_dim));
  u.edges = arena.take<Edge>((by_part ? units >> cut.bits() : units) * segments * J);
  u.partial = arena.take<float>(units * plan.slice * count);
  // On the way to the last segment operands lie nowhere yet: tokens of every second one take their
  // place, where that is large enough.
  const int64_t turns = int64_t{2} * sizeof(float) * plan.chunk * turned_pairs(A);
  const bool has_room = J * turns <= (J + 1) * size * operand &&
                        J * chunk_step_bytes(plan.chunk) <= plan.slice * size * operand;
  const bool lies_there = has_room || mutant(ScanMutant::m3_tokens_over_operands);
  if (!rounds && !plan.by_segment && lies_there) {
    u.token_turns_beside = static_cast<float*>(u.inner);
    u.token_steps_beside = static_cast<char*>(u.inner_upstream);
  }
  if (plan.hands) take_handed(arena, p, plan, stretches * units * size, u);
  if (by_part || cut.bits() == 0) return b;
  // Of a head at a time, or with parts of all that a block has.
  const int64_t of_block =
      cut.part_bits > 0 ? (p.heads_per_group + plan.parts - 1) / plan.parts : 1;
  const int64_t heads = plan.wave * plan.slice * parts * of_block;
  cut.slabs = arena.take<float>(heads * slab_count(plan.chunk, A));
  if (cut.part_bits > 0)
    cut.tiles = arena.take<float>((heads << cut.slab_bits) * 2 * plan.backward.rows * p.head_dim);
  return b;
}

int64_t workspace_of(const Problem& p, const Plan& plan) {
  Arena arena;
  lay_out(arena, p, plan);
  return arena.bytes();
}

int64_t kept_every(const Plan& plan) {
  return plan.kept_every > 0 ? plan.kept_every : plan.segment;
}

int64_t saved_of(const Problem& real, const Plan& plan) {
  if (real.pass == Pass::step) return 0;
  const Problem p = in_units(real, plan);
  const int64_t J = kept_every(plan), most = (plan.chunks + J - 1) / J;
  const int64_t kept = p.packed ? most + 2 * p.sequences : p.sequences * most;
  return 4 * p.heads * p.head_dim * p.state_dim * kept;
}

}  // namespace talea::mamba3::cuda
