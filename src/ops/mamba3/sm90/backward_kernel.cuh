// What: the kernel of the gradients of a segment: a block a chunk of some heads of a group.
// Why: h and E of every chunk are known, so chunks wait for nothing of each other.
// Never: sums over parts of a group.
#pragma once

#include "ops/mamba3/sm90/backward_gates.cuh"
#include "ops/mamba3/sm90/backward_pairs.cuh"
#include "ops/mamba3/sm90/backward_prepare.cuh"
#include "ops/mamba3/sm90/backward_rows.cuh"
#include "ops/mamba3/sm90/backward_tokens.cuh"
#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/launch.cuh"

namespace talea::mamba3::sm90::backward {

template <int R, int blocks, bool halves, bool handed, class... Units>
__global__ void __launch_bounds__(back_threads, 1)
    back_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                const __grid_constant__ Wave wave, const __grid_constant__ Units... units) {
  hopper::begin_after_earlier_kernels();
  const Cut cut = cuda::cut_of(units...);
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<BackShared<R, blocks>*>(memory);
  static_assert(sizeof(UnitShared<R, blocks>) <= 227 << 10);
  Place place = place_of_block(a, b, wave);
  put_heads(a, cut, b, place);
  if (threadIdx.x == 0) {
    put_chunk<tokens_of<R>>(a, cut, wave, place, sh.unit, sh.part);
    sh.place = place;
  }
  __syncthreads();
  if (place.in_segment >= a.size.segment || sh.part.n <= 0 || place.first >= place.last) return;
  Backward<R, blocks, halves> chunk(a, cut, b, wave, sh);
  if constexpr (sizeof...(Units) == 0) {
    chunk.template run<false, handed>(0);
  } else {
#pragma unroll 1
    for (int part = 0; part < 1 << cut.part_bits; ++part) {
      if (part > 0) __syncthreads();
      chunk.template run<true, handed>(part);
    }
  }
}

// Heads that are cut, or of eight rows a token, are handed no states here.
template <int R, int blocks, bool halves, class... Units>
KernelOf<Args, UnitBuffers, Wave, Units...> kernel_of(const Args& args) {
  using Kernel = KernelOf<Args, UnitBuffers, Wave, Units...>;
  if constexpr (sizeof...(Units) == 0 && R <= 4)
    if (backward_hands(args)) return back_kernel<R, blocks, halves, true>;
  return Kernel(back_kernel<R, blocks, halves, false, Units...>);
}

template <class... Units>
void launch_back(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream,
                 const Units&... units) {
  constexpr bool cut = sizeof...(Units) > 0;
  const int64_t count = (wave.last - wave.first) * wave.slice_chunks * args.size.groups * b.parts;
  with_turns<true>(args.size, [&](auto rank, auto blocks, auto halves) {
    using Memory = std::conditional_t<cut, UnitShared<rank(), blocks()>,  //
                                      BackShared<rank(), blocks()>>;
    if constexpr (cut || !has_two_heads(rank(), 32 * blocks()))
      launch("mamba3: gradients", kernel_of<rank(), blocks(), halves(), Units...>(args), count,
             back_threads, sizeof(Memory), stream, args, b, wave, units...);
  });
}

}  // namespace talea::mamba3::sm90::backward
