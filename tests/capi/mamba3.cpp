// What: the C functions of the scan from outside: values, errors by name, facts, phases, layouts.
// Why: a C caller has nothing but these; the example is the way through, this is the rest.
// Never: includes a C++ header of the library.
#include <gtest/gtest.h>
#include <talea/talea.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

namespace {

talea_tensor view(float* data, const std::vector<int64_t>& shape) {
  talea_tensor t{};
  t.data = data;
  t.rank = static_cast<int32_t>(shape.size());
  t.present = 1;
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  return t;
}

// Two tokens, one head, N = P = 1, no rotation: by hand.
//   lambda = 1/2: gamma = b = dt / 2. h_0 = gamma_0 v_0 k_0; h_1 = e^adt (h_0 + b_1 v_0 k_0) + ..
class CMamba3 : public testing::Test {
 protected:
  float q[2] = {1, 2}, k[2] = {3, 1}, v[2] = {1, -1}, adt[2] = {-0.5f, -1}, dt[2] = {1, 2};
  float trap[2] = {0, 0}, out[2] = {}, ssm[1] = {}, d_out[2] = {1, 1}, d_q[2] = {}, d_dt[2] = {};
  talea_mamba3_inputs inputs{};
  talea_mamba3_outputs outputs{};
  talea_mamba3_options options{};
  talea_mamba3_args args{};
  std::vector<char> workspace;

  void SetUp() override {
    inputs.struct_bytes = sizeof inputs;
    outputs.struct_bytes = sizeof outputs;
    ASSERT_EQ(talea_mamba3_options_init(&options, sizeof options), TALEA_OK);
    inputs.q = view(q, {1, 2, 1, 1});
    inputs.k = view(k, {1, 2, 1, 1});
    inputs.v = view(v, {1, 2, 1, 1});
    inputs.adt = view(adt, {1, 1, 2});
    inputs.dt = view(dt, {1, 1, 2});
    inputs.trap = view(trap, {1, 1, 2});
    outputs.out = view(out, {1, 2, 1, 1});
    outputs.final_states.ssm = view(ssm, {1, 1, 1, 1});
    args.struct_bytes = sizeof args;
    args.abi_version = TALEA_ABI_VERSION;
    args.inputs = &inputs;
    args.outputs = &outputs;
    args.options = &options;
  }

  talea_status call(int32_t pass, talea_result** result = nullptr) {
    const talea_status status = talea_mamba3_workspace_bytes(&args, pass, &args.workspace_bytes);
    if (status != TALEA_OK) return status;
    workspace.assign(static_cast<size_t>(args.workspace_bytes), static_cast<char>(0xff));
    args.workspace = workspace.data();
    return pass == TALEA_MAMBA3_BACKWARD ? talea_mamba3_backward(&args, result)
                                         : talea_mamba3_forward(&args, result);
  }

  void expect_error(talea_status got, talea_status wanted, const std::string& words) {
    EXPECT_EQ(got, wanted);
    EXPECT_NE(std::string(talea_last_error()).find(words), std::string::npos) << talea_last_error();
  }
};

TEST_F(CMamba3, TwoTokensByHand) {
  talea_result* result = nullptr;
  ASSERT_EQ(call(TALEA_MAMBA3_FORWARD, &result), TALEA_OK) << talea_last_error();
  const double h0 = 0.5 * 3, h1 = std::exp(-1.0) * (h0 + 1.0 * 3) + 1.0 * -1;
  EXPECT_NEAR(out[0], h0 * 1, 1e-6);
  EXPECT_NEAR(out[1], h1 * 2, 1e-6);
  EXPECT_NEAR(ssm[0], h1, 1e-6);
  const talea_mamba3_facts* facts = talea_mamba3_result_facts(result);
  ASSERT_NE(facts, nullptr);
  EXPECT_EQ(facts->struct_bytes, static_cast<int64_t>(sizeof *facts));
  EXPECT_EQ(facts->pass, TALEA_MAMBA3_FORWARD);
  EXPECT_EQ(facts->rotary_pairs, TALEA_MAMBA3_PAIRS_INTERLEAVED);
  EXPECT_EQ(facts->quadratic_bytes, 0);
  EXPECT_NE(std::string(talea_mamba3_lanes()).find(facts->lane), std::string::npos);
  EXPECT_NE(std::string(talea_result_json(result)).find("\"operator\":\"mamba3\""),
            std::string::npos);
  EXPECT_EQ(talea_linear_cross_entropy_result_facts(result), nullptr);
  talea_result_free(result);
  EXPECT_EQ(talea_mamba3_result_facts(nullptr), nullptr);
}

TEST_F(CMamba3, GradientsByHand) {
  inputs.d_out = view(d_out, {1, 2, 1, 1});
  outputs = {};
  outputs.struct_bytes = sizeof outputs;
  outputs.d.q = view(d_q, {1, 2, 1, 1});
  outputs.d.dt = view(d_dt, {1, 1, 2});
  ASSERT_EQ(call(TALEA_MAMBA3_BACKWARD), TALEA_OK) << talea_last_error();
  const double h0 = 1.5, h1 = std::exp(-1.0) * (h0 + 3) - 1, a = std::exp(-1.0);
  EXPECT_NEAR(d_q[0], h0, 1e-6);
  EXPECT_NEAR(d_q[1], h1, 1e-6);
  // out = h0 q0 + h1 q1; d h0 / d dt0 = 3/2; d h1 / d dt1 = (a * 3 - 1) / 2.
  EXPECT_NEAR(d_dt[0], 1.5 * (1 + a * 2), 1e-5);
  EXPECT_NEAR(d_dt[1], (a * 3 - 1) / 2 * 2, 1e-5);
}

TEST_F(CMamba3, OtherLayoutsAndNullPointersAreErrors) {
  int64_t bytes = 0;
  expect_error(talea_mamba3_workspace_bytes(nullptr, 0, &bytes), TALEA_USAGE, "args: null");
  expect_error(talea_mamba3_workspace_bytes(&args, 0, nullptr), TALEA_USAGE, "bytes: null");
  expect_error(talea_mamba3_workspace_bytes(&args, 3, &bytes), TALEA_USAGE, "pass = 3");
  expect_error(talea_mamba3_workspace_bytes(&args, TALEA_MAMBA3_STEP, &bytes), TALEA_USAGE,
               "step: null");
  ++inputs.struct_bytes;
  expect_error(talea_mamba3_workspace_bytes(&args, 0, &bytes), TALEA_USAGE, "inputs: struct_bytes");
  --inputs.struct_bytes;
  outputs.d.reserved = 1;
  expect_error(talea_mamba3_workspace_bytes(&args, 0, &bytes), TALEA_USAGE, "outputs.d: reserved");
  outputs.d.reserved = 0;
  options.schedule = 9;
  expect_error(talea_mamba3_workspace_bytes(&args, 0, &bytes), TALEA_USAGE, "schedule = 9");
  expect_error(talea_mamba3_options_init(&options, 4), TALEA_USAGE, "options: struct_bytes = 4");
}

TEST_F(CMamba3, ErrorsNameTensorAndValue) {
  inputs.dt.dtype = TALEA_BF16;
  expect_error(call(TALEA_MAMBA3_FORWARD), TALEA_INVALID_DATA, "dt");
  inputs.dt.dtype = TALEA_F32;
  inputs.trap.shape[2] = 3;
  expect_error(call(TALEA_MAMBA3_FORWARD), TALEA_INVALID_DATA, "trap");
  inputs.trap.shape[2] = 2;
  options.lane = "nobody";
  expect_error(call(TALEA_MAMBA3_FORWARD), TALEA_USAGE, "nobody");
}

TEST_F(CMamba3, EveryFieldArrivesUnderItsName) {
  // A tensor of an impossible rank is refused by the name that it has in the messages.
  struct Named {
    talea_tensor* t;
    const char* name;
  };
  talea_mamba3_inputs& i = inputs;
  talea_mamba3_gradients& d = outputs.d;
  const Named all[] = {{&i.q, "q"},
                       {&i.k, "k"},
                       {&i.v, "v"},
                       {&i.z, "z"},
                       {&i.adt, "adt"},
                       {&i.dt, "dt"},
                       {&i.trap, "trap"},
                       {&i.angles, "angles"},
                       {&i.q_bias, "q_bias"},
                       {&i.k_bias, "k_bias"},
                       {&i.d, "d"},
                       {&i.mimo_v, "mimo_v"},
                       {&i.mimo_z, "mimo_z"},
                       {&i.mimo_out, "mimo_out"},
                       {&i.norm_weight, "norm_weight"},
                       {&i.cu_seqlens, "cu_seqlens"},
                       {&i.d_out, "d_out"},
                       {&i.saved, "saved"},
                       {&i.initial_states.angle, "initial_angle"},
                       {&i.initial_states.ssm, "initial_ssm"},
                       {&i.initial_states.k, "initial_k"},
                       {&i.initial_states.v, "initial_v"},
                       {&i.d_final_states.angle, "d_final_angle"},
                       {&i.d_final_states.ssm, "d_final_ssm"},
                       {&i.d_final_states.k, "d_final_k"},
                       {&i.d_final_states.v, "d_final_v"},
                       {&outputs.out, "out"},
                       {&outputs.saved, "saved"},
                       {&outputs.status, "status"},
                       {&outputs.final_states.angle, "final_angle"},
                       {&outputs.final_states.ssm, "final_ssm"},
                       {&outputs.final_states.k, "final_k"},
                       {&outputs.final_states.v, "final_v"},
                       {&d.q, "d_q"},
                       {&d.k, "d_k"},
                       {&d.v, "d_v"},
                       {&d.z, "d_z"},
                       {&d.adt, "d_adt"},
                       {&d.dt, "d_dt"},
                       {&d.trap, "d_trap"},
                       {&d.angles, "d_angles"},
                       {&d.q_bias, "d_q_bias"},
                       {&d.k_bias, "d_k_bias"},
                       {&d.d, "d_d"},
                       {&d.mimo_v, "d_mimo_v"},
                       {&d.mimo_z, "d_mimo_z"},
                       {&d.mimo_out, "d_mimo_out"},
                       {&d.norm_weight, "d_norm_weight"},
                       {&d.initial_states.angle, "d_initial_angle"},
                       {&d.initial_states.ssm, "d_initial_ssm"},
                       {&d.initial_states.k, "d_initial_k"},
                       {&d.initial_states.v, "d_initial_v"}};
  for (const Named& one : all) {
    const talea_tensor before = *one.t;
    one.t->present = 1;
    one.t->rank = 9;
    int64_t bytes = 0;
    expect_error(talea_mamba3_workspace_bytes(&args, 0, &bytes), TALEA_USAGE,
                 std::string(one.name) + ": rank = 9");
    *one.t = before;
  }
}

TEST_F(CMamba3, ExplainNeedsNoData) {
  inputs.q.data = inputs.k.data = inputs.v.data = outputs.out.data = nullptr;
  int64_t needed = 0;
  ASSERT_EQ(talea_mamba3_explain(&args, 0, TALEA_TEXT, nullptr, 0, &needed), TALEA_OK)
      << talea_last_error();
  std::string text(static_cast<size_t>(needed), '?');
  ASSERT_EQ(talea_mamba3_explain(&args, 0, TALEA_TEXT, text.data(), needed, nullptr), TALEA_OK);
  EXPECT_EQ(text.rfind("lane = ", 0), 0u) << text;
  int64_t saved = -1;
  EXPECT_EQ(talea_mamba3_saved_bytes(&args, &saved), TALEA_OK) << talea_last_error();
  EXPECT_GE(saved, 0);
}

TEST_F(CMamba3, PhasesOfAWorldOfOneHaveNoExchange) {
  ASSERT_EQ(talea_mamba3_workspace_bytes(&args, 0, &args.workspace_bytes), TALEA_OK);
  workspace.assign(static_cast<size_t>(args.workspace_bytes), static_cast<char>(0xff));
  args.workspace = workspace.data();
  talea_phases* phases = nullptr;
  ASSERT_EQ(talea_mamba3_phases_begin(&args, TALEA_MAMBA3_FORWARD, &phases), TALEA_OK);
  talea_exchange e{};
  e.struct_bytes = sizeof e;
  ASSERT_EQ(talea_phases_next(phases, &e), TALEA_OK) << talea_last_error();
  EXPECT_EQ(e.kind, TALEA_EXCHANGE_NONE);
  talea_result* result = nullptr;
  ASSERT_EQ(talea_phases_finish(phases, &result), TALEA_OK);
  EXPECT_NE(talea_mamba3_result_facts(result), nullptr);
  talea_result_free(result);
  talea_phases_free(phases);
  EXPECT_NEAR(out[0], 1.5, 1e-6);
  expect_error(talea_mamba3_phases_begin(&args, TALEA_MAMBA3_STEP, &phases), TALEA_USAGE,
               "a step has no exchanges");
}

}  // namespace
