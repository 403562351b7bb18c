// What: what narrow.cuh leaves of a row: o, its residual, lse and the largest score.
// Why: halves of the values end with factors of their own.
// Never: writes a row or column beyond the problem's.
#pragma once

#include "ops/sparse_attention/sm90/narrow_rows.cuh"
#include "ops/sparse_attention/sm90/store.cuh"

namespace talea::sparse_attention::sm90 {

template <class S>
__device__ inline void store_narrow(const Forward& f, const View& to, bool words, const Work& w,
                                    int thread, const NarrowRows<S>& rows) {
#pragma unroll
  for (int h = 0; h < S::halves; ++h) {
    Where at[2];
    for (int i = 0; i < S::rows; ++i) {
      const int r = S::head(thread, i);
      if (r >= w.heads) continue;
      at[i].begin = cuda::offset(to, w.b, w.s, w.head + r) + h * S::half;
      at[i].left = static_cast<int>(f.value_dim) - h * S::half;
    }
    store_rows<S::half, S::f16>(to, words, rows.o[h], at);
  }
}

// any: whether a slot was valid.
template <class S>
__device__ inline void finish_narrow(const Forward& f, const Work& w, int thread, bool any,
                                     NarrowRows<S>& rows) {
#pragma unroll
  for (int i = 0; i < S::rows; ++i) {
    float all[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      all[t] = rows.sum[t][i] + __shfl_xor_sync(~0u, rows.sum[t][i], 1);
      all[t] += __shfl_xor_sync(~0u, all[t], 2);
    }
    const int r = S::head(thread, i);
    const bool own = r < w.heads;
    const float sink = f.sink.present && own
                           ? cuda::number_at(f.sink, cuda::offset(f.sink, w.head + r))
                           : -INFINITY;
    const RowEnd end = end_of(all[0] + all[1], rows.reference[i], rows.top[i], any, sink);
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
      const float factor = end.factor * rows.pending[h][i];
#pragma unroll
      for (int k = 0; k < S::half / 2; ++k)
        if (k / 2 % 2 == i) rows.o[h][k] = factor == 0 ? 0.0f : rows.o[h][k] * factor;
    }
    if (!own || thread % 4 != 0) continue;
    if (f.lse.present) cuda::put(f.lse, cuda::offset(f.lse, w.b, w.s, w.head + r), end.lse);
    if (f.row_max.present)
      cuda::put(f.row_max, cuda::offset(f.row_max, w.b, w.s, w.head + r), end.top);
  }
  if (f.o.present) store_narrow(f, f.o, f.o_words, w, thread, rows);
  if (!f.o_residual.present) return;
  const bool wide = f.o.present && !is_16bit(f.o.dtype);  // then nothing is left
#pragma unroll
  for (int h = 0; h < S::halves; ++h)
#pragma unroll
    for (float& x : rows.o[h]) x -= wide ? x : rounded_16<S::f16>(x);
  store_narrow(f, f.o_residual, f.residual_words, w, thread, rows);
}

}  // namespace talea::sparse_attention::sm90
