// What: the launches of the kernels of tokens, of whole heads and of heads that are cut into units.
// Why: both know the same kernels, and compile in files of their own.
// Never: forms anything of a token.
#pragma once

#include "ops/mamba3/sm90/launch.cuh"
#include "ops/mamba3/sm90/tokens_kernels.cuh"

namespace talea::mamba3::sm90::tokens {

// Heads of sequences, as many at a time as a warp has.
inline int64_t groups_of(const Args& a, const Cut& cut, const Wave& w, int together) {
  return (w.last - w.first) * ((cut.turning_of(a.size) + together - 1) / together);
}
inline int64_t blocks_of(int64_t items) { return (items + warps - 1) / warps; }

template <class... Units>
void launch_turns(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t most,
                  cudaStream_t stream, const Units&... units) {
  const Cut cut = cuda::cut_of(units...);
  const int64_t pieces = most * (args.size.chunk / cuda::turn_tokens(args.size.chunk));
  const int64_t groups = groups_of(args, cut, wave, summed_together);
  if (groups * pieces * args.size.pairs == 0 || !turns_asked(args)) return;
  with_shape<true>(args.size, [&](auto rank, auto) {
    launch("mamba3: turns of pieces",
           KernelOf<Args, UnitBuffers, Wave, int64_t, int64_t, Units...>(
               sums_kernel<rank(), Units...>),
           blocks_of(groups * pieces), threads, 0, stream, args, b, wave,
           b.segment_turns ? wave.segment * most : whole_pack, most, units...);
  });
  const int64_t sequences = args.pack.rounds ? args.size.sequences : wave.last - wave.first;
  // Of a pack of short sequences a warp a unit, whose pieces are as few.
  const int64_t all = sequences * cut.turning_of(args.size);
  const int together = args.pack.rounds && pieces / sequences <= 32 ? 8 : 1;
  launch(
      "mamba3: turns before pieces",
      KernelOf<Args, UnitBuffers, Wave, int64_t, int64_t, int, Units...>(before_kernel<Units...>),
      (all + together - 1) / together, 256, 0, stream, args, b, wave, pieces, all, together,
      units...);
}

template <class... Units>
void launch_parameters(const Args& args, const UnitBuffers& b, cudaStream_t stream,
                       const Units&... units) {
  with_shape<true>(args.size, [&](auto rank, auto) {
    launch("mamba3: parameters of heads",
           KernelOf<Args, UnitBuffers, Units...>(parameters_kernel<rank(), Units...>),
           int64_t{args.size.heads}, threads, 0, stream, args, b, units...);
  });
}

template <class... Units>
void launch_tokens(const Args& args, const Wave& wave, const UnitBuffers& b, const TokenRun& run,
                   cudaStream_t stream, const Units&... units) {
  const int64_t groups = groups_of(args, cuda::cut_of(units...), wave, formed_together);
  if (groups == 0) return;
  const int64_t pieces = args.size.chunk / cuda::turn_tokens(args.size.chunk);
  with_shape<true>(args.size, [&](auto rank, auto blocks) {
    launch("mamba3: tokens of chunks",
           KernelOf<Args, UnitBuffers, Wave, TokenRun, Units...>(
               tokens_kernel<rank(), blocks(), Units...>),
           blocks_of(groups * run.count * pieces), threads, 0, stream, args, b, wave, run,
           units...);
  });
}

}  // namespace talea::mamba3::sm90::tokens
