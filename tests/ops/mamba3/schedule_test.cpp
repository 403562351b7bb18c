// What: chunks in turn and side by side, levels of checkpoints, and the memory that either needs.
// Why: a schedule and a limit change time and memory, and no bit; the formula of the page is what
//      is asked for.
// Never: a tolerance: bits and bytes are compared.
#include <algorithm>
#include <cmath>

#include "ops/mamba3/cuts.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

using talea::mamba3::Schedule;

Outcome with(Case c, Schedule schedule, int threads, bool save = false) {
  c.options.schedule = schedule;
  c.options.threads = threads;
  How how;
  how.save = save;
  return run("cpu", c, how);
}

TEST(ScanSchedule, SideBySideIsInTurnBitForBit) {
  int number = 0, side_by_side = 0;
  for (const Case& c : pairwise_cases(12)) {
    const Outcome in_turn = with(c, Schedule::sequential, 1);
    const Outcome other = with(c, Schedule::parallel, 1 + number % 5, number % 2 == 1);
    EXPECT_EQ(same_bits(in_turn.out, other.out), "") << "case " << number << describe_case(c);
    EXPECT_EQ(other.damage, "") << "case " << number;
    EXPECT_EQ(in_turn.backward.schedule, Schedule::sequential);
    side_by_side += other.backward.schedule == Schedule::parallel;
    ++number;
  }
  EXPECT_EQ(side_by_side, number);
}

TEST(ScanSchedule, FewHeadsGoSideBySideByThemselves) {
  Case c = usual(40);
  c.options.chunk = 4;
  const Outcome few = with(c, Schedule::automatic, 4 * 4);  // as many heads, and more threads
  const Outcome many = with(c, Schedule::automatic, 2);
  EXPECT_EQ(few.forward.schedule, Schedule::parallel);
  EXPECT_EQ(few.backward.schedule, Schedule::parallel);
  EXPECT_EQ(many.backward.schedule, Schedule::sequential);
  EXPECT_EQ(same_bits(few.out, many.out), "");
}

TEST(ScanSchedule, InTurnAllTheSameIsNoted) {
  const auto noted = [](const char* lane, Schedule schedule) {
    Case c = usual(12);
    c.options.schedule = schedule;
    const std::vector<std::string> notes = run(lane, c, {}).forward.notes;
    return std::count_if(notes.begin(), notes.end(), [](const std::string& note) {
      return note.find("schedule = parallel: ") == 0;
    });
  };
  for (const char* lane : {"cpu", "unfused", "reference"}) {
    EXPECT_EQ(noted(lane, Schedule::parallel), lane == std::string("cpu") ? 0 : 1) << lane;
    EXPECT_EQ(noted(lane, Schedule::automatic), 0) << lane;
  }
}

TEST(ScanSchedule, NaNStaysWhereItBelongs) {
  Case c = usual(30);
  c.options.chunk = 4;
  for (const char* name : {"k", "dt", "angles", "adt"}) {
    Case bad = c;
    bad.in[name].set(bad.in[name].elements() / 2, NAN);
    EXPECT_EQ(
        same_bits(with(bad, Schedule::sequential, 1).out, with(bad, Schedule::parallel, 3).out), "")
        << name;
  }
}

TEST(ScanSchedule, ASmallLimitTakesMoreLevels) {
  Case c = usual(180);
  c.options.chunk = 1;
  const Outcome plain = with(c, Schedule::sequential, 1);
  EXPECT_EQ(plain.backward.segment_chunks, 32);
  Case tight = c;
  int64_t before = plain.backward.workspace_bytes;
  // As many segments as chunks in each: 14 of 13 or 14; then three levels of 6.
  for (const int64_t segment : {14, 36}) {
    tight.options.workspace_limit_bytes = before - 1;
    for (const bool save : {false, true}) {
      const Outcome less = with(tight, Schedule::sequential, 1, save);
      if (!save) {
        EXPECT_LT(less.backward.workspace_bytes, before);
      }
      EXPECT_EQ(less.backward.segment_chunks, segment);
      EXPECT_EQ(same_bits(plain.out, less.out), "");
      EXPECT_EQ(less.damage, "");
      if (!save) before = less.backward.workspace_bytes;
    }
  }
}

// A problem without memory behind it.
struct Sized {
  Sizes size;
  talea::mamba3::Options options{};
  bool saved = false;

  talea::mamba3::Problem problem(talea::mamba3::Pass pass) const {
    const Sizes& s = size;
    uintptr_t next = uintptr_t{1} << 40;
    const auto at = [&](DType dtype, std::initializer_list<int64_t> shape) {
      next += uintptr_t{1} << 40;
      return make_tensor(reinterpret_cast<void*>(next), dtype, shape);
    };
    const bool back = pass == talea::mamba3::Pass::backward;
    talea::mamba3::Inputs in;
    talea::mamba3::Outputs out;
    for (Tensor* t : {&in.q, &in.k}) *t = at(DType::f32, {s.B, s.S, s.R, s.G, s.N});
    in.v = at(DType::f32, {s.B, s.S, s.H, s.P});
    for (Tensor* t : {&in.adt, &in.dt, &in.trap}) *t = at(DType::f32, {s.B, s.H, s.S});
    in.angles = at(DType::f32, {s.B, s.S, 1, s.A});
    in.mimo_out = at(DType::f32, {s.H, s.R, s.P});
    if (back) {
      in.d_out = at(DType::f32, {s.B, s.S, s.H, s.P});
      out.d.q = at(DType::f32, {s.B, s.S, s.R, s.G, s.N});
      if (saved) in.saved = at(DType::u8, {saved_bytes(problem(talea::mamba3::Pass::forward))});
    } else {
      out.out = at(DType::f32, {s.B, s.S, s.H, s.P});
    }
    return describe(pass, in, out, options);
  }
  int64_t backward_bytes() const { return workspace_bytes(problem(talea::mamba3::Pass::backward)); }
  int64_t kept_bytes() const { return saved_bytes(problem(talea::mamba3::Pass::forward)); }
};

TEST(ScanSchedule, MemoryIsTheFormula) {
  Sized one{.size = {2, 0, 5, 1, 64, 32, 4, 16}};  // five heads: one sequence in flight
  one.options.threads = 1;
  one.options.chunk = 16;
  one.options.lane = "cpu";
  const Sizes& s = one.size;
  const int64_t state = 4 * s.P * s.N, turns = 12 * s.A;
  one.size.S = 16;
  const int64_t base = one.backward_bytes();  // of one chunk: J = 1, a checkpoint and two states
  for (const int64_t S : {16, 17, 64, 512, 513, 1000, 4096, 65536, 65537}) {
    one.size.S = S;
    one.saved = false;
    const int64_t c = (S + 15) / 16;
    // A short sequence is one segment.
    const auto root = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(c))));
    const int64_t J = std::max(root, std::min<int64_t>(c, 32));
    const int64_t checkpoints = (c + J - 1) / J;
    EXPECT_EQ(one.kept_bytes(), 64 + 4 * s.B * s.H * s.P * s.N * checkpoints) << S;
    const int64_t without = one.backward_bytes();
    // One sequence's heads are in flight; each row of turns is filled up to 256 bytes.
    const int64_t more = s.H * ((checkpoints - 1 + J - 1) * (state + turns) + 4 * 256);
    EXPECT_LE(without - base, more) << S;
    EXPECT_GE(without - base, s.H * (checkpoints - 1 + J - 1) * state) << S;
    one.saved = true;
    EXPECT_EQ(without - one.backward_bytes(), s.H * checkpoints * state) << S;
  }
}

TEST(ScanSchedule, LongSequencesKeepTheDefaultLimit) {
  Sized one{.size = {1, 65536, 64, 1, 128, 64, 4, 32}};
  one.options.threads = 16;
  for (const int64_t S : {4096, 65536, 1 << 20}) {
    one.size.S = S;
    EXPECT_LE(one.backward_bytes(), one.options.workspace_limit_bytes) << S;
  }
}

}  // namespace
}  // namespace talea::yardsticks::mamba3
