// What: the kernels that give backward its states: checkpoints, then those of a segment.
// Why: what was not kept is computed anew, a segment at a time.
// Never: reads a query.
#include "ops/mamba3/cuda/forward.hpp"
#include "ops/mamba3/cuda/launch.cuh"

namespace talea::mamba3::cuda {
namespace {

template <class E, bool begins>
__global__ void __launch_bounds__(most_threads, 1)
    states_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers buffers,
                  const __grid_constant__ Wave wave, const __grid_constant__ ChunkPlaces places,
                  char* scratch, int64_t units) {
  using Team = typename E::Team;
  each_unit<Team>(a, wave.first, places, scratch, units,
                  [&](Team& team, char* shared, char* own, const Unit& u, int64_t number) {
                    States<Team, typename E::Type, E::kept> states(team, a, places, shared, own);
                    if constexpr (begins)
                      states.begin_unit(u, number, buffers, wave);
                    else
                      states.segment(u, number, buffers, wave);
                  });
}

template <bool begins>
void launch(const Launch& at, const Args& args, const Wave& wave) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  with_engine<true>(at.plan, [&](auto engine) {
    launch_units("mamba3: states", states_kernel<decltype(engine), begins>, at, at.plan.states,
                 units, at.plan.threads, args, at.buffers.units, wave);
  });
}

}  // namespace

void launch_begin(const Launch& at, const Args& args, const Wave& wave) {
  launch<true>(at, args, wave);
}
void launch_segment(const Launch& at, const Args& args, const Wave& wave) {
  launch<false>(at, args, wave);
}

}  // namespace talea::mamba3::cuda
