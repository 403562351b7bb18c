// What: how lane cuda cuts a problem, without a GPU: pieces, their buffer, the limit, ranks.
// Why: dz is written into the buffer that still holds logits; a row too early would be silent.
// Never: needs a device.
#ifdef TALEA_WITH_CUDA
#include <gtest/gtest.h>

#include "ops/linear_cross_entropy/cuda/products.hpp"
#include "ops/linear_cross_entropy/forced.hpp"
#include "ops/linear_cross_entropy/outputs.hpp"

namespace talea::lce::cuda {
namespace {

Problem problem(int64_t tokens, int64_t hidden, int64_t vocab, DType dtype, int64_t limit_mib) {
  Problem p;
  p.tokens = tokens;
  p.hidden = p.hidden_row_stride = p.weight_row_stride = p.dx_row_stride = p.dw_row_stride = hidden;
  p.vocab = p.vocab_local = p.vocab_stored = vocab;
  p.hidden_dtype = p.weight_dtype = p.dx_dtype = dtype;
  p.dw_dtype = DType::f32;
  p.device = DeviceKind::cuda;
  p.has_targets = p.wants_loss = p.wants_dx = p.wants_dw = p.accumulate_dw = true;
  p.options.workspace_limit_bytes = limit_mib << 20;
  return p;
}

DeviceFacts h200() {
  DeviceFacts d;
  d.sm = 90;
  d.sm_count = 132;
  return d;
}

int64_t workspace(const Problem& p) { return cuda_lane().plan(p, h200()).workspace_bytes; }

// The fp32 sum of a bf16 dW is 2 GiB; in the dtype of the weight there is none.
TEST(CudaPlan, DwSummedInTheDtypeOfTheWeightNeedsNoSum) {
  Problem p = problem(8192, 4096, 128256, DType::bf16, 530);
  p.dw_dtype = DType::bf16, p.accumulate_dw = false;
  EXPECT_GT(workspace(p), int64_t{2000} << 20);
  p.options.dw_sum = DType::bf16;
  EXPECT_LE(workspace(p), int64_t{530} << 20);
  const Plan several = plan(p, h200());
  EXPECT_TRUE(several.dw_direct && several.chunks > 1);
  EXPECT_TRUE(several.targets_apart);
  // A share of soft targets cannot be kept apart: rounded by every chunk it would show.
  Problem soft = p;
  soft.has_targets = false, soft.soft_targets = SoftTargets::dense;
  EXPECT_FALSE(plan(soft, h200()).dw_direct);
  EXPECT_GT(workspace(soft), int64_t{2000} << 20);
  // One chunk rounds everything once as it is.
  p.tokens = 128, p.options.workspace_limit_bytes = int64_t{2000} << 20;
  EXPECT_TRUE(plan(p, h200()).dw_direct && !plan(p, h200()).targets_apart);
}

// Through autograd a bf16 dW is kept in fp32 until its factor is known, 1 GiB more than is
// returned. Auto gives the chunks room beside it: with the least there is, 128 rows, the call
// took 4.2 of the products' time on an H200.
TEST(CudaPlan, AutoLeavesRoomForChunksBesideTheSum) {
  for (const bool late : {true, false}) {
    Problem p = problem(8192, 4096, 128256, DType::bf16, 0);
    p.accumulate_dw = false;
    p.late_factor = late;
    p.options.workspace_limit_bytes = workspace_auto;
    const Lane lane = cuda_lane();
    const Problem q = Operator::limited(lane, p, h200(), nullptr);
    const Plan chosen = plan(q, h200());
    EXPECT_GE(chosen.chunk_rows, 1024);
    Problem most = q;
    most.options.workspace_limit_bytes = 2 * p.tokens * p.vocab;  // half of eager's logits
    EXPECT_LE(q.options.workspace_limit_bytes, most.options.workspace_limit_bytes);
    EXPECT_LE(predicted_ms(q, chosen), 1.03 * predicted_ms(most, plan(most, h200())));
  }
}

// Row by row in the order of the launches: nothing unread is overwritten, nothing leaves the
// buffer.
void walk(const Plan& plan, int64_t rows, int64_t buffer) {
  int64_t next = 0;
  for (const Piece& piece : pieces(plan, rows, buffer)) {
    ASSERT_EQ(piece.begin, next);
    ASSERT_EQ(piece.rows % plan.granule_rows, 0);
    next += piece.rows;
    if (!is_16bit(plan.compute)) continue;
    const int64_t lead = piece.source - piece.begin;
    ASSERT_GT(lead, 0) << "the first row would overwrite itself for ever";
    ASSERT_LE(piece.source + 2 * piece.rows, buffer);
    ASSERT_GE(piece.source, piece.begin);  // the dz of earlier pieces lies before
    for (int64_t first = 0, end = 0; first < piece.rows; first = end) {
      end = std::min(piece.rows, lead + 2 * first);
      ASSERT_GT(end, first);
      ASSERT_LE(piece.begin + end, piece.source + 2 * first);
    }
  }
  ASSERT_EQ(next, rows);
}

TEST(CudaPlan, PiecesNeverOverwriteLogitsThatAreStillNeeded) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (int64_t granules = 1; granules < 150; ++granules) {
      Plan plan;
      plan.compute = dtype;
      plan.with_gradient = true;
      plan.granule_rows = is_16bit(dtype) ? 128 : 32;
      const int64_t rows = granules * plan.granule_rows, buffer = buffer_rows(plan, rows);
      walk(plan, rows, buffer);
      for (int64_t fewer = 1; fewer < granules; fewer += 3)  // a last chunk that is not full
        walk(plan, fewer * plan.granule_rows, buffer);
    }
}

TEST(CudaPlan, ChunksUseTheLimitAndKeepIt) {
  for (const int64_t mib : {135, 265, 530, 1060}) {
    const Problem p = problem(8192, 4096, 128256, DType::bf16, mib);
    const Plan r = plan(p, h200());
    const int64_t bytes = workspace(p);
    EXPECT_LE(bytes, mib << 20) << mib;
    EXPECT_GE(r.chunk_rows * r.chunks, 8192);
    // Logits of a whole chunk in fp32 would not fit: the pieces are what makes room for its dz.
    if (mib == 530) {
      EXPECT_GE(r.chunk_rows, 1536);
    }
  }
}

// 132 multiprocessors, 16 tiles of 256 across a hidden size of 4096.
TEST(CudaPlan, DxFillsWholeWaves) {
  using Tiles = device::Product::Tiles;
  const auto cut = [](int64_t rows, int64_t hidden) { return dx_cut(rows, hidden, 132).parts; };
  EXPECT_EQ(cut(1024, 4096).size(), 1u);  // one wave of large tiles, nearly full
  EXPECT_EQ(cut(1024, 4096)[0].tiles, Tiles::large);
  ASSERT_EQ(cut(1664, 4096).size(), 2u);  // 640 rows fill a wave of narrow tiles
  EXPECT_EQ(cut(1664, 4096)[0].rows, 1024);
  EXPECT_EQ(cut(1664, 4096)[1].tiles, Tiles::narrow);
  ASSERT_EQ(cut(1536, 4096).size(), 1u);  // three waves of 128 x 128
  EXPECT_EQ(cut(1536, 4096)[0].tiles, Tiles::square);
  ASSERT_EQ(cut(1664, 3584).size(), 1u);
  EXPECT_EQ(cut(1664, 3584)[0].tiles, Tiles::square);
  EXPECT_EQ(dx_cut(1664, 4096, 0).parts[0].tiles, Tiles::library);  // not known: one product
  EXPECT_EQ(cut(128, 0).size(), 1u);
  for (int64_t rows = 128; rows < 9000; rows += 128)
    for (const int64_t hidden : {64, 1000, 4096, 40000}) {
      int64_t all = 0;
      for (const DxPart& part : cut(rows, hidden)) {
        EXPECT_GT(part.rows, 0);
        EXPECT_EQ(part.rows % 128, 0);
        all += part.rows;
      }
      EXPECT_EQ(all, rows);
    }
}

// Equal chunks of 4096 rows would be 1408: three waves of 128 x 128 tiles, the last half empty.
TEST(CudaPlan, ChunksAreCutByWholeWaves) {
  EXPECT_EQ(plan(problem(4096, 4096, 128256, DType::bf16, 530), h200()).chunk_rows, 1536);
  EXPECT_EQ(plan(problem(8192, 4096, 128256, DType::bf16, 530), h200()).chunk_rows, 1664);
  // 1152 rows would leave a last chunk of 128.
  EXPECT_EQ(plan(problem(8192, 2880, 201088, DType::bf16, 620), h200()).chunk_rows, 1024);
  DeviceFacts older;
  older.sm = 80;
  older.sm_count = 108;
  EXPECT_EQ(plan(problem(4096, 4096, 128256, DType::bf16, 530), older).chunk_rows, 1408);
}

TEST(CudaPlan, LossAloneKeepsASmallLimit) {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const int64_t mib : {16, 32, 64, 530}) {
      Problem p = problem(8192, 4096, 128256, dtype, mib);
      p.wants_dx = p.wants_dw = p.accumulate_dw = false;
      p.top_k = 5;
      const Plan r = plan(p, h200());
      EXPECT_LE(workspace(p), mib << 20) << name_of(dtype) << " " << mib;
      EXPECT_FALSE(r.over_limit);
      int64_t next = 0, parts = 0;
      for (const Panel& panel : panels(p, r)) {
        EXPECT_EQ(panel.begin, next);
        EXPECT_EQ(panel.begin, parts * part_columns);
        EXPECT_LE(panel.columns, r.logits_stride);
        next += panel.columns;
        parts += panel.parts;
      }
      EXPECT_EQ(next, 128256);
      EXPECT_EQ(parts, r.parts);
    }
}

// A 16-bit dW is summed in fp32: no chunk is small enough for a limit below that.
TEST(CudaPlan, ALimitThatCannotBeKeptIsNamed) {
  Problem p = problem(8192, 4096, 128256, DType::bf16, 256);
  p.dw_dtype = DType::bf16;
  p.accumulate_dw = false;
  EXPECT_TRUE(plan(p, h200()).over_limit);
  const int64_t least = workspace(p);
  bool said = false;
  for (const std::string& line : details(p, cuda_lane().plan(p, h200())))
    said = said || line.find(std::to_string(least)) != std::string::npos;
  EXPECT_TRUE(said) << "the least bytes are not named";
  p.options.workspace_limit_bytes = least;
  EXPECT_FALSE(plan(p, h200()).over_limit);
}

// Gradients that wait for a late factor lie in fp32, and their room counts against the limit. A
// call is planned by the room that the question named: with that much the plan is the same.
TEST(CudaPlan, WhatWaitsForALateFactorCounts) {
  for (const int64_t mib : {60, 1400, 1700, 2300}) {
    Problem p = problem(mib < 1000 ? 700 : 8192, mib < 1000 ? 256 : 4096,
                        mib < 1000 ? 5003 : 128256, DType::bf16, mib);
    p.dx_dtype = p.dw_dtype = DType::f32;
    p.late_factor = true, p.accumulate_dw = false;
    const int64_t kept = kept_beside(p), bytes = workspace(p);
    ASSERT_GT(kept, 0);
    EXPECT_FALSE(plan(p, h200()).over_limit) << mib;
    EXPECT_LE(bytes + kept, mib << 20);
    p.options.workspace_limit_bytes = bytes + kept;
    EXPECT_EQ(workspace(p), bytes) << mib;
  }
}

// Columns that do not fill 16 bytes are cut off, in 16 bits; the padded ones stay in the buffer.
TEST(CudaPlan, AnOddVocabularyHasATail) {
  for (const auto& [vocab, tail] : std::vector<std::pair<int64_t, int64_t>>{
           {50257, 17}, {50304, 0}, {16032, 0}, {7, 7}, {65, 1}, {16385, 1}, {128256, 0}}) {
    const Plan r = plan(problem(300, 64, vocab, DType::bf16, 64), h200());
    EXPECT_EQ(r.tail, tail) << vocab;
    if (tail > 0) {
      EXPECT_LE(vocab - tail + tail_width, r.logits_stride) << vocab;
    }
    EXPECT_EQ(plan(problem(300, 64, vocab, DType::f32, 64), h200()).tail, 0);
  }
}

TEST(CudaPlan, RanksOfUnevenShardsCutAlike) {
  int64_t rows = 0;
  for (const int64_t local : {0, 1000, 64000, 63256}) {
    Problem p = problem(8192, 4096, 128256, DType::bf16, 200);
    p.world = 4;
    p.vocab_local = p.vocab_stored = local;
    const int64_t here = plan(p, h200()).chunk_rows;
    if (rows == 0) rows = here;
    EXPECT_EQ(here, rows) << local;
  }
}

// Weights of up to 2^22 elements keep dz in two terms; a test says so by name.
TEST(CudaPlan, AWayCanBeForced) {
  const auto terms = [](const Problem& p) { return plan(p, h200()).two_terms; };
  const Problem small = problem(700, 264, 600, DType::bf16, 64);
  const Problem large = problem(700, 264, 16000, DType::bf16, 64);
  EXPECT_TRUE(terms(small));
  EXPECT_FALSE(terms(large));
  EXPECT_TRUE(terms(problem(64, 4096, 1024, DType::bf16, 64)));   // 2^22
  EXPECT_FALSE(terms(problem(64, 4096, 1025, DType::bf16, 64)));  // above it
  EXPECT_TRUE(force("one_term"));
  EXPECT_FALSE(terms(small));
  EXPECT_TRUE(force("two_terms"));
  EXPECT_TRUE(terms(large));
  EXPECT_FALSE(terms(problem(700, 264, 600, DType::f32, 64)));  // fp32 has one term
  forced = {};
}

}  // namespace
}  // namespace talea::lce::cuda
#endif
