// What: one rank of several has a bad tensor, value or option; every rank hears of it, at once.
// Why: the others would wait for it until their timeout, and then blame a rank that is alive.
// Never: lets a world end with the error: the next call of the same ranks is made.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>

#include "support/temp_dir.hpp"
#include "talea/linear_cross_entropy.hpp"
#include "talea/mamba3.hpp"
#include "talea/ranks.hpp"
#include "talea/sparse_attention.hpp"

namespace talea::testing {
namespace {

namespace sa = sparse_attention;
namespace scan = mamba3;

constexpr double timeout_s = 60;
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr int ranks = 3, culprit = 1;

// Numbers of one call, and room for it.
class Memory {
 public:
  Tensor floats(std::initializer_list<int64_t> shape) { return tensor(DType::f32, shape, 4); }
  Tensor ints(std::initializer_list<int64_t> shape) { return tensor(DType::i32, shape, 4); }
  Workspace workspace() { return {room_.data(), static_cast<int64_t>(room_.size())}; }

 private:
  Tensor tensor(DType dtype, std::initializer_list<int64_t> shape, size_t each) {
    Tensor t = make_tensor(nullptr, dtype, shape);
    blocks_.emplace_back(static_cast<size_t>(t.elements()) * each + 64);
    t.data = blocks_.back().data();
    for (int64_t i = 0; i < t.elements() && dtype == DType::f32; ++i)
      static_cast<float*>(t.data)[i] = 0.01f * static_cast<float>(i % 17);
    return t;
  }
  std::vector<std::vector<char>> blocks_;
  std::vector<char> room_ = std::vector<char>(1 << 20);
};

void put(const Tensor& t, double value) {
  *static_cast<float*>(t.data) = static_cast<float>(value);
}

struct LossCall {
  LinearCrossEntropyInputs in;
  LinearCrossEntropyOutputs out;
  LinearCrossEntropyOptions options;
  LinearCrossEntropyRanks of;
  Workspace workspace;
  Memory memory;

  explicit LossCall(Communicator& c) {
    in.hidden = memory.floats({6, 4});
    in.weight = memory.floats({3, 4});
    in.targets = memory.ints({6});
    in.class_weight = memory.floats({9});
    in.token_scale = memory.floats({6});
    for (int i = 0; i < 6; ++i) static_cast<float*>(in.token_scale.data)[i] = 1;
    out.loss = memory.floats({});
    out.dx = memory.floats({6, 4});
    out.dw = memory.floats({3, 4});
    options.vocab = 9;
    of.vocab = &c;
    of.vocab_begin = 3 * c.rank();
    workspace = memory.workspace();
  }
  auto run() { return linear_cross_entropy(in, out, options, workspace, of); }
};

struct AttentionCall {
  sa::Inputs in;
  sa::Outputs out;
  sa::Options options;
  sa::Ranks of;
  Workspace workspace;
  Memory memory;

  explicit AttentionCall(Communicator& c) {
    in.q = memory.floats({1, 2, 1, 8});
    in.kv = memory.floats({1, 5, 1, 8});
    in.indices = memory.ints({1, 2, 1, 3});
    in.sink = memory.floats({1});
    out.o = memory.floats({1, 2, 1, 4});
    options.value_dim = 4;
    of.heads = &c;
    of.head_begin = c.rank();
    workspace = memory.workspace();
  }
  auto run() { return sa::forward(in, out, options, workspace, of); }
};

struct ScanCall {
  scan::Inputs in;
  scan::Outputs out;
  scan::Options options;
  scan::Ranks of;
  Workspace workspace;
  Memory memory;

  explicit ScanCall(Communicator& c) {
    in.q = memory.floats({1, 4, 1, 8});
    in.k = memory.floats({1, 4, 1, 8});
    in.v = memory.floats({1, 4, 1, 4});
    in.adt = memory.floats({1, 1, 4});
    in.dt = memory.floats({1, 1, 4});
    in.trap = memory.floats({1, 1, 4});
    out.out = memory.floats({1, 4, 1, 4});
    of.sequence = &c;
    of.token_begin = 4 * c.rank();
    workspace = memory.workspace();
  }
  auto run() { return scan::forward(in, out, options, workspace, of); }
};

using World = std::function<std::unique_ptr<Communicator>(int rank)>;

// What each rank says of a call that one rank bends; then all of them make a good one.
template <class Call>
void expect_told(const char* what, const World& world,
                 const std::type_identity_t<std::function<void(Call&)>>& bend) {
  SCOPED_TRACE(what);
  std::vector<std::string> said(ranks);
  std::vector<ErrorKind> kinds(ranks);
  std::vector<std::thread> threads;
  const auto begin = std::chrono::steady_clock::now();
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      const auto c = world(r);
      try {
        Call call(*c);
        if (r == culprit) bend(call);
        call.run();
      } catch (const Error& e) {
        said[r] = e.what();
        kinds[r] = e.kind();
      }
      EXPECT_NO_THROW(Call(*c).run());
    });
  for (std::thread& t : threads) t.join();
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 10);
  EXPECT_NE(said[culprit], "");
  EXPECT_EQ(said[culprit].rfind("rank ", 0), std::string::npos) << said[culprit];
  for (int r = 0; r < ranks; ++r) {
    if (r == culprit) continue;
    EXPECT_EQ(said[r], "rank 1: " + said[culprit]);
    EXPECT_EQ(kinds[r], kinds[culprit]);
  }
}

class OneRankRefuses : public ::testing::TestWithParam<const char*> {
 protected:
  World world() {
    if (std::string(GetParam()) == "threads") {
      all_ = make_thread_communicators(ranks, timeout_s);
      return [this](int r) { return std::move(all_[static_cast<size_t>(r)]); };
    }
    const std::string file = folder_.file("world" + std::to_string(worlds_++));
    return [file](int r) { return make_shared_communicator({r, ranks, file, timeout_s}); };
  }

 private:
  std::vector<std::unique_ptr<Communicator>> all_;
  TempDir folder_;
  int worlds_ = 0;
};

TEST_P(OneRankRefuses, ALoss) {
  const std::pair<const char*, std::function<void(LossCall&)>> bends[] = {
      {"label_smoothing", [](LossCall& c) { c.options.label_smoothing = nan; }},
      {"softcap", [](LossCall& c) { c.options.softcap = -1; }},
      {"logit_scale", [](LossCall& c) { c.options.logit_scale = 0; }},
      {"z_loss", [](LossCall& c) { c.options.z_loss = nan; }},
      {"a denominator",
       [](LossCall& c) {
         c.options.denominator = Denominator::given;
         c.options.denominator_value = nan;
       }},
      {"class_weight", [](LossCall& c) { put(c.in.class_weight, nan); }},
      {"token_scale", [](LossCall& c) { put(c.in.token_scale, 0); }},
      {"a target", [](LossCall& c) { *static_cast<int32_t*>(c.in.targets.data) = 77; }},
      {"targets' dtype", [](LossCall& c) { c.in.targets.dtype = DType::f32; }},
      {"hidden's dtype", [](LossCall& c) { c.in.hidden.dtype = DType::i32; }},
      {"hidden's shape", [](LossCall& c) { c.in.hidden.shape[1] = 3; }},
      {"weight's stride", [](LossCall& c) { c.out.dw.stride[0] = 0; }},
      {"no address", [](LossCall& c) { c.in.weight.data = nullptr; }},
      {"overlap", [](LossCall& c) { c.out.dx.data = c.in.hidden.data; }},
      {"an unknown lane", [](LossCall& c) { c.options.lane = "nope"; }},
      {"a lane that declines", [](LossCall& c) { c.options.lane = "cuda"; }},
      {"the limit", [](LossCall& c) { c.options.workspace_limit_bytes = 1; }},
      {"the workspace", [](LossCall& c) { c.workspace.bytes = 8; }},
  };
  for (const auto& [what, bend] : bends) expect_told<LossCall>(what, world(), bend);
}

TEST_P(OneRankRefuses, Attention) {
  const std::pair<const char*, std::function<void(AttentionCall&)>> bends[] = {
      {"scale", [](AttentionCall& c) { c.options.scale = nan; }},
      {"value_dim", [](AttentionCall& c) { c.options.value_dim = 0; }},
      {"a foreign index",
       [](AttentionCall& c) {
         c.options.index_check = sa::IndexCheck::checked;
         *static_cast<int32_t*>(c.in.indices.data) = 99;
       }},
      {"indices' dtype", [](AttentionCall& c) { c.in.indices.dtype = DType::f32; }},
      {"kv's shape", [](AttentionCall& c) { c.in.kv.shape[3] = 7; }},
      {"sink's shape", [](AttentionCall& c) { c.in.sink.shape[0] = 2; }},
      {"a lane that declines", [](AttentionCall& c) { c.options.lane = "sm90"; }},
      {"the workspace",
       [](AttentionCall& c) {
         c.out.lse = c.memory.floats({1, 2, 1});
         c.in.d_o = c.in.q;
       }},
  };
  for (const auto& [what, bend] : bends) expect_told<AttentionCall>(what, world(), bend);
}

TEST_P(OneRankRefuses, AScan) {
  const std::pair<const char*, std::function<void(ScanCall&)>> bends[] = {
      {"norm_eps", [](ScanCall& c) { c.options.norm_eps = nan; }},
      {"chunk", [](ScanCall& c) { c.options.chunk = -1; }},
      {"a 16-bit adt", [](ScanCall& c) { c.in.adt.dtype = DType::bf16; }},
      {"v's shape", [](ScanCall& c) { c.in.v.shape[1] = 3; }},
      {"mimo_z without z",
       [](ScanCall& c) {
         c.in.mimo_z = c.memory.floats({1, 1, 4});
       }},
      {"no dt", [](ScanCall& c) { c.in.dt = {}; }},
      {"a lane that declines", [](ScanCall& c) { c.options.lane = "sm90"; }},
      {"the workspace", [](ScanCall& c) { c.workspace.bytes = 8; }},
  };
  for (const auto& [what, bend] : bends) expect_told<ScanCall>(what, world(), bend);
}

INSTANTIATE_TEST_SUITE_P(Worlds, OneRankRefuses, ::testing::Values("threads", "shared"));

// Vocabulary by batch: what one rank refuses, the ranks in neither of its groups hear of as well.
TEST(OneRankRefusesInAGrid, AllFourAreTold) {
  auto left = make_thread_communicators(2, timeout_s),
       right = make_thread_communicators(2, timeout_s);
  auto top = make_thread_communicators(2, timeout_s),
       bottom = make_thread_communicators(2, timeout_s);
  std::vector<std::string> said(4);
  run_thread_ranks(4, timeout_s, [&](Communicator& world) {
    const auto b = static_cast<size_t>(world.rank() / 2), v = static_cast<size_t>(world.rank() % 2);
    Communicator& vocab = b == 0 ? *top[v] : *bottom[v];
    Communicator& batch = v == 0 ? *left[b] : *right[b];
    for (const bool bad : {true, false}) {
      LossCall call(vocab);
      call.options.vocab = 6;
      call.in.class_weight = {};
      call.of.batch = &batch;
      call.options.denominator_scope = DenominatorScope::global;
      if (bad && world.rank() == 2) put(call.in.token_scale, 0);
      try {
        call.run();
        EXPECT_FALSE(bad);
      } catch (const Error& e) {
        EXPECT_TRUE(bad) << e.what();
        said[static_cast<size_t>(world.rank())] = e.what();
      }
    }
  });
  const std::string own = "token_scale[0] = 0:";
  EXPECT_EQ(said[2].rfind(own, 0), 0u) << said[2];
  EXPECT_EQ(said[3].rfind("rank 0: " + own, 0), 0u) << said[3];
  EXPECT_EQ(said[0].rfind("rank 1: " + own, 0), 0u) << said[0];
  EXPECT_EQ(said[1].rfind("rank 1: rank 0: " + own, 0), 0u) << said[1];
}

// The collectives of another world, without its channel for host memory.
class Mute final : public Communicator {
 public:
  explicit Mute(Communicator& other) : other_(other) {}
  const char* engine() const override { return "mute"; }
  int rank() const override { return other_.rank(); }
  int size() const override { return other_.size(); }
  void all_gather(const void* send, void* recv, int64_t bytes, Stream stream) override {
    other_.all_gather(send, recv, bytes, stream);
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) override {
    other_.all_reduce_sum(buffer, count, dtype, stream);
  }
  void reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                          Stream stream) override {
    other_.reduce_scatter_sum(send, recv, count, dtype, stream);
  }
  bool host_gather(const void*, void*, int64_t) override { return false; }

 private:
  Communicator& other_;
};

template <class Call>
void expect_noted(const char* what, const std::type_identity_t<std::function<void(Call&)>>& bend) {
  const std::string note = "handshake: not run; communicator mute has no channel for host memory";
  run_thread_ranks(ranks, timeout_s, [&](Communicator& world) {
    Mute mute(world);
    Call call(mute);
    bend(call);
    const std::vector<std::string> notes = call.run().notes;
    EXPECT_EQ(std::count(notes.begin(), notes.end(), note), 1)
        << what << ": " << ::testing::PrintToString(notes);
  });
}

TEST(WithoutAHandshake, TheReceiptSaysSo) {
  expect_noted<LossCall>("loss, vocabulary", [](LossCall&) {});
  expect_noted<LossCall>("loss, batch", [](LossCall& c) {
    std::swap(c.of.vocab, c.of.batch);
    c.options.vocab = 0;
    c.in.weight = c.memory.floats({9, 4}), c.out.dw = c.memory.floats({9, 4});
    c.of.vocab_begin = 0;
    c.options.denominator_scope = DenominatorScope::global;
  });
  expect_noted<AttentionCall>("attention, heads", [](AttentionCall&) {});
  expect_noted<AttentionCall>("attention, batch", [](AttentionCall& c) {
    std::swap(c.of.heads, c.of.batch);
    c.of.head_begin = 0;
  });
  expect_noted<ScanCall>("scan, tokens", [](ScanCall&) {});
}

}  // namespace
}  // namespace talea::testing
