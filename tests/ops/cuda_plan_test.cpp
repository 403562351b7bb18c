// What: how lane cuda cuts a problem, without a GPU: pieces, their buffer, the limit, ranks.
// Why: dz is written into the buffer that still holds logits; a row too early would be silent.
// Never: needs a device.
#ifdef TALEA_WITH_CUDA
#include <gtest/gtest.h>

#include "ops/linear_cross_entropy/cuda/plan.hpp"

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
    const Plan r = plan(p, 90);
    const int64_t bytes = cuda::workspace_bytes(p);
    EXPECT_LE(bytes, mib << 20) << mib;
    EXPECT_GE(r.chunk_rows * r.chunks, 8192);
    // Logits of a whole chunk in fp32 would not fit: the pieces are what makes room for its dz.
    if (mib == 530) {
      EXPECT_GE(r.chunk_rows, 1536);
    }
  }
}

// 132 multiprocessors, 16 tiles of 256 across a hidden size of 4096.
TEST(CudaPlan, DxLeavesAPartlyFilledWaveToNarrowTiles) {
  EXPECT_EQ(dx_first_rows(1024, 4096, 132), 1024);  // one wave, nearly full
  EXPECT_EQ(dx_first_rows(1664, 4096, 132), 1024);  // 640 rows fill a wave of narrow tiles
  EXPECT_EQ(dx_first_rows(2048, 4096, 132), 2048);
  EXPECT_EQ(dx_first_rows(128, 4096, 132), 128);
  EXPECT_EQ(dx_first_rows(1664, 4096, 0), 1664);  // not known: one product
  for (int64_t rows = 128; rows < 9000; rows += 128)
    for (const int64_t hidden : {64, 1000, 4096, 40000}) {
      const int64_t first = dx_first_rows(rows, hidden, 132);
      EXPECT_GT(first, 0);
      EXPECT_LE(first, rows);
      EXPECT_EQ(first % 128, 0);
    }
}

TEST(CudaPlan, RanksOfUnevenShardsCutAlike) {
  int64_t rows = 0;
  for (const int64_t local : {0, 1000, 64000, 63256}) {
    Problem p = problem(8192, 4096, 128256, DType::bf16, 200);
    p.world = 4;
    p.vocab_local = p.vocab_stored = local;
    const int64_t here = plan(p, 90).chunk_rows;
    if (rows == 0) rows = here;
    EXPECT_EQ(here, rows) << local;
  }
}

}  // namespace
}  // namespace talea::lce::cuda
#endif
