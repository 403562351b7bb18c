// What: what ranks of lane sm90 decide: the same cut of a call on each, within the limit.
// Why: ranks that cut a call differently wait for each other for ever.
// Never: launches a kernel.
#ifdef TALEA_WITH_CUDA
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ops/linear_cross_entropy/sm90_problems.hpp"

namespace talea::lce {
namespace {

using sm90::DwOutput;

TEST(Sm90Config, RanksCutTheCallAlike) {
  Problem p = training(8192, 4096, 128256, 135);
  p.world = 4;
  p.vocab_local = p.vocab_stored = 32064;
  const auto even = sm90::config(p, hopper());
  for (const int64_t local : {int64_t{0}, int64_t{1}, int64_t{100000}}) {
    p.vocab_local = p.vocab_stored = local;
    EXPECT_EQ(sm90::config(p, hopper()).chunk_rows, even.chunk_rows) << local << " local words";
  }
}

// Worlds larger than any that was there: shards that no tile divides, tokens of every rank in one
// call; the plan keeps its limit and gives every rank the same chunks.
TEST(Sm90Config, LargeWorldsKeepTheirLimitAndCutAlike) {
  struct Shape {
    int64_t tokens, hidden, vocab;
  };
  for (const Shape& s :
       {Shape{8192, 4096, 128256}, Shape{8192, 2304, 256000}, Shape{16384, 8192, 152064}})
    for (const int world : {8, 16, 64})
      for (const bool sequence : {false, true})
        for (const bool main_grad : {false, true}) {
          Problem p = training(s.tokens, s.hidden, s.vocab, 530);
          p.world = world, p.sequence_parallel = sequence;
          p.dw_dtype = main_grad ? DType::f32 : DType::bf16, p.accumulate_dw = main_grad;
          const int64_t even = (s.vocab + world - 1) / world;
          p.vocab_local = p.vocab_stored = even;
          const auto c = sm90::config(p, hopper());
          const std::string at =
              fmt::format("{} ranks, {} x {} x {}, sequence {}, main_grad {}", world, s.tokens,
                          s.hidden, s.vocab, sequence, main_grad);
          const int64_t gathered =
              sequence ? (2 + 4) * s.tokens * s.hidden : 0;  // all tokens, and their fp32 dX
          if (gathered < p.options.workspace_limit_bytes) {
            EXPECT_LE(workspace(p), p.options.workspace_limit_bytes) << at;
            EXPECT_LE(c.chunks, 8) << at;
          }
          p.vocab_local = p.vocab_stored =
              s.vocab - (world - 1) * (even - 1);  // a last, uneven one
          EXPECT_EQ(sm90::config(p, hopper()).chunk_rows, c.chunk_rows) << at;
        }
}

// A rank with a larger shard went another way than the others, and waited for exchanges that never
// came.
TEST(Sm90Config, RanksKeepARestOfDwWhereAnEvenShardHasRoom) {
  for (const int64_t mib : {64, 135, 265, 330, 390, 400, 530, 700, 2100}) {
    Problem p = training(8192, 4096, 128256, mib);
    p.world = 2, p.dw_dtype = DType::bf16, p.late_factor = p.wants_rest = true;
    const auto kept = [&](int64_t words) {
      p.vocab_local = p.vocab_stored = words, p.rest_bytes = 0;
      const int64_t bytes = sm90::rest_bytes(p, hopper(), sm90::config(p, hopper()));
      p.rest_bytes = bytes;
      if (bytes > 0) {
        EXPECT_EQ(sm90::config(p, hopper()).dw, DwOutput::split) << mib;
      }
      return bytes;
    };
    const int64_t even = kept(64128), more = kept(80160), less = kept(48096);
    EXPECT_EQ(even > 0, more > 0) << mib;
    EXPECT_EQ(even > 0, less > 0) << mib;
    EXPECT_LE(less, even);
    EXPECT_LE(even, more);
  }
}

TEST(Sm90Config, RanksSumDxInHalvesWhereTheProductsTakeNoMoreWaves) {
  const auto over = [](int world, int64_t tokens, int64_t hidden) {
    Problem p = training(tokens, hidden, 128256, 730);
    p.world = world;
    p.vocab_local = p.vocab_stored = (128256 + world - 1) / world;
    return sm90::config(p, hopper());
  };
  const auto four = over(4, 8192, 4096);  // 512 tiles: 8 waves of 66 pairs, and of 64
  EXPECT_EQ(four.chunk_rows, 8192);
  EXPECT_EQ(four.dx_part_rows, 4096);
  EXPECT_EQ(four.dx_part_blocks, 128);
  EXPECT_EQ(over(2, 8192, 4096).dx_part_rows, 2048);
  EXPECT_EQ(over(1, 8192, 4096).dx_part_rows, over(1, 8192, 4096).chunk_rows);
  const auto narrow = over(4, 256, 4096);  // one wave either way
  EXPECT_EQ(narrow.dx_part_rows, narrow.chunk_rows);
  EXPECT_EQ(narrow.dx_part_blocks, 132);
}

}  // namespace
}  // namespace talea::lce
#endif
