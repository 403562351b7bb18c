// What: row states and da from a chunk's fp32 logits.
// Why: every option sees the fp32 accumulator; da is rounded once.
// Never: lets the target's own element into a 16-bit buffer of one term: it enters in fp32.
#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/rows/tokens.cuh"
#include "ops/linear_cross_entropy/sm90/pack.cuh"
#include "ops/linear_cross_entropy/sm90/wide.hpp"

namespace talea::lce {
namespace {

using device::block_reduce;

constexpr int kThreads = 256, kLanes = 4, kStep = kThreads * kLanes;

__device__ __forceinline__ float row_scale(const WideParams& p, int64_t row) {
  return p.rule.scale * (p.rows.scale ? p.rows.scale[row] : 1.f);
}

__device__ __forceinline__ float logit_at(const WideParams& p, float product, float scale,
                                          int column, float& slope) {
  return p.rule.capped(fmaf(product, scale, p.rule.bias_at(column)), slope);
}

__device__ __forceinline__ double soft_at(const WideParams& p, int64_t token, int column) {
  return p.soft_probs.load(token, p.vocab_begin + column);
}

__device__ __forceinline__ SparseRow listed_of(const WideParams& p, int64_t token) {
  return {p.soft_ids, p.soft_probs, p.soft_k, token, {p.vocab_begin, p.vocab}};
}

// What one thread has seen of the words other than the target.
struct Others {
  float max = -INFINITY, sum = 0, shifted = 0;
  double class_sum = 0, soft_sum = 0, soft_mass = 0;

  __device__ void add(float z) {
    if (z > max) {
      const float f = max == -INFINITY ? 0.f : expf(max - z);
      shifted = f > 0 ? f * (shifted + sum * (max - z)) : 0.f;
      sum *= f;
      max = z;
    }
    const float x = max == -INFINITY ? z : z - max, e = expf(x);
    sum += e;
    if (e != 0) shifted = fmaf(e, x, shifted);
  }
};

__device__ RowState<double> complete(const Others& all, bool has_target, float target) {
  RowState<double> s;
  s.has_target = has_target ? 1.0 : 0.0;
  if (has_target) s.target = target;
  const double most = all.max;
  s.max = most;
  if (has_target && !(s.target <= most)) s.max = s.target;
  const double f = most == -INFINITY ? 0.0 : exp(most - s.max);
  // 0 * sum keeps a NaN that no maximum shows.
  s.others = f * all.sum;
  if (f > 0) s.shifted = f * (all.shifted + all.sum * (most - s.max));
  if (all.sum != all.sum) s.others = s.max = all.sum;
  s.class_sum = all.class_sum, s.soft_sum = all.soft_sum, s.soft_mass = all.soft_mass;
  return s;
}

// The listed words of a row of sparse soft targets; the first warp.
__device__ void add_sparse(const WideParams& p, int64_t row, int64_t token, float scale,
                           const float* logits, RowState<double>& state) {
  const auto logit_of = [&](int64_t j, int64_t column) {
    const float product = logits[column];
    p.sparse_logits[row * p.soft_k + j] = product;
    float slope;
    return logit_at(p, product, scale, static_cast<int>(column), slope);
  };
  const auto weight_of = [&](int64_t column) {
    return p.class_weight ? p.class_weight[column] : 1.0;
  };
  listed_of(p, token).sums(logit_of, weight_of, state.soft_sum, state.soft_mass);
}

// A block a row.
//
//   for each column of logits [row, vocab]:
//     z = scale a + bias, capped
//     class_sum += c z;  soft_sum += c q z;  soft_mass += c q            where wanted
//     the target: kept apart;  else max, sum, shifted of the thread grow by z
//   states[row] = the threads', merged;  sparse targets add their listed words
//   target_logit[row], target_slope[row] = those of the target's column
__global__ void __launch_bounds__(kThreads) state_kernel(WideParams p, RowState<double>* states) {
  __shared__ float floats[kThreads / 32], target_logit, target_slope;
  __shared__ double doubles[kThreads / 32];
  const int64_t row = blockIdx.x;
  if (row >= p.range.count()) return;
  const int64_t token = p.rows.index[row];
  const float* logits = p.logits + row * p.stride;
  const float scale = row_scale(p, row);
  const int target = p.rows.target[row];
  Others seen;
  for (int first = threadIdx.x * kLanes; first < p.vocab; first += kStep) {
    const float4 four = *reinterpret_cast<const float4*>(logits + first);
    const float raw[kLanes] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const int column = first + i;
      if (column >= p.vocab) break;
      float slope;
      const float z = logit_at(p, raw[i], scale, column, slope);
      const double c = p.class_weight ? p.class_weight[column] : 1.0;
      if (p.class_sum) seen.class_sum += c * z;
      if (p.soft == SoftTargets::dense) {
        const double q = soft_at(p, token, column);
        if (q != 0) seen.soft_sum += c * q * z;
        seen.soft_mass += c * q;
      }
      if (column == target)
        target_logit = z, target_slope = slope;
      else
        seen.add(z);
    }
  }
  Others all;
  all.max = block_reduce(seen.max, device::Max(), floats);
  const float f = seen.max == -INFINITY ? 0.f : expf(seen.max - all.max);
  const float shifted = f > 0 ? f * (seen.shifted + seen.sum * (seen.max - all.max)) : 0.f;
  all.sum =
      static_cast<float>(block_reduce(static_cast<double>(seen.sum * f), device::Sum(), doubles));
  if (p.entropy)
    all.shifted =
        static_cast<float>(block_reduce(static_cast<double>(shifted), device::Sum(), doubles));
  if (p.class_sum) all.class_sum = block_reduce(seen.class_sum, device::Sum(), doubles);
  if (p.soft == SoftTargets::dense) {
    all.soft_sum = block_reduce(seen.soft_sum, device::Sum(), doubles);
    all.soft_mass = block_reduce(seen.soft_mass, device::Sum(), doubles);
  }
  if (threadIdx.x >= 32) return;
  RowState<double> state = complete(all, target >= 0, target >= 0 ? target_logit : 0.f);
  if (p.soft == SoftTargets::sparse) add_sparse(p, row, token, scale, logits, state);
  if (threadIdx.x != 0) return;
  states[row] = state;
  if (target < 0) return;
  p.rows.target_logit[row] = target_logit;
  p.target_slope[row] = target_slope;
}

// da of one column, from its accumulator; q: its soft target.
__device__ __forceinline__ float gradient_of(const WideParams& p, const RowFactors& f,
                                             float product, float scale, int column, float q) {
  float slope;
  const float x = logit_at(p, product, scale, column, slope) - f.base;
  const float e = p.two_terms ? expf(x) : __expf(x);
  float dz = f.prob * (e * f.inverse);
  if (f.smooth != 0 || f.soft != 0) {
    const float c = p.class_weight ? p.class_weight[column] : 1.f;
    dz -= f.smooth * c;
    if (q != 0) dz -= f.soft * c * q;
  }
  if (f.entropy_up != 0 && e != 0) dz -= f.entropy_up * e * f.inverse * (x + f.offset);
  return dz * slope * f.scale;
}

template <bool kF16>
__device__ __forceinline__ uint4 packed_eight(const float (&x)[8]) {
  return {pack<kF16>(x[0], x[1]), pack<kF16>(x[2], x[3]), pack<kF16>(x[4], x[5]),
          pack<kF16>(x[6], x[7])};
}

// What rounding left of eight values; an infinity leaves nothing.
template <bool kF16>
__device__ __forceinline__ uint4 left_over(const float (&x)[8], const uint4& packed) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  float rest[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = unpack<kF16>(words[i]);
    rest[2 * i] = isinf(both.x) ? 0.f : x[2 * i] - both.x;
    rest[2 * i + 1] = isinf(both.y) ? 0.f : x[2 * i + 1] - both.y;
  }
  return packed_eight<kF16>(rest);
}

// Two terms keep the digits of the target's element as well, and equal elements of a row then
// cancel in the products: it goes into the buffer, and nothing is left to add beside them.
__device__ __forceinline__ float take_target(const WideParams& p, const RowFactors& f,
                                             int64_t row) {
  const float own = ldexpf(p.rows.target_factor[row], f.exponent);
  p.rows.target_factor[row] = 0.f;
  return own;
}

constexpr int kWidth = 8, kGradientThreads = 128, kGradientStep = kWidth * kGradientThreads;

//   for each 8 columns of logits [row, vocab], from the left:
//     da = gradient_of(a);  0 at the target (two terms: its own) and past the end
//     buffer [row, vocab] = da in 16 bits, over the logits;  rest = what rounding left, two terms
//
// One block a row, from the left. A 16-bit row starts where its fp32 row started, so a step writes
// over columns that an earlier step read: one barrier keeps each read before the write over it.
template <bool kF16>
__global__ void __launch_bounds__(kGradientThreads) gradient_kernel(WideParams p) {
  const int64_t row = blockIdx.x;
  float* logits = p.logits + row * p.stride;
  auto* out = reinterpret_cast<uint4*>(logits);
  auto* rest = p.two_terms ? reinterpret_cast<uint4*>(logits + p.columns) : nullptr;
  int first = threadIdx.x * kWidth;
  if (row >= p.range.count()) {
    for (; first < p.columns; first += kGradientStep) {
      out[first / kWidth] = uint4{0, 0, 0, 0};
      if (rest) rest[first / kWidth] = uint4{0, 0, 0, 0};
    }
    return;
  }
  const int64_t token = p.rows.index[row];
  const RowFactors f = p.factors[row];
  const float scale = row_scale(p, row);
  const int target = p.rows.target[row];
  const bool dense = p.soft == SoftTargets::dense;
  float4 now[2] = {}, next[2] = {};
  const auto load = [&](int from, float4(&to)[2]) {
    if (from >= p.columns) return;
    to[0] = *reinterpret_cast<const float4*>(logits + from);
    to[1] = *reinterpret_cast<const float4*>(logits + from + 4);
  };
  load(first, now);
  for (int base = 0; base < p.columns; base += kGradientStep, first += kGradientStep) {
    load(first + kGradientStep, next);
    const float raw[kWidth] = {now[0].x, now[0].y, now[0].z, now[0].w,
                               now[1].x, now[1].y, now[1].z, now[1].w};
    float da[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const int column = first + i;
      da[i] = 0;
      if (p.two_terms && column == target) da[i] = take_target(p, f, row);
      if (column >= p.vocab || column == target) continue;
      const float q = dense ? static_cast<float>(soft_at(p, token, column)) : 0.f;
      da[i] = gradient_of(p, f, raw[i], scale, column, q);
    }
    const uint4 packed = packed_eight<kF16>(da);
    __syncthreads();
    if (first < p.columns) out[first / kWidth] = packed;
    if (rest && first < p.columns) rest[first / kWidth] = left_over<kF16>(da, packed);
    now[0] = next[0], now[1] = next[1];
  }
}

// One warp a row: the listed words are written again with their q, each by its first mention.
template <bool kF16>
__global__ void sparse_kernel(WideParams p) {
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32;
  if (row >= p.range.count()) return;
  const int64_t token = p.rows.index[row];
  auto* out = reinterpret_cast<uint16_t*>(p.logits + row * p.stride);
  const SparseRow listed = listed_of(p, token);
  for (int64_t j = threadIdx.x % 32; j < p.soft_k; j += 32) {
    const int64_t column = listed.column(j);
    double q = 0;
    if (column < 0 || !listed.is_first(j, q)) continue;
    const float da =
        gradient_of(p, p.factors[row], p.sparse_logits[row * p.soft_k + j], row_scale(p, row),
                    static_cast<int>(column), static_cast<float>(q));
    const uint32_t rounded = pack<kF16>(da, 0.f);
    out[column] = static_cast<uint16_t>(rounded);
    if (p.two_terms)
      out[2 * p.columns + column] =
          static_cast<uint16_t>(pack<kF16>(da - unpack<kF16>(rounded).x, 0.f));
  }
}

}  // namespace

void state_rows(const WideParams& p, RowState<double>* states, cudaStream_t stream) {
  if (p.range.rows == 0) return;
  state_kernel<<<static_cast<unsigned>(p.range.rows), kThreads, 0, stream>>>(p, states);
  device::check_launch("state_rows");
}

void form_gradient(const WideParams& p, cudaStream_t stream) {
  if (p.range.rows == 0 || p.vocab == 0) return;
  const auto rows = static_cast<unsigned>(p.range.rows);
  auto* kernel = p.f16 ? gradient_kernel<true> : gradient_kernel<false>;
  kernel<<<rows, kGradientThreads, 0, stream>>>(p);
  device::check_launch("form_gradient");
  if (p.soft != SoftTargets::sparse || p.soft_k == 0) return;
  auto* again = p.f16 ? sparse_kernel<true> : sparse_kernel<false>;
  again<<<(rows + 7) / 8, 256, 0, stream>>>(p);
  device::check_launch("form_gradient of sparse targets");
}

}  // namespace talea::lce
