// What: bitwise repeats: run to run, threads, workspace limit, subsets of outputs, second backward.
// Why: section 5 of the contract; an unordered sum shows itself only in the last bits.
// Never: accepts "close": every comparison here is of bits.
#include "support/lane_test.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::testing {
namespace {

class Repeat : public LaneTest {};
TALEA_EVERY_LANE(Repeat);

// Big enough for several chunks and uneven shares of a thread.
std::vector<Spec> problems(const std::string& lane) {
  std::vector<Spec> all;
  for (const Types types : {Types::f32, Types::bf16, Types::f16}) {
    if (needs_16bit_rows(lane) && types == Types::f32) continue;  // 16-bit products
    Spec s{.seed = 41, .tokens = 83, .hidden = 37, .vocab = 1009, .types = types};
    s.ignored_percent = 20;
    s.bias = true;
    s.top_k = 3;
    all.push_back(s);
    s.reduction = Reduction::none;
    s.upstream = Upstream::strided;
    s.upstream_entropy = s.token_weight = s.class_weight = true;
    s.label_smoothing = 0.1;
    s.z_loss = 1e-3;
    s.softcap = 20;
    s.accumulate = true;
    all.push_back(s);
  }
  return all;
}

TEST_P(Repeat, RunToRun) {
  for (const Spec& s : problems(lane())) {
    const Case c = make_case(s);
    expect_right(c);
    const Outcome first = run(c);
    for (int i = 0; i < 10; ++i) ASSERT_EQ(same_bits(first.out, run(c).out), "") << "run " << i;
  }
}

TEST_P(Repeat, AnyNumberOfThreads) {
  if (is_device_lane(lane())) GTEST_SKIP() << "unavailable: `threads` is for host lanes";
  std::vector<Spec> all = problems(lane());
  // Many rows of one chunk: a sum over rows whose order follows the threads shows itself.
  all.push_back({.seed = 47, .tokens = 4001, .hidden = 3, .vocab = 7});
  for (const Spec& s : all) {
    Case c = make_case(s);
    c.options.threads = 1;
    const Outcome one = run(c);
    for (const int threads : {2, 3, 5}) {
      c.options.threads = threads;
      ASSERT_EQ(same_bits(one.out, run(c).out), "") << threads << " threads";
    }
  }
}

TEST_P(Repeat, LossAndDxDoNotDependOnTheWorkspaceLimit) {
  for (const Spec& s : problems(lane())) {
    Case c = make_case(s);
    c.options.workspace_limit_bytes = int64_t{1} << 30;
    const Yardsticks y = yardsticks(c);
    Outcome whole = run(c);
    bool in_parts = false;  // chunks of rows, or a window of the vocabulary
    for (const int64_t limit : {int64_t{0}, int64_t{1} << 16, int64_t{1} << 18, int64_t{1} << 20}) {
      c.options.workspace_limit_bytes = limit;
      Outcome o = run(c);
      in_parts = in_parts || o.result.chunks > 1 ||
                 o.result.logits_home.find("window") != std::string::npos;
      EXPECT_EQ(judged(c, o, y), "") << "limit " << limit;
      o.out.dw = whole.out.dw;  // dW's rounding may depend on the chunks; it was judged above
      o.out.db = whole.out.db;
      EXPECT_EQ(same_bits(whole.out, o.out), "") << "limit " << limit;
    }
    if (lane() == host_lane()) {
      EXPECT_TRUE(in_parts) << "the limits made no parts: nothing was tested";
    }
  }
}

TEST_P(Repeat, SecondBackwardIsACallOfItsOwn) {
  for (Spec s : problems(lane())) {
    s.accumulate = false;
    s.reduction = Reduction::mean;
    s.upstream = Upstream::contiguous;
    Case c = make_case(s), again = c;
    again.in.upstream.set(0, 0, 3);
    const Outcome fresh = run(again);
    run(c);
    EXPECT_EQ(same_bits(fresh.out, run(again).out), "") << "a call remembers the one before";
    EXPECT_EQ(verify(lane(), again), "");
  }
}

TEST_P(Repeat, EachGradientAloneIsTheSame) {
  for (Spec s : problems(lane())) {
    s.wide_gradients = true;
    const Case c = make_case(s);
    const Outcome all = run(c);
    for (Array CaseOutputs::*m :
         {&CaseOutputs::dx, &CaseOutputs::dw, &CaseOutputs::db, &CaseOutputs::loss}) {
      Case alone = c;
      alone.out = {};
      alone.out.*m = c.out.*m;
      CaseOutputs want;
      want.*m = all.out.*m;
      EXPECT_EQ(same_bits(want, run(alone).out), "");
    }
  }
}

TEST_P(Repeat, MainGradientAdds) {
  for (const Spec& s : problems(lane())) {
    if (!s.accumulate) continue;
    Case c = make_case(s);
    expect_right(c);
    Case next = c;  // the second micro-batch adds to what the first left
    next.out.dw = run(c).out.dw;
    next.out.db = run(c).out.db;
    expect_right(next);
  }
}

}  // namespace
}  // namespace talea::testing
