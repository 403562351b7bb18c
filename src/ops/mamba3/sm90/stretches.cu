// What: what each stretch of a run of chunks adds to the state before it, where stretches go side by
//       side.
// Why: few heads leave multiprocessors idle, and a long sequence has chunks enough for all.
// Never: knows the state before a stretch.
#include "ops/mamba3/sm90/chain.cuh"
#include "ops/mamba3/sm90/launch.cuh"

namespace talea::mamba3::sm90 {
namespace {

// A block a stretch, those of a unit beside each other. Nothing follows the last of a sequence.
template <int R, int blocks, bool halves>
__global__ void __launch_bounds__(chain_threads, 2)
    stretches_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                     const __grid_constant__ Wave wave, int run, int ahead) {
  hopper::begin_after_earlier_kernels();
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<ChainShared<R, blocks>*>(memory);
  constexpr int C = tokens_of<R>;
  const int64_t number = blockIdx.x / b.abreast;
  const Unit u = unit_at(a, Cut{}, wave.first, number);
  const int first = run + static_cast<int>(blockIdx.x % b.abreast) * b.stretch;
  const int end = first + b.stretch;
  if (end >= cuda::chunks_of(a.size, u.tokens)) return;
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

}  // namespace

void launch_stretches(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t first,
                      int64_t ahead, cudaStream_t stream) {
  const int64_t blocks = (wave.last - wave.first) * args.size.heads * b.abreast;
  with_turns<false>(args.size, [&](auto rank, auto of_pairs, auto halves) {
    launch("mamba3: stretches", stretches_kernel<rank(), of_pairs(), halves()>, blocks,
           chain_threads, sizeof(ChainShared<rank(), of_pairs()>), stream, args, b, wave,
           static_cast<int>(first), static_cast<int>(ahead));
  });
}

}  // namespace talea::mamba3::sm90
