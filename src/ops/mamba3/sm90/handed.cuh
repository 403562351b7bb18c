// What: states that forward is handed and hands on, as its launches see them.
// Why: they stand before and behind the chunks, whose kernels know h in memory alone.
// Never: of backward, which takes no states.
#pragma once

#include "ops/mamba3/sm90/machine.hpp"

namespace talea::mamba3::sm90 {

// Whether h begins as a state in memory, and whether rows turn at all.
__host__ __device__ inline bool starts_with_state(const Args& a) {
  return a.initial.ssm.data || (a.initial.k.data && a.initial.v.data);
}
__host__ __device__ inline bool turns_asked(const Args& a) {
  return a.angles.data || a.initial.angle.data;
}

// h before the first chunk, where one is handed in; and all that forward hands on. Units have room
// for the turns of `most` chunks.
void launch_start(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                  cudaStream_t stream);
// Of a pack: what empty sequences were handed, once for all rounds.
void launch_pass_through(const Args& args, const Cut& cut, cudaStream_t stream);
void launch_end(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                int64_t most, cudaStream_t stream);

}  // namespace talea::mamba3::sm90
