// What: scores.hpp in Highway, compiled once for each instruction set.
// Why: lanes are keys, so that the heads of a query are summed in order without a shuffle.
// Never: writes a score to memory before all heads are in it.
#include "ops/sparse_attention/cpu/scores.hpp"

#include <algorithm>
#include <array>

#include "device/cpu/tile_product.hpp"
#include "ops/sparse_attention/mutants.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sparse_attention/cpu/scores.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace talea::sparse_attention::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, talea::cpu::max_lanes>;
using V = hn::Vec<D>;
constexpr int64_t width = hn::MaxLanes(D());
constexpr bool many_registers = HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON;
constexpr int block_heads = many_registers && width >= 8 ? 8 : 4;

template <int MR, int NV>
HWY_INLINE void Heads(const ScorePanels& t, int64_t head, const float* HWY_RESTRICT keys,
                      V (&score)[NV]) {
  const D d;
  const float* HWY_RESTRICT q = t.q + head * t.depth;
  const int64_t panel = t.depth * width;
  V sum[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) sum[i][n] = hn::Zero(d);
  for (int64_t k = 0; k < t.depth; ++k, keys += width) {
    V column[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) column[n] = hn::LoadU(d, keys + n * panel);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const V left = hn::Set(d, q[i * t.depth + k]);
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) sum[i][n] = hn::MulAdd(left, column[n], sum[i][n]);
    }
  }
  const V zero = hn::Zero(d);
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
    const V weight = hn::Set(d, t.weights[head + i]);
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) {
      // NaN is not below 0: it stays.
      const V z = t.relu ? hn::IfThenElse(hn::Le(sum[i][n], zero), zero, sum[i][n]) : sum[i][n];
      score[n] = hn::MulAdd(weight, z, score[n]);
    }
  }
}

template <int NV>
HWY_NOINLINE void Panels(const ScorePanels& t, int64_t panel) {
  const D d;
  V score[NV];
#pragma GCC unroll 4
  for (int n = 0; n < NV; ++n) score[n] = hn::Zero(d);
  const float* keys = t.keys + panel * t.depth * width;
  int64_t h = 0;
  for (; h + block_heads <= t.heads; h += block_heads) Heads<block_heads, NV>(t, h, keys, score);
  for (; h < t.heads; ++h) Heads<1, NV>(t, h, keys, score);
#pragma GCC unroll 4
  for (int n = 0; n < NV; ++n) {
    const int64_t at = (panel + n) * width;
    if (t.key_scale) score[n] = hn::Mul(score[n], hn::LoadU(d, t.key_scale + at));
    if (mutant(Mutant::sa37_scores_zero_in_long_rows) && at >= 256) score[n] = hn::Zero(d);
    hn::StoreU(score[n], d, t.scores + at);
  }
}

void Score(const ScorePanels& t) {
  int64_t panel = 0;
  for (; panel + 3 <= t.panels; panel += 3) Panels<3>(t, panel);
  for (; panel < t.panels; ++panel) Panels<1>(t, panel);
}

// Numbers in the order of selection as unsigned integers: NaN the largest, -0 as +0, -Inf below
// all.
void Sortable(const float* scores, int64_t n, uint32_t* bits) {
  const D d;
  const hn::RebindToUnsigned<D> du;
  const auto top = hn::Set(du, 0x80000000u);
  int64_t i = 0;
  for (; i + width <= n; i += width) {
    V x = hn::LoadU(d, scores + i);
    if (mutant(Mutant::sa15_scores_in_half)) x = hn::Min(x, hn::Set(d, 65504.0f));
    const auto raw = hn::BitCast(du, hn::Add(x, hn::Zero(d)));  // -0 + 0 is +0
    const auto negative = hn::RebindMask(du, hn::Lt(x, hn::Zero(d)));
    auto key = hn::IfThenElse(negative, hn::Not(raw), hn::Or(raw, top));
    key = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), hn::Set(du, 0xffffffffu), key);
    hn::StoreU(key, du, bits + i);
  }
  for (; i < n; ++i) {
    float x = scores[i] + 0.0f;
    if (mutant(Mutant::sa15_scores_in_half) && x > 65504.0f) x = 65504.0f;
    uint32_t raw;
    __builtin_memcpy(&raw, &x, 4);
    bits[i] = x != x ? 0xffffffffu : raw >> 31 ? ~raw : raw | 0x80000000u;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace talea::sparse_attention::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace talea::sparse_attention::cpu {

HWY_EXPORT(Score);
HWY_EXPORT(Sortable);

void score_panels(const ScorePanels& t) { HWY_DYNAMIC_DISPATCH(Score)(t); }

namespace {

constexpr uint32_t lowest = 0x007fffffu;  // -Inf

// The k-th largest of bits[0, n), by digits from the top; `rest`: how many equal to it are wanted.
uint32_t threshold(const uint32_t* bits, int64_t n, int64_t k, int64_t& rest) {
  constexpr int digits[3][2] = {{21, 11}, {10, 11}, {0, 10}};  // shift, width
  uint32_t prefix = 0, mask = 0;
  for (const auto& [shift, size] : digits) {
    std::array<int32_t, 2048> count{};
    for (int64_t i = 0; i < n; ++i)
      if ((bits[i] & mask) == prefix) ++count[bits[i] >> shift & ((1u << size) - 1)];
    uint32_t digit = (1u << size) - 1;
    while (digit > 0 && count[digit] < k) k -= count[digit--];
    prefix |= digit << shift;
    mask |= ((1u << size) - 1) << shift;
  }
  rest = k;
  return prefix;
}

}  // namespace

int64_t select_largest(const float* scores, int64_t n, int64_t k, int64_t first, uint32_t* bits,
                       int32_t* to, int64_t& nan_scores) {
  HWY_DYNAMIC_DISPATCH(Sortable)(scores, n, bits);
  int64_t candidates = 0, odd = 0;
  for (int64_t i = 0; i < n; ++i) {
    candidates += bits[i] > lowest;
    odd += bits[i] == 0xffffffffu;
  }
  nan_scores += odd;
  k = std::min(k, candidates);
  if (k == 0) return 0;
  int64_t rest = 0;
  const uint32_t least = threshold(bits, n, k, rest);
  if (mutant(Mutant::sa14_ties_overflow)) rest = std::min<int64_t>(rest, 16);
  int64_t found = 0, skip = 0;
  if (mutant(Mutant::sa16_ties_to_the_higher)) skip = std::count(bits, bits + n, least) - rest;
  for (int64_t i = 0; i < n && found < k; ++i) {
    if (bits[i] == least && skip-- > 0) continue;
    const bool equal = bits[i] == least && rest > 0;
    to[found] = static_cast<int32_t>(first + i);
    found += bits[i] > least || equal;
    rest -= equal;
  }
  return found;
}

}  // namespace talea::sparse_attention::cpu
#endif
