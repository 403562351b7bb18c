// What: what each stretch of a run of chunks adds to the state before it; and, where forward is asked
//       for states alone, the state behind a run.
// Why: few heads leave multiprocessors idle, and a long sequence has chunks enough for all; a state
//      needs no row of q and no output.
// Never: walks a chunk from the state before its stretch.
#include "ops/mamba3/sm90/chain.cuh"
#include "ops/mamba3/sm90/forward_rows.cuh"
#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/launch.cuh"

namespace talea::mamba3::sm90 {
namespace {

// A block a stretch, those of a unit beside each other. last: that of a sequence, too, which
// nothing follows.
template <int R, int blocks, bool halves>
__global__ void __launch_bounds__(chain_threads, 2)
    stretches_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                     const __grid_constant__ Wave wave, int run, int ahead, bool last) {
  hopper::begin_after_earlier_kernels();
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<ChainShared<R, blocks>*>(memory);
  constexpr int C = tokens_of<R>;
  const int64_t number = blockIdx.x / b.abreast;
  const Unit u = unit_at(a, Cut{}, wave.first, number);
  const int first = run + static_cast<int>(blockIdx.x % b.abreast) * b.stretch;
  const auto chunks = static_cast<int>(cuda::chunks_of(a.size, u.tokens));
  const int end = last && first + b.stretch > chunks ? chunks : first + b.stretch;
  if (last ? first >= end : end >= chunks) return;
  if (threadIdx.x == 0) {
    sh.unit = u;
    sh.turns_from = b.token_turns + number * ahead * (C * ChainShared<R, blocks>::pairs * 2);
    sh.steps_from = b.token_steps + number * ahead * cuda::chunk_step_bytes(C);
  }
  __syncthreads();
  const Cut whole;
  Chain<R, blocks, halves> chain(a, whole, sh, run);
  chain.ask_parameters(b.head_parameters, false);
  float h[32];
#pragma unroll
  for (float& x : h) x = 0;
  chain.template walk<false>(h, first, end, nullptr);
  chain.own.put(b.stretches + int64_t{blockIdx.x} * (columns * values), h);
}

// A block a unit: the state behind a run in the place of that before it.
template <int R>
__global__ void __launch_bounds__(chain_threads)
    join_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                const __grid_constant__ Wave wave, int run, int ahead) {
  hopper::begin_after_earlier_kernels();
  __shared__ float decays[forward::most_abreast];
  const int64_t number = blockIdx.x;
  const Unit u = unit_at(a, Cut{}, wave.first, number);
  const auto chunks = static_cast<int>(cuda::chunks_of(a.size, u.tokens)) - run;
  const int known = chunks < ahead ? chunks : ahead;
  const int stretches = (known + b.stretch - 1) / b.stretch, thread = threadIdx.x;
  if (stretches <= 0) return;
  if (thread < stretches) {
    const auto* const steps = reinterpret_cast<const ChunkSteps<tokens_of<R>>*>(
        b.token_steps + number * ahead * cuda::chunk_step_bytes(tokens_of<R>));
    const int end = known < (thread + 1) * b.stretch ? known : (thread + 1) * b.stretch;
    float decay = 1;
    for (int chunk = thread * b.stretch; chunk < end; ++chunk) decay *= steps[chunk].whole;
    decays[thread] = decay;
  }
  __syncthreads();
  constexpr int size = columns * values, pieces = size / 4;
  auto* const home = reinterpret_cast<float4*>(b.upstream + number * size);
  const auto* const own = reinterpret_cast<const float4*>(b.stretches + number * b.abreast * size);
  const bool starts = run == 0 && !starts_with_state(a);
  // Some at a time: a load does not go ahead of a store.
  constexpr int at_once = 8;
  static_assert(pieces % (at_once * chain_threads) == 0);
#pragma unroll 1
  for (int first = thread; first < pieces; first += at_once * chain_threads) {
    float4 h[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i)
      h[i] = starts ? float4{0, 0, 0, 0} : home[first + i * chain_threads];
#pragma unroll 1
    for (int j = 0; j < stretches; ++j) {
      float4 more[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i) more[i] = own[j * pieces + first + i * chain_threads];
      const float by = decays[j];
#pragma unroll
      for (int i = 0; i < at_once; ++i)
        h[i] = {forward::joined(h[i].x, by, more[i].x), forward::joined(h[i].y, by, more[i].y),
                forward::joined(h[i].z, by, more[i].z), forward::joined(h[i].w, by, more[i].w)};
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) home[first + i * chain_threads] = h[i];
  }
}

}  // namespace

void launch_stretches(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t first,
                      int64_t ahead, bool last, cudaStream_t stream) {
  const int64_t blocks = (wave.last - wave.first) * args.size.heads * b.abreast;
  with_turns<false>(args.size, [&](auto rank, auto of_pairs, auto halves) {
    launch("mamba3: stretches", stretches_kernel<rank(), of_pairs(), halves()>, blocks,
           chain_threads, sizeof(ChainShared<rank(), of_pairs()>), stream, args, b, wave,
           static_cast<int>(first), static_cast<int>(ahead), last);
  });
}

void launch_join(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t first,
                 int64_t ahead, cudaStream_t stream) {
  with_shape<false>(args.size, [&](auto rank, auto) {
    launch("mamba3: states behind a run", join_kernel<rank()>,
           (wave.last - wave.first) * args.size.heads, chain_threads, 0, stream, args, b, wave,
           static_cast<int>(first), static_cast<int>(ahead));
  });
}

}  // namespace talea::mamba3::sm90
