// What: what lane sm90 of the scan takes and how it cuts it, without a GPU.
// Why: a plan is a pure function; each thing that the kernels cannot do has a name.
// Never: needs a device.
#ifdef TALEA_WITH_CUDA
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "core/arena.hpp"
#include "ops/mamba3/rows/sums.hpp"
#include "ops/mamba3/sm90/config.hpp"
#include "yardsticks/mamba3/draw.hpp"

namespace talea::mamba3::sm90 {
namespace {

Tensor rows_of(std::initializer_list<int64_t> shape, DType dtype = DType::bf16) {
  return make_tensor(nullptr, dtype, shape, DeviceKind::cuda);
}

Problem problem(Pass pass, int64_t B, int64_t S, int64_t H, int64_t G, int64_t R) {
  Problem p;
  p.pass = pass;
  p.batch = p.sequences = B;
  p.tokens = S;
  p.heads = H;
  p.groups = G;
  p.heads_per_group = H / G;
  p.rank = R;
  p.state_dim = 128;
  p.head_dim = 64;
  p.pairs = 32;
  p.dtype = DType::bf16;
  p.device = DeviceKind::cuda;
  p.in.q = p.in.k = rows_of({B, S, R, G, 128});
  p.in.v = p.in.z = p.out.out = rows_of({B, S, H, 64});
  if (pass == Pass::backward) {
    p.out.d.q = p.out.d.k = p.in.q;
    p.out.d.v = p.out.d.z = p.in.v;
    p.sum_angles = true;
  }
  p.options.workspace_limit_bytes = int64_t{256} << 20;
  return p;
}

DeviceFacts h200() {
  DeviceFacts d;
  d.sm = 90;
  d.sm_count = 132;
  d.shared_bytes = 227 << 10;
  return d;
}

std::string reason(const Problem& p) { return declined(p, h200()).value_or(""); }

TEST(ScanSm90Config, TakesWhatModelsAreTrainedAt) {
  for (const int64_t R : {1, 2, 4, 8})
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      Problem p = problem(pass, 2, 4096, 112, 8, R);
      EXPECT_EQ(reason(p), "");
      p.state_dim = 64;
      EXPECT_EQ(reason(p), "");
      p.head_dim = 128;
      EXPECT_EQ(reason(p), "");
      p.state_dim = 256;
      EXPECT_EQ(reason(p), "");
    }
}

TEST(ScanSm90Config, NamesWhatItDoesNotTake) {
  const Problem good = problem(Pass::forward, 1, 100, 4, 1, 4);
  const auto with = [&](auto change) {
    Problem p = good;
    change(p);
    return reason(p);
  };
  EXPECT_EQ(with([](Problem& p) { p.dtype = DType::f16; }), "fp16 q: bf16 alone");
  EXPECT_EQ(with([](Problem& p) { p.state_dim = 96; }), "N = 96: 64, 128 and 256 alone");
  EXPECT_EQ(with([](Problem& p) { p.head_dim = 32; }), "P = 32: 64 and 128 alone");
  EXPECT_EQ(with([](Problem& p) { p.rank = 3; }), "R = 3: 1, 2, 4 and 8 alone");
  EXPECT_EQ(with([](Problem& p) { p.state_dim = 256, p.batch = 1, p.tokens = 16; }),
            "N = 256: more than 64 rows alone");
  EXPECT_EQ(with([](Problem& p) {
              p.head_dim = 128, p.pass = Pass::backward;
              p.in.d_final_states.k.present = true;
            }),
            "states in training: N = 128, P = 64 and R of 1, 2 and 4 alone");
  EXPECT_EQ(with([](Problem& p) { p.pairs = 3; }), "A = 3: even numbers alone");
  EXPECT_EQ(with([](Problem& p) { p.options.chunk = 8; }),
            "chunk = 8 tokens of rank 4: 64 rows alone");
  EXPECT_EQ(with([](Problem& p) { p.options.chunk = 16; }), "");
  EXPECT_EQ(with([](Problem& p) { p.options.head_norm = true; }), "head_norm");
  EXPECT_EQ(with([](Problem& p) { p.in.initial_states.ssm.present = true; }), "");
  EXPECT_EQ(with([](Problem& p) { p.out.final_states.k.present = true; }), "");
  EXPECT_EQ(with([](Problem& p) { p.out.final_states.k.present = p.out.saved.present = true; }),
            "");
  EXPECT_EQ(with([](Problem& p) {
              p.pass = Pass::backward;
              p.in.initial_states.ssm.present = p.in.d_final_states.k.present = true;
              p.out.d.initial_states.v.present = true;
            }),
            "");
  EXPECT_EQ(with([](Problem& p) { p.in.k.stride[1] += 4; }),
            "k: stride 516 of axis 1, must be a multiple of 8");
  EXPECT_EQ(with([](Problem& p) { p.in.v.stride[3] = 2; }), "v: last stride 2, must be 1");
  EXPECT_EQ(with([](Problem& p) { p.alignment_bytes = 8; }), "rows on 8 bytes, must be on 16");
  EXPECT_EQ(with([](Problem& p) { p.sequence_world = 2; }), "");
  EXPECT_EQ(with([](Problem& p) { p.sequence_world = 2, p.out.saved.present = true; }), "");
  EXPECT_EQ(with([](Problem& p) { p.sequence_world = 2, p.pass = Pass::backward; }), "");
  EXPECT_EQ(with([](Problem& p) { p.heads_world = 2, p.pass = Pass::backward; }), "");
}

// Of a group whose heads other ranks have, a part may have none: its line of d_angles is there.
TEST(ScanSm90Config, PartsWithoutHeadsHaveRoom) {
  Problem p = problem(Pass::backward, 1, 300, 3, 2, 1);
  p.heads_per_group = 40, p.head_offset = 39;
  const cuda::Plan plan = make_plan(p, h200());
  std::vector<char> room(static_cast<size_t>(cuda::workspace_of(p, plan)));
  Arena arena(Workspace{room.data(), static_cast<int64_t>(room.size())});
  const cuda::UnitBuffers b = cuda::lay_out(arena, p, plan).units;
  const int64_t lines = p.groups * plan.parts, tokens = plan.wave * plan.slice * plan.chunk;
  EXPECT_GT(lines, p.heads);
  EXPECT_GE(reinterpret_cast<float*>(b.inner_upstream) - b.dangles, tokens * lines * p.pairs);
}

// A step has a kernel of its own, for any row.
TEST(ScanSm90Config, TakesAStep) {
  for (const int64_t R : {1, 3, 8}) {
    Problem p = problem(Pass::step, 3, 1, 4, 1, R);
    p.state_dim = 20, p.head_dim = 256, p.pairs = 3;
    p.in.initial_states.ssm.present = p.out.final_states.ssm.present = true;
    EXPECT_EQ(reason(p), "");
    EXPECT_LT(cuda::workspace_of(p, make_plan(p, h200())), 1024);
    p.state_dim = 264;
    EXPECT_EQ(reason(p), "N = 264, P = 256: at most 256");
  }
}

// The drawn suite on a device runs every one of its cases on this lane.
TEST(ScanSm90Config, TakesEveryDrawnCase) {
  namespace yard = yardsticks::mamba3;
  int taken = 0, left = 0;
  std::vector<yard::Case> cases = yard::training_cases(11);
  for (const yard::Case& c : yard::wider_cases(17)) cases.push_back(c);
  for (const yard::Case& c : cases)
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const bool back = pass == Pass::backward;
      const yard::Sizes& s = c.size;
      const bool single = s.N == 256 && s.B * s.S * s.R <= 64;  // lane cuda's
      yard::Tensors out;
      for (const std::string& n :
           back ? yard::backward_outputs(c) : std::vector<std::string>{"out"}) {
        const bool rows = n == "d_q" || n == "d_k";
        out[n] = yard::HostTensor(yard::output_dtype(c, n), yard::shape_of(c, n),
                                  rows ? c.rows : yard::Layout{});
      }
      Options options = c.options;
      const Problem p =
          describe(pass, yard::inputs_of(c.in, back), yard::outputs_of(out, back), options);
      if (single) {
        EXPECT_NE(reason(p).find("more than 64 rows alone"), std::string::npos);
        ++left;
      } else {
        EXPECT_EQ(reason(p), "") << yard::describe_case(c);
        ++taken;
      }
    }
  EXPECT_GT(taken, 120);
  EXPECT_GT(left, 10);
}

TEST(ScanSm90Config, SequencesGoSideBySideWithinUsualMemory) {
  const auto plan = [](int64_t B, int64_t H, int64_t G, int64_t R) {
    const Problem p = problem(Pass::backward, B, 4096, H, G, R);
    const cuda::Plan made = make_plan(p, h200());
    EXPECT_LE(cuda::workspace_of(p, made), int64_t{160} << 20);
    return made;
  };
  EXPECT_EQ(plan(4, 64, 1, 1).wave, 2);
  EXPECT_EQ(plan(2, 112, 8, 4).wave, 1);
  EXPECT_EQ(plan(1, 32, 1, 1).wave, 1);
  EXPECT_EQ(plan(1, 32, 1, 1).slice, 64);  // all chunks at once, where they have room
}

// Beside large tensors an eighth of them is usual: two rounds of blocks a launch. A limit is kept,
// and a larger one is used where it is much faster.
TEST(ScanSm90Config, LargeTensorsHaveMoreBesideThem) {
  Problem p = problem(Pass::backward, 8, 4096, 128, 8, 1);
  const auto blocks = [&] {
    const cuda::Plan made = make_plan(p, h200());
    EXPECT_LE(cuda::workspace_of(p, made), p.options.workspace_limit_bytes);
    return made.wave * made.slice * p.groups * made.parts;
  };
  EXPECT_EQ(blocks(), 2 * 128);
  p.options.workspace_limit_bytes = int64_t{160} << 20;
  EXPECT_EQ(blocks(), 128);
  p = problem(Pass::backward, 2, 4096, 112, 8, 4);
  EXPECT_EQ(blocks(), 128);
  p.options.workspace_limit_bytes = int64_t{512} << 20;
  EXPECT_GE(blocks(), 3 * 128);
}

// Which heads a block sums is of heads, groups and rank: of no limit, and not of what lies beside a
// sequence.
TEST(ScanSm90Config, PartsOfAGroup) {
  const auto parts = [](int64_t H, int64_t G, int64_t R) {
    const int64_t made = make_plan(problem(Pass::backward, 1, 4096, H, G, R), h200()).parts;
    for (const int64_t B : {1, 2, 7, 300})
      for (const int64_t S : {1, 100, 2048, 4096}) {
        Problem p = problem(Pass::backward, B, S, H, G, R);
        EXPECT_EQ(make_plan(p, h200()).parts, made) << B << " " << S;
        p.options.workspace_limit_bytes = int64_t{1} << 40;
        EXPECT_EQ(make_plan(p, h200()).parts, made) << B << " " << S;
        p.packed = true, p.batch = 1, p.sequences = B;
        EXPECT_EQ(make_plan(p, h200()).parts, made) << B << " " << S;
      }
    return made;
  };
  EXPECT_EQ(parts(112, 8, 4), 1);
  EXPECT_EQ(parts(32, 1, 4), 2);
  EXPECT_EQ(parts(48, 1, 4), 4);  // 128 blocks of 32 chunks; of 3 parts, 96
  EXPECT_EQ(parts(64, 1, 1), 4);
  EXPECT_EQ(parts(64, 64, 1), 1);
  EXPECT_EQ(parts(17, 1, 4), 2);
}

// Blocks come in rounds of 132: a round that is begun for few of them is lost. So it is without
// what forward saves and, as in training, with it, where segments begin at its states.
TEST(ScanSm90Config, RoundsOfBlocksAreFull) {
  const auto full = [](int64_t B, int64_t S, int64_t H, int64_t G, int64_t R, int64_t N = 128,
                       int64_t P = 64) {
    Problem p = problem(Pass::backward, B, S, H, G, R);
    p.state_dim = N, p.head_dim = P;
    double least = 1;
    for (const bool saved : {true, false}) {
      if (saved) p.in.saved = rows_of({1}, DType::u8);
      if (!saved) p.in.saved = {};
      const cuda::Plan m = make_plan(p, h200());
      const int64_t blocks = m.wave * m.slice * G * m.parts, rounds = (blocks + 131) / 132;
      least = std::min(least, static_cast<double>(blocks) / static_cast<double>(rounds * 132));
    }
    return least;
  };
  EXPECT_GT(full(2, 4096, 112, 8, 4), 0.9);
  EXPECT_GT(full(8, 2048, 32, 1, 4), 0.9);
  EXPECT_GT(full(8, 4096, 128, 8, 4), 0.9);
  EXPECT_GT(full(1, 16384, 64, 1, 4), 0.9);
  EXPECT_GT(full(2, 4096, 48, 1, 4), 0.9);
  EXPECT_GT(full(2, 4096, 64, 8, 2), 0.9);
  EXPECT_GT(full(4, 4096, 64, 1, 1), 0.9);
  EXPECT_GT(full(1, 4096, 32, 1, 1), 0.9);
  EXPECT_GT(full(8, 4096, 128, 8, 1), 0.9);
  EXPECT_GT(full(2, 4096, 64, 8, 8), 0.9);
  EXPECT_GT(full(2, 4096, 64, 1, 4, 256), 0.9);
  EXPECT_GT(full(2, 4096, 64, 1, 4, 128, 128), 0.9);
}

// What a limit changes is how many sequences and chunks go side by side, and nothing that has a
// bit.
TEST(ScanSm90Config, ALimitIsKept) {
  Problem p = problem(Pass::backward, 8, 2048, 32, 1, 4);
  const cuda::Plan wide = make_plan(p, h200());
  EXPECT_EQ(wide.wave, 4);
  p.options.workspace_limit_bytes = cuda::workspace_of(p, wide) / 2;
  const cuda::Plan narrow = make_plan(p, h200());
  EXPECT_LE(cuda::workspace_of(p, narrow), p.options.workspace_limit_bytes);
  EXPECT_EQ(narrow.parts, wide.parts);
}

// Segments are as long as makes rounds of blocks full; what is kept between passes lies at every J
// chunks however long they are, and where it is given, segments begin there.
TEST(ScanSm90Config, SegmentsOfAnyLengthReadTheSameSavedStates) {
  for (const auto& [B, S, H, G, R] :
       {std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>{2, 4096, 112, 8, 4},
        {8, 2048, 32, 1, 4},
        {1, 4096, 32, 1, 1},
        {4, 4096, 64, 1, 1}}) {
    const Problem forward = problem(Pass::forward, B, S, H, G, R);
    Problem p = problem(Pass::backward, B, S, H, G, R);
    const int64_t bytes = cuda::saved_of(forward, make_plan(forward, h200()));
    EXPECT_EQ(cuda::saved_of(p, make_plan(p, h200())), bytes);
    p.in.saved = rows_of({bytes}, DType::u8);
    const cuda::Plan plan = make_plan(p, h200());
    EXPECT_EQ(plan.segment % cuda::kept_every(plan), 0);
    EXPECT_GE(plan.segments * plan.segment, plan.chunks);
    EXPECT_LT((plan.segments - 1) * plan.segment, plan.chunks);
  }
}

TEST(ScanSm90Config, ForwardFormsTokensAheadWithinTheCache) {
  Problem p = problem(Pass::forward, 2, 4096, 112, 8, 4);
  const cuda::Plan usual = make_plan(p, h200());
  EXPECT_EQ(usual.wave, 2);
  EXPECT_GE(usual.ahead, 8);
  EXPECT_LE(cuda::workspace_of(p, usual), int64_t{64} << 20);
  p.options.workspace_limit_bytes = cuda::workspace_of(p, usual) - 1;
  const cuda::Plan less = make_plan(p, h200());
  EXPECT_LT(less.wave * less.ahead, usual.wave * usual.ahead);
  EXPECT_LE(cuda::workspace_of(p, less), p.options.workspace_limit_bytes);
  const Problem many = problem(Pass::forward, 8, 4096, 128, 8, 4);
  EXPECT_LT(make_plan(many, h200()).wave, 8);
  EXPECT_EQ(make_plan(many, h200()).ahead, 16);  // as of the fewer sequences that then go
  EXPECT_GE(make_plan(problem(Pass::forward, 1, 0, 4, 1, 4), h200()).ahead, 1);
}

// The tokens of the next chunks have room of their own, beside those at work, where there are any.
TEST(ScanSm90Config, TokensOfTheNextRunHaveRoom) {
  Problem p = problem(Pass::forward, 2, 4096, 112, 8, 4);
  const auto made = [&] { return make_plan(p, h200()); };
  EXPECT_TRUE(made().beside);
  std::vector<char> room(static_cast<size_t>(cuda::workspace_of(p, made())));
  Arena arena(Workspace{room.data(), static_cast<int64_t>(room.size())});
  const cuda::UnitBuffers b = cuda::lay_out(arena, p, made()).units;
  const int64_t chunks = 2 * 112 * made().ahead, turns = chunks * 16 * 32 * 2;
  EXPECT_GE(reinterpret_cast<float*>(b.token_steps) - b.token_turns, turns);
  EXPECT_GE(b.token_turns_beside - reinterpret_cast<float*>(b.token_steps),
            chunks * cuda::chunk_step_bytes(16) / 4);
  EXPECT_GE(reinterpret_cast<float*>(b.token_steps_beside) - b.token_turns_beside, turns);
  EXPECT_GE(room.data() + room.size() - b.token_steps_beside, chunks * cuda::chunk_step_bytes(16));
  p.options.workspace_limit_bytes = int64_t{12} << 20;
  EXPECT_FALSE(made().beside);
  EXPECT_LE(cuda::workspace_of(p, made()), p.options.workspace_limit_bytes);
  EXPECT_FALSE(make_plan(problem(Pass::forward, 2, 100, 112, 8, 4), h200()).beside);
}

// Of one row a token and heads for every multiprocessor, tanh of angles that all share is formed
// once: where its 4 bytes a token and pair are within the limit.
TEST(ScanSm90Config, RatesOfSharedAnglesHaveRoom) {
  Problem p = problem(Pass::forward, 4, 4096, 64, 1, 1);
  const auto bytes = [&] { return cuda::workspace_of(p, make_plan(p, h200())); };
  EXPECT_FALSE(make_plan(p, h200()).rates);  // of each head
  const int64_t without = bytes(), rates = int64_t{4} * 4096 * 32 * 4;
  p.shared_angles = true;
  EXPECT_TRUE(make_plan(p, h200()).rates);
  EXPECT_GE(bytes(), without + rates);
  std::vector<char> room(static_cast<size_t>(bytes()));
  Arena arena(Workspace{room.data(), static_cast<int64_t>(room.size())});
  const cuda::UnitBuffers b = cuda::lay_out(arena, p, make_plan(p, h200())).units;
  ASSERT_NE(b.rates, nullptr);
  EXPECT_GE(room.data() + room.size() - reinterpret_cast<char*>(b.rates), rates);
  p.options.workspace_limit_bytes = rates;
  EXPECT_FALSE(make_plan(p, h200()).rates);
  EXPECT_LE(bytes(), p.options.workspace_limit_bytes);
  for (Problem other : {problem(Pass::forward, 4, 4096, 64, 1, 4),     // formed ahead with all else
                        problem(Pass::forward, 1, 4096, 32, 1, 1)}) {  // too few heads
    other.shared_angles = true;
    EXPECT_FALSE(make_plan(other, h200()).rates);
  }
}

// On the way to the last segment of backward they lie where operands will, if those are as large.
TEST(ScanSm90Config, TokensOfTheNextSegmentTakeThePlaceOfOperands) {
  for (const int64_t R : {1, 4})
    for (const int64_t pairs : {32, 64}) {
      Problem p = problem(Pass::backward, 2, 4096, 112, 8, R);
      p.pairs = pairs;
      const cuda::Plan plan = make_plan(p, h200());
      std::vector<char> room(static_cast<size_t>(cuda::workspace_of(p, plan)));
      Arena arena(Workspace{room.data(), static_cast<int64_t>(room.size())});
      const cuda::UnitBuffers b = cuda::lay_out(arena, p, plan).units;
      const bool fits = R > 1 || pairs == 32;
      EXPECT_EQ(b.token_turns_beside != nullptr, fits) << R << " " << pairs;
      if (!fits) continue;
      const int64_t chunks = plan.wave * 112 * plan.segment;
      EXPECT_EQ(static_cast<void*>(b.token_turns_beside), b.inner);
      EXPECT_GE(reinterpret_cast<char*>(b.upstream) - static_cast<char*>(b.inner),
                chunks * plan.chunk * cuda::turned_pairs(pairs) * 8);
      EXPECT_EQ(static_cast<void*>(b.token_steps_beside), b.inner_upstream);
      EXPECT_GE(reinterpret_cast<char*>(b.piece_turns) - static_cast<char*>(b.inner_upstream),
                chunks * cuda::chunk_step_bytes(plan.chunk));
    }
}

// Few heads leave multiprocessors idle: stretches of their sequences go side by side, as many as a
// limit has room for; where one ends is of the length alone.
TEST(ScanSm90Config, StretchesOfFewHeadsGoSideBySide) {
  const auto made = [](int64_t B, int64_t S, int64_t H, int64_t R, auto change) {
    Problem p = problem(Pass::forward, B, S, H, 1, R);
    change(p);
    const cuda::Plan plan = make_plan(p, h200());
    EXPECT_LE(cuda::workspace_of(p, plan), p.options.workspace_limit_bytes);
    EXPECT_EQ(plan.ahead, plan.stretch > 0 ? plan.abreast * plan.stretch : plan.ahead);
    return plan;
  };
  const auto usual = [](Problem&) {};
  EXPECT_EQ(made(1, 16384, 64, 4, usual).stretch, 16);
  EXPECT_EQ(made(1, 16384, 64, 4, usual).abreast, 4);
  EXPECT_EQ(made(1, 4096, 32, 1, usual).stretch, 8);
  EXPECT_EQ(made(1, 4096, 32, 1, usual).abreast, 8);
  EXPECT_EQ(made(1, 4608, 32, 1, usual).abreast, 5);  // of nine, of which eight would fit: even
  EXPECT_EQ(made(1, 1008, 64, 4, usual).stretch, 0);  // too short
  EXPECT_EQ(made(2, 4096, 64, 4, usual).stretch, 0);  // heads enough
  EXPECT_EQ(made(1, 4096, 64, 4, [](Problem& p) { p.total_heads = 128; }).stretch, 0);  // by ranks
  EXPECT_EQ(made(1, 16384, 64, 4, [](Problem& p) { p.head_dim = 128; }).stretch, 0);
  EXPECT_EQ(made(1, 16384, 64, 8, usual).stretch, 0);
  EXPECT_EQ(made(1, 16384, 64, 8, usual).columns, 0);  // a whole head
  EXPECT_EQ(made(1, 16384, 64, 4, [](Problem& p) { p.out.saved.present = true; }).stretch, 0);
  EXPECT_EQ(
      made(1, 16384, 64, 4, [](Problem& p) { p.options.schedule = Schedule::sequential; }).stretch,
      0);
  const auto asked = [](Problem& p) { p.options.schedule = Schedule::parallel; };
  EXPECT_EQ(made(2, 4096, 112, 4, asked).stretch, 16);
  EXPECT_EQ(made(2, 4096, 112, 4, asked).abreast, 1);
  // Nothing but states: however many heads, and however short.
  const auto alone = [](Problem& p) { p.out.out = {}; };
  EXPECT_EQ(made(2, 4096, 112, 4, alone).stretch, 16);
  EXPECT_EQ(made(2, 4096, 112, 4, alone).abreast, 1);
  EXPECT_EQ(made(8, 40, 128, 2, alone).stretch, 16);
  EXPECT_EQ(made(2, 4096, 112, 1, alone).stretch, 0);
  EXPECT_EQ(made(2, 4096, 112, 8, alone).stretch, 0);
  EXPECT_EQ(made(2, 4096, 112, 4,
                 [](Problem& p) {
                   p.out.out = {};
                   p.options.schedule = Schedule::sequential;
                 })
                .stretch,
            0);
  const auto little = [](Problem& p) { p.options.workspace_limit_bytes = int64_t{40} << 20; };
  EXPECT_EQ(made(1, 16384, 64, 4, little).stretch, 16);
  EXPECT_EQ(made(1, 16384, 64, 4, little).abreast, 2);
}

// The turns of one row a token are as many numbers as its rows: its heads form their own, but where
// they are too few for the device.
TEST(ScanSm90Config, ForwardOfOneRowATokenFormsNothingAhead) {
  const Problem many = problem(Pass::forward, 4, 4096, 64, 1, 1);
  EXPECT_EQ(make_plan(many, h200()).ahead, 0);
  EXPECT_LT(cuda::workspace_of(many, make_plan(many, h200())), int64_t{1} << 20);
  EXPECT_GT(make_plan(problem(Pass::forward, 1, 4096, 32, 1, 1), h200()).ahead, 0);
}

// So it is with states, which lie in memory before and behind the chunks, of as many sequences as a
// limit has room for.
TEST(ScanSm90Config, StatesOfOneRowATokenFormNothingAhead) {
  Problem p = problem(Pass::forward, 4, 4096, 64, 1, 1);
  p.in.angles.present = p.out.final_states.ssm.present = true;
  const cuda::Plan made = make_plan(p, h200());
  EXPECT_EQ(made.ahead, 0);
  EXPECT_EQ(made.wave, 4);
  const int64_t bytes = cuda::workspace_of(p, made);
  EXPECT_GE(bytes, 4 * 64 * (4 * 128 * 64 + 8 * 32));
  p.options.workspace_limit_bytes = bytes - 1;
  EXPECT_EQ(make_plan(p, h200()).wave, 2);
  EXPECT_LT(cuda::workspace_of(p, make_plan(p, h200())), bytes);
  p.in.angles.present = false;
  p.in.initial_states.angle.present = true;  // turns that no token adds to
  EXPECT_GT(make_plan(p, h200()).ahead, 0);
}

// What was saved is not kept once more, and changes nothing that has an order.
TEST(ScanSm90Config, SavedStatesAreReadWhereTheyLie) {
  Problem p = problem(Pass::backward, 2, 4096, 112, 8, 4);
  const cuda::Plan anew = make_plan(p, h200());
  const int64_t bytes = cuda::workspace_of(p, anew);
  p.in.saved = rows_of({cuda::saved_of(p, anew)}, DType::u8);
  const cuda::Plan saved = make_plan(p, h200());
  EXPECT_EQ(saved.parts, anew.parts);
  EXPECT_EQ(saved.segment, anew.segment);
  EXPECT_EQ(bytes - cuda::workspace_of(p, anew), 4 * anew.wave * 112 * 128 * 64 * anew.segments);
}

Problem pack(Pass pass, int64_t S, int64_t n, int64_t H, int64_t G, int64_t R) {
  Problem p = problem(pass, 1, S, H, G, R);
  p.packed = true;
  p.sequences = n;
  return p;
}

// One thread in place of a block.
struct OneThread {
  void sync() {}
  template <class N, class F>
  void each(N n, F f) {
    for (N i = 0; i < n; ++i) f(i);
  }
};

// The schedule of a pack, as the device makes it, in memory of exactly the sizes that are planned.
struct Made {
  std::vector<int32_t> cu, before;
  std::vector<int64_t> ends, kept;
  std::vector<cuda::Round> rounds;
  std::vector<cuda::Stretch> stretches, by_length;
  std::vector<cuda::PackedChunk> chunks;
  cuda::PackRounds pack;

  Made(const Problem& p, const cuda::Plan& plan, std::vector<int32_t> entries)
      : cu(std::move(entries)) {
    const auto of = [](int64_t n) { return static_cast<size_t>(n); };
    pack.room = static_cast<int32_t>(plan.room);
    pack.abreast = static_cast<int32_t>(plan.abreast);
    pack.every = static_cast<int32_t>(plan.cut_every);
    pack.most_rounds = plan.rounds;
    pack.most_chunks = cuda::most_chunks(p, plan.chunk);
    pack.most_states = pack.most_chunks / pack.room;
    pack.most_stretches = std::min(p.sequences, p.tokens) + plan.rounds;
    rounds.resize(of(plan.rounds + 1));
    stretches.resize(of(pack.most_stretches)), by_length.resize(of(pack.most_stretches));
    chunks.resize(of(pack.most_chunks)), before.resize(of(p.sequences + 1));
    pack.rounds = rounds.data(), pack.stretches = stretches.data();
    pack.by_length = by_length.data(), pack.chunks = chunks.data(), pack.before = before.data();
    ends.resize(cu.size()), kept.resize(cu.size());
    cuda::Sequences from;
    from.cu_seqlens.data = cu.data();
    from.cu_seqlens.stride[0] = 1;
    from.ends = ends.data(), from.kept = kept.data(), from.pack = pack;
    OneThread team;
    cuda::read_entries(team, cuda::sizes_of(p, plan), from);
    for (int64_t i = 0; i < rounds.back().stretch; ++i) {
      for (int lane = 0; lane < 4; ++lane) cuda::put_stretch(pack, i, lane, 4);
      const cuda::Stretch x = stretches.at(of(i));
      const int32_t longer = cuda::longer_before(pack, i, 0, 1);
      by_length.at(of(rounds.at(of(x.round)).stretch + longer)) = x;
    }
  }
};

std::vector<int32_t> drawn_entries(std::mt19937& g, int64_t n, int32_t S) {
  std::vector<int32_t> entries;
  const int32_t shape = std::uniform_int_distribution<int32_t>(0, 3)(g);
  const int32_t most = shape == 0 ? S : shape == 1 ? S / 4 : shape == 2 ? 2 : 80;
  int32_t at = std::uniform_int_distribution<int32_t>(0, 3)(g);
  for (int64_t i = 0; i <= n; ++i) {
    entries.push_back(std::min(at, S));
    at += std::uniform_int_distribution<int32_t>(0, most)(g);
    if (shape == 3 && i == n / 2) at += S / 2;
  }
  return entries;
}

// Each chunk once, in order; a round within its bounds; a sequence cut where a state of it is kept;
// and no more rounds than the host has planned for, whatever the lengths are.
void check_rounds(const Made& m, const Problem& p, const cuda::Plan& plan) {
  int32_t number = 0, stretch = 0, states = 0;
  for (int64_t r = 0; r < plan.rounds; ++r) {
    const cuda::Round now = m.rounds[static_cast<size_t>(r)];
    const cuda::Round next = m.rounds[static_cast<size_t>(r + 1)];
    ASSERT_EQ(now.chunk, number);
    ASSERT_EQ(now.stretch, stretch);
    ASSERT_LE(next.chunk - now.chunk, plan.room);
    ASSERT_LE(next.stretch - now.stretch, plan.abreast);
    int32_t longest = INT32_MAX, sorted = 0;
    for (; stretch < next.stretch; ++stretch) {
      const cuda::Stretch x = m.stretches[static_cast<size_t>(stretch)];
      ASSERT_EQ(x.round, r);
      ASSERT_EQ(x.number, number);
      ASSERT_GT(x.count, 0);
      ASSERT_EQ(x.first % plan.cut_every, 0);
      ASSERT_TRUE(x.first == 0 || stretch == now.stretch);  // the first alone goes on
      if (x.first > 0) {
        ASSERT_EQ(now.state, states++);
      }
      const auto sequence = static_cast<size_t>(x.sequence);
      ASSERT_EQ(x.begin, m.ends[sequence]);
      ASSERT_EQ(x.tokens, m.ends[sequence + 1] - m.ends[sequence]);
      ASSERT_EQ(x.number - x.first, m.before[sequence]);
      for (int32_t i = 0; i < x.count; ++i, ++number) {
        const cuda::PackedChunk c = m.chunks[static_cast<size_t>(number)];
        ASSERT_EQ(c.sequence, x.sequence);
        ASSERT_EQ(c.chunk, x.first + i);
        ASSERT_EQ(c.begin, x.begin);
        ASSERT_EQ(c.tokens, x.tokens);
      }
      const cuda::Stretch by = m.by_length[static_cast<size_t>(stretch)];
      ASSERT_LE(by.count, longest);
      longest = by.count, sorted += by.count;
    }
    ASSERT_EQ(sorted, next.chunk - now.chunk);
  }
  if (plan.cut_every == 1) {
    ASSERT_LE(states, m.pack.most_states);
  }
  int64_t all = 0;
  for (size_t i = 0; i + 1 < m.ends.size(); ++i)
    all += (m.ends[i + 1] - m.ends[i] + plan.chunk - 1) / plan.chunk;
  ASSERT_EQ(number, all);
  ASSERT_EQ(m.before.back(), all);
  ASSERT_LE(all, cuda::most_chunks(p, plan.chunk));
}

TEST(ScanSm90Config, APackGoesInRounds) {
  std::mt19937 g(5);
  for (int i = 0; i < 400; ++i) {
    const int64_t n = std::uniform_int_distribution<int64_t>(1, 60)(g);
    const auto S = std::uniform_int_distribution<int32_t>(1, 3000)(g);
    const Problem p = pack(i % 2 ? Pass::forward : Pass::backward, S, n, 4, 2, 4);
    cuda::Plan plan = make_plan(p, h200());
    ASSERT_GT(plan.rounds, 0);
    if (i % 4 > 1) {  // tight ones
      plan.cut_every = std::uniform_int_distribution<int64_t>(1, 6)(g);
      plan.room = 2 * plan.cut_every + std::uniform_int_distribution<int64_t>(0, 20)(g);
      plan.abreast = std::uniform_int_distribution<int64_t>(1, plan.room)(g);
      plan.rounds = cuda::most_rounds(p, plan);
    }
    const Made made(p, plan, drawn_entries(g, n, S));
    check_rounds(made, p, plan);
    if (HasFatalFailure()) return;
  }
}

// Launches are those of rounds, whose number is about that of the chunks by those of a round; what
// a round needs is within the usual memory, but where longer rounds save a tenth.
TEST(ScanSm90Config, LaunchesOfAPackAreFew) {
  const auto bounded = [](const Problem& p, int64_t most_rounds, int64_t mebibytes = 0) {
    if (mebibytes == 0) mebibytes = p.backward() ? 160 : 224;
    const cuda::Plan plan = make_plan(p, h200());
    EXPECT_GT(plan.rounds, 0);
    EXPECT_LE(plan.rounds, most_rounds);
    EXPECT_LE(cuda::workspace_of(p, plan), mebibytes << 20);
    EXPECT_GE(3 * plan.room * plan.rounds, 3 * cuda::most_chunks(p, plan.chunk));
  };
  bounded(pack(Pass::backward, 16384, 64, 32, 1, 4), 24, 232);
  // Their blocks fill the multiprocessors, two a chunk: twice, where memory is for so many.
  Problem even = pack(Pass::backward, 16384, 64, 32, 1, 4);
  EXPECT_EQ(make_plan(even, h200()).room, 132);
  even.options.workspace_limit_bytes = int64_t{160} << 20;
  EXPECT_EQ(make_plan(even, h200()).room, 66);
  bounded(pack(Pass::backward, 16384, 64, 64, 1, 1), 20);
  bounded(pack(Pass::forward, 16384, 64, 32, 1, 4), 7);
  bounded(pack(Pass::forward, 16384, 4096, 32, 1, 4), 24);
  Problem handed = pack(Pass::forward, 16384, 64, 32, 1, 4);
  handed.in.initial_states.ssm.present = handed.out.final_states.ssm.present = true;
  bounded(handed, 16);
  EXPECT_LT(make_plan(handed, h200()).abreast, 64);
  handed = pack(Pass::backward, 16384, 64, 32, 1, 4);
  handed.in.initial_states.ssm.present = handed.in.d_final_states.ssm.present = true;
  bounded(handed, 32, 248);
  EXPECT_LT(make_plan(handed, h200()).abreast, 64);
}

// Backward keeps what lies behind each sequence; of a pack, h and E of as many stretches as a round
// has, and a state of each behind its chunks. Without states nothing of it has room.
TEST(ScanSm90Config, StatesOfBackwardHaveRoom) {
  for (const bool packed : {false, true}) {
    Problem p = packed ? pack(Pass::backward, 3000, 40, 4, 2, 4)
                       : problem(Pass::backward, 3, 3000, 4, 2, 4);
    const cuda::Plan without = make_plan(p, h200());
    p.in.initial_states.ssm.present = p.in.d_final_states.k.present = true;
    const cuda::Plan plan = make_plan(p, h200());
    EXPECT_EQ(plan.parts, without.parts);
    EXPECT_EQ(cuda::kept_every(plan), cuda::kept_every(without));
    std::vector<char> room(static_cast<size_t>(cuda::workspace_of(p, plan)));
    Arena arena(Workspace{room.data(), static_cast<int64_t>(room.size())});
    const cuda::UnitBuffers b = cuda::lay_out(arena, p, plan).units;
    const int64_t size = 128 * 64, n = p.sequences;
    EXPECT_GE(b.last_keys - b.ends, n * 4 * 32);
    EXPECT_GE(reinterpret_cast<float*>(room.data() + room.size()) - b.last_keys, n * 4 * 4 * 128);
    EXPECT_EQ(b.ordinals != nullptr, packed);
    EXPECT_EQ(b.first_states != nullptr, packed);
    if (!packed) continue;
    EXPECT_GE(reinterpret_cast<float*>(b.ordinals) - b.first_states, plan.abreast * 4 * size);
    EXPECT_GE(reinterpret_cast<char*>(b.upstream) - static_cast<char*>(b.inner),
              4 * (plan.room + plan.abreast) * size * 2);
    EXPECT_GE(reinterpret_cast<char*>(b.parameters) - reinterpret_cast<char*>(b.upstream),
              4 * (2 + plan.abreast) * size * 4);
  }
}

// A sequence is cut at states of `saved` where rounds have room for two such parts; else states are
// formed anew.
TEST(ScanSm90Config, RoundsOfAPackBeginAtSavedStates) {
  Problem p = pack(Pass::backward, 16384, 64, 32, 1, 4);
  const cuda::Plan anew = make_plan(p, h200());
  EXPECT_EQ(anew.cut_every, 1);
  p.in.saved = rows_of({cuda::saved_of(p, anew)}, DType::u8);
  const cuda::Plan saved = make_plan(p, h200());
  EXPECT_TRUE(saved.uses_saved);
  EXPECT_EQ(saved.cut_every, saved.segment);
  EXPECT_GE(saved.room, 2 * saved.segment);
  EXPECT_EQ(saved.parts, anew.parts);
  EXPECT_EQ(cuda::saved_of(p, saved), cuda::saved_of(p, anew));
}

// Under a limit that has no room for rounds a pack goes as each sequence alone would.
TEST(ScanSm90Config, ALimitOfAPackIsKept) {
  Problem p = pack(Pass::backward, 16384, 64, 32, 1, 4);
  const int64_t parts = make_plan(p, h200()).parts;
  for (int64_t limit = int64_t{1} << 30; limit >= int64_t{64} << 20; limit = limit * 7 / 8) {
    p.options.workspace_limit_bytes = limit;
    const cuda::Plan plan = make_plan(p, h200());
    EXPECT_LE(cuda::workspace_of(p, plan), limit);
    EXPECT_EQ(plan.parts, parts);
  }
}

// Heads of more values are several units, which share turns and steps; q and k of fewer columns
// fill their tiles up.
TEST(ScanSm90Config, WiderHeadsAreSeveralUnits) {
  Problem p = problem(Pass::backward, 2, 4096, 64, 1, 4);
  p.head_dim = 128;
  const auto kept = [](const cuda::Plan& m) {
    return (m.chunks + cuda::kept_every(m) - 1) / cuda::kept_every(m);
  };
  const cuda::Plan wide = make_plan(p, h200());
  EXPECT_LE(cuda::workspace_of(p, wide), int64_t{256} << 20);
  EXPECT_EQ(cuda::saved_of(p, wide), 4 * 2 * 64 * 128 * 128 * kept(wide));
  const cuda::Sizes s = cuda::sizes_of(p, wide);
  EXPECT_EQ(s.heads, 128);
  EXPECT_EQ(s.heads_per_group, 64);
  EXPECT_EQ(s.values, 64);
  EXPECT_EQ(cuda::cut_of(p, wide).slab_bits, 1);
  p.state_dim = 64, p.head_dim = 64;
  const cuda::Plan narrow = make_plan(p, h200());
  EXPECT_EQ(cuda::sizes_of(p, narrow).columns, 128);
  EXPECT_EQ(cuda::cut_of(p, narrow).columns, 64);
  EXPECT_EQ(cuda::cut_of(p, narrow).bits(), 0);
  EXPECT_FALSE(cuda::cut_of(p, narrow).whole);
  p.state_dim = 256, p.pairs = 100;
  const cuda::Plan parts = make_plan(p, h200());
  EXPECT_LE(cuda::workspace_of(p, parts), int64_t{256} << 20);
  EXPECT_EQ(cuda::saved_of(p, parts), 4 * 2 * 64 * 256 * 64 * kept(parts));
  EXPECT_EQ(cuda::sizes_of(p, parts).heads, 128);
  EXPECT_EQ(cuda::sizes_of(p, parts).pairs, 64);
  EXPECT_EQ(cuda::cut_of(p, parts).part_bits, 1);
  EXPECT_EQ(cuda::cut_of(p, parts).pairs, 100);
  p.state_dim = 128, p.pairs = 64;
  EXPECT_TRUE(cuda::cut_of(p, make_plan(p, h200())).whole);
}

// A block of the gradients adds up the slabs of its heads, and its heads, where two have room; of
// other heads that are cut each unit leaves what it has.
TEST(ScanSm90Config, SlabsAddUpWithinABlock) {
  Problem p = problem(Pass::backward, 1, 300, 22, 2, 4);
  const auto taken = [&](int64_t N, int64_t P, int64_t A) {
    p.state_dim = N, p.head_dim = P, p.pairs = A;
    const cuda::Plan plan = make_plan(p, h200());
    std::vector<char> room(static_cast<size_t>(cuda::workspace_of(p, plan)));
    Arena arena(Workspace{room.data(), static_cast<int64_t>(room.size())});
    const cuda::Buffers b = cuda::lay_out(arena, p, plan);
    const cuda::Sizes s = cuda::sizes_of(p, plan);
    const bool ahead = cuda::gradients_ahead(b.cut, s.rank, s.pairs);
    const int64_t units = s.heads >> (ahead ? b.cut.bits() : 0);
    const int64_t edges = plan.wave * units * plan.segments * plan.segment;
    const int64_t lines = ahead ? p.groups * plan.parts : s.heads;
    const cuda::UnitBuffers& u = b.units;
    const int64_t bytes = reinterpret_cast<char*>(u.partial) - reinterpret_cast<char*>(u.edges);
    EXPECT_GE(bytes, edges * int64_t{sizeof(cuda::Edge)});
    EXPECT_LT(bytes, (edges + 64) * int64_t{sizeof(cuda::Edge)});
    EXPECT_GE(reinterpret_cast<float*>(u.inner_upstream) - u.dangles,
              plan.wave * plan.slice * plan.chunk * lines * s.pairs);
    EXPECT_EQ(b.cut.slabs != nullptr, !ahead && b.cut.bits() > 0);
    return ahead;
  };
  EXPECT_TRUE(taken(128, 64, 32));
  EXPECT_TRUE(taken(128, 128, 32));
  EXPECT_FALSE(taken(128, 128, 34));
  EXPECT_FALSE(taken(64, 64, 32));
  EXPECT_FALSE(taken(64, 128, 32));
  EXPECT_FALSE(taken(256, 64, 32));
  EXPECT_FALSE(taken(256, 128, 32));
}

// Columns of a unit and of its head: of neighbours and of halves, of parts and of a narrow head.
TEST(ScanSm90Config, EveryColumnIsOneOfAUnit) {
  for (const int64_t N : {64, 256})
    for (const RotaryPairs pairs : {RotaryPairs::interleaved, RotaryPairs::halves}) {
      Problem p = problem(Pass::forward, 2, 300, 4, 2, 1);
      p.state_dim = N, p.rotary_pairs = pairs;
      const cuda::Cut cut = cuda::cut_of(p, make_plan(p, h200()));
      std::vector<int> found(static_cast<size_t>(N));
      for (int part = 0; part < 1 << cut.part_bits; ++part)
        for (int c = 0; c < 128; ++c)
          if (const int own = cut.own_column(part, c); own >= 0)
            ++found.at(static_cast<size_t>(own));
      for (const int times : found) EXPECT_EQ(times, 1) << "N " << N;
    }
}

TEST(ScanSm90Config, MemoryOfTheLargestTrainingRow) {
  const Problem p = problem(Pass::backward, 2, 4096, 112, 8, 4);
  EXPECT_LT(cuda::workspace_of(p, make_plan(p, h200())), int64_t{160} << 20);
}

}  // namespace
}  // namespace talea::mamba3::sm90
#endif
