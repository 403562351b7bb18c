// What: the rules of a row, of which every lane takes the same functions.
// Why: a rule that host and device share is tested once, without a device.
// Never: runs a lane.
#include <gtest/gtest.h>

#include <limits>

#include "ops/linear_cross_entropy/rows/rule.hpp"

namespace talea::lce {
namespace {

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr IdRule ids{10, -100};
constexpr int64_t listed[] = {-100, 3, -100, -100, 10, 3};

constexpr RowKind kind(int64_t first, int64_t count) {
  return kind_of_ids(ids, count, [first](int64_t j) { return listed[first + j]; });
}

// They hold where the compiler knows the numbers: the functions are constant expressions.
static_assert(kind_of_id(ids, 0) == RowKind::valid && kind_of_id(ids, 9) == RowKind::valid);
static_assert(kind_of_id(ids, 10) == RowKind::poisoned && kind_of_id(ids, -1) == RowKind::poisoned);
static_assert(kind_of_id(ids, -100) == RowKind::ignored);
static_assert(kind_of_id({10, 3}, 3) == RowKind::ignored, "inside the vocabulary, too");
static_assert(kind(0, 1) == RowKind::ignored && kind(2, 2) == RowKind::ignored);
static_assert(kind(0, 2) == RowKind::poisoned, "ignored as a whole or not at all");
static_assert(kind(1, 1) == RowKind::valid && kind(4, 2) == RowKind::poisoned);
static_assert(kind(0, 0) == RowKind::valid, "no id, no complaint");

constexpr Columns shard{100, 50};
static_assert(shard.of(100) == 0 && shard.of(149) == 49 && shard.of(99) == -1);
static_assert(shard.of(150) == -1 && Columns{100, 0}.of(100) == -1);

static_assert(is_scale(-2, 0.5) && !is_scale(0, 1) && !is_scale(inf, 1) && !is_scale(nan, 1));
static_assert(!is_scale(1e-39, 1), "no normal number of fp32");
static_assert(is_scale(1e-30, 1) && !is_scale(1e-30, 1e-30), "their product is 0 in fp32");
static_assert(is_class_weight(0) && is_class_weight(3) && !is_class_weight(-1e-300));
static_assert(!is_class_weight(inf) && !is_class_weight(nan));

static_assert(denominator_of({Reduction::sum, Denominator::given, OnEmpty::nan, 7}, 2, 3) == 1);
static_assert(denominator_of({Reduction::mean, Denominator::given, OnEmpty::nan, 7}, 2, 3) == 7);
static_assert(denominator_of({Reduction::mean, Denominator::valid}, 2, 3) == 2);
static_assert(denominator_of({Reduction::mean, Denominator::weighted}, 2, 3) == 3);

constexpr MeanRule counted{Reduction::mean, Denominator::valid, OnEmpty::nan};
constexpr MeanRule zero{Reduction::mean, Denominator::valid, OnEmpty::zero};
constexpr MeanRule given{Reduction::mean, Denominator::given, OnEmpty::nan, 4};
static_assert(reduced(counted, 6, 2, false) == 3 && reduced({Reduction::sum}, 6, 2, true) == 6);
static_assert(reduced(counted, 0, 0, true) != reduced(counted, 0, 0, true), "NaN");
static_assert(reduced(zero, 0, 0, true) == 0 && reduced(given, 0, 4, true) == 0);

TEST(Rules, WhatARowWeighs) {
  EXPECT_EQ(counted_weight(RowKind::ignored, 5), 0);
  EXPECT_EQ(counted_weight(RowKind::valid, 5), 5);
  EXPECT_EQ(counted_weight(RowKind::poisoned, 5), 1);
}

TEST(Rules, HalfPrecisionHoldsTheLargestElement) {
  for (const double largest : {1e-20, 3e-5, 0.7, 1.0, 4095.0, 65504.0, 1e20}) {
    const double stored = std::ldexp(largest, storage_exponent(largest, 120));
    EXPECT_TRUE(stored >= 2048 && stored <= 4096) << largest;
  }
  EXPECT_EQ(storage_exponent(0, 120), 120);  // a row of zeros holds nobody down
  EXPECT_EQ(storage_exponent(1e-300, 100), 100);
  EXPECT_EQ(storage_exponent(nan, 100), 0);
  EXPECT_EQ(storage_exponent(inf, 100), 0);
}

}  // namespace
}  // namespace talea::lce
