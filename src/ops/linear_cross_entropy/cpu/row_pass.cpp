// What: row_pass.hpp in Highway, compiled once for each instruction set.
// Why: vectors run along rows; the loop over the vocabulary has a fixed order on every machine.
// Never: rounds a logit, or forms p_target - 1 by subtraction.
#include "ops/linear_cross_entropy/cpu/row_pass.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/mutant.hpp"
#include "device/cpu/tile_product.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/linear_cross_entropy/cpu/row_pass.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// After the above: it is compiled once for each target too.
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace talea::lce::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, talea::cpu::max_lanes>;
using DI = hn::RebindToSigned<D>;
using V = hn::Vec<D>;
constexpr int64_t width = hn::MaxLanes(D());
constexpr float infinity = std::numeric_limits<float>::infinity();

// Highway's Exp gives 0 for NaN; here NaN stays.
HWY_INLINE V ExpKeepNaN(V x) {
  const D d;
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

HWY_INLINE V Cap(V a, V cap) {
  const D d;
  const V z = hn::Mul(cap, hn::Tanh(d, hn::Div(a, cap)));
  return hn::IfThenElse(hn::IsNaN(a), a, z);
}

// z = softcap(scale * product + bias); returns the maximum of each row.
V Logits(const TilePanel& t, bool plain) {
  const D d;
  V max = hn::Set(d, mutant(Mutant::b12_max_starts_at_zero) ? 0.0f : -infinity);
  if (plain) {
    for (int64_t v = 0; v < t.columns; ++v) max = hn::Max(hn::LoadU(d, t.z + v * width), max);
    return max;
  }
  const V scale = hn::LoadU(d, t.scale);
  const V cap = hn::Set(d, t.softcap);
  for (int64_t v = 0; v < t.columns; ++v) {
    const V product = hn::LoadU(d, t.z + v * width);
    V z = hn::MulAdd(scale, product, hn::Set(d, t.bias ? t.bias[v] : 0.0f));
    if (t.softcap > 0) z = Cap(z, cap);
    hn::StoreU(z, d, t.z + v * width);
    max = hn::Max(z, max);  // a NaN logit leaves max alone and reaches the sum
  }
  return max;
}

bool AnyTarget(const TilePanel& t) {
  for (int64_t i = 0; i < width; ++i)
    if (t.target[i] >= 0) return true;
  return false;
}

// Sums over v != target of exp(z - max), and of the same times (z - max) where kShifted.
template <bool kTarget, bool kShifted>
void Sums(const TilePanel& t, V max, V& others, V& shifted) {
  const D d;
  const DI di;
  const V zero = hn::Zero(d);
  const V shift = hn::IfThenElse(hn::Eq(max, hn::Set(d, -infinity)), zero, max);
  const auto target = hn::LoadU(di, t.target);
  V sum[4] = {zero, zero, zero, zero}, moment[4] = {zero, zero, zero, zero};
  for (int64_t v = 0; v < t.columns; v += 4) {
    const int64_t some = HWY_MIN(int64_t{4}, t.columns - v);
    for (int64_t j = 0; j < some; ++j) {
      const V distance = hn::Sub(hn::LoadU(d, t.z + (v + j) * width), shift);
      V e = ExpKeepNaN(distance);
      if constexpr (kTarget)
        e = hn::IfThenZeroElse(
            hn::RebindMask(d, hn::Eq(target, hn::Set(di, static_cast<int32_t>(v + j)))), e);
      sum[j] = hn::Add(sum[j], e);
      if constexpr (kShifted)  // 0 * -inf is 0 here
        moment[j] = hn::Add(moment[j], hn::IfThenZeroElse(hn::Eq(e, zero), hn::Mul(e, distance)));
    }
  }
  others = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
  shifted = hn::Add(hn::Add(moment[0], moment[1]), hn::Add(moment[2], moment[3]));
}

void WeightedSums(const TilePanel& t, const ForwardPass& f) {
  const D d;
  V class_sum = hn::Zero(d), soft_sum = hn::Zero(d), soft_mass = hn::Zero(d);
  for (int64_t v = 0; v < t.columns; ++v) {
    const V z = hn::LoadU(d, t.z + v * width);
    const V c = hn::Set(d, t.class_weight ? t.class_weight[v] : 1.0f);
    if (f.wants_class_sum) class_sum = hn::MulAdd(c, z, class_sum);
    if (t.soft) {
      const V mass = hn::Mul(c, hn::LoadU(d, t.soft + v * width));
      soft_sum = hn::MulAdd(mass, z, soft_sum);
      soft_mass = hn::Add(soft_mass, mass);
    }
  }
  if (f.wants_class_sum) hn::StoreU(class_sum, d, f.class_sum);
  if (!t.soft) return;
  hn::StoreU(soft_sum, d, f.soft_sum);
  hn::StoreU(soft_mass, d, f.soft_mass);
}

void Forward(const TilePanel& t, const ForwardPass& f) {
  const D d;
  const V max = Logits(t, f.plain);
  V others, shifted;
  if (AnyTarget(t)) {
    f.wants_shifted ? Sums<true, true>(t, max, others, shifted)
                    : Sums<true, false>(t, max, others, shifted);
  } else {
    f.wants_shifted ? Sums<false, true>(t, max, others, shifted)
                    : Sums<false, false>(t, max, others, shifted);
  }
  hn::StoreU(max, d, f.max);
  hn::StoreU(others, d, f.others);
  if (f.wants_shifted) hn::StoreU(shifted, d, f.shifted);
  if (f.wants_class_sum || t.soft) WeightedSums(t, f);
}

void Gradient(const TilePanel& t, const GradientPass& g) {
  const D d;
  const DI di;
  const V max = hn::LoadU(d, g.max), prob = hn::LoadU(d, g.prob), scale = hn::LoadU(d, t.scale);
  const V own = hn::LoadU(d, g.target), smooth = hn::LoadU(d, g.smooth);
  const V soft = hn::LoadU(d, g.soft), weight = hn::LoadU(d, g.entropy_weight);
  const V offset = hn::LoadU(d, g.entropy_offset);
  const V inverse_cap = hn::Set(d, t.softcap > 0 ? 1 / t.softcap : 0.0f);
  const V one = hn::Set(d, 1.0f);
  const auto target = hn::LoadU(di, t.target);
  const bool any = AnyTarget(t), derivative = !mutant(Mutant::softcap_no_derivative);
  for (int64_t v = 0; v < t.columns; ++v) {
    const V z = hn::LoadU(d, t.z + v * width);
    const V distance = hn::Sub(z, max);
    const V e = ExpKeepNaN(distance);
    V dz = hn::Mul(prob, e);
    if (any)
      dz = hn::IfThenElse(hn::RebindMask(d, hn::Eq(target, hn::Set(di, static_cast<int32_t>(v)))),
                          own, dz);
    const V c = hn::Set(d, t.class_weight ? t.class_weight[v] : 1.0f);
    if (g.wants_smooth) dz = hn::NegMulAdd(smooth, c, dz);
    if (t.soft) dz = hn::NegMulAdd(hn::Mul(soft, c), hn::LoadU(d, t.soft + v * width), dz);
    if (g.wants_entropy) {
      const V term = hn::Mul(hn::Mul(weight, e), hn::Sub(distance, offset));
      dz = hn::Sub(dz, hn::IfThenZeroElse(hn::Eq(e, hn::Zero(d)), term));
    }
    if (t.softcap > 0 && derivative) {
      const V u = hn::Mul(z, inverse_cap);
      dz = hn::Mul(dz, hn::NegMulAdd(u, u, one));
    }
    if (g.db_lanes) {
      float* db = g.db_lanes + v * width;
      hn::StoreU(hn::Add(hn::LoadU(d, db), dz), d, db);
    }
    hn::StoreU(hn::Mul(dz, scale), d, t.z + v * width);
  }
}

void TopK(const float* z, int64_t columns, int64_t k, Best* best) {
  const D d;
  for (int64_t i = 0; i < width * k; ++i) best[i] = {-infinity, INT64_MAX};
  float least[talea::cpu::max_lanes];  // of each list
  std::fill_n(least, width, -infinity);
  V bar = hn::LoadU(d, least);
  for (int64_t v = 0; v < columns; ++v) {
    const V row = hn::LoadU(d, z + v * width);
    const bool ties = mutant(Mutant::topk_tie_highest);
    if (HWY_LIKELY(hn::AllFalse(d, ties ? hn::Ge(row, bar) : hn::Gt(row, bar)))) continue;
    for (int64_t i = 0; i < width; ++i) {
      const float value = z[v * width + i];
      if (!(ties ? value >= least[i] : value > least[i])) continue;
      // Columns come in rising order: an equal value found earlier stays in front.
      Best* list = best + i * k;
      int64_t j = k - 1;
      for (; j > 0 && (ties ? value >= list[j - 1].value : value > list[j - 1].value); --j)
        list[j] = list[j - 1];
      list[j] = {value, v};
      least[i] = list[k - 1].value;
    }
    bar = hn::LoadU(d, least);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace talea::lce::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace talea::lce::cpu {

HWY_EXPORT(Forward);
HWY_EXPORT(Gradient);
HWY_EXPORT(TopK);

void forward_pass(const TilePanel& t, const ForwardPass& f) { HWY_DYNAMIC_DISPATCH(Forward)(t, f); }
void gradient_pass(const TilePanel& t, const GradientPass& g) {
  HWY_DYNAMIC_DISPATCH(Gradient)(t, g);
}

void top_k(const float* z, int64_t columns, int64_t k, Best* best) {
  HWY_DYNAMIC_DISPATCH(TopK)(z, columns, k, best);
  // A list with room left takes -inf logits, lowest ids first: the rare case, done in plain loops.
  const int64_t width = talea::cpu::lanes();
  for (int64_t i = 0; i < width; ++i) {
    Best* list = best + i * k;
    int64_t filled = 0;
    while (filled < k && list[filled].id != INT64_MAX) ++filled;
    for (int64_t v = 0; v < columns && filled < k; ++v)
      if (z[v * width + i] == -std::numeric_limits<float>::infinity())
        list[filled++] = {-std::numeric_limits<float>::infinity(), v};
  }
}

}  // namespace talea::lce::cpu
#endif
