// What: the kernel of the gradients of a slice: a block a chunk of some heads of a group.
// Why: h and E of every chunk are known, so chunks wait for nothing of each other.
// Never: sums over parts of a group.
#pragma once

#include "ops/mamba3/sm90/gradients_form.cuh"
#include "ops/mamba3/sm90/gradients_multiply.cuh"
#include "ops/mamba3/sm90/gradients_tokens.cuh"
#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/launch.cuh"

namespace talea::mamba3::sm90::gradients {

template <int R>
inline constexpr int forming = R == 1   ? 72
                               : R == 8 ? 80
                                        : 88;  // registers
template <int R>
inline constexpr int multiplying = 256 - forming<R>;

template <int R, int blocks, bool halves, bool handed, int slabs>
__global__ void __launch_bounds__(gradient_threads, 1)
    gradients_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                     const __grid_constant__ Wave wave) {
  hopper::begin_after_earlier_kernels();
  extern __shared__ __align__(1024) char memory[];
  using Shared = GradientShared<R, blocks>;
  auto& sh = *reinterpret_cast<Shared*>(memory);
  static_assert(sizeof(Shared) <= 227 << 10);
  static_assert(!handed || slabs == 1);
  if (threadIdx.x == 0) {
    constexpr Cut cut = cuda::cut_of_slabs(slabs);
    Place place = place_of_block(a, b, wave);
    put_heads(a, cut, b, place);
    put_chunk<tokens_of<R>>(a, cut, wave, place, sh.unit, sh.part);
    if (place.in_segment >= a.size.segment) sh.part.n = 0;
    sh.place = place;
  }
  __syncthreads();
  if (sh.part.n <= 0 || sh.place.first >= sh.place.last) return;
  Gradients<R, blocks, halves, slabs>::template put_homes<handed>(a, b, wave, sh);
  __syncthreads();
  const int group = warpgroup();
  if (group < 2) {
    hopper::raise_registers<multiplying<R>>();
    Gradients<R, blocks, halves, slabs>(a, b, wave, sh).template multiply<handed>(group == 1);
  } else {
    hopper::lower_registers<forming<R>>();
    Gradients<R, blocks, halves, slabs>(a, b, wave, sh).template form<handed>(group == 2);
  }
}

// Each in a file of its own.
void launch_two_rows(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream);
void launch_four_rows(const Args& args, const Wave& wave, const UnitBuffers& b,
                      cudaStream_t stream);
void launch_eight_rows(const Args& args, const Wave& wave, const UnitBuffers& b,
                       cudaStream_t stream);
// Of heads of two slabs.
void launch_slabs_one_row(const Args& args, const Wave& wave, const UnitBuffers& b,
                          cudaStream_t stream);
void launch_slabs_two_rows(const Args& args, const Wave& wave, const UnitBuffers& b,
                           cudaStream_t stream);
void launch_slabs_four_rows(const Args& args, const Wave& wave, const UnitBuffers& b,
                            cudaStream_t stream);
void launch_slabs_eight_rows(const Args& args, const Wave& wave, const UnitBuffers& b,
                             cudaStream_t stream);

// Of R rows a token. Heads that are cut, or of eight rows a token, are handed no states here.
template <int R, int slabs = 1>
void launch_rank(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  const int64_t count = (wave.last - wave.first) * wave.slice_chunks * args.size.groups * b.parts;
  const auto run = [&](auto halves) {
    auto* kernel = gradients_kernel<R, 1, halves(), false, slabs>;
    if constexpr (R <= 4 && slabs == 1)
      if (backward_hands(args)) kernel = gradients_kernel<R, 1, halves(), true, 1>;
    launch("mamba3: gradients", kernel, count, gradient_threads, sizeof(GradientShared<R, 1>),
           stream, args, b, wave);
  };
  if (args.size.halves) return run(std::true_type{});
  run(std::false_type{});
}

}  // namespace talea::mamba3::sm90::gradients
