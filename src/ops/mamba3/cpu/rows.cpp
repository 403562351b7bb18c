// What: rotation of rows and of their gradients, compiled once for each instruction set.
// Why: one pass over a row does all that its gradient takes part in.
// Never: an order that depends on threads.
#include "ops/mamba3/cpu/rows.hpp"

#include <cstring>

#include "device/cpu/tile_product.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/mamba3/cpu/rows.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace talea::mamba3::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, talea::cpu::max_lanes>;
using V = hn::Vec<D>;
constexpr int64_t width = hn::MaxLanes(D());

// partner(x): the other column of each pair.
HWY_INLINE void Partner(const Rotation& r, const float* x, int64_t padded, float* to) {
  const D d;
  if (!r.halves && width == 1) {
    for (int64_t n = 0; n < padded; ++n) to[n] = x[n ^ 1];
    return;
  }
  if (!r.halves) {
    for (int64_t n = 0; n < padded; n += width)
      hn::Store(hn::Reverse2(d, hn::Load(d, x + n)), d, to + n);
    return;
  }
  const int64_t half = r.columns / 2;
  if (half % width == 0) {
    for (int64_t n = 0; n < half; n += width) {
      hn::Store(hn::Load(d, x + half + n), d, to + n);
      hn::Store(hn::Load(d, x + n), d, to + half + n);
    }
    return;
  }
  std::memcpy(to, x + half, sizeof(float) * static_cast<size_t>(half));
  std::memcpy(to + half, x, sizeof(float) * static_cast<size_t>(half));
  for (int64_t n = 2 * half; n < padded; ++n) to[n] = 0;
}

void RotateRows(const RotateJob& job) {
  const D d;
  float* const x = job.scratch;
  float* const other = x + job.padded + 32;
  const int64_t rows = job.tokens * job.rank;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t t = i / job.rank, r = i % job.rank;
    const float* from = job.x + i * job.padded;
    for (int64_t n = 0; n < job.padded; n += width) {
      V value = hn::Load(d, from + n);
      if (job.bias) value = hn::Add(value, hn::Load(d, job.bias + r * job.padded + n));
      hn::Store(value, d, x + n);
    }
    Partner(job.rotation, x, job.padded, other);
    const float* c = job.rotation.cosine + t * job.rotation.stride;
    const float* s = job.rotation.sine + t * job.rotation.stride;
    float* to = job.to + i * width;
    for (int64_t n = 0; n < job.padded; n += width, to += job.room * width)
      hn::Store(hn::MulAdd(hn::Load(d, x + n), hn::Load(d, c + n),
                           hn::Mul(hn::Load(d, other + n), hn::Load(d, s + n))),
                d, to);
  }
  const int64_t end = HWY_MIN(job.room, (rows + 15) / 16 * 16);
  for (int64_t i = rows; i < end; ++i)
    for (int64_t n = 0; n < job.padded; n += width)
      hn::Store(hn::Zero(d), d, job.to + n * job.room + i * width);
}

HWY_INLINE void TurnBackRow(const TurnBackJob& job, int64_t t, int64_t r, float* scratch) {
  const D d;
  const int64_t i = t * job.rank + r;
  float* const other = scratch;
  float* const g = job.gradient + i * job.padded;
  const float* x = job.x + i * width;
  const float* c = job.rotation.cosine + t * job.rotation.stride;
  const float* s = job.rotation.sine + t * job.rotation.stride;
  float* turn = job.turn + t * job.padded;
  Partner(job.rotation, g, job.padded, other);
  // <q, dq> and <k, dk> differ by little, and are summed over tokens. Plain loops: compilers make
  // vectors of them on every target.
  double dot[width] = {};
  for (int64_t n = 0; n < job.padded; n += width, x += job.room * width) {
    const V own = hn::Load(d, x), across = hn::Load(d, other + n);
    for (int64_t j = 0; j < width; ++j) dot[j] += double{x[j]} * double{g[n + j]};
    hn::Store(hn::MulAdd(own, across, hn::Load(d, turn + n)), d, turn + n);
  }
  double sum = 0;
  for (int64_t j = 0; j < width; ++j) sum += dot[j];
  job.dot[t] += double{job.sign} * sum;
  if (job.extra && t == job.tokens - 1) {
    for (int64_t n = 0; n < job.padded; n += width)
      hn::Store(hn::Add(hn::Load(d, g + n), hn::Load(d, job.extra + r * job.padded + n)), d, g + n);
    Partner(job.rotation, g, job.padded, other);
  }
  float* bias = job.bias + r * job.padded;
  for (int64_t n = 0; n < job.padded; n += width) {
    const V back = hn::NegMulAdd(hn::Load(d, other + n), hn::Load(d, s + n),
                                 hn::Mul(hn::Load(d, g + n), hn::Load(d, c + n)));
    hn::Store(back, d, g + n);
    hn::Store(hn::Add(hn::Load(d, bias + n), back), d, bias + n);
  }
}

void TurnBack(const TurnBackJob& job) {
  for (int64_t t = 0; t < job.tokens; ++t)
    for (int64_t r = 0; r < job.rank; ++r) TurnBackRow(job, t, r, job.scratch);
}

// One element of a matrix in panels.
HWY_INLINE float Element(const float* x, int64_t room, int64_t i, int64_t j) {
  return x[j / width * room * width + i * width + j % width];
}

void KeyRows(const KeyJob& job) {
  const D d;
  for (int64_t t = 0; t < job.tokens; ++t) {
    V sum = hn::Zero(d);
    const V s = hn::Set(d, job.s[t]);
    for (int64_t r = 0; r < job.rank; ++r) {
      const int64_t i = t * job.rank + r;
      float* a = job.a + i * job.padded;
      const float* k = job.k + i * width;
      for (int64_t n = 0; n < job.padded; n += width, k += job.room * width) {
        const V value = hn::Load(d, a + n);
        sum = hn::MulAdd(hn::Load(d, k), value, sum);
        hn::Store(hn::Mul(s, value), d, a + n);
      }
      for (int64_t other = 0; other < job.rank; ++other) {
        const int64_t row = t * job.rank + other;
        const V w = hn::Set(d, job.gamma[t] * Element(job.w, job.room, row, i));
        const float* q = job.q + row * width;
        for (int64_t n = 0; n < job.padded; n += width, q += job.room * width)
          hn::Store(hn::MulAdd(w, hn::Load(d, q), hn::Load(d, a + n)), d, a + n);
      }
    }
    job.ds[t] = hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

double Anchor(const AnchorJob& job) {
  const D d;
  double all = 0;
  const int64_t half = job.columns / 2, panel = job.room * width;
  for (int64_t n = 0; n < job.columns; ++n) {
    // Which column of the pair n is, and its partner.
    const bool left = job.halves ? n < half : n % 2 == 0;
    const int64_t pair = job.halves ? n % HWY_MAX(half, 1) : n / 2;
    const bool in_pair = pair < job.pairs && (!job.halves || n < 2 * half);
    const int64_t partner = !in_pair ? n : job.halves ? (left ? n + half : n - half) : n ^ 1;
    V own = hn::Zero(d), across = hn::Zero(d);
    const float* h = job.h + n * width;
    const float* e = job.e + n * width;
    const float* o = job.e + partner * width;
    for (int64_t p = 0; p < job.values; p += width, h += panel, e += panel, o += panel) {
      const V x = hn::Load(d, h);
      own = hn::MulAdd(x, hn::Load(d, e), own);
      across = hn::MulAdd(x, hn::Load(d, o), across);
    }
    all += hn::GetLane(hn::SumOfLanes(d, own));
    const float arm = hn::GetLane(hn::SumOfLanes(d, across));
    job.turn[n] = in_pair ? arm : 0;
  }
  return all;
}

}  // namespace HWY_NAMESPACE
}  // namespace talea::mamba3::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace talea::mamba3::cpu {

HWY_EXPORT(RotateRows);
HWY_EXPORT(TurnBack);
HWY_EXPORT(KeyRows);
HWY_EXPORT(Anchor);

void rotate_rows(const RotateJob& job) { HWY_DYNAMIC_DISPATCH(RotateRows)(job); }
void turn_back(const TurnBackJob& job) { HWY_DYNAMIC_DISPATCH(TurnBack)(job); }
void key_rows(const KeyJob& job) { HWY_DYNAMIC_DISPATCH(KeyRows)(job); }
double anchor(const AnchorJob& job) { return HWY_DYNAMIC_DISPATCH(Anchor)(job); }

}  // namespace talea::mamba3::cpu
#endif
