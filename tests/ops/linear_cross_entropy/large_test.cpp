// What: element offsets above 2^31 and 2^32, over sparse address space that is never filled.
// Why: an offset cut to 32 bits gives silent wrong values (B10).
// Never: touches more than a few pages of what it maps.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>

#include "support/lane_test.hpp"

namespace talea::testing {
namespace {

// Zero pages, committed only where they are touched.
class Sparse {
 public:
  explicit Sparse(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Sparse() {
    if (base_ != MAP_FAILED) munmap(base_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  float* data() const { return base_ == MAP_FAILED ? nullptr : static_cast<float*>(base_); }

 private:
  size_t bytes_;
  void* base_;
};

constexpr int64_t rows = 4, width = 6, stride = (int64_t{1} << 31) + 5;

Tensor matrix(const float* base, int64_t row_stride) {
  Tensor t = make_tensor(base, DType::f32, {rows, width});
  t.stride[0] = row_stride;
  return t;
}

struct Outputs {
  float loss[rows];
  std::vector<float> dx = std::vector<float>(rows * width), dw = dx;
};

std::vector<std::string> host_lanes() {
  std::vector<std::string> lanes = lanes_here();
  std::erase_if(lanes, [](const std::string& lane) { return is_device_lane(lane); });
  return lanes;
}

class Large : public LaneTest {
 protected:
  void TearDown() override {}  // calls the operator itself: each case counts its own elements
  void call(const LinearCrossEntropyInputs& in, const LinearCrossEntropyOutputs& out) {
    LinearCrossEntropyOptions options;
    options.reduction = Reduction::none;
    options.lane = lane();
    const int64_t bytes = workspace_bytes(describe(in, out, options));
    std::vector<char> room(static_cast<size_t>(bytes));
    linear_cross_entropy(in, out, options, {room.data(), bytes});
  }
};
// Host address space: lanes of a device have tests/gpu/sizes.cpp.
INSTANTIATE_TEST_SUITE_P(Lanes, Large, ::testing::ValuesIn(host_lanes()),
                         [](const auto& info) { return info.param; });

TEST_P(Large, RowsFurtherApartThan32BitsCanSay) {
  // Rows 0 .. 3 lie at 0, 2^31, 2^32 and beyond: 4 * 8.6 GB of address space each.
  const int64_t bytes = ((rows - 1) * stride + width) * 4;
  Sparse far_x(bytes), far_w(bytes), far_dx(bytes), far_dw(bytes);
  for (const Sparse* s : {&far_x, &far_w, &far_dx, &far_dw})
    ASSERT_NE(s->data(), nullptr) << "this machine cannot map " << bytes << " bytes";
  std::vector<float> x(rows * width), w(x);
  Random random(3);
  for (int64_t k = 0; k < rows * width; ++k) {
    far_x.data()[k / width * stride + k % width] = x[size_t(k)] = float(random.normal());
    far_w.data()[k / width * stride + k % width] = w[size_t(k)] = float(random.normal());
  }
  const int64_t y[rows] = {3, 2, 1, 0};
  const auto inputs = [&](const Tensor& hidden, const Tensor& weight) {
    LinearCrossEntropyInputs in;
    in.hidden = hidden;
    in.weight = weight;
    in.targets = make_tensor(y, DType::i64, {rows});
    return in;
  };
  Outputs near, far;
  LinearCrossEntropyOutputs out;
  out.loss = make_tensor(near.loss, DType::f32, {rows});
  out.dx = matrix(near.dx.data(), width);
  out.dw = matrix(near.dw.data(), width);
  call(inputs(matrix(x.data(), width), matrix(w.data(), width)), out);
  out.loss = make_tensor(far.loss, DType::f32, {rows});
  out.dx = matrix(far_dx.data(), stride);
  out.dw = matrix(far_dw.data(), stride);
  call(inputs(matrix(far_x.data(), stride), matrix(far_w.data(), stride)), out);
  for (int64_t t = 0; t < rows; ++t) EXPECT_EQ(near.loss[t], far.loss[t]);
  for (int64_t k = 0; k < rows * width; ++k) {
    EXPECT_EQ(near.dx[size_t(k)], far_dx.data()[k / width * stride + k % width]);
    EXPECT_EQ(near.dw[size_t(k)], far_dw.data()[k / width * stride + k % width]);
  }
}

// 4.34e9 logits, of which no more than a tile exists. A row says the same alone and in the batch
// (tests/ops/linear_cross_entropy/invariants_test.cpp), so a few rows of their own are the
// reference, bit for bit.
TEST(LargeCpu, MoreThanTwoToThe32Logits) {
  constexpr int64_t vocab = 62003, tokens = 70001, kinds = 7;
  static_assert(vocab * tokens > int64_t{1} << 32);
  std::vector<float> w(vocab), x(tokens), loss(tokens), lse(tokens), alone(kinds), alone_lse(kinds);
  std::vector<int64_t> y(tokens);
  Random random(11);
  for (float& value : w) value = static_cast<float>(random.normal());
  for (int64_t t = 0; t < tokens; ++t) {
    x[size_t(t)] = 0.25f * static_cast<float>(t % kinds) - 0.6f;
    y[size_t(t)] = (vocab - 1) - t % kinds;
  }
  const auto call = [&](int64_t rows, float* to_loss, float* to_lse) {
    LinearCrossEntropyInputs in;
    in.hidden = make_tensor(x.data(), DType::f32, {rows, 1});
    in.weight = make_tensor(w.data(), DType::f32, {vocab, 1});
    in.targets = make_tensor(y.data(), DType::i64, {rows});
    LinearCrossEntropyOutputs out;
    out.loss = make_tensor(to_loss, DType::f32, {rows});
    out.lse = make_tensor(to_lse, DType::f32, {rows});
    LinearCrossEntropyOptions options;
    options.reduction = Reduction::none;
    options.lane = "cpu";
    const int64_t bytes = workspace_bytes(describe(in, out, options));
    std::vector<char> room(static_cast<size_t>(bytes));
    linear_cross_entropy(in, out, options, {room.data(), bytes});
  };
  call(kinds, alone.data(), alone_lse.data());
  call(tokens, loss.data(), lse.data());
  int64_t wrong = 0;
  for (int64_t t = 0; t < tokens; ++t)
    wrong += loss[size_t(t)] != alone[size_t(t % kinds)] ||
             lse[size_t(t)] != alone_lse[size_t(t % kinds)];
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(alone_lse[0], 11);  // log of 62003 and a little: the reference is no constant
}

}  // namespace
}  // namespace talea::testing
