// What: forward as launches: of runs of chunks after one another, or of the rounds of a pack.
// Why: the tokens of a run are formed ahead of it.
// Never: launches a run before what it reads.
#include <utility>

#include "ops/mamba3/sm90/forward_kernel.cuh"
#include "ops/mamba3/sm90/units.hpp"

namespace talea::mamba3::sm90 {
namespace {

constexpr int64_t size = columns * values;

void launch_chunks(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                   int64_t count, int64_t first, int64_t ahead, cudaStream_t stream) {
  if (!cut.whole) return units::launch_chunks(args, cut, wave, b, count, first, ahead, stream);
  forward::launch_chunks(args, wave, b, count, first, ahead, stream);
}

}  // namespace

void launch_forward(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                    int64_t ahead, cudaStream_t stream) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  const int64_t chunks = (args.size.tokens + args.size.chunk - 1) / args.size.chunk;
  launch_turns(args, cut, wave, b, chunks, stream);
  launch_start(args, cut, wave, b, stream);
  const bool abreast = b.stretch > 0, states_alone = abreast && !args.out.data;
  if (abreast) launch_parameters(args, cut, b, stream);
  UnitBuffers behind = b, now = b;
  const int64_t blocks = abreast ? units * b.abreast : units;
  for (int64_t first = 0; first < chunks; first += ahead) {
    const UnitBuffers own = now;
    if (first == 0 || !b.token_turns_beside)
      launch_tokens(args, cut, wave, own, {first, ahead, chunks}, stream);
    if (abreast) launch_stretches(args, wave, own, first, ahead, states_alone, stream);
    if (!states_alone) launch_chunks(args, cut, wave, own, blocks, first, ahead, stream);
    if (b.token_turns_beside && first + ahead < chunks) {
      // The tokens of the next run, where the one before this had its own.
      if (!mutant(ScanMutant::m3_place_not_exchanged)) {
        std::swap(now.token_turns, now.token_turns_beside);
        std::swap(now.token_steps, now.token_steps_beside);
      }
      TokenRun next{first + ahead, ahead, chunks};
      next.beside = true, next.crowds = blocks <= processors;
      launch_tokens(args, cut, wave, now, next, stream);
    }
    if (states_alone)
      launch_join(args, wave, own, first, ahead, stream);
    else if (abreast)
      behind.upstream = b.upstream + forward::home_behind(first / ahead) * units * size;
  }
  launch_end(args, cut, wave, behind, chunks, stream);
}

void launch_forward_pack(const Args& args, const Cut& cut, const UnitBuffers& b,
                         cudaStream_t stream) {
  const cuda::PackRounds& pack = args.pack;
  Wave wave;
  wave.last = 1;
  launch_turns(args, cut, wave, b, pack.most_chunks, stream);
  launch_pass_through(args, cut, stream);
  for (wave.segment = 0; wave.segment < pack.most_rounds; ++wave.segment) {
    launch_start(args, cut, wave, b, stream);
    const bool before = mutant(ScanMutant::m3_tokens_of_the_round_before) && wave.segment > 0;
    launch_tokens(args, cut, wave, b,
                  {wave.segment - (before ? 1 : 0), pack.room, pack.most_chunks}, stream);
    launch_chunks(args, cut, wave, b, int64_t{pack.abreast} * args.size.heads, wave.segment,
                  pack.room, stream);
    launch_end(args, cut, wave, b, pack.most_chunks, stream);
  }
}

}  // namespace talea::mamba3::sm90
