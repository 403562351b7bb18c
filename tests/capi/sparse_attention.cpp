// What: sparse attention through the C interface: structs, errors by name, facts, phases.
// Why: what a caller in another language meets first is a wrong struct or a null pointer.
// Never: includes a header of the C++ interface.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "view.hpp"

namespace {

struct Problem {
  std::vector<float> q = std::vector<float>(3 * 2 * 32, 0.25f);
  std::vector<float> kv = std::vector<float>(5 * 32), o = std::vector<float>(3 * 2 * 16);
  std::vector<float> lse = std::vector<float>(3 * 2);
  std::vector<int32_t> indices = {0, 1, -1, 4, 4, 2, -1, -1, -1};
  talea_sparse_attention_inputs in{};
  talea_sparse_attention_outputs out{};
  talea_sparse_attention_options options{};
  talea_sparse_attention_ranks ranks{};
  talea_sparse_attention_args args{};
  std::vector<char> workspace;

  Problem() {
    for (size_t i = 0; i < kv.size(); ++i) kv[i] = std::sin(0.3f * static_cast<float>(i));
    in.struct_bytes = sizeof in;
    in.q = view(q.data(), TALEA_F32, {3, 2, 32});
    in.kv = view(kv.data(), TALEA_F32, {5, 32});
    in.indices = view(indices.data(), TALEA_I32, {3, 3});
    out.struct_bytes = sizeof out;
    out.o = view(o.data(), TALEA_F32, {3, 2, 16});
    out.lse = view(lse.data(), TALEA_F32, {3, 2});
    EXPECT_EQ(talea_sparse_attention_options_init(&options, sizeof options), TALEA_OK);
    options.value_dim = 16;
    args.struct_bytes = sizeof args;
    args.abi_version = TALEA_ABI_VERSION;
    args.inputs = &in;
    args.outputs = &out;
    args.options = &options;
  }

  talea_status forward(talea_result** result = nullptr) {
    const talea_status s =
        talea_sparse_attention_workspace_bytes(&args, TALEA_PASS_FORWARD, &args.workspace_bytes);
    if (s != TALEA_OK) return s;
    workspace.assign(static_cast<size_t>(args.workspace_bytes), static_cast<char>(0xff));
    args.workspace = workspace.data();
    return talea_sparse_attention_forward(&args, result);
  }
  bool says(const char* words) const {
    return std::string(talea_last_error()).find(words) != std::string::npos;
  }
};

TEST(SparseAttentionC, ForwardAndFacts) {
  Problem p;
  talea_result* result = nullptr;
  ASSERT_EQ(p.forward(&result), TALEA_OK) << talea_last_error();
  const talea_sparse_attention_facts* f = talea_sparse_attention_result_facts(result);
  ASSERT_NE(f, nullptr);
  EXPECT_EQ(f->slots_given, 9);
  EXPECT_EQ(f->slots_valid, 5);
  EXPECT_EQ(f->slots_foreign, 0);
  EXPECT_STREQ(f->accumulator_o, "fp32");
  EXPECT_STREQ(f->delta_source, "not requested");  // of a backward
  EXPECT_STREQ(f->dkv_order, "not requested");
  EXPECT_EQ(talea_linear_cross_entropy_result_facts(result), nullptr);
  EXPECT_NE(std::string(talea_result_json(result)).find("\"sparse_attention\""), std::string::npos);
  talea_result_free(result);
  for (int c = 0; c < 32; ++c) EXPECT_EQ(p.o[static_cast<size_t>(2 * 2 * 16 + c)], 0);
  EXPECT_TRUE(std::isinf(p.lse[4]) && p.lse[4] > 0);
}

TEST(SparseAttentionC, LogSpeaksOfACallWithoutAResult) {
  Problem p;
  std::vector<std::string> lines;
  talea_set_log_callback(
      [](int32_t, const char* text, void* user) {
        static_cast<std::vector<std::string>*>(user)->emplace_back(text);
      },
      &lines);
  EXPECT_EQ(p.forward(), TALEA_OK);
  const size_t without = lines.size();
  talea_result* result = nullptr;
  EXPECT_EQ(p.forward(&result), TALEA_OK);
  talea_set_log_callback(nullptr, nullptr);
  talea_result_free(result);
  ASSERT_GE(without, 1u);
  EXPECT_EQ(lines.size(), 2 * without);
  EXPECT_NE(lines.back().find("sparse_attention forward: lane "), std::string::npos);
}

TEST(SparseAttentionC, WrongStructsAreNamed) {
  Problem p;
  p.in.struct_bytes -= 8;
  EXPECT_EQ(p.forward(), TALEA_USAGE);
  EXPECT_TRUE(p.says("inputs: struct_bytes")) << talea_last_error();
  Problem a;
  a.args.abi_version = 2;
  EXPECT_EQ(a.forward(), TALEA_USAGE);
  EXPECT_TRUE(a.says("abi_version")) << talea_last_error();
  Problem e;
  e.options.index_space = 3;
  EXPECT_EQ(e.forward(), TALEA_USAGE);
  EXPECT_TRUE(e.says("index_space")) << talea_last_error();
  Problem r;
  r.out.reserved = 1;
  EXPECT_EQ(r.forward(), TALEA_USAGE);
  EXPECT_TRUE(r.says("reserved")) << talea_last_error();
  int64_t bytes = 0;
  Problem w;
  EXPECT_EQ(talea_sparse_attention_workspace_bytes(&w.args, 2, &bytes), TALEA_USAGE);
  EXPECT_TRUE(w.says("pass = 2")) << talea_last_error();
  EXPECT_EQ(talea_sparse_attention_workspace_bytes(nullptr, 0, &bytes), TALEA_USAGE);
  EXPECT_EQ(talea_sparse_attention_options_init(nullptr, 0), TALEA_USAGE);
}

TEST(SparseAttentionC, NoValueDimIsAnError) {
  Problem p;
  p.options.value_dim = 0;
  EXPECT_NE(p.forward(), TALEA_OK);
  EXPECT_TRUE(p.says("value_dim")) << talea_last_error();
}

TEST(SparseAttentionC, ExplainTouchesNoData) {
  Problem p;
  p.in.q.data = p.in.kv.data = p.in.indices.data = p.out.o.data = p.out.lse.data = nullptr;
  char text[4096];
  int64_t needed = 0;
  ASSERT_EQ(talea_sparse_attention_explain(&p.args, TALEA_PASS_FORWARD, TALEA_JSON, text,
                                           sizeof text, &needed),
            TALEA_OK)
      << talea_last_error();
  EXPECT_NE(std::string(text).find("\"lane\""), std::string::npos);
  EXPECT_GT(needed, 2);
}

// More bytes than an address space has: made-up addresses must not meet.
TEST(SparseAttentionC, ExplainOfHugeTensors) {
  Problem p;
  const int64_t n = int64_t{1} << 33;
  p.in.q = view(nullptr, TALEA_BF16, {1, n, 128, 576});
  p.in.kv = view(nullptr, TALEA_BF16, {1, n, 1, 576});
  p.in.indices = view(nullptr, TALEA_I32, {1, n, 1, 2048});
  p.out.o = view(nullptr, TALEA_BF16, {1, n, 128, 512});
  p.out.lse = view(nullptr, TALEA_F32, {1, n, 128});
  p.options.value_dim = 512;
  p.options.workspace_limit_bytes = int64_t{1} << 40;
  int64_t needed = 0, bytes = 0;
  EXPECT_EQ(
      talea_sparse_attention_explain(&p.args, TALEA_PASS_FORWARD, TALEA_JSON, nullptr, 0, &needed),
      TALEA_OK)
      << talea_last_error();
  EXPECT_EQ(talea_sparse_attention_workspace_bytes(&p.args, TALEA_PASS_FORWARD, &bytes), TALEA_OK)
      << talea_last_error();
}

TEST(SparseAttentionC, ForeignIndicesAreReported) {
  Problem p;
  int64_t status[4] = {0, -1, 0, 0};
  p.indices[4] = 77;
  p.out.status = view(status, TALEA_I64, {4});
  ASSERT_EQ(p.forward(), TALEA_OK) << talea_last_error();
  EXPECT_EQ(status[0], 1);
  EXPECT_EQ(status[1], 4);
  EXPECT_EQ(status[2], 77);
  EXPECT_EQ(talea_sparse_attention_require_clean(&p.out.status, nullptr), TALEA_INVALID_DATA);
  EXPECT_TRUE(p.says("77")) << talea_last_error();
  p.options.index_check = TALEA_INDEX_CHECKED;
  p.out.status = {};
  EXPECT_EQ(p.forward(), TALEA_INVALID_DATA);
  EXPECT_TRUE(p.says("77")) << talea_last_error();
}

TEST(SparseAttentionC, MaskAndRows) {
  Problem p;
  std::vector<float> mask(3 * 5, -1.f), kv(2 * 576, 1.f);
  std::vector<uint8_t> rows(2 * 656);
  const talea_tensor m = view(mask.data(), TALEA_F32, {3, 5});
  ASSERT_EQ(talea_sparse_attention_index_mask(&p.args, &m), TALEA_OK) << talea_last_error();
  const float want[] = {0, 0, -1, -1, -1, -1, -1, 0, -1, 0, -1, -1, -1, -1, -1};
  for (size_t i = 0; i < mask.size(); ++i) EXPECT_EQ(mask[i], want[i]) << i;
  const talea_tensor source = view(kv.data(), TALEA_F32, {2, 576});
  const talea_tensor target = view(rows.data(), TALEA_U8, {2, 656});
  ASSERT_EQ(talea_sparse_attention_pack_rows(&source, &target, nullptr), TALEA_OK)
      << talea_last_error();
  EXPECT_NE(rows[0], 0);
  EXPECT_EQ(talea_sparse_attention_pack_rows(nullptr, &target, nullptr), TALEA_USAGE);
}

TEST(SparseAttentionC, PhasesOfAWorldOfOneHaveNoExchange) {
  Problem p;
  ASSERT_EQ(p.forward(), TALEA_OK) << talea_last_error();
  const std::vector<float> eager = p.o;
  p.o.assign(p.o.size(), 7.f);
  talea_phases* phases = nullptr;
  ASSERT_EQ(talea_sparse_attention_phases_begin(&p.args, TALEA_PASS_FORWARD, &phases), TALEA_OK);
  talea_exchange e{};
  e.struct_bytes = sizeof e;
  ASSERT_EQ(talea_phases_next(phases, &e), TALEA_OK) << talea_last_error();
  EXPECT_EQ(e.kind, TALEA_EXCHANGE_NONE);
  talea_result* result = nullptr;
  ASSERT_EQ(talea_phases_finish(phases, &result), TALEA_OK) << talea_last_error();
  talea_result_free(result);
  talea_phases_free(phases);
  EXPECT_EQ(p.o, eager);
}

TEST(SparseAttentionC, ExchangesCarryTheirGroup) {
  Problem p;
  talea_communicator heads{};
  heads.struct_bytes = sizeof heads;
  heads.rank = 0;
  heads.size = 2;
  p.ranks.struct_bytes = sizeof p.ranks;
  p.ranks.heads = &heads;
  p.ranks.total_heads = 4;
  p.args.ranks = &p.ranks;
  int64_t bytes = 0;
  ASSERT_EQ(talea_sparse_attention_workspace_bytes(&p.args, TALEA_PASS_FORWARD, &bytes), TALEA_OK)
      << talea_last_error();
  p.workspace.assign(static_cast<size_t>(bytes), 0);
  p.args.workspace = p.workspace.data();
  p.args.workspace_bytes = bytes;
  talea_phases* phases = nullptr;
  ASSERT_EQ(talea_sparse_attention_phases_begin(&p.args, TALEA_PASS_FORWARD, &phases), TALEA_OK);
  talea_exchange e{};
  e.struct_bytes = sizeof e;
  ASSERT_EQ(talea_phases_next(phases, &e), TALEA_OK) << talea_last_error();
  EXPECT_EQ(e.kind, TALEA_EXCHANGE_ALL_GATHER);  // the handshake
  EXPECT_EQ(e.group, TALEA_GROUP_HEADS);
  talea_phases_free(phases);
}

TEST(SparseAttentionC, LanesAreListed) {
  EXPECT_NE(std::string(talea_sparse_attention_lanes()).find("reference"), std::string::npos);
}

}  // namespace
