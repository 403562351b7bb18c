// What: the kernel of forward.
// Why: a block a head of a sequence; its state stays on the chip from chunk to chunk.
// Never: writes a state of every chunk.
#include "ops/mamba3/cuda/forward.hpp"
#include "ops/mamba3/cuda/launch.cuh"

namespace talea::mamba3::cuda {
namespace {

template <class E>
__global__ void __launch_bounds__(most_threads, 1)
    forward_kernel(const __grid_constant__ Args a, const __grid_constant__ ChunkPlaces places,
                   char* scratch, int64_t units) {
  using Team = typename E::Team;
  each_unit<Team>(a, 0, places, scratch, units,
                  [&](Team& team, char* shared, char* own, const Unit& u, int64_t) {
                    Forward<Team, typename E::Type, E::kept>(team, a, places, shared, own).run(u);
                  });
}

}  // namespace

void launch_forward(const Launch& at, const Args& args) {
  const int64_t units = args.size.sequences * args.size.heads;
  with_engine<true>(at.plan, [&](auto engine) {
    launch_units("mamba3: forward", forward_kernel<decltype(engine)>, at, at.plan.forward, units,
                 at.plan.threads, args);
  });
}

}  // namespace talea::mamba3::cuda
