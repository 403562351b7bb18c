// What: a call on a session of its own, made again: a thousand times, beside a busy stream, replayed
//       from a graph with other inputs; its bits must be the same, and a capture allocates nothing.
// Why: attention and its indexer go through one workspace in chunks; both are asked the same.
// Never: judges values.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "gpu/batch.hpp"

namespace talea::gpu {

// A call has run(), poison(), bits(), session() and stream().
template <class Call>
void same_bits_a_thousand_times(Call& a) {
  a.run();
  const auto right = a.bits();
  for (int i = 0; i < 1000; ++i) {
    if (i % 100 == 0) a.poison();
    a.run();
    if (i % 10 != 0) continue;  // copying takes longer than running
    ASSERT_EQ(a.bits(), right) << "repeat " << i;
  }
}

template <class Call>
void same_bits_beside(Call& noise, Call& a) {
  a.run();
  const auto right = a.bits();
  for (int i = 0; i < 100; ++i) {
    if (i % 4 == 0) noise.run();
    a.poison();
    a.run();
    ASSERT_EQ(a.bits(), right) << "repeat " << i;
  }
  noise.session().synchronise();
}

// renew(i): other inputs, in the same memory.
template <class Call, class Renew>
void same_bits_replayed(Call& a, Renew renew) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  a.run();
  a.session().synchronise();
  const int64_t before = counted_allocations();
  ASSERT_EQ(cudaStreamBeginCapture(a.stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
  a.run();
  ASSERT_EQ(cudaStreamEndCapture(a.stream(), &graph), cudaSuccess);
  EXPECT_EQ(counted_allocations(), before);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (uint64_t i = 0; i < 100; ++i) {
    renew(i);
    a.run();
    const auto right = a.bits();
    a.poison();
    ASSERT_EQ(cudaGraphLaunch(exec, a.stream()), cudaSuccess);
    ASSERT_EQ(a.bits(), right) << "replay " << i;
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

}  // namespace talea::gpu
