// What: the kernel of the gradients of a slice of chunks.
// Why: rows by head exist for one slice at a time, and are then summed over their group.
// Never: sums over heads.
#include "ops/mamba3/sm90/backward_decays.cuh"
#include "ops/mamba3/sm90/backward_gates.cuh"
#include "ops/mamba3/sm90/backward_parameters.cuh"
#include "ops/mamba3/sm90/backward_prepare.cuh"
#include "ops/mamba3/sm90/backward_rows.cuh"
#include "ops/mamba3/sm90/backward_state.cuh"
#include "ops/mamba3/sm90/backward_tokens.cuh"
#include "ops/mamba3/sm90/launch.cuh"

namespace talea::mamba3::sm90 {
namespace {

template <int R, int blocks>
__global__ void __launch_bounds__(back_threads, 1)
    back_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                const __grid_constant__ Wave wave) {
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<BackShared<R, blocks>*>(memory);
  const int64_t sequence = blockIdx.x / static_cast<unsigned>(a.size.heads);
  const Unit u = cuda::unit_of(a, wave.first + sequence,
                               static_cast<int>(blockIdx.x - sequence * a.size.heads));
  Slice slice;
  slice.number = blockIdx.x;
  slice.begin = wave.segment * a.size.segment;
  int64_t end = cuda::chunks_of(a.size, u.tokens);
  end = end < slice.begin + a.size.segment ? end : slice.begin + a.size.segment;
  slice.low = slice.begin + wave.slice;
  slice.high = end < slice.low + wave.slice_chunks ? end : slice.low + wave.slice_chunks;
  if (slice.low >= slice.high) return;
  if (threadIdx.x == 0) sh.unit = u, sh.slice = slice;
  __syncthreads();
  Backward<R, blocks>(a, b, wave, sh).run();
}

}  // namespace

void launch_back(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  with_shape(args.size, [&](auto rank, auto blocks) {
    launch("mamba3: gradients", back_kernel<rank(), blocks()>, units, back_threads,
           sizeof(BackShared<rank(), blocks()>), stream, args, b, wave);
  });
}

}  // namespace talea::mamba3::sm90
