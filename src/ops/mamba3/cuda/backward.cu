// What: the kernel of the gradients of a slice of chunks.
// Why: rows by head exist for one slice at a time, and are then summed over their group.
// Never: sums over heads.
#include "ops/mamba3/cuda/backward.hpp"
#include "ops/mamba3/cuda/launch.cuh"

namespace talea::mamba3::cuda {
namespace {

template <class E>
__global__ void __launch_bounds__(most_threads, 1)
    back_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers buffers,
                const __grid_constant__ Wave wave, const __grid_constant__ ChunkPlaces places,
                char* scratch, int64_t units) {
  using Team = typename E::Team;
  each_unit<Team>(a, wave.first, places, scratch, units,
                  [&](Team& team, char* shared, char* own, const Unit& u, int64_t number) {
                    Backward<Team, typename E::Type>(team, a, places, shared, own, buffers, wave)
                        .run(u, number);
                  });
}

}  // namespace

void launch_back(const Launch& at, const Args& args, const Wave& wave) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  with_engine<false>(at.plan, [&](auto engine) {
    launch_units("mamba3: gradients", back_kernel<decltype(engine)>, at, at.plan.backward, units,
                 most_threads, args, at.buffers.units, wave);
  });
}

}  // namespace talea::mamba3::cuda
