// What: the decisions of lane sm90: chunk, sharing of the device, workspace, reasons to decline.
// Why: they are pure functions of (problem, device facts) and need no GPU to be tested.
// Never: launches a kernel.
#ifdef TALEA_WITH_CUDA
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <tuple>

#include "ops/linear_cross_entropy/forced.hpp"
#include "ops/linear_cross_entropy/late.hpp"
#include "ops/linear_cross_entropy/sm90/cost.hpp"
#include "ops/linear_cross_entropy/sm90_problems.hpp"

namespace talea::lce {
namespace {

using sm90::DwOutput;

TEST(Sm90Config, WorkspaceStaysWithinTheLimit) {
  for (int64_t mib : {135, 265, 530, 1050})
    for (int64_t tokens : {4096, 8192, 16384}) {
      const Problem p = training(tokens, 4096, 128256, mib);
      EXPECT_LE(workspace(p), mib << 20) << tokens << " tokens";
    }
}

TEST(Sm90Config, ChunkFollowsTheLimit) {
  EXPECT_EQ(sm90::config(training(8192, 4096, 128256, 530), hopper()).chunk_rows, 2048);
  EXPECT_EQ(sm90::config(training(8192, 4096, 128256, 265), hopper()).chunk_rows, 1024);
  const auto c = sm90::config(training(8191, 3584, 151936, 620), hopper());
  EXPECT_EQ(c.chunk_rows % 256, 0);
  EXPECT_EQ(c.chunks, (8191 + c.chunk_rows - 1) / c.chunk_rows);
}

// Slices form the logits twice: where one chunk has the room, nothing is gained, however small all
// is.
TEST(Sm90Config, WhereOneChunkFitsThereAreNoSlices) {
  for (const auto& [tokens, hidden, vocab] :
       {std::tuple{1100, 72, 2000}, std::tuple{300, 264, 3000}, std::tuple{8192, 4096, 128256}}) {
    Problem p = training(tokens, hidden, vocab, 4096);
    p.dw_dtype = DType::bf16;
    EXPECT_FALSE(sm90::config(p, hopper()).by_slices()) << tokens;
  }
}

TEST(Sm90Config, ShortChunksShareTheDeviceLongOnesDoNot) {
  const auto small = sm90::config(training(8192, 4096, 128256, 265), hopper());
  EXPECT_EQ(small.dx_blocks, 64);
  EXPECT_EQ(small.dw_early, 34);
  const auto large = sm90::config(training(8192, 4096, 128256, 530), hopper());
  EXPECT_EQ(large.dx_blocks, 132);
  EXPECT_EQ(large.dw_early, 4);  // 128 tiles of dX leave 4 of 66 pairs idle in the second wave
}

TEST(Sm90Config, DxAloneTakesTheTileThatLeavesFewerIdle) {
  const auto c = sm90::config(frozen(4096, 128256, 200), hopper());
  EXPECT_EQ(c.chunk_rows, 768);
  EXPECT_EQ(c.dx_tile, sm90::DxTile::tall);  // 64 of 66 pairs instead of 48
  EXPECT_EQ(c.dx_blocks, 132);
  // Of the last 512 rows: one wave of 64, not two of 32.
  EXPECT_EQ(sm90::dx_tiles(frozen(4096, 128256, 200), c, 66, 512).tile, sm90::DxTile::narrow);
  Problem p = frozen(4096, 128256, 256);
  EXPECT_EQ(sm90::config(p, hopper()).chunk_rows, 1024);
  EXPECT_EQ(sm90::config(p, hopper()).dx_tile, sm90::DxTile::square);  // 64 of 66
  EXPECT_EQ(sm90::config(training(8192, 4096, 128256, 265), hopper()).dx_tile,
            sm90::DxTile::square);
}

// A third of the rows of 384 would be multiplied for nothing: 46 tiles of 256 x 128 on 66 pairs.
TEST(Sm90Config, DxAloneOfShortChunksTakesNarrowTiles) {
  const auto c = sm90::config(frozen(2880, 201088, 256), hopper());
  EXPECT_EQ(c.chunk_rows, 512);
  EXPECT_EQ(c.dx_tile, sm90::DxTile::narrow);
}

// A tile of dX takes as long as the vocabulary is: where a chunk has few, smaller ones beside dW,
// on twice as many pairs.
TEST(Sm90Config, FewTilesOfDxAreNarrow) {
  Problem p = training(8192, 2304, 256000, 300);
  p.dw_dtype = p.options.dw_sum = DType::bf16;
  const auto c = sm90::config(p, hopper());
  EXPECT_EQ(c.chunk_rows, 512);
  EXPECT_EQ(c.dx_tile, sm90::DxTile::narrow);
  EXPECT_EQ(c.dx_blocks, 2 * 2 * 18);
  EXPECT_FALSE(c.runs_ahead());
  p.options.workspace_limit_bytes = int64_t{530} << 20;
  EXPECT_EQ(sm90::config(p, hopper()).dx_tile, sm90::DxTile::square);  // 1024 rows
  Problem half = p;
  half.options.workspace_limit_bytes = int64_t{1050} << 20;
  half.options.dw_sum = DType::f32;
  half.hidden_dtype = half.weight_dtype = half.dx_dtype = half.dw_dtype = DType::f16;
  EXPECT_EQ(sm90::config(half, hopper()).dx_tile, sm90::DxTile::square);  // built for bf16 alone
}

// 512 rows would take some MiB more than there is.
TEST(Sm90Config, EvenChunksWhereTheNextWholeOneIsTooLarge) {
  Problem p = training(8192, 2304, 256000, 250);
  p.dw_dtype = p.options.dw_sum = DType::bf16, p.late_factor = p.wants_dx_rest = true;
  const auto c = sm90::config(p, hopper());
  EXPECT_EQ(c.chunk_rows, 480);  // 18 of them; 17 would have 482 rows
  EXPECT_LE(workspace(p) + p.tokens * dx_rest_columns(p.hidden), int64_t{250} << 20);
}

// Summed in bf16 or not: where chunks would be short, slices cost one product more, and less time.
TEST(Sm90Config, AnySumOfDwGoesBySlicesWhereChunksAreShort) {
  Problem p = training(8192, 2304, 256000, 200);
  p.dw_dtype = p.options.dw_sum = DType::bf16, p.late_factor = p.wants_dx_rest = true;
  EXPECT_TRUE(sm90::config(p, hopper()).by_slices());
  EXPECT_LE(workspace(p) + p.tokens * dx_rest_columns(p.hidden), int64_t{200} << 20);
}

// The least plan of one token cuts the vocabulary into 84 slices; half of its logits are 250 KiB.
TEST(Sm90Config, AutoHasRoomForFewTokens) {
  Problem p = training(1, 4096, 128256, 0);
  p.options.workspace_limit_bytes = workspace_auto;
  const Problem q = Operator::limited(sm90_lane(), p, hopper(), nullptr);
  EXPECT_LE(q.options.workspace_limit_bytes, int64_t{64} << 20);
  EXPECT_LE(sm90::config(q, hopper()).ms,
            1.03 * sm90::config(training(1, 4096, 128256, 4096), hopper()).ms);
}

// What a plan is chosen by never grows with the room.
TEST(Sm90Config, ALargerLimitIsNeverSlower) {
  struct Shape {
    int64_t tokens, hidden, vocab;
  };
  for (const Shape& s :
       {Shape{8192, 4096, 128256}, Shape{8192, 2304, 256000}, Shape{8192, 2880, 201088},
        Shape{16384, 8192, 152064}, Shape{1024, 4096, 128256}, Shape{65536, 2048, 32000},
        Shape{8192, 1024, 512000}, Shape{8192, 512, 8192}, Shape{4100, 4096, 50257}})
    for (int kind = 0; kind < 6; ++kind) {
      Problem p = training(s.tokens, s.hidden, s.vocab, 0);
      if (kind == 1) p.wants_dw = false;
      if (kind == 2) p.dw_dtype = DType::bf16;
      if (kind == 3) p.dw_dtype = p.options.dw_sum = DType::bf16;
      if (kind == 4) p.dw_dtype = DType::bf16, p.wants_loss = false, p.has_saved = true;
      if (kind == 5) p.wants_dx = p.wants_dw = false;
      const std::string what =
          fmt::format("{} x {} x {}, kind {}", s.tokens, s.hidden, s.vocab, kind);
      double before = INFINITY;
      for (int64_t limit = workspace(p); limit < int64_t{4} << 30; limit += limit / 16) {
        p.options.workspace_limit_bytes = limit;
        const Planned plan = sm90_lane().plan(p, hopper());
        EXPECT_LE(plan.workspace_bytes, limit) << what;
        EXPECT_LE(plan.predicted_ms, before) << what << ", " << limit << " bytes";
        before = plan.predicted_ms;
      }
    }
}

// Chunks of 256 rows would leave most of the device idle in every wave of dX.
TEST(Sm90Config, DxAloneGoesBySlicesWhereChunksAreShort) {
  const Problem p = frozen(2304, 256000, 200);
  const auto c = sm90::config(p, hopper());
  EXPECT_GT(c.slice_words, 0);
  EXPECT_LE(workspace(p) + p.tokens * dx_rest_columns(p.hidden), int64_t{200} << 20);
}

TEST(Sm90Config, ChunksOf512RowsRunTheNextLogitsBesideDw) {
  const Problem p = training(8192, 4096, 128256, 135);
  const auto c = sm90::config(p, hopper());
  EXPECT_TRUE(c.runs_ahead());
  EXPECT_EQ(c.chunk_rows, 512);
  EXPECT_EQ(c.dx_blocks, 64);
  EXPECT_EQ(c.logits_head_start, 14);  // a third of 1336 tiles on 32 pairs
  EXPECT_LE(workspace(p), int64_t{135} << 20);
  // Not in longer chunks, nor where the second buffer of rows has no room, nor where others read or
  // write the buffer between the products.
  EXPECT_FALSE(sm90::config(training(8192, 4096, 128256, 265), hopper()).runs_ahead());
  EXPECT_LT(sm90::config(training(8192, 4096, 128256, 133), hopper()).chunk_rows, 512);
  EXPECT_FALSE(sm90::config(training(512, 4096, 128256, 135), hopper()).runs_ahead());
  Problem words = p, ranks = p, bias = p, codes = training(8192, 4096, 128256, 150);
  codes.dw_dtype = DType::bf16;
  EXPECT_TRUE(sm90::config(codes, hopper()).sums_in_codes());
  words.top_k = 5;
  ranks.world = 2;
  bias.has_bias = bias.wants_db = true;
  for (const Problem& other : {words, ranks, bias, codes})
    EXPECT_FALSE(sm90::config(other, hopper()).runs_ahead());
  // What the test on a device compares: the same chunks, one after the other.
  for (const auto& [hidden, mib] : {std::pair<int64_t, int64_t>{64, 22}, {256, 22}, {1024, 23}}) {
    const Problem small = training(1700, hidden, 20011, mib);
    const auto ahead = sm90::config(small, hopper());
    EXPECT_TRUE(ahead.runs_ahead()) << hidden;
    forced.ahead = false;
    const auto after = sm90::config(small, hopper());
    forced.ahead.reset();
    EXPECT_FALSE(after.runs_ahead()) << hidden;
    EXPECT_EQ(after.chunk_rows, ahead.chunk_rows) << hidden;
  }
}

TEST(Sm90Config, LossOnlyStoresNothingOfTheSizeOfTheLogits) {
  Problem p = training(8192, 4096, 128256, 32);
  p.wants_dx = p.wants_dw = false;
  EXPECT_EQ(sm90::config(p, hopper()).exp_stride, 0);
  EXPECT_LE(workspace(p), int64_t{32} << 20);
  p.options.workspace_limit_bytes = int64_t{64} << 20;  // each chunk costs its start and its end
  EXPECT_EQ(sm90::config(p, hopper()).chunk_rows, 4096);
}

TEST(Sm90Config, FewTokensTakeTilesThatLeaveNoShortLastWave) {
  const auto of = [](int64_t tokens, int64_t vocab) {
    Problem p = training(tokens, 4096, vocab, 32);
    p.wants_dx = p.wants_dw = false;
    return sm90::config(p, hopper());
  };
  // 66 pairs of blocks: 668 tiles of 192 words leave 2 % of a wave, 501 of 256 leave 59 %.
  const auto eight = of(8, 128256);
  EXPECT_TRUE(eight.online);
  EXPECT_EQ(eight.tile_columns, 256);
  EXPECT_EQ(eight.tiles, 501);
  EXPECT_EQ(of(128, 128256).tile_columns, 256);
  EXPECT_EQ(of(129, 128256).tile_columns, 192);      // its tiles are twice as high
  EXPECT_EQ(of(8, 192 * 66 * 3).tile_columns, 192);  // whole waves
  for (const int64_t vocab : {1, 191, 257, 32000, 50257, 151936, 256000}) {
    const auto c = of(64, vocab);
    EXPECT_EQ(c.tiles, (vocab + c.tile_columns - 1) / c.tile_columns) << vocab;
  }
  EXPECT_EQ(sm90::config(training(64, 4096, 128256, 265), hopper()).tile_columns, 192);
}

TEST(Sm90Config, SavedRowStatesGoBySlicesWhereThatIsFaster) {
  Problem p = training(8192, 4096, 128256, 256);
  p.wants_loss = false, p.has_saved = true;
  const auto c = sm90::config(p, hopper());
  EXPECT_TRUE(c.from_saved() && c.by_slices() && c.dw != DwOutput::direct);
  EXPECT_LE(workspace(p), int64_t{256} << 20);
  p.wants_loss = true;  // the saved states do not say it
  EXPECT_EQ(sm90::config(p, hopper()).slice_words, 0);
  p.wants_loss = false, p.has_upstream_entropy = true;
  EXPECT_EQ(sm90::config(p, hopper()).slice_words, 0);
  p.has_upstream_entropy = false;
  p.options.workspace_limit_bytes = int64_t{135} << 20;  // no room for dX in fp32
  EXPECT_EQ(sm90::config(p, hopper()).slice_words, 0);
}

// dX and dW of a slice share the waves: the widest slice may leave most of the last one empty.
TEST(Sm90Config, SlicesFillTheirLastWave) {
  const auto of = [](int64_t hidden, int64_t vocab, int64_t mib) {
    Problem p = training(8192, hidden, vocab, mib);
    p.dw_dtype = DType::bf16, p.wants_loss = false, p.has_saved = true;
    return sm90::config(p, hopper());
  };
  EXPECT_EQ(of(2304, 256000, 265).slice_words, 11136);  // 396 of dX in 6 waves and 522 of dW in 8
  EXPECT_EQ(of(2880, 201088, 256).slice_words, 8064);   // 506 and 483: 15 waves, one tile short
  EXPECT_EQ(of(2880, 201088, 256).dx_tile, sm90::DxTile::tall);
  EXPECT_EQ(of(4096, 128256, 256).slice_words, 8064);
  EXPECT_EQ(of(4096, 128256, 256).dx_tile, sm90::DxTile::square);  // no row of 8192 is left over
}

TEST(Sm90Config, ThePathFollowsTheOptions) {
  const Problem plain = training(8192, 4096, 128256, 530);
  const auto of = [](Problem p, auto bend) {
    bend(p);
    return sm90::config(p, hopper());
  };
  const auto folded = sm90::config(plain, hopper());
  EXPECT_FALSE(folded.is_wide() || folded.is_transformed() || folded.full || folded.two_terms);
  EXPECT_TRUE(of(plain, [](Problem& p) { p.has_upstream_entropy = true; }).is_transformed());
  const auto capped = [](double cap) {
    return [cap](Problem& p) { p.options.softcap = cap, p.options.label_smoothing = 0.1; };
  };
  EXPECT_TRUE(of(plain, capped(30)).is_transformed());
  EXPECT_FALSE(of(plain, capped(30)).is_wide());
  EXPECT_TRUE(of(plain, capped(60)).is_wide());
  const auto words = of(plain, [](Problem& p) { p.top_k = 5; });
  EXPECT_TRUE(words.full && !words.is_transformed() && words.kept == 5);
  EXPECT_TRUE(of(plain, [](Problem& p) { p.has_targets = false; }).is_wide());
  const auto half =
      of(plain, [](Problem& p) { p.hidden_dtype = p.weight_dtype = p.dx_dtype = DType::f16; });
  EXPECT_TRUE(half.is_wide() && half.f16 && !half.two_terms);
  EXPECT_EQ(half.exp_stride, 2 * folded.exp_stride);  // fp32 where exp(z - shift) had 16 bits
  const auto small = sm90::config(training(64, 64, 1000, 530), hopper());
  EXPECT_TRUE(small.is_wide() && small.two_terms);
}

// What a benchmark's size decides, a test decides by name, so that truth can judge it in small
// cases; left alone, the size of the weight decides at its limit.
TEST(Sm90Config, AWayCanBeForced) {
  const auto of = [](const Problem& p, const char* way) {
    const Forced before = forced;
    EXPECT_TRUE(force(way)) << way;
    const auto c = sm90::config(p, hopper());
    forced = before;
    return c;
  };
  const Problem small = training(700, 264, 600, 530), least = training(64, 64, 1000, 1);
  EXPECT_FALSE(of(least, "folded").two_terms || of(least, "folded").is_wide());
  EXPECT_FALSE(of(least, "one_term").two_terms);
  EXPECT_TRUE(of(small, "two_terms").two_terms && of(small, "two_terms").is_wide());
  EXPECT_TRUE(of(small, "wide").is_wide() && !of(small, "wide").two_terms);
  EXPECT_TRUE(of(least, "transformed").is_transformed() && of(least, "transformed").full);
  Problem rounds = training(700, 264, 2000, 530);
  rounds.dw_dtype = DType::bf16;
  EXPECT_GT(of(rounds, "slices").slice_words, 0);
  EXPECT_EQ(of(rounds, "chunks").slice_words, 0);
  const Problem ahead = training(8192, 4096, 128256, 135);
  EXPECT_TRUE(sm90::config(ahead, hopper()).runs_ahead());
  EXPECT_FALSE(of(ahead, "not_ahead").runs_ahead());
  EXPECT_FALSE(force("nothing of the kind"));
  EXPECT_EQ(forced, Forced{});
  EXPECT_TRUE(sm90::config(training(64, 1024, 128, 530), hopper()).two_terms);   // 2^17
  EXPECT_FALSE(sm90::config(training(64, 1032, 128, 530), hopper()).two_terms);  // above it
}

TEST(Sm90Config, YieldsWhereLaneCudaIsFaster) {
  Problem p = training(8192, 4096, 128256, 530);
  EXPECT_FALSE(sm90::yields(p));
  p.hidden_dtype = p.weight_dtype = p.dx_dtype = DType::f16;
  EXPECT_TRUE(sm90::yields(p));
  EXPECT_FALSE(sm90::decline(p, hopper()));  // by name it runs
  p.wants_dx = p.wants_dw = false;
  EXPECT_FALSE(sm90::yields(p));  // a loss alone is faster here
  p.options.workspace_limit_bytes = int64_t{120} << 20;
  EXPECT_TRUE(sm90::yields(p));  // unless 256 rows of fp32 logits break the limit
}

TEST(Sm90Config, DeclinesByName) {
  auto reason = [](const Problem& p, DeviceFacts d = hopper()) {
    return sm90::decline(p, d).value_or("");
  };
  EXPECT_EQ(reason(training(8192, 4096, 128256, 530)), "");
  EXPECT_NE(reason(training(8192, 4092, 128256, 530)).find("hidden = 4092"), std::string::npos);
  Problem p = training(8, 64, 100, 1);
  p.hidden_dtype = DType::f32;
  EXPECT_NE(reason(p).find("fp32"), std::string::npos);
  p = training(8, 64, 100, 1);
  p.alignment_bytes = 8;
  EXPECT_NE(reason(p).find("8 bytes"), std::string::npos);
  p = training(8, 64, 100, 1);
  p.weight_col_stride = 2;
  EXPECT_NE(reason(p).find("column stride 2"), std::string::npos);
  DeviceFacts ampere = hopper();
  ampere.sm = 80;
  EXPECT_NE(reason(training(8, 64, 100, 1), ampere).find("80"), std::string::npos);
}

}  // namespace
}  // namespace talea::lce
#endif
