// What: the same call gives the same bits: alone, beside a busy stream, replayed, from threads.
// Why: a run must be reproducible, and a difference between two runs must mean something.
// Never: compares lanes with each other.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <thread>
#include <tuple>

#include "gpu/batch.hpp"
#include "ops/linear_cross_entropy/forced.hpp"

namespace talea::gpu {
namespace {

const int repeats = emulated_repeats(1000);
constexpr BatchSpec small{.tokens = 200, .hidden = 64, .vocab = 700};

class Repeats : public ::testing::TestWithParam<std::string> {};

TEST_P(Repeats, Alone) {
  Batch b(small, GetParam());
  b.run();
  const auto right = b.outputs();
  for (int i = 0; i < repeats; ++i) {
    b.poison_outputs();
    b.run();
    ASSERT_EQ(b.outputs(), right) << "repeat " << i;
  }
}

TEST_P(Repeats, BesideABusyStream) {
  Batch b(small, GetParam());
  Batch noise({.tokens = 2048,
               .hidden = 512,
               .vocab = 20000,
               .workspace_limit_bytes = int64_t{64} << 20,
               .seed = 9},
              GetParam());
  b.run();
  const auto right = b.outputs();
  for (int i = 0; i < repeats; ++i) {
    if (i % 4 == 0) noise.run();
    b.poison_outputs();
    b.run();
    ASSERT_EQ(b.outputs(), right) << "repeat " << i;
  }
  noise.session().synchronise();
}

void replay(Batch& b, const std::vector<std::byte>& right, int times) {
  auto stream = static_cast<cudaStream_t>(b.session().stream());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  b.run();
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int i = 0; i < times; ++i) {
    b.poison_outputs();
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(b.outputs(), right) << "replay " << i;
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

TEST_P(Repeats, Replayed) {
  Batch b(small, GetParam());
  b.run();
  replay(b, b.outputs(), repeats);
}

// A loss of few tokens, as decoding asks for it: queued back to back, and captured behind a node
// that is no kernel.
TEST_P(Repeats, FewTokensBackToBackAndReplayed) {
  for (const int64_t tokens : {1, 8, 130}) {
    Batch b({.tokens = tokens, .hidden = 264, .vocab = 5000, .everything = false}, GetParam());
    b.run();
    const auto right = b.outputs();
    for (int i = 0; i < repeats; ++i) {
      if (i % 3 == 0) b.poison_outputs();
      b.run();
      if (i % 7 == 0) {
        ASSERT_EQ(b.outputs(), right) << tokens << " tokens, repeat " << i;
      }
    }
    ASSERT_EQ(b.outputs(), right) << tokens << " tokens";
    auto stream = static_cast<cudaStream_t>(b.session().stream());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    b.poison_outputs();
    b.run();
    b.run();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (int i = 0; i < emulated_repeats(50); ++i) {
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      ASSERT_EQ(b.outputs(), right) << tokens << " tokens, replay " << i;
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
}

TEST_P(Repeats, ManyThreadsEachWithAStream) {
  constexpr int threads = 6;
  std::vector<std::vector<std::byte>> alone(threads);
  std::vector<int> wrong(threads, 0);
  const auto spec = [](int i) {
    BatchSpec s = small;
    s.seed = static_cast<uint64_t>(10 * i + 1);
    s.tokens += 37 * i;
    s.hidden += 8 * i;
    return s;
  };
  for (int i = 0; i < threads; ++i) {
    Batch b(spec(i), GetParam());
    b.run();
    alone[static_cast<size_t>(i)] = b.outputs();
  }
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i)
    pool.emplace_back([&, i] {
      Batch b(spec(i), GetParam());
      for (int k = 0; k < emulated_repeats(100); ++k) {
        b.poison_outputs();
        b.run();
        if (b.outputs() != alone[static_cast<size_t>(i)]) ++wrong[static_cast<size_t>(i)];
      }
    });
  for (std::thread& t : pool) t.join();
  for (int i = 0; i < threads; ++i) EXPECT_EQ(wrong[static_cast<size_t>(i)], 0) << "thread " << i;
}

// The logits of the next chunk overwrite what dW still reads: they have to wait for it, word by
// word.
TEST(Sm90Repeats, LogitsAheadLeaveTheBitsOfOneAfterTheOther) {
  const auto ahead = [](Batch& b) {
    for (const std::string& line : explain(describe(b.in, b.out, b.options)).details)
      if (line.find("beside dW") != std::string::npos) return true;
    return false;
  };
  // The same chunks, one after the other: Sm90Config says that they are the same.
  for (const auto& [hidden, mib, narrow] : {std::tuple<int64_t, int64_t, bool>{64, 22, true},
                                            {256, 22, true},
                                            {1024, 23, true},
                                            {256, 22, false},
                                            {1024, 23, false}}) {
    if (!narrow) lce::forced.narrow = false;
    BatchSpec spec{.tokens = 1700,
                   .hidden = hidden,
                   .vocab = 20011,
                   .workspace_limit_bytes = mib << 20,
                   .gradients_alone = true};
    Batch b(spec, "sm90");
    ASSERT_TRUE(ahead(b)) << "hidden " << hidden;
    lce::forced.ahead = false;
    Batch after(spec, "sm90");
    const bool not_ahead = !ahead(after);
    after.run();
    lce::forced.ahead.reset();
    ASSERT_TRUE(not_ahead) << "hidden " << hidden;
    const auto right = after.outputs();
    for (int i = 0; i < emulated_repeats(40); ++i) {
      b.poison_outputs();
      b.run();
      ASSERT_EQ(b.outputs(), right) << "hidden " << hidden << ", repeat " << i;
    }
    replay(b, right, 40);
    lce::forced.narrow.reset();
  }
}

INSTANTIATE_TEST_SUITE_P(Lanes, Repeats, ::testing::ValuesIn(lanes()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace talea::gpu
