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

__device__ __forceinline__ Unit unit_at(const Args& a, int64_t first, int64_t number) {
  const int64_t sequence = number / a.size.heads;
  return cuda::unit_of(a, first + sequence, static_cast<int>(number - sequence * a.size.heads));
}

// The state before each segment, the turns before each chunk, and what a unit keeps from launch to
// launch.
template <int R, int blocks, bool halves>
__global__ void __launch_bounds__(chain_threads, 2)
    begin_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                 const __grid_constant__ Wave wave) {
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<ChainShared<R, blocks>*>(memory);
  const int64_t number = blockIdx.x;
  const Unit u = unit_at(a, wave.first, number);
  const int count = cuda::parameter_count(a.size), A = a.size.pairs, thread = threadIdx.x;
  for (int i = thread; i < size; i += chain_threads) b.upstream[number * size + i] = 0;
  for (int i = thread; i < count; i += chain_threads) b.parameters[number * count + i] = 0;
  if (u.tokens <= 0) return;
  if (thread < 64) sh.carried.turns[thread] = 0, sh.carried.tainted[thread] = 0;
  if (thread == 0) sh.unit = u;
  __syncthreads();
  const float* const saved = cuda::saved_states(a, u);
  const int64_t each = a.size.segment, chunks = cuda::chunks_of(a.size, u.tokens);
  const int64_t last = (chunks - 1) / each;
  const auto keep_turns = [&](int64_t chunk) {
    if (thread >= A) return;
    const uint64_t turn = sh.carried.turns[thread];
    const int tainted = sh.carried.tainted[thread];
    b.chunk_angles[(number * wave.segments * each + chunk) * A + thread] =
        angle_of(turn, tainted != 0);
    if (chunk % each != 0) return;
    const int64_t slot = (number * wave.segments + chunk / each) * A + thread;
    b.turns[slot] = turn, b.taints[slot] = tainted;
  };
  const auto keep = [&](int64_t segment, float(&h)[32]) {
    put_half(b.states + (number * wave.segments + segment) * size, h);
  };
  Chain<R, blocks, halves> chain(a, sh);
  float h[32];
  if (saved) {
#pragma unroll 1
    for (int64_t segment = 0; segment <= last; ++segment) {
      take_half(saved + segment * size, h);
      keep(segment, h);
    }
    chain.turns_alone(0, static_cast<int>(chunks), keep_turns);
    return;
  }
#pragma unroll
  for (float& x : h) x = 0;
  chain.forward(h, 0, static_cast<int>(last * each), false, [&](int chunk, float(&own)[32]) {
    keep_turns(chunk);
    if (chunk % each == 0) keep(chunk / each, own);
  });
  keep(last, h);
  __syncthreads();
  chain.turns_alone(static_cast<int>(last * each), static_cast<int>(chunks), keep_turns);
}

// h before each chunk of the segment at work, and the one behind it, as operands, and the angles of
// its tokens.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void states_of(const Args& a, const UnitBuffers& b, const Wave& wave,
                                          int64_t number, int first, int end,
                                          ChainShared<R, blocks>& sh) {
  const int64_t each = a.size.segment, A = a.size.pairs, thread = threadIdx.x;
  const int64_t slot = number * wave.segments + wave.segment;
  if (thread < A) {
    sh.carried.turns[thread] = b.turns[slot * A + thread];
    sh.carried.tainted[thread] = b.taints[slot * A + thread];
  }
  if (thread == 0) {
    sh.to = static_cast<__nv_bfloat16*>(b.inner) + number * (each + 1) * size;
    sh.token_angles = b.token_angles + number * each * tokens_of<R> * A;
  }
  __syncthreads();
  float h[32];
  take_half(b.states + slot * size, h);
  Chain<R, blocks, halves>(a, sh).forward(h, first, end, true, [&](int chunk, float(&own)[32]) {
    put_half_rounded(sh.to + int64_t{chunk - first} * size, own);
  });
  put_half_rounded(sh.to + int64_t{end - first} * size, h);
}

// E behind each chunk of the slice at work.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void upstream_of(const Args& a, const UnitBuffers& b, const Wave& wave,
                                            int64_t number, int first, int end,
                                            ChainShared<R, blocks>& sh) {
  if (threadIdx.x == 0) {
    sh.home = b.upstream + number * size;
    sh.to = static_cast<__nv_bfloat16*>(b.inner_upstream) + number * wave.slice_chunks * size;
    sh.chunk_angles = b.chunk_angles + number * wave.segments * a.size.segment * a.size.pairs;
  }
  __syncthreads();
  float e[32];
  take_half(sh.home, e);
  Chain<R, blocks, halves>(a, sh).backward(e, first, end, [&](int chunk, float(&own)[32]) {
    put_half_rounded(sh.to + int64_t{chunk - first} * size, own);
  });
  put_half(sh.home, e);
}

// Blocks below `states` have h of a unit of the segment, those above E of the slice.
template <int R, int blocks, bool halves>
__global__ void __launch_bounds__(chain_threads, 2)
    segment_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                   const __grid_constant__ Wave wave, int64_t states) {
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<ChainShared<R, blocks>*>(memory);
  const bool upstream = blockIdx.x >= states;
  const int64_t number = upstream ? blockIdx.x - states : blockIdx.x;
  const Unit u = unit_at(a, wave.first, number);
  const int64_t segment = wave.segment * a.size.segment;
  const int64_t first = upstream ? segment + wave.slice : segment;
  const int64_t count = upstream ? wave.slice_chunks : a.size.segment;
  int64_t end = cuda::chunks_of(a.size, u.tokens);
  end = end < first + count ? end : first + count;
  end = end < segment + a.size.segment ? end : segment + a.size.segment;
  if (first >= end) return;
  if (threadIdx.x == 0) sh.unit = u;
  const int from = static_cast<int>(first), to = static_cast<int>(end);
  if (upstream)
    upstream_of<R, blocks, halves>(a, b, wave, number, from, to, sh);
  else
    states_of<R, blocks, halves>(a, b, wave, number, from, to, sh);
}

void launch_chains(const Args& args, const Wave& wave, const UnitBuffers& b, bool states,
                   cudaStream_t stream) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  with_turns(args.size, [&](auto rank, auto blocks, auto halves) {
    launch("mamba3: states", segment_kernel<rank(), blocks(), halves()>, states ? 2 * units : units,
           chain_threads, sizeof(ChainShared<rank(), blocks()>), stream, args, b, wave,
           states ? units : int64_t{0});
  });
}

}  // namespace

void launch_begin(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  with_turns(args.size, [&](auto rank, auto blocks, auto halves) {
    launch("mamba3: states", begin_kernel<rank(), blocks(), halves()>, units, chain_threads,
           sizeof(ChainShared<rank(), blocks()>), stream, args, b, wave);
  });
}

// The states of a segment wait for nothing of the slice that comes first, its last, nor E for them.
void launch_segment(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  Wave last = wave;
  last.slice_chunks = b.slice;
  last.slice = (args.size.segment - 1) / b.slice * b.slice;
  launch_chains(args, last, b, true, stream);
}
void launch_upstream(const Args& args, const Wave& wave, const UnitBuffers& b,
                     cudaStream_t stream) {
  if (wave.slice + wave.slice_chunks < args.size.segment)
    launch_chains(args, wave, b, false, stream);
}

}  // namespace talea::mamba3::sm90
