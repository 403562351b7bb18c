// What: turns a chunk's logits into the gradient of its products, in place, and sums db.
// Why: dz is formed once, from the fp32 logits, and rounded once to the dtype of the products.
// Never: forms p - 1 by subtraction: the target's coefficient comes from the other terms' share.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/common/cuda_check.hpp"
#include "device/common/reduce.cuh"
#include "ops/linear_cross_entropy/cuda/logit.cuh"

namespace talea::lce::cuda {
namespace {

constexpr int threads = 128;  // so that the rows of a usual chunk are all resident at once
constexpr int lanes = 8;      // columns a thread and step
constexpr int step = threads * lanes;

template <typename T>
__device__ T narrow(float x);
template <>
__device__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16(x);
}
template <>
__device__ __half narrow<__half>(float x) {
  return __float2half(x);
}
__device__ float widen(float x) { return x; }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float widen(__half x) { return __half2float(x); }

// da of one column times the row's storage factor, from its logit before the softcap; q: its soft
// target.
template <bool Plain, bool Fast>
__device__ __forceinline__ float gradient_of(const Shape& s, const RowFactors& f, float a,
                                             int column, float q) {
  const float x = (Plain ? a : capped(s, a)) - f.max;
  const float p = (Fast ? __expf(x) : expf(x)) * f.inverse_sum;
  float dz = column == f.target_column ? f.target : f.prob * p;
  if (Plain) return (dz - f.smooth) * f.stored;
  const float c = s.class_weight ? s.class_weight[column] : 1.0f;
  if (f.smooth != 0) dz -= f.smooth * c;
  if (f.soft != 0) dz -= f.soft * c * q;
  if (f.entropy_up != 0 && p != 0) dz -= f.entropy_up * p * (x - f.log_sum_less_entropy);
  if (s.softcap > 0) dz *= cap_slope(s, a);
  return dz * f.stored;
}

template <typename T>
struct alignas(16) Pack {
  T v[lanes];
};

// Eight columns of da; q is read where there are dense soft targets.
template <bool Plain, bool Fast>
__device__ __forceinline__ void gradients(const Shape& s, const RowFactors& f, int64_t t,
                                          float scale, const float4 (&products)[2], int first,
                                          float (&da)[lanes]) {
  const float raw[lanes] = {products[0].x, products[0].y, products[0].z, products[0].w,
                            products[1].x, products[1].y, products[1].z, products[1].w};
  const int columns = static_cast<int>(s.vocab_local);
#pragma unroll
  for (int j = 0; j < lanes; ++j) {
    const int column = first + j;
    da[j] = 0;
    if (column >= columns) continue;
    const float q = !Plain && s.soft == SoftTargets::dense
                        ? static_cast<float>(s.soft_probs.load(t, s.vocab_begin + column))
                        : 0.0f;
    da[j] = gradient_of<Plain, Fast>(s, f, scaled_logit(s, raw[j], scale, column), column, q);
  }
}

template <typename T>
__device__ __forceinline__ Pack<T> packed(const float (&da)[lanes]) {
  Pack<T> pack;
#pragma unroll
  for (int j = 0; j < lanes; ++j) pack.v[j] = narrow<T>(da[j]);
  return pack;
}

// One block a row, from the left. A 16-bit row starts where its fp32 row started, so step i writes
// over columns that step i / 2 read: one barrier a step keeps every read before the write over it.
// The next step's columns are read before this step's are formed.
template <typename T, bool Plain>
__global__ void __launch_bounds__(threads)
    gradient_kernel(Shape s, ChunkRows c, float* logits, void* rest, const RowFactors* factors) {
  const int64_t r = blockIdx.x;
  float* row = logits + r * s.logits_stride;
  Pack<T>* out = reinterpret_cast<Pack<T>*>(row);
  Pack<T>* left = rest ? static_cast<Pack<T>*>(rest) + r * (s.logits_stride / lanes) : nullptr;
  const int stride = static_cast<int>(s.logits_stride);  // a multiple of 64: whole packs
  int v = threadIdx.x * lanes;
  if (!is_row(c, r)) {
    for (; v < stride; v += step) {
      out[v / lanes] = Pack<T>{};
      if (left) left[v / lanes] = Pack<T>{};
    }
    return;
  }
  const int64_t t = c.order[c.begin + r];
  const RowFactors f = factors[r];
  const float scale = row_scale(s, t);
  auto read = [&](int from, float4(&to)[2]) {
    if (from >= stride) return;
    to[0] = *reinterpret_cast<const float4*>(row + from);
    to[1] = *reinterpret_cast<const float4*>(row + from + 4);
  };
  float4 now[2] = {}, next[2] = {};
  read(v, now);
  for (int base = 0; base < stride; base += step, v += step) {
    read(v + step, next);
    float da[lanes];
    gradients<Plain, sizeof(T) == 2>(s, f, t, scale, now, v, da);
    const Pack<T> pack = packed<T>(da);
    if (sizeof(T) < sizeof(float)) __syncthreads();
    if (v < stride) out[v / lanes] = pack;
    if (v < stride && left) {
#pragma unroll
      for (int j = 0; j < lanes; ++j) da[j] -= widen(pack.v[j]);
      left[v / lanes] = packed<T>(da);
    }
    now[0] = next[0];
    now[1] = next[1];
  }
}

// One warp a row: the listed columns are written again with their q, each by its first mention.
template <typename T>
__global__ void sparse_kernel(Shape s, ChunkRows c, float* logits, void* rest,
                              const float* sparse_logits, const RowFactors* factors) {
  const int64_t r = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / device::warp_size;
  if (!is_row(c, r)) return;
  const int64_t t = c.order[c.begin + r];
  T* out = reinterpret_cast<T*>(logits + r * s.logits_stride);
  for (int64_t j = threadIdx.x % device::warp_size; j < s.soft_k; j += device::warp_size) {
    const int64_t id = s.soft_ids.load_index(t, j);
    const int64_t column = id - s.vocab_begin;
    if (column < 0 || column >= s.vocab_local) continue;
    double q = 0;
    bool first = true;
    for (int64_t i = 0; i < s.soft_k && first; ++i) {
      if (s.soft_ids.load_index(t, i) != id) continue;
      first = i >= j;
      q += s.soft_probs.load(t, i);
    }
    if (!first) continue;
    const float da =
        gradient_of<false, sizeof(T) == 2>(s, factors[r], sparse_logits[r * s.soft_k + j],
                                           static_cast<int>(column), static_cast<float>(q));
    out[column] = narrow<T>(da);
    if (rest)
      static_cast<T*>(rest)[r * s.logits_stride + column] = narrow<T>(da - widen(out[column]));
  }
}

constexpr int db_columns = 64, db_groups = 8;

// Columns are summed over the chunk's rows by a fixed split of the rows in eight.
template <typename T>
__global__ void bias_kernel(Shape s, ChunkRows c, const float* logits, const void* rest,
                            const RowFactors* factors, double* db) {
  __shared__ float sums[db_groups][db_columns];
  const int x = threadIdx.x % db_columns, group = threadIdx.x / db_columns;
  const int64_t column = int64_t{blockIdx.x} * db_columns + x;
  const int64_t valid = c.totals->valid - c.begin;
  const int64_t rows = valid < c.rows ? valid : c.rows;
  float sum = 0;
  if (column < s.vocab_local)
    for (int64_t r = group; r < rows; r += db_groups) {
      float da = widen(reinterpret_cast<const T*>(logits + r * s.logits_stride)[column]);
      if (rest) da += widen(static_cast<const T*>(rest)[r * s.logits_stride + column]);
      sum += da * factors[r].db;
    }
  sums[group][x] = sum;
  __syncthreads();
  if (group != 0 || column >= s.vocab_local) return;
  double all = c.begin > 0 ? db[column] : 0.0;
  for (int g = 0; g < db_groups; ++g) all += sums[g][x];
  db[column] = all;
}

template <typename T>
void form(const Shape& s, const ChunkRows& c, const Gradient& g, const float* sparse_logits,
          const RowFactors* factors, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(c.rows);
  const bool plain =
      !s.class_weight && s.soft == SoftTargets::none && s.softcap == 0 && !s.upstream_entropy.data;
  auto* kernel = plain ? gradient_kernel<T, true> : gradient_kernel<T, false>;
  kernel<<<rows, threads, 0, stream>>>(s, c, g.logits, g.rest, factors);
  device::check_launch("form_gradient");
  if (s.soft != SoftTargets::sparse || s.soft_k == 0) return;
  sparse_kernel<T>
      <<<(rows + 7) / 8, 256, 0, stream>>>(s, c, g.logits, g.rest, sparse_logits, factors);
  device::check_launch("form_gradient of sparse targets");
}

template <typename T>
void sum_bias(const Shape& s, const ChunkRows& c, const Gradient& g, const RowFactors* factors,
              double* db, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((s.vocab_local + db_columns - 1) / db_columns);
  bias_kernel<T>
      <<<blocks, db_columns * db_groups, 0, stream>>>(s, c, g.logits, g.rest, factors, db);
  device::check_launch("add_bias_gradient");
}

}  // namespace

void form_gradient(const Shape& s, const ChunkRows& c, const Gradient& g,
                   const float* sparse_logits, const RowFactors* factors, cudaStream_t stream) {
  if (g.dtype == DType::bf16)
    form<__nv_bfloat16>(s, c, g, sparse_logits, factors, stream);
  else if (g.dtype == DType::f16)
    form<__half>(s, c, g, sparse_logits, factors, stream);
  else
    form<float>(s, c, g, sparse_logits, factors, stream);
}

void add_bias_gradient(const Shape& s, const ChunkRows& c, const Gradient& g,
                       const RowFactors* factors, double* db, cudaStream_t stream) {
  if (g.dtype == DType::bf16)
    sum_bias<__nv_bfloat16>(s, c, g, factors, db, stream);
  else if (g.dtype == DType::f16)
    sum_bias<__half>(s, c, g, factors, db, stream);
  else
    sum_bias<float>(s, c, g, factors, db, stream);
}

}  // namespace talea::lce::cuda
