// What: arguments that no scan can take: each is an error that names tensor and value.
// Why: an error before any work is cheaper than a wrong gradient.
// Never: runs a lane.
#include <functional>

#include "ops/mamba3/cuts.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

struct Refusal {
  const char* words;
  ErrorKind kind;
  std::function<void(Case&)> bend;
};

HostTensor sized(DType dtype, std::vector<int64_t> shape) {
  return HostTensor(dtype, std::move(shape));
}

TEST(ScanRefusals, EachSaysWhatIsWrong) {
  constexpr auto data = ErrorKind::invalid_data, usage = ErrorKind::usage;
  const std::vector<Refusal> all = {
      {"adt: dtype bf16", data, [](Case& c) { fill(c, "adt", DType::bf16, 1); }},
      {"dt: dtype fp16", data, [](Case& c) { fill(c, "dt", DType::f16, 1); }},
      {"k: dtype bf16", data, [](Case& c) { fill(c, "k", DType::bf16, 1); }},
      {"v: dtype bf16", data, [](Case& c) { fill(c, "v", DType::bf16, 1); }},
      {"trap: dtype fp64", data, [](Case& c) { fill(c, "trap", DType::f64, 1); }},
      {"q_bias: dtype bf16", data, [](Case& c) { fill(c, "q_bias", DType::bf16, 1); }},
      {"G = 3 groups do not divide H = 4", data,
       [](Case& c) {
         c.in["q"] = sized(DType::f32, {1, 6, 2, 3, 16});
         c.in["k"] = c.in["q"];
       }},
      {"A = 9 pairs", data,
       [](Case& c) {
         c.in["angles"] = sized(DType::f32, {1, 6, 4, 9});
       }},
      {"mimo_z: needs z", usage, [](Case& c) { c.in.erase("z"); }},
      {"norm_weight: needs head_norm", usage,
       [](Case& c) { fill(c, "norm_weight", DType::f32, 1); }},
      {"v: shape [1, 5, 4, 8]", data,
       [](Case& c) {
         c.in["v"] = sized(DType::f32, {1, 5, 4, 8});
       }},
      {"initial_ssm: shape", data,
       [](Case& c) {
         c.in["initial_ssm"] = sized(DType::f32, {1, 4, 16, 8});
       }},
      {"initial_ssm: dtype bf16", data, [](Case& c) { fill(c, "initial_ssm", DType::bf16, 1); }},
      {"norm_eps = 0", usage, [](Case& c) { c.options.norm_eps = 0; }},
      {"norm_eps = 1e-60", usage, [](Case& c) { c.options.norm_eps = 1e-60; }},
      {"norm_eps = 1e+60", usage, [](Case& c) { c.options.norm_eps = 1e60; }},
      {"chunk = -1", usage, [](Case& c) { c.options.chunk = -1; }},
      {"lane = fast: no such lane", usage, [](Case& c) { c.options.lane = "fast"; }}};
  for (const Refusal& r : all) {
    Case c = usual(6);
    r.bend(c);
    const auto inputs = inputs_of(c.in, false);
    talea::mamba3::Outputs out;
    try {
      workspace_bytes(describe(talea::mamba3::Pass::forward, inputs, out, c.options));
      ADD_FAILURE() << "no error: " << r.words;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), r.kind) << e.what();
      EXPECT_NE(std::string(e.what()).find(r.words), std::string::npos) << e.what();
    }
  }
}

TEST(ScanRefusals, ADtypeThatIsNone) {
  const Case c = usual(6);
  auto inputs = inputs_of(c.in, false);
  inputs.q.dtype = static_cast<DType>(99);
  try {
    describe(talea::mamba3::Pass::forward, inputs, {}, c.options);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_STREQ(e.what(), "q: dtype = 99: no such dtype");
  }
}

TEST(ScanRefusals, MemoryThatCannotBe) {
  const Case c = usual(6);
  auto inputs = inputs_of(c.in, false);
  HostTensor out(DType::f32, shape_of(c, "out"));
  talea::mamba3::Outputs o;
  o.out = inputs.v;
  EXPECT_THROW(describe(talea::mamba3::Pass::forward, inputs, o, c.options), Error) << "overlap";
  o.out = out.view();
  o.out.stride[3] = 0;
  EXPECT_THROW(describe(talea::mamba3::Pass::forward, inputs, o, c.options), Error) << "stride 0";
  o.out = out.view();
  const auto p = describe(talea::mamba3::Pass::forward, inputs, o, c.options);
  std::vector<std::byte> room(static_cast<size_t>(workspace_bytes(p)));
  const Workspace small = {room.data(), workspace_bytes(p) - 1};
  EXPECT_THROW(forward(inputs, o, c.options, small), Error);
  EXPECT_NO_THROW(forward(inputs, o, c.options, {room.data(), workspace_bytes(p)}));
}

TEST(ScanRefusals, GroupsThatNoHeadCouldRead) {
  const Case c = usual(6);
  talea::mamba3::Ranks ranks;
  const auto refused = [&](int64_t begin, int64_t heads, int64_t groups, const char* words) {
    ranks.head_begin = begin, ranks.total_heads = heads, ranks.total_groups = groups;
    try {
      describe(talea::mamba3::Pass::forward, inputs_of(c.in, false), {}, c.options, ranks);
      ADD_FAILURE() << "no error: " << words;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
  };
  refused(0, 4, 1, "q: G = 2 groups from group 0 on; total_groups = 1");
  refused(12, 16, 4, "q: G = 2 groups from group 3 on; total_groups = 4");
  ranks.shared_angles = true;
  refused(0, 4, 2, "angles: shape [1, 6, 4, 6]; shared_angles says");
}

class ScanManners : public ScanLane {};

TEST_P(ScanManners, StatesOfAStepGoByTheirNames) {
  of_errors();
  for (const std::string state : {"angle", "ssm", "k", "v"}) {
    Case c = usual(1);
    fill(c, "initial_" + state, DType::f64, 1);
    try {
      run_step(lane(), c, {});
      ADD_FAILURE() << "no error: " << state;
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).find("state_" + state + ": dtype fp64"), 0u) << e.what();
    }
  }
}

TEST_P(ScanManners, StatesComeFromSavedWhereTheyWereKept) {
  const Case c = usual(11);
  const Outcome o = run(lane(), c, {.save = true});
  EXPECT_EQ(o.backward.states_from_saved, lane() != "reference" && lane() != "unfused");
}

// The least limit that forward and backward can keep, as their errors name it.
int64_t least_limit(const std::string& lane, Case c) {
  for (c.options.workspace_limit_bytes = 0;;) {
    try {
      run(lane, c);
      return c.options.workspace_limit_bytes;
    } catch (const Error& e) {
      const std::string text = e.what(), before = "needs at least ";
      const size_t at = text.find(before);
      if (at == std::string::npos) throw;
      c.options.workspace_limit_bytes = std::stoll(text.substr(at + before.size()));
    }
  }
}

TEST_P(ScanManners, ThreadsLimitsAndRepeatsChangeNoBit) {
  Sizes s{1, 40, 4, 1, 16, 8, 2, 6};  // four heads a group: a sum that could have another order
  s.rank_axis = true;
  Case c = full_case(s, DType::f32, 5);
  chunk(c, 4);
  c.options.threads = 1;
  const Outcome first = run(lane(), c);
  for (const int threads : {1, 2, 3, 4}) {
    Case other = c;
    other.options.threads = threads;
    const int64_t least = least_limit(lane(), other);
    for (const int64_t limit : {least, 2 * least, int64_t{1} << 30}) {
      other.options.workspace_limit_bytes = limit;
      How how;
      how.save = threads == 2;
      const Outcome o = run(lane(), other, how);
      EXPECT_EQ(same_bits(first.out, o.out), "") << threads;
      EXPECT_LE(o.forward.workspace_bytes, limit);
      EXPECT_LE(o.backward.workspace_bytes, limit);
    }
    other.options.workspace_limit_bytes = least - 1;
    EXPECT_THROW(run(lane(), other), Error) << "a limit is kept or is an error";
  }
}

TEST_P(ScanManners, OneGradientAlone) {
  Case c = usual(11);
  chunk(c, 4);
  const Outcome all = run(lane(), c);
  for (const std::string& name : backward_outputs(c)) {
    const Outcome one = run(lane(), c, {.forward = false, .only = {name}});
    EXPECT_EQ(same_bits(one.out, all.out), "") << name;
    EXPECT_EQ(one.out.size(), 1u);
  }
}

TEST_P(ScanManners, ParametersAreAdded) {
  Case c = usual(8);
  const Outcome plain = run(lane(), c);
  c.accumulate = true;
  const Outcome added = run(lane(), c, {.forward = false});
  for (const char* name : {"d_q_bias", "d_k_bias", "d_d", "d_mimo_v", "d_mimo_z", "d_mimo_out"})
    for (int64_t i = 0; i < plain.out.at(name).elements(); ++i)
      EXPECT_NEAR(added.out.at(name).get(i), plain.out.at(name).get(i) + 1,
                  1e-6 * (1 + std::abs(plain.out.at(name).get(i))));
}

TEST_P(ScanManners, SavedIsOfOneProblem) {
  of_errors();
  if (lane() == "reference") GTEST_SKIP() << "saves nothing but its mark";
  if (counts_on_device(lane())) GTEST_SKIP() << "what a device saved is not read";
  Case c = usual(8);
  c.options.lane = lane();
  const auto inputs = inputs_of(c.in, false);
  talea::mamba3::Outputs out;
  const auto p = describe(talea::mamba3::Pass::forward, inputs, out, c.options);
  HostTensor other(DType::u8, {saved_bytes(p)}, {{}, 0, 16});
  Case back = c;
  back.in["saved"] = other;
  EXPECT_THROW(run(lane(), back, {.forward = false}), Error);
}

TALEA_EVERY_SCAN_LANE(ScanManners);

}  // namespace
}  // namespace talea::yardsticks::mamba3
