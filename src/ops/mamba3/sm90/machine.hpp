// What: the launches of lane sm90 on a stream of the current device.
// Why: rows/run.cpp says in which order; this is where its chunks become Hopper kernels.
// Never: allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/mamba3/rows/cut.hpp"
#include "ops/mamba3/sm90/config.hpp"

namespace talea::mamba3::sm90 {

using cuda::Args;
using cuda::Cut;
using cuda::gradients_ahead;
using cuda::has_two_heads;
using cuda::UnitBuffers;
using cuda::Wave;

// A run of `ahead` chunks after another, whose tokens are formed ahead of it.
void launch_forward(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                    int64_t ahead, cudaStream_t stream);
// Of a run of chunks from `first` on, what each stretch of it adds to the state before it. last:
// the last of a sequence, too.
void launch_stretches(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t first,
                      int64_t ahead, bool last, cudaStream_t stream);
// The states behind the run, of what all its stretches add.
void launch_join(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t first,
                 int64_t ahead, cudaStream_t stream);
// The rounds of a pack, one after another.
void launch_forward_pack(const Args& args, const Cut& cut, const UnitBuffers& b,
                         cudaStream_t stream);
// One row a token of heads that are units, without what is formed ahead.
void launch_forward_siso(const Args& args, const Wave& wave, const UnitBuffers& b,
                         cudaStream_t stream);
// Turns before each chunk, of which a unit has room for `most`; by segment, of the one at work, of
// `most` chunks.
void launch_turns(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                  int64_t most, cudaStream_t stream);
// Chunks [first, first + count) of each unit, of which it has room for `most`; of a pack, those of
// round `first`, or, crossing, of the part of it whose sequence goes on behind it. beside: none is
// at work in the kernel before in the stream, which waits for all others: they are formed beside
// it.
struct TokenRun {
  int64_t first = 0, count = 0, most = 0;
  bool crossing = false, beside = false;
  bool crowds = false;  // beside: the next kernel has few blocks, each to lie by itself
};
// Turns and steps of the tokens of a run.
void launch_tokens(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                   const TokenRun& run, cudaStream_t stream);
// Parameters of heads as the gradients read them.
void launch_parameters(const Args& args, const Cut& cut, const UnitBuffers& b, cudaStream_t stream);
void launch_begin(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                  cudaStream_t stream);
void launch_segment(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                    cudaStream_t stream);
// The buffers as the launches of a segment are given them: its tokens lie in one of two places.
UnitBuffers buffers_of_segment(const Args& args, const Cut& cut, const Wave& wave,
                               const UnitBuffers& b);
// E of a slice, where launch_segment has not had it.
void launch_upstream(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                     cudaStream_t stream);
// The gradients of a slice, of heads of gradients_ahead; `launch_back`: of others.
void launch_gradients(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                      cudaStream_t stream);
void launch_back(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                 cudaStream_t stream);
// What parts of groups leave whose heads other ranks have, ahead of the gradients of the others.
void launch_without_heads(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                          cudaStream_t stream);
// d_q and d_k of a segment, d_angles that heads share, and its share of the parameters: of a unit,
// or, of a pack, of `totals`. beside: the kernel before in the stream has waited for the gradients
// and goes on to others.
void launch_sums(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                 double* totals, bool beside, cudaStream_t stream);
// Parameters of heads that are cut, of the totals of their units.
void launch_store_parameters(const Args& args, const Cut& cut, const double* totals,
                             cudaStream_t stream);
// d_dt and d_trap of the first token of each chunk, once all chunks are through.
void launch_edges(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                  cudaStream_t stream);

}  // namespace talea::mamba3::sm90
