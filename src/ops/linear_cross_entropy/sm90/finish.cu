// What: from partial sums per tile, or states, to losses and gradient factors.
// Why: a row ends by the algebra of algebra/row_state.hpp and rows/finish.hpp, in fp64; the sums
// are relative to shifts that this lane's logits product knew, so how they join is the lane's own.
// Never: forms p - 1 by subtraction; adds in an order that timing could change.
#include <algorithm>
#include <cub/block/block_reduce.cuh>

#include "core/kernel_mutant.hpp"
#include "device/sm90/follow.cuh"
#include "ops/linear_cross_entropy/rows/tokens.cuh"
#include "ops/linear_cross_entropy/sm90/pack.cuh"
#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"

namespace talea::lce {
namespace {

constexpr int kLargestExponent = 100;  // of a row's storage in fp16
constexpr int kRows = 8, kLanes = 64;  // a block: 8 rows x 64 partial summations
constexpr int kWarps = kRows * kLanes / 32;
constexpr int kFewThreads = static_cast<int>(kFewTokens);
constexpr double kNatural = 0.69314718055994530942;  // of a unit of log2

// What the tiles say of a row: sums over v != target.
struct TileSums {
  double sum, shifted, classes;

  __device__ void add(const TileSums& o) {
    sum += o.sum, shifted += o.shifted, classes += o.classes;
  }
  __device__ TileSums from_lane(int distance) const {
    return {__shfl_xor_sync(0xffffffffu, sum, distance),
            __shfl_xor_sync(0xffffffffu, shifted, distance),
            __shfl_xor_sync(0xffffffffu, classes, distance)};
  }
};

__device__ RowState<double> state_of(const FinishParams& p, int row, const TileSums& tiles,
                                     double shift) {
  const double sum = tiles.sum, shifted = tiles.shifted;
  RowState<double> s;
  s.has_target = p.rows.target[row] >= 0 ? 1.0 : 0.0;
  s.target = p.rows.target_logit[row];
  // The largest of the two parts stands for the maximum: both then lie in (0, 1].
  const double others_log = shift + log(sum);
  s.max = others_log;
  if (s.has_target != 0.0 && !(s.target <= others_log)) s.max = s.target;
  if (others_log != others_log) s.max = others_log;
  const double rescaled = s.max == -INFINITY || sum == 0.0 ? 0.0 : exp(shift - s.max);
  s.others = sum * rescaled;
  // sum e (z - shift) becomes sum e (z - max).
  s.shifted = rescaled * (shifted + sum * (shift - s.max));
  if (sum == 0.0) s.shifted = 0.0;
  if (p.row_class_sum) s.class_sum = p.row_class_sum[row];
  if (p.tile_classes) {
    s.class_sum = tiles.classes;
    if (s.has_target != 0.0) s.class_sum += p.row_class_weight[row] * s.target;
  }
  return s;
}

// What the pass that forms da needs of the row; returns the exponent of its storage.
__device__ void write_factors(const FinishParams& p, int row, const RowState<double>& state,
                              const RowSummary<double>& summary, const RowResult<double>& r,
                              double shift, double scale) {
  RowFactors f;
  // exp(z - shift) lies in the buffer, or fp32 logits do, read relative to their maximum.
  const double base = p.shifted_buffer ? shift : state.max;
  f.base = static_cast<float>(base);
  f.inverse = static_cast<float>(p.shifted_buffer ? exp(shift - summary.lse) : 1.0 / summary.sum);
  f.offset = static_cast<float>(base - summary.lse + summary.entropy);
  f.prob = static_cast<float>(r.prob);
  f.smooth = static_cast<float>(r.smooth);
  f.soft = static_cast<float>(r.soft);
  f.entropy_up = static_cast<float>(r.entropy_up);
  f.exponent = 0;
  if (p.f16) {
    const int exponent = storage_exponent(
        largest_element(r, state.soft_mass, p.facts->class_weight_max, p.terms.vocab, scale),
        kLargestExponent);
    f.exponent = exponent;
    atomicMin(p.least_exponent, exponent);
  }
  f.scale = static_cast<float>(ldexp(scale, f.exponent));
  p.factors[row] = f;
  p.rows.factor[row] = static_cast<float>(ldexp(1.0, -f.exponent));
}

// kGradients: the factors of the row, too; returns the one that multiplies its row of X.
template <bool kGradients = true>
__device__ float finish_one(const FinishParams& p, int row, const RowState<double>& state,
                            double shift) {
  const int64_t token = p.rows.index[row];
  const RowSummary<double> summary = summarise(state);
  LossTerms<double> terms = p.terms;
  terms.inverse_denominator = p.facts->inverse;
  terms.class_weight_sum = p.facts->class_weight_sum;
  const double class_weight = p.row_class_weight[row];
  const RowResult<double> r =
      finish_row(state, summary, terms, row_terms(p.own, token, class_weight));
  p.row_loss[row] = r.loss;
  if (p.row_lse) p.row_lse[row] = summary.lse;
  write_row(p.out, token, summary, r.loss);
  if constexpr (!kGradients) return 0.f;
  const double scale = p.scale * (p.rows.scale ? static_cast<double>(p.rows.scale[row]) : 1.0);
  const bool here = p.rows.target[row] >= 0;
  double target = r.target;
  if (p.factors) {
    target -= r.smooth * class_weight;
    if (r.entropy_up != 0 && summary.target_share != 0)
      target -= r.entropy_up * summary.target_share * (summary.logp_target + summary.entropy);
  }
  if (p.target_slope && here)
    target *= p.target_slope[row];
  else if (p.softcap > 0)
    target *= 1.0 - (state.target / p.softcap) * (state.target / p.softcap);
  p.rows.target_factor[row] = static_cast<float>(here ? target * scale : 0.0);
  if (p.row_smooth) p.row_smooth[row] = static_cast<float>(r.smooth * scale);
  float factor = 1.f;
  if (p.factors)
    write_factors(p, row, state, summary, r, shift, scale);
  else
    factor = p.rows.factor[row] = static_cast<float>(r.prob * scale * exp(shift - summary.lse));
  if (p.db_factor) p.db_factor[row] = static_cast<float>(p.rows.factor[row] / scale);
  return factor;
}

__device__ double shift_of(const FinishParams& p, int row) {
  const int peak = p.rows.peak[row];
  const bool repaired = needs_repair(peak) && !mutant(KernelMutant::repair_left_out);
  const float shift2 = repaired ? decode_peak(peak) : p.rows.shift[row];
  return shift2 * kNatural;
}

// The row of a thread's block of rows: its state alone, or everything that follows from it.
__device__ float end_row(const FinishParams& p, int row, const TileSums& tiles, double shift) {
  if (p.states) {
    RowState<double> state = p.states[row];
    for (int i = 1; i < p.parts; ++i) state = merge(state, p.states[i * p.range.rows + row]);
    return finish_one(p, row, state, shift);
  }
  const RowState<double> state = state_of(p, row, tiles, shift);
  if (!p.own_states) return finish_one(p, row, state, shift);
  p.own_states[row] = state;
  return 0.f;
}

__global__ void saved_kernel(SavedParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= p.range.count()) return;
  const int64_t token = p.rows.index[row];
  const double lse = read(p.lse, token, 0), logp = read(p.logprob, token, 0);
  // Relative to the lse every term is a probability; 1 - p keeps the digits that log p has.
  RowState<double> s;
  s.max = lse;
  s.others = -expm1(logp);
  s.target = lse + logp;
  s.has_target = 1;
  p.states[row] = s;
}

// A block: kRows rows, kLanes threads a row.
//
//   sums[row] = of tile_sums, tile_shifted, tile_classes [tile, row], in a fixed order
//   state[row] = from the sums, the shift and target_logit[row]; or states [part, row] merged
//   own_states[row] = state[row]; the rest follows the exchange       between ranks
//   loss, lse, logprob, entropy [index[row]]; row_loss[row]           rows/finish.hpp
//   factor[row], target_factor[row]; factors[row] where a pass forms da
//   X [row, hidden] *= factor[row], in place                          where dW follows at once
__global__ void __launch_bounds__(kRows* kLanes) finish_kernel(FinishParams p) {
  __shared__ TileSums sums[kWarps][kRows];
  __shared__ float factors[kRows];
  if (!mutant(KernelMutant::wait_left_out)) talea::sm90::begin_after_earlier_kernels();
  if (p.zeroed && blockIdx.x == 0 && threadIdx.x == 0) p.zeroed[0] = p.zeroed[1] = 0;
  const int lane = threadIdx.x / kRows, r = threadIdx.x % kRows;
  const int row = blockIdx.x * kRows + r;
  const int rows = static_cast<int>(p.range.count());
  if (blockIdx.x * kRows >= rows) return;
  TileSums own{0, 0, 0};
  if (row < rows && !p.states) {
#pragma unroll 4
    for (int tile = lane; tile < p.tiles - mutant(KernelMutant::split_sum_dropped);
         tile += kLanes) {
      const int64_t at = p.places.at(tile, row, rows);
      own.sum += p.tile_sums[at];
      if (p.tile_shifted) own.shifted += p.tile_shifted[at] * kLn2;
      if (p.tile_classes) own.classes += p.tile_classes[at] * kLn2;
    }
  }
  // Lanes of a warp by halves, then the warps one after the other: one order for every grid.
  for (int step = 16; step >= kRows; step /= 2) own.add(own.from_lane(step));
  if (threadIdx.x % 32 < kRows) sums[threadIdx.x / 32][r] = own;
  __syncthreads();
  if (lane == 0) {
    for (int i = 1; i < kWarps; ++i) own.add(sums[i][r]);
    factors[r] = row < rows ? end_row(p, row, own, shift_of(p, row)) : 0.f;
  }
  __syncthreads();
  if (!p.scaled) return;
  const int64_t vectors = p.hidden / 8;
  for (int i = 0; i < kRows && blockIdx.x * kRows + i < rows; ++i) {
    auto* x = static_cast<uint4*>(p.scaled) + (blockIdx.x * kRows + i) * vectors;
    const float f = factors[i];
    for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
      uint4 four = x[v];
      auto* words = reinterpret_cast<uint32_t*>(&four);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 both = unpack<false>(words[k]);
        words[k] = pack<false>(f * both.x, f * both.y);
      }
      x[v] = four;
    }
  }
}

// A block a row: few rows whose tiles have maxima of their own. One pass, a few tiles a thread at a
// time, so that their loads are in flight together. Every thread gets the result.
struct OnlineSums {
  TileSums own{0, 0, 0};
  float most = -INFINITY;  // what they are relative to, log2 units

  __device__ OnlineSums(const FinishParams& p, int row, float* floats, double* doubles) {
    constexpr int kHeld = 4;
    for (int first = threadIdx.x; first - static_cast<int>(threadIdx.x) < p.tiles;
         first += kHeld * kFewThreads) {
      float peak[kHeld], sum[kHeld], shifted[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int tile = first + i * kFewThreads;
        const int64_t at = p.places.at(tile, row, 0);
        const bool exists = tile < p.tiles;
        peak[i] = exists ? p.tile_maxima[at] : -INFINITY;
        sum[i] = exists ? p.tile_sums[at] : 0.f;
        shifted[i] = exists && p.tile_shifted ? p.tile_shifted[at] : 0.f;
      }
      float here = -INFINITY;  // a tile of sum 0 holds no word, and no maximum either
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (sum[i] != 0) here = fmaxf(here, peak[i]);
      here = device::block_reduce(here, device::Max(), floats);
      if (here > most) raise(here);
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (sum[i] != 0) add(peak[i], sum[i], shifted[i]);
    }
    own.sum = device::block_reduce(own.sum, device::Sum(), doubles);
    own.shifted = device::block_reduce(own.shifted, device::Sum(), doubles);
  }

 private:
  // sum e x becomes sum e (x + down), e smaller by 2^down.
  __device__ void raise(float to) {
    if (most > -INFINITY) {
      const float down = most - to, f = talea::sm90::exp2_fast(down);
      own.shifted = f > 0 ? f * (own.shifted + own.sum * down * kLn2) : 0.0;
      own.sum *= f;
    }
    most = to;
  }
  __device__ void add(float peak, double sum, double shifted) {
    const float x = peak - most, f = talea::sm90::exp2_fast(x);
    own.sum += f * sum;
    if (f > 0) own.shifted += f * kLn2 * (shifted + sum * x);
  }
};

// Their loss alone is wanted. Few instructions: they are fetched anew after each read of a large
// weight.
__device__ void end_online(const FinishParams& p, int row) {
  __shared__ float floats[kFewThreads / 32];
  __shared__ double doubles[kFewThreads / 32];
  const OnlineSums sums(p, row, floats, doubles);
  if (threadIdx.x != 0) return;
  const double shift = sums.most * kNatural;
  const RowState<double> state = state_of(p, row, sums.own, shift);
  if (p.own_states)
    p.own_states[row] = state;
  else
    finish_one<false>(p, row, state, shift);
}

__global__ void __launch_bounds__(kFewThreads) online_kernel(FinishParams p) {
  talea::sm90::begin_after_earlier_kernels();
  if (blockIdx.x < p.range.count()) end_online(p, static_cast<int>(blockIdx.x));
}

// Thread 0 has the sums over the rows that are in use.
__device__ void write_scalars(const ReduceParams& p, double sum, double hits) {
  if (p.facts->out_of_range > 0) sum = NAN;
  lce::write_scalars(p.loss, p.accuracy, *p.facts, p.mean, sum, hits);
}

__global__ void __launch_bounds__(kFewThreads) end_few_kernel(EndFewParams p) {
  __shared__ double doubles[kFewThreads / 32];
  __shared__ bool last;
  talea::sm90::begin_after_earlier_kernels();
  const int rows = static_cast<int>(p.finish.range.count());
  if (blockIdx.x < rows) end_online(p.finish, static_cast<int>(blockIdx.x));
  if (!p.tickets) return;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(p.tickets, 1) + 1 == static_cast<int>(gridDim.x);
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  // The rows are added in the same order whichever block comes last.
  const int row = static_cast<int>(threadIdx.x);
  const double sum = device::block_reduce(row < rows ? __ldcg(p.reduce.row_loss + row) : 0.0,
                                          device::Sum(), doubles);
  if (threadIdx.x == 0) write_scalars(p.reduce, sum, 0);
}

__global__ void __launch_bounds__(1024) reduce_kernel(ReduceParams p) {
  using Sum = cub::BlockReduce<double, 1024>;
  __shared__ typename Sum::TempStorage shared;
  talea::sm90::begin_after_earlier_kernels();
  double sum = 0, hits = 0;
  for (int i = threadIdx.x; i < p.facts->in_use; i += 1024) {
    if (p.loss.data) sum += p.row_loss[i];
    if (p.hit) hits += p.hit[i];
  }
  sum = Sum(shared).Sum(sum);
  __syncthreads();
  hits = Sum(shared).Sum(hits);
  if (threadIdx.x == 0) write_scalars(p, sum, hits);
}

}  // namespace

void finish_rows(const FinishParams& p, cudaStream_t stream) {
  const int64_t blocks = (p.range.rows + kRows - 1) / kRows;
  if (blocks == 0) return;
  if (p.tile_maxima && !p.states)
    return talea::sm90::launch_following(online_kernel, {p.range.rows, kFewThreads}, p, stream,
                                         "finish_rows");
  // States may come from an exchange between ranks, which is no kernel of ours.
  talea::sm90::launch_following(finish_kernel, {blocks, kRows * kLanes, !p.states}, p, stream,
                                "finish_rows");
}

void end_few_rows(const EndFewParams& p, int64_t rows, cudaStream_t stream) {
  talea::sm90::launch_following(end_few_kernel, {rows, kFewThreads}, p, stream, "end_few_rows");
}

void restore_states(const SavedParams& p, cudaStream_t stream) {
  if (p.range.rows == 0) return;
  saved_kernel<<<static_cast<unsigned>((p.range.rows + 255) / 256), 256, 0, stream>>>(p);
  device::check_launch("restore_states");
}

void reduce_scalars(const ReduceParams& p, cudaStream_t stream) {
  talea::sm90::launch_following(reduce_kernel, {1, 1024, p.follows}, p, stream, "reduce_scalars");
}

}  // namespace talea::lce
