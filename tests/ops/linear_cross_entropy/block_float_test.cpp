// What: the codes that a bf16 dW is summed in between chunks: their error, their range, Inf and NaN.
// Why: they are pure functions, tested without a GPU.
// Never: asks for less than the header states.
#include "ops/linear_cross_entropy/sm90/block_float.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace talea::lce::sm90 {
namespace {

float back(float x, uint32_t exponent) {
  return BlockFloat::value(BlockFloat::code(x, exponent) & 0xffffu, exponent);
}

TEST(BlockFloat, ErrorOfEachElement) {
  std::mt19937 draw(7);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> octave(-100, 110);
  for (int block = 0; block < 20000; ++block) {
    const double scale = std::exp2(octave(draw));
    std::vector<float> x(64);
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = static_cast<float>(normal(draw) * scale * (i % 16 == 0 && block % 2 ? 50 : 1));
    float most = 0;
    for (const float v : x) most = std::max(most, std::fabs(v));
    const uint32_t exponent = BlockFloat::exponent(most);
    ASSERT_NE(exponent, BlockFloat::kBf16);
    for (const float v : x) {
      const double error = std::fabs(static_cast<double>(back(v, exponent)) - v);
      ASSERT_LE(error, std::ldexp(1.0, static_cast<int>(exponent) - 142))
          << v << " beside " << most;
      ASSERT_LE(error, 0x1.002p-15 * most);
    }
  }
}

TEST(BlockFloat, TheLargestIsNeverRoundedOutOfItsBlock) {
  for (const float power : {0x1p-100f, 0x1p-3f, 1.f, 0x1p90f})
    for (float most = power * 1.999f; most < power * 2.001f; most = std::nextafter(most, 1e38f)) {
      const uint32_t exponent = BlockFloat::exponent(most);
      ASSERT_LE(std::fabs(back(most, exponent) - most), 0x1.002p-15f * most) << most;
      ASSERT_EQ(back(-most, exponent), -back(most, exponent));
    }
}

TEST(BlockFloat, ZeroAndTheEndsOfTheRange) {
  EXPECT_EQ(back(0.f, BlockFloat::exponent(0.f)), 0.f);
  EXPECT_EQ(back(0.f, BlockFloat::exponent(1e30f)), 0.f);
  const float least = 0x1p-120f;  // the lowest exponent has a step, too
  EXPECT_LE(std::fabs(back(least, BlockFloat::exponent(least)) - least), 0x1p-127f);
  EXPECT_EQ(BlockFloat::exponent(std::numeric_limits<float>::max()), BlockFloat::kBf16);
  EXPECT_EQ(BlockFloat::exponent(INFINITY), BlockFloat::kBf16);
  EXPECT_EQ(BlockFloat::exponent(NAN), BlockFloat::kBf16);
  EXPECT_EQ(BlockFloat::exponent(-NAN), BlockFloat::kBf16);
  EXPECT_NE(BlockFloat::exponent(0x1.8p124f), BlockFloat::kBf16);
  const float large = 0x1.8p124f;
  EXPECT_EQ(back(large, BlockFloat::exponent(large)), large);
  // A block of bf16 reads as bf16.
  EXPECT_EQ(BlockFloat::value(0x7f80u, BlockFloat::kBf16), INFINITY);
  EXPECT_EQ(BlockFloat::value(0xff80u, BlockFloat::kBf16), -INFINITY);
  EXPECT_EQ(BlockFloat::value(0x3f80u, BlockFloat::kBf16), 1.f);
  EXPECT_TRUE(std::isnan(BlockFloat::value(0x7fc0u, BlockFloat::kBf16)));
}

}  // namespace
}  // namespace talea::lce::sm90
