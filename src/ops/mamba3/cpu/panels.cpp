// What: masks, transposes and scales of matrices in panels, compiled once for each instruction set.
// Why: what stands between two products of a chunk costs few passes over what is in cache.
// Never: an order that depends on threads.
#include "device/cpu/tile_product.hpp"
#include "ops/mamba3/cpu/rows.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/mamba3/cpu/panels.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace talea::mamba3::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, talea::cpu::max_lanes>;
using DI = hn::RebindToSigned<D>;
using V = hn::Vec<D>;
constexpr int64_t width = hn::MaxLanes(D());

// The weights of the rows of token t over all columns: zeros behind the token.
HWY_INLINE void Weights(const MaskJob& job, int64_t t, int64_t columns) {
  const float* decay = job.decay + t * job.decay_stride;
  float* to = job.scratch;
  for (int64_t j = 0; j < t; ++j) {
    const float value = job.scale ? decay[j] * job.scale[j] : decay[j];
    for (int64_t r = 0; r < job.rank; ++r) to[j * job.rank + r] = value;
  }
  for (int64_t j = t * job.rank; j < columns; ++j) to[j] = 0;
  for (int64_t r = 0; r < job.rank; ++r) to[t * job.rank + r] = job.same ? job.same[t] : 0.0f;
}

// Rank 1: rows are tokens, and weights need no memory on their way.
HWY_INLINE void MaskToken(const MaskJob& job, int64_t t, int64_t columns) {
  const D d;
  const DI di;
  const float* decay = job.decay + t * job.decay_stride;
  const auto row = hn::Set(di, static_cast<int32_t>(t));
  const V same = hn::Set(d, job.same ? job.same[t] : 0.0f);
  for (int64_t j = 0; j < columns; j += width) {
    const int64_t at = j * job.room + t * width;
    const auto column = hn::Iota(di, static_cast<int32_t>(j));
    V weight = hn::Load(d, decay + j);
    if (job.scale) weight = hn::Mul(weight, hn::Load(d, job.scale + j));
    weight = hn::IfThenElse(hn::RebindMask(d, hn::Eq(column, row)), same, weight);
    const auto behind = hn::RebindMask(d, hn::Gt(column, row));
    const V value = hn::Mul(hn::Load(d, job.from + at), weight);
    hn::Store(hn::IfThenZeroElse(behind, value), d, job.to + at);
  }
}

void Mask(const MaskJob& job) {
  const D d;
  const DI di;
  const int64_t rows = job.tokens * job.rank, panel = job.room * width;
  for (int64_t t = 0; t < job.tokens; ++t) {
    const int64_t limit = (t + 1) * job.rank;  // columns that the token sees
    // Products read as far as the block of 16 rows sees.
    const int64_t last_row = HWY_MIN((limit - 1) / 16 * 16 + 15, rows - 1);
    const int64_t read = HWY_MIN((last_row / job.rank + 1) * job.rank, rows);
    const int64_t columns = (read + 15) / 16 * 16;
    if (job.rank == 1)
      MaskToken(job, t, columns);
    else
      Weights(job, t, columns);
    for (int64_t i = t * job.rank; job.rank > 1 && i < limit; ++i)
      for (int64_t j = 0; j < columns; j += width) {
        const int64_t at = j / width * panel + i * width;
        const auto seen = hn::RebindMask(d, hn::Lt(hn::Iota(di, static_cast<int32_t>(j)),
                                                   hn::Set(di, static_cast<int32_t>(limit))));
        const V value = hn::Mul(hn::Load(d, job.from + at), hn::Load(d, job.scratch + j));
        hn::Store(hn::IfThenElseZero(seen, value), d, job.to + at);
      }
    if (job.diagonal != 0)
      for (int64_t i = t * job.rank; i < limit; ++i)
        job.to[i / width * panel + i * width + i % width] += job.diagonal;
  }
  const int64_t end = HWY_MIN(job.room, (rows + 15) / 16 * 16);
  for (int64_t i = rows; i < end; ++i)
    for (int64_t j = 0; j < end; j += width)
      hn::Store(hn::Zero(d), d, job.to + j / width * panel + i * width);
}

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void Square(const float* from, float* to) { *to = *from; }
#else
template <class Tag, class Vector>
HWY_INLINE void StoreBlocks(Tag d, Vector v, float* to, int64_t step) {
  if constexpr (hn::MaxLanes(Tag()) > 4) {
    const hn::Half<Tag> half;
    StoreBlocks(half, hn::LowerHalf(half, v), to, step);
    StoreBlocks(half, hn::UpperHalf(half, v), to + hn::MaxLanes(half) * step, step);
  } else {
    hn::StoreU(v, d, to);
  }
}

// A square of width x width, rows to columns: four rows at a time, 4 x 4 within each 128 bits.
HWY_INLINE void Square(const float* from, float* to) {
  const D d;
  for (int64_t i = 0; i < width; i += 4) {
    const V a = hn::Load(d, from + i * width), b = hn::Load(d, from + (i + 1) * width);
    const V c = hn::Load(d, from + (i + 2) * width), e = hn::Load(d, from + (i + 3) * width);
    const V ac0 = hn::InterleaveLower(d, a, c), ac1 = hn::InterleaveUpper(d, a, c);
    const V be0 = hn::InterleaveLower(d, b, e), be1 = hn::InterleaveUpper(d, b, e);
    // Column 4 block + k of rows i .. i + 3 in each 128 bits.
    StoreBlocks(d, hn::InterleaveLower(d, ac0, be0), to + i, width);
    StoreBlocks(d, hn::InterleaveUpper(d, ac0, be0), to + width + i, width);
    StoreBlocks(d, hn::InterleaveLower(d, ac1, be1), to + 2 * width + i, width);
    StoreBlocks(d, hn::InterleaveUpper(d, ac1, be1), to + 3 * width + i, width);
  }
}
#endif

void Transpose(const float* from, int64_t rows, int64_t columns, int64_t room, float* to) {
  for (int64_t i = 0; i < rows; i += width)
    for (int64_t j = 0; j < columns; j += width)
      Square(from + j * room + i * width, to + i * columns + j * width);
}

void ScaleRows(float* x, int64_t rows, int64_t stride, const float* factor) {
  const D d;
  for (int64_t i = 0; i < rows; ++i, x += stride) {
    const V f = hn::Set(d, factor[i]);
    for (int64_t j = 0; j < stride; j += width) hn::Store(hn::Mul(f, hn::Load(d, x + j)), d, x + j);
  }
}

void ScalePanels(const float* from, int64_t rows, int64_t columns, int64_t room,
                 const float* factor, float* to) {
  const D d;
  for (int64_t j = 0; j < columns; j += width)
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = j * room + i * width;
      hn::Store(hn::Mul(hn::Set(d, factor[i]), hn::Load(d, from + at)), d, to + at);
    }
}

void SpreadRows(const float* from, int64_t tokens, int64_t rank, int64_t padded, int64_t room,
                const float* factor, float* to) {
  const D d;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t r = 0; r < rank; ++r)
      for (int64_t n = 0; n < padded; n += width) {
        V x = hn::Load(d, from + t * padded + n);
        if (factor) x = hn::Mul(x, hn::Load(d, factor + r * padded + n));
        hn::Store(x, d, to + n * room + (t * rank + r) * width);
      }
  const int64_t rows = tokens * rank, end = HWY_MIN(room, (rows + 15) / 16 * 16);
  for (int64_t i = rows; i < end; ++i)
    for (int64_t n = 0; n < padded; n += width)
      hn::Store(hn::Zero(d), d, to + n * room + i * width);
}

void PanelsOf(const float* from, int64_t rows, int64_t padded, int64_t room, float* to) {
  SpreadRows(from, rows, 1, padded, room, nullptr, to);
}

void Join(const float* before, float factor, const float* own, int64_t n, float* to) {
  const D d;
  const V f = hn::Set(d, factor);
  for (int64_t i = 0; i < n; i += width)
    hn::Store(hn::MulAdd(f, hn::Load(d, before + i), hn::Load(d, own + i)), d, to + i);
}

void SumRows(const float* const* rows, int64_t count, int64_t n, float* to) {
  const D d;
  for (int64_t i = 0; i < n; i += width) {
    V sum = hn::Zero(d);
    for (int64_t j = 0; j < count; ++j) sum = hn::Add(sum, hn::Load(d, rows[j] + i));
    hn::Store(sum, d, to + i);
  }
}

void AddToFp64(const float* from, int64_t n, double* to) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

}  // namespace HWY_NAMESPACE
}  // namespace talea::mamba3::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace talea::mamba3::cpu {

HWY_EXPORT(Mask);
HWY_EXPORT(Transpose);
HWY_EXPORT(ScaleRows);
HWY_EXPORT(ScalePanels);
HWY_EXPORT(SpreadRows);
HWY_EXPORT(PanelsOf);
HWY_EXPORT(Join);
HWY_EXPORT(SumRows);
HWY_EXPORT(AddToFp64);

void mask(const MaskJob& job) { HWY_DYNAMIC_DISPATCH(Mask)(job); }
void transpose(const float* from, int64_t rows, int64_t columns, int64_t room, float* to) {
  HWY_DYNAMIC_DISPATCH(Transpose)(from, rows, columns, room, to);
}
void scale_rows(float* x, int64_t rows, int64_t stride, const float* factor) {
  HWY_DYNAMIC_DISPATCH(ScaleRows)(x, rows, stride, factor);
}
void scale_panels(const float* from, int64_t rows, int64_t columns, int64_t room,
                  const float* factor, float* to) {
  HWY_DYNAMIC_DISPATCH(ScalePanels)(from, rows, columns, room, factor, to);
}
void spread_rows(const float* from, int64_t tokens, int64_t rank, int64_t padded, int64_t room,
                 const float* factor, float* to) {
  HWY_DYNAMIC_DISPATCH(SpreadRows)(from, tokens, rank, padded, room, factor, to);
}
void panels_of(const float* from, int64_t rows, int64_t padded, int64_t room, float* to) {
  HWY_DYNAMIC_DISPATCH(PanelsOf)(from, rows, padded, room, to);
}
void join(const float* before, float factor, const float* own, int64_t n, float* to) {
  HWY_DYNAMIC_DISPATCH(Join)(before, factor, own, n, to);
}
void sum_rows(const float* const* rows, int64_t count, int64_t n, float* to) {
  HWY_DYNAMIC_DISPATCH(SumRows)(rows, count, n, to);
}
void add_to_fp64(const float* from, int64_t n, double* to) {
  HWY_DYNAMIC_DISPATCH(AddToFp64)(from, n, to);
}

}  // namespace talea::mamba3::cpu
#endif
