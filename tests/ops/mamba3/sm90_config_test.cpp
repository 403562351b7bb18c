// What: what lane sm90 of the scan takes and how it cuts it, without a GPU.
// Why: a plan is a pure function; each thing that the kernels cannot do has a name.
// Never: needs a device.
#ifdef TALEA_WITH_CUDA
#include <gtest/gtest.h>

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
  for (const int64_t R : {1, 2, 4})
    for (const Pass pass : {Pass::forward, Pass::backward})
      EXPECT_EQ(reason(problem(pass, 2, 4096, 112, 8, R)), "");
}

TEST(ScanSm90Config, NamesWhatItDoesNotTake) {
  const Problem good = problem(Pass::forward, 1, 100, 4, 1, 4);
  const auto with = [&](auto change) {
    Problem p = good;
    change(p);
    return reason(p);
  };
  EXPECT_EQ(with([](Problem& p) { p.dtype = DType::f16; }), "fp16 q: bf16 alone");
  EXPECT_EQ(with([](Problem& p) { p.state_dim = 64; }), "N = 64, P = 64: 128 and 64 alone");
  EXPECT_EQ(with([](Problem& p) { p.rank = 8; }), "R = 8: 1, 2 and 4 alone");
  EXPECT_EQ(with([](Problem& p) { p.pairs = 3; }), "A = 3: even numbers alone");
  EXPECT_EQ(with([](Problem& p) { p.options.chunk = 8; }),
            "chunk = 8 tokens of rank 4: 64 rows alone");
  EXPECT_EQ(with([](Problem& p) { p.options.chunk = 16; }), "");
  EXPECT_EQ(with([](Problem& p) { p.options.head_norm = true; }), "head_norm");
  EXPECT_EQ(with([](Problem& p) { p.in.initial_states.ssm.present = true; }), "");
  EXPECT_EQ(with([](Problem& p) { p.out.final_states.k.present = true; }), "");
  EXPECT_EQ(with([](Problem& p) { p.out.final_states.k.present = p.out.saved.present = true; }),
            "final states of a pass that saves");
  EXPECT_EQ(with([](Problem& p) {
              p.pass = Pass::backward;
              p.in.initial_states.ssm.present = true;
            }),
            "initial states of backward");
  EXPECT_EQ(with([](Problem& p) { p.in.k.stride[1] += 4; }),
            "k: stride 516 of axis 1, must be a multiple of 8");
  EXPECT_EQ(with([](Problem& p) { p.in.v.stride[3] = 2; }), "v: last stride 2, must be 1");
  EXPECT_EQ(with([](Problem& p) { p.alignment_bytes = 8; }), "rows on 8 bytes, must be on 16");
  EXPECT_EQ(with([](Problem& p) { p.sequence_world = 2; }),
            "heads or tokens over several ranks are for host tensors");
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
  int taken = 0;
  for (const yard::Case& c : yard::training_cases(11))
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const bool back = pass == Pass::backward;
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
      EXPECT_EQ(reason(p), "") << yard::describe_case(c);
      ++taken;
    }
  EXPECT_GT(taken, 60);
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
  EXPECT_EQ(plan(1, 32, 1, 1).slice, 8);
}

// Which heads a block sums is of the problem, and of no limit.
TEST(ScanSm90Config, PartsOfAGroup) {
  const auto parts = [](int64_t S, int64_t H, int64_t G, int64_t R) {
    Problem p = problem(Pass::backward, 1, S, H, G, R);
    const int64_t made = make_plan(p, h200()).parts;
    p.options.workspace_limit_bytes = int64_t{1} << 40;
    EXPECT_EQ(make_plan(p, h200()).parts, made);
    return made;
  };
  EXPECT_EQ(parts(4096, 112, 8, 4), 1);
  EXPECT_EQ(parts(4096, 64, 1, 1), 16);
  EXPECT_EQ(parts(4096, 64, 64, 1), 1);
  EXPECT_EQ(parts(100, 17, 1, 4), 17);
}

// Blocks come in rounds of 132: a round that is begun for few of them is lost.
TEST(ScanSm90Config, RoundsOfBlocksAreFull) {
  const auto full = [](int64_t B, int64_t S, int64_t H, int64_t G, int64_t R) {
    const Problem p = problem(Pass::backward, B, S, H, G, R);
    const cuda::Plan m = make_plan(p, h200());
    const int64_t blocks = m.wave * m.slice * G * m.parts, rounds = (blocks + 131) / 132;
    return static_cast<double>(blocks) / static_cast<double>(rounds * 132);
  };
  EXPECT_GT(full(2, 4096, 112, 8, 4), 0.9);
  EXPECT_GT(full(8, 2048, 32, 1, 4), 0.9);
  EXPECT_GT(full(8, 4096, 128, 8, 4), 0.9);
  EXPECT_GT(full(4, 4096, 64, 1, 1), 0.9);
  EXPECT_GT(full(1, 4096, 32, 1, 1), 0.9);
  EXPECT_GT(full(8, 4096, 128, 8, 1), 0.9);
}

// What a limit changes is how many sequences and chunks go side by side, and nothing that has a
// bit.
TEST(ScanSm90Config, ALimitIsKept) {
  Problem p = problem(Pass::backward, 8, 2048, 32, 1, 4);
  const cuda::Plan wide = make_plan(p, h200());
  EXPECT_EQ(wide.wave, 4);
  p.options.workspace_limit_bytes = cuda::workspace_of(p, wide) - 1;
  const cuda::Plan narrow = make_plan(p, h200());
  EXPECT_LT(narrow.wave, 4);
  EXPECT_LE(cuda::workspace_of(p, narrow), p.options.workspace_limit_bytes);
  EXPECT_EQ(narrow.parts, wide.parts);
  EXPECT_EQ(narrow.segment, wide.segment);
}

TEST(ScanSm90Config, ForwardFormsTokensAheadWithinTheCache) {
  Problem p = problem(Pass::forward, 2, 4096, 112, 8, 4);
  const cuda::Plan usual = make_plan(p, h200());
  EXPECT_EQ(usual.wave, 2);
  EXPECT_GE(usual.ahead, 8);
  EXPECT_LE(cuda::workspace_of(p, usual), int64_t{48} << 20);
  p.options.workspace_limit_bytes = cuda::workspace_of(p, usual) - 1;
  const cuda::Plan less = make_plan(p, h200());
  EXPECT_LT(less.wave * less.ahead, usual.wave * usual.ahead);
  EXPECT_LE(cuda::workspace_of(p, less), p.options.workspace_limit_bytes);
  const Problem many = problem(Pass::forward, 8, 4096, 128, 8, 4);
  EXPECT_LT(make_plan(many, h200()).wave, 8);
  EXPECT_GE(make_plan(problem(Pass::forward, 1, 0, 4, 1, 4), h200()).ahead, 1);
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

TEST(ScanSm90Config, MemoryOfTheLargestTrainingRow) {
  const Problem p = problem(Pass::backward, 2, 4096, 112, 8, 4);
  EXPECT_LT(cuda::workspace_of(p, make_plan(p, h200())), int64_t{160} << 20);
}

}  // namespace
}  // namespace talea::mamba3::sm90
#endif
