// What: forward of few heads, whose sequences go in stretches side by side, on the lanes that do so.
// Why: the state before a stretch is joined from those before it, which no shorter case shows.
// Never: takes a call for one of stretches that does not say so.
#include <cmath>

#include "ops/mamba3/cuts.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

using talea::mamba3::Schedule;

class ScanStretches : public ScanLane {
 protected:
  // Right, and of stretches.
  std::string judged(const Case& c) const {
    const Outcome one = run(lane(), c, how);
    if (one.forward.schedule != Schedule::parallel) return "chunks went in turn";
    return verify(lane(), c, how);
  }
  How how{.backward = false};
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ScanStretches);

// A stretch has 16 chunks, of one row a token eight: five whole ones, the last with one token.
int64_t tokens_of_five(int64_t R) { return 64 / R * (R > 1 ? 16 : 8) * 5 - 64 / R * 2 + 1; }

Case case_of(int64_t B, int64_t R, int64_t A, bool shared = false) {
  Sizes s{B, tokens_of_five(R), 2, 1, 128, 64, R, A};
  s.rank_axis = R > 1;
  s.shared_angles = shared;
  return full_case(s, DType::bf16, static_cast<uint64_t>(R + A));
}

void leave_states_out(Case& c) {
  std::erase_if(c.in, [](const auto& x) { return x.first.starts_with("initial_"); });
}

TEST_P(ScanStretches, StatesAreJoined) {
  for (const int64_t R : {1, 2, 4})
    for (const int64_t A : {0, 30, 64}) {
      Case c = case_of(A == 30 ? 2 : 1, R, A, A == 64);
      EXPECT_EQ(judged(c), "") << "R = " << R << ", A = " << A;
      leave_states_out(c);
      EXPECT_EQ(judged(c), "") << "from zeros, R = " << R << ", A = " << A;
    }
}

// As many side by side as a limit has room for: one run or several, and the same bits.
TEST_P(ScanStretches, NoLimitChangesABit) {
  for (const int64_t R : {1, 4}) {
    Case c = case_of(2, R, 32);
    const Outcome first = run(lane(), c, how);
    EXPECT_EQ(same_bits(first.out, run(lane(), c, how).out), "") << "R = " << R;
    int64_t other = 0;  // plans
    for (int64_t limit = int64_t{64} << 20; limit > int64_t{1} << 18; limit = limit * 3 / 4) {
      c.options.workspace_limit_bytes = limit;
      try {
        const Outcome less = run(lane(), c, how);
        other += less.forward.workspace_bytes < first.forward.workspace_bytes;
        EXPECT_EQ(less.forward.schedule, Schedule::parallel) << limit;
        EXPECT_EQ(same_bits(first.out, less.out), "") << "R = " << R << ", " << limit;
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("cannot be kept"), std::string::npos) << e.what();
        break;
      }
    }
    EXPECT_GT(other, 1) << "R = " << R;
  }
}

// What one stretch weighs the state before it by is the product of what its chunks do: nothing
// behind a reset, and beyond every number where states grow.
TEST_P(ScanStretches, ResetsAndGrowth) {
  for (const int64_t R : {1, 4}) {
    Case c = case_of(1, R, 32);
    const int64_t S = c.size.S;
    for (const int64_t t : {S / 5 - 1, S / 2, S - 2}) c.in["adt"].set(t, -1e4);
    c.in["adt"].set(S + S / 3, 1.5);
    EXPECT_EQ(judged(c), "") << "R = " << R;
    // A head without keys has no state, however it would grow.
    Case none = case_of(1, R, 32);
    leave_states_out(none);
    for (int64_t i = 0; i < none.in["v"].elements(); ++i) none.in["v"].set(i, 0);
    for (int64_t t = 0; t < S; ++t) none.in["adt"].set(t, 1.0);
    const Outcome o = run(lane(), none, how);
    for (const double x : o.out.at("final_ssm").values()) ASSERT_EQ(x, 0) << "R = " << R;
    // One that has one grows beyond all numbers, in turn as side by side.
    Case grown = case_of(1, R, 32);
    for (int64_t t = 0; t < S; ++t) grown.in["adt"].set(t, 1.0);
    const auto lost = [&](Schedule schedule) {
      grown.options.schedule = schedule;
      int64_t count = 0;
      for (const double x : run(lane(), grown, how).out.at("final_ssm").values())
        count += !std::isfinite(x);
      return count;
    };
    EXPECT_EQ(lost(Schedule::parallel), 128 * 64) << "R = " << R;
    EXPECT_EQ(lost(Schedule::sequential), 128 * 64) << "R = " << R;
  }
}

TEST_P(ScanStretches, ChunksGoInTurnWhereAskedOrSaved) {
  Case c = case_of(1, 4, 32);
  EXPECT_EQ(run(lane(), c, {.backward = false, .save = true}).forward.schedule,
            Schedule::sequential);
  c.options.schedule = Schedule::sequential;
  EXPECT_EQ(run(lane(), c, how).forward.schedule, Schedule::sequential);
  EXPECT_EQ(verify(lane(), c, how), "");
  Case many = case_of(35, 4, 32);
  EXPECT_EQ(run(lane(), many, how).forward.schedule, Schedule::sequential);
  many.options.schedule = Schedule::parallel;
  EXPECT_EQ(run(lane(), many, how).forward.schedule, Schedule::parallel);
}

// Without an output the states behind a run are what its stretches add, however many heads there
// are, and of a sequence shorter than one.
TEST_P(ScanStretches, StatesAlone) {
  how.only = {"final_angle", "final_ssm", "final_k", "final_v"};
  for (const int64_t R : {1, 2, 4}) {
    Case c = case_of(2, R, 32);
    EXPECT_EQ(judged(c), "") << "R = " << R;
    const Outcome first = run(lane(), c, how);
    Case less = c;
    less.options.workspace_limit_bytes = first.forward.workspace_bytes - 1;
    EXPECT_EQ(same_bits(first.out, run(lane(), less, how).out), "") << "R = " << R;
    c.options.schedule = Schedule::sequential;
    EXPECT_EQ(verify(lane(), c, how), "") << "in turn, R = " << R;
    leave_states_out(c);
    c.options.schedule = Schedule::automatic;
    EXPECT_EQ(judged(c), "") << "from zeros, R = " << R;
  }
  for (const int64_t S : {1, 33, 100}) {
    Sizes s{2, S, 2, 1, 128, 64, 4, 32};
    s.rank_axis = true;
    const Case few = full_case(s, DType::bf16, static_cast<uint64_t>(S));
    EXPECT_EQ(judged(few), "") << "S = " << S;
  }
  const Case many = case_of(67, 4, 32);
  const Outcome all = run(lane(), many, how);
  EXPECT_EQ(all.forward.schedule, Schedule::parallel);
  Case last = many;
  last.size.B = 1, last.rows = {};
  for (auto& [name, x] : last.in)
    if (name.starts_with("initial_") || token_axis(name) > 0) x = part(x, 0, 66, 67);
  const Outcome one = run(lane(), last, how);
  for (const auto& [name, x] : all.out)
    EXPECT_EQ(one.out.at(name).values(), part(x, 0, 66, 67).values()) << name;
}

TALEA_SCAN_LANES(ScanStretches, lanes_of_sizes());

}  // namespace
}  // namespace talea::yardsticks::mamba3
