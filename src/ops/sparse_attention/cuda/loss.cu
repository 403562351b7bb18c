// What: the row kernels of lane cuda's index loss: teacher, scores, divergence, the chain.
// Why: every rule of a query's loss stands here, on fp32 products.
// Never: puts an epsilon under a logarithm or a normaliser, or adds floats in an order of arrival.
#include <math_constants.h>

#include <algorithm>
#include <type_traits>

#include "device/common/cuda_check.hpp"
#include "device/common/reduce.cuh"
#include "ops/sparse_attention/cuda/loss.hpp"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int threads = 256;

__global__ void begin_kernel(LossSums* sums, double rows) { *sums = {rows, 0}; }

__global__ void end_kernel(const LossSums* sums, View loss) {
  if (loss.dtype == DType::f64)
    *static_cast<double*>(loss.data) = sums->total;
  else
    *static_cast<float*>(loss.data) = static_cast<float>(sums->total);
}

__device__ float weight_of(const LossTables& t, int64_t b, int64_t s) {
  return t.row_weight.present ? number_at(t.row_weight, offset(t.row_weight, b, s)) : 1.0f;
}

__device__ bool has_key(const LossTables& t, int64_t b, int64_t s) {
  const Tables& base = t.index.base;
  if (t.dense) {
    const Bounds bounds = index_bounds(t.index, b, s);
    return bounds.begin < bounds.end;
  }
  const QueryRule query = query_rule(base, b, s);
  for (int64_t k = 0; k < query.slots; ++k) {
    const int64_t index = integer_at(base.indices, offset(base.indices, b, s, 0, k));
    if (find_key(base.rule, query, k, index).kind == SlotKind::valid) return true;
  }
  return false;
}

// Ones are added: no order of them gives another sum.
__global__ void count_kernel(LossTables t, int64_t all, LossSums* sums) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= all) return;
  const int64_t b = i / t.index.base.queries, s = i % t.index.base.queries;
  if (weight_of(t, b, s) != 0 && has_key(t, b, s)) atomicAdd(&sums->rows, 1.0);
}

__global__ void bounded_kernel(LossTables t, Chunk c, int64_t columns, int64_t* rows) {
  const int64_t row = blockIdx.y, k = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (k >= columns) return;
  const Bounds bounds = index_bounds(t.index, c.b, c.s + row);
  rows[row * c.padded + k] = k >= bounds.begin && k < bounds.end ? c.b * t.keys + k : -1;
}

__global__ void name_kernel(int64_t b, int64_t keys, int64_t padded, int64_t* rows) {
  const int64_t k = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (k < padded) rows[k] = k < keys ? b * keys + k : -1;
}

template <typename T>
__device__ T rounded(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return __float2bfloat16_rn(x);
}

template <typename T>
__global__ void pack_kernel(View q, Chunk c, int64_t dim, int copies, T* to) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x, each = c.heads * dim;
  if (i >= c.n * each) return;
  const int64_t row = i / each, h = i % each / dim;
  const T value = rounded<T>(number_at(q, offset(q, c.b, c.s + row, h, i % dim)));
  for (int copy = 0; copy < copies; ++copy) to[(row * copies + copy) * each + i % each] = value;
}

// A block a (query, head) of the chunk.
__global__ void normalise_kernel(View lse, float scale, Chunk c, int64_t columns,
                                 const int64_t* rows, const float* logits, HeadSum* sums) {
  __shared__ float shared[threads / 32];
  const int64_t at = blockIdx.x, row = at / c.heads, h = at % c.heads;
  if (lse.present) {
    if (threadIdx.x == 0) sums[at] = {number_at(lse, offset(lse, c.b, c.s + row, h)), 1.0f};
    return;
  }
  const float* s = logits + at * c.padded;
  const int64_t* list = rows + row * c.padded;
  float max = -CUDART_INF_F, nan = 0, sum = 0;
  for (int64_t k = threadIdx.x; k < columns; k += threads) {
    if (list[k] < 0) continue;
    max = fmaxf(max, scale * s[k]);  // NaN loses
    if (isnan(s[k])) nan = 1;
  }
  max = device::block_reduce(max, device::Max{}, shared);
  nan = device::block_reduce(nan, device::Max{}, shared);
  for (int64_t k = threadIdx.x; k < columns; k += threads)
    if (list[k] >= 0) sum += expf(scale * s[k] - max);
  sum = device::block_reduce(sum, device::Sum{}, shared);
  if (threadIdx.x == 0) sums[at] = {nan > 0 ? CUDART_NAN_F : max, sum};
}

__global__ void teach_kernel(float scale, Chunk c, int64_t columns, const int64_t* rows,
                             const float* logits, const HeadSum* sums, float* teacher) {
  const int64_t row = blockIdx.y, k = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (k >= columns) return;
  float sum = 0;
  if (rows[row * c.padded + k] >= 0)
    for (int64_t h = 0; h < c.heads; ++h) {
      const HeadSum of = sums[row * c.heads + h];
      sum += expf(scale * logits[(row * c.heads + h) * c.padded + k] - of.max) / of.sum;
    }
  teacher[row * c.padded + k] = sum;
}

__device__ float head_weight(const LossTables& t, const Chunk& c, int64_t s, int64_t h) {
  return number_at(t.index.weights, offset(t.index.weights, c.b, s, h));
}
__device__ float query_scale(const LossTables& t, const Chunk& c, int64_t s, int64_t h) {
  const View& v = t.index.q_scale;
  return v.present ? number_at(v, offset(v, c.b, s, h)) : 1.0f;
}
__device__ float key_scale(const LossTables& t, int64_t row) {
  const View& v = t.index.k_scale;
  return v.present ? number_at(v, offset(v, row / t.keys, row % t.keys)) : 1.0f;
}
// A comparison with NaN is false: NaN stays.
__device__ bool cut_off(const LossTables& t, float z) { return t.relu && z <= 0; }

__global__ void score_kernel(LossTables t, Chunk c, int64_t columns, const int64_t* rows,
                             const float* z, float* scores) {
  extern __shared__ float weights[];
  const int64_t row = blockIdx.y, k = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (int64_t h = threadIdx.x; h < c.heads; h += threads)
    weights[h] = head_weight(t, c, c.s + row, h) * query_scale(t, c, c.s + row, h);
  __syncthreads();
  if (k >= columns) return;
  const int64_t key = rows[row * c.padded + k];
  float sum = -CUDART_INF_F;
  if (key >= 0) {
    sum = 0;
    for (int64_t h = 0; h < c.heads; ++h) {
      const float product = z[(row * c.heads + h) * c.padded + k];
      sum += weights[h] * (cut_off(t, product) ? 0.0f : product);
    }
    sum *= key_scale(t, key);
  }
  scores[row * c.padded + k] = sum;
}

// A block a query, in fp64: a divergence is what is left of terms far larger than itself.
__global__ void diverge_kernel(LossTables t, Chunk c, int64_t columns, const int64_t* rows,
                               const float* teacher, float* scores, const LossSums* sums,
                               double* losses) {
  __shared__ double shared[threads / 32];
  const int64_t row = blockIdx.x, s = c.s + row;
  const int64_t* list = rows + row * c.padded;
  const float* taught = teacher + row * c.padded;
  float* own = scores + row * c.padded;
  const double factor = mutant(Mutant::sa35_loss_not_divided) ? t.coeff : t.coeff / sums->rows;
  const float given = weight_of(t, c.b, s);
  double mass = 0, max = -CUDART_INF, nan = 0, sum = 0, loss = 0;
  for (int64_t k = threadIdx.x; k < columns; k += threads) {
    if (list[k] < 0) continue;
    mass += taught[k];
    max = fmax(max, static_cast<double>(own[k]));  // NaN loses
    if (isnan(own[k])) nan = 1;
  }
  mass = device::block_reduce(mass, device::Sum{}, shared);
  max = device::block_reduce(max, device::Max{}, shared);
  nan = device::block_reduce(nan, device::Max{}, shared);
  if (nan > 0) max = CUDART_NAN;
  if (mutant(Mutant::sa39_epsilon_in_the_loss)) mass += 1e-3;
  for (int64_t k = threadIdx.x; k < columns; k += threads)
    if (list[k] >= 0) sum += exp(own[k] - max);
  sum = device::block_reduce(sum, device::Sum{}, shared);
  const double lse = max + log(sum);
  for (int64_t k = threadIdx.x; k < columns; k += threads) {
    const bool counts = list[k] >= 0 && given != 0;
    const double weight = given * factor, share = taught[k] / mass, log_p = own[k] - lse;
    own[k] = counts ? static_cast<float>(weight * (exp(log_p) - share)) : 0.0f;
    if (counts && share != 0) loss += weight * (share * (log(share) - log_p));
  }
  loss = device::block_reduce(loss, device::Sum{}, shared);
  if (threadIdx.x == 0) losses[row] = loss;
}

__global__ void add_losses_kernel(const double* losses, int64_t n, LossSums* sums) {
  double total = sums->total;
  for (int64_t i = 0; i < n; ++i) total += losses[i];
  sums->total = total;
}

// A block a (query, head) of the chunk.
template <typename T>
__global__ void chain_kernel(LossTables t, Factor factor, Chunk c, int64_t columns,
                             const int64_t* rows, const float* z, const float* g, int copies, T* dz,
                             View dw) {
  __shared__ float shared[threads / 32];
  const int64_t at = blockIdx.x, row = at / c.heads, h = at % c.heads, s = c.s + row;
  const float* product = z + at * c.padded;
  const int64_t* list = rows + row * c.padded;
  const float of_query = query_scale(t, c, s, h);
  const float weight = head_weight(t, c, s, h) * (factor == Factor::of_query ? of_query : 1.0f);
  T* hi = dz + (row * copies * c.heads + h) * c.padded;
  float sum = 0;
  for (int64_t k = threadIdx.x; k < columns; k += threads) {
    float slope = 0;
    if (list[k] >= 0 && !cut_off(t, product[k])) {
      const float own = g[row * c.padded + k], of_key = key_scale(t, list[k]);
      slope = own * weight * (factor == Factor::of_key ? of_key : 1.0f);
      sum += own * of_key * product[k];
    }
    hi[k] = rounded<T>(slope);
    if (copies > 1) hi[c.heads * c.padded + k] = rounded<T>(slope - static_cast<float>(hi[k]));
  }
  sum = device::block_reduce(sum, device::Sum{}, shared);
  if (threadIdx.x == 0 && dw.present) put(dw, offset(dw, c.b, s, h), sum * of_query);
}

__global__ void write_kernel(const float* values, Chunk c, int64_t dim, int copies, View to) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x, each = c.heads * dim;
  if (i >= c.n * each) return;
  const int64_t row = i / each, h = i % each / dim;
  float sum = 0;
  for (int copy = 0; copy < copies; ++copy) sum += values[(row * copies + copy) * each + i % each];
  put(to, offset(to, c.b, c.s + row, h, i % dim), sum);
}

unsigned blocks_of(int64_t items) { return static_cast<unsigned>((items + threads - 1) / threads); }
// A row of the chunk each in y.
dim3 blocks_of_rows(const Chunk& c, int64_t columns) {
  return {blocks_of(columns), static_cast<unsigned>(c.n)};
}

}  // namespace

void begin_loss(LossSums* sums, double rows, cudaStream_t stream) {
  begin_kernel<<<1, 1, 0, stream>>>(sums, rows);
  device::check_launch("sparse_attention: begin_loss");
}

void count_rows(const LossTables& t, int64_t batch, LossSums* sums, cudaStream_t stream) {
  const int64_t all = batch * t.index.base.queries;
  if (all == 0) return;
  count_kernel<<<blocks_of(all), threads, 0, stream>>>(t, all, sums);
  device::check_launch("sparse_attention: count_rows");
}

void end_loss(const LossSums* sums, const View& loss, cudaStream_t stream) {
  end_kernel<<<1, 1, 0, stream>>>(sums, loss);
  device::check_launch("sparse_attention: end_loss");
}

void find_bounded(const LossTables& t, const Chunk& c, int64_t columns, int64_t* rows,
                  cudaStream_t stream) {
  bounded_kernel<<<blocks_of_rows(c, columns), threads, 0, stream>>>(t, c, columns, rows);
  device::check_launch("sparse_attention: find_bounded");
}

void name_all(int64_t b, int64_t keys, int64_t padded, int64_t* rows, cudaStream_t stream) {
  name_kernel<<<blocks_of(padded), threads, 0, stream>>>(b, keys, padded, rows);
  device::check_launch("sparse_attention: name_all");
}

void pack_index_q(const View& q, const Chunk& c, int64_t dim, int copies, DType to, void* packed,
                  cudaStream_t stream) {
  const unsigned blocks = blocks_of(c.n * c.heads * dim);
  if (blocks == 0) return;
  if (to == DType::bf16)
    pack_kernel<<<blocks, threads, 0, stream>>>(q, c, dim, copies,
                                                static_cast<__nv_bfloat16*>(packed));
  else
    pack_kernel<<<blocks, threads, 0, stream>>>(q, c, dim, copies, static_cast<float*>(packed));
  device::check_launch("sparse_attention: pack_index_q");
}

void normalise(const View& lse, float scale, const Chunk& c, int64_t columns, const int64_t* rows,
               const float* logits, HeadSum* sums, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(c.n * c.heads);
  if (blocks == 0) return;
  normalise_kernel<<<blocks, threads, 0, stream>>>(lse, scale, c, columns, rows, logits, sums);
  device::check_launch("sparse_attention: normalise");
}

void teach(float scale, const Chunk& c, int64_t columns, const int64_t* rows, const float* logits,
           const HeadSum* sums, float* teacher, cudaStream_t stream) {
  teach_kernel<<<blocks_of_rows(c, columns), threads, 0, stream>>>(scale, c, columns, rows, logits,
                                                                   sums, teacher);
  device::check_launch("sparse_attention: teach");
}

void score(const LossTables& t, const Chunk& c, int64_t columns, const int64_t* rows,
           const float* z, float* scores, cudaStream_t stream) {
  const auto bytes = static_cast<size_t>(c.heads) * sizeof(float);
  score_kernel<<<blocks_of_rows(c, columns), threads, bytes, stream>>>(t, c, columns, rows, z,
                                                                       scores);
  device::check_launch("sparse_attention: score");
}

void diverge(const LossTables& t, const Chunk& c, int64_t columns, const int64_t* rows,
             const float* teacher, float* scores, const LossSums* sums, double* losses,
             cudaStream_t stream) {
  diverge_kernel<<<static_cast<unsigned>(c.n), threads, 0, stream>>>(t, c, columns, rows, teacher,
                                                                     scores, sums, losses);
  device::check_launch("sparse_attention: diverge");
}

void add_losses(const double* losses, int64_t n, LossSums* sums, cudaStream_t stream) {
  add_losses_kernel<<<1, 1, 0, stream>>>(losses, n, sums);
  device::check_launch("sparse_attention: add_losses");
}

void chain(const LossTables& t, Factor factor, const Chunk& c, int64_t columns, const int64_t* rows,
           const float* z, const float* g, int copies, DType to, void* dz, const View& dw,
           cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(c.n * c.heads);
  if (blocks == 0) return;
  if (to == DType::bf16)
    chain_kernel<<<blocks, threads, 0, stream>>>(t, factor, c, columns, rows, z, g, copies,
                                                 static_cast<__nv_bfloat16*>(dz), dw);
  else
    chain_kernel<<<blocks, threads, 0, stream>>>(t, factor, c, columns, rows, z, g, copies,
                                                 static_cast<float*>(dz), dw);
  device::check_launch("sparse_attention: chain");
}

void write_dindex_q(const float* values, const Chunk& c, int64_t dim, int copies, const View& to,
                    cudaStream_t stream) {
  const unsigned blocks = blocks_of(c.n * c.heads * dim);
  if (blocks == 0) return;
  write_kernel<<<blocks, threads, 0, stream>>>(values, c, dim, copies, to);
  device::check_launch("sparse_attention: write_dindex_q");
}

}  // namespace talea::sparse_attention::cuda
