// What: states that a pass is handed and hands on, or gradients of them, as its launches see them.
// Why: they stand before and behind the chunks, whose kernels know h and E in memory alone.
// Never: a branch of a chunk of a call that has none.
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

inline bool any_of(const cuda::StateViews& s) {
  return s.angle.data || s.ssm.data || s.k.data || s.v.data;
}
// Whether backward is handed states or gradients of them, or hands them on.
inline bool backward_hands(const Args& a) {
  return any_of(a.initial) || any_of(a.last) || any_of(a.grad.initial);
}
// Whether it is to form more than what E alone gives.
inline bool wants_rows(const Args& a) {
  const cuda::GradientViews& d = a.grad;
  for (const cuda::View* v : {&d.q, &d.k, &d.v, &d.z, &d.adt, &d.dt, &d.trap, &d.angles, &d.q_bias,
                              &d.k_bias, &d.d, &d.mimo_v, &d.mimo_z, &d.mimo_out, &d.initial.angle})
    if (v->data) return true;
  return !backward_hands(a);
}

// h before the first chunk, where one is handed in; and all that forward hands on. Units have room
// for the turns of `most` chunks.
void launch_start(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                  cudaStream_t stream);
// Of a pack: what empty sequences were handed, once for all rounds.
void launch_pass_through(const Args& args, const Cut& cut, cudaStream_t stream);
void launch_end(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                int64_t most, cudaStream_t stream);

// Backward. E behind the last token and h before the first, where its chains begin: of all units of
// a wave, or of a round of a pack; crossing: of the sequence that goes on behind the round, h
// alone.
void launch_ends(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream,
                 bool crossing = false);
// Gradients of states of empty sequences, once for all.
void launch_pass_back(const Args& args, cudaStream_t stream);
// What lies behind the sequences that end in the segment at work, whose h is known: all that turns
// with each of their tokens, and the gradient of the last key.
void launch_behind(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream);
// Gradients of the states before the sequences that begin in the slice at work, behind its
// gradients.
void launch_before(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream);

}  // namespace talea::mamba3::sm90
