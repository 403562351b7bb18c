// What: loss and dX do not depend on the workspace limit or on the other rows, also where the
// logits are more than 2^32.
// Why: a 32-bit offset or a size-dependent algorithm shows as a difference between two layouts.
// Never: needs a reference of that size.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "gpu/batch.hpp"

namespace talea::gpu {
namespace {

class Sizes : public ::testing::TestWithParam<std::string> {};

// Every run has the bits of the first one's loss and, where there is one, dX.
class SameBits {
 public:
  void run(Batch& b, const std::string& what) {
    b.run();
    const auto loss = b.bytes_of(b.out.loss);
    const auto dx = b.out.dx ? b.bytes_of(b.out.dx) : std::vector<std::byte>();
    if (loss_.empty()) loss_ = loss, dx_ = dx;
    EXPECT_EQ(loss, loss_) << what;
    EXPECT_TRUE(dx == dx_) << what;
  }

 private:
  std::vector<std::byte> loss_, dx_;
};

TEST_P(Sizes, WorkspaceLimitChangesNoBitOfLossAndDx) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    if (!must_accept(GetParam(), dtype)) continue;
    SameBits bits;
    for (const int64_t mib : {1, 9, 40, 400}) {
      Batch b({.tokens = 1500,
               .hidden = 128,
               .vocab = 6000,
               .dtype = dtype,
               .workspace_limit_bytes = mib << 20},
              GetParam());
      bits.run(b, fmt::format("{}, {} MiB", name_of(dtype), mib));
    }
  }
}

// Wide rows: dX is cut into products of different tiles, depending on the rows of a chunk; an odd
// vocabulary has products of its own for its last columns.
TEST_P(Sizes, WorkspaceLimitChangesNoBitOfWideRows) {
  for (const auto& [hidden, vocab] : std::vector<std::pair<int64_t, int64_t>>{
           {4096, 2048}, {4096, 2039}, {3584, 2048}, {2304, 2500}}) {
    SameBits bits;
    for (const int64_t mib : {12, 34, 60, 400}) {
      Batch b({.tokens = 2500,
               .hidden = hidden,
               .vocab = vocab,
               .workspace_limit_bytes = mib << 20,
               .top_k = 0},
              GetParam());
      bits.run(b, fmt::format("{} x {}, {} MiB", hidden, vocab, mib));
    }
  }
}

// Without a gradient lane cuda multiplies a part of the vocabulary after the other. Lane sm90 may
// need more than the limit, and gets it.
TEST_P(Sizes, WorkspaceLimitChangesNoBitOfTheLossAlone) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    if (!must_accept(GetParam(), dtype)) continue;
    SameBits bits;
    for (const int64_t mib : {16, 40, 400}) {
      Batch b({.tokens = 900,
               .hidden = 64,
               .vocab = 40001,
               .dtype = dtype,
               .workspace_limit_bytes = mib << 20,
               .everything = false},
              GetParam());
      const int64_t limit = GetParam() == "cuda" ? mib << 20 : b.options.workspace_limit_bytes;
      EXPECT_LE(b.workspace.bytes, limit) << name_of(dtype);
      bits.run(b, fmt::format("{}, {} MiB", name_of(dtype), mib));
    }
  }
}

TEST_P(Sizes, OtherRowsChangeNoBitOfARow) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    if (!must_accept(GetParam(), dtype)) continue;
    Batch b({.tokens = 700, .hidden = 128, .vocab = 5000, .dtype = dtype}, GetParam());
    b.options.reduction = Reduction::sum;
    b.run();
    const auto lse = b.bytes_of(b.out.lse), dx = b.bytes_of(b.out.dx);
    // Every row but the last hundred is ignored.
    const std::vector<int64_t> ignored(600, -100);
    b.session().upload(b.in.targets.data, ignored.data(), 600 * 8);
    b.run();
    const auto lse_after = b.bytes_of(b.out.lse), dx_after = b.bytes_of(b.out.dx);
    const size_t from = 600 * 4, row = 128 * 2;
    EXPECT_EQ(std::memcmp(lse.data() + from, lse_after.data() + from, 100 * 4), 0);
    EXPECT_EQ(std::memcmp(dx.data() + 600 * row, dx_after.data() + 600 * row, 100 * row), 0);
    EXPECT_EQ(std::count(dx_after.begin(), dx_after.begin() + 600 * row, std::byte{0}),
              static_cast<int64_t>(600 * row));
  }
}

TEST_P(Sizes, MoreThanTwoToThe32Logits) {
  const int64_t tokens = 70016, vocab = 65000;  // 4.55e9 logits
  SameBits bits;
  for (const int64_t gib : {1, 24}) {  // in chunks, and with dz of all rows: more than 2^32 numbers
    Batch b({.tokens = tokens,
             .hidden = 64,
             .vocab = vocab,
             .workspace_limit_bytes = gib << 30,
             .top_k = 0},
            GetParam());
    bits.run(b, fmt::format("{} GiB", gib));
  }
}

INSTANTIATE_TEST_SUITE_P(Lanes, Sizes, ::testing::ValuesIn(lanes()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace talea::gpu
