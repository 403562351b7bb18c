// What: the row kernels between the products: softmax with a sink, its slopes, outputs.
// Why: every rule of sections 4 and 5 about a row stands here, on fp32 scores.
// Never: uses atomics; a sum runs in an order that depends on the shapes alone.
#include <math_constants.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "device/common/cuda_check.hpp"
#include "device/common/reduce.cuh"
#include "ops/sparse_attention/cuda/kernels.hpp"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int threads = 256;

// What a row's softmax is made of. NaN in a valid logit makes sum NaN.
struct RowState {
  float max = -INFINITY, sum = 0;
  int64_t valid = 0;
};

__device__ RowState row_state(const float* scores, const int64_t* rows, int64_t slots, float scale,
                              float* shared) {
  float max = -CUDART_INF_F, nan = 0, valid = 0;
  for (int64_t k = threadIdx.x; k < slots; k += blockDim.x) {
    if (rows[k] < 0) continue;
    const float s = scale * scores[k];
    max = fmaxf(max, s);  // NaN loses
    if (isnan(s)) nan = 1;
    valid = 1;
  }
  RowState state;
  state.max = device::block_reduce(max, device::Max{}, shared);
  nan = device::block_reduce(nan, device::Max{}, shared);
  valid = device::block_reduce(valid, device::Max{}, shared);
  state.valid = valid > 0;
  float sum = 0;
  for (int64_t k = threadIdx.x; k < slots; k += blockDim.x)
    if (rows[k] >= 0) sum += expf(scale * scores[k] - state.max);
  state.sum = device::block_reduce(sum, device::Sum{}, shared);
  if (nan > 0) state.max = state.sum = CUDART_NAN_F;
  return state;
}

// 1 / (sum + e^(sink - max)): what e^(s - max) is multiplied by; 0 where the sink is all.
__device__ float inverse_whole(const RowState& r, float sink) {
  if (isnan(sink)) return CUDART_NAN_F;
  if (sink == -CUDART_INF_F) return 1.0f / r.sum;
  if (sink == CUDART_INF_F) return isnan(r.sum) ? CUDART_NAN_F : 0.0f;
  if (r.max == -CUDART_INF_F) return 0.0f;  // all logits -Inf beside a finite sink
  const float more = expf(sink - r.max);
  return isinf(more) ? 0.0f : 1.0f / (r.sum + more);
}

// Weights relative to the sink where the sink is so far above that e^(sink - max) overflows.
__device__ float weight(float s, const RowState& r, float inverse, float sink) {
  if (r.max == -CUDART_INF_F && sink > -CUDART_INF_F) return 0.0f;
  return expf(s - r.max) * inverse;
}

__device__ float lse_of(const RowState& r, float sink) {
  if (!r.valid) return CUDART_INF_F;
  if (r.max == -CUDART_INF_F && sink > -CUDART_INF_F) return -CUDART_INF_F;
  const float lse = r.max + logf(r.sum);
  return mutant(Mutant::sa21_lse_in_base_two) ? lse * 1.442695f : lse;
}

template <typename T>
__device__ T rounded(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}
template <typename T>
__device__ float widened(T x) {
  return static_cast<float>(x);
}

// blockIdx.x: a (query, head) of the chunk.
struct Place2 {
  int64_t row, s, h;
};
__device__ Place2 place(const Chunk& c) {
  const int64_t row = blockIdx.x;
  return {row, c.s + row / c.heads, c.head + row % c.heads};
}

template <typename T>
__global__ void softmax_kernel(Softmax m, Chunk c, const int64_t* rows, const float* scores,
                               T* weights, T* rest) {
  __shared__ float shared[threads / 32];
  const Place2 at = place(c);
  const float* s = scores + at.row * c.padded;
  const int64_t* list = rows + at.row / c.heads * c.padded;
  const RowState r = row_state(s, list, c.padded, m.scale, shared);
  const float sink = m.sink.present ? number_at(m.sink, offset(m.sink, at.h)) : -CUDART_INF_F;
  const float inverse = inverse_whole(r, sink);
  for (int64_t k = threadIdx.x; k < c.padded; k += blockDim.x) {
    const bool valid = list[k] >= 0 || mutant(Mutant::sa33_absent_slot_has_logit_zero);
    const float p = valid ? weight(m.scale * s[k], r, inverse, sink) : 0.0f;
    const int64_t i = at.row * c.padded + k;
    weights[i] = rounded<T>(p);
    if (rest) rest[i] = rounded<T>(p - widened(weights[i]));
  }
  if (threadIdx.x != 0) return;
  if (m.lse.present) put(m.lse, offset(m.lse, c.b, at.s, at.h), lse_of(r, sink));
  if (m.row_max.present) put(m.row_max, offset(m.row_max, c.b, at.s, at.h), r.max);
}

__global__ void write_output_kernel(const float* values, Chunk c, int64_t columns, View o,
                                    View residual) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= c.n * c.heads * columns) return;
  const int64_t column = i % columns, h = c.head + i / columns % c.heads;
  const int64_t s = c.s + i / columns / c.heads;
  const float value = values[i];
  if (o.present) put(o, offset(o, c.b, s, h, column), value);
  if (!residual.present) return;
  const DType kept = o.present ? o.dtype : residual.dtype;
  const float stored = kept == DType::f16    ? __half2float(__float2half_rn(value))
                       : kept == DType::bf16 ? __bfloat162float(__float2bfloat16_rn(value))
                                             : value;
  put(residual, offset(residual, c.b, s, h, column), value - stored);
}

// By the lse that backward is given where it is not the row's own: keys cut over ranks are merged
// by the caller, and the merged row alone gives the gradients of a part.
__device__ RowState given_state(const RowState& own, const Slopes& m, int64_t b, const Place2& at) {
  if (!m.lse.present) return own;
  const float lse = number_at(m.lse, offset(m.lse, b, at.s, at.h));
  if (is_own(static_cast<double>(lse), static_cast<double>(own.max), static_cast<double>(own.sum)))
    return own;
  return {lse, 1, own.valid};
}

// Sum of (o + residual) d_o of a row.
__device__ float delta_of_output(const Slopes& m, int64_t b, const Place2& at, float* shared) {
  float part = 0;
  for (int64_t c = threadIdx.x; m.d_o.present && c < m.value_dim; c += blockDim.x) {
    float o = number_at(m.o, offset(m.o, b, at.s, at.h, c));
    if (m.residual.present) o += number_at(m.residual, offset(m.residual, b, at.s, at.h, c));
    part += o * number_at(m.d_o, offset(m.d_o, b, at.s, at.h, c));
  }
  return device::block_reduce(part, device::Sum{}, shared);
}

template <typename T>
__global__ void slopes_kernel(Slopes m, Chunk c, const int64_t* rows, const float* scores,
                              const float* d_weights, SlopesOut out) {
  __shared__ float shared[threads / 32];
  const Place2 at = place(c);
  const float *s = scores + at.row * c.padded, *dp = d_weights + at.row * c.padded;
  const int64_t* list = rows + at.row / c.heads * c.padded;
  const RowState r = given_state(row_state(s, list, c.padded, m.scale, shared), m, c.b, at);
  const float sink = m.sink.present ? number_at(m.sink, offset(m.sink, at.h)) : -CUDART_INF_F;
  const bool adds = m.d_lse.present && !mutant(Mutant::sa38_d_lse_dropped);
  const float d_lse = adds ? number_at(m.d_lse, offset(m.d_lse, c.b, at.s, at.h)) : 0.0f;
  const bool alone = mutant(Mutant::sa22_sink_missing_backward);
  const float inverse = inverse_whole(r, alone ? -CUDART_INF_F : sink);
  float delta = 0;
  if (m.o.present) {
    delta = delta_of_output(m, c.b, at, shared);
  } else {
    float part = 0;
    for (int64_t k = threadIdx.x; k < c.padded; k += blockDim.x)
      if (list[k] >= 0) part += weight(m.scale * s[k], r, inverse, sink) * dp[k];
    delta = device::block_reduce(part, device::Sum{}, shared);
  }
  T *p_hi = static_cast<T*>(out.p_hi), *p_lo = static_cast<T*>(out.p_lo);
  T *ds_hi = static_cast<T*>(out.ds_hi), *ds_lo = static_cast<T*>(out.ds_lo);
  for (int64_t k = threadIdx.x; k < c.padded; k += blockDim.x) {
    float p = 0, ds = 0;
    if (list[k] >= 0) {
      p = weight(m.scale * s[k], r, inverse, sink);
      ds = p * (dp[k] - delta);
      if (mutant(Mutant::sa40_gradient_has_a_factor)) ds *= 1.005f;
      if (adds) ds += expf(m.scale * s[k] - r.max) / r.sum * d_lse;
    }
    const int64_t i = at.row * c.padded + k;
    p_hi[i] = rounded<T>(p);
    ds_hi[i] = rounded<T>(ds);
    if (!p_lo) continue;
    p_lo[i] = rounded<T>(p - widened(p_hi[i]));
    ds_lo[i] = rounded<T>(ds - widened(ds_hi[i]));
  }
  if (threadIdx.x != 0 || !out.d_sink) return;
  float share = 0;  // -e^(sink - Lt) Delta; without a valid slot or a sink nothing
  if (r.valid && !(sink == -CUDART_INF_F)) {
    const bool whole = sink == CUDART_INF_F || r.max == -CUDART_INF_F;
    // e^(sink - max) / (sum + e^(sink - max)), without the overflow of either.
    const float sink_share = whole ? 1.0f : 1.0f / (1.0f + r.sum * expf(r.max - sink));
    share = -(isnan(sink) ? CUDART_NAN_F : sink_share) * delta;
  }
  out.d_sink[at.row] = share;
}

__global__ void add_d_sink_kernel(const float* shares, Chunk c, double* sums) {
  const int64_t h = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (h >= c.heads) return;
  double sum = sums[c.head + h];
  for (int64_t i = 0; i < c.n; ++i) sum += shares[i * c.heads + h];
  sums[c.head + h] = sum;
}

__global__ void write_d_sink_kernel(const double* sums, int64_t heads, View d_sink) {
  const int64_t h = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (h < heads) put(d_sink, offset(d_sink, h), static_cast<float>(sums[h]));
}

unsigned rows_of(const Chunk& c) { return static_cast<unsigned>(c.n * c.heads); }

}  // namespace

template <typename T>
static void softmax_of(const Softmax& m, const Chunk& chunk, const int64_t* rows,
                       const float* scores, void* weights, void* rest, cudaStream_t stream) {
  softmax_kernel<<<rows_of(chunk), threads, 0, stream>>>(
      m, chunk, rows, scores, static_cast<T*>(weights), static_cast<T*>(rest));
}

void softmax(const Softmax& m, const Chunk& chunk, const int64_t* rows, const float* scores,
             void* weights, void* rest, cudaStream_t stream) {
  if (rows_of(chunk) == 0) return;
  if (m.to == DType::bf16)
    softmax_of<__nv_bfloat16>(m, chunk, rows, scores, weights, rest, stream);
  else if (m.to == DType::f16)
    softmax_of<__half>(m, chunk, rows, scores, weights, rest, stream);
  else
    softmax_of<float>(m, chunk, rows, scores, weights, rest, stream);
  device::check_launch("sparse_attention: softmax");
}

void write_output(const float* values, const Chunk& chunk, int64_t columns, const View& o,
                  const View& residual, cudaStream_t stream) {
  const int64_t all = chunk.n * chunk.heads * columns;
  if (all == 0) return;
  const auto blocks = static_cast<unsigned>((all + threads - 1) / threads);
  write_output_kernel<<<blocks, threads, 0, stream>>>(values, chunk, columns, o, residual);
  device::check_launch("sparse_attention: write_output");
}

void slopes(const Slopes& m, const Chunk& chunk, const int64_t* rows, const float* scores,
            const float* d_weights, const SlopesOut& out, cudaStream_t stream) {
  const unsigned blocks = rows_of(chunk);
  if (blocks == 0) return;
  if (m.to == DType::bf16)
    slopes_kernel<__nv_bfloat16>
        <<<blocks, threads, 0, stream>>>(m, chunk, rows, scores, d_weights, out);
  else if (m.to == DType::f16)
    slopes_kernel<__half><<<blocks, threads, 0, stream>>>(m, chunk, rows, scores, d_weights, out);
  else
    slopes_kernel<float><<<blocks, threads, 0, stream>>>(m, chunk, rows, scores, d_weights, out);
  device::check_launch("sparse_attention: slopes");
}

void add_d_sink(const float* shares, const Chunk& chunk, double* sums, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((chunk.heads + threads - 1) / threads);
  if (blocks == 0) return;
  add_d_sink_kernel<<<blocks, threads, 0, stream>>>(shares, chunk, sums);
  device::check_launch("sparse_attention: add_d_sink");
}

void write_d_sink(const double* sums, int64_t heads, const View& d_sink, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((heads + threads - 1) / threads);
  if (blocks == 0) return;
  write_d_sink_kernel<<<blocks, threads, 0, stream>>>(sums, heads, d_sink);
  device::check_launch("sparse_attention: write_d_sink");
}

}  // namespace talea::sparse_attention::cuda
