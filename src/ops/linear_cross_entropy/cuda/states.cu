// What: the partial softmax state of every (row, part) of a piece's logits, its best candidates,
// and the share of sparse targets.
// Why: one pass over the fp32 products gives all that loss, entropy and gradient need.
// Never: rounds a logit; a block's order of summation depends on the vocabulary alone.
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

// What one thread has seen of its row.
struct Seen {
  float max = -INFINITY, others = 0, shifted = 0;
  double class_sum = 0, soft_sum = 0, soft_mass = 0;

  // The maximum grows: what was summed so far is taken relative to the new one.
  __device__ void raise(float to) {
    if (!(to > max)) return;
    const float f = max == -INFINITY ? 0.0f : expf(max - to);
    // A fall beyond fp32's range leaves nothing of what was seen, infinite distances included.
    shifted = f > 0 ? f * (shifted + others * (max - to)) : 0.0f;
    others *= f;
    max = to;
  }
};

struct Wanted {
  bool entropy, class_sum, soft_dense;
};

// Four columns' terms of smoothing and of dense soft targets: fp32 within the four, fp64 beyond.
template <bool Ends>
__device__ __forceinline__ void add_weighted(const Shape& s, const Wanted& want, int64_t t,
                                             int64_t column, const float (&z)[lanes], int count,
                                             Seen& seen) {
  const float4 four = four_of(s.class_weight, column, 1.0f);
  const float c[lanes] = {four.x, four.y, four.z, four.w};
  float class_sum = 0;
#pragma unroll
  for (int i = 0; i < lanes; ++i) {
    if (Ends && i >= count) continue;
    class_sum += c[i] * z[i];
    if (!want.soft_dense) continue;
    const double cq = c[i] * s.soft_probs.load(t, s.vocab_begin + column + i);
    seen.soft_sum += cq * z[i];
    seen.soft_mass += cq;
  }
  if (want.class_sum) seen.class_sum += class_sum;
}

// One row's part as a block walks over it.
struct Walk {
  const Shape& s;
  const Wanted& want;
  int64_t t, begin;  // token, first column of the part
  int target;        // the target's column in the part, or -1
  float scale;
};

// Count groups of four columns, `step` apart, join `seen`; `ends`: the last column may be missing.
template <bool Plain, bool Fast, bool Cap, int Count, bool Ends>
__device__ __forceinline__ void take(const Walk& walk, const float* part, int first, int width,
                                     Seen& seen, float& target_logit) {
  float z[Count][lanes];
#pragma unroll
  for (int l = 0; l < Count; ++l)
    *reinterpret_cast<float4*>(z[l]) = *reinterpret_cast<const float4*>(part + first + l * step);
  float most = -INFINITY;
#pragma unroll
  for (int l = 0; l < Count; ++l) {
    const float4 four = four_of(walk.s.bias, walk.begin + first + l * step, 0.0f);
    const float bias[lanes] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < lanes; ++i) {
      if (Ends && first + l * step + i >= width) continue;
      z[l][i] = scaled_logit(z[l][i], walk.scale, bias[i]);
      if (Cap) z[l][i] = cap_of(walk.s, z[l][i]).logit;
      most = fmaxf(most, z[l][i]);
    }
  }
  seen.raise(most);
  const float base = seen.max == -INFINITY ? 0.0f : seen.max;
#pragma unroll
  for (int l = 0; l < Count; ++l) {
    const int group = first + l * step;
    if (!Plain && (walk.want.class_sum || walk.want.soft_dense))
      add_weighted<Ends>(walk.s, walk.want, walk.t, walk.begin + group, z[l], width - group, seen);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < lanes; ++i) {
      const int column = group + i;
      if (Ends && column >= width) continue;
      const float x = z[l][i] - base;
      float e = Fast ? __expf(x) : expf(x);
      if (column == walk.target) {
        target_logit = z[l][i];
        e = 0;
      }
      sum += e;
      if (!Plain) seen.shifted += e * fmaxf(x, -1000.0f);  // 0 where e is: x may be -infinity
    }
    seen.others += sum;
  }
}

template <bool Plain, bool Fast, bool Cap>
__global__ void __launch_bounds__(threads)
    states_kernel(Shape s, ChunkRows c, Wanted want, const float* logits, RowState<double>* partial,
                  Best* best) {
  __shared__ float floats[threads / 32];
  __shared__ double doubles[threads / 32];
  __shared__ CandidateList candidates;
  __shared__ float shared_target;
  const int64_t part = blockIdx.x % s.parts, r = blockIdx.x / s.parts;
  if (!is_row(c, r)) return;
  const int64_t t = c.order[c.begin + r], begin = part * part_columns;
  const int64_t left = s.vocab_local - begin, target = target_column(s, t) - begin;
  const int width = static_cast<int>(left < part_columns ? left : part_columns);
  const bool holds_target = target >= 0 && target < width;
  const Walk walk{s, want, t, begin, holds_target ? static_cast<int>(target) : -1, row_scale(s, t)};
  const float* columns = logits + r * s.logits_stride + begin;
  float target_logit = -INFINITY;
  Seen seen;
  int v = threadIdx.x * lanes;
  for (; v + (loads - 1) * step + lanes <= width; v += loads * step)
    take<Plain, Fast, Cap, loads, false>(walk, columns, v, width, seen, target_logit);
  for (; v < width; v += step)  // rows are padded: the load stays inside the buffer
    take<Plain, Fast, Cap, 1, true>(walk, columns, v, width, seen, target_logit);
  // The one thread that met the target's column.
  if (holds_target && walk.target / lanes % threads == threadIdx.x) shared_target = target_logit;
  RowState<double> state;
  const float max = block_reduce(seen.max, Max(), floats);
  const float f = seen.max == -INFINITY ? 0.0f : expf(seen.max - max);
  const float shifted = f > 0 ? f * (seen.shifted + seen.others * (seen.max - max)) : 0.0f;
  state.max = max;
  // others * 0 keeps a NaN that no maximum shows.
  state.others = block_reduce(static_cast<double>(seen.others * f), Sum(), doubles);
  if (!Plain) {
    state.shifted = block_reduce(static_cast<double>(shifted), Sum(), doubles);
    state.class_sum = block_reduce(seen.class_sum, Sum(), doubles);
    state.soft_sum = block_reduce(seen.soft_sum, Sum(), doubles);
    state.soft_mass = block_reduce(seen.soft_mass, Sum(), doubles);
  }
  if (s.kept > 0)
    find_candidates(s, {columns, begin, width}, walk.scale, seen.max,
                    best + (part * c.rows + r) * s.kept, candidates);
  if (threadIdx.x != 0) return;
  if (holds_target) {
    state.target = shared_target;
    state.has_target = 1;
  }
  partial[part * c.rows + r] = state;
}

// One warp a row: the listed logits are kept, since the gradient overwrites them.
__global__ void sparse_kernel(Shape s, ChunkRows c, const float* logits, float* sparse_logits,
                              RowState<double>* partial) {
  const int64_t r = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / device::warp_size;
  if (!is_row(c, r)) return;
  const int lane = threadIdx.x % device::warp_size;
  const int64_t t = c.order[c.begin + r];
  const float scale = row_scale(s, t);
  double sum = 0, mass = 0;
  for (int64_t j = lane; j < s.soft_k; j += device::warp_size) {
    const int64_t column = s.soft_ids.load_index(t, j) - s.vocab_begin;
    const double q = s.soft_probs.load(t, j);
    if (column < 0 || column >= s.vocab_local) continue;
    const float a = scaled_logit(logits[r * s.logits_stride + column], scale, bias_of(s, column));
    const float z = capped(s, a);
    sparse_logits[r * s.soft_k + j] = a;
    const double cq = q * (s.class_weight ? s.class_weight[column] : 1.0);
    if (q != 0) sum += cq * z;
    mass += cq;
  }
  RowState<double> state;
  state.soft_sum = device::warp_reduce(sum, Sum());
  state.soft_mass = device::warp_reduce(mass, Sum());
  if (lane == 0) partial[s.parts * c.rows + r] = state;
}

}  // namespace

void reduce_rows(const Shape& s, const ChunkRows& c, const float* logits, RowState<double>* partial,
                 Best* best, cudaStream_t stream) {
  const Wanted want{s.entropy.data || s.upstream_entropy.data, s.label_smoothing > 0,
                    s.soft == SoftTargets::dense};
  const auto blocks = static_cast<unsigned>(c.rows * s.parts);
  const bool plain = !want.entropy && !want.class_sum && !want.soft_dense;
  using Kernel = decltype(&states_kernel<true, true, true>);
  const Kernel kernels[2][2][2] = {
      {{states_kernel<false, false, false>, states_kernel<false, false, true>},
       {states_kernel<false, true, false>, states_kernel<false, true, true>}},
      {{states_kernel<true, false, false>, states_kernel<true, false, true>},
       {states_kernel<true, true, false>, states_kernel<true, true, true>}}};
  const Kernel kernel = kernels[plain][s.fast_exp != 0][s.softcap > 0];
  kernel<<<blocks, threads, 0, stream>>>(s, c, want, logits, partial, best);
  device::check_launch("reduce_rows");
}

void read_sparse(const Shape& s, const ChunkRows& c, const float* logits, float* sparse_logits,
                 RowState<double>* partial, cudaStream_t stream) {
  if (s.soft != SoftTargets::sparse) return;
  const auto blocks = static_cast<unsigned>((c.rows + 7) / 8);
  sparse_kernel<<<blocks, 256, 0, stream>>>(s, c, logits, sparse_logits, partial);
  device::check_launch("read_sparse");
}

}  // namespace talea::lce::cuda
