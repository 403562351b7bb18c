// What: how lane cuda cuts a problem, without a GPU: engine, places of a chunk, waves, the limit.
// Why: a plan is a pure function; a place too small, a limit not kept would be silent on a device.
// Never: needs a device.
#ifdef TALEA_WITH_CUDA
#include <gtest/gtest.h>

#include <vector>

#include "ops/mamba3/rows/numbers.hpp"
#include "ops/mamba3/rows/plan.hpp"

namespace talea::mamba3::cuda {
namespace {

constexpr int64_t limit = int64_t{256} << 20;

Problem problem(int64_t B, int64_t S, int64_t H, int64_t R, int64_t N, int64_t P, DType dtype) {
  Problem p;
  p.pass = Pass::backward;
  p.batch = p.sequences = B;
  p.tokens = S;
  p.heads = H;
  p.groups = 1;
  p.heads_per_group = H;
  p.rank = R;
  p.state_dim = N;
  p.head_dim = P;
  p.pairs = N / 4;
  p.dtype = dtype;
  p.device = DeviceKind::cuda;
  p.out.d.q.present = p.out.d.k.present = p.sum_angles = true;
  p.options.workspace_limit_bytes = limit;
  return p;
}

DeviceFacts device(int sm, int64_t shared_kib, int count = 132) {
  DeviceFacts d;
  d.sm = sm;
  d.sm_count = count;
  d.shared_bytes = shared_kib << 10;
  return d;
}

Plan planned(const Problem& p, const DeviceFacts& d = device(90, 227)) { return make_plan(p, d); }

TEST(ScanCudaPlan, RowsDecideTheEngine) {
  EXPECT_EQ(planned(problem(1, 64, 4, 1, 128, 64, DType::f32)).engine, Engine::three_tf32);
  EXPECT_EQ(planned(problem(1, 64, 4, 1, 128, 64, DType::f16)).engine, Engine::three_tf32);
  EXPECT_EQ(planned(problem(1, 64, 4, 1, 128, 64, DType::bf16)).engine, Engine::bf16);
  EXPECT_EQ(planned(problem(1, 64, 4, 1, 20, 64, DType::bf16)).engine, Engine::tf32);
  // What bf16 operands of this chunk need is beyond 99 KiB.
  EXPECT_EQ(planned(problem(1, 64, 4, 1, 256, 256, DType::bf16), device(86, 99)).engine,
            Engine::tf32);
}

// Its kernel holds the row of a state in registers, whatever the head.
TEST(ScanCudaPlan, AStepTakesNoScratch) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    Problem p = problem(128, 1, 16, 8, 256, 256, dtype);
    p.pass = Pass::step;
    EXPECT_LT(workspace_of(p, planned(p)), 2048);
  }
}

TEST(ScanCudaPlan, AChunkHasSixtyFourRowsUnlessSaid) {
  for (const int64_t R : {1, 2, 3, 4, 8})
    EXPECT_EQ(planned(problem(1, 500, 4, R, 64, 64, DType::bf16)).chunk, 64 / R);
  Problem p = problem(1, 500, 4, 2, 64, 64, DType::bf16);
  p.options.chunk = 5;
  EXPECT_EQ(planned(p).chunk, 5);
}

// Arrays of a chunk as [begin, end) of shared memory or scratch, in the order of their places.
TEST(ScanCudaPlan, ArraysOfAChunkLieApart) {
  int compared = 0;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int64_t N : {16, 20, 128, 256})
      for (const int64_t R : {1, 3, 8})
        for (const int64_t shared : {99, 163, 227}) {
          const Problem p = problem(1, 300, 4, R, N, 64, dtype);
          const Plan plan = planned(p, device(90, shared));
          const ChunkPlaces& c = plan.backward;
          const int64_t size = plan.engine == Engine::bf16 ? 2 : 4;
          const int64_t M = c.rows, C = plan.chunk;
          struct Piece {
            Place place;
            int64_t bytes;
          };
          const std::vector<Piece> pieces = {
              {c.q, M * (c.padded_columns + c.pad) * size},
              {c.k, M * (c.padded_columns + c.pad) * size},
              {c.v, M * (c.padded_values + c.pad) * size},
              {c.scaled, M * (c.padded_values + c.pad) * size},
              {c.d_y, M * (c.padded_values + c.pad) * size},
              {c.seen, M * (M + c.pad) * size},
              {c.weights, M * (M + c.pad) * size},
              {c.state, int64_t{c.padded_values} * (c.padded_columns + c.pad) * size},
              {c.upstream, int64_t{c.padded_values} * (c.padded_columns + c.pad) * size},
              {c.scores, 2 * M * (M + 4) * 4},
              {c.y, M * (c.padded_values + 4) * 4},
              {c.turn, C * p.pairs * 4},
              {c.given, C * p.pairs * 4},
              {c.angle, C * p.pairs * 8},
              {c.decays, C * C * 4},
              {c.row_sums, 10 * M * 4},
          };
          EXPECT_LE(c.shared_bytes, shared << 10);
          for (const Piece& x : pieces) {
            const int64_t own = x.place.at >= 0 ? x.place.at : -1 - x.place.at;
            EXPECT_LE(own + x.bytes, x.place.at >= 0 ? c.shared_bytes : c.scratch_bytes);
            EXPECT_EQ(own % 128, 0);
            for (const Piece& other : pieces) {
              if (&x == &other || (x.place.at >= 0) != (other.place.at >= 0)) continue;
              const int64_t begin = other.place.at >= 0 ? other.place.at : -1 - other.place.at;
              EXPECT_TRUE(own + x.bytes <= begin || begin + other.bytes <= own);
              ++compared;
            }
          }
        }
  EXPECT_GT(compared, 1000);
}

TEST(ScanCudaPlan, ALimitIsKeptOrTheLeastIsSaid) {
  for (const int64_t S : {1, 64, 4096, 65536}) {
    const Problem p = problem(2, S, 112, 4, 128, 64, DType::bf16);
    const Plan plan = planned(p);
    if (S <= 4096) {
      EXPECT_LE(workspace_of(p, plan), limit) << S;
    }
    Problem least = p;
    least.options.workspace_limit_bytes = 0;
    const int64_t bytes = workspace_of(least, planned(least));
    EXPECT_LE(bytes, workspace_of(p, plan));
    least.options.workspace_limit_bytes = bytes;
    EXPECT_EQ(workspace_of(least, planned(least)), bytes);
  }
}

TEST(ScanCudaPlan, ALimitChangesNoChunkAndNoSegment) {
  Problem p = problem(3, 1000, 8, 2, 64, 32, DType::f32);
  const Plan wide = planned(p);
  p.options.workspace_limit_bytes = 0;
  const Plan least = planned(p);
  EXPECT_EQ(wide.chunk, least.chunk);
  EXPECT_EQ(wide.segment, least.segment);
  EXPECT_EQ(saved_of(p, wide), saved_of(p, least));
  EXPECT_EQ(least.wave, 1);
  EXPECT_EQ(least.slice, 1);
}

TEST(ScanCudaPlan, TokensOfRowsByAReciprocal) {
  for (int64_t R = 1; R <= 8; ++R) {
    const Problem p = problem(1, 100, 2, R, 16, 16, DType::f32);
    const Sizes s = sizes_of(p, planned(p));
    for (unsigned row = 0; row < 160; ++row) EXPECT_EQ((row * s.reciprocal) >> 16, row / R) << R;
  }
}

TEST(ScanCudaPlan, TurnsAreThoseOfTheOtherLanes) {
  for (int i = -4000; i < 4000; ++i) {
    const float turns = static_cast<float>(i) * 0.000977f;
    float sine, cosine;
    sine_cosine(to_turn(turns), sine, cosine);
    const double angle = 6.283185307179586 * static_cast<double>(turns);
    EXPECT_NEAR(sine, std::sin(angle), 1.2e-7) << turns;
    EXPECT_NEAR(cosine, std::cos(angle), 1.2e-7) << turns;
  }
  EXPECT_EQ(to_turn(0.5f), uint64_t{1} << 63);
  EXPECT_EQ(to_turn(-0.25f), uint64_t{3} << 62);
  EXPECT_EQ(to_turn(NAN), no_turn);
  EXPECT_EQ(to_turn(INFINITY), no_turn);
}

}  // namespace
}  // namespace talea::mamba3::cuda
#endif
