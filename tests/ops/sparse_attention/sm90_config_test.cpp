// What: what lane sm90 takes and how it cuts it, without a GPU.
// Why: shared memory that does not fit, or a grid that does not hold the queries, fails at a launch.
// Never: needs a device.
#ifdef TALEA_WITH_CUDA
#include <gtest/gtest.h>

#include "ops/sparse_attention/sm90/config.hpp"

namespace talea::sparse_attention::sm90 {
namespace {

Problem problem(int64_t dim, int64_t value_dim, int64_t heads) {
  Problem p;
  p.pass = Pass::forward;
  p.device = DeviceKind::cuda;
  p.queries = 4096, p.keys = p.keys_stored = 8192, p.slots = 2048;
  p.heads = p.total_heads = heads;
  p.dim = dim, p.value_dim = value_dim;
  p.q_dtype = p.kv_dtype = p.o_dtype = DType::bf16;
  p.q_stride = {0, heads * dim, dim};
  p.kv_stride = {0, dim, 0};
  p.wants_o = true;
  return p;
}

DeviceFacts h200() {
  DeviceFacts d;
  d.cuda_devices = 1;
  d.sm = 90;
  d.sm_count = 132;
  return d;
}

void expect_declined(const Problem& p, const std::string& part) {
  const auto reason = decline(p, h200());
  ASSERT_TRUE(reason) << part;
  EXPECT_NE(reason->find(part), std::string::npos) << *reason;
}

TEST(AttentionSm90Config, EverySizeFitsSharedMemory) {
  for (int64_t dim = 16; dim <= most_columns; dim += 16)
    for (int64_t value = 16; value <= std::min(dim, most_value_columns); value += 16) {
      const Problem p = problem(dim, value, 128);
      EXPECT_FALSE(decline(p, h200())) << dim << "/" << value;
      const Config c = config(p, h200());
      EXPECT_LE(c.shared_bytes, 232448) << dim << "/" << value;
      EXPECT_GE(2 * c.half, value);
      const TilePlan t = tile_plan(dim, c.half);
      EXPECT_GE(t.columns * chunk_columns, dim);
      // Weights beside the keys lie in no column of a value.
      EXPECT_TRUE(t.apart || t.keys * chunk_columns > 2 * c.half) << dim << "/" << value;
    }
}

TEST(AttentionSm90Config, AQueryAndSixtyFourHeadsATurn) {
  Config c = config(problem(576, 512, 128), h200());
  EXPECT_EQ(c.head_tiles, 2);
  EXPECT_EQ(c.work, 2 * 4096);
  EXPECT_EQ(c.blocks, 132);
  Problem p = problem(128, 64, 66);
  p.groups = 2;
  p.queries = 100000;
  c = config(p, h200());
  EXPECT_EQ(c.head_tiles, 1);  // 33 of a group
  EXPECT_EQ(c.work, 200000);
  p.heads = p.total_heads = 0;
  EXPECT_EQ(config(p, h200()).head_tiles, 1);  // indices are counted all the same
  p.queries = 0;
  EXPECT_EQ(config(p, h200()).blocks, 0);
}

TEST(AttentionSm90Config, MemoryOnlyToCount) {
  Problem p = problem(576, 512, 16);
  EXPECT_FALSE(config(p, h200()).counts);
  p.wants_status = true;
  EXPECT_TRUE(config(p, h200()).counts);
  p.wants_status = false;
  p.options.index_check = IndexCheck::checked;
  EXPECT_TRUE(config(p, h200()).counts);
}

TEST(AttentionSm90Config, PackedRows) {
  Problem p = problem(576, 512, 128);
  p.options.kv_storage = KvStorage::fp8_656;
  p.options.fp8_path = Fp8Path::in_kernel;
  p.kv_dtype = DType::u8;
  p.kv_stride = {0, 656, 0};
  EXPECT_FALSE(decline(p, h200()));
  EXPECT_EQ(config(p, h200()).half, 256);
  p.kv_stride.row = 664;
  expect_declined(p, "kv: stride 664");
  p.kv_stride.row = 656;
  p.q_dtype = DType::f16;
  expect_declined(p, "multiplied in bf16");
}

TEST(AttentionSm90Config, DeclinesByName) {
  Problem p = problem(592, 512, 8);
  expect_declined(p, "shared memory");
  expect_declined(problem(576, 528, 8), "value_dim = 528");
  expect_declined(problem(72, 64, 8), "multiples of 16");
  p = problem(128, 64, 8);
  p.kv_stride.row = 132;
  expect_declined(p, "kv: stride 132");
  p = problem(128, 64, 8);
  p.q_dtype = DType::f32;
  expect_declined(p, "fp32");
  p = problem(128, 64, 8);
  p.options.operands = Operands::split;
  expect_declined(p, "split");
  p = problem(128, 64, 8);
  p.options.kv_storage = KvStorage::fp8_scaled;
  expect_declined(p, "kv_storage");
  p = problem(128, 64, 8);
  p.pass = Pass::backward;
  expect_declined(p, "forward pass alone");
  DeviceFacts older = h200();
  older.sm = 80;
  EXPECT_NE(decline(problem(128, 64, 8), older)->find("sm_80"), std::string::npos);
}

}  // namespace
}  // namespace talea::sparse_attention::sm90
#endif
