// What: how a call on device tensors behaves: graphs, streams, threads, repeats, no
// synchronisation.
// Why: a library call that waits, allocates or changes its bits is a defect even when it is right.
// Never: compares with a truth; the conformance suites do.
#ifdef TALEA_WITH_CUDA
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "talea/linear_cross_entropy.hpp"
#include "yardsticks/linear_cross_entropy/limit.hpp"

namespace talea::testing {
namespace {

void ok(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

// One bf16 training problem in device memory, with its own stream and workspace.
class DeviceProblem {
 public:
  static constexpr int64_t tokens = 700, hidden = 264, vocab = 5003;

  DeviceProblem() {
    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<uint16_t> x(tokens * hidden), w(vocab * hidden);
    uint32_t seed = 1;
    auto draw = [&] {
      seed = seed * 1664525u + 1013904223u;
      return static_cast<uint16_t>(((seed >> 31) << 15) | (0x3d00 + ((seed >> 8) & 0xff)));
    };
    for (auto& v : x) v = draw();
    for (auto& v : w) v = draw();
    std::vector<int64_t> y(tokens);
    for (int64_t t = 0; t < tokens; ++t) y[t] = t % 7 == 0 ? -100 : (t * 131) % vocab;
    in.hidden = upload(x.data(), DType::bf16, {tokens, hidden});
    in.weight = upload(w.data(), DType::bf16, {vocab, hidden});
    in.targets = upload(y.data(), DType::i64, {tokens});
    out.loss = upload(nullptr, DType::f32, {});
    out.dx = upload(nullptr, DType::bf16, {tokens, hidden});
    out.dw = upload(nullptr, DType::f32, {vocab, hidden});
    options.workspace_limit_bytes = int64_t{4} << 20;
    options = testing::with_kept_limit(in, out, options);
    workspace.bytes = workspace_bytes(describe(in, out, options));
    ok(cudaMalloc(&workspace.data, workspace.bytes));
    owned_.push_back(workspace.data);
  }
  ~DeviceProblem() {
    for (void* p : owned_) cudaFree(p);
    cudaStreamDestroy(stream);
  }
  DeviceProblem(const DeviceProblem&) = delete;

  void call() { linear_cross_entropy(in, out, options, workspace, {}, stream); }

  // The bytes of every output, after the stream has drained.
  std::vector<char> bits() {
    ok(cudaStreamSynchronize(stream));
    std::vector<char> all;
    for (const Tensor* t : {&out.loss, &out.dx, &out.dw}) {
      const auto bytes = static_cast<size_t>(t->elements() * size_of(t->dtype));
      const size_t at = all.size();
      all.resize(at + bytes);
      ok(cudaMemcpy(all.data() + at, t->data, bytes, cudaMemcpyDeviceToHost));
      ok(cudaMemset(t->data, 0xff, bytes));
    }
    return all;
  }

  LinearCrossEntropyInputs in;
  LinearCrossEntropyOutputs out;
  LinearCrossEntropyOptions options;
  Workspace workspace;
  cudaStream_t stream = nullptr;

 private:
  Tensor upload(const void* from, DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = make_tensor(nullptr, dtype, shape, DeviceKind::cuda);
    const auto bytes = static_cast<size_t>(t.elements() * size_of(dtype));
    ok(cudaMalloc(&t.data, bytes));
    owned_.push_back(t.data);
    if (from) ok(cudaMemcpy(t.data, from, bytes, cudaMemcpyHostToDevice));
    return t;
  }
  std::vector<void*> owned_;
};

class CudaManners : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      cudaGetLastError();
      GTEST_SKIP() << "unavailable: no CUDA device";
    }
  }
};

TEST_F(CudaManners, AThousandRepeatsBesideABusyStream) {
  DeviceProblem p, busy;
  p.call();
  const auto want = p.bits();
  for (int i = 0; i < 4; ++i) {
    if (i % 2 == 0) busy.call();
    p.call();
    if (i % 20 != 0) continue;
    ASSERT_EQ(p.bits(), want) << "repeat " << i;
  }
  EXPECT_EQ(p.bits(), want);
}

TEST_F(CudaManners, CapturedInAGraphAndReplayed) {
  DeviceProblem p;
  p.call();
  const auto want = p.bits();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ok(cudaStreamBeginCapture(p.stream, cudaStreamCaptureModeGlobal));
  p.call();
  ok(cudaStreamEndCapture(p.stream, &graph));
  ok(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) {
    ok(cudaGraphLaunch(exec, p.stream));
    ASSERT_EQ(p.bits(), want) << "replay " << i;
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

TEST_F(CudaManners, ReturnsWhileTheStreamIsBlocked) {
  DeviceProblem p;
  p.call();
  const auto want = p.bits();
  std::atomic<bool> release{false};
  ok(cudaLaunchHostFunc(
      p.stream,
      [](void* flag) {
        const auto begin = std::chrono::steady_clock::now();
        while (!static_cast<std::atomic<bool>*>(flag)->load())
          if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(3600)) return;
      },
      &release));
  size_t free_before = 0, free_after = 0, total = 0;
  ok(cudaMemGetInfo(&free_before, &total));
  const auto begin = std::chrono::steady_clock::now();
  p.call();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3500));
  EXPECT_EQ(cudaStreamQuery(p.stream), cudaErrorNotReady);
  ok(cudaMemGetInfo(&free_after, &total));
  EXPECT_EQ(free_before, free_after) << "device memory was allocated";
  release = true;
  EXPECT_EQ(p.bits(), want);
}

TEST_F(CudaManners, ThreadsAndStreamsAtOnce) {
  DeviceProblem a, b;
  a.call();
  const auto want = a.bits();
  auto work = [&](DeviceProblem& p, int& wrong) {
    for (int i = 0; i < 2; ++i) {
      p.call();
      wrong += p.bits() != want;
    }
  };
  int wrong_a = 0, wrong_b = 0;
  std::thread one([&] { work(a, wrong_a); }), two([&] { work(b, wrong_b); });
  one.join();
  two.join();
  EXPECT_EQ(wrong_a, 0);
  EXPECT_EQ(wrong_b, 0);
}

}  // namespace
}  // namespace talea::testing
#endif
