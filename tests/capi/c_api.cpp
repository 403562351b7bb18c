// What: the C interface from C++17, through the shared library alone.
// Why: statuses, error texts, layout checks and callbacks are the whole contract of the C door.
// Never: includes a header of the C++ interface.
#include <gtest/gtest.h>
#include <talea/talea.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "view.hpp"

namespace {

// Two tokens, hidden 1: the logits are the weights, (0, log 3) and twice that.
class CApi : public ::testing::Test {
 protected:
  void SetUp() override {
    inputs.struct_bytes = sizeof inputs;
    inputs.hidden = view(x, TALEA_F32, {2, 1});
    inputs.weight = view(w, TALEA_F32, {2, 1});
    inputs.targets = view(y, TALEA_I64, {2});
    outputs.struct_bytes = sizeof outputs;
    outputs.loss = view(&loss, TALEA_F32, {});
    outputs.dx = view(dx, TALEA_F32, {2, 1});
    outputs.dw = view(dw, TALEA_F32, {2, 1});
    ASSERT_EQ(talea_linear_cross_entropy_options_init(&options, sizeof options), TALEA_OK);
    args = args_of(inputs, outputs, options);
  }

  talea_status call(talea_result** result = nullptr) { return call_in(workspace, args, result); }

  void expect_error(talea_status status, talea_status kind, const char* text) {
    EXPECT_EQ(status, kind);
    EXPECT_NE(std::string(talea_last_error()).find(text), std::string::npos) << talea_last_error();
  }

  float x[2] = {1, 2}, w[2] = {0, std::log(3.0f)}, loss = 0, dx[2] = {}, dw[2] = {};
  int64_t y[2] = {1, 0};
  talea_linear_cross_entropy_inputs inputs{};
  talea_linear_cross_entropy_outputs outputs{};
  talea_linear_cross_entropy_options options{};
  talea_linear_cross_entropy_ranks ranks{};
  talea_linear_cross_entropy_args args{};
  std::vector<char> workspace;
};

TEST_F(CApi, TwoTokensByHand) {
  talea_result* result = nullptr;
  ASSERT_EQ(call(&result), TALEA_OK) << talea_last_error();
  EXPECT_NEAR(loss, (std::log(4.0 / 3.0) + std::log(10.0)) / 2, 1e-6);
  EXPECT_NEAR(dx[1], 0.9 * std::log(3.0) / 2, 1e-6);
  EXPECT_NEAR(dw[1], (-0.25 + 0.9 * 2) / 2, 1e-6);
  const talea_linear_cross_entropy_facts* facts = talea_linear_cross_entropy_result_facts(result);
  ASSERT_NE(facts, nullptr);
  EXPECT_EQ(facts->struct_bytes, static_cast<int64_t>(sizeof *facts));
  EXPECT_EQ(facts->valid_tokens, 2);
  EXPECT_EQ(facts->denominator, 2);
  EXPECT_EQ(facts->workspace_bytes, args.workspace_bytes);
  EXPECT_GT(facts->declined_count, 0);
  EXPECT_GT(std::strlen(facts->declined[0].reason), 0u);
  const std::string json = talea_result_json(result);
  EXPECT_NE(json.find("\"lane\""), std::string::npos);
  EXPECT_NE(json.find(facts->lane), std::string::npos);
  talea_result_free(result);
}

TEST_F(CApi, DefaultsAreThoseOfTheContract) {
  EXPECT_EQ(options.reduction, TALEA_REDUCTION_MEAN);
  EXPECT_EQ(options.ignore_index, -100);
  EXPECT_EQ(options.logit_scale, 1);
  EXPECT_EQ(options.workspace_limit_bytes, TALEA_WORKSPACE_AUTO);
  args.options = nullptr;
  EXPECT_EQ(call(), TALEA_OK) << talea_last_error();
}

TEST_F(CApi, AnotherLayoutIsRefused) {
  args.struct_bytes -= 8;
  expect_error(call(), TALEA_USAGE, "args: struct_bytes");
  args.struct_bytes += 8;
  args.abi_version = TALEA_ABI_VERSION + 1;
  expect_error(call(), TALEA_USAGE, "abi_version = 4");
  args.abi_version = TALEA_ABI_VERSION;
  inputs.struct_bytes = 0;
  expect_error(call(), TALEA_USAGE, "inputs: struct_bytes = 0");
  inputs.struct_bytes = sizeof inputs;
  outputs.struct_bytes = 1;
  expect_error(call(), TALEA_USAGE, "outputs: struct_bytes = 1");
  outputs.struct_bytes = sizeof outputs;
  options.struct_bytes = -1;
  expect_error(call(), TALEA_USAGE, "options: struct_bytes = -1");
  options.struct_bytes = sizeof options;
  args.ranks = &ranks;
  expect_error(call(), TALEA_USAGE, "ranks: struct_bytes = 0");
  args.ranks = nullptr;
  EXPECT_EQ(call(), TALEA_OK);
  talea_linear_cross_entropy_options older;
  expect_error(talea_linear_cross_entropy_options_init(&older, sizeof older - 8), TALEA_USAGE,
               "struct_bytes");
}

TEST_F(CApi, NullPointersAreErrors) {
  int64_t bytes = 0;
  expect_error(talea_linear_cross_entropy_workspace_bytes(nullptr, &bytes), TALEA_USAGE,
               "args: null");
  expect_error(talea_linear_cross_entropy_workspace_bytes(&args, nullptr), TALEA_USAGE,
               "bytes: null");
  args.inputs = nullptr;
  expect_error(talea_linear_cross_entropy_workspace_bytes(&args, &bytes), TALEA_USAGE,
               "inputs: null");
  EXPECT_EQ(talea_linear_cross_entropy_result_facts(nullptr), nullptr);
  EXPECT_EQ(talea_result_json(nullptr), nullptr);
  talea_result_free(nullptr);
}

TEST_F(CApi, ErrorsNameArgumentAndValue) {
  inputs.hidden.dtype = 77;
  expect_error(call(), TALEA_USAGE, "hidden: dtype = 77");
  for (const int32_t narrow : {TALEA_F8_E4M3, TALEA_U8}) {  // of other operators
    inputs.hidden.dtype = narrow;
    expect_error(call(), TALEA_INVALID_DATA,
                 narrow == TALEA_U8 ? "hidden: dtype uint8 is not supported here"
                                    : "hidden: dtype fp8_e4m3 is not supported here");
  }
  inputs.hidden.dtype = TALEA_F32;
  inputs.weight.rank = 6;
  expect_error(call(), TALEA_USAGE, "weight: rank = 6");
  inputs.weight.rank = 5;
  expect_error(call(), TALEA_INVALID_DATA, "weight: needed, with shape [vocab, hidden]");
  inputs.weight.rank = 2;
  inputs.weight.shape[0] = -2;
  expect_error(call(), TALEA_USAGE, "weight: shape[0] = -2");
  inputs.weight.shape[0] = std::numeric_limits<int64_t>::max();
  inputs.weight.shape[1] = std::numeric_limits<int64_t>::max();
  expect_error(call(), TALEA_USAGE, "overflow");
  inputs.weight = view(w, TALEA_F32, {2, 1});
  inputs.targets.reserved = 6;
  expect_error(call(), TALEA_USAGE, "targets: reserved = 6");
  inputs.targets.reserved = 0;
  args.reserved = 7;
  expect_error(call(), TALEA_USAGE, "args: reserved = 7");
  args.reserved = 0;
  options.reserved = 8;
  expect_error(call(), TALEA_USAGE, "options: reserved = 8");
  options.reserved = 0;
  outputs.reserved = 9;
  expect_error(call(), TALEA_USAGE, "outputs: reserved = 9");
  outputs.reserved = 0;
  options.reduction = 9;
  expect_error(call(), TALEA_USAGE, "reduction = 9");
  options.reduction = TALEA_REDUCTION_MEAN;
  options.label_smoothing = 2;
  expect_error(call(), TALEA_USAGE, "label_smoothing = 2");
  options.label_smoothing = 0;
  options.lane = "fastest";
  expect_error(call(), TALEA_USAGE, "lane = fastest");
  options.lane = nullptr;
  y[1] = 12;
  expect_error(call(), TALEA_INVALID_DATA, "12");
  y[1] = 0;
  EXPECT_EQ(call(), TALEA_OK);
}

TEST_F(CApi, TooSmallAWorkspaceNamesTheBytes) {
  int64_t needed = 0;
  ASSERT_EQ(talea_linear_cross_entropy_workspace_bytes(&args, &needed), TALEA_OK);
  workspace.resize(static_cast<size_t>(needed));
  args.workspace = workspace.data();
  args.workspace_bytes = needed - 1;
  talea_result* result = reinterpret_cast<talea_result*>(this);
  expect_error(talea_linear_cross_entropy(&args, &result), TALEA_USAGE,
               std::to_string(needed).c_str());
  EXPECT_EQ(result, nullptr);
}

TEST_F(CApi, ALimitThatCannotBeKeptNamesTheLeast) {
  int64_t needed = 0;
  options.workspace_limit_bytes = 64;
  expect_error(talea_linear_cross_entropy_workspace_bytes(&args, &needed), TALEA_USAGE,
               "workspace_limit = 64 bytes");
  const std::string said = talea_last_error();
  const std::string before = "needs at least ";
  const size_t at = said.find(before);
  ASSERT_NE(at, std::string::npos) << said;
  options.workspace_limit_bytes = std::stoll(said.substr(at + before.size()));
  ASSERT_EQ(talea_linear_cross_entropy_workspace_bytes(&args, &needed), TALEA_OK);
  EXPECT_LE(needed, options.workspace_limit_bytes);
  EXPECT_EQ(call(), TALEA_OK);
  --options.workspace_limit_bytes;
  expect_error(call(), TALEA_USAGE, before.c_str());
}

TEST_F(CApi, ExplainNeedsNoData) {
  for (talea_tensor* t :
       {&inputs.hidden, &inputs.weight, &inputs.targets, &outputs.loss, &outputs.dx, &outputs.dw})
    t->data = nullptr;
  int64_t needed = 0;
  ASSERT_EQ(talea_linear_cross_entropy_explain(&args, TALEA_TEXT, nullptr, 0, &needed), TALEA_OK)
      << talea_last_error();
  std::string text(static_cast<size_t>(needed), '?');
  ASSERT_EQ(talea_linear_cross_entropy_explain(&args, TALEA_TEXT, text.data(), needed, nullptr),
            TALEA_OK);
  EXPECT_EQ(std::strlen(text.c_str()) + 1, static_cast<size_t>(needed));
  EXPECT_EQ(text.rfind("lane = ", 0), 0u) << text;
  char cut[8];
  std::memset(cut, '#', sizeof cut);
  ASSERT_EQ(talea_linear_cross_entropy_explain(&args, TALEA_JSON, cut, 5, &needed), TALEA_OK);
  EXPECT_STREQ(cut, "{\"op");
  EXPECT_EQ(cut[5], '#');
  expect_error(talea_linear_cross_entropy_explain(&args, 3, cut, 5, &needed), TALEA_USAGE,
               "format = 3");
}

TEST_F(CApi, LogSpeaksOfCallsAndErrors) {
  std::vector<std::string> lines;
  talea_set_log_callback(
      [](int32_t, const char* text, void* user) {
        static_cast<std::vector<std::string>*>(user)->emplace_back(text);
      },
      &lines);
  EXPECT_EQ(call(), TALEA_OK);
  options.softcap = -1;
  EXPECT_EQ(call(), TALEA_USAGE);
  talea_set_log_callback(nullptr, nullptr);
  ASSERT_GE(lines.size(), 2u);
  EXPECT_NE(lines.back().find("softcap = -1"), std::string::npos);
  const size_t before = lines.size();
  EXPECT_EQ(call(), TALEA_USAGE);
  EXPECT_EQ(lines.size(), before);
}

// A world whose callbacks fail at a call.
struct World {
  int calls = 0;
  int fail_at = -1;
};

talea_communicator communicator(World& world, int32_t size) {
  talea_communicator c{};
  c.struct_bytes = sizeof c;
  c.engine = "test";
  c.size = size;
  c.user = &world;
  c.all_gather = [](void* user, const void* send, void* recv, int64_t bytes, void*) -> int32_t {
    auto* w = static_cast<World*>(user);
    if (w->calls++ == w->fail_at) return 17;
    if (send != recv) std::memcpy(recv, send, static_cast<size_t>(bytes));
    return 0;
  };
  c.all_reduce_sum = [](void* user, void*, int64_t, int32_t, void*) -> int32_t {
    auto* w = static_cast<World*>(user);
    return w->calls++ == w->fail_at ? 18 : 0;
  };
  c.reduce_scatter_sum = [](void*, const void*, void*, int64_t, int32_t, void*) -> int32_t {
    return 19;
  };
  c.error_text = [](void*) { return "the cable is out"; };
  return c;
}

TEST_F(CApi, AFailingCallbackEndsTheCallWithItsText) {
  World world;
  world.fail_at = 0;
  talea_communicator c = communicator(world, 2);
  ranks.struct_bytes = sizeof ranks;
  ranks.vocab = &c;
  args.ranks = &ranks;
  options.vocab = 4;
  expect_error(call(), TALEA_RUNTIME, "the cable is out");
}

TEST_F(CApi, BadCommunicatorsAreRefused) {
  World world;
  talea_communicator c = communicator(world, 2);
  ranks.struct_bytes = sizeof ranks;
  ranks.vocab = &c;
  args.ranks = &ranks;
  c.rank = 2;
  expect_error(call(), TALEA_USAGE, "ranks.vocab: rank = 2");
  c.rank = 0;
  c.multiprocessors_beside = 8;
  expect_error(call(), TALEA_USAGE, "ranks.vocab: multiprocessors_beside = 8");
  c.multiprocessors_beside = -1;
  expect_error(call(), TALEA_USAGE, "ranks.vocab: multiprocessors_beside = -1");
  c.multiprocessors_beside = 0;
  c.all_gather = nullptr;
  expect_error(call(), TALEA_USAGE, "all_gather: null");
}

// Both ranks of a world of two, driven by one loop through the C door.
TEST_F(CApi, PhasesLeaveTheExchangesToTheCaller) {
  float losses[2] = {}, dxs[2][2] = {}, dws[2] = {};
  talea_communicator group[2]{};
  talea_linear_cross_entropy_ranks two[2]{};
  talea_phases* phases[2] = {};
  std::vector<char> workspaces[2];
  for (int r = 0; r < 2; ++r) {
    inputs.weight = view(w + r, TALEA_F32, {1, 1});
    outputs.loss = view(&losses[r], TALEA_F32, {});
    outputs.dx = view(dxs[r], TALEA_F32, {2, 1});
    outputs.dw = view(&dws[r], TALEA_F32, {1, 1});
    options.vocab = 2;
    group[r].struct_bytes = sizeof group[r];
    group[r].rank = r;
    group[r].size = 2;
    two[r].struct_bytes = sizeof two[r];
    two[r].vocab = &group[r];
    two[r].vocab_begin = r;
    args.ranks = &two[r];
    ASSERT_EQ(talea_linear_cross_entropy_workspace_bytes(&args, &args.workspace_bytes), TALEA_OK)
        << talea_last_error();
    workspaces[r].assign(static_cast<size_t>(args.workspace_bytes), static_cast<char>(0xff));
    args.workspace = workspaces[r].data();
    expect_error(talea_linear_cross_entropy(&args, nullptr), TALEA_USAGE, "all_gather: null");
    ASSERT_EQ(talea_linear_cross_entropy_phases_begin(&args, &phases[r]), TALEA_OK)
        << talea_last_error();
    expect_error(talea_phases_finish(phases[r], nullptr), TALEA_USAGE, "has not ended");
  }
  talea_exchange e[2]{};
  expect_error(talea_phases_next(phases[0], &e[0]), TALEA_USAGE, "struct_bytes = 0");
  for (int turns = 0;; ++turns) {
    for (int r = 0; r < 2; ++r) {
      e[r].struct_bytes = sizeof e[r];
      ASSERT_EQ(talea_phases_next(phases[r], &e[r]), TALEA_OK) << talea_last_error();
    }
    ASSERT_EQ(e[0].kind, e[1].kind);
    if (e[0].kind == TALEA_EXCHANGE_NONE) break;
    ASSERT_EQ(e[0].group, TALEA_GROUP_VOCAB);
    if (e[0].kind == TALEA_EXCHANGE_ALL_GATHER) {
      std::vector<char> all;
      for (const talea_exchange& from : e) {
        const char* sent = static_cast<const char*>(from.send);
        all.insert(all.end(), sent, sent + from.bytes);
      }
      for (talea_exchange& to : e) std::memcpy(to.recv, all.data(), all.size());
    } else {
      ASSERT_EQ(e[0].kind, TALEA_EXCHANGE_ALL_REDUCE_SUM);
      ASSERT_EQ(e[0].dtype, TALEA_F32);
      auto *a = static_cast<float*>(e[0].recv), *b = static_cast<float*>(e[1].recv);
      for (int64_t i = 0; i < e[0].count; ++i) a[i] = b[i] = a[i] + b[i];
    }
    ASSERT_LT(turns, 100);
  }
  for (int r = 0; r < 2; ++r) {
    EXPECT_NEAR(losses[r], (std::log(4.0 / 3.0) + std::log(10.0)) / 2, 1e-6);
    EXPECT_NEAR(dxs[r][1], 0.9 * std::log(3.0) / 2, 1e-6);
    talea_result* result = nullptr;
    ASSERT_EQ(talea_phases_finish(phases[r], &result), TALEA_OK) << talea_last_error();
    EXPECT_NE(std::string(talea_linear_cross_entropy_result_facts(result)->merges).find("phases"),
              std::string::npos);
    talea_result_free(result);
    expect_error(talea_phases_finish(phases[r], nullptr), TALEA_USAGE, "taken before");
    talea_phases_free(phases[r]);
  }
  EXPECT_NEAR(dws[1], (-0.25 + 0.9 * 2) / 2, 1e-6);
  talea_phases_free(nullptr);
}

TEST(CApiConstants, VersionAndLanes) {
  EXPECT_STREQ(talea_version(), TALEA_VERSION);
  EXPECT_EQ(talea_abi_version(), TALEA_ABI_VERSION);
  EXPECT_STREQ(talea_linear_cross_entropy_lanes(), "sm90,cuda,cpu,unfused,reference");
  EXPECT_GT(std::strlen(talea_build_revision()), 0u);
  // The layout that ABI version 3 promises; a change here needs another TALEA_ABI_VERSION.
  EXPECT_EQ(sizeof(talea_tensor), 112u);
  EXPECT_EQ(sizeof(talea_communicator), 72u);
  EXPECT_EQ(sizeof(talea_linear_cross_entropy_inputs), 8u + 14 * 112);
  EXPECT_EQ(sizeof(talea_linear_cross_entropy_outputs), 8u + 14 * 112 + 16);
  EXPECT_EQ(sizeof(talea_linear_cross_entropy_options), 112u);
  EXPECT_EQ(sizeof(talea_linear_cross_entropy_ranks), 48u);
  EXPECT_EQ(sizeof(talea_linear_cross_entropy_args), 72u);
  EXPECT_EQ(sizeof(talea_exchange), 64u);
}

}  // namespace
