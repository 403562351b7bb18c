// What: how lane sm90 cuts a problem: chunk, segments, slices, sequences side by side.
// Why: a pure function of problem and device, tested without a GPU.
// Never: reads a tensor, or lets a limit change a bit of a result.
#include "ops/mamba3/sm90/config.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "ops/mamba3/mutants.hpp"
#include "ops/mamba3/sm90/facts.hpp"

namespace talea::mamba3::sm90 {
namespace {

constexpr int64_t usual_bytes = int64_t{160} << 20;   // of backward, unless more is much faster
constexpr int64_t forward_bytes = int64_t{64} << 20;  // what forward reads stays in the cache
constexpr int64_t most_ahead = 32, usual_ahead = 8;   // chunks
constexpr int64_t pack_bytes = int64_t{160} << 20;    // of a pack, whose rounds are even where long
constexpr int64_t handed_homes = int64_t{24} << 20;   // states handed to and by a round of a pack
constexpr int64_t most_in_order = 4096;               // sequences
constexpr int64_t most_room = 1 << 16;                // chunks of a round
constexpr int64_t usual_slice = 8;    // chunks of a round are not fewer but for the limit
constexpr int64_t most_abreast = 16;  // stretches of a sequence side by side

// Stretches of a round of a pack whose states, handed to and by it, have room: backward has two of
// each in fp32, and one as an operand.
int64_t homes_of(const Problem& p) {
  const int64_t each = columns * values * (p.backward() ? 10 : 4);
  return std::max<int64_t>(handed_homes / (std::max<int64_t>(p.heads * units_of(p), 1) * each), 8);
}

int64_t pieces(int64_t of, int64_t by) { return (of + by - 1) / by; }

// An eighth of what backward reads and writes by token.
int64_t eighth_of_tensors(const Problem& p) {
  const int64_t numbers = 6 * p.heads * p.head_dim + 4 * p.rank * p.groups * p.state_dim;
  return p.batch * p.tokens * numbers * 2 / 8;
}
// Whether one of `parts` of the time is saved at least.
bool saves(int64_t time, int64_t than, int64_t parts) { return parts * time <= (parts - 1) * than; }

// How long a backward pass takes, in tenths of a head of the gradients of one multiprocessor's
// share: a block costs about one head beside its own, and a round of blocks is as long as one; the
// states go from chunk to chunk, and a segment is some launches. Those of the gradients begin with
// instructions that no multiprocessor has yet and end with the slowest block: with two rounds of
// blocks in one, M1, M2, S1 and S3 took 50 to 55 us less (H200).
struct Times {
  static constexpr int64_t head = 10, step = 4, ahead = 2, launches = 80;
};
int64_t time_of_blocks(const Problem& p, const cuda::Plan& plan, int64_t blocks) {
  const int64_t heads = pieces(p.heads_per_group, plan.parts) * units_of(p) + 1;
  return pieces(blocks, processors) * heads * Times::head;
}

// The same of a round of a pack of `room` chunks, whose sequences are taken to be twice the mean at
// most.
int64_t time_of_round(const Problem& p, const cuda::Plan& plan, int64_t room) {
  const int64_t n = std::max<int64_t>(p.sequences, 1);
  const int64_t longest = std::min(room, 2 * pieces(cuda::most_chunks(p, plan.chunk), n));
  const int64_t walked = pieces(2 * p.heads * units_of(p) * room, 2 * processors);
  return time_of_blocks(p, plan, room * p.groups * plan.parts) +
         (Times::step + Times::ahead) * std::max(longest, walked) + Times::launches;
}

// Chunks of a round of a pack, of `least` to `most`: of those whose blocks fill the
// multiprocessors, what takes least for a chunk.
int64_t even_room(const Problem& p, const cuda::Plan& plan, int64_t least, int64_t most) {
  const int64_t by_chunk = std::max<int64_t>(p.groups * plan.parts, 1);
  int64_t best = most;
  for (int64_t waves = most * by_chunk / processors; waves > 0; --waves) {
    const int64_t room = waves * processors / by_chunk;
    if (room < std::max(least, most / 2)) break;
    if (time_of_round(p, plan, room) * best < time_of_round(p, plan, best) * room) best = room;
  }
  return best;
}

// A pack in rounds of as many chunks as memory is for, or of fewer as `even` says; false: not
// within the limit. least: chunks of the shortest round that is tried.
template <class Set, class Even>
bool fit_rounds(const Problem& p, int64_t most, int64_t limit, int64_t least, cuda::Plan& plan,
                Set set, Even even) {
  const int64_t all = std::max<int64_t>(cuda::most_chunks(p, plan.chunk), 1);
  const auto bytes = [&](int64_t room) {
    plan.wave = 1;
    plan.room = std::min(room, most_room);
    plan.abreast = set(plan.room);
    plan.rounds = cuda::most_rounds(p, plan);
    if (plan.group > 0)
      plan.group = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(plan.rounds))));
    return cuda::workspace_of(p, plan);
  };
  // Rounds are fewer where they are longer, but states between them weigh less than what they hold.
  int64_t low = std::min(all, least), high = all;
  if (bytes(low) > most) return bytes(low) <= limit;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (bytes(middle) <= most)
      low = middle;
    else
      high = middle - 1;
  }
  return bytes(even(std::min(all, least), low)) <= limit;
}

int64_t turns_before(const Problem& p, int64_t chunk) {
  return p.heads * cuda::most_chunks(p, chunk) * (chunk / cuda::turn_tokens(chunk)) * p.pairs * 8;
}

bool fit_backward_rounds(const Problem& p, int64_t limit, cuda::Plan& plan) {
  const auto chunks = static_cast<double>(cuda::most_chunks(p, plan.chunk));
  const auto root = static_cast<int64_t>(std::ceil(std::sqrt(chunks)));
  const int64_t usual = std::min(limit, usual_bytes), n = std::max<int64_t>(p.sequences, 1);
  const int64_t abreast = plan.hands ? std::min(n, homes_of(p)) : n;
  // A round begins where a sequence does, or at a state of `saved`: where it has room for two such
  // parts. Where states between rounds have no room, those of a group of rounds are formed once
  // more.
  const auto tried = [&](int64_t most, bool saved, bool groups) {
    plan.uses_saved = saved;
    plan.group = groups ? 1 : 0;
    plan.cut_every = saved ? plan.segment : 1;
    const int64_t least = std::max<int64_t>(groups ? usual_slice : root, 2 * plan.cut_every);
    const bool fits = fit_rounds(
        p, most, limit, least, plan,
        [&](int64_t room) {
          plan.slice = room;
          return std::min(room, abreast);
        },
        [&](int64_t low, int64_t high) { return even_room(p, plan, low, high); });
    return fits && plan.room >= 2 * plan.cut_every;
  };
  // As dense segments do, longer rounds take more than the usual where they are much faster.
  const auto tried_twice = [&](bool saved) {
    if (!tried(usual, saved, false)) return false;
    const cuda::Plan fits = plan;
    const int64_t time = time_of_round(p, fits, fits.room);
    if (limit == usual || !tried(limit, saved, false) ||
        !saves(time_of_round(p, plan, plan.room) * fits.room, time * plan.room, 7))
      plan = fits;
    return true;
  };
  if (p.in.saved && tried_twice(true)) return true;
  return tried_twice(false) || tried(limit, false, true);
}

// Of all segments of all sequences.
int64_t time_of(const Problem& p, const cuda::Plan& plan) {
  const int64_t slices = pieces(plan.segment, plan.slice);
  const int64_t blocks = plan.wave * plan.slice * p.groups * plan.parts;
  const int64_t chains = pieces(2 * plan.wave * p.heads * units_of(p), 2 * processors);
  const int64_t each = slices * time_of_blocks(p, plan, blocks) +
                       (chains * Times::step + Times::ahead) * plan.segment + Times::launches;
  return pieces(std::max<int64_t>(p.sequences, 1), plan.wave) * plan.segments * each;
}

// Sequences side by side and chunks of a segment: of those that memory is for, what takes least. A
// segment begins at a state of `saved`, where that is given.
bool fit_segments(const Problem& p, int64_t most, cuda::Plan& plan) {
  const int64_t n = std::max<int64_t>(p.sequences, 1), J = plan.segment;
  const int64_t by_chunk = std::max<int64_t>(p.groups * plan.parts, 1);  // blocks
  cuda::Plan best;
  int64_t least = 0;
  const auto consider = [&](int64_t wave) {
    plan.wave = pieces(n, pieces(n, std::clamp<int64_t>(wave, 1, n)));
    const int64_t time = time_of(p, plan);
    if (least > 0 && time >= least) return;
    if (cuda::workspace_of(p, plan) > most) return;
    best = plan, least = time;
  };
  for (int64_t segments = std::min(2 * plan.segments, plan.chunks); segments > 0; --segments) {
    plan.segment = pieces(plan.chunks, segments);
    if (p.in.saved) plan.segment = pieces(plan.segment, J) * J;
    plan.segments = pieces(plan.chunks, plan.segment);
    plan.kept_every = J;
    plan.slice = plan.segment;
    for (int64_t rounds = 1; rounds <= 4; ++rounds)
      consider(rounds * processors / (plan.segment * by_chunk));
    consider(1);
    segments = plan.segments;
  }
  if (least == 0) return false;
  plan = best;
  return true;
}

// One sequence, whose segments are taken in slices of as many chunks as `most` has room for. False:
// it has not.
bool fit_slices(const Problem& p, int64_t most, cuda::Plan& plan) {
  plan.wave = 1;
  for (int64_t slices = 1; slices <= plan.segment; ++slices) {
    plan.slice = pieces(plan.segment, slices);
    if (cuda::workspace_of(p, plan) <= most) return true;
  }
  return false;
}

bool fit_chunks(const Problem& p, int64_t most, cuda::Plan& plan) {
  return fit_segments(p, most, plan) || fit_slices(p, most, plan);
}

void fit(const Problem& p, int64_t limit, cuda::Plan& plan) {
  plan.rounds = 0;
  plan.by_segment = false;
  if (p.packed && p.sequences > 0 && p.tokens > 0) {
    cuda::Plan rounds = plan;
    if (fit_backward_rounds(p, limit, rounds)) {
      plan = rounds;
      return;
    }
  }
  cuda::Plan least = plan, more = plan, most = plan;
  if (fit_chunks(p, limit, most)) {
    plan = limit > usual_bytes && fit_chunks(p, usual_bytes, least) ? least : most;
    // Beside large tensors a tenth is worth more memory, elsewhere a seventh.
    if (fit_chunks(p, std::min(limit, eighth_of_tensors(p)), more) &&
        saves(time_of(p, more), time_of(p, plan), 10))
      plan = more;
    if (saves(time_of(p, most), time_of(p, plan), 7)) plan = most;
    return;
  }
  // Turns before the pieces of all tokens are a quarter of what a long sequence needs.
  plan.by_segment = true;
  fit_slices(p, limit, plan);
}

// Forward asked for nothing but states: what its stretches add is all that is formed. One row a
// token has its rows turned as it is read, and forward leaves out what is not asked for.
bool wants_states_alone(const Problem& p) {
  return !p.backward() && !p.out.out && p.rank > 1 && p.tokens > 0 &&
         p.options.schedule != Schedule::sequential;
}

// Chunks of a stretch, where those of a sequence go side by side: 0 where they do not. Of all
// heads, sequences and the length alone, so that no limit changes a bit; and not of a pass that
// saves, whose states are to be those that backward forms without them.
int64_t stretch_of(const Problem& p, const cuda::Plan& plan) {
  const int64_t heads = p.total_heads > 0 ? p.total_heads : p.heads;
  const bool few = p.sequences * heads <= processors / 2;
  const bool asked = p.options.schedule == Schedule::parallel ||
                     (p.options.schedule == Schedule::automatic && few);
  const int64_t chunks = p.rank > 1 ? 16 : 8;
  const bool whole = plan.columns == 0 && p.rank <= 4;
  if (!whole || p.packed || p.out.saved) return 0;
  return (asked && plan.chunks >= 4 * chunks) || wants_states_alone(p) ? chunks : 0;
}

// Forward forms the tokens of some chunks ahead of each launch, those of the next launch beside it:
// as many as the cache holds, of as many sequences as then fit. Not for one row a token (SISO), as
// long as every multiprocessor has heads: its turns are as many numbers as the rows that they turn.
void fit_forward(const Problem& p, int64_t limit, cuda::Plan& plan) {
  const int64_t n = std::max<int64_t>(p.sequences, 1);
  // Turns before each piece of all tokens, which a sequence alone reads once, come on top.
  const int64_t turns = turns_before(p, plan.chunk);
  const int64_t most = std::min(limit, forward_bytes + (n == 1 ? turns : 0));
  if (p.packed && p.sequences > 0 && p.tokens > 0) {
    cuda::Plan rounds = plan;
    rounds.hands = hands(p);
    const int64_t homes = homes_of(p);
    const auto set = [&](int64_t room) {
      rounds.ahead = room;
      return std::min(std::min(room, n), rounds.hands ? homes : room);
    };
    const int64_t room = std::min(limit, pack_bytes + turns);
    const auto longest = [](int64_t, int64_t high) { return high; };
    if (fit_rounds(p, room, limit, usual_ahead, rounds, set, longest)) {
      plan = rounds;
      return;
    }
  }
  plan.wave = n;
  const auto is_large = [&] { return cuda::workspace_of(p, plan) > most; };
  const auto set_ahead = [&](int64_t ahead) {
    plan.ahead = ahead, plan.beside = plan.chunks > ahead;
  };
  plan.stretch = stretch_of(p, plan);
  if (plan.stretch > 0) {
    const auto set = [&](int64_t abreast) {
      plan.abreast = abreast;
      set_ahead(abreast * plan.stretch);
      if (is_large()) plan.beside = false;
    };
    const int64_t room = 2 * processors / (n * std::max<int64_t>(p.heads, 1));
    const int64_t stretches = pieces(plan.chunks, plan.stretch);
    set(std::clamp<int64_t>(room, 1, std::min(most_abreast, stretches)));
    while (plan.abreast > 1 && is_large()) set(plan.abreast - 1);
    // The last run is not left with what the others have no room for.
    set(pieces(stretches, pieces(stretches, plan.abreast)));
    while (plan.wave > 1 && is_large()) plan.wave = (plan.wave + 1) / 2;
    return;
  }
  const int64_t top = std::clamp<int64_t>(plan.chunks, 1, most_ahead);
  const int64_t least = std::min<int64_t>(top, usual_ahead);
  set_ahead(top);
  while (plan.ahead > least && is_large()) set_ahead((plan.ahead + 1) / 2);
  while (plan.wave > 1 && is_large()) plan.wave = (plan.wave + 1) / 2;
  // Where fewer sequences go, more of their chunks may.
  for (cuda::Plan fits = plan; plan.ahead < top && !is_large(); fits = plan) {
    set_ahead(std::min(2 * plan.ahead, top));
    if (is_large()) {
      plan = fits;
      break;
    }
  }
  const auto is_beyond = [&] { return cuda::workspace_of(p, plan) > limit; };
  if (is_beyond() && !mutant(ScanMutant::m3_beside_beyond_the_limit)) plan.beside = false;
  while (plan.ahead > 1 && is_beyond()) plan.ahead /= 2;
}

// The largest share of the multiprocessors that `each` blocks a chunk keep busy, of a power of two
// of chunks and at most two blocks a multiprocessor.
double busy_share(int64_t each) {
  double most = 0;
  for (int64_t blocks = each; blocks <= 2 * processors; blocks *= 2)
    most = std::max(most, static_cast<double>(blocks) /
                              static_cast<double>(pieces(blocks, processors) * processors));
  return most;
}

// The heads of a group in parts, a block each: as few parts of at most that many heads as keep the
// multiprocessors busy. Which head is summed where is of heads, groups, N and P alone: a sequence
// has the same bits whatever lies beside it.
int64_t parts_of(const Problem& p) {
  const int64_t all = std::max<int64_t>(p.heads_per_group, 1), most = 16 / units_of(p);
  const int64_t groups = std::max<int64_t>(p.groups, 1);
  int64_t best = 0;
  for (int64_t heads = std::min(all, most); heads > most / 2 || best == 0; --heads) {
    const int64_t parts = pieces(all, heads);
    if (best == 0 || busy_share(groups * parts) > busy_share(groups * best)) best = parts;
    if (heads == 1) break;
  }
  return best;
}

}  // namespace

cuda::Plan make_plan(const Problem& p, const DeviceFacts&) {
  cuda::Plan plan;
  plan.engine = cuda::Engine::bf16;
  plan.keeps = true;
  plan.threads = 256;
  plan.chunk = rows / p.rank;
  plan.chunks = (p.tokens + plan.chunk - 1) / plan.chunk;
  // A power of two: the chunks of a segment, side by side, then fill the multiprocessors.
  plan.segment = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(
      std::ceil(std::sqrt(static_cast<double>(std::max<int64_t>(plan.chunks, 1)))))));
  plan.segments = (plan.chunks + plan.segment - 1) / plan.segment;
  plan.blocks = p.sequences * p.heads * (p.pass == Pass::step ? 1 : units_of(p));
  for (cuda::ChunkPlaces* places : {&plan.forward, &plan.states, &plan.backward}) {
    places->rows = static_cast<int>(rows);
    places->padded_columns = static_cast<int>(columns);
    places->padded_values = static_cast<int>(values);
  }
  if (p.pass == Pass::step) return plan;
  const bool whole = p.state_dim == columns && p.head_dim == values;
  if (!whole) plan.columns = columns, plan.values = values;
  if (!p.backward()) {
    const int64_t limit = p.options.workspace_limit_bytes;
    const bool constant = p.in.initial_states.angle && !p.in.angles;  // turns that no token adds to
    if (p.rank > 1 || !whole || constant || p.sequences * p.heads <= processors / 2) {
      fit_forward(p, limit, plan);
      return plan;
    }
    plan.hands = hands(p);
    plan.wave = std::max<int64_t>(p.sequences, 1);
    plan.rates = p.shared_angles;
    const bool keeps = mutant(ScanMutant::m3_rates_beyond_the_limit);
    if (cuda::workspace_of(p, plan) > limit && !keeps) plan.rates = false;
    while (plan.wave > 1 && cuda::workspace_of(p, plan) > limit) plan.wave = (plan.wave + 1) / 2;
    // All of a pack are one round, where its lengths are put in order.
    if (p.packed && plan.wave == p.sequences && p.sequences <= most_in_order && p.tokens > 0) {
      cuda::Plan round = plan;
      round.rounds = 1;
      round.room = cuda::most_chunks(p, plan.chunk), round.abreast = round.room;
      if (cuda::workspace_of(p, round) <= limit) plan = round;
    }
    return plan;
  }
  plan.parts = parts_of(p);
  plan.hands = hands(p);
  fit(p, p.options.workspace_limit_bytes, plan);
  return plan;
}

}  // namespace talea::mamba3::sm90
