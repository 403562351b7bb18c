// What: the schedule `parallel` of lane cpu: the chunks of a segment side by side.
// Why: few heads leave threads idle; sums of turns are exact and a state joins as it does in turn,
//      so that no bit depends on the schedule.
// Never: a state of more than one segment of each head at a time.
#include <algorithm>
#include <bit>

#include "ops/mamba3/cpu/rows.hpp"
#include "ops/mamba3/cpu/run.hpp"

namespace talea::mamba3::cpu {

// Chunks of sequence n in the segment.
int64_t Run::count_of(int64_t n, int64_t segment) const {
  return std::clamp<int64_t>(chunks_of(n) - segment * plan_.segment(), 0, plan_.segment());
}

// f(worker, head's memory, chunk, slot) of every chunk of the segment.
template <typename F>
void Run::each_chunk(int64_t segment, F f) {
  const int64_t J = plan_.segment(), H = p_.heads;
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(plan_.threads))
  for (int64_t i = 0; i < p_.sequences * H * J; ++i) {
    const int64_t unit = i / J, slot = i % J;
    if (slot >= count_of(unit / H, segment)) continue;
    Worker w = worker();
    w.begin(sequence(unit / H), unit % H);
    f(w, m_.heads[unit], segment * J + slot, slot);
  }
}

// f(worker, head's memory, sequence, head).
template <typename F>
void Run::each_unit(F f) {
  const int64_t H = p_.heads;
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(plan_.threads))
  for (int64_t i = 0; i < p_.sequences * H; ++i) {
    Worker w = worker();
    w.begin(sequence(i / H), i % H);
    f(w, m_.heads[i], i / H, i % H);
  }
}

// From the turns before the segment those before each of its chunks.
void Run::segment_turns(int64_t segment) {
  const int64_t A = plan_.pairs;
  each_chunk(segment, [&](Worker& w, HeadMemory& u, int64_t chunk, int64_t slot) {
    w.turn_sum(chunk, turns_of(u, slot + 1));
  });
  each_unit([&](Worker&, HeadMemory& u, int64_t n, int64_t) {
    for (int64_t slot = 0; slot < count_of(n, segment); ++slot) {
      const uint32_t* before = turns_of(u, slot);
      uint32_t* to = turns_of(u, slot + 1);
      for (int64_t i = 0; i < A; ++i) {
        const auto whole = [&](const uint32_t* t) { return uint64_t{t[i]} << 32 | t[A + i]; };
        const uint64_t sum = whole(before) + whole(to);
        to[i] = static_cast<uint32_t>(sum >> 32);
        to[A + i] = static_cast<uint32_t>(sum);
        const float taint =
            std::bit_cast<float>(before[2 * A + i]) + std::bit_cast<float>(to[2 * A + i]);
        to[2 * A + i] = std::bit_cast<uint32_t>(taint);
      }
    }
  });
}

// From the state before the segment those before each of its chunks, and behind the last.
void Run::segment_states(int64_t segment) {
  each_chunk(segment, [&](Worker& w, HeadMemory& u, int64_t chunk, int64_t slot) {
    u.decays[slot] = w.chunk_summary(chunk, turns_of(u, slot), state_of(u, slot + 1));
  });
  each_unit([&](Worker&, HeadMemory& u, int64_t n, int64_t) {
    for (int64_t slot = 0; slot < count_of(n, segment); ++slot) {
      float* to = state_of(u, slot + 1);
      join(state_of(u, slot), u.decays[slot], to, plan_.state(), to);
    }
  });
}

// What lies behind the segment to where the next one looks for what lies before it.
void Run::carry(HeadMemory& u, int64_t count) {
  std::copy_n(state_of(u, count), plan_.state(), state_of(u, 0));
  if (plan_.pairs > 0) std::copy_n(turns_of(u, count), 3 * plan_.pairs, turns_of(u, 0));
}

void Run::forward_side_by_side() {
  each_unit([&](Worker& w, HeadMemory& u, int64_t n, int64_t) {
    if (chunks_of(n) == 0) return w.pass_through();
    w.start(state_of(u, 0), turns_of(u, 0));
  });
  for (int64_t segment = 0; segment < plan_.segments(); ++segment) {
    segment_turns(segment);
    segment_states(segment);
    each_chunk(segment, [&](Worker& w, HeadMemory& u, int64_t chunk, int64_t slot) {
      const int64_t unit = &u - m_.heads, n = unit / p_.heads;
      float* saved = nullptr;
      if (c_.out.saved) saved = saved_of(c_.out.saved, kept_before(n), n, unit % p_.heads);
      w.chunk_outputs(chunk, turns_of(u, slot), state_of(u, slot), saved);
    });
    each_unit([&](Worker&, HeadMemory& u, int64_t n, int64_t) { carry(u, count_of(n, segment)); });
  }
}

// Turns, and states where `saved` has none, at the begin of each segment.
void Run::checkpoints_side_by_side() {
  const bool saved = c_.in.saved.present;
  each_unit([&](Worker& w, HeadMemory& u, int64_t n, int64_t) {
    w.start_back(u);
    if (chunks_of(n) > 0) w.start(saved ? nullptr : state_of(u, 0), turns_of(u, 0));
  });
  for (int64_t segment = 0; segment < plan_.segments(); ++segment) {
    each_unit([&](Worker&, HeadMemory& u, int64_t n, int64_t) {
      if (count_of(n, segment) == 0) return;
      if (plan_.pairs > 0)
        std::copy_n(turns_of(u, 0), 3 * plan_.pairs, u.turns[0] + segment * 3 * plan_.pairs);
      if (!saved) std::copy_n(state_of(u, 0), plan_.state(), u.states[0] + segment * plan_.state());
    });
    if (segment + 1 == plan_.segments()) return;
    segment_turns(segment);
    if (!saved) segment_states(segment);
    each_unit([&](Worker&, HeadMemory& u, int64_t n, int64_t) { carry(u, count_of(n, segment)); });
  }
}

void Run::segment_gradients(int64_t segment) {
  const int64_t J = plan_.segment(), C = plan_.tokens;
  const auto behind = [&](HeadMemory& u, int64_t slot) {
    return u.gradients + (slot + 1) * plan_.state();
  };
  const auto at = [&](HeadMemory& u, int64_t chunk, int64_t slot) {
    return Worker::ChunkAt{chunk, slot, turns_of(u, slot), state_of(u, slot), behind(u, slot)};
  };
  each_unit([&](Worker& w, HeadMemory& u, int64_t n, int64_t) {
    const int64_t count = count_of(n, segment), last = segment * J + count - 1;
    if (count == 0) return;
    std::copy_n(u.gradient, plan_.state(), behind(u, count - 1));
    if (last + 1 == chunks_of(n)) w.find_ends(u, at(u, last, count - 1));
  });
  each_chunk(segment, [&](Worker& w, HeadMemory& u, int64_t chunk, int64_t slot) {
    u.decays[slot] = w.gradient_summary(at(u, chunk, slot), behind(u, slot - 1));
  });
  each_unit([&](Worker&, HeadMemory& u, int64_t n, int64_t) {
    for (int64_t slot = count_of(n, segment); slot-- > 0;) {
      float* to = behind(u, slot - 1);
      join(behind(u, slot), u.decays[slot], to, plan_.state(), to);
    }
    if (count_of(n, segment) > 0) std::copy_n(u.gradients, plan_.state(), u.gradient);
  });
  each_chunk(segment, [&](Worker& w, HeadMemory& u, int64_t chunk, int64_t slot) {
    w.gradients_of(u, at(u, chunk, slot));
    std::copy_n(w.sums(), plan_.parameters(), u.sums + slot * plan_.parameters());
  });
#pragma omp parallel for schedule(dynamic, 4) num_threads(static_cast <int>(plan_.threads))
  for (int64_t i = 0; i < p_.sequences * J * C; ++i) {
    const int64_t n = i / (J * C), slot = i / C % J;
    token_sums({n, segment * J + slot, slot, m_.heads + n * p_.heads}, i % C);
  }
  each_unit([&](Worker& w, HeadMemory& u, int64_t n, int64_t) {
    for (int64_t slot = count_of(n, segment); slot-- > 0;)
      w.close_chunk(u, slot, u.sums + slot * plan_.parameters());
  });
}

void Run::backward_side_by_side() {
  const Tensor& saved = c_.in.saved;
  checkpoints_side_by_side();
  for (int64_t segment = plan_.segments(); segment-- > 0;) {
    each_unit([&](Worker& w, HeadMemory& u, int64_t n, int64_t h) {
      if (count_of(n, segment) == 0) return;
      if (plan_.pairs > 0)
        std::copy_n(u.turns[0] + segment * 3 * plan_.pairs, 3 * plan_.pairs, turns_of(u, 0));
      if (saved)
        w.unpack(saved_of(saved, kept_before(n), n, h) + segment * p_.state_dim * p_.head_dim,
                 state_of(u, 0));
      else
        std::copy_n(u.states[0] + segment * plan_.state(), plan_.state(), state_of(u, 0));
    });
    segment_turns(segment);
    segment_states(segment);
    segment_gradients(segment);
  }
  each_unit([&](Worker& w, HeadMemory& u, int64_t, int64_t) { w.end_gradients(u); });
  for (int64_t i = 0; i < p_.sequences * p_.heads; ++i) add_parameters(m_.heads[i], i % p_.heads);
}

}  // namespace talea::mamba3::cpu
