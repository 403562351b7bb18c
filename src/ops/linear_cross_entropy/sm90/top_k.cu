// What: the best words of every row: lists kept in the lanes of a warp, merged in a fixed order.
// Why: argmax, accuracy and top-k come out of the chunk that made the loss.
// Never: orders NaN: a row with a NaN logit has no best.
#include "core/kernel_mutant.hpp"
#include "device/common/cuda_check.hpp"
#include "device/sm90/follow.cuh"
#include "ops/linear_cross_entropy/rows/tokens.cuh"
#include "ops/linear_cross_entropy/sm90/pack.cuh"
#include "ops/linear_cross_entropy/sm90/wide.hpp"

namespace talea::lce {
namespace {

constexpr unsigned kWarp = 0xffffffffu;
constexpr int kThreads = 256, kWarps = kThreads / 32;

using Best = Candidate<float>;

// Lane i holds the i-th best of at most 32.
struct List {
  Best own{-INFINITY, INT64_MAX};

  __device__ Best at(int i) const {
    return {__shfl_sync(kWarp, own.value, i), __shfl_sync(kWarp, own.id, i)};
  }
  // The whole warp offers the same candidate.
  __device__ void insert(const Best& c) {
    const int place = __popc(__ballot_sync(kWarp, better(own, c)));
    const Best left{__shfl_up_sync(kWarp, own.value, 1), __shfl_up_sync(kWarp, own.id, 1)};
    const int lane = threadIdx.x % 32;
    if (lane == place) own = c;
    if (lane > place) own = left;
  }
  // Each lane offers its own candidate, or none.
  __device__ void offer(const Best& mine, bool has, int64_t kept) {
    const Best last = at(static_cast<int>(kept) - 1);
    unsigned offered = __ballot_sync(kWarp, has && better(mine, last));
    while (offered != 0) {
      const int lane = __ffs(offered) - 1;
      offered &= offered - 1;
      insert({__shfl_sync(kWarp, mine.value, lane), __shfl_sync(kWarp, mine.id, lane)});
    }
  }
};

__global__ void __launch_bounds__(kThreads) rank_kernel(WideParams p, int64_t kept, Best* best) {
  __shared__ Best lists[kWarps][32];
  const int64_t row = blockIdx.x;
  if (row >= p.range.count()) return;
  const float* logits = p.logits + row * p.stride;
  const float scale = p.rule.scale * (p.rows.scale ? p.rows.scale[row] : 1.f);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  List list;
  const int seen = mutant(KernelMutant::top_k_part_missed) ? p.vocab / 2 : p.vocab;
  for (int first = warp * 32; first < seen; first += kThreads) {
    const int column = first + lane;
    const bool exists = column < seen;
    float slope, z = 0;
    if (exists) z = p.rule.capped(fmaf(logits[column], scale, p.rule.bias_at(column)), slope);
    list.offer({z, p.vocab_begin + column}, exists, kept);
  }
  lists[warp][lane] = list.own;
  __syncthreads();
  if (warp != 0) return;
  for (int w = 1; w < kWarps; ++w) {
    const Best other = lists[w][lane];
    list.offer(other, lane < kept && other.id != INT64_MAX, kept);
  }
  if (lane < kept) best[row * kept + lane] = list.own;
}

// The whole warp: x . w of one word, then its logit.
__device__ float logit_of(const BestParams& p, int64_t row, float scale, int column) {
  float sum = 0;
#pragma unroll 4
  for (int64_t d = threadIdx.x % 32 * 8; d < p.hidden; d += 256) {
    const auto* x = static_cast<const uint16_t*>(p.x) + row * p.hidden + d;
    const auto* w = static_cast<const uint16_t*>(p.weight) + column * p.weight_stride + d;
    const uint4 a = *reinterpret_cast<const uint4*>(x), b = *reinterpret_cast<const uint4*>(w);
    const uint32_t as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 u = unpack<false>(as[i]), v = unpack<false>(bs[i]);
      sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kWarp, sum, step);
  float slope;
  return p.rule.capped(fmaf(sum, scale, p.rule.bias_at(column)), slope);
}

__device__ __forceinline__ float peak_of(const BestParams& p, int64_t row, int tile) {
  return p.tile_peaks[tile * p.tile_stride + row];
}

// Lane i holds the i-th largest of the values that the warp has seen. A sorting network takes the
// same few steps for any values.
struct Largest {
  float own = -INFINITY;

  // Lanes `distance` apart exchange; where `descending`, the lower one keeps the larger.
  static __device__ __forceinline__ float exchange(float x, int distance, bool descending) {
    const float other = __shfl_xor_sync(kWarp, x, distance);
    const bool lower = (threadIdx.x & distance) == 0;
    return lower == descending ? fmaxf(x, other) : fminf(x, other);
  }
  // Of a descending list: the larger of each opposite pair are the 32 largest, in bitonic order.
  __device__ void take_sorted(float x) {
    own = fmaxf(own, __shfl_sync(kWarp, x, 31 - threadIdx.x % 32));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) own = exchange(own, distance, true);
  }
  __device__ void take(float x) {
#pragma unroll
    for (int size = 2; size <= 32; size *= 2)
#pragma unroll
      for (int distance = size / 2; distance > 0; distance /= 2)
        x = exchange(x, distance, size == 32 || (threadIdx.x & size) == 0);
    take_sorted(x);
  }
};

// The k-th largest of the tiles' maxima: no word of a tile below it is among the k best.
__device__ float least_peak(const BestParams& p, int64_t row, int64_t kept, float (*lists)[32]) {
  constexpr int kHeld = 4;  // loads in flight
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Largest seen;
  for (int first = warp * 32; first < p.tiles; first += kHeld * kThreads) {
    float peaks[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int tile = first + i * kThreads + lane;
      peaks[i] = tile < p.tiles ? peak_of(p, row, tile) : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (first + i * kThreads < p.tiles) seen.take(peaks[i]);
  }
  lists[warp][lane] = seen.own;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w)
    if (w != warp) seen.take_sorted(lists[w][lane]);
  return __shfl_sync(kWarp, seen.own, static_cast<int>(kept) - 1);
}

// The words of one tile that can be among the best: their logits anew, in fp32.
__device__ void find_in_tile(const BestParams& p, int64_t row, int64_t kept, int tile,
                             uint32_t floor, List& list) {
  constexpr int kParts = 6;  // of 32 words
  const int lane = threadIdx.x % 32, target = p.rows.target[row];
  const float scale = p.rule.scale * (p.rows.scale ? p.rows.scale[row] : 1.f);
  const uint16_t* words = p.buffer + row * p.stride;
  const int begin = tile * p.tile_columns, end = min(begin + p.tile_columns, p.vocab);
  for (int first = begin; first < end; first += 32 * kParts) {
    uint32_t held[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int column = first + 32 * i + lane;
      held[i] = column < end ? words[column] : 0;
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int column = first + 32 * i + lane;
      unsigned able = __ballot_sync(kWarp, column < end && column != target && held[i] >= floor);
      while (able != 0) {
        const int chosen = first + 32 * i + __ffs(able) - 1;
        able &= able - 1;
        const Best c{logit_of(p, row, scale, chosen), p.vocab_begin + chosen};
        list.offer(c, lane == 0, kept);
      }
    }
  }
}

// This warp's share of the words that can be among the best.
__device__ void find_words(const BestParams& p, int64_t row, int64_t kept, float least,
                           List& list) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(least));
  const uint32_t floor = pack<false>(e, 0.f) & 0xffff;
  // A warp looks at every eighth tile, 32 at once: neighbours often go together.
  for (int first = 0; first < p.tiles; first += kThreads) {
    const int tile = first + lane * kWarps + warp;
    unsigned able = __ballot_sync(kWarp, tile < p.tiles && peak_of(p, row, tile) >= least);
    while (able != 0) {
      const int chosen = first + (__ffs(able) - 1) * kWarps + warp;
      able &= able - 1;
      find_in_tile(p, row, kept, chosen, floor, list);
    }
  }
  // The target's own logit is kept apart from its tile.
  const int target = p.rows.target[row];
  if (threadIdx.x < 32 && target >= 0)
    list.offer({p.rows.target_logit[row], p.vocab_begin + target}, lane == 0, kept);
}

// A block a row. The buffer holds e = exp(z - shift) in bf16, tile_peaks the maximum of z - shift.
//
//   least = the k-th largest of tile_peaks [tiles, row]: no word below it is among the k best
//   for each tile whose peak reaches least, for each word whose e reaches exp(least):
//     z = the row's x . w again, in fp32; offered to the list of the warp
//   the target, whose e is 0, by target_logit[row]
//   best [row, k] = the warps' lists merged, ties to the lowest id
__global__ void __launch_bounds__(kThreads) best_kernel(BestParams p) {
  __shared__ Best lists[kWarps][32];
  __shared__ float peaks[kWarps][32];
  talea::sm90::begin_after_earlier_kernels();
  const int64_t row = blockIdx.x, kept = p.kept;
  if (row >= p.range.count()) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float least = least_peak(p, row, kept, peaks);
  List list;
  find_words(p, row, kept, least, list);
  lists[warp][lane] = list.own;
  __syncthreads();
  if (warp != 0) return;
  for (int w = 1; w < kWarps; ++w) {
    const Best other = lists[w][lane];
    list.offer(other, lane < kept && other.id != INT64_MAX, kept);
  }
  if (lane < kept) p.best[row * kept + lane] = list.own;
}

// One warp a row.
__global__ void write_kernel(RankedParams p) {
  talea::sm90::begin_after_earlier_kernels();
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32;
  if (row >= p.range.count()) return;
  const int lane = threadIdx.x % 32;
  const int64_t token = p.index[row];
  List list;
  for (int part = 0; part < p.parts; ++part) {
    Best other{-INFINITY, INT64_MAX};
    if (lane < p.kept) other = p.best[(part * p.range.rows + row) * p.kept + lane];
    list.offer(other, lane < p.kept && other.id != INT64_MAX, p.kept);
  }
  const double lse = p.lse[row];
  if (lane == 0 && p.hit)
    p.hit[row] = lse == lse && p.targets && list.own.id == p.targets.load_index(token);
  write_candidate(p.out, token, lane, list.own.value, list.own.id, lse);
}

}  // namespace

void rank_rows(const WideParams& p, int64_t kept, Candidate<float>* best, cudaStream_t stream) {
  if (p.range.rows == 0 || kept == 0) return;
  rank_kernel<<<static_cast<unsigned>(p.range.rows), kThreads, 0, stream>>>(p, kept, best);
  device::check_launch("rank_rows");
}

void rank_rows(const BestParams& p, cudaStream_t stream) {
  if (p.range.rows == 0 || p.kept == 0) return;
  talea::sm90::launch_following(best_kernel, {p.range.rows, kThreads}, p, stream, "rank_rows");
}

void write_ranked(const RankedParams& p, cudaStream_t stream) {
  if (p.range.rows == 0 || p.kept == 0) return;
  // Candidates may come from an exchange between ranks, which is no kernel of ours.
  talea::sm90::launch_following(write_kernel, {(p.range.rows + 7) / 8, 256, p.parts == 1}, p,
                                stream, "write_ranked");
}

}  // namespace talea::lce
