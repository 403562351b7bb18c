// What: angles, decays and gates of a chunk on vectors, compiled once for each instruction set.
// Why: exact turns and decays cost a few instructions a lane; every pass uses the same.
// Never: an order that depends on threads.
#include "ops/mamba3/cpu/turns.hpp"

#include <limits>

#include "device/cpu/fetch.hpp"
#include "device/cpu/tile_product.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/mamba3/cpu/turns.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// After the above: it is compiled once for each target too.
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace talea::mamba3::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, talea::cpu::max_lanes>;
using DI = hn::RebindToSigned<D>;
using DU = hn::RebindToUnsigned<D>;
using V = hn::Vec<D>;
using VU = hn::Vec<DU>;
constexpr int64_t width = hn::MaxLanes(D());

// Highway's functions give numbers for NaN; here NaN stays.
HWY_INLINE V KeepNaN(V x, V y) { return hn::IfThenElse(hn::IsNaN(x), x, y); }
HWY_INLINE V Exp(V x) {
  const D d;
  const V y = hn::Exp(d, hn::Min(x, hn::Set(d, 88.7228f)));
  const V over = hn::IfThenElse(hn::Gt(x, hn::Set(d, 88.7228f)),
                                hn::Set(d, std::numeric_limits<float>::infinity()), y);
  return KeepNaN(x, over);
}
using DD = hn::CappedTag<double, talea::cpu::max_lanes / 2>;
using VD = hn::Vec<DD>;
using Half = hn::Rebind<float, DD>;
using HalfI = hn::RebindToSigned<Half>;

#if HWY_TARGET == HWY_SCALAR  // one lane has no halves
HWY_INLINE hn::Vec<Half> Upper(V x) { return x; }
template <typename To>
HWY_INLINE hn::Vec<To> Both(To, hn::Vec<To>, hn::Vec<To> lower) {
  return lower;
}
#else
HWY_INLINE hn::Vec<Half> Upper(V x) { return hn::UpperHalf(Half(), x); }
template <typename To>
HWY_INLINE hn::Vec<To> Both(To d, hn::Vec<hn::Half<To> > upper, hn::Vec<hn::Half<To> > lower) {
  return hn::Combine(d, upper, lower);
}
#endif
HWY_INLINE hn::Vec<Half> Lower(V x) { return hn::LowerHalf(Half(), x); }

// tanh of half a vector, and its slope 1 - tanh^2 without the difference: nothing is left of that
// where tanh is near 1. An increment that is off by a rounding of fp32 walks away over the tokens,
// so tanh is off by 2^-35 of itself. NaN gives a number.
struct Rates {
  VD tanh, slope;
};
HWY_INLINE Rates TanhOf(VD x) {
  const DD d;
  const hn::RebindToUnsigned<DD> du;
  const VD one = hn::Set(d, 1.0), size = hn::Min(hn::Abs(x), hn::Set(d, 32.0));
  // exp(-2 |x|) = s (1 + p), s a power of two
  const VD u = hn::Mul(size, hn::Set(d, -2.0)), magic = hn::Set(d, 6755399441055744.0);
  const VD shifted = hn::MulAdd(u, hn::Set(d, 1.4426950408889634), magic);
  const VD s = hn::BitCast(
      d, hn::Add(hn::ShiftLeft<52>(hn::BitCast(du, shifted)), hn::Set(du, uint64_t{0x3ff} << 52)));
  const VD g = hn::NegMulAdd(hn::Sub(shifted, magic), hn::Set(d, 0.6931471805599453), u);
  VD p = hn::Set(d, 1.0 / 362880);
  for (const double c :
       {1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0})
    p = hn::MulAdd(p, g, hn::Set(d, c));
  p = hn::Mul(p, g);
  const VD e = hn::MulAdd(s, p, s), below = hn::Div(one, hn::Add(one, e));
  const VD size_of = hn::Mul(hn::NegMulAdd(s, p, hn::Sub(one, s)), below);
  const VD slope = hn::Mul(hn::Mul(hn::Add(e, e), below), hn::Add(one, size_of));
  // Where fp64 has tanh = 1 its slope is 0.
  const auto flat = hn::Ge(size, hn::Set(d, 19.0625));
  return {hn::CopySign(size_of, x), hn::IfThenZeroElse(flat, slope)};
}

// x turns as a 64-bit integer, of half a vector: its sign, and of its size the upper 31 of 62 bits
// and the lower ones. Exact but for what lies below 2^-62 turn.
struct Parts {
  hn::Vec<Half> sign;
  hn::Vec<HalfI> upper, lower;
};
HWY_INLINE Parts PartsOf(VD x) {
  const DD d;
  const HalfI di;
  const VD scale = hn::Set(d, 2147483648.0), rest = hn::Sub(x, hn::Round(x));
  const VD size = hn::Mul(hn::Abs(rest), scale), whole = hn::Trunc(size);  // <= 2^30
  return {hn::DemoteTo(Half(), rest), hn::DemoteTo(di, whole),
          hn::DemoteTo(di, hn::Mul(hn::Sub(size, whole), scale))};
}

HWY_INLINE void ToTurns(const Parts& lower, const Parts& upper, VU& high, VU& low) {
  const D d;
  const DI di;
  const DU du;
  const VU a = hn::BitCast(du, Both(di, upper.upper, lower.upper));
  const VU b = hn::BitCast(du, Both(di, upper.lower, lower.lower));
  high = hn::Or(hn::Add(a, a), hn::ShiftRight<30>(b));
  low = hn::ShiftLeft<2>(b);
  const V sign = Both(d, upper.sign, lower.sign);
  const auto minus = hn::RebindMask(du, hn::Lt(sign, hn::Zero(d)));
  const VU low_minus = hn::Add(hn::Not(low), hn::Set(du, 1u));
  const VU carry = hn::IfThenElseZero(hn::Eq(low_minus, hn::Zero(du)), hn::Set(du, 1u));
  high = hn::IfThenElse(minus, hn::Add(hn::Not(high), carry), high);
  low = hn::IfThenElse(minus, low_minus, low);
}

// Sine and cosine of high * 2^-32 turn: the octant by integers, the rest by polynomials.
HWY_INLINE void SineCosine(VU high, V& sine, V& cosine) {
  const D d;
  const DI di;
  const DU du;
  const VU quadrant = hn::ShiftRight<30>(hn::Add(high, hn::Set(du, 1u << 29)));
  const auto rest = hn::BitCast(di, hn::Sub(high, hn::ShiftLeft<30>(quadrant)));
  // 2 pi 2^-32, in [-pi/4, pi/4]
  const V x = hn::Mul(hn::ConvertTo(d, rest), hn::Set(d, 1.46291807926715968e-9f));
  const V square = hn::Mul(x, x);
  V s = hn::MulAdd(square, hn::Set(d, -1.9515295891e-4f), hn::Set(d, 8.3321608736e-3f));
  s = hn::MulAdd(square, s, hn::Set(d, -1.6666654611e-1f));
  s = hn::MulAdd(hn::Mul(s, square), x, x);
  V c = hn::MulAdd(square, hn::Set(d, 2.443315711809948e-5f), hn::Set(d, -1.388731625493765e-3f));
  c = hn::MulAdd(square, c, hn::Set(d, 4.166664568298827e-2f));
  c = hn::MulAdd(hn::Mul(square, square), c,
                 hn::NegMulAdd(hn::Set(d, 0.5f), square, hn::Set(d, 1.0f)));
  const auto swapped = hn::RebindMask(d, hn::Ne(hn::And(quadrant, hn::Set(du, 1u)), hn::Zero(du)));
  const VU sine_sign = hn::ShiftLeft<30>(hn::And(quadrant, hn::Set(du, 2u)));
  const VU cosine_sign =
      hn::ShiftLeft<30>(hn::And(hn::Add(quadrant, hn::Set(du, 1u)), hn::Set(du, 2u)));
  sine = hn::Xor(hn::IfThenElse(swapped, c, s), hn::BitCast(d, sine_sign));
  cosine = hn::Xor(hn::IfThenElse(swapped, s, c), hn::BitCast(d, cosine_sign));
}

HWY_INLINE void StoreColumns(const TurnJob& job, int64_t i, V sine, V cosine, float* c, float* s) {
  const D d;
  if (!job.halves) {
    hn::StoreInterleaved2(cosine, cosine, d, c + 2 * i);
    hn::StoreInterleaved2(hn::Neg(sine), sine, d, s + 2 * i);
    return;
  }
  const int64_t half = job.columns / 2;
  hn::StoreU(cosine, d, c + i);
  hn::StoreU(hn::Neg(sine), d, s + i);
  hn::StoreU(cosine, d, c + half + i);
  hn::StoreU(sine, d, s + half + i);
}

// Columns in no pair pass.
HWY_INLINE void PassColumns(const TurnJob& job, float* c, float* s) {
  const int64_t half = job.columns / 2;
  const auto pass = [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) c[n] = 1, s[n] = 0;
  };
  if (!job.halves) return pass(2 * job.pairs, job.stride);
  pass(job.pairs, half);
  pass(half + job.pairs, job.stride);
}

// The first halves must not lie over the second ones: those are written after.
HWY_INLINE void StoreHalves(const TurnJob& job, const float* cosine, const float* sine, float* c,
                            float* s) {
  const int64_t half = job.columns / 2;
  for (int64_t i = 0; i < job.pairs; ++i) {
    c[i] = c[half + i] = cosine[i];
    s[i] = -sine[i];
    s[half + i] = sine[i];
  }
}

// What token t adds to pairs [i, i + width): 0 of a pair where it returns NaN, else that returns 0.
HWY_INLINE V Increment(const TurnJob& job, int64_t t, int64_t i, VU& high, VU& low) {
  const D d;
  const DD dd;
  const Half half;
  const int64_t at = t * job.padded + i;
  const V x = hn::Load(d, job.rates + at);
  const Rates lower = TanhOf(hn::PromoteTo(dd, Lower(x)));
  const Rates upper = TanhOf(hn::PromoteTo(dd, Upper(x)));
  const auto narrow = [&](VD low_half, VD high_half) {
    const V y = Both(d, hn::DemoteTo(half, high_half), hn::DemoteTo(half, low_half));
    return KeepNaN(x, y);
  };
  if (job.tanh) hn::Store(narrow(lower.tanh, upper.tanh), d, job.tanh + at);
  if (job.slope) hn::Store(narrow(lower.slope, upper.slope), d, job.slope + at);
  const float step = 0.5f * job.dt[t];
  const bool finite = step - step == 0;  // an increment that is not adds nothing
  const VD steps = hn::Set(dd, finite ? double{step} : 0.0);
  ToTurns(PartsOf(hn::Mul(lower.tanh, steps)), PartsOf(hn::Mul(upper.tanh, steps)), high, low);
  const auto lost = hn::RebindMask(DU(), hn::IsNaN(x));
  high = hn::IfThenZeroElse(lost, high);
  low = hn::IfThenZeroElse(lost, low);
  return hn::Mul(KeepNaN(x, hn::Set(d, step)), hn::Zero(d));
}

void Turn(const TurnJob& job) {
  const D d;
  const DU du;
  const bool whole = job.pairs % width == 0;
  talea::cpu::Fetch fetch(job.ahead, job.tokens);
  for (int64_t t = 0; t < job.tokens; ++t) {
    fetch.Some();
    float* c = job.cosine ? job.cosine + t * job.stride : nullptr;
    float* s = job.sine ? job.sine + t * job.stride : nullptr;
    for (int64_t i = 0; i < job.padded; i += width) {
      VU high = hn::Load(du, job.at.high + i), low = hn::Load(du, job.at.low + i);
      V taint = hn::Load(d, job.at.taint + i);
      if (job.rates) {
        VU more_high, more_low;
        const V bad = Increment(job, t, i, more_high, more_low);
        const VU sum = hn::Add(low, more_low);
        const VU carry = hn::IfThenElseZero(hn::Lt(sum, low), hn::Set(du, 1u));
        high = hn::Add(hn::Add(high, more_high), carry);
        low = sum;
        taint = hn::Add(taint, bad);
        hn::Store(high, du, job.at.high + i);
        hn::Store(low, du, job.at.low + i);
        hn::Store(taint, d, job.at.taint + i);
      }
      if (!c) continue;
      V sine, cosine;
      SineCosine(high, sine, cosine);
      sine = hn::Add(sine, taint);
      cosine = hn::Add(cosine, taint);
      if (!job.halves || whole) {
        StoreColumns(job, i, sine, cosine, c, s);
      } else {
        HWY_ALIGN float both[2 * talea::cpu::max_lanes];
        hn::Store(cosine, d, both);
        hn::Store(sine, d, both + width);
        TurnJob part = job;
        part.pairs = HWY_MIN(width, job.pairs - i);
        StoreHalves(part, both, both + width, c + i, s + i);
      }
    }
    if (c) PassColumns(job, c, s);
  }
}

HWY_INLINE V ApartFrom(const float* high, const float* low, int64_t t, int64_t j) {
  const D d;
  return hn::Add(hn::Sub(hn::Set(d, high[t]), hn::Load(d, high + j)),
                 hn::Sub(hn::Set(d, low[t]), hn::Load(d, low + j)));
}

// Rows [first, first + width) at columns before them: exp(L_t - L_a) exp(L_a - L_j), a the last
// token before them. Both are at most 1 where L falls, so nothing overflows on the way.
HWY_INLINE void DecayBlock(const float* high, const float* low, int64_t first, int64_t tokens,
                           int64_t stride, float* to) {
  const D d;
  HWY_ALIGN float since[width];
  const V minus = hn::Set(d, -1.0f);
  const V own = hn::Mul(minus, ApartFrom(high, low, first - 1, first));
  hn::Store(Exp(own), d, since);
  const int64_t end = HWY_MIN(first + width, tokens);
  for (int64_t j = 0; j < first; j += width) {
    const V until = Exp(ApartFrom(high, low, first - 1, j));
    for (int64_t t = first; t < end; ++t)
      hn::Store(hn::Mul(hn::Set(d, since[t - first]), until), d, to + t * stride + j);
  }
}

// The first token to which L does not fall: what rows before it hold depends on nothing behind
// them.
HWY_INLINE int64_t Falling(const float* high, const float* low, int64_t tokens) {
  int64_t t = 1;
  while (t < tokens && (high[t] - high[t - 1]) + (low[t] - low[t - 1]) <= 0) ++t;
  return HWY_MIN(t, tokens);
}

void DecayMatrix(const float* high, const float* low, int64_t tokens, int64_t stride, float* to) {
  const D d;
  const DI di;
  const int64_t falling = Falling(high, low, tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    const bool falls = t < falling;
    const V h = hn::Set(d, high[t]), l = hn::Set(d, low[t]);
    float* row = to + t * stride;
    const int64_t first = t / width * width;
    if (falls && t > 0 && t == first) DecayBlock(high, low, first, falling, stride, to);
    int64_t j = falls ? first : 0;
    for (; j < t; j += width) {
      const V apart = hn::Add(hn::Sub(h, hn::Load(d, high + j)), hn::Sub(l, hn::Load(d, low + j)));
      const auto before =
          hn::Lt(hn::Iota(di, static_cast<int32_t>(j)), hn::Set(di, static_cast<int32_t>(t)));
      const auto keep = hn::RebindMask(d, before);
      hn::Store(hn::IfThenElseZero(keep, Exp(hn::IfThenElseZero(keep, apart))), d, row + j);
    }
    for (; j < stride; j += width) hn::Store(hn::Zero(d), d, row + j);
  }
}

void ExpRow(const float* x, int64_t n, float* to) {
  const D d;
  for (int64_t i = 0; i < n; i += width) hn::Store(Exp(hn::Load(d, x + i)), d, to + i);
}

HWY_INLINE V Sigmoid(V u) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, Exp(hn::Neg(u))));
}
HWY_INLINE V LoadOr(const float* from, int64_t i, float neutral) {
  const D d;
  return from ? hn::Load(d, from + i) : hn::Set(d, neutral);
}

// 1 / rms of a row of y; columns behind the last are zeros.
HWY_INLINE float Rstd(const FinishJob& f, const float* y) {
  const D d;
  if (!f.norm) return 1;
  V squares = hn::Zero(d);
  for (int64_t p = 0; p < f.stride; p += width) {
    const V x = hn::Load(d, y + p);
    squares = hn::MulAdd(x, x, squares);
  }
  const float mean = hn::GetLane(hn::SumOfLanes(d, squares)) / static_cast<float>(f.columns);
  return 1 / hn::GetLane(hn::Sqrt(hn::Set(d, mean + f.eps)));
}

void Finish(const FinishJob& f) {
  const D d;
  for (int64_t t = 0; t < f.tokens; ++t)
    for (int64_t r = 0; r < f.rank; ++r) {
      const float* y = f.y + (t * f.rank + r) * f.stride;
      const V rstd = hn::Set(d, Rstd(f, y));
      float* out = f.out + (f.reduce ? t : t * f.rank + r) * f.stride;
      for (int64_t p = 0; p < f.stride; p += width) {
        V o = hn::Load(d, y + p);
        if (f.norm) o = hn::Mul(hn::Mul(o, rstd), LoadOr(f.weight, p, 1));
        if (f.z) {
          V u = hn::Load(d, f.z + t * f.stride + p);
          if (f.mimo_z) u = hn::Mul(u, hn::Load(d, f.mimo_z + r * f.stride + p));
          o = hn::Mul(o, hn::Mul(u, Sigmoid(u)));
        }
        if (f.mimo_out) o = hn::Mul(o, hn::Load(d, f.mimo_out + r * f.stride + p));
        if (f.reduce && r > 0) o = hn::Add(hn::Load(d, out + p), o);
        hn::Store(o, d, out + p);
      }
    }
}

HWY_INLINE void AddTo(float* to, int64_t i, V x) {
  const D d;
  if (to) hn::Store(hn::Add(hn::Load(d, to + i), x), d, to + i);
}

HWY_INLINE void FinishAdjointRow(const FinishJob& f, int64_t t, int64_t r) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  const float* y = f.y ? f.y + (t * f.rank + r) * f.stride : nullptr;
  float* dy = f.dy + (t * f.rank + r) * f.stride;
  const float* up = f.d_out + (f.reduce ? t : t * f.rank + r) * f.stride;
  const float rstd_of_row = y ? Rstd(f, y) : 1;
  const V rstd = hn::Set(d, rstd_of_row);
  V mean = hn::Zero(d);
  for (int64_t p = 0; p < f.stride; p += width) {
    V g = hn::Load(d, up + p), gate = one, slope = hn::Zero(d), u = one, z = one;
    if (f.z) {
      z = hn::Load(d, f.z + t * f.stride + p);
      u = f.mimo_z ? hn::Mul(z, hn::Load(d, f.mimo_z + r * f.stride + p)) : z;
      const V sg = Sigmoid(u);
      gate = hn::Mul(u, sg);
      slope = hn::Mul(sg, hn::MulAdd(u, hn::Sub(one, sg), one));
    }
    const V w = LoadOr(f.norm ? f.weight : nullptr, p, 1);
    const V scaled = y ? hn::Mul(hn::Load(d, y + p), rstd) : hn::Zero(d);
    const V n = hn::Mul(scaled, w);
    if (f.d_mimo_out) AddTo(f.d_mimo_out, r * f.stride + p, hn::Mul(g, hn::Mul(n, gate)));
    if (f.mimo_out) g = hn::Mul(g, hn::Load(d, f.mimo_out + r * f.stride + p));
    if (f.z) {
      const V du = hn::Mul(hn::Mul(g, n), slope);
      AddTo(f.d_mimo_z, r * f.stride + p, hn::Mul(du, z));
      if (f.d_z) {
        V own = f.mimo_z ? hn::Mul(du, hn::Load(d, f.mimo_z + r * f.stride + p)) : du;
        if (r > 0) own = hn::Add(own, hn::Load(d, f.d_z + t * f.stride + p));
        hn::Store(own, d, f.d_z + t * f.stride + p);
      }
    }
    const V e = hn::Mul(g, gate), ew = f.norm ? hn::Mul(e, w) : e;
    if (f.norm) {
      AddTo(f.d_weight, p, hn::Mul(e, scaled));
      mean = hn::MulAdd(ew, scaled, mean);
    }
    hn::Store(ew, d, dy + p);
  }
  if (!f.norm) return;
  const V average =
      hn::Set(d, hn::GetLane(hn::SumOfLanes(d, mean)) / static_cast<float>(f.columns));
  for (int64_t p = 0; p < f.stride; p += width) {
    const V scaled = hn::Mul(hn::Load(d, y + p), rstd);
    hn::Store(hn::Mul(rstd, hn::NegMulAdd(scaled, average, hn::Load(d, dy + p))), d, dy + p);
  }
}

void FinishAdjoint(const FinishJob& f) {
  for (int64_t t = 0; t < f.tokens; ++t)
    for (int64_t r = 0; r < f.rank; ++r) FinishAdjointRow(f, t, r);
}

}  // namespace HWY_NAMESPACE
}  // namespace talea::mamba3::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace talea::mamba3::cpu {

HWY_EXPORT(Turn);
HWY_EXPORT(DecayMatrix);
HWY_EXPORT(ExpRow);
HWY_EXPORT(Finish);
HWY_EXPORT(FinishAdjoint);

void turn(const TurnJob& job) { HWY_DYNAMIC_DISPATCH(Turn)(job); }
void decay_matrix(const float* high, const float* low, int64_t tokens, int64_t stride, float* to) {
  HWY_DYNAMIC_DISPATCH(DecayMatrix)(high, low, tokens, stride, to);
}
void exp_row(const float* x, int64_t n, float* to) { HWY_DYNAMIC_DISPATCH(ExpRow)(x, n, to); }
void finish(const FinishJob& job) { HWY_DYNAMIC_DISPATCH(Finish)(job); }
void finish_adjoint(const FinishJob& job) { HWY_DYNAMIC_DISPATCH(FinishAdjoint)(job); }

}  // namespace talea::mamba3::cpu
#endif
