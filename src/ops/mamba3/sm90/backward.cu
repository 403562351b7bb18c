// What: the kernel of the gradients of a segment: a block a chunk of some heads of a group.
// Why: h and E of every chunk are known, so chunks wait for nothing of each other.
// Never: sums over parts of a group.
#include "ops/mamba3/sm90/backward_gates.cuh"
#include "ops/mamba3/sm90/backward_pairs.cuh"
#include "ops/mamba3/sm90/backward_prepare.cuh"
#include "ops/mamba3/sm90/backward_rows.cuh"
#include "ops/mamba3/sm90/backward_tokens.cuh"
#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/launch.cuh"

namespace talea::mamba3::sm90 {
namespace {

template <int R, int blocks, bool halves, bool handed>
__global__ void __launch_bounds__(back_threads, 1)
    back_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                const __grid_constant__ Wave wave) {
  hopper::begin_after_earlier_kernels();
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<BackShared<R, blocks>*>(memory);
  static_assert(sizeof(BackShared<R, blocks>) <= 227 << 10);
  const cuda::Sizes& s = a.size;
  // Parts of a group lie beside each other: they read the same rows.
  int64_t number = blockIdx.x;
  Place place;
  place.part = static_cast<int>(number % b.parts), number /= b.parts;
  place.group = static_cast<int>(number % s.groups), number /= s.groups;
  place.in_slice = number % wave.slice_chunks;
  place.in_segment = wave.slice + place.in_slice;
  place.sequence = number / wave.slice_chunks;
  place.chunk = wave.segment * s.segment + place.in_segment;
  put_heads(a, b, place);
  if (threadIdx.x == 0) {
    put_chunk<tokens_of<R>>(a, wave, place, sh.unit, sh.part);
    sh.place = place;
  }
  __syncthreads();
  if (place.in_segment >= s.segment || sh.part.n <= 0 || place.first >= place.last) return;
  Backward<R, blocks, halves>(a, b, wave, sh).template run<handed>();
}

}  // namespace

void launch_back(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  const int64_t count = (wave.last - wave.first) * wave.slice_chunks * args.size.groups * b.parts;
  with_turns(args.size, [&](auto rank, auto blocks, auto halves) {
    if constexpr (!has_two_heads(rank(), 32 * blocks()))
      launch("mamba3: gradients",
             backward_hands(args) ? back_kernel<rank(), blocks(), halves(), true>
                                  : back_kernel<rank(), blocks(), halves(), false>,
             count, back_threads, sizeof(BackShared<rank(), blocks()>), stream, args, b, wave);
  });
}

}  // namespace talea::mamba3::sm90
