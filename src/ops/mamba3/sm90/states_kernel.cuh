// What: the kernel that gives backward h and E of a segment.
// Why: they wait for nothing of each other and go side by side.
// Never: sums over heads.
#pragma once

#include "ops/mamba3/sm90/chain.cuh"
#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/launch.cuh"

namespace talea::mamba3::sm90::states {

constexpr int size = columns * values;

// What a block walks: chunks [first, end) of a sequence, of a segment that begins at `segment`,
// where its unit keeps them from `slot` on. Of a pack, a stretch of a round.
struct Walk {
  int64_t number = 0;  // of the unit
  int first = 0, end = 0, segment = 0, slot = 0;
  int place = 0, ordinal = 0;  // of a pack whose states are handed: among stretches, and in order
  bool starts = false;         // from a state of zeros
  bool crosses = true;         // leaves a state for the segment it goes to
  bool is_alone = true;        // nothing of another sequence lies behind its last state
};

// Where the turns and steps of a segment at work begin, of a unit.
template <int R, int blocks>
__device__ __forceinline__ void put_places(const Args& a, const Cut& cut, const UnitBuffers& b,
                                           int64_t number, ChainShared<R, blocks>& sh) {
  constexpr int C = tokens_of<R>;
  const int64_t at = (number >> cut.slab_bits) * a.size.segment;
  sh.turns_from = b.token_turns + at * (C * ChainShared<R, blocks>::pairs * 2);
  sh.steps_from = b.token_steps + at * cuda::chunk_step_bytes(C);
}

// The state that a unit, or a head of a pack, has where a segment begins; those of a segment beside
// each other.
__device__ __forceinline__ float* state_before(const Args& a, const UnitBuffers& b,
                                               const Wave& wave, int64_t number, int64_t segment) {
  if (!a.pack.rounds)
    return b.states + (segment * (wave.last - wave.first) * a.size.heads + number) * size;
  const int64_t group = a.pack.group;
  int64_t at = a.pack.rounds[segment].state;
  if (group > 0) at = segment % group > 0 ? segment % group : group + segment / group;
  return b.states + (number * a.pack.most_states + at) * size;
}

// h before each chunk of the segment at work, and the one behind it, as operands; or, on the way to
// the last segment, the state behind this one alone.
template <int R, int blocks, bool halves, bool handed>
__device__ __forceinline__ void states_of(const Args& a, const Cut& cut, const UnitBuffers& b,
                                          const Wave& wave, const Walk& w, bool ahead,
                                          ChainShared<R, blocks>& sh) {
  const int64_t number = w.number;
  const int first = w.first, end = w.end;
  if (threadIdx.x == 0) {
    sh.to = static_cast<__nv_bfloat16*>(b.inner) + (number * (a.size.segment + 1) + w.slot) * size;
    if constexpr (handed) sh.to += (number * (a.pack.abreast - 1) + w.ordinal) * size;
    put_places(a, cut, b, number, sh);
  }
  Chain<R, blocks, halves> chain(a, cut, sh, w.segment);
  chain.ask_parameters(b.head_parameters, false);
  float h[32];
  const float* const saved = saved_states(a, cut, sh.unit);
  if (handed && w.starts && starts_with_state(a)) {
    chain.own.take(b.first_states + int64_t{w.place} * size, h);
  } else if (w.starts) {
#pragma unroll
    for (float& x : h) x = 0;
  } else {
    chain.own.take(saved ? saved + w.first / a.size.kept_every * size
                         : state_before(a, b, wave, number, wave.segment),
                   h);
  }
  chain.template walk<false>(h, first, end, ahead ? nullptr : sh.to);
  if (ahead)
    chain.own.put(state_before(a, b, wave, number, wave.segment + 1), h);
  else if (w.is_alone)
    chain.put_last(h, sh.to + int64_t{end - first} * size);
}

// E behind each chunk of the slice at work.
template <int R, int blocks, bool halves, bool handed>
__device__ __forceinline__ void upstream_of(const Args& a, const Cut& cut, const UnitBuffers& b,
                                            const Wave& wave, const Walk& w,
                                            ChainShared<R, blocks>& sh) {
  const int64_t number = w.number;
  const int first = w.first, end = w.end;
  // What crosses from a round to the one before lies by turns in two places.
  int64_t home = a.pack.rounds ? (wave.segment & 1) * a.size.heads + number : number;
  int64_t behind = a.pack.rounds ? (~wave.segment & 1) * a.size.heads + number : number;
  if constexpr (handed) {  // behind those two what is handed
    if (!w.crosses) home = 2 * a.size.heads + w.place;
    if (w.starts) behind = 2 * a.size.heads + w.place;
  }
  if (threadIdx.x == 0) {
    sh.home = b.upstream + home * size;
    sh.to = static_cast<__nv_bfloat16*>(b.inner_upstream) +
            (number * wave.slice_chunks + w.slot) * size;
    put_places(a, cut, b, number, sh);
  }
  Chain<R, blocks, halves> chain(a, cut, sh, w.segment);
  chain.ask_parameters(b.head_parameters, true);
  float e[32];
  if (!handed && w.starts) {
#pragma unroll
    for (float& x : e) x = 0;
  } else {
    chain.own.take(b.upstream + behind * size, e);
  }
  chain.template walk<true>(e, first, end, sh.to);
  if (handed || w.crosses) chain.own.put(sh.home, e);
}

// Of a round: its stretches, the longest first, each by all heads, h before E; where h alone is
// wanted at its end, the stretch that crosses it. Nothing where the block has none.
template <int C, bool handed>
__device__ __forceinline__ bool find_stretch(const Args& a, const Cut& cut, const UnitBuffers& b,
                                             const Wave& wave, bool both, bool ahead, Unit& u,
                                             Walk& w, bool& upstream) {
  const RoundAt round(a, wave.segment);
  const int heads = a.size.heads;
  int64_t i = blockIdx.x;
  const auto head = static_cast<int>(i % heads);
  i /= heads;
  if (both) upstream = i & 1, i >>= 1;
  if (i >= round.stretches) return false;
  const cuda::Stretch x = ahead ? a.pack.stretches[round.stretch + round.stretches - 1]
                                : a.pack.by_length[round.stretch + i];
  const bool ends = is_last<C>(x);
  if (ahead && ends) return false;
  u = unit_of(a, cut, x, head);
  w.number = head;
  w.first = x.first, w.end = x.first + x.count;
  w.slot = x.number - round.first;
  w.segment = x.first - w.slot;
  w.starts = upstream ? ends : x.first == 0;
  w.crosses = x.first > 0;
  w.is_alone = handed || x.number + x.count == round.end ||
               mutant(ScanMutant::m3_state_over_the_next_sequence);
  if constexpr (handed) {
    w.place = static_cast<int>(i) * heads + head;
    if (!ahead) w.ordinal = b.ordinals[x.number];
  }
  return true;
}

// Blocks below `states` have h of a unit of the segment, those above E of the slice.
// handed: of a pack whose states are.
template <int R, int blocks, bool halves, bool handed, class... Units>
__global__ void __launch_bounds__(chain_threads, 2)
    segment_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                   const __grid_constant__ Wave wave, int64_t states, bool ahead,
                   const __grid_constant__ Units... units) {
  hopper::begin_after_earlier_kernels();
  const Cut cut = cuda::cut_of(units...);
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<ChainShared<R, blocks>*>(memory);
  bool upstream = blockIdx.x >= states;
  Unit u;
  Walk w;
  if (a.pack.rounds) {
    if (!find_stretch<tokens_of<R>, handed>(a, cut, b, wave, !ahead, ahead, u, w, upstream)) return;
  } else {
    w.number = upstream ? blockIdx.x - states : blockIdx.x;
    u = unit_at(a, cut, wave.first, w.number);
    const int64_t segment = wave.segment * a.size.segment;
    const int64_t first = upstream ? segment + wave.slice : segment;
    const int64_t count = upstream ? wave.slice_chunks : a.size.segment;
    int64_t end = cuda::chunks_of(a.size, u.tokens);
    // A segment without a chunk behind it has no state there.
    if (ahead && segment + a.size.segment >= end) return;
    end = end < first + count ? end : first + count;
    end = end < segment + a.size.segment ? end : segment + a.size.segment;
    if (first >= end) return;
    w.first = static_cast<int>(first), w.end = static_cast<int>(end);
    w.segment = static_cast<int>(segment);
  }
  if (threadIdx.x == 0) sh.unit = u;
  __syncthreads();
  if (upstream)
    upstream_of<R, blocks, halves, handed>(a, cut, b, wave, w, sh);
  else
    states_of<R, blocks, halves, handed>(a, cut, b, wave, w, ahead, sh);
}

template <class... Units>
void launch_chains(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t states,
                   int64_t upstream, bool ahead, cudaStream_t stream, const Units&... units) {
  constexpr bool cut = sizeof...(Units) > 0;  // heads that are cut are handed no states here
  using Kernel = KernelOf<Args, UnitBuffers, Wave, int64_t, bool, Units...>;
  const bool handed = args.pack.rounds && backward_hands(args);
  with_turns<true>(args.size, [&](auto rank, auto blocks, auto halves) {
    auto kernel = Kernel(segment_kernel<rank(), blocks(), halves(), false, Units...>);
    if constexpr (!cut && rank() <= 4)
      if (handed) kernel = segment_kernel<rank(), blocks(), halves(), true>;
    launch("mamba3: states", kernel, states + upstream, chain_threads,
           sizeof(ChainShared<rank(), blocks()>), stream, args, b, wave, states, ahead, units...);
  });
}

}  // namespace talea::mamba3::sm90::states
