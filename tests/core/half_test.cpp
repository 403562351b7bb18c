// What: the library's 16-bit conversions against the tests' own, for every bit pattern.
// Why: the tests read and write tensors through their own code; both must mean the same.
// Never: samples: 2 x 65,536 patterns and their neighbourhoods are few.
#include "core/half.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "yardsticks/array.hpp"

namespace talea {
namespace {

TEST(Half, EveryPatternDecodesTheSame) {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const uint16_t cell[4] = {static_cast<uint16_t>(bits)};
      const double ours = load_element(cell, dtype, 0), theirs = testing::decode(dtype, cell, 0);
      const bool same = (std::isnan(ours) && std::isnan(theirs)) ||
                        std::bit_cast<uint64_t>(ours) == std::bit_cast<uint64_t>(theirs);
      ASSERT_TRUE(same) << name_of(dtype) << " " << bits;
    }
}

// Around each pattern: itself, the midpoint to the next one, and a hair to either side.
TEST(Half, RoundsOnceToNearestEven) {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (uint32_t bits = 0; bits < 65535; ++bits) {
      const uint16_t pair[4] = {static_cast<uint16_t>(bits), static_cast<uint16_t>(bits + 1)};
      const double a = testing::decode(dtype, pair, 0), b = testing::decode(dtype, pair, 1);
      if (!std::isfinite(a) || !std::isfinite(b)) continue;
      const double middle = (a + b) / 2, hair = (b - a) * 1e-9;
      for (const double value : {a, middle - hair, middle, middle + hair}) {
        uint16_t ours[4] = {}, theirs[4] = {};
        store_element(ours, dtype, 0, value);
        testing::encode(dtype, theirs, 0, value);
        ASSERT_EQ(ours[0], theirs[0]) << name_of(dtype) << " " << value;
      }
    }
}

TEST(Half, OverflowsToInfinityAndKeepsNaN) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    uint16_t cell[4] = {};
    store_element(cell, dtype, 0, 1e39);
    EXPECT_EQ(testing::decode(dtype, cell, 0), INFINITY);
    store_element(cell, dtype, 0, -1e39);
    EXPECT_EQ(testing::decode(dtype, cell, 0), -INFINITY);
    store_element(cell, dtype, 0, NAN);
    EXPECT_TRUE(std::isnan(testing::decode(dtype, cell, 0)));
  }
}

// Every code comes back as itself; between two codes the nearer one, on a tie the even one.
TEST(Half, Fp8RoundsOnceToNearestEven) {
  std::vector<double> values;  // of the codes 0 to 0x7e, rising
  for (int code = 0; code < 0x7f; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    values.push_back(exponent == 0 ? std::ldexp(mantissa, -9)
                                   : std::ldexp(1 + mantissa / 8.0, exponent - 7));
  }
  ASSERT_EQ(values.back(), 448);
  const auto stored = [](double value) {
    uint8_t cell = 0;
    store_element(&cell, DType::f8_e4m3, 0, value);
    return static_cast<int>(cell);
  };
  for (int code = 0; code < 0x7f; ++code) {
    const auto bits = static_cast<uint8_t>(code);
    ASSERT_EQ(load_element(&bits, DType::f8_e4m3, 0), values[code]) << code;
    ASSERT_EQ(stored(values[code]), code);
    ASSERT_EQ(stored(-values[code]), code == 0 ? stored(-0.0) : code | 0x80);
    if (code == 0x7e) break;
    const double middle = (values[code] + values[code + 1]) / 2;
    ASSERT_EQ(stored(middle), code % 2 == 0 ? code : code + 1) << middle;
    ASSERT_EQ(stored(middle * (1 - 1e-9)), code) << middle;
    ASSERT_EQ(stored(middle * (1 + 1e-9)), code + 1) << middle;
  }
  EXPECT_EQ(stored(464), 0x7e);  // a tie with the code that is NaN: 0x7e is even
  for (const double out : {464.1, 1e39, static_cast<double>(INFINITY), static_cast<double>(NAN)})
    EXPECT_TRUE(std::isnan(e4m3_to_float(static_cast<uint8_t>(stored(out))))) << out;
}

}  // namespace
}  // namespace talea
