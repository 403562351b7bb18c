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

struct CapPair {
  V z, derivative;
};

// k * tanh(a / k), and 1 - tanh^2 without the cancellation near saturation. Below 0.625 an odd
// polynomial of our own fit (error 6e-10), above it exponentials.
HWY_INLINE CapPair Cap(V a, float cap) {
  const D d;
  const V one = hn::Set(d, 1.0f), two = hn::Set(d, 2.0f);
  const V u = hn::Div(a, hn::Set(d, cap)), x = hn::Abs(u);
  const V e = hn::Exp(d, hn::Mul(x, hn::Set(d, -2.0f))), sum = hn::Add(one, e);
  const V large = hn::Sub(one, hn::Div(hn::Mul(two, e), sum));
  const V slope = hn::Div(hn::Mul(hn::Set(d, 4.0f), e), hn::Mul(sum, sum));
  const V y = hn::Mul(x, x);
  V poly = hn::Set(d, 0.0022927447f);
  for (const float c : {-0.0083439454f, 0.021768919f, -0.053959260f, 0.13333304f, -0.33333333f})
    poly = hn::MulAdd(poly, y, hn::Set(d, c));
  const V small = hn::MulAdd(hn::Mul(x, y), poly, x);
  const auto is_small = hn::Lt(x, hn::Set(d, 0.625f));
  const V tanh = hn::CopySign(hn::IfThenElse(is_small, small, large), u);
  const V derivative = hn::IfThenElse(is_small, hn::NegMulAdd(small, small, one), slope);
  const auto odd = hn::IsNaN(a);
  return {hn::IfThenElse(odd, a, hn::Mul(hn::Set(d, cap), tanh)),
          hn::IfThenElse(odd, a, derivative)};
}

// z = scale * product + bias, in place; its softcap goes to f.capped. Returns each row's maximum.
V Logits(const TilePanel& t, const ForwardPass& f) {
  const D d;
  V max = hn::Set(d, mutant(Mutant::b12_max_starts_at_zero) ? 0.0f : -infinity);
  if (f.plain) {
    for (int64_t v = 0; v < t.columns; ++v) max = hn::Max(hn::LoadU(d, t.z + v * width), max);
    return max;
  }
  const V scale = hn::LoadU(d, t.scale);
  for (int64_t v = 0; v < t.columns; ++v) {
    const V product = hn::LoadU(d, t.z + v * width);
    V z = hn::MulAdd(scale, product, hn::Set(d, t.bias ? t.bias[v] : 0.0f));
    hn::StoreU(z, d, t.z + v * width);
    if (t.softcap > 0) {
      z = Cap(z, t.softcap).z;
      hn::StoreU(z, d, f.capped + v * width);
    }
    max = hn::Max(z, max);  // a NaN logit leaves max alone and reaches the sum
  }
  return max;
}

void LogitsOnly(const TilePanel& t, const ForwardPass& f) { Logits(t, f); }

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

// A sum and what its roundings left: equal terms round alike, and a mean over the words would
// drift.
struct ExactSum {
  V sum, rest;

  HWY_INLINE void Add(V x) {
    const V all = hn::Add(sum, x), part = hn::Sub(all, sum);
    rest = hn::Add(rest, hn::Add(hn::Sub(sum, hn::Sub(all, part)), hn::Sub(x, part)));
    sum = all;
  }
  HWY_INLINE void Store(float* to) const {  // an infinite sum leaves NaN
    hn::StoreU(hn::IfThenElse(hn::IsNaN(rest), sum, hn::Add(sum, rest)), D(), to);
  }
};

void WeightedSums(const TilePanel& t, const ForwardPass& f) {
  const D d;
  const V zero = hn::Zero(d);
  ExactSum class_sum = {zero, zero}, soft_sum = class_sum, soft_mass = class_sum;
  for (int64_t v = 0; v < t.columns; ++v) {
    const V z = hn::LoadU(d, t.z + v * width);
    const V c = hn::Set(d, t.class_weight ? t.class_weight[v] : 1.0f);
    if (f.wants_class_sum) class_sum.Add(hn::Mul(c, z));
    if (t.soft) {
      const V mass = hn::Mul(c, hn::LoadU(d, t.soft + v * width));
      soft_sum.Add(hn::Mul(mass, z));
      soft_mass.Add(mass);
    }
  }
  if (f.wants_class_sum) class_sum.Store(f.class_sum);
  if (!t.soft) return;
  soft_sum.Store(f.soft_sum);
  soft_mass.Store(f.soft_mass);
}

void Forward(const TilePanel& panel, const ForwardPass& f) {
  const D d;
  const V max = Logits(panel, f);
  TilePanel t = panel;
  if (t.softcap > 0) t.z = f.capped;
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

// A sum whose rounding errors are carried along to first order.
struct Carried {
  V value, error;
  HWY_INLINE void Minus(V a, V b) {
    const V product = hn::Mul(a, b);
    value = hn::Sub(value, product);
    error = hn::Sub(error, hn::MulSub(a, b, product));
  }
};

void Gradient(const TilePanel& t, const GradientPass& g) {
  const D d;
  const DI di;
  const V max = hn::LoadU(d, g.max), scale = hn::LoadU(d, t.scale);
  const V prob = hn::LoadU(d, g.prob), prob_low = hn::LoadU(d, g.prob_low);
  const V own = hn::LoadU(d, g.target), soft = hn::LoadU(d, g.soft);
  const V smooth = hn::LoadU(d, g.smooth), smooth_low = hn::LoadU(d, g.smooth_low);
  const V weight = hn::LoadU(d, g.entropy_weight), offset = hn::LoadU(d, g.entropy_offset);
  const auto target = hn::LoadU(di, t.target);
  const bool any = AnyTarget(t), derivative = !mutant(Mutant::softcap_no_derivative);
  for (int64_t v = 0; v < t.columns; ++v) {
    CapPair logit = {hn::LoadU(d, t.z + v * width), hn::Zero(d)};
    if (t.softcap > 0) logit = Cap(logit.z, t.softcap);
    const V distance = hn::Sub(logit.z, max);
    const V e = ExpKeepNaN(distance);
    Carried dz;
    dz.value = hn::Mul(prob, e);
    dz.error = hn::MulAdd(prob_low, e, hn::MulSub(prob, e, dz.value));
    if (any) {
      const auto is_target =
          hn::RebindMask(d, hn::Eq(target, hn::Set(di, static_cast<int32_t>(v))));
      dz.value = hn::IfThenElse(is_target, own, dz.value);
      dz.error = hn::IfThenZeroElse(is_target, dz.error);
    }
    const V c = hn::Set(d, t.class_weight ? t.class_weight[v] : 1.0f);
    if (g.wants_smooth) {
      dz.Minus(smooth, c);
      dz.error = hn::NegMulAdd(smooth_low, c, dz.error);
    }
    if (t.soft) dz.Minus(hn::Mul(soft, c), hn::LoadU(d, t.soft + v * width));
    if (g.wants_entropy) {
      const V term = hn::Mul(hn::Mul(weight, e), hn::Sub(distance, offset));
      dz.value = hn::Sub(dz.value, hn::IfThenZeroElse(hn::Eq(e, hn::Zero(d)), term));
    }
    V da = hn::Add(dz.value, dz.error);
    if (t.softcap > 0 && derivative) da = hn::Mul(da, logit.derivative);
    if (g.db_lanes) {
      float* db = g.db_lanes + v * width;
      hn::StoreU(hn::Add(hn::LoadU(d, db), da), d, db);
    }
    hn::StoreU(hn::Mul(da, scale), d, t.z + v * width);
  }
}

void TopK(const float* z, int64_t columns, float softcap, int64_t k, Best* best) {
  const D d;
  for (int64_t i = 0; i < width * k; ++i) best[i] = {-infinity, INT64_MAX};
  HWY_ALIGN float least[talea::cpu::max_lanes];  // of each list
  HWY_ALIGN float values[talea::cpu::max_lanes];
  std::fill_n(least, width, -infinity);
  V bar = hn::Load(d, least);
  const bool ties = mutant(Mutant::topk_tie_highest);
  for (int64_t v = 0; v < columns; ++v) {
    V row = hn::LoadU(d, z + v * width);
    if (softcap > 0) row = Cap(row, softcap).z;
    if (HWY_LIKELY(hn::AllFalse(d, ties ? hn::Ge(row, bar) : hn::Gt(row, bar)))) continue;
    hn::Store(row, d, values);
    for (int64_t i = 0; i < width; ++i) {
      const float value = values[i];
      if (!(ties ? value >= least[i] : value > least[i])) continue;
      // Columns come in rising order: an equal value found earlier stays in front.
      Best* list = best + i * k;
      int64_t j = k - 1;
      for (; j > 0 && (ties ? value >= list[j - 1].value : value > list[j - 1].value); --j)
        list[j] = list[j - 1];
      list[j] = {value, v};
      least[i] = list[k - 1].value;
    }
    bar = hn::Load(d, least);
  }
}

Capped CapOne(float a, float softcap) {
  const D d;
  const CapPair pair = Cap(hn::Set(d, a), softcap);
  return {hn::GetLane(pair.z), hn::GetLane(pair.derivative)};
}

}  // namespace HWY_NAMESPACE
}  // namespace talea::lce::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace talea::lce::cpu {

HWY_EXPORT(Forward);
HWY_EXPORT(LogitsOnly);
HWY_EXPORT(Gradient);
HWY_EXPORT(TopK);
HWY_EXPORT(CapOne);

void forward_pass(const TilePanel& t, const ForwardPass& f) { HWY_DYNAMIC_DISPATCH(Forward)(t, f); }
void logits_pass(const TilePanel& t, const ForwardPass& f) {
  HWY_DYNAMIC_DISPATCH(LogitsOnly)(t, f);
}
void gradient_pass(const TilePanel& t, const GradientPass& g) {
  HWY_DYNAMIC_DISPATCH(Gradient)(t, g);
}

Capped capped(float a, float softcap) {
  if (softcap > 0) return HWY_DYNAMIC_DISPATCH(CapOne)(a, softcap);
  return {a, 1};
}

void top_k(const float* z, int64_t columns, float softcap, int64_t k, Best* best) {
  HWY_DYNAMIC_DISPATCH(TopK)(z, columns, softcap, k, best);
  // A list with room left takes -inf logits, lowest ids first: the rare case, done in plain loops.
  const int64_t width = talea::cpu::lanes();
  for (int64_t i = 0; i < width; ++i) {
    Best* list = best + i * k;
    int64_t filled = 0;
    while (filled < k && list[filled].id != INT64_MAX) ++filled;
    for (int64_t v = 0; v < columns && filled < k; ++v)
      if (capped(z[v * width + i], softcap).z == -std::numeric_limits<float>::infinity())
        list[filled++] = {-std::numeric_limits<float>::infinity(), v};
  }
}

}  // namespace talea::lce::cpu
#endif
