// What: which selections lane sm90 takes and how it cuts them, without a GPU.
// Why: a limit that is not kept, or a cut that leaves processors idle, shows on a device alone.
// Never: needs a device.
#ifdef TALEA_WITH_CUDA
#include <gtest/gtest.h>

#include "ops/sparse_attention/sm90/config.hpp"
#include "ops/sparse_attention/sm90/index_config.hpp"

namespace talea::sparse_attention::sm90 {
namespace {

DeviceFacts h200() {
  DeviceFacts d;
  d.cuda_devices = 1;
  d.sm = 90;
  d.sm_count = 132;
  return d;
}

Problem selection(int64_t queries, int64_t keys, int64_t heads, int64_t dim = 128) {
  Problem p;
  p.pass = Pass::select;
  p.device = DeviceKind::cuda;
  p.queries = queries, p.keys = p.keys_stored = keys, p.slots = 2048;
  p.index_heads = heads, p.index_dim = dim;
  p.index_q_dtype = DType::bf16;
  p.q_stride = {0, heads * dim, dim};
  p.kv_stride = {0, dim, 0};
  return p;
}

TEST(AttentionSm90IndexConfig, WholeWavesWithinTheLimit) {
  const IndexConfig c = index_config(selection(32768, 32768, 64), h200());
  EXPECT_EQ(c.heads, 64);
  EXPECT_EQ(c.rows, 8 * 132);  // 132 MiB of scores; two waves would be 264
  EXPECT_EQ(c.stride, 32768);
  EXPECT_EQ(c.unit_keys, 8192);
  EXPECT_EQ(index_config(selection(32768, 32768, 32), h200()).rows, 2032);  // of 2112 of a wave
  EXPECT_EQ(index_config(selection(3, 100, 8), h200()).rows, 3);
}

TEST(AttentionSm90IndexConfig, EveryLimitIsKeptFromTheLeastOn) {
  for (const int64_t keys : {1, 1000, 32768, 200000})
    for (const int64_t heads : {1, 16, 17, 64, 100})
      for (const int64_t mib : {0, 1, 3, 16, 256, 4096}) {
        Problem p = selection(5000, keys, heads);
        p.options.workspace_limit_bytes = mib << 20;
        const IndexConfig c = index_config(p, h200());
        EXPECT_GE(c.rows, 1);
        EXPECT_LE(c.rows, p.queries);
        if (c.rows > 1) {
          EXPECT_LE(bytes_of(c), p.options.workspace_limit_bytes);
        }
        EXPECT_EQ(c.unit_keys % index_keys, 0);
      }
}

TEST(AttentionSm90IndexConfig, E4m3KeysAreCopiedWhereRowsAreNoWords) {
  Problem p = selection(32768, 32768, 64);
  p.index_q_dtype = DType::f8_e4m3;
  EXPECT_FALSE(decline(p, h200()));
  EXPECT_EQ(index_config(p, h200()).packed, 0);
  p = selection(6, 1000, 64, 24);
  p.index_q_dtype = DType::f8_e4m3;
  const IndexConfig c = index_config(p, h200());
  EXPECT_EQ(c.pitch, 32);
  EXPECT_EQ(c.packed, 32 * 1000);
  EXPECT_GE(bytes_of(c), 4 * c.rows * c.stride + c.packed);
  p = selection(6, 1, 64, 24);
  p.index_q_dtype = DType::f8_e4m3;
  p.kv_stride.row = 32;  // of a single row it is none
  EXPECT_EQ(index_config(p, h200()).pitch, 32);
  p = selection(6, 1000, 64, 32);
  p.index_q_dtype = DType::f8_e4m3;
  p.batch = 2;
  p.kv_stride.batch = 32008;
  EXPECT_EQ(index_config(p, h200()).packed, 32 * 1000);
}

TEST(AttentionSm90IndexConfig, FewQueriesShareOutTheirKeys) {
  const IndexConfig c = index_config(selection(1, 131072, 64), h200());
  EXPECT_EQ(c.unit_keys, 1024);  // 128 blocks
}

TEST(AttentionSm90IndexConfig, SharedMemoryFits) {
  for (int64_t dim = 8; dim <= most_index_columns; dim += 8)
    for (const bool e4m3 : {false, true})
      EXPECT_LE(index_shared_bytes(index_chunks(dim, e4m3)), 232448) << dim;
}

TEST(AttentionSm90IndexConfig, DeclinesByName) {
  const auto expect = [](const Problem& p, const std::string& part) {
    const auto reason = decline(p, h200());
    ASSERT_TRUE(reason) << part;
    EXPECT_NE(reason->find(part), std::string::npos) << *reason;
  };
  EXPECT_FALSE(decline(selection(10, 100, 64), h200()));
  EXPECT_FALSE(decline(selection(10, 100, 300), h200()));
  expect(selection(10, 100, 64, 136), "index_dim = 136");
  expect(selection(10, 100, 64, 12), "index_dim = 12");
  Problem p = selection(10, 100, 64);
  p.index_q_dtype = DType::f32;
  expect(p, "index_q of fp32");
  p = selection(10, 100, 64);
  p.kv_stride.row = 132;
  expect(p, "index_k: stride 132");
  p.kv_stride.row = 0;
  expect(p, "rows lie in each other");
  p = selection(10, 100, 64);
  p.alignment_bytes = 8;
  expect(p, "multiples of 8 bytes");
}

}  // namespace
}  // namespace talea::sparse_attention::sm90
#endif
