// What: the kernels that give backward its states: checkpoints, then h and E of a segment.
// Why: what was not kept is computed anew, a segment at a time; h and E of a segment wait for
//      nothing of each other and go side by side.
// Never: sums over heads.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/sm90/chain.cuh"
#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/launch.cuh"

namespace talea::mamba3::sm90 {
namespace {

constexpr int size = columns * values;
constexpr int turning = 104, adding = 152;  // registers

// What a unit keeps from launch to launch.
__global__ void __launch_bounds__(chain_threads)
    begin_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                 const __grid_constant__ Wave wave) {
  hopper::begin_after_earlier_kernels();
  const int64_t number = blockIdx.x;
  const int count = cuda::parameter_count(a.size), thread = threadIdx.x;
  for (int i = thread; i < size; i += chain_threads) b.upstream[number * size + i] = 0;
  for (int i = thread; i < count; i += chain_threads) b.parameters[number * count + i] = 0;
  if (a.saved || wave.segments == 0 || a.pack.rounds) return;
  float* const first = b.states + number * wave.segments * size;
  for (int i = thread; i < size; i += chain_threads) first[i] = 0;
}

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
__device__ __forceinline__ void put_places(const Args& a, const UnitBuffers& b, int64_t number,
                                           ChainShared<R, blocks>& sh) {
  constexpr int C = tokens_of<R>;
  const int64_t at = number * a.size.segment;
  sh.turns_from = b.token_turns + at * (C * ChainShared<R, blocks>::pairs * 2);
  sh.steps_from = b.token_steps + at * cuda::chunk_step_bytes(C);
}

// The state that a unit, or a head of a pack, has where a segment begins.
__device__ __forceinline__ float* state_before(const Args& a, const UnitBuffers& b,
                                               const Wave& wave, int64_t number, int64_t segment) {
  if (!a.pack.rounds) return b.states + (number * wave.segments + segment) * size;
  const int64_t group = a.pack.group;
  int64_t at = a.pack.rounds[segment].state;
  if (group > 0) at = segment % group > 0 ? segment % group : group + segment / group;
  return b.states + (number * a.pack.most_states + at) * size;
}

// h before each chunk of the segment at work, and the one behind it, as operands; or, on the way to
// the last segment, the state behind this one alone.
template <int R, int blocks, bool halves, bool handed>
__device__ __forceinline__ void states_of(const Args& a, const UnitBuffers& b, const Wave& wave,
                                          const Walk& w, bool ahead, ChainShared<R, blocks>& sh) {
  const int64_t number = w.number;
  const int first = w.first, end = w.end;
  if (threadIdx.x == 0) {
    sh.to = static_cast<__nv_bfloat16*>(b.inner) + (number * (a.size.segment + 1) + w.slot) * size;
    if constexpr (handed) sh.to += (number * (a.pack.abreast - 1) + w.ordinal) * size;
    put_places(a, b, number, sh);
  }
  Chain<R, blocks, halves> chain(a, sh, w.segment);
  chain.read_parameters(b.head_parameters, false);
  if (warpgroup() == 1) {
    hopper::lower_registers<turning>();
    return chain.template turn<false>(first, end);
  }
  hopper::raise_registers<adding>();
  float h[64];
  const float* const saved = cuda::saved_states(a, sh.unit);
  if (handed && w.starts && starts_with_state(a)) {
    take_state(b.first_states + int64_t{w.place} * size, h);
  } else if (w.starts) {
#pragma unroll
    for (float& x : h) x = 0;
  } else {
    take_state(saved ? saved + w.first / a.size.kept_every * size
                     : state_before(a, b, wave, number, wave.segment),
               h);
  }
  chain.template add<false>(h, first, end, [&](int i, float(&own)[64]) {
    if (!ahead) put_rounded(sh.to + int64_t{i} * size, own);
  });
  if (ahead)
    put_state(state_before(a, b, wave, number, wave.segment + 1), h);
  else if (w.is_alone)
    put_rounded(sh.to + int64_t{end - first} * size, h);
}

// E behind each chunk of the slice at work.
template <int R, int blocks, bool halves, bool handed>
__device__ __forceinline__ void upstream_of(const Args& a, const UnitBuffers& b, const Wave& wave,
                                            const Walk& w, ChainShared<R, blocks>& sh) {
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
    put_places(a, b, number, sh);
  }
  Chain<R, blocks, halves> chain(a, sh, w.segment);
  chain.read_parameters(b.head_parameters, true);
  if (warpgroup() == 1) {
    hopper::lower_registers<turning>();
    return chain.template turn<true>(first, end);
  }
  hopper::raise_registers<adding>();
  float e[64];
  if (!handed && w.starts) {
#pragma unroll
    for (float& x : e) x = 0;
  } else {
    take_state(b.upstream + behind * size, e);
  }
  chain.template add<true>(e, first, end, [&](int i, float(&own)[64]) {
    put_rounded(sh.to + int64_t{end - 1 - i - first} * size, own);
  });
  if (handed || w.crosses) put_state(sh.home, e);
}

// Of a round: its stretches, the longest first, each by all heads, h before E; where h alone is
// wanted at its end, the stretch that crosses it. Nothing where the block has none.
template <int C, bool handed>
__device__ __forceinline__ bool find_stretch(const Args& a, const UnitBuffers& b, const Wave& wave,
                                             bool both, bool ahead, Unit& u, Walk& w,
                                             bool& upstream) {
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
  u = cuda::unit_of(a, x, head);
  w.number = head;
  w.first = x.first, w.end = x.first + x.count;
  w.slot = x.number - round.first;
  w.segment = x.first - w.slot;
  w.starts = upstream ? ends : x.first == 0;
  w.crosses = x.first > 0;
  w.is_alone = handed || x.number + x.count == round.end;
  if constexpr (handed) {
    w.place = static_cast<int>(i) * heads + head;
    if (!ahead) w.ordinal = b.ordinals[x.number];
  }
  return true;
}

// Blocks below `states` have h of a unit of the segment, those above E of the slice.
// handed: of a pack whose states are.
template <int R, int blocks, bool halves, bool handed>
__global__ void __launch_bounds__(chain_threads, 2)
    segment_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                   const __grid_constant__ Wave wave, int64_t states, bool ahead) {
  hopper::begin_after_earlier_kernels();
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<ChainShared<R, blocks>*>(memory);
  bool upstream = blockIdx.x >= states;
  Unit u;
  Walk w;
  if (a.pack.rounds) {
    if (!find_stretch<tokens_of<R>, handed>(a, b, wave, !ahead, ahead, u, w, upstream)) return;
  } else {
    w.number = upstream ? blockIdx.x - states : blockIdx.x;
    u = unit_at(a, wave.first, w.number);
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
    upstream_of<R, blocks, halves, handed>(a, b, wave, w, sh);
  else
    states_of<R, blocks, halves, handed>(a, b, wave, w, ahead, sh);
}

void launch_chains(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t states,
                   int64_t upstream, bool ahead, cudaStream_t stream) {
  const bool handed = args.pack.rounds && backward_hands(args);
  with_turns(args.size, [&](auto rank, auto blocks, auto halves) {
    launch("mamba3: states",
           handed ? segment_kernel<rank(), blocks(), halves(), true>
                  : segment_kernel<rank(), blocks(), halves(), false>,
           states + upstream, chain_threads, sizeof(ChainShared<rank(), blocks()>), stream, args, b,
           wave, states, ahead);
  });
}

void tokens_of_segment(const Args& args, const Wave& wave, const UnitBuffers& b, bool crossing,
                       cudaStream_t stream) {
  const int64_t J = args.size.segment;
  if (args.pack.rounds)
    return launch_tokens(args, wave, b, wave.segment, J, args.pack.most_chunks, stream, crossing);
  launch_tokens(args, wave, b, wave.segment * J, J, b.segment_turns ? J : wave.segments * J,
                stream);
}

int64_t units_of(const Args& args, const Wave& wave) {
  return (wave.last - wave.first) * args.size.heads;
}

// The states behind a segment, where there is one.
void launch_ahead(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  tokens_of_segment(args, wave, b, true, stream);
  if (args.pack.rounds) launch_ends(args, wave, b, stream, true);
  launch_chains(args, wave, b, units_of(args, wave), 0, true, stream);
}

}  // namespace

void launch_begin(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  const int64_t units = units_of(args, wave);
  if (units == 0) return;
  launch("mamba3: first states", begin_kernel, units, chain_threads, 0, stream, args, b, wave);
  if (wave.first == 0) launch_pass_back(args, stream);
  if (!args.pack.rounds && wave.segments > 0) launch_ends(args, wave, b, stream);
  launch_parameters(args, b, stream);
  const cuda::PackRounds& pack = args.pack;
  const bool by_segment = b.segment_turns != nullptr;
  if (!by_segment)
    launch_turns(args, wave, b, pack.rounds ? pack.most_chunks : wave.segments * args.size.segment,
                 stream);
  if (args.saved && !by_segment) return;
  Wave at = wave;
  for (at.segment = 0; at.segment + 1 < wave.segments; ++at.segment) {
    if (by_segment) launch_turns(args, at, b, args.size.segment, stream);
    if (!args.saved && wants_rows(args)) launch_ahead(args, at, b, stream);
  }
}

// The states of a segment wait for nothing of the slice that comes first, its last, nor E for them.
void launch_segment(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  // Rounds are taken from the last on: those of a group begin with its last.
  const int64_t group = args.pack.group, behind = wave.segment + 1;
  if (group > 0 && !args.saved && behind % group == 0 && behind < wave.segments) {
    Wave at = wave;
    for (at.segment = behind - group; at.segment + 1 < behind; ++at.segment)
      launch_ahead(args, at, b, stream);
  }
  Wave last = wave;
  last.slice_chunks = b.slice;
  last.slice = (args.size.segment - 1) / b.slice * b.slice;
  if (b.segment_turns) launch_turns(args, last, b, args.size.segment, stream);
  tokens_of_segment(args, last, b, false, stream);
  const int64_t units =
      args.pack.rounds ? int64_t{args.pack.abreast} * args.size.heads : units_of(args, wave);
  if (args.pack.rounds) launch_ends(args, last, b, stream);
  // Where E alone is wanted: of a pack its blocks lie between those of h.
  const bool both = args.pack.rounds || wants_rows(args);
  launch_chains(args, last, b, both ? units : 0, units, false, stream);
  launch_behind(args, last, b, stream);
}
void launch_upstream(const Args& args, const Wave& wave, const UnitBuffers& b,
                     cudaStream_t stream) {
  if (wave.slice + wave.slice_chunks < args.size.segment)
    launch_chains(args, wave, b, 0, units_of(args, wave), false, stream);
}

}  // namespace talea::mamba3::sm90
