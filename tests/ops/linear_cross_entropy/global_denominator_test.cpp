// What: the denominator over the ranks that share a batch, with a second rank played by the test.
// Why: a local count where the global one was meant is a gradient off by the world size (B20).
// Never: needs a second process.
#include <gtest/gtest.h>

#include <cstring>

#include "yardsticks/linear_cross_entropy/run.hpp"

namespace talea::testing {
namespace {

// The other rank of two brings the same sums `times` times.
class Other final : public Communicator {
 public:
  explicit Other(double times) : times_(times) {}
  const char* engine() const override { return "test"; }
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void all_gather(const void* send, void* recv, int64_t bytes, Stream) override {
    for (int r = 0; r < 2; ++r)
      std::memcpy(static_cast<char*>(recv) + r * bytes, send, static_cast<size_t>(bytes));
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream) override {
    ASSERT_EQ(dtype, DType::f64);
    for (int64_t i = 0; i < count; ++i) static_cast<double*>(buffer)[i] *= 1 + times_;
  }
  void reduce_scatter_sum(const void*, void*, int64_t, DType, Stream) override {
    FAIL() << "not needed";
  }

 private:
  double times_;
};

struct Gradient {
  double loss;
  std::vector<float> dx;
  double denominator;
};

Gradient run_with(const std::string& lane, DenominatorScope scope, double times) {
  const Case c = plain_case({});
  const auto host = [](const Array& a) {
    return a.at(const_cast<std::byte*>(a.block().data()), DeviceKind::cpu);
  };
  float loss = 0;
  Gradient g{0, std::vector<float>(35), 0};
  LinearCrossEntropyInputs in;
  in.hidden = host(c.in.hidden);
  in.weight = host(c.in.weight);
  in.targets = host(c.in.targets);
  LinearCrossEntropyOutputs out;
  out.loss = make_tensor(&loss, DType::f32, {});
  out.dx = make_tensor(g.dx.data(), DType::f32, {7, 5});
  LinearCrossEntropyOptions options;
  options.lane = lane;
  options.denominator_scope = scope;
  Other other(times);
  LinearCrossEntropyRanks ranks;
  ranks.batch = &other;
  const int64_t bytes = workspace_bytes(describe(in, out, options, ranks));
  std::vector<char> room(static_cast<size_t>(bytes));
  g.denominator = linear_cross_entropy(in, out, options, {room.data(), bytes}, ranks).denominator;
  g.loss = loss;
  return g;
}

TEST(GlobalDenominator, CountsTheRanksThatShareTheBatch) {
  for (const std::string& lane : lanes_here()) {
    if (is_device_lane(lane)) continue;
    SCOPED_TRACE(lane);
    const Gradient local = run_with(lane, DenominatorScope::local, 7);
    const Gradient global = run_with(lane, DenominatorScope::global, 7);
    EXPECT_EQ(local.denominator, 7);
    EXPECT_EQ(global.denominator, 56);
    EXPECT_NEAR(global.loss, local.loss / 8, 1e-7);
    for (size_t i = 0; i < 35; ++i) EXPECT_NEAR(global.dx[i], local.dx[i] / 8, 1e-8);
  }
}

}  // namespace
}  // namespace talea::testing
