// What: the CUDA lanes do not synchronise, allocate, use another stream, or blame the wrong call.
// Why: a training loop and a captured graph rely on exactly this.
// Never: looks at the values of the outputs.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "gpu/batch.hpp"

namespace talea::gpu {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

class Manners : public ::testing::TestWithParam<std::string> {
 protected:
  static cudaStream_t stream_of(Batch& b) {
    return static_cast<cudaStream_t>(b.session().stream());
  }
};

struct Gate {
  std::atomic<bool> open{false}, timed_out{false};
};

// Holds the stream until the gate opens, but not for ever: a call that waits fails the test.
void hold(void* data) {
  auto* gate = static_cast<Gate*>(data);
  const auto limit = steady_clock::now() + seconds(3600);
  while (!gate->open) {
    if (steady_clock::now() > limit) {
      gate->timed_out = true;
      return;
    }
    std::this_thread::yield();
  }
}

TEST_P(Manners, DoesNotSynchronise) {
  Batch b({}, GetParam());
  b.run();
  const auto right = b.outputs();
  b.poison_outputs();
  Gate gate;
  ASSERT_EQ(cudaLaunchHostFunc(stream_of(b), hold, &gate), cudaSuccess);
  b.run();
  EXPECT_FALSE(gate.timed_out) << "the call waited for its stream";
  EXPECT_EQ(cudaStreamQuery(stream_of(b)), cudaErrorNotReady);
  gate.open = true;
  EXPECT_EQ(b.outputs(), right);
}

TEST_P(Manners, ChecksTargetsWithOneSynchronisation) {
  Batch b({}, GetParam());
  b.options.target_check = TargetCheck::checked;
  EXPECT_EQ(b.run().valid_tokens, 300);
  const int64_t foreign = 2500;
  b.session().upload(static_cast<int64_t*>(b.in.targets.data) + 17, &foreign, sizeof(foreign));
  try {
    b.run();
    FAIL() << "a foreign target passed";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::invalid_data);
    EXPECT_NE(std::string(e.what()).find("targets[17] = 2500"), std::string::npos) << e.what();
  }
}

TEST_P(Manners, CountsAreReadableLater) {
  Batch b({}, GetParam());
  const int64_t values[3] = {-100, 2500, -7};
  b.session().upload(b.in.targets.data, values, sizeof(values));
  const LinearCrossEntropyResult r = b.run();
  EXPECT_EQ(r.out_of_range_tokens, -1);
  std::string note;
  for (const std::string& n : r.notes)
    if (n.find("at workspace byte ") != std::string::npos) note = n;
  ASSERT_FALSE(note.empty());
  const auto offset = std::stoll(note.substr(note.find("at workspace byte ") + 18));
  char bytes[32];
  b.session().download(bytes, static_cast<char*>(b.workspace.data) + offset, sizeof(bytes));
  int64_t wide[4];
  int32_t narrow[4];
  std::memcpy(wide, bytes, sizeof(wide));
  std::memcpy(narrow, bytes, sizeof(narrow));
  if (note.find("int64 valid, ignored, out_of_range") != std::string::npos) {
    EXPECT_EQ(wide[0], 297);
    EXPECT_EQ(wide[1], 1);
    EXPECT_EQ(wide[2], 2);
  } else {
    ASSERT_NE(note.find("int32 valid, out_of_range, ignored"), std::string::npos) << note;
    EXPECT_EQ(narrow[0], 297);
    EXPECT_EQ(narrow[1], 2);
    EXPECT_EQ(narrow[2], 1);
  }
}

TEST_P(Manners, AllocatesNothing) {
  Batch b({}, GetParam());
  b.run();
  b.session().synchronise();
  const int64_t calls = counted_allocations(), free = b.session().free_bytes();
  for (int i = 0; i < emulated_repeats(20); ++i) b.run();
  EXPECT_EQ(counted_allocations(), calls);
  EXPECT_EQ(b.session().free_bytes(), free);
  b.session().synchronise();
}

// The legacy default stream is held by a gate; a call on another stream must not care.
TEST_P(Manners, LeavesTheDefaultStreamAlone) {
  Batch b({}, GetParam());
  b.run();
  const auto right = b.outputs();
  b.poison_outputs();
  Gate gate;
  ASSERT_EQ(cudaLaunchHostFunc(nullptr, hold, &gate), cudaSuccess);
  b.run();
  EXPECT_EQ(b.outputs(), right);
  EXPECT_FALSE(gate.timed_out) << "the call waited for the default stream";
  gate.open = true;
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_P(Manners, CapturedInGlobalModeAndReplayed) {
  Batch b({}, GetParam());
  b.run();
  const auto right = b.outputs();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream_of(b), cudaStreamCaptureModeGlobal), cudaSuccess);
  b.run();
  ASSERT_EQ(cudaStreamEndCapture(stream_of(b), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  b.poison_outputs();
  ASSERT_EQ(cudaGraphLaunch(exec, stream_of(b)), cudaSuccess);
  EXPECT_EQ(b.outputs(), right);
  // The graph reads its inputs anew: other data, the result of a plain call on them.
  b.session().fill_normal(b.in.hidden, 77, 1.0);
  b.poison_outputs();
  ASSERT_EQ(cudaGraphLaunch(exec, stream_of(b)), cudaSuccess);
  const auto replayed = b.outputs();
  b.run();
  EXPECT_EQ(b.outputs(), replayed);
  EXPECT_NE(replayed, right);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

// A first call ever of this shape, under capture: nothing it prepares may break the capture.
TEST_P(Manners, FirstCallUnderCapture) {
  Batch b({.tokens = 130, .hidden = 72, .vocab = 1111}, GetParam());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream_of(b), cudaStreamCaptureModeGlobal), cudaSuccess);
  b.run();
  ASSERT_EQ(cudaStreamEndCapture(stream_of(b), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(exec, stream_of(b)), cudaSuccess);
  const auto replayed = b.outputs();
  b.poison_outputs();
  b.run();
  EXPECT_EQ(b.outputs(), replayed);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

TEST_P(Manners, CheckedTargetsRefuseACapture) {
  Batch b({}, GetParam());
  b.options.target_check = TargetCheck::checked;
  ASSERT_EQ(cudaStreamBeginCapture(stream_of(b), cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_THROW(b.run(), Error);
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream_of(b), &graph);
  if (graph) cudaGraphDestroy(graph);
  cudaGetLastError();
}

TEST_P(Manners, NonCurrentDevice) {
  int devices = 0;
  cudaGetDeviceCount(&devices);
  if (devices < 2) GTEST_SKIP() << "unavailable: needs two CUDA devices, has " << devices;
  Batch first({}, GetParam());
  first.run();
  Batch second({.device = 1}, GetParam());
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  second.run();
  int current = -1;
  cudaGetDevice(&current);
  EXPECT_EQ(current, 0);
  EXPECT_EQ(second.outputs(), first.outputs());
}

// Exits with 0 where the second call names the error of the first as an earlier one.
[[noreturn]] void fault_then_call(const std::string& lane) {
  Batch b({}, lane);
  b.run();
  b.session().synchronise();
  Batch faulty({}, lane);
  faulty.in.targets.data = reinterpret_cast<void*>(uintptr_t{0x7f0000000000});
  try {
    faulty.run();
    faulty.session().synchronise();
  } catch (const Error&) {
  }
  try {
    b.run();
  } catch (const Error& e) {
    std::_Exit(std::strstr(e.what(), "an earlier CUDA error") ? 0 : 1);
  }
  std::_Exit(2);
}

TEST_P(Manners, EarlierStickyErrorIsNamedAsEarlier) {
  Batch b({}, GetParam());
  EXPECT_EXIT(fault_then_call(GetParam()), ::testing::ExitedWithCode(0), "");
}

INSTANTIATE_TEST_SUITE_P(Lanes, Manners, ::testing::ValuesIn(lanes()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace talea::gpu
