// What: cases of the sizes that models are trained at, on the lanes that take those alone.
// Why: every pair of options that such a lane has is held against fp64, and its bits repeated.
// Never: counts a case that the lane declined: a named lane that declines is an error.
#include <map>

#include "ops/mamba3/cuts.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

class ScanTraining : public ScanLane {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ScanTraining);

// What training asks for: out and every gradient, no states.
How of_training(const Case& c) {
  How how;
  how.only = {"out"};
  for (const std::string& name : backward_outputs(c)) how.only.insert(name);
  return how;
}

TEST_P(ScanTraining, EveryPairOfChoicesIsRight) {
  const std::vector<Case> cases = training_cases(11);
  EXPECT_GT(cases.size(), 30u);
  int number = 0;
  for (const Case& c : cases) {
    How how = of_training(c);
    how.save = number % 2 == 1;
    EXPECT_EQ(verify(lane(), c, how), "") << "case " << number;
    ++number;
  }
}

void leave_states_out(Case& c) {
  std::erase_if(c.in, [](const auto& x) {
    return x.first.starts_with("initial_") || x.first.starts_with("d_final_");
  });
}

// A quarter of the cases of the sizes beside them. Of those of a single chunk, so few rows that
// draws are judged together, lane cuda has N 256.
void check_wider(const std::string& lane, int quarter) {
  int number = 0;
  for (const Case& c : wider_cases(17)) {
    if (number++ % 4 != quarter) continue;
    How how = of_training(c);
    how.save = number % 8 > 4;
    const bool single = c.size.B * c.size.S * c.size.R <= 64, other = single && c.size.N == 256;
    EXPECT_EQ(verify_draws(other ? "cuda" : lane, c, single ? 16 : 1, how), "")
        << "case " << number - 1;
  }
}
TEST_P(ScanTraining, PairsOfChoicesBesideThemFirst) { check_wider(lane(), 0); }
TEST_P(ScanTraining, PairsOfChoicesBesideThemSecond) { check_wider(lane(), 1); }
TEST_P(ScanTraining, PairsOfChoicesBesideThemThird) { check_wider(lane(), 2); }
TEST_P(ScanTraining, PairsOfChoicesBesideThemFourth) { check_wider(lane(), 3); }

// Of each rank, and of each size beside those, the case of the fewest rows that still has more than
// one chunk: what a sanitizer can afford, whose kernels are a hundred times slower.
TEST_P(ScanTraining, TheSmallestOfEachRank) {
  const auto kind = [](const Sizes& s) {
    return s.R == 8     ? std::string("R 8")
           : s.N != 128 ? "N " + std::to_string(s.N)
           : s.P == 128 ? std::string("P 128")
                        : "R " + std::to_string(s.R);
  };
  std::map<std::string, std::pair<int64_t, Case>> smallest;
  std::vector<Case> cases = training_cases(13);
  for (const Case& c : wider_cases(13)) cases.push_back(c);
  for (const Case& c : cases) {
    const int64_t rows = c.size.B * c.size.S * c.size.R * c.size.H;
    if (c.size.S * c.size.R <= 64) continue;
    const auto [at, first] = smallest.try_emplace(kind(c.size), rows, c);
    if (!first && rows < at->second.first) at->second = {rows, c};
  }
  EXPECT_EQ(smallest.size(), 7u);
  for (const auto& [what, found] : smallest)
    EXPECT_EQ(verify(lane(), found.second, of_training(found.second)), "") << what;
}

TEST_P(ScanTraining, TheSameBitsEveryTimeAndUnderAnyLimit) {
  Case whole;
  for (const Case& c : training_cases(12))
    if (c.has("cu_seqlens") && c.has("angles") && c.size.S > 100) whole = c;
  ASSERT_GT(whole.size.S, 100);
  const How how = of_training(whole);
  const Outcome first = run(lane(), whole, how);
  EXPECT_EQ(same_bits(first.out, run(lane(), whole, how).out), "");
  whole.options.workspace_limit_bytes = int64_t{1} << 40;
  EXPECT_EQ(same_bits(first.out, run(lane(), whole, how).out), "");
}

// A head of two slabs, or of two parts, which forward has in two blocks of a cluster: what they
// share is summed in one order, whatever goes side by side.
TEST_P(ScanTraining, TheSameBitsOfWiderHeads) {
  for (const auto& [N, P, R] : {std::tuple<int64_t, int64_t, int64_t>{128, 128, 4},
                                {256, 64, 4},
                                {256, 64, 1},
                                {256, 128, 8}})
    for (const bool shared : {false, true}) {
      Sizes s{2, 300, 6, 2, N, P, R, N == 128 ? 32 : 100};
      s.rank_axis = true;
      s.shared_angles = shared;
      Case c = full_case(s, DType::bf16, 21);
      leave_states_out(c);
      const How how = of_training(c);
      EXPECT_EQ(verify(lane(), c, how), "")
          << "N = " << N << ", R = " << R << ", shared " << shared;
      const Outcome first = run(lane(), c, how);
      EXPECT_EQ(same_bits(first.out, run(lane(), c, how).out), "") << "N = " << N << ", R = " << R;
      c.options.workspace_limit_bytes = int64_t{16} << 20;
      EXPECT_EQ(same_bits(first.out, run(lane(), c, how).out), "") << "N = " << N << ", R = " << R;
    }
}

// A decay above 1, at a token of every head.
TEST_P(ScanTraining, GrowthIsNotClamped) {
  for (const int64_t R : {1, 4}) {
    Sizes s{1, 130, 4, 2, 128, 64, R, 32};
    s.rank_axis = R > 1;
    Case c = full_case(s, DType::bf16, 31);
    leave_states_out(c);
    for (int64_t h = 0; h < 4; ++h) c.in["adt"].set(h * 130 + 5, 1.5);
    EXPECT_EQ(verify(lane(), c, of_training(c)), "") << "rank " << R;
  }
}

TEST_P(ScanTraining, WhatIsNotTakenIsDeclinedByName) {
  of_errors();
  Sizes s;
  s.B = 1, s.S = 70, s.H = 2, s.N = 128, s.P = 64, s.A = 32;
  Case c = full_case(s, DType::bf16, 3);
  c.options.head_norm = true;
  try {
    run(lane(), c);
    FAIL() << "a norm was taken";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("head_norm"), std::string::npos) << e.what();
  }
}

// Of dense sequences and of a pack with empty ones; whole, and with one state alone.
TEST_P(ScanTraining, StatesOfAPrefill) {
  const char* const states[] = {"angle", "ssm", "k", "v"};
  for (const int64_t R : {1, 2, 4})
    for (const int64_t A : {0, 30, 64}) {
      Sizes s{2, 130, 4, 2, 128, 64, R, A};
      s.rank_axis = R > 1;
      const Case dense = full_case(s, DType::bf16, static_cast<uint64_t>(R + A));
      EXPECT_EQ(verify(lane(), dense, {.backward = false}), "") << "R = " << R << ", A = " << A;
      s.B = 1;
      Case packed = full_case(s, DType::bf16, static_cast<uint64_t>(R + A));
      pack(packed, {3, 3, 4, 20, 84, 84, 129});
      for (const char* st : states) fill(packed, std::string("initial_") + st, DType::f32, 5);
      EXPECT_EQ(verify(lane(), packed, {.backward = false}), "") << "packed, R = " << R;
      if (A < 64) continue;
      for (const char* kept : states) {
        Case one = dense;
        for (const char* st : states)
          if (st != kept) one.in.erase(std::string("initial_") + st);
        EXPECT_EQ(verify(lane(), one, {.backward = false}), "") << kept << " alone";
      }
    }
  for (const int64_t N : {64, 128, 256})
    for (const int64_t R : {1, 8}) {
      Sizes s{2, 130, 4, 2, N, 128, R, 32};
      s.rank_axis = R > 1;
      const Case dense = full_case(s, DType::bf16, static_cast<uint64_t>(R + N));
      EXPECT_EQ(verify(lane(), dense, {.backward = false}), "") << "N = " << N << ", R = " << R;
      s.B = 1;
      Case packed = full_case(s, DType::bf16, static_cast<uint64_t>(R + N));
      pack(packed, {3, 3, 4, 20, 84, 84, 129});
      for (const char* st : states) fill(packed, std::string("initial_") + st, DType::f32, 5);
      EXPECT_EQ(verify(lane(), packed, {.backward = false}), "") << "packed, R = " << R;
    }
  Case constant = full_case({1, 70, 4, 2, 128, 64, 1, 32}, DType::bf16, 3);
  constant.in.erase("angles");
  EXPECT_EQ(verify(lane(), constant, {.backward = false}), "") << "a constant turn";
}

// More blocks than a round has, so that a block takes several heads, one after another: each with
// angles of its own, and all with the same.
TEST_P(ScanTraining, HeadsOfABlockInTurn) {
  for (const int64_t R : {1, 4, 8})
    for (const bool shared : {false, true}) {
      Sizes s{8, R == 1 ? 130 : 34, 40, 1, 128, 64, R, 32};
      s.rank_axis = R > 1;
      s.shared_angles = shared;
      Case c = full_case(s, DType::bf16, 3);
      leave_states_out(c);
      const How how = of_training(c);
      EXPECT_EQ(verify(lane(), c, how), "") << "R = " << R << ", shared " << shared;
      const Outcome first = run(lane(), c, how);
      for (int again = 0; again < 3; ++again)
        EXPECT_EQ(same_bits(first.out, run(lane(), c, how).out), "") << "R = " << R;
    }
}

// Parts of a group that have not as many heads each, beside another group; of one row a token
// without projections, whose gate is formed elsewhere.
TEST_P(ScanTraining, GroupsInUnevenParts) {
  for (const int64_t R : {1, 4, 8}) {
    Sizes s{1, R == 1 ? 130 : 34, 50, 2, 128, 64, R, 32};
    s.rank_axis = R > 1;
    Case c = full_case(s, DType::bf16, 9);
    leave_states_out(c);
    if (R == 1) std::erase_if(c.in, [](const auto& x) { return x.first.starts_with("mimo_"); });
    EXPECT_EQ(verify(lane(), c, of_training(c)), "") << "R = " << R;
  }
}

// Heads of two slabs, of which a block has several in parts that are uneven: with angles of their
// own and with the same, of all pairs and of some, dense and packed, from states that are saved;
// rows of d_out by rank, and wider ones; of one row a token without projections, too.
TEST_P(ScanTraining, SlabsOfABlockInTurn) {
  using talea::mamba3::RotaryPairs;
  for (const int64_t R : {1, 2, 4, 8})
    for (const int kind : {0, 1, 2}) {
      const int64_t C = 64 / R;
      Sizes s{kind == 2 ? 2 : 1, 3 * C - 5, 22, 2, 128, 128, R, kind == 1 ? 30 : 32};
      s.rank_axis = R > 1;
      s.shared_angles = kind == 1;
      Case c = full_case(s, DType::bf16, static_cast<uint64_t>(50 + kind));
      leave_states_out(c);
      c.options.rotary_pairs = kind == 0 ? RotaryPairs::interleaved : RotaryPairs::halves;
      if (kind == 1 && R == 1)
        std::erase_if(c.in, [](const auto& x) { return x.first.starts_with("mimo_"); });
      if (kind == 1) {
        if (R > 1) c.in.erase("mimo_out");
        fill(c, "d_out", DType::bf16, 7);
        pack(c, {1, C, C, 2 * C + 2, 3 * C - 6});
      }
      if (kind == 2) fill(c, "d_out", DType::f32, 7);
      How how = of_training(c);
      how.save = kind > 0;
      EXPECT_EQ(verify(lane(), c, how), "") << "R = " << R << ", kind " << kind;
      const Outcome first = run(lane(), c, how);
      EXPECT_EQ(same_bits(first.out, run(lane(), c, how).out), "") << "R = " << R;
    }
}

// Sequences that begin within a round of forward, and end within a chunk whose other rows are the
// next one's; of one row a token without a gate, which would hide those.
TEST_P(ScanTraining, APackOfSeveralRounds) {
  for (const int64_t R : {1, 4}) {
    const int64_t C = 64 / R;
    Sizes s{1, 30 * C, 8, 2, 128, 64, R, 32};
    s.rank_axis = R > 1;
    Case c = full_case(s, DType::bf16, 13);
    leave_states_out(c);
    if (R == 1) std::erase_if(c.in, [](const auto& x) { return x.first.ends_with("z"); });
    pack(c, {2, 5 * C, 12 * C + 5, 12 * C + 5, 14 * C, 27 * C + 1, 30 * C - 3});
    EXPECT_EQ(verify(lane(), c, of_training(c)), "") << "R = " << R;
    const How forward{.backward = false, .only = {"out"}};
    const Outcome whole = run(lane(), c, forward);
    c.options.workspace_limit_bytes = whole.forward.workspace_bytes / 2;
    const Outcome less = run(lane(), c, forward);
    EXPECT_LT(less.forward.workspace_bytes, whole.forward.workspace_bytes) << "R = " << R;
    EXPECT_EQ(same_bits(whole.out, less.out), "") << "R = " << R;
  }
}

// Tokens are formed beside the chunks of the run before, of the segment before, and of the one
// behind: of more of them than go at a time, under limits that leave few. Angles that heads share
// are summed beside the chain of the slice that comes next.
TEST_P(ScanTraining, TokensBesideOtherChunks) {
  using talea::mamba3::Schedule;
  for (const int64_t R : {1, 4})
    for (const Schedule schedule : {Schedule::sequential, Schedule::automatic}) {
      Sizes s{2, 64 / R * 38 - 5, 2, 1, 128, 64, R, 32};
      s.rank_axis = R > 1;
      s.shared_angles = schedule == Schedule::automatic;
      Case c = full_case(s, DType::bf16, 29);
      leave_states_out(c);
      c.options.schedule = schedule;
      const How how = of_training(c);
      if (schedule == Schedule::sequential) {
        EXPECT_EQ(verify(lane(), c, how), "") << "R = " << R;
      }
      const Outcome whole = run(lane(), c, how);
      for (const int64_t limit : {4096, 3072, 2048, 1536, 1280}) {
        c.options.workspace_limit_bytes = limit << 10;
        const Outcome less = run(lane(), c, how);
        EXPECT_LT(less.backward.workspace_bytes, whole.backward.workspace_bytes);
        EXPECT_EQ(same_bits(whole.out, less.out), "") << "R = " << R << ", " << limit << " KiB";
        EXPECT_EQ(same_bits(less.out, run(lane(), c, how).out), "") << "again, " << limit;
      }
    }
}

// So many heads that those of one row a token form their turns themselves.
TEST_P(ScanTraining, StatesOfAPrefillOfManyHeads) {
  const char* const states[] = {"angle", "ssm", "k", "v"};
  for (const int64_t A : {0, 30, 64}) {
    Sizes s{2, 130, 34, 2, 128, A == 30 ? 128 : 64, 1, A};
    s.rank_axis = false;
    const Case dense = full_case(s, DType::bf16, static_cast<uint64_t>(A));
    EXPECT_EQ(verify(lane(), dense, {.backward = false}), "") << "A = " << A;
    s.B = 1;
    Case packed = full_case(s, DType::bf16, static_cast<uint64_t>(A));
    pack(packed, {3, 3, 4, 20, 84, 84, 129});
    for (const char* st : states) fill(packed, std::string("initial_") + st, DType::f32, 5);
    EXPECT_EQ(verify(lane(), packed, {.backward = false}), "") << "packed, A = " << A;
  }
}

TALEA_SCAN_LANES(ScanTraining, lanes_of_sizes());

}  // namespace
}  // namespace talea::yardsticks::mamba3
