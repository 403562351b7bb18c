// What: loss_pass.hpp in Highway, compiled once for each instruction set.
// Why: one tile passes through registers once.
// Never: adds up numbers of a key in an order that depends on its neighbours.
#include "ops/sparse_attention/cpu/loss_pass.hpp"

#include "device/cpu/tile_product.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sparse_attention/cpu/loss_pass.cpp"
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

// Lanes of panel h that are heads.
HWY_INLINE hn::Mask<D> Counted(const LossTile& t, int64_t h) {
  return hn::FirstN(D(), static_cast<size_t>(HWY_MIN(width, t.heads - h)));
}

// NaN is not below 0: it stays.
HWY_INLINE V Active(V z, bool relu) {
  const D d;
  return relu ? hn::IfThenZeroElse(hn::Le(z, hn::Zero(d)), z) : z;
}

template <class Term>
HWY_INLINE void SumRows(const LossTile& t, double* to, Term term) {
  const D d;
  for (int64_t j = 0; j < t.keys; ++j) {
    V sum = hn::Zero(d);
    for (int64_t h = 0; h < t.heads; h += width)
      sum = hn::Add(
          sum, hn::IfThenElseZero(Counted(t, h), term(hn::LoadU(d, t.s + j * t.padded + h), h)));
    to[j] = static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
  }
}

void Teacher(const LossTile& t, float scale, const float* lse, double* to) {
  const D d;
  SumRows(t, to, [=](V s, int64_t h) HWY_ATTR {
    const V x = hn::Sub(hn::Mul(s, hn::Set(d, scale)), hn::LoadU(d, lse + h));
    return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
  });
}

void Score(const LossTile& t, const float* weights, bool relu, double* to) {
  const D d;
  SumRows(t, to, [=](V s, int64_t h) HWY_ATTR {
    return hn::Mul(hn::LoadU(d, weights + h), Active(s, relu));
  });
}

void Chain(const LossTile& t, const double* g, const float* weights, bool relu, float* dw) {
  const D d;
  for (int64_t h = 0; h < t.heads; h += width) {
    const V weight = hn::LoadU(d, weights + h);
    V sum = hn::LoadU(d, dw + h);
    for (int64_t j = 0; j < t.keys; ++j) {
      float* at = t.s + j * t.padded + h;
      const V z = hn::LoadU(d, at), own = hn::Set(d, static_cast<float>(g[j]));
      sum = hn::MulAdd(own, Active(z, relu), sum);
      const V dz = hn::Mul(own, weight);
      hn::StoreU(relu ? hn::IfThenZeroElse(hn::Le(z, hn::Zero(d)), dz) : dz, d, at);
    }
    hn::StoreU(sum, d, dw + h);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace talea::sparse_attention::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace talea::sparse_attention::cpu {

HWY_EXPORT(Teacher);
HWY_EXPORT(Score);
HWY_EXPORT(Chain);

void teacher_tile(const LossTile& t, float scale, const float* lse, double* to) {
  HWY_DYNAMIC_DISPATCH(Teacher)(t, scale, lse, to);
}
void score_tile(const LossTile& t, const float* weights, bool relu, double* to) {
  HWY_DYNAMIC_DISPATCH(Score)(t, weights, relu, to);
}
void chain_tile(const LossTile& t, const double* g, const float* weights, bool relu, float* dw) {
  HWY_DYNAMIC_DISPATCH(Chain)(t, g, weights, relu, dw);
}

}  // namespace talea::sparse_attention::cpu
#endif
