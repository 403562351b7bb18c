// What: merges the partial states of the rows, writes the rows' outputs, and forms the factors of
// their gradient.
// Why: parts of a row, chunks and ranks merge by the one algebra, in double, over N rows only.
// Never: reads a logit.
#include <cmath>

#include "core/kernel_mutant.hpp"
#include "device/common/cuda_check.hpp"
#include "device/common/reduce.cuh"
#include "ops/linear_cross_entropy/cuda/logit.cuh"

namespace talea::lce::cuda {
namespace {

using Best = Candidate<float>;
using device::warp_size;
using device::whole_warp;

__device__ RowState<double> from_lane(const RowState<double>& s, int offset) {
  RowState<double> o;
  o.max = __shfl_down_sync(whole_warp, s.max, offset);
  o.others = __shfl_down_sync(whole_warp, s.others, offset);
  o.target = __shfl_down_sync(whole_warp, s.target, offset);
  o.shifted = __shfl_down_sync(whole_warp, s.shifted, offset);
  o.class_sum = __shfl_down_sync(whole_warp, s.class_sum, offset);
  o.soft_sum = __shfl_down_sync(whole_warp, s.soft_sum, offset);
  o.soft_mass = __shfl_down_sync(whole_warp, s.soft_mass, offset);
  o.has_target = __shfl_down_sync(whole_warp, s.has_target, offset);
  return o;
}

// The whole warp; lane 0 gets the state of row r over all parts, merged in an order that depends
// on their number alone.
__device__ RowState<double> merged(const RowState<double>* states, int64_t parts, int64_t rows,
                                   int64_t r) {
  const int lane = threadIdx.x % warp_size;
  if (mutant(KernelMutant::split_sum_dropped) && parts > 1) --parts;
  RowState<double> s;
  if (lane < parts) s = states[lane * rows + r];
  for (int64_t i = lane + warp_size; i < parts; i += warp_size) s = merge(s, states[i * rows + r]);
  for (int offset = 1; offset < warp_size && offset < parts; offset *= 2) {
    const RowState<double> other = from_lane(s, offset);
    if (lane % (2 * offset) == 0 && lane + offset < parts) s = merge(s, other);
  }
  return s;
}

// The whole warp: the best of all parts' candidates that comes after `last`.
__device__ Best next_of(const Best* best, int64_t parts, int64_t kept, int64_t rows, int64_t r,
                        const Best& last) {
  Best mine{-INFINITY, INT64_MAX};
  if (mutant(KernelMutant::top_k_part_missed) && parts > 1) --parts;
  for (int64_t i = threadIdx.x % warp_size; i < parts * kept; i += warp_size) {
    const Best here = best[(i / kept * rows + r) * kept + i % kept];
    if (better(here, mine) && better(last, here)) mine = here;
  }
  for (int offset = warp_size / 2; offset > 0; offset /= 2) {
    const Best other{__shfl_xor_sync(whole_warp, mine.value, offset),
                     __shfl_xor_sync(whole_warp, mine.id, offset)};
    if (better(other, mine)) mine = other;
  }
  return mine;
}

__global__ void collapse_kernel(Shape s, ChunkRows c, int64_t parts, int64_t best_parts,
                                const RowState<double>* states, const Best* best,
                                RowState<double>* own_states, Best* own_best) {
  const int64_t r = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / warp_size;
  const int lane = threadIdx.x % warp_size;
  if (r >= c.rows) return;
  const bool exists = is_row(c, r);
  const RowState<double> state =
      exists ? merged(states, parts, c.rows, r) : RowState<double>{};  // the warp agrees on it
  if (lane == 0) own_states[r] = state;
  Best last{INFINITY, -1};
  for (int64_t j = 0; j < s.kept; ++j) {
    last = exists ? next_of(best, best_parts, s.kept, c.rows, r, last) : Best{-INFINITY, INT64_MAX};
    if (lane == 0) own_best[r * s.kept + j] = last;
  }
}

__device__ RowFactors factors_of(const Shape& s, const ChunkRows& c, int64_t t,
                                 const RowState<double>& state, const RowSummary<double>& row,
                                 const RowResult<double>& g) {
  const double own_scale = read(s.rule.token_scale, t, 1);
  double power = 1;
  if (s.scaled_rows) {
    const double largest = largest_element(g, state.soft_mass, c.facts->class_weight_max,
                                           static_cast<double>(s.vocab), own_scale);
    power = ldexp(1.0, storage_exponent(largest, 120));
  }
  RowFactors f;
  f.max = static_cast<float>(state.max);
  f.inverse_sum = static_cast<float>(1.0 / row.sum);
  f.mean_distance = static_cast<float>(row.mean_distance);
  f.prob = static_cast<float>(g.prob * power);
  f.target = static_cast<float>(g.target * power);
  f.smooth = static_cast<float>(g.smooth * power);
  f.soft = static_cast<float>(g.soft * power);
  f.entropy_up = static_cast<float>(g.entropy_up * power);
  f.stored = static_cast<float>(own_scale);
  f.dx = static_cast<float>(s.logit_scale / power);
  f.x = static_cast<float>(power);
  f.db = static_cast<float>(1.0 / (power * own_scale));
  f.target_column = static_cast<int32_t>(target_column(s.rule, t));
  return f;
}

// One warp a row: lane 0 does the arithmetic, all lanes look through the candidates.
//
//   state = states [part, row] merged, in an order that depends on the number of parts alone
//   loss, lse, logprob, entropy [token]; row_loss [token]                     rows/finish.hpp
//   factors [row] = what the pass over the logits, dX and db need
//   for each j < kept: the best of best [part, row, kept] that comes after the one before
//     argmax, top-k [token, j];  hit [token] = the first is the target
__global__ void finish_kernel(Shape s, ChunkRows c, const LossTerms<double>* terms, int64_t parts,
                              int64_t best_parts, const RowState<double>* states, const Best* best,
                              Finished out) {
  const int64_t r = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / warp_size;
  const int lane = threadIdx.x % warp_size;
  if (!is_row(c, r)) return;
  const int64_t t = c.order[c.begin + r];
  double lse = 0;
  const RowState<double> state = merged(states, parts, c.rows, r);
  if (lane == 0) {
    const RowSummary<double> row = summarise(state);
    const View& targets = s.rule.targets;
    const double class_weight = targets ? read(s.class_weights, targets.load_index(t), 1) : 1.0;
    const RowResult<double> g = finish_row(state, row, *terms, row_terms(s.terms, t, class_weight));
    lse = row.lse;
    write_row(s.out, t, row, g.loss);
    if (out.row_loss) out.row_loss[t] = g.loss;
    out.factors[r] = factors_of(s, c, t, state, row, g);
  }
  lse = __shfl_sync(whole_warp, lse, 0);
  Best last{INFINITY, -1};
  for (int64_t j = 0; j < s.kept; ++j) {
    last = next_of(best, best_parts, s.kept, c.rows, r, last);
    if (lane != 0) continue;
    write_candidate(s.out, t, j, last.value, last.id, lse);
    if (j == 0 && out.hit)
      out.hit[t] = s.rule.targets && !isnan(lse) && last.id == s.rule.targets.load_index(t) ? 1 : 0;
  }
}

// One block. Rows whose gradients are largest keep their x as it is.
__global__ void balance_kernel(ChunkRows c, RowFactors* factors, float* scalars, bool add,
                               float scale) {
  __shared__ float floats[32];
  float least = INFINITY;
  for (int64_t r = threadIdx.x; is_row(c, r); r += blockDim.x) least = fminf(least, factors[r].x);
  least = device::block_reduce(least, device::Min(), floats);
  for (int64_t r = threadIdx.x; is_row(c, r); r += blockDim.x) factors[r].x = least / factors[r].x;
  if (threadIdx.x != 0) return;
  scalars[0] = isinf(least) ? scale : scale / least;
  scalars[1] = add ? 1.0f : 0.0f;
  scalars[2] = 1.0f;
}

unsigned warps_for(int64_t rows) { return static_cast<unsigned>((rows + 7) / 8); }

}  // namespace

void collapse(const Shape& s, const ChunkRows& c, int64_t parts, int64_t best_parts,
              const RowState<double>* states, const Best* best, RowState<double>* own_states,
              Best* own_best, cudaStream_t stream) {
  collapse_kernel<<<warps_for(c.rows), 256, 0, stream>>>(s, c, parts, best_parts, states, best,
                                                         own_states, own_best);
  device::check_launch("collapse");
}

void finish_rows(const Shape& s, const ChunkRows& c, const LossTerms<double>* terms, int64_t parts,
                 int64_t best_parts, const RowState<double>* states, const Best* best,
                 const Finished& out, cudaStream_t stream) {
  finish_kernel<<<warps_for(c.rows), 256, 0, stream>>>(s, c, terms, parts, best_parts, states, best,
                                                       out);
  device::check_launch("finish_rows");
}

void balance_rows(const ChunkRows& c, RowFactors* factors, float* scalars, bool add, float scale,
                  cudaStream_t stream) {
  balance_kernel<<<1, 1024, 0, stream>>>(c, factors, scalars, add, scale);
  device::check_launch("balance_rows");
}

}  // namespace talea::lce::cuda
