// What: the bf16 products of tile_product's size: values, bits, rounding and what it leaves.
// Why: two rows of k share a vector; a swapped half or a lost remainder would pass for noise.
// Never: runs where the CPU lacks the instruction; then it says so.
#include "device/cpu/pair_product.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "core/half.hpp"

namespace talea::cpu {
namespace {

constexpr int64_t width = 16;

struct Floats {
  explicit Floats(int64_t n) : data(static_cast<float*>(std::aligned_alloc(64, bytes(n)))) {
    std::fill_n(data, n, 0.0f);
  }
  ~Floats() { std::free(data); }
  Floats(const Floats&) = delete;
  static size_t bytes(int64_t n) { return static_cast<size_t>((n * 4 + 63) / 64 * 64); }
  float* data;
};

float drawn(std::mt19937& random) {
  return bf16_to_float(float_to_bf16(std::normal_distribution<float>()(random)));
}

TEST(PairProduct, IsUsedWhereTheCpuHasIt) {
  std::ifstream file("/proc/cpuinfo");
  bool has = false;
  for (std::string line; std::getline(file, line);)
    has = has || line.find(" avx512_bf16") != std::string::npos;
  const char* ceiling = std::getenv("DNNL_MAX_CPU_ISA");
  const bool allowed = lanes() == width && (!ceiling || std::string(ceiling) == "ALL");
  EXPECT_EQ(native_bf16(), has && allowed);
}

// Matrices as the three forms want them, and the product in fp64.
struct Sample {
  int64_t rows, columns, depth;
  LeftForm form;
  std::vector<float> a, b;  // [rows][depth], [depth][columns]
  Floats left, right;
  PairProduct t;

  Sample(int64_t m, int64_t n, int64_t k, LeftForm f, unsigned seed)
      : rows(m),
        columns(n),
        depth(k),
        form(f),
        left((m + 32) * (k + 32)),
        right((n + width) * (k + 2)) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < m * k; ++i) a.push_back(drawn(random));
    for (int64_t i = 0; i < k * n; ++i) b.push_back(drawn(random));
    t.form = f;
    t.rows = m;
    t.panels = (n + width - 1) / width;
    t.last_columns = n % width;
    t.depth = k + k % 2;
    t.b_panel = t.depth * width;
    t.a = left.data;
    t.b = reinterpret_cast<uint16_t*>(right.data);
    std::vector<uint16_t> b16;
    for (float x : b) b16.push_back(float_to_bf16(x));
    load_pairs({b16.data(), DType::bf16, 0, n, 1, k, n}, reinterpret_cast<uint16_t*>(right.data),
               t.b_panel);
    place_left();
  }

  void place_left() {
    if (form == LeftForm::row_major) {
      t.a_stride = depth + 3;
      auto* to = reinterpret_cast<uint16_t*>(left.data);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t k = 0; k < depth; ++k)
          to[i * t.a_stride + k] = float_to_bf16(a[static_cast<size_t>(i * depth + k)]);
      return;
    }
    // Panels of twins: 16 "tokens" side by side, vocabulary entries below one another.
    const bool tokens_are_rows = form == LeftForm::panel_transposed;
    const int64_t entries = tokens_are_rows ? depth : rows, tokens = tokens_are_rows ? rows : depth;
    t.a_stride = (entries + entries % 2) * width;
    const std::vector<float> never(width, INFINITY);
    std::vector<uint32_t> rest(width * Remainders::most);
    for (int64_t first = 0; first < tokens; first += width) {
      float* panel = left.data + first / width * t.a_stride;
      for (int64_t v = 0; v < entries; ++v)
        for (int64_t r = first; r < std::min(first + width, tokens); ++r)
          panel[v * width + r % width] =
              a[static_cast<size_t>(tokens_are_rows ? r * depth + v : v * depth + r)];
      narrow_to_twins(panel, entries, never.data(), rest.data());
    }
  }

  std::vector<float> product(const std::vector<float>& before, bool accumulate) {
    std::vector<float> c = before;
    t.c = c.data();
    t.c_row = columns;
    t.c_panel = width;
    t.accumulate = accumulate;
    multiply(t);
    return c;
  }
};

TEST(PairProduct, EveryFormAndEdge) {
  if (!native_bf16()) GTEST_SKIP() << "unavailable: no AVX512-BF16, or a ceiling forbids it";
  unsigned seed = 1;
  for (const LeftForm form : {LeftForm::row_major, LeftForm::panel, LeftForm::panel_transposed})
    for (const int64_t rows : {1, 8, 16, 27, 48})
      for (const int64_t columns : {1, 16, 31, 48, 64, 83})
        for (const int64_t depth : {2, 16, 30, 48, 128}) {
          if (form == LeftForm::panel && depth % width != 0) continue;  // whole panels of tokens
          Sample s(rows, columns, depth, form, ++seed);
          std::vector<float> before(static_cast<size_t>(rows * columns), 0.5f);
          for (const bool accumulate : {false, true}) {
            const auto c = s.product(before, accumulate);
            for (int64_t i = 0; i < rows; ++i)
              for (int64_t j = 0; j < columns; ++j) {
                double sum = accumulate ? 0.5 : 0, size = 1;
                for (int64_t k = 0; k < depth; ++k) {
                  const double term = double{s.a[static_cast<size_t>(i * depth + k)]} *
                                      double{s.b[static_cast<size_t>(k * columns + j)]};
                  sum += term;
                  size += std::abs(term);
                }
                const float got = c[static_cast<size_t>(i * columns + j)];
                if (!(std::abs(got - sum) <= size * static_cast<double>(depth) * 0x1p-24))
                  FAIL() << "form " << static_cast<int>(form) << ", " << rows << " x " << columns
                         << " x " << depth << " at " << i << ", " << j << ": " << got << ", want "
                         << sum;
              }
          }
        }
}

TEST(PairProduct, ARowHasTheSameBitsInAnyTile) {
  if (!native_bf16()) GTEST_SKIP() << "unavailable: no AVX512-BF16, or a ceiling forbids it";
  Sample s(27, 83, 200, LeftForm::row_major, 5);
  const std::vector<float> zero(27 * 83);
  const auto all = s.product(zero, false);
  for (int64_t rows : {1, 3, 9, 20}) {
    s.t.rows = rows;
    const auto part = s.product(zero, false);
    for (int64_t i = 0; i < rows * 83; ++i)
      ASSERT_EQ(part[static_cast<size_t>(i)], all[static_cast<size_t>(i)]);
  }
}

TEST(PairProduct, TwinsAreRoundedAsDefinedAndKeepTheRest) {
  if (!native_bf16()) GTEST_SKIP() << "unavailable: no AVX512-BF16, or a ceiling forbids it";
  const int64_t columns = 37;
  std::mt19937 random(3);
  Floats panel((columns + 1) * width);
  std::vector<float> exact;
  for (int64_t i = 0; i < columns * width; ++i)
    exact.push_back(std::ldexp(std::normal_distribution<float>()(random), i % 7 == 0 ? -130 : 0));
  exact[5] = NAN, exact[6] = INFINITY, exact[7] = 3.4e38f, exact[8] = 1.0f;
  std::copy(exact.begin(), exact.end(), panel.data);
  std::vector<float> large(width, 1.0f);
  large[3] = INFINITY;
  std::vector<uint32_t> rest(width * Remainders::most, 0xffffffffu);
  narrow_to_twins(panel.data, columns, large.data(), rest.data());
  const auto* twins = reinterpret_cast<const uint16_t*>(panel.data);
  for (int64_t v = 0; v < columns + 1; ++v)
    for (int64_t r = 0; r < width; ++r) {
      const float x = v < columns ? exact[static_cast<size_t>(v * width + r)] : 0.0f;
      const uint16_t* block = twins + v / 2 * 4 * width;
      ASSERT_EQ(block[r * 2 + v % 2], float_to_bf16(x)) << v << ", " << r;
      ASSERT_EQ(block[2 * width + v % 2 * width + r], float_to_bf16(x)) << v << ", " << r;
    }
  for (int64_t r = 0; r < width; ++r) {
    int64_t next = 0;
    for (int64_t v = 0; v < columns; ++v) {
      const float x = exact[static_cast<size_t>(v * width + r)];
      const float left = x - bf16_to_float(float_to_bf16(x));
      if (!(std::abs(x) > large[static_cast<size_t>(r)]) || !std::isfinite(left) || left == 0 ||
          next == Remainders::most)
        continue;
      const uint32_t entry = rest[static_cast<size_t>(r * Remainders::most + next++)];
      ASSERT_EQ(Remainders::column(entry), v);
      ASSERT_EQ(Remainders::value(entry), bf16_to_float(float_to_bf16(left)));
    }
    for (; next < Remainders::most; ++next)
      ASSERT_EQ(rest[static_cast<size_t>(r * Remainders::most + next)], 0u);
  }
}

TEST(PairProduct, AddsOneRowOfTheRightOperand) {
  if (!native_bf16()) GTEST_SKIP() << "unavailable: no AVX512-BF16, or a ceiling forbids it";
  Sample s(1, 43, 6, LeftForm::row_major, 9);
  s.t.c_panel = width;
  for (int64_t k = 0; k < s.depth; ++k) {
    std::vector<float> c(44, 2.0f);
    add_row(s.t, k, 0.5f, c.data());
    for (int64_t j = 0; j < 43; ++j)
      EXPECT_EQ(c[static_cast<size_t>(j)], 2.0f + 0.5f * s.b[static_cast<size_t>(k * 43 + j)]);
    EXPECT_EQ(c[43], 2.0f);
  }
}

}  // namespace
}  // namespace talea::cpu
