// What: row_math.hpp in Highway, compiled once for each instruction set.
// Why: scalar exponentials would make the comparison lane slower than what it stands for.
// Never: reads past the row.
#include "device/cpu/row_math.hpp"

#include <cmath>

#include "device/cpu/tile_product.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/row_math.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// After the above: it is compiled once for each target too.
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace talea::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, max_lanes>;
using V = hn::Vec<D>;
constexpr int64_t width = hn::MaxLanes(D());

HWY_INLINE V ExpKeepNaN(V x) {
  const D d;
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

// The last few elements, padded with a value that changes nothing.
HWY_INLINE V Tail(const float* z, int64_t n, float filler) {
  HWY_ALIGN float buffer[max_lanes];
  for (int64_t i = 0; i < width; ++i) buffer[i] = i < n ? z[i] : filler;
  return hn::Load(D(), buffer);
}

float RowMax(const float* z, int64_t n) {
  const D d;
  V max = hn::Set(d, -INFINITY), odd = hn::Zero(d);
  auto see = [&](V x) HWY_ATTR {
    max = hn::Max(x, max);
    odd = hn::IfThenElse(hn::IsNaN(x), x, odd);
  };
  int64_t i = 0;
  for (; i + width <= n; i += width) see(hn::LoadU(d, z + i));
  if (i < n) see(Tail(z + i, n - i, -INFINITY));
  if (!hn::AllFalse(d, hn::IsNaN(odd))) return NAN;
  return hn::GetLane(hn::MaxOfLanes(d, max));
}

float RowExpSum(const float* z, int64_t n, float max) {
  const D d;
  const V shift = hn::Set(d, max);
  V sum[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  int64_t i = 0;
  for (; i + 4 * width <= n; i += 4 * width)
    for (int j = 0; j < 4; ++j)
      sum[j] = hn::Add(sum[j], ExpKeepNaN(hn::Sub(hn::LoadU(d, z + i + j * width), shift)));
  for (; i < n; i += width) {
    const V x = i + width <= n ? hn::LoadU(d, z + i) : Tail(z + i, n - i, -INFINITY);
    sum[0] = hn::Add(sum[0], ExpKeepNaN(hn::Sub(x, shift)));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]))));
}

void RowExp(const float* z, int64_t n, float shift, float* p) {
  const D d;
  const V by = hn::Set(d, shift);
  int64_t i = 0;
  for (; i + width <= n; i += width)
    hn::StoreU(ExpKeepNaN(hn::Sub(hn::LoadU(d, z + i), by)), d, p + i);
  if (i == n) return;
  HWY_ALIGN float buffer[max_lanes];
  hn::Store(ExpKeepNaN(hn::Sub(Tail(z + i, n - i, 0.0f), by)), d, buffer);
  for (int64_t j = 0; i + j < n; ++j) p[i + j] = buffer[j];
}

}  // namespace HWY_NAMESPACE
}  // namespace talea::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace talea::cpu {

HWY_EXPORT(RowMax);
HWY_EXPORT(RowExpSum);
HWY_EXPORT(RowExp);

float row_max(const float* z, int64_t n) { return HWY_DYNAMIC_DISPATCH(RowMax)(z, n); }
float row_exp_sum(const float* z, int64_t n, float max) {
  return HWY_DYNAMIC_DISPATCH(RowExpSum)(z, n, max);
}
void row_exp(const float* z, int64_t n, float shift, float* p) {
  HWY_DYNAMIC_DISPATCH(RowExp)(z, n, shift, p);
}

}  // namespace talea::cpu
#endif
