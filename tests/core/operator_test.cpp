// What: an operator that adds two vectors, through describe, lanes, explain, call, the C door's
// result and a receipt.
// Why: the operator layer is real only where a second operator goes through.
// Never: built into the library.
#include "core/operator.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "capi/result.hpp"
#include "capi/tensor.hpp"
#include "core/receipt.hpp"
#include "support/expect_error.hpp"

namespace talea {
namespace {

// ---- The operator: its structs, its C twins, its lists, its table.
struct Inputs {
  Tensor a, b;
};
struct Outputs {
  Tensor sum;
};
struct Options {
  double factor = 1;
  std::string lane = "auto";
};
struct Problem {
  int64_t n = 0;
  int device_index = 0;
  Options options = {};
};
struct Result {
  std::string lane, lane_kind;
  std::vector<LaneDecline> declined;
  int64_t workspace_bytes = 0;
  double flops = 0;
  std::string order;
};
struct Call {
  const Inputs& in;
  const Outputs& out;
  const Problem& problem;
  Result& result;
};
struct CInputs {
  int64_t struct_bytes;
  talea_tensor a, b;
};
struct COutputs {
  int64_t struct_bytes;
  talea_tensor sum;
};
struct COptions {
  int64_t struct_bytes;
  double factor;
  const char* lane;
};
struct CFacts {
  int64_t struct_bytes;
  const char* lane;
  const char* order;
};
constexpr TensorField<Inputs, CInputs, talea_tensor> input_fields[] = {
    {"a", &Inputs::a, &CInputs::a}, {"b", &Inputs::b, &CInputs::b}};
constexpr TensorField<Outputs, COutputs, talea_tensor> output_fields[] = {
    {"sum", &Outputs::sum, &COutputs::sum}};
constexpr std::tuple option_fields = {Field{"factor", &Options::factor, &COptions::factor, true},
                                      Field{"lane", &Options::lane, &COptions::lane}};
constexpr std::tuple fact_fields = {Field{"lane", &Result::lane, &CFacts::lane},
                                    Field{"order", &Result::order, &CFacts::order}};

struct Add {
  using Problem = talea::Problem;
  using Call = talea::Call;
  using Result = talea::Result;
  static std::span<const Lane<Add>> lanes();
};

struct Config {
  bool backwards = false;
};

void add(const Call& c, const Planned& plan) {
  const bool backwards = plan.as<Config>().backwards;
  for (int64_t k = 0; k < c.problem.n; ++k) {
    const int64_t i = backwards ? c.problem.n - 1 - k : k;
    static_cast<float*>(c.out.sum.data)[i * c.out.sum.stride[0]] =
        static_cast<float>(c.problem.options.factor) *
        (static_cast<const float*>(c.in.a.data)[i * c.in.a.stride[0]] +
         static_cast<const float*>(c.in.b.data)[i * c.in.b.stride[0]]);
  }
  c.result.order = backwards ? "falling" : "rising";
}

int plans = 0;  // decisions taken

Lane<Add> lane(const char* name, bool backwards) {
  Lane<Add> made{.name = name, .kind = "reference"};
  made.decline = [](const Problem& p, const DeviceFacts&) -> std::optional<std::string> {
    if (p.n > 4) return fmt::format("n = {}: at most 4", p.n);
    return std::nullopt;
  };
  made.plan = backwards ? [](const Problem&, const DeviceFacts&) {
    ++plans;
    return planned(64, 1.0, Config{true});
  } : [](const Problem&, const DeviceFacts&) {
    ++plans;
    return planned(64, 1.0, Config{false});
  };
  made.details = [](const Problem&, const Planned& plan) {
    return std::vector<std::string>{fmt::format("backwards = {}", plan.as<Config>().backwards)};
  };
  made.run = add;
  return made;
}

std::span<const Lane<Add>> Add::lanes() {
  static const std::array<Lane<Add>, 4> table = [] {
    std::array<Lane<Add>, 4> t = {absent_lane<Add>("device", DeviceKind::cuda), lane("slow", true),
                                  lane("shown", false), lane("plain", false)};
    t[1].yields = [](const Problem&) -> std::optional<std::string> { return "plain is faster"; };
    t[2].reach = Reach::by_name;
    t[2].by_name_why = "only by name";
    return t;
  }();
  return table;
}

Problem describe(const Inputs& in, const Outputs& out, const Options& options) {
  const auto inputs = tensors_of(in, input_fields), outputs = tensors_of(out, output_fields);
  check_views(inputs);
  check_views(outputs);
  check_dtype("a", in.a, {DType::f32});
  const int64_t n = in.a.shape[0];
  check_shape("b", in.b, {n});
  check_shape("sum", out.sum, {n});
  check_devices({"a", &in.a}, inputs);
  check_overlap(inputs, outputs);
  return {.n = n, .options = options};
}

Result run(const Inputs& in, const Outputs& out, const Options& options, Workspace workspace) {
  const Problem p = describe(in, out, options);
  auto memory = tensors_of(in, input_fields);
  memory.push_back({"sum", &out.sum});
  return call<Add>(p, workspace, memory, [&](const Prepared<Add>& ready, Result& result) {
    ready.lane->run({in, out, p, result}, ready.plan);
  });
}

// ---- What the tests hold it to.
struct Sum : ::testing::Test {
  float a[3] = {1, 2, 3}, b[3] = {10, 20, 30}, sum[3] = {};
  alignas(64) char room[64] = {};
  Inputs in{make_tensor(a, DType::f32, {3}), make_tensor(b, DType::f32, {3})};
  Outputs out{make_tensor(sum, DType::f32, {3})};
  Options options;
  Workspace workspace{room, sizeof room};
};

TEST_F(Sum, AutoTakesTheFirstThatDoesNotYield) {
  plans = 0;
  const Result r = run(in, out, options, workspace);
  EXPECT_EQ(plans, 1) << "one decision a call";
  EXPECT_EQ(sum[2], 33);
  EXPECT_EQ(r.lane, "plain");
  ASSERT_EQ(r.declined.size(), 3u);
  EXPECT_EQ(r.declined[0].reason, "not built: this library was built without CUDA");
  EXPECT_EQ(r.declined[1].reason, "only by name");
  EXPECT_EQ(r.declined[2].lane, "slow");
  EXPECT_EQ(r.declined[2].reason, "plain is faster");
  EXPECT_EQ(r.order, "rising");
}

TEST_F(Sum, ANamedLaneRunsOrSaysWhyNot) {
  options.lane = "slow";
  EXPECT_EQ(run(in, out, options, workspace).order, "falling");
  options.lane = "shown";
  EXPECT_EQ(run(in, out, options, workspace).lane, "shown");
  options.lane = "device";
  testing::expect_error(ErrorKind::unavailable, {"device", "not built"},
                        [&] { run(in, out, options, workspace); });
  options.lane = "fastest";
  testing::expect_error(ErrorKind::usage,
                        {"lane = fastest: no such lane (device, slow, shown, plain)"},
                        [&] { run(in, out, options, workspace); });
}

TEST_F(Sum, MemoryIsCheckedBeforeAnyWork) {
  testing::expect_error(ErrorKind::usage,
                        {"workspace: 63 bytes given, 64 bytes needed by lane plain"}, [&] {
                          run(in, out, options, {room, 63});
                        });
  testing::expect_error(ErrorKind::invalid_data, {"workspace: its memory overlaps a"}, [&] {
    run(in, out, options, {a, 64});
  });
  out.sum.data = b + 1;
  out.sum.shape[0] = 2, in.a.shape[0] = 2, in.b.shape[0] = 2;
  testing::expect_error(ErrorKind::invalid_data, {"sum: its memory overlaps the input b"},
                        [&] { run(in, out, options, workspace); });
}

TEST_F(Sum, NothingOverlapsAnEmptyTensor) {
  in.a.shape[0] = in.b.shape[0] = out.sum.shape[0] = 0;
  in.a.data = room + 8;  // inside the workspace
  run(in, out, options, workspace);
  const Tensor full = make_tensor(b, DType::f32, {2}), empty = make_tensor(b + 1, DType::f32, {0});
  const NamedTensor whole[] = {{"b", &full}}, none[] = {{"none", &empty}};
  check_overlap(whole, none);
  check_overlap(none, whole);
}

TEST_F(Sum, ExplainSaysTheSameDecision) {
  const LaneChoice choice = explain<Add>(describe(in, out, options));
  EXPECT_EQ(choice.lane, "plain");
  EXPECT_EQ(choice.workspace_bytes, 64);
  EXPECT_EQ(choice.details.at(0), "backwards = false");
  EXPECT_EQ(lane_names<Add>(), (std::vector<std::string>{"device", "slow", "shown", "plain"}));
  const Problem large{.n = 5};
  EXPECT_EQ(explain<Add>(large).lane, "");
  EXPECT_EQ(explain<Add>(large).declined.back().reason, "n = 5: at most 4");
}

TEST_F(Sum, GoesThroughTheCDoor) {
  talea_tensor t{};
  t.dtype = TALEA_F32, t.rank = 1, t.shape[0] = 3, t.stride[0] = 1, t.present = 1;
  CInputs c_in{sizeof(CInputs), t, t};
  COutputs c_out{sizeof(COutputs), t};
  COptions c_options{};
  capi::write_defaults<Options>(&c_options, sizeof c_options, option_fields);
  EXPECT_EQ(c_options.factor, 1);
  EXPECT_EQ(c_options.lane, nullptr);
  c_in.a.data = a, c_in.b.data = b, c_out.sum.data = sum;
  c_options.factor = 2, c_options.lane = "slow";
  capi::MadeUpAddresses none(capi::Purpose::call);
  Inputs read_in;
  Outputs read_out;
  capi::read_tensors(c_in, read_in, input_fields, none);
  capi::read_tensors(c_out, read_out, output_fields, none);
  capi::read_options("options", &c_options, options, option_fields);
  struct Facts {
    Result result;
    CFacts c{};
  };
  auto facts = std::make_shared<Facts>();
  facts->result = run(read_in, read_out, options, workspace);
  capi::write_facts(facts->result, facts->c, fact_fields);
  EXPECT_EQ(sum[0], 22);
  const std::unique_ptr<talea_result> made(
      capi::make_result<Facts>("add", R"({"operator": "add"})", facts));
  const Facts* seen = capi::facts_of<Facts>(made.get(), "add");
  ASSERT_NE(seen, nullptr);
  EXPECT_STREQ(seen->c.lane, "slow");
  EXPECT_STREQ(seen->c.order, "falling");
  EXPECT_EQ(capi::facts_of<Facts>(made.get(), "subtract"), nullptr);
  c_options.struct_bytes -= 8;
  testing::expect_error(ErrorKind::usage, {"options: struct_bytes = "},
                        [&] { capi::read_options("options", &c_options, options, option_fields); });
}

TEST_F(Sum, HasASectionInAReceipt) {
  const Result r = run(in, out, options, workspace);
  Receipt receipt(ReceiptKind::loss, gather_provenance({"test"}, {}));
  receipt.call({{"operator", "add"},
                {"problem", {{"n", 3}}},
                {"options", {{"factor", options.factor}}},
                {"boundary", {{"lane", r.lane}, {"declined", declined_json(r.declined)}}},
                {"notes", nlohmann::json::array()}});
  EXPECT_EQ(receipt.document()["calls"][0]["boundary"]["lane"], "plain");
  // A receipt is written only for operators that the schema knows.
  testing::expect_error(ErrorKind::runtime, {"receipt: "}, [&] { receipt.text(); });
}

}  // namespace
}  // namespace talea
