// What: the kernels that give backward its states: checkpoints, then h and E of a segment.
// Why: what was not kept is computed anew, a segment at a time; h and E of a segment wait for
//      nothing of each other and go side by side.
// Never: sums over heads.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/sm90/chain.cuh"
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
  if (a.saved || wave.segments == 0) return;
  float* const first = b.states + number * wave.segments * size;
  for (int i = thread; i < size; i += chain_threads) first[i] = 0;
}

// Where the turns and steps of a segment at work begin, of a unit.
template <int R, int blocks>
__device__ __forceinline__ void put_places(const Args& a, const UnitBuffers& b, int64_t number,
                                           ChainShared<R, blocks>& sh) {
  constexpr int C = tokens_of<R>;
  const int64_t at = number * a.size.segment;
  sh.turns_from = b.token_turns + at * (C * ChainShared<R, blocks>::pairs * 2);
  sh.steps_from = b.token_steps + at * cuda::chunk_step_bytes(C);
}

// h before each chunk of the segment at work, and the one behind it, as operands; or, on the way to
// the last segment, the state behind this one alone.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void states_of(const Args& a, const UnitBuffers& b, const Wave& wave,
                                          int64_t number, int first, int end, bool ahead,
                                          ChainShared<R, blocks>& sh) {
  if (threadIdx.x == 0) {
    sh.to = static_cast<__nv_bfloat16*>(b.inner) + number * (a.size.segment + 1) * size;
    put_places(a, b, number, sh);
  }
  Chain<R, blocks, halves> chain(a, sh, first);
  chain.read_parameters(b.head_parameters, false);
  if (warpgroup() == 1) {
    hopper::lower_registers<turning>();
    return chain.template turn<false>(first, end);
  }
  hopper::raise_registers<adding>();
  float h[64];
  const float* const saved = cuda::saved_states(a, sh.unit);
  take_state(saved ? saved + wave.segment * size
                   : b.states + (number * wave.segments + wave.segment) * size,
             h);
  chain.template add<false>(h, first, end, [&](int i, float(&own)[64]) {
    if (!ahead) put_rounded(sh.to + int64_t{i} * size, own);
  });
  if (ahead)
    put_state(b.states + (number * wave.segments + wave.segment + 1) * size, h);
  else
    put_rounded(sh.to + int64_t{end - first} * size, h);
}

// E behind each chunk of the slice at work.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void upstream_of(const Args& a, const UnitBuffers& b, const Wave& wave,
                                            int64_t number, int first, int end,
                                            ChainShared<R, blocks>& sh) {
  if (threadIdx.x == 0) {
    sh.home = b.upstream + number * size;
    sh.to = static_cast<__nv_bfloat16*>(b.inner_upstream) + number * wave.slice_chunks * size;
    put_places(a, b, number, sh);
  }
  Chain<R, blocks, halves> chain(a, sh, static_cast<int>(wave.segment * a.size.segment));
  chain.read_parameters(b.head_parameters, true);
  if (warpgroup() == 1) {
    hopper::lower_registers<turning>();
    return chain.template turn<true>(first, end);
  }
  hopper::raise_registers<adding>();
  float e[64];
  take_state(sh.home, e);
  chain.template add<true>(e, first, end, [&](int i, float(&own)[64]) {
    put_rounded(sh.to + int64_t{end - 1 - i - first} * size, own);
  });
  put_state(sh.home, e);
}

// Blocks below `states` have h of a unit of the segment, those above E of the slice.
template <int R, int blocks, bool halves>
__global__ void __launch_bounds__(chain_threads, 2)
    segment_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                   const __grid_constant__ Wave wave, int64_t states, bool ahead) {
  hopper::begin_after_earlier_kernels();
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<ChainShared<R, blocks>*>(memory);
  const bool upstream = blockIdx.x >= states;
  const int64_t number = upstream ? blockIdx.x - states : blockIdx.x;
  const Unit u = unit_at(a, wave.first, number);
  const int64_t segment = wave.segment * a.size.segment;
  const int64_t first = upstream ? segment + wave.slice : segment;
  const int64_t count = upstream ? wave.slice_chunks : a.size.segment;
  int64_t end = cuda::chunks_of(a.size, u.tokens);
  // A segment without a chunk behind it has no state there.
  if (ahead && segment + a.size.segment >= end) return;
  end = end < first + count ? end : first + count;
  end = end < segment + a.size.segment ? end : segment + a.size.segment;
  if (first >= end) return;
  if (threadIdx.x == 0) sh.unit = u;
  __syncthreads();
  const int from = static_cast<int>(first), to = static_cast<int>(end);
  if (upstream)
    upstream_of<R, blocks, halves>(a, b, wave, number, from, to, sh);
  else
    states_of<R, blocks, halves>(a, b, wave, number, from, to, ahead, sh);
}

void launch_chains(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t states,
                   int64_t upstream, bool ahead, cudaStream_t stream) {
  with_turns(args.size, [&](auto rank, auto blocks, auto halves) {
    launch("mamba3: states", segment_kernel<rank(), blocks(), halves()>, states + upstream,
           chain_threads, sizeof(ChainShared<rank(), blocks()>), stream, args, b, wave, states,
           ahead);
  });
}

void tokens_of_segment(const Args& args, const Wave& wave, const UnitBuffers& b,
                       cudaStream_t stream) {
  const int64_t J = args.size.segment;
  launch_tokens(args, wave, b, wave.segment * J, J, wave.segments * J, stream);
}

int64_t units_of(const Args& args, const Wave& wave) {
  return (wave.last - wave.first) * args.size.heads;
}

}  // namespace

void launch_begin(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  const int64_t units = units_of(args, wave);
  if (units == 0) return;
  launch("mamba3: first states", begin_kernel, units, chain_threads, 0, stream, args, b, wave);
  launch_parameters(args, b, stream);
  launch_turns(args, wave, b, wave.segments * args.size.segment, stream);
  if (args.saved) return;
  Wave at = wave;
  for (at.segment = 0; at.segment + 1 < wave.segments; ++at.segment) {
    tokens_of_segment(args, at, b, stream);
    launch_chains(args, at, b, units, 0, true, stream);
  }
}

// The states of a segment wait for nothing of the slice that comes first, its last, nor E for them.
void launch_segment(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  Wave last = wave;
  last.slice_chunks = b.slice;
  last.slice = (args.size.segment - 1) / b.slice * b.slice;
  tokens_of_segment(args, last, b, stream);
  launch_chains(args, last, b, units_of(args, wave), units_of(args, wave), false, stream);
}
void launch_upstream(const Args& args, const Wave& wave, const UnitBuffers& b,
                     cudaStream_t stream) {
  if (wave.slice + wave.slice_chunks < args.size.segment)
    launch_chains(args, wave, b, 0, units_of(args, wave), false, stream);
}

}  // namespace talea::mamba3::sm90
