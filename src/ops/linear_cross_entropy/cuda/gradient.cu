// What: turns the logits of a piece into the gradient of its products, and sums db.
// Why: dz is formed once, from the fp32 logits, and rounded once to the dtype of the products.
// Never: forms p - 1 by subtraction: the target's coefficient comes from the other terms' share.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/kernel_mutant.hpp"
#include "device/common/cuda_check.hpp"
#include "device/common/reduce.cuh"
#include "ops/linear_cross_entropy/cuda/logit.cuh"

namespace talea::lce::cuda {
namespace {

constexpr int threads = 256;
constexpr int lanes = 8;  // columns a thread and step
constexpr int step = threads * lanes;
constexpr int steps = 4;  // of a block, all loaded before the first is formed

template <typename T>
__device__ T narrow(float x);
template <>
__device__ float narrow<float>(float x) {
  return mutant(Mutant::b4_gradient_in_16_bits) ? __bfloat162float(__float2bfloat16(x)) : x;
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

// plain: neither cap, class weights, soft targets nor a gradient of the entropy; capped: with a
// cap.
enum class Mode { plain, capped, general };

// What the columns of a row share in the modes without weights.
struct SharedTerms {
  float prob, target, smooth;  // of e, of the target's column, of every column
};
__device__ __forceinline__ SharedTerms terms_of(const RowFactors& f) {
  return {f.prob * f.inverse_sum * f.stored, (f.target - f.smooth) * f.stored, f.smooth * f.stored};
}

// da of one column that is not the target's, from its logit before the softcap.
template <Mode M, bool Fast>
__device__ __forceinline__ float gradient_of(const Shape& s, const RowFactors& f,
                                             const SharedTerms& row, float a) {
  Cap cap{a, 1.0f};
  if (M == Mode::capped) cap = cap_of(s, a);
  const float dz = __fmaf_rn(exp_of<Fast>(cap.logit - f.max), row.prob, -row.smooth);
  return M == Mode::capped ? dz * cap.slope : dz;
}

// The same of any column and with every option; c: its class weight, q: its soft target.
template <bool Fast>
__device__ __forceinline__ float general_gradient(const Shape& s, const RowFactors& f, float a,
                                                  int column, float c, float q) {
  Cap cap{a, 1.0f};
  if (s.softcap > 0) cap = cap_of(s, a);
  const float x = cap.logit - f.max;
  const float p = exp_of<Fast>(x) * f.inverse_sum;
  float dz = column == f.target_column ? f.target : f.prob * p;
  if (f.smooth != 0) dz -= f.smooth * c;
  if (f.soft != 0) dz -= f.soft * c * q;
  if (f.entropy_up != 0 && p != 0) dz -= f.entropy_up * p * (x - f.mean_distance);
  return dz * cap.slope * f.stored;
}

template <typename T>
struct alignas(16) Pack {
  T v[lanes];
};

// Eight columns of da. q is read where there are dense soft targets.
template <Mode M, bool Fast>
__device__ __forceinline__ void gradients(const Shape& s, const RowFactors& f,
                                          const SharedTerms& row, int64_t t, float scale,
                                          const float4 (&products)[2], int first,
                                          float (&da)[lanes]) {
  const float raw[lanes] = {products[0].x, products[0].y, products[0].z, products[0].w,
                            products[1].x, products[1].y, products[1].z, products[1].w};
  const float4 b0 = four_of(s.bias, first, 0.0f), b1 = four_of(s.bias, first + 4, 0.0f);
  const float bias[lanes] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
  const int columns = static_cast<int>(s.vocab_local), target = f.target_column - first;
  if constexpr (M == Mode::general) {
    const float4 c0 = four_of(s.class_weight, first, 1.0f);
    const float4 c1 = four_of(s.class_weight, first + 4, 1.0f);
    const float c[lanes] = {c0.x, c0.y, c0.z, c0.w, c1.x, c1.y, c1.z, c1.w};
#pragma unroll
    for (int j = 0; j < lanes; ++j) {
      const bool dense = s.soft == SoftTargets::dense && first + j < columns;
      const float q =
          dense ? static_cast<float>(s.soft_probs.load(t, s.vocab_begin + first + j)) : 0.0f;
      da[j] =
          general_gradient<Fast>(s, f, scaled_logit(raw[j], scale, bias[j]), first + j, c[j], q);
    }
  } else {
#pragma unroll
    for (int j = 0; j < lanes; ++j)
      da[j] = gradient_of<M, Fast>(s, f, row, scaled_logit(raw[j], scale, bias[j]));
    if (target >= 0 && target < lanes) {
#pragma unroll
      for (int j = 0; j < lanes; ++j) {
        if (j != target) continue;
        const float a = scaled_logit(raw[j], scale, bias[j]);
        da[j] = M == Mode::capped ? row.target * cap_of(s, a).slope : row.target;
      }
    }
  }
  if (first + lanes <= columns) return;
#pragma unroll
  for (int j = 0; j < lanes; ++j)
    if (first + j >= columns) da[j] = 0;
}

template <typename T>
__device__ __forceinline__ Pack<T> packed(const float (&da)[lanes]) {
  Pack<T> pack;
#pragma unroll
  for (int j = 0; j < lanes; ++j) pack.v[j] = narrow<T>(da[j]);
  return pack;
}

//   for each 8 columns of a thread in products [row, vocab]:
//     a = scale product + bias;  z = a capped;  p = exp(z - max) / sum
//     da = prob p - smooth c - soft c q - entropy_up p (log p + entropy), times the cap's slope
//     the target's column: its own coefficient instead of prob p
//     dz [row, vocab] = da in the products' dtype;  rest = what rounding left, where kept
//
// A block takes `steps` stretches of one row, its neighbours the same ones of other rows, whose
// bias they share. No thread writes what another has yet to read: the host launches only rows whose
// dz lies before every logit that is still needed.
template <typename T, Mode M>
__global__ void __launch_bounds__(threads)
    gradient_kernel(Shape s, ChunkRows c, int64_t first_row, unsigned rows, const float* logits,
                    T* dz, T* rest, const RowFactors* factors) {
  const int64_t r = first_row + blockIdx.x % rows;
  const int stride = static_cast<int>(s.logits_stride);  // a multiple of 64: whole packs
  const int begin = static_cast<int>(blockIdx.x / rows) * (steps * step) + threadIdx.x * lanes;
  Pack<T>* out = reinterpret_cast<Pack<T>*>(dz + r * s.logits_stride);
  Pack<T>* left = rest ? reinterpret_cast<Pack<T>*>(rest + r * s.logits_stride) : nullptr;
  if (!is_row(c, r)) {
    for (int i = 0, v = begin; i < steps && v < stride; ++i, v += step) {
      out[v / lanes] = Pack<T>{};
      if (left) left[v / lanes] = Pack<T>{};
    }
    return;
  }
  const float* row = logits + r * s.logits_stride;
  float4 products[steps][2];
#pragma unroll
  for (int i = 0; i < steps; ++i) {
    const int v = begin + i * step;
    if (v >= stride) continue;
    products[i][0] = *reinterpret_cast<const float4*>(row + v);
    products[i][1] = *reinterpret_cast<const float4*>(row + v + 4);
    if (mutant(KernelMutant::backward_logit_rounded))
      for (float4& four : products[i])
        for (float* x : {&four.x, &four.y, &four.z, &four.w})
          *x = __bfloat162float(__float2bfloat16(*x));
  }
  const int64_t t = c.order[c.begin + r];
  const RowFactors f = factors[r];
  const SharedTerms shared = terms_of(f);
  const float scale = row_scale(s, t);
#pragma unroll
  for (int i = 0; i < steps; ++i) {
    const int v = begin + i * step;
    if (v >= stride) return;
    float da[lanes];
    gradients<M, sizeof(T) == 2>(s, f, shared, t, scale, products[i], v, da);
    const Pack<T> pack = packed<T>(da);
    out[v / lanes] = pack;
    if (!left) continue;
#pragma unroll
    for (int j = 0; j < lanes; ++j) da[j] -= widen(pack.v[j]);
    left[v / lanes] = packed<T>(da);
  }
}

// One warp a row: the listed columns are written again with their q, each by its first mention.
template <typename T>
__global__ void sparse_kernel(Shape s, ChunkRows c, T* dz, T* rest, const float* sparse_logits,
                              const RowFactors* factors) {
  const int64_t r = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / device::warp_size;
  if (!is_row(c, r)) return;
  const int64_t t = c.order[c.begin + r];
  T* out = dz + r * s.logits_stride;
  const SparseRow listed{s.rule.soft_ids, s.soft_probs, s.soft_k, t, s.rule.shard};
  for (int64_t j = threadIdx.x % device::warp_size; j < s.soft_k; j += device::warp_size) {
    const int64_t column = listed.column(j);
    double q = 0;
    if (column < 0 || !listed.is_first(j, q)) continue;
    const float da = general_gradient<sizeof(T) == 2>(
        s, factors[r], sparse_logits[r * s.soft_k + j], static_cast<int>(column),
        s.class_weight ? s.class_weight[column] : 1.0f, static_cast<float>(q));
    out[column] = narrow<T>(da);
    if (rest) rest[r * s.logits_stride + column] = narrow<T>(da - widen(out[column]));
  }
}

constexpr int db_columns = 64, db_groups = 8;

// Columns are summed over the chunk's rows by a fixed split of the rows in eight.
template <typename T>
__global__ void bias_kernel(Shape s, ChunkRows c, const T* dz, const T* rest,
                            const RowFactors* factors, double* db) {
  __shared__ float sums[db_groups][db_columns];
  const int x = threadIdx.x % db_columns, group = threadIdx.x / db_columns;
  const int64_t column = int64_t{blockIdx.x} * db_columns + x;
  const int64_t valid = c.facts->valid - c.begin;
  const int64_t rows = valid < c.rows ? valid : c.rows;
  float sum = 0;
  if (column < s.vocab_local)
    for (int64_t r = group; r < rows; r += db_groups) {
      float da = widen(dz[r * s.logits_stride + column]);
      if (rest) da += widen(rest[r * s.logits_stride + column]);
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
  const bool general =
      s.class_weight || s.soft != SoftTargets::none || s.terms.upstream_entropy.data;
  auto* kernel = general         ? gradient_kernel<T, Mode::general>
                 : s.softcap > 0 ? gradient_kernel<T, Mode::capped>
                                 : gradient_kernel<T, Mode::plain>;
  T *dz = static_cast<T*>(g.dz), *rest = static_cast<T*>(g.rest);
  const auto blocks = static_cast<unsigned>((s.logits_stride + steps * step - 1) / (steps * step));
  // Rows below `first` are read: up to lead + 2 first rows of dz may be written.
  for (int64_t first = 0, end = 0; first < c.rows; first = end) {
    end = g.lead > 0 ? std::min(c.rows, g.lead + 2 * first) : c.rows;
    const auto rows = static_cast<unsigned>(end - first);
    for (int runs = mutant(KernelMutant::pass_run_twice) ? 2 : 1; runs > 0; --runs)
      kernel<<<rows * blocks, threads, 0, stream>>>(s, c, first, rows, g.logits, dz, rest, factors);
    device::check_launch("form_gradient");
  }
  if (s.soft != SoftTargets::sparse || s.soft_k == 0) return;
  sparse_kernel<T><<<static_cast<unsigned>((c.rows + 7) / 8), 256, 0, stream>>>(
      s, c, dz, rest, sparse_logits, factors);
  device::check_launch("form_gradient of sparse targets");
}

template <typename T>
void sum_bias(const Shape& s, const ChunkRows& c, const Gradient& g, const RowFactors* factors,
              double* db, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((s.vocab_local + db_columns - 1) / db_columns);
  bias_kernel<T><<<blocks, db_columns * db_groups, 0, stream>>>(
      s, c, static_cast<const T*>(g.dz), static_cast<const T*>(g.rest), factors, db);
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
