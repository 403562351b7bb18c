// What: the partial softmax state of every (row, part) of a piece's logits, its best candidates,
// and the share of sparse targets.
// Why: one pass over the fp32 products gives all that loss, entropy and gradient need.
// Never: rounds a logit; a block's order of summation depends on the vocabulary alone.
#include <type_traits>

#include "device/common/cuda_check.hpp"
#include "device/common/reduce.cuh"
#include "ops/linear_cross_entropy/cuda/candidates.cuh"

namespace talea::lce::cuda {
namespace {

using device::block_reduce;
using device::Max;
using device::Sum;

constexpr int threads = 256;
constexpr int lanes = 4;  // columns of one load
constexpr int loads = 4;  // in flight a thread
constexpr int step = threads * lanes;

// softmax: no other sum is wanted. sums: also those of entropy and smoothing. weighted: also class
// weights or dense soft targets.
enum class Sums { softmax, sums, weighted };

// fp32 within a part where the operands have 16 bits, fp64 elsewhere and beyond.
template <Sums S, bool Fast>
using Wide = std::conditional_t<Fast && S != Sums::weighted, float, double>;

// What one thread has seen of its row.
template <Sums S, bool Fast>
struct Seen {
  float max = -INFINITY, others = 0, shifted = 0, target = -INFINITY;
  Wide<S, Fast> class_sum = 0, soft_sum = 0, soft_mass = 0;

  // The maximum grows: what was summed so far is taken relative to the new one.
  __device__ void raise(float to) {
    if (!(to > max)) return;
    const float f = max == -INFINITY ? 0.0f : expf(max - to);
    // A fall beyond fp32's range leaves nothing of what was seen, infinite distances included.
    if (S != Sums::softmax) shifted = f > 0 ? f * (shifted + others * (max - to)) : 0.0f;
    others *= f;
    max = to;
  }
};

struct Wanted {
  bool class_sum, soft_dense;
};

// One row's part as a block walks over it.
struct Walk {
  const Shape& s;
  const Wanted& want;
  int64_t t, begin;  // token, first column of the part
  int target;        // the target's column in the part, or -1
  float scale;
};

// Four columns' terms of smoothing and of dense soft targets: fp32 within the four, fp64 beyond.
template <Sums S, bool Fast>
__device__ __forceinline__ void add_weighted(const Walk& walk, int first, const float (&z)[lanes],
                                             int count, Seen<S, Fast>& seen) {
  const int64_t column = walk.begin + first;
  const float4 four = four_of(walk.s.class_weight, column, 1.0f);
  const float c[lanes] = {four.x, four.y, four.z, four.w};
  float class_sum = 0;
#pragma unroll
  for (int i = 0; i < lanes; ++i) {
    if (i >= count) continue;
    class_sum += c[i] * z[i];
    if (!walk.want.soft_dense) continue;
    const double cq = c[i] * walk.s.soft_probs.load(walk.t, walk.s.vocab_begin + column + i);
    seen.soft_sum += cq * z[i];
    seen.soft_mass += cq;
  }
  if (walk.want.class_sum) seen.class_sum += class_sum;
}

// Four products become logits; those beyond the part's end -infinity, whose exponential is 0.
template <Sums S, bool Fast, bool Cap, bool Ends>
__device__ __forceinline__ void form_logits(const Walk& walk, int first, int width,
                                            float (&z)[lanes], Seen<S, Fast>& seen) {
  const float4 four = four_of(walk.s.bias, walk.begin + first, 0.0f);
  const float bias[lanes] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int i = 0; i < lanes; ++i) {
    z[i] = scaled_logit(z[i], walk.scale, bias[i]);
    if (Cap) z[i] = cap_of(walk.s, z[i]).logit;
    if (Ends && first + i >= width) z[i] = -INFINITY;
  }
  if (S == Sums::weighted) add_weighted(walk, first, z, Ends ? width - first : lanes, seen);
  if (S != Sums::sums || !walk.want.class_sum) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < lanes; ++i)
    if (!Ends || first + i < width) sum += z[i];
  seen.class_sum += sum;
}

// The target's logit is kept apart from the sum over the others.
template <Sums S, bool Fast>
__device__ __forceinline__ void set_target_aside(int lane, float (&z)[lanes], Seen<S, Fast>& seen) {
#pragma unroll
  for (int i = 0; i < lanes; ++i) {
    if (i != lane) continue;
    seen.target = z[i];
    z[i] = -INFINITY;
  }
}

// Count groups of four columns, `step` apart, join `seen`; Ends: the last column may be missing.
template <Sums S, bool Fast, bool Cap, int Count, bool Ends>
__device__ __forceinline__ void take(const Walk& walk, const float* part, int first, int width,
                                     Seen<S, Fast>& seen) {
  float z[Count][lanes];
#pragma unroll
  for (int l = 0; l < Count; ++l)
    *reinterpret_cast<float4*>(z[l]) = *reinterpret_cast<const float4*>(part + first + l * step);
  float most = -INFINITY;
#pragma unroll
  for (int l = 0; l < Count; ++l) {
    form_logits<S, Fast, Cap, Ends>(walk, first + l * step, width, z[l], seen);
#pragma unroll
    for (int i = 0; i < lanes; ++i) most = fmaxf(most, z[l][i]);
  }
  seen.raise(most);
  const float base = seen.max == -INFINITY ? 0.0f : seen.max;
#pragma unroll
  for (int l = 0; l < Count; ++l) {
    const int lane = walk.target - (first + l * step);
    if (lane >= 0 && lane < lanes) set_target_aside(lane, z[l], seen);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < lanes; ++i) {
      const float x = z[l][i] - base, e = exp_of<Fast>(x);
      sum += e;
      if (S != Sums::softmax) seen.shifted += e * fmaxf(x, -1000.0f);  // x may be -infinity
    }
    seen.others += sum;
  }
}

// The sums of all threads, in thread 0; one barrier for all of them.
template <int Count, typename T>
__device__ __forceinline__ void block_sums(T (&values)[Count], T (*shared)[threads / 32]) {
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    values[k] = device::warp_reduce(values[k], Sum());
    if (threadIdx.x % 32 == 0) shared[k][threadIdx.x / 32] = values[k];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int k = 0; k < Count; ++k)
    for (int w = 1; w < threads / 32; ++w) values[k] += shared[k][w];
}

// Thread 0 gets the state of the part.
template <Sums S, bool Fast>
__device__ __forceinline__ RowState<double> state_of(const Seen<S, Fast>& seen) {
  using T = Wide<S, Fast>;
  constexpr int count = S == Sums::softmax ? 1 : S == Sums::sums ? 3 : 5;
  __shared__ float floats[threads / 32];
  __shared__ T wide[count][threads / 32];
  RowState<double> state;
  const float max = block_reduce(seen.max, Max(), floats);
  state.max = max;
  const float f = seen.max == -INFINITY ? 0.0f : expf(seen.max - max);
  T sums[count];
  sums[0] = seen.others * f;  // others * 0 keeps a NaN that no maximum shows
  if constexpr (S != Sums::softmax) {
    sums[1] = f > 0 ? f * (seen.shifted + seen.others * (seen.max - max)) : 0.0f;
    sums[2] = seen.class_sum;
  }
  if constexpr (S == Sums::weighted) {
    sums[3] = seen.soft_sum;
    sums[4] = seen.soft_mass;
  }
  block_sums(sums, wide);
  state.others = sums[0];
  if constexpr (S != Sums::softmax) {
    state.shifted = sums[1];
    state.class_sum = sums[2];
  }
  if constexpr (S == Sums::weighted) {
    state.soft_sum = sums[3];
    state.soft_mass = sums[4];
  }
  return state;
}

// A block takes one part of one row; `panel`: the columns that are there. Neighbouring blocks take
// the same part of different rows: its bias stays in their cache.
//
//   for each 16 columns of a thread in products [row, panel]:
//     z = scale product + bias, capped;  the target's z is kept apart
//     max grows: what was summed is rescaled;  others += exp(z - max)
//     shifted += exp(z - max) (z - max);  class_sum, soft_sum, soft_mass      where wanted
//   partial [part, row] = the threads' sums, over the block
//   best [part, row, kept] = the part's best candidates                       candidates.cuh
template <Sums S, bool Fast, bool Cap>
__global__ void __launch_bounds__(threads)
    states_kernel(Shape s, ChunkRows c, Panel panel, Wanted want, const float* logits,
                  RowState<double>* partial, Best* best) {
  __shared__ CandidateList candidates;
  __shared__ float shared_target;
  const auto rows = static_cast<unsigned>(c.rows);
  const int64_t part = blockIdx.x / rows, r = blockIdx.x % rows;
  if (!is_row(c, r)) return;
  const int64_t t = c.order[c.begin + r], begin = panel.begin + part * part_columns;
  const int64_t left = s.vocab_local - begin, target = target_column(s.rule, t) - begin;
  const int width = static_cast<int>(left < part_columns ? left : part_columns);
  const bool holds_target = target >= 0 && target < width;
  const Walk walk{s, want, t, begin, holds_target ? static_cast<int>(target) : -1, row_scale(s, t)};
  const float* columns = logits + r * s.logits_stride + part * part_columns;
  Seen<S, Fast> seen;
  int v = threadIdx.x * lanes;
  for (; v + (loads - 1) * step + lanes <= width; v += loads * step)
    take<S, Fast, Cap, loads, false>(walk, columns, v, width, seen);
  for (; v < width; v += step)  // rows are padded: the load stays inside the buffer
    take<S, Fast, Cap, 1, true>(walk, columns, v, width, seen);
  // The one thread that met the target's column.
  if (holds_target && walk.target / lanes % threads == threadIdx.x) shared_target = seen.target;
  RowState<double> state = state_of(seen);
  const int64_t at = (panel.begin / part_columns + part) * c.rows + r;
  if (s.kept > 0)
    find_candidates(s, {columns, begin, width}, walk.scale, seen.max, best + at * s.kept,
                    candidates);
  if (threadIdx.x != 0) return;
  if (holds_target) {
    state.target = shared_target;
    state.has_target = 1;
  }
  partial[at] = state;
}

// One warp a row: the listed logits are kept, since the gradient overwrites them.
__global__ void sparse_kernel(Shape s, ChunkRows c, Panel panel, const float* logits,
                              float* sparse_logits, RowState<double>* partial) {
  const int64_t r = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / device::warp_size;
  if (!is_row(c, r)) return;
  const int lane = threadIdx.x % device::warp_size;
  const int64_t t = c.order[c.begin + r];
  const float scale = row_scale(s, t);
  const SparseRow listed{
      s.rule.soft_ids, s.soft_probs, s.soft_k, t, {s.vocab_begin + panel.begin, panel.columns}};
  const auto logit_at = [&](int64_t j, int64_t place) {
    const float product = logits[r * s.logits_stride + place];
    const float a = scaled_logit(product, scale, bias_of(s, panel.begin + place));
    sparse_logits[r * s.soft_k + j] = a;
    return capped(s, a);
  };
  const auto weight_at = [&](int64_t place) {
    return s.class_weight ? s.class_weight[panel.begin + place] : 1.0;
  };
  double sum, mass;
  listed.sums(logit_at, weight_at, sum, mass);
  if (lane != 0) return;
  RowState<double>& all = partial[s.parts * c.rows + r];
  RowState<double> state;
  state.soft_sum = panel.begin > 0 ? all.soft_sum + sum : sum;
  state.soft_mass = panel.begin > 0 ? all.soft_mass + mass : mass;
  all = state;
}

using Kernel = decltype(&states_kernel<Sums::softmax, true, true>);

template <Sums S>
Kernel kernel_for(const Shape& s) {
  const bool cap = s.softcap > 0;
  if (s.fast_exp) return cap ? states_kernel<S, true, true> : states_kernel<S, true, false>;
  return cap ? states_kernel<S, false, true> : states_kernel<S, false, false>;
}

}  // namespace

void reduce_rows(const Shape& s, const ChunkRows& c, const Panel& panel, const float* logits,
                 RowState<double>* partial, Best* best, cudaStream_t stream) {
  const Wanted want{s.loss_terms.label_smoothing > 0, s.soft == SoftTargets::dense};
  const bool entropy = s.out.entropy.data || s.terms.upstream_entropy.data;
  const auto blocks = static_cast<unsigned>(c.rows * panel.parts);
  const Kernel kernel = want.soft_dense || (want.class_sum && s.class_weight)
                            ? kernel_for<Sums::weighted>(s)
                        : entropy || want.class_sum ? kernel_for<Sums::sums>(s)
                                                    : kernel_for<Sums::softmax>(s);
  kernel<<<blocks, threads, 0, stream>>>(s, c, panel, want, logits, partial, best);
  device::check_launch("reduce_rows");
}

void read_sparse(const Shape& s, const ChunkRows& c, const Panel& panel, const float* logits,
                 float* sparse_logits, RowState<double>* partial, cudaStream_t stream) {
  if (s.soft != SoftTargets::sparse) return;
  const auto blocks = static_cast<unsigned>((c.rows + 7) / 8);
  sparse_kernel<<<blocks, 256, 0, stream>>>(s, c, panel, logits, sparse_logits, partial);
  device::check_launch("read_sparse");
}

}  // namespace talea::lce::cuda
