// What: softmax.hpp in Highway, compiled once for each instruction set.
// Why: one tile of scores passes through registers once.
// Never: starts a maximum anywhere but at -Inf.
#include "ops/sparse_attention/cpu/softmax.hpp"

#include <limits>

#include "device/cpu/tile_product.hpp"
#include "ops/sparse_attention/mutants.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sparse_attention/cpu/softmax.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// After the above: it is compiled once for each target too.
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace talea::sparse_attention::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, talea::cpu::max_lanes>;
using V = hn::Vec<D>;
constexpr int64_t width = hn::MaxLanes(D());
constexpr float infinity = std::numeric_limits<float>::infinity();

HWY_INLINE V ExpKeepNaN(V x) {
  const D d;
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

bool SoftmaxTile(const ScoreTile& t, float* max, float* sum, float* factor) {
  const D d;
  const V scale = hn::Set(d, t.scale), one = hn::Set(d, 1.0f), low = hn::Set(d, -infinity);
  bool changed = false;
  for (int64_t h = 0; h < t.padded; h += width) {
    const V old = hn::LoadU(d, max + h);
    V most = old;
    for (int64_t j = 0; j < t.keys; ++j) {
      float* at = t.s + j * t.padded + h;
      const V s = hn::Mul(hn::LoadU(d, at), scale);
      hn::StoreU(s, d, at);
      most = hn::IfThenElse(hn::Or(hn::Gt(s, most), hn::IsNaN(s)), s, most);
    }
    // A row that holds -Inf alone has no distance to its maximum.
    const V shift = hn::IfThenElse(hn::Eq(most, low), hn::Zero(d), most);
    const V rescale = hn::IfThenElse(hn::Eq(old, most), one, ExpKeepNaN(hn::Sub(old, shift)));
    V total = hn::Zero(d);
    for (int64_t j = 0; j < t.keys; ++j) {
      float* at = t.s + j * t.padded + h;
      const V e = ExpKeepNaN(hn::Sub(hn::LoadU(d, at), shift));
      hn::StoreU(e, d, at);
      total = hn::Add(total, e);
    }
    hn::StoreU(hn::MulAdd(hn::LoadU(d, sum + h), rescale, total), d, sum + h);
    hn::StoreU(rescale, d, factor + h);
    hn::StoreU(most, d, max + h);
    changed = changed || !hn::AllTrue(d, hn::Eq(rescale, one));
  }
  return changed;
}

template <bool kLse>
void GradientPanel(const GradientTile& t, int64_t h) {
  const D d;
  const ScoreTile& s = t.scores;
  const V scale = hn::Set(d, s.scale), whole = hn::LoadU(d, t.whole + h);
  const V delta = hn::LoadU(d, t.delta + h), lse = hn::LoadU(d, t.lse + h);
  const V share = hn::LoadU(d, t.share + h), lse_share = hn::LoadU(d, t.lse_share + h);
  const V d_lse = kLse ? hn::LoadU(d, t.d_lse + h) : hn::Zero(d);
  for (int64_t j = 0; j < s.keys; ++j) {
    const int64_t at = j * s.padded + h;
    const V z = hn::Mul(hn::LoadU(d, s.s + at), scale);
    const V p = hn::Mul(ExpKeepNaN(hn::Sub(z, whole)), share);
    V ds = hn::Mul(p, hn::Sub(hn::LoadU(d, t.d + at), delta));
    if constexpr (kLse) ds = hn::MulAdd(hn::Mul(ExpKeepNaN(hn::Sub(z, lse)), lse_share), d_lse, ds);
    hn::StoreU(p, d, s.s + at);
    hn::StoreU(hn::Mul(ds, scale), d, t.d + at);
  }
}

void Gradient(const GradientTile& t) {
  for (int64_t h = 0; h < t.scores.padded; h += width)
    t.d_lse ? GradientPanel<true>(t, h) : GradientPanel<false>(t, h);
}

double Dot(const float* x, const float* y, int64_t n) {
  const D d;
  V sum[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  int64_t i = 0;
  for (; i + 4 * width <= n; i += 4 * width)
    for (int64_t j = 0; j < 4; ++j)
      sum[j] = hn::MulAdd(hn::LoadU(d, x + i + j * width), hn::LoadU(d, y + i + j * width), sum[j]);
  double total =
      hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]))));
  for (; i < n; ++i) total += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  return total;
}

void ScaleRow(float* x, int64_t n, float factor) {
  const D d;
  int64_t i = 0;
  for (; i + width <= n; i += width)
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, factor)), d, x + i);
  for (; i < n; ++i) x[i] *= factor;
}

}  // namespace HWY_NAMESPACE
}  // namespace talea::sparse_attention::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace talea::sparse_attention::cpu {

HWY_EXPORT(SoftmaxTile);
HWY_EXPORT(Gradient);
HWY_EXPORT(Dot);
HWY_EXPORT(ScaleRow);

bool softmax_tile(const ScoreTile& t, float* max, float* sum, float* factor) {
  return HWY_DYNAMIC_DISPATCH(SoftmaxTile)(t, max, sum, factor);
}
void gradient_tile(const GradientTile& t) { HWY_DYNAMIC_DISPATCH(Gradient)(t); }
double dot(const float* x, const float* y, int64_t n) { return HWY_DYNAMIC_DISPATCH(Dot)(x, y, n); }
void scale_row(float* x, int64_t n, float factor) { HWY_DYNAMIC_DISPATCH(ScaleRow)(x, n, factor); }

}  // namespace talea::sparse_attention::cpu
#endif
