// What: what gives backward its states, as launches: checkpoints, then h and E of a segment.
// Why: what was not kept is computed anew, a segment at a time.
// Never: launches a segment before what it reads.
#include "ops/mamba3/rows/sums.hpp"
#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/states_kernel.cuh"
#include "ops/mamba3/sm90/units.hpp"

namespace talea::mamba3::sm90 {
namespace {

using states::size;

// What a unit keeps from launch to launch.
__global__ void __launch_bounds__(chain_threads)
    begin_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                 const __grid_constant__ Wave wave) {
  hopper::begin_after_earlier_kernels();
  const int64_t number = blockIdx.x;
  const int count = cuda::parameter_count(a.size), thread = threadIdx.x;
  for (int i = thread; i < size; i += chain_threads) b.upstream[number * size + i] = 0;
  for (int i = thread; i < count; i += chain_threads) b.parameters[number * count + i] = 0;
  if (a.saved || wave.segments == 0 || a.pack.rounds) return;
  float* const first = b.states + number * size;
  for (int i = thread; i < size; i += chain_threads) first[i] = 0;
}

void launch_chains(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                   int64_t states, int64_t upstream, bool ahead, cudaStream_t stream) {
  if (!cut.whole) return units::launch_chains(args, cut, wave, b, states, upstream, ahead, stream);
  states::launch_chains(args, wave, b, states, upstream, ahead, stream);
}

int64_t units_of(const Args& args, const Wave& wave) {
  return (wave.last - wave.first) * args.size.heads;
}

void tokens_of_segment(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                       bool crossing, bool beside, cudaStream_t stream) {
  const int64_t J = args.size.segment;
  TokenRun run{wave.segment * J, J, b.segment_turns ? J : wave.segments * J};
  if (args.pack.rounds) run = {wave.segment, J, args.pack.most_chunks, crossing};
  run.beside = beside, run.crowds = units_of(args, wave) <= processors;
  launch_tokens(args, cut, wave, b, run, stream);
}

// On the way to the last segment the tokens of one are formed beside the chains of the one before,
// by turns in two places.
bool forms_beside(const Args& args, const Wave& wave, const UnitBuffers& b) {
  return b.token_turns_beside && !args.saved && wants_rows(args) && wave.segment > 0;
}

// On the way back: beside the gradients of the one behind, once the states before the last segments
// are read and tokens have room in their place. first: the last segment of which this holds.
struct PlaceOfStates {
  int64_t first = -1;
  float* turns = nullptr;
  char* steps = nullptr;

  PlaceOfStates(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b) {
    if (!b.states || args.pack.rounds || b.segment_turns) return;
    const cuda::Sizes& s = args.size;
    const int64_t chunks = (units_of(args, wave) >> cut.slab_bits) * s.segment;
    const int64_t of_turns = chunks * s.chunk * cuda::turned_pairs(s.pairs) * 2;  // numbers
    const int64_t all = of_turns + chunks * cuda::chunk_step_bytes(s.chunk) / 4;
    const int64_t of_segment = units_of(args, wave) * size;
    const int64_t places = of_segment > 0 ? (all + of_segment - 1) / of_segment : 0;
    first = wave.segments - places - 1;
    turns = b.states + (first + 1) * of_segment;
    steps = reinterpret_cast<char*>(turns + of_turns);
  }
};

// The states behind a segment, where there is one.
void launch_ahead(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                  cudaStream_t stream) {
  UnitBuffers now = b, other = b;
  if (b.token_turns_beside) {
    UnitBuffers& beside = (wave.segments - wave.segment) % 2 == 0 ? now : other;
    beside.token_turns = b.token_turns_beside, beside.token_steps = b.token_steps_beside;
  }
  tokens_of_segment(args, cut, wave, now, true, forms_beside(args, wave, b), stream);
  if (args.pack.rounds) launch_ends(args, wave, b, stream, true);
  if (mutant(ScanMutant::m3_chain_of_the_place_beside)) now = other;
  launch_chains(args, cut, wave, now, units_of(args, wave), 0, true, stream);
}

}  // namespace

void launch_begin(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                  cudaStream_t stream) {
  const int64_t units = units_of(args, wave);
  if (units == 0) return;
  launch("mamba3: first states", begin_kernel, units, chain_threads, 0, stream, args, b, wave);
  if (wave.first == 0) launch_pass_back(args, stream);
  if (!args.pack.rounds && wave.segments > 0) launch_ends(args, wave, b, stream);
  launch_parameters(args, cut, b, stream);
  const cuda::PackRounds& pack = args.pack;
  const bool by_segment = b.segment_turns != nullptr;
  if (!by_segment)
    launch_turns(args, cut, wave, b,
                 pack.rounds ? pack.most_chunks : wave.segments * args.size.segment, stream);
  if (args.saved && !by_segment) return;
  Wave at = wave;
  for (at.segment = 0; at.segment + 1 < wave.segments; ++at.segment) {
    if (by_segment) launch_turns(args, cut, at, b, args.size.segment, stream);
    if (!args.saved && wants_rows(args)) launch_ahead(args, cut, at, b, stream);
  }
}

// The states of a segment wait for nothing of the slice that comes first, its last, nor E for them.
void launch_segment(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                    cudaStream_t stream) {
  // Rounds are taken from the last on: those of a group begin with its last.
  const int64_t group = args.pack.group, behind = wave.segment + 1;
  if (group > 0 && !args.saved && behind % group == 0 && behind < wave.segments) {
    Wave at = wave;
    for (at.segment = behind - group; at.segment + 1 < behind; ++at.segment)
      launch_ahead(args, cut, at, b, stream);
  }
  Wave last = wave;
  last.slice_chunks = b.slice;
  last.slice = (args.size.segment - 1) / b.slice * b.slice;
  if (b.segment_turns) launch_turns(args, cut, last, b, args.size.segment, stream);
  const bool is_last = behind == wave.segments;
  const bool beside = is_last ? forms_beside(args, wave, b)
                              : wave.segment <= PlaceOfStates(args, cut, wave, b).first;
  tokens_of_segment(args, cut, last, b, false, beside, stream);
  const int64_t units =
      args.pack.rounds ? int64_t{args.pack.abreast} * args.size.heads : units_of(args, wave);
  if (args.pack.rounds) launch_ends(args, last, b, stream);
  // Where E alone is wanted: of a pack its blocks lie between those of h.
  const bool both = args.pack.rounds || wants_rows(args);
  launch_chains(args, cut, last, b, both ? units : 0, units, false, stream);
  launch_behind(args, last, b, stream);
}

UnitBuffers buffers_of_segment(const Args& args, const Cut& cut, const Wave& wave,
                               const UnitBuffers& b) {
  UnitBuffers own = b;
  const PlaceOfStates place(args, cut, wave, b);
  if (wave.segment <= place.first && (place.first - wave.segment) % 2 == 0)
    own.token_turns = place.turns, own.token_steps = place.steps;
  return own;
}

void launch_upstream(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                     cudaStream_t stream) {
  if (wave.slice + wave.slice_chunks < args.size.segment)
    launch_chains(args, cut, wave, b, 0, units_of(args, wave), false, stream);
}

}  // namespace talea::mamba3::sm90
