// What: what lane sm90 takes and how it cuts it, without a GPU.
// Why: shared memory that does not fit, or a grid that does not hold the queries, fails at a launch.
// Never: needs a device.
#ifdef TALEA_WITH_CUDA
#include <gtest/gtest.h>

#include "ops/sparse_attention/sm90/backward_config.hpp"
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
      EXPECT_LE(c.narrow ? narrow_blocks(narrow_wide(dim, value)) * (c.shared_bytes + 1024) : 0,
                233472);
      const TilePlan t = tile_plan(dim, c.half);
      EXPECT_GE(t.columns * chunk_columns, dim);
      // Weights beside the keys lie in no column of a value.
      EXPECT_TRUE(t.apart || t.keys * chunk_columns > 2 * c.half) << dim << "/" << value;
    }
}

TEST(AttentionSm90Config, TwoPairsOfTilesWhereThereIsRoom) {
  EXPECT_EQ(tile_plan(208, 64).ring, 2);
  EXPECT_EQ(tile_plan(256, 128).ring, 2);
  EXPECT_EQ(tile_plan(320, 128).ring, 2);
  EXPECT_EQ(tile_plan(336, 128).ring, 1);
  EXPECT_EQ(tile_plan(336, 64).ring, 1);
  EXPECT_EQ(tile_plan(320, 256).ring, 1);
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

TEST(AttentionSm90Config, NarrowRowsHaveABlockAWork) {
  const auto narrow = [](int64_t dim, int64_t value) {
    const Config c = config(problem(dim, value, 128), h200());
    EXPECT_EQ(c.blocks, c.narrow ? c.work : 132) << dim << "/" << value;
    return c.narrow;
  };
  EXPECT_TRUE(narrow(128, 64));
  EXPECT_TRUE(narrow(96, 64));
  EXPECT_TRUE(narrow(192, 128));
  EXPECT_TRUE(narrow(16, 16));
  EXPECT_FALSE(narrow(208, 128));
  EXPECT_FALSE(narrow(192, 144));
  EXPECT_FALSE(narrow(576, 64));
  Problem p = problem(128, 64, 16);
  p.queries = 2;  // few queries of long lists: the three kernels, with the same bits
  EXPECT_FALSE(config(p, h200()).narrow);
  p.slots = 384;
  EXPECT_TRUE(config(p, h200()).narrow);
  p.kv_stride.row = int64_t{1} << 23;  // 2^37 bytes: rows are counted in 16 bytes, by 32 bits
  EXPECT_FALSE(config(p, h200()).narrow);
  p.kv_stride.row = 0;
  EXPECT_TRUE(config(p, h200()).narrow);
  p.keys = p.keys_stored = int64_t{1} << 31;  // their numbers, too
  EXPECT_FALSE(config(p, h200()).narrow);
  p.keys = p.keys_stored = 8192, p.kv_stride.row = 128;
  p.queries = int64_t{1} << 31;  // a grid has fewer blocks
  EXPECT_FALSE(config(p, h200()).narrow);
}

TEST(AttentionSm90Config, FewHeadsHaveKeysAsRows) {
  const auto few = [](const Problem& p) {
    const Config c = config(p, h200());
    EXPECT_EQ(c.shared_bytes == ring_shared_bytes(), c.few_heads);
    EXPECT_FALSE(c.few_heads && (c.segments > 1 || c.narrow));
    return c.few_heads;
  };
  EXPECT_LE(ring_shared_bytes(), 232448);
  for (const int64_t heads : {1, 8, 11, 16}) EXPECT_TRUE(few(problem(576, 512, heads)));
  EXPECT_FALSE(few(problem(576, 512, 17)));
  EXPECT_TRUE(few(problem(512, 512, 16)));
  EXPECT_TRUE(few(problem(288, 272, 16)));
  EXPECT_FALSE(few(problem(576, 256, 16)));  // of narrower values fewer rows of weights are empty
  EXPECT_FALSE(few(problem(128, 64, 16)));
  EXPECT_EQ(config(problem(576, 512, 16), h200()).blocks, 132);
  Problem p = problem(576, 512, 48);
  p.groups = 3;
  EXPECT_TRUE(few(p));
  p.heads = 20, p.head_begin = 8;  // of a rank: eight of a group, then twelve of the next
  EXPECT_TRUE(few(p));
  p = problem(576, 512, 16);
  p.queries = 2;  // few queries of long lists: the three kernels, with the same bits
  EXPECT_FALSE(few(p));
  p.slots = 384;
  EXPECT_TRUE(few(p));
  p = problem(576, 512, 16);
  p.options.kv_storage = KvStorage::fp8_656;
  EXPECT_FALSE(few(p));
}

// Five parts in a row lie in chunks of their own, whichever is the first; the sixth may take those
// of the first.
TEST(AttentionSm90Config, PartsOfTheRing) {
  int number[2][2];
  for (const int t : {0, 1})
    for (const int half : {0, 1}) number[t][half] = ring_part(t, half);
  EXPECT_EQ(number[0][0], 0);
  EXPECT_EQ(number[1][1], 1);
  EXPECT_EQ(number[0][1], 2);
  EXPECT_EQ(number[1][0], 3);
  const auto begin = [](int part) { return part / 4 * pair_chunks + ring_first(part % 4); };
  for (int part = 0; part < 40; ++part) {
    EXPECT_EQ(begin(part + 1) - begin(part), part % 4 == 1 || part % 4 == 2 ? 5 : 4);
    EXPECT_LE(begin(part + 5) - begin(part), ring_chunks);
  }
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

TEST(AttentionSm90Config, FewQueriesFormTheirScoresFirst) {
  Problem p = problem(576, 512, 128);
  p.batch = 2, p.queries = 2;
  const Config c = config(p, h200());
  EXPECT_EQ(c.segments, 16);  // of 128 slots
  EXPECT_EQ(c.slices, 16);    // of 2 x 16 columns
  EXPECT_EQ(c.work, 4 * 2 * 16);
  EXPECT_EQ(c.blocks, 128);
  // Of each head and slot a weight, and of each slot its value.
  const int64_t weights = 4 * 2 * int64_t{2048} * 64 * 2, values = 4 * int64_t{2048} * 512 * 2;
  const int64_t least = weights + values;
  EXPECT_GE(bytes_of(c), least);
  EXPECT_LE(bytes_of(c), least + 4 * 2 * 16 * 4096);  // and what lies beside a pair of tiles
  p.options.workspace_limit_bytes = bytes_of(c) - 1;  // the same bits without memory
  EXPECT_EQ(config(p, h200()).segments, 1);
  p.options.workspace_limit_bytes = int64_t{256} << 20;
  p.batch = 4;
  EXPECT_EQ(config(p, h200()).segments, 16);
  p.batch = 5;
  EXPECT_EQ(config(p, h200()).segments, 1);
  p.batch = 1, p.slots = 384;
  EXPECT_EQ(config(p, h200()).segments, 1);  // three pairs of tiles
  p.slots = 385;
  EXPECT_EQ(config(p, h200()).segments, 4);
  p.dim = 64, p.value_dim = 48;
  EXPECT_EQ(config(p, h200()).slices, 4);  // in twos: two blocks share their weights
  p.groups = 2;
  EXPECT_EQ(config(p, h200()).segments, 1);
  p.groups = 1, p.heads = p.total_heads = 0;
  EXPECT_EQ(config(p, h200()).segments, 1);
  EXPECT_LE(stored_shared_bytes(), 232448);
}

TEST(AttentionSm90Config, PackedRows) {
  Problem p = problem(576, 512, 128);
  p.options.kv_storage = KvStorage::fp8_656;
  p.options.fp8_path = Fp8Path::in_kernel;
  p.kv_dtype = DType::u8;
  p.kv_stride = {0, 656, 0};
  EXPECT_FALSE(decline(p, h200()));
  EXPECT_EQ(config(p, h200()).half, 256);
  EXPECT_EQ(config(p, h200()).rows, Rows::shared);  // two blocks of a cluster have 128 heads
  Problem few = p;  // a block scores one of 32 tiles of a list for all heads
  few.batch = 2, few.queries = 2;
  const Config c = config(few, h200());
  EXPECT_EQ(c.rows, Rows::packed);
  EXPECT_EQ(c.segments, 16);
  EXPECT_EQ(c.blocks, 4 * 32);
  EXPECT_EQ(c.shared_bytes, packed_scores_bytes);
  EXPECT_LE(c.shared_bytes, 232448);
  few.heads = few.total_heads = 64;
  EXPECT_EQ(config(few, h200()).blocks, 4 * 32);
  few.heads = few.total_heads = 192;  // two tiles of heads, then one
  EXPECT_EQ(config(few, h200()).blocks, 4 * 32 * 2);
  few.heads = few.total_heads = 128, few.batch = 13, few.queries = 1;  // 26 of 132
  EXPECT_EQ(config(few, h200()).segments, 16);
  few.batch = 14;
  EXPECT_EQ(config(few, h200()).segments, 1);
  DeviceFacts odd = h200();
  odd.sm_count = 131;
  EXPECT_EQ(config(p, odd).blocks, 130);
  p.heads = p.total_heads = 64;
  EXPECT_EQ(config(p, h200()).rows, Rows::packed);
  p.heads = p.total_heads = 128, p.groups = 2;
  EXPECT_EQ(config(p, h200()).rows, Rows::packed);
  p.groups = 1;
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
  p.pass = Pass::index_loss;
  expect_declined(p, "forward, backward and selection alone");
  DeviceFacts older = h200();
  older.sm = 80;
  EXPECT_NE(decline(problem(128, 64, 8), older)->find("sm_80"), std::string::npos);
}

// A stand-in for the library: a byte a slot.
int64_t byte_a_slot(int64_t slots, int64_t) { return slots; }

Problem backward(int64_t dim, int64_t value_dim, int64_t heads) {
  Problem p = problem(dim, value_dim, heads);
  p.pass = Pass::backward;
  p.scale = 1 / 24.0;
  p.has_saved = p.has_d_o = p.wants_dq = p.wants_dkv = true;
  p.d_o_dtype = p.dq_dtype = p.dkv_dtype = DType::bf16;
  p.d_o_stride = {0, heads * value_dim, value_dim};
  return p;
}
BackwardConfig cut(const Problem& p) { return backward_config(p, h200(), byte_a_slot); }

int64_t bytes_of(const Problem& p) {
  Arena arena;
  lay_out_backward(arena, p, cut(p));
  return arena.bytes();
}

TEST(AttentionSm90Config, EverySizeOfBackwardFitsSharedMemory) {
  for (int64_t dim = 16; dim <= most_columns; dim += 16) {
    const BackwardChunks c = backward_chunks[width_of(dim)];
    EXPECT_GE(c.all() * chunk_columns, dim);
    EXPECT_GE(c.values() * chunk_columns, std::min(dim, most_value_columns));
    EXPECT_LE(backward_shared_bytes(dim), most_shared_bytes) << dim;
    for (const int64_t heads : {1, 64, 65, 128, 192, 256}) {
      EXPECT_FALSE(decline(backward(dim, 16, heads), h200()));
      const SumPlan s = sum_plan(dim, (heads + 63) / 64);
      EXPECT_LE(sum_shared_bytes(s), most_shared_bytes) << dim << ", " << heads;
      EXPECT_EQ(s.head_tiles * s.sums, (heads + 63) / 64);
      EXPECT_GE(s.groups * s.chunks * chunk_columns, dim);
      EXPECT_LT((s.groups - 1) * s.chunks, chunks_of_columns(dim));  // no group without columns
      EXPECT_EQ(s.stages % sum_groups, 0);
      EXPECT_LE(s.stages, most_stages);
    }
  }
}

TEST(AttentionSm90Config, ChunksOfBackwardKeepTheLimit) {
  Problem p = backward(576, 512, 128);
  p.options.dkv_sum = DkvSum::deterministic;
  p.options.workspace_limit_bytes = 1;
  EXPECT_FALSE(cut(p).adds);
  EXPECT_EQ(cut(p).chunk_lists, 1);  // what it takes at least
  for (const int64_t limit : {int64_t{64} << 20, int64_t{256} << 20, int64_t{5} << 29}) {
    p.options.workspace_limit_bytes = limit;
    EXPECT_LE(bytes_of(p), limit);
    EXPECT_GT(cut(p).chunk_lists, limit / (12 << 20));
  }
  p.wants_dkv = false;  // dq alone: Delta
  EXPECT_LT(bytes_of(p), 4 * 4096 * 128 + 1024);
  EXPECT_EQ(cut(p).chunk_lists, 4096);
}

TEST(AttentionSm90Config, BlocksAddUpDkvInOrderOfArrival) {
  for (const int64_t heads : {16, 64, 128, 192})
    for (const int64_t limit : {int64_t{256} << 20, int64_t{1}}) {  // no chunks whatever it is
      Problem p = backward(576, 512, heads);
      p.options.workspace_limit_bytes = limit;
      EXPECT_FALSE(cut(p).adds);  // deterministic
      p.options.dkv_sum = DkvSum::atomic;
      EXPECT_TRUE(cut(p).adds);
      EXPECT_EQ(cut(p).chunk_lists, 4096);
      EXPECT_LT(bytes_of(p), 4 * (4096 * heads + 8192 * 576) + 1024);  // Delta, dkv in fp32
      p.dkv_dtype = DType::f32;
      p.dkv_stride = {0, 576, 0};
      EXPECT_LT(bytes_of(p), 4 * 4096 * heads + 1024);  // Delta alone
      p.wants_dkv = false;
      EXPECT_FALSE(cut(p).adds);
    }
}

// bf16 has the exponents of fp32: nothing leaves its range.
TEST(AttentionSm90Config, ThePowerOfTwoNextToTheScale) {
  Problem p = backward(128, 64, 8);
  for (const auto& [scale, exponent] : {std::pair<double, float>{1, 0},
                                        {0.25, -2},
                                        {-0.25, -2},
                                        {0.09, -3},
                                        {1e9, 8},
                                        {1e-9, -14}}) {
    p.scale = scale;
    p.q_dtype = DType::f16;
    EXPECT_EQ(cut(p).exponent, exponent) << scale;
    p.q_dtype = DType::bf16;
    EXPECT_EQ(cut(p).exponent, 0) << scale;
  }
}

TEST(AttentionSm90Config, BackwardDeclinesByName) {
  EXPECT_FALSE(decline(backward(128, 64, 8), h200()));
  Problem p = backward(128, 64, 8);
  p.has_saved = false;
  expect_declined(p, "without o and lse");
  p = backward(128, 64, 8);
  p.d_o_dtype = DType::f32;
  expect_declined(p, "d_o of fp32");
  p.has_d_o = false;
  EXPECT_FALSE(decline(p, h200()));
  p = backward(128, 64, 8);
  p.dkv_dtype = DType::f32;
  p.dkv_stride = {0, 130, 0};
  expect_declined(p, "dkv: stride 130");
  p = backward(128, 64, 6);
  p.groups = 2, p.total_heads = 8;
  expect_declined(p, "unlike numbers of heads");
}

}  // namespace
}  // namespace talea::sparse_attention::sm90
#endif
