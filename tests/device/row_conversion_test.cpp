// What: rows of 16-bit numbers to fp32 and back by the vector code, against core/half.hpp.
// Why: lanes convert whole tiles; each bit pattern must mean what the definition says.
// Never: goes through an operator.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "core/half.hpp"
#include "device/cpu/tile_product.hpp"

namespace talea::cpu {
namespace {

// NaN of any payload counts as NaN; all else bit for bit.
void expect_same(float a, float b, const char* what) {
  if (std::isnan(a) && std::isnan(b)) return;
  EXPECT_EQ(std::bit_cast<uint32_t>(a), std::bit_cast<uint32_t>(b))
      << what << ": " << a << ", " << b;
}

TEST(RowConversion, EveryBitPatternIsReadAsDefined) {
  std::vector<uint16_t> all(65536 + 5);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(all.size());
  for (const DType dtype : {DType::bf16, DType::f16}) {
    load_row(all.data(), dtype, 0, 1, static_cast<int64_t>(all.size()), wide.data());
    for (size_t i = 0; i < all.size(); ++i)
      expect_same(wide[i], dtype == DType::bf16 ? bf16_to_float(all[i]) : f16_to_float(all[i]),
                  "read");
  }
}

TEST(RowConversion, EveryRoundingIsAsDefined) {
  std::vector<float> wide = {0.0f,  -0.0f, INFINITY, -INFINITY,     NAN,     65504,  65519.996f,
                             65520, 1e30f, 5.9e-8f,  2.9802322e-8f, 6.1e-5f, 1e-45f, 3.4e38f};
  std::mt19937 random(3);
  for (int i = 0; i < 200000; ++i)
    wide.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  for (uint32_t high = 0; high < 65536; high += 7)  // ties and their neighbours
    for (const uint32_t low : {0x7fffu, 0x8000u, 0x8001u, 0x0fffu, 0x1000u, 0x1001u})
      wide.push_back(std::bit_cast<float>(high << 16 | low));
  std::vector<uint16_t> narrow(wide.size());
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const bool bf16 = dtype == DType::bf16;
    store_row(wide.data(), static_cast<int64_t>(wide.size()), narrow.data(), dtype, 0, 1);
    for (size_t i = 0; i < wide.size(); ++i) {
      const uint16_t right = bf16 ? float_to_bf16(wide[i]) : float_to_f16(wide[i]);
      const auto value = [&](uint16_t x) { return bf16 ? bf16_to_float(x) : f16_to_float(x); };
      expect_same(value(narrow[i]), value(right), "rounded");
    }
  }
}

TEST(RowConversion, PanelsHoldTheRowsAndZerosBeyond) {
  const int64_t rows = 5, n = 37, stride = 41, width = lanes(), padded = (n + width - 1) / width;
  std::vector<float> src(static_cast<size_t>(rows * stride));
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<float>(i) + 1;
  std::vector<float> panels(static_cast<size_t>(padded * width * rows), -1.0f);
  for (const int64_t step : {int64_t{1}, int64_t{-1}}) {  // rows in one piece, and backwards
    const int64_t first = step == 1 ? 2 : n + 1;
    load_panels({src.data(), DType::f32, first, stride, step, rows, n}, panels.data(),
                rows * width);
    for (int64_t k = 0; k < rows; ++k)
      for (int64_t j = 0; j < padded * width; ++j) {
        const float want = j < n ? src[static_cast<size_t>(first + k * stride + j * step)] : 0.0f;
        const int64_t at = j / width * rows * width + k * width + j % width;
        EXPECT_EQ(panels[static_cast<size_t>(at)], want) << k << ", " << j;
      }
  }
}

// A sanitizer's test: an address that nothing is read from is not formed either.
TEST(RowConversion, OfNothingAndOfOneRowAStrideIsAnyNumber) {
  const int64_t far = int64_t{1} << 61;
  std::vector<float> src(40, 3.0f), dst(128, -1.0f);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    load_row(src.data(), dtype, far, 1, 0, dst.data());
    store_row(src.data(), 0, dst.data(), dtype, far, 1);
  }
  for (const float x : dst) EXPECT_EQ(x, -1);
  load_panels({src.data(), DType::f32, 0, far, 1, 1, 37}, dst.data(), lanes());
  for (int64_t i = 0; i < 37; ++i) EXPECT_EQ(dst[static_cast<size_t>(i)], 3);
}

}  // namespace
}  // namespace talea::cpu
