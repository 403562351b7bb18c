// What: where lane sm90 sums dW and keeps the sums of a tile, by limit and dtype.
// Why: a limit decides between four ways, and each must be taken where it is the fastest.
// Never: launches a kernel.
#ifdef TALEA_WITH_CUDA
#include <gtest/gtest.h>

#include "ops/linear_cross_entropy/late.hpp"
#include "ops/linear_cross_entropy/sm90_problems.hpp"

namespace talea::lce {
namespace {

using sm90::DwOutput;

// A rest of dW is kept where the chunks beside it are worth their time.
TEST(Sm90Config, NoRestWhereFormingTheLogitsAgainIsFaster) {
  Problem p = training(8192, 2304, 256000, 400);
  p.dw_dtype = DType::bf16, p.late_factor = p.wants_dx_rest = p.wants_rest = true;
  EXPECT_GT(sm90_lane().plan(p, hopper()).kept_bytes, 0);
  p.options.workspace_limit_bytes = int64_t{200} << 20;  // 256 rows
  EXPECT_EQ(sm90_lane().plan(p, hopper()).kept_bytes, 0);
}

// What a late factor multiplies says by its bytes what it is.
TEST(Sm90Config, ARestIsKnownByItsBytes) {
  for (const int64_t vocab : {1, 17, 1000, 128256})
    for (const int64_t hidden : {8, 64, 72, 4096}) {
      const int64_t eight = Rest::bytes(vocab, hidden, 8), four = Rest::bytes(vocab, hidden, 4),
                    exponents = Rest::bytes(vocab, hidden, Rest::kExponents);
      EXPECT_TRUE(eight % 32 == 16 && four % 32 == 0 && exponents % 16 == 4);
      EXPECT_TRUE(exponents < four && four < eight && exponents % 4 == 0);
    }
}

TEST(Sm90Config, Bf16DwKeepsMoreBitsBesideItWhereTheyHaveRoom) {
  for (const int64_t mib : {700, 1100, 2100}) {
    Problem p = training(8192, 4096, 128256, mib);
    p.dw_dtype = DType::bf16;
    const auto c = sm90::config(p, hopper());
    EXPECT_TRUE(!c.by_slices() && (c.dw == DwOutput::split || c.dw == DwOutput::direct) &&
                c.dw != DwOutput::workspace)
        << mib;
    EXPECT_LE(workspace(p), mib << 20);
  }
  Problem scarce = training(8192, 4096, 128256, 265);
  scarce.dw_dtype = scarce.options.dw_sum = DType::bf16;
  const auto c = sm90::config(scarce, hopper());
  EXPECT_TRUE(c.dw == DwOutput::split && c.rest_bits == 0);
  // In the wide path the targets are in the product: each later chunk would round their share.
  Problem soft = scarce;
  soft.has_targets = false, soft.soft_targets = SoftTargets::dense;
  EXPECT_EQ(sm90::config(soft, hopper()).dw, DwOutput::workspace);
}

// Codes need no memory of dW's size; a factor that comes later is one more pass over dW.
TEST(Sm90Config, Bf16DwUnderASmallLimitIsSummedInCodes) {
  for (const bool late : {false, true})
    for (const int64_t mib : {135, 200, 265, 530, 700}) {
      Problem p = training(8192, 4096, 128256, mib);
      p.dw_dtype = DType::bf16, p.late_factor = p.wants_dx_rest = p.wants_rest = late;
      const auto c = sm90::config(p, hopper());
      EXPECT_TRUE(c.sums_in_codes()) << mib;
      const Planned plan = sm90_lane().plan(p, hopper());
      EXPECT_LE(plan.workspace_bytes + plan.kept_bytes +
                    (late ? p.tokens * dx_rest_columns(p.hidden) : 0),
                mib << 20);
      EXPECT_EQ(plan.kept_bytes, late ? Rest::bytes(128256, 4096, Rest::kExponents) : 0);
    }
  // Not where one chunk takes all rows, nor where there are so many that their roundings would
  // show.
  Problem p = training(256, 4096, 128256, 265);
  p.dw_dtype = DType::bf16;
  EXPECT_FALSE(sm90::config(p, hopper()).sums_in_codes());
  p = training(65536, 4096, 128256, 265);
  p.dw_dtype = DType::bf16;
  EXPECT_FALSE(sm90::config(p, hopper()).sums_in_codes());
}

TEST(Sm90Config, Bf16DwUnderTheSmallestLimitsGoesBySlices) {
  Problem p = training(8192, 2304, 256000, 135);
  p.dw_dtype = DType::bf16;
  const auto c = sm90::config(p, hopper());
  EXPECT_TRUE(c.by_slices() && c.dw == DwOutput::direct && c.x_in_dx &&
              c.dw != DwOutput::workspace && !c.from_saved());
  EXPECT_EQ(c.slice_words % 384, 0);
  EXPECT_LE(workspace(p), int64_t{135} << 20);
  // Neither among ranks, nor for the best words, nor in fp16: there an fp32 sum is rounded.
  Problem words = p, ranks = p, half = p;
  words.top_k = 5;
  ranks.world = 2;
  half.hidden_dtype = half.weight_dtype = half.dx_dtype = half.dw_dtype = DType::f16;
  for (const Problem& other : {words, ranks, half})
    EXPECT_EQ(sm90::config(other, hopper()).slice_words, 0);
}

TEST(Sm90Config, SumsPerTileGiveWayToTheChunk) {
  Problem p = training(8192, 4096, 128256, 530);
  p.has_bias = p.has_token_weight = p.wants_entropy = true;
  p.options.label_smoothing = 0.1, p.options.softcap = 30, p.options.z_loss = 1e-4;
  p.top_k = 5;
  const auto c = sm90::config(p, hopper());
  EXPECT_EQ(c.chunk_rows, 2048);
  EXPECT_LT(c.state_rows, c.chunk_rows);
  EXPECT_LE(workspace(p), int64_t{530} << 20);
}

// Nothing reads a chunk's rows once its logits are formed: they lie in dX, and the chunk is longer.
TEST(Sm90Config, WithoutDwTheRowsLieInDx) {
  const Problem p = frozen(4096, 128256, 256);
  const auto c = sm90::config(p, hopper());
  EXPECT_TRUE(c.x_ends_dx() && !c.sums_in_dx && c.borrows_dx());
  EXPECT_LE(workspace(p) + p.tokens * dx_rest_columns(p.hidden), int64_t{256} << 20);
  const auto elsewhere = [&](auto bend) {
    Problem q = p;
    bend(q);
    EXPECT_FALSE(sm90::config(q, hopper()).x_ends_dx());
  };
  elsewhere([](Problem& q) { q.wants_dw = true; });
  elsewhere([](Problem& q) { q.dx_dtype = DType::f32; });
  elsewhere([](Problem& q) { q.world = 2; });
  elsewhere([](Problem& q) { q.top_k = 5; });  // read once more for the best words
  elsewhere([](Problem& q) { q.options.label_smoothing = 0.1; });  // and for the smoothing's sum
  elsewhere([](Problem& q) { q.has_bias = q.wants_db = true; });
}

// The sums per tile lie in dX where it is dense, wide enough for them, and theirs alone.
TEST(Sm90Config, SumsPerTileLieInDxWhereItHoldsThem) {
  const Problem p = training(8192, 4096, 128256, 265);
  EXPECT_TRUE(sm90::config(p, hopper()).sums_in_dx);
  const auto elsewhere = [&](auto bend) {
    Problem q = p;
    bend(q);
    EXPECT_FALSE(sm90::config(q, hopper()).sums_in_dx);
    return workspace(q) - workspace(p);
  };
  EXPECT_EQ(elsewhere([](Problem& q) { q.dx_row_stride += 8; }), 668 * 1024 * 4);
  elsewhere([](Problem& q) { q.wants_dx = false; });
  elsewhere([](Problem& q) { q.wants_entropy = true; });
  elsewhere([](Problem& q) { q.top_k = 5; });
  elsewhere([](Problem& q) { q.world = 2; });
  elsewhere([](Problem& q) { q.options.label_smoothing = 0.1, q.options.softcap = 30; });
  Problem narrow = training(8192, 2304, 256000, 530);  // 1334 tiles, rows of 4608 bytes
  EXPECT_FALSE(sm90::config(narrow, hopper()).sums_in_dx);
  narrow.dx_dtype = DType::f32;
  EXPECT_TRUE(sm90::config(narrow, hopper()).sums_in_dx);
}

}  // namespace
}  // namespace talea::lce
#endif
