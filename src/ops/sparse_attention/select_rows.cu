// What: the selection of the best keys of a row, one block a row.
// Why: exact, ties to the lower key, the same keys in every run: a row is read once and kept in
// registers; a radix select of a short list of its best finds the last rank that is taken.
// Never: lets a list that overflows or the order of arrival decide: then the whole row is counted.
#include <math_constants.h>

#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/select_search.cuh"

namespace talea::sparse_attention::cuda {
namespace {

using namespace rows;

// Blocks of rows of a piece: the smaller the piece, the more of them a multiprocessor has.
template <int kThreads>
inline constexpr int piece_keys = kThreads* warp_words;
constexpr int blocks_each(int threads) { return threads == 1024 ? 1 : threads == 512 ? 2 : 3; }

// A row's keys, or a piece of them: a warp has `each` words of 32 keys in a row, a lane a bit of
// every one.
struct Piece {
  int64_t first = 0;  // key
  int each = 0;       // words of a warp
  int mine = 0;       // keys from this lane's first on, words apart
  __device__ Piece(int64_t begin, int64_t end, int threads) {
    const int length = static_cast<int>(min(end - begin, int64_t{threads} * warp_words));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    each = (length + threads - 1) / threads;
    const int at = warp * each * 32;
    first = begin + at;
    mine = min(length - at, each * 32) - lane;
  }
};

// Of this thread's keys. Words behind those of the piece are 0 and are left alone, eight at a time.
struct Ranks {
  static constexpr int group = 8;
  uint32_t of[warp_words];
  int groups = 0;
};
template <typename F>
__device__ inline void for_words(int groups, F&& f) {
#pragma unroll
  for (int g = 0; g < warp_words / Ranks::group; ++g) {
    if (g >= groups) break;
#pragma unroll
    for (int k = 0; k < Ranks::group; ++k) f(g * Ranks::group + k);
  }
}

template <typename From>
__device__ inline void read(const Piece& piece, From&& from, Ranks& ranks) {
#pragma unroll
  for (int j = 0; j < warp_words; ++j) ranks.of[j] = 0;
  ranks.groups = (piece.each + Ranks::group - 1) / Ranks::group;
  for_words(ranks.groups, [&](int j) {
    if (j * 32 < piece.mine) ranks.of[j] = rank_of(from(j));
  });
}

template <typename F>
__device__ inline void for_candidates(const Ranks& ranks, F&& f) {
  for_words(ranks.groups, [&](int j) {
    if (ranks.of[j] >= least) f(ranks.of[j]);
  });
}

// Bit j: whether key j of this thread ranks at `least_taken` at least, or just there. Two
// instructions a key, which the compiler does not find.
__device__ inline uint32_t mask_from(const Ranks& ranks, uint32_t least_taken) {
  uint32_t mask = 0;
  for_words(ranks.groups, [&](int j) {
    asm("{\n.reg .pred p;\nsetp.ge.u32 p, %1, %2;\n@p or.b32 %0, %0, %3;\n}"
        : "+r"(mask)
        : "r"(ranks.of[j]), "r"(least_taken), "r"(1u << j));
  });
  return mask;
}
__device__ inline uint32_t mask_at(const Ranks& ranks, uint32_t rank) {
  return rank == of_nan ? mask_from(ranks, rank)
                        : mask_from(ranks, rank) & ~mask_from(ranks, rank + 1);
}

// Bit l of lane j becomes bit j of lane l.
__device__ inline uint32_t turned(uint32_t mask) {
  uint32_t low = 0xffffu;
#pragma unroll
  for (int by = 16; by > 0; by /= 2, low ^= low << by) {
    const uint32_t other = __shfl_xor_sync(whole_warp, mask, by);
    mask = threadIdx.x & by ? (mask & ~low) | (other >> by & low)
                            : (mask & low) | (other << by & ~low);
  }
  return mask;
}

__device__ inline void count_candidates(const Ranks& ranks, Shared& shared) {
  uint32_t low = of_nan, top = 0;
  for_words(ranks.groups, [&](int j) {
    low = min(low, ranks.of[j]);
    top = max(top, ranks.of[j]);
  });
  unsigned candidates = ranks.groups * Ranks::group;
  if (low < least) candidates = __popc(mask_from(ranks, least));
  candidates = __reduce_add_sync(whole_warp, candidates);
  const uint32_t most = __reduce_max_sync(whole_warp, top);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&shared.candidates, candidates);
    atomicMax(&shared.top, most);
  }
  if (top == of_nan) atomicAdd(&shared.nans, __popc(mask_from(ranks, of_nan)));
}

// One of `sampled` keys, from other places of every word.
struct Sample {
  uint32_t ranks[warp_words / sampled];
  __device__ explicit Sample(const Ranks& all) {
    const bool b0 = threadIdx.x & 1, b1 = threadIdx.x & 2, b2 = threadIdx.x & 4;
#pragma unroll
    for (int g = 0; g < warp_words; g += sampled) {
      const uint32_t* of = all.of + g;
      const uint32_t pair[4] = {b0 ? of[1] : of[0], b0 ? of[3] : of[2], b0 ? of[5] : of[4],
                                b0 ? of[7] : of[6]};
      const uint32_t low = b1 ? pair[1] : pair[0], high = b1 ? pair[3] : pair[2];
      ranks[g / sampled] = b2 ? high : low;
    }
  }
  template <typename F>
  __device__ void operator()(F&& f) const {
#pragma unroll
    for (const uint32_t rank : ranks)
      if (rank >= least) f(rank);
  }
};

// shared.listed counts those that found no room, too.
__device__ inline void list_from(uint32_t pivot, const Ranks& ranks, Shared& shared) {
  const unsigned mine = __popc(mask_from(ranks, pivot));
  const unsigned through = add_up_warp(mine);
  unsigned begin = 0;
  if (threadIdx.x % 32 == 31) begin = atomicAdd(&shared.listed, through);
  begin = __shfl_sync(whole_warp, begin, 31) + through - mine;
  const unsigned most = mutant(Mutant::sa14_ties_overflow) ? 16 : listed_most;
  if (begin + mine <= most) {
    auto at = static_cast<uint32_t>(__cvta_generic_to_shared(shared.list + begin));
    const uint32_t below = pivot - 1;  // the same comparison twice would be kept, bit by bit
    for_words(ranks.groups, [&](int j) {
      asm volatile(
          "{\n.reg .pred p;\nsetp.gt.u32 p, %1, %2;\n"
          "@p st.shared.u32 [%0], %1;\n@p add.u32 %0, %0, 4;\n}"
          : "+r"(at)
          : "r"(ranks.of[j]), "r"(below)
          : "memory");
    });
  }
  __syncthreads();
}

// Of how many of a sample the pivot must be the last: 4 of its deviations on the safe side.
__device__ inline unsigned wanted_of_sample(unsigned wanted) {
  const float mean = static_cast<float>(wanted) / sampled;
  return static_cast<unsigned>(mean + 4 * sqrtf(mean)) + 2;
}

// Of a row that lies in registers; more candidates than wanted. The first digits of the sample are
// counted.
__device__ inline Threshold threshold_of(const Ranks& ranks, const Sample& sample, unsigned wanted,
                                         Shared& shared) {
  const unsigned few = wanted_of_sample(wanted), candidates = shared.candidates;
  const uint32_t top = shared.top;
  const bool all = candidates <= listed_most;
  if (all || (few * sampled * 5 / 4 <= listed_most && few * sampled * 2 <= candidates)) {
    uint32_t pivot = least;  // what a few more than wanted reach, by the sample
    if (!all)
      pivot = find_from(Search(least, of_nan), sample, few, few / 8, shared.counts[0], shared.found)
                  .rank;
    list_from(pivot, ranks, shared);
    const unsigned listed = shared.listed;
    const bool whole = mutant(Mutant::sa14_ties_overflow) || listed <= listed_most;
    const auto each = [&](auto&& f) {
      for (unsigned i = threadIdx.x; i < min(listed, listed_most); i += blockDim.x)
        f(shared.list[i]);
    };
    if (wanted <= listed && whole)
      return find_threshold(pivot, top, each, wanted, shared.counts[1], shared.found);
  }
  const auto each = [&](auto&& f) { for_candidates(ranks, f); };
  return find_threshold(least, top, each, wanted, shared.counts[2], shared.found);
}

// A bit a key that is taken: of the word that this lane writes.
template <int kThreads>
__device__ inline uint32_t taken_word(const Ranks& ranks, const Threshold& t,
                                      unsigned& equal_before, Shared& shared) {
  uint32_t word = turned(mask_from(ranks, t.rank));
  if (t.wanted == t.there) return word;
  uint32_t equal = turned(mask_at(ranks, t.rank));
  const Before ties = add_up<kThreads>(__popc(equal), shared.sums[0]);
  const unsigned before = equal_before + ties.before, skipped = t.there - t.wanted;
  equal_before += ties.all;
  word &= ~equal;
  const bool higher = mutant(Mutant::sa16_ties_to_the_higher);
  for (unsigned i = before; equal != 0; ++i, equal &= equal - 1)
    if (higher ? i >= skipped : i < t.wanted) word |= equal & -equal;
  return word;
}

struct Row {
  const float* scores;
  int32_t* indices;  // null: not asked for
  int64_t stride;
  int64_t at;  // of the scores to write
};

__device__ inline void write_word(const Selected& m, const Row& row, const Piece& piece,
                                  uint32_t word, unsigned at) {
  const int64_t key = piece.first + threadIdx.x % 32 * 32;
  for (; word != 0; word &= word - 1, ++at) {
    const int64_t j = key + __ffs(static_cast<int>(word)) - 1;
    if (row.indices) row.indices[at * row.stride] = static_cast<int32_t>(j);
    if (m.scores.present) put(m.scores, row.at + at * m.scores.stride[3], row.scores[j]);
  }
}

__device__ inline void write_rest(const Selected& m, const Row& row, unsigned selected) {
  const int32_t none = mutant(Mutant::sa17_slots_behind_are_zero) ? 0 : -1;
  if (mutant(Mutant::sa13_slots_behind_not_written)) return;
  for (int64_t at = selected + threadIdx.x; at < m.top_k; at += blockDim.x) {
    if (row.indices) row.indices[at * row.stride] = none;
    if (m.scores.present) put(m.scores, row.at + at * m.scores.stride[3], -CUDART_INF_F);
  }
}

// Keys of the row after, copied in words of 16 bytes by the warp that reads them.
template <int kThreads>
struct Ahead {
  static constexpr int pitch = warp_words * 32 + 4;  // of a warp: its keys, and those before them
  static constexpr size_t bytes = sizeof(float) * pitch * kThreads / 32;
  float* words;
  // Keys from the last multiple of 16 bytes on to the row's first one.
  __device__ static int lead(const float* scores, const Bounds& b) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(scores + b.begin) / 4 % 4);
  }
  __device__ const float* keys(const float* scores, const Bounds& b) const {
    return words + threadIdx.x / 32 * pitch + lead(scores, b) + threadIdx.x % 32;
  }
  // After all of the warp have read what it held.
  __device__ void fetch(const float* scores, const Bounds& b) const {
    const Piece piece(b.begin, b.end, kThreads);
    const int lane = threadIdx.x % 32, before = lead(scores, b);
    const float* from = scores + piece.first - before + lane * 4;
    auto to = static_cast<uint32_t>(
        __cvta_generic_to_shared(words + threadIdx.x / 32 * pitch + lane * 4));
    const int keys = piece.mine + lane;  // of the warp
    __syncwarp();
    if (keys <= 0) return;
#pragma unroll 3
    for (int left = keys + before - lane * 4; left > 0; left -= 128, from += 128, to += 512)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                   "r"(min(left * 4, 16))
                   : "memory");
  }
  __device__ static void wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }
};

// What a row of scores takes. Ahead: rows of one piece, fetched while the row before is worked on;
// direct: read when needed; pieces: rows of more keys than registers hold, read pass by pass.
enum class Way { ahead, direct, pieces };

template <Way kWay, int kThreads>
__global__ __launch_bounds__(kThreads, blocks_each(kThreads)) void select_kernel(
    const __grid_constant__ Selected m, const float* scores, Counters* counters) {
  extern __shared__ __align__(16) float words[];
  __shared__ Shared shared;
  const Ahead<kThreads> ahead{words};
  const int thread = threadIdx.x;
  const int64_t step = gridDim.x;
  const auto keep_bounds = [&](int64_t row, int64_t(&to)[2]) {
    const Bounds b = row < m.n ? index_bounds(m.tables, m.b, m.s + row) : Bounds{};
    to[0] = b.begin, to[1] = b.end;
  };
  const auto clear = [&] {
    for (int n = thread; n < 3 * passes * digits; n += kThreads) shared.counts[0][0][n] = 0;
    if (thread == 0) {
      shared.candidates = shared.nans = shared.listed = shared.top = 0;
      shared.found = {0, 0, 0};  // of a sample that has too few
    }
  };
  if (thread < 2) keep_bounds(blockIdx.x + thread * step, shared.bounds[thread]);
  clear();
  __syncthreads();
  Bounds bounds = {shared.bounds[0][0], shared.bounds[0][1]};
  if (kWay == Way::ahead) ahead.fetch(scores + blockIdx.x * m.stride, bounds);
  for (int64_t i = blockIdx.x, turn = 0; i < m.n; i += step, ++turn) {
    const float* list = scores + i * m.stride;
    const Piece piece(bounds.begin, bounds.end, kThreads);
    const int64_t(&after)[2] = shared.bounds[(turn + 1) % 2];
    const Bounds next = {after[0], after[1]};
    Ranks ranks;
    const auto each_piece = [&](auto&& f) {
      for (int64_t begin = bounds.begin; begin < bounds.end; begin += piece_keys<kThreads>) {
        const Piece part(begin, bounds.end, kThreads);
        const float* from = list + part.first + thread % 32;
        read(
            part, [&](int j) { return from[j * 32]; }, ranks);
        f(part);
      }
    };
    if (kWay == Way::ahead) {
      ahead.wait();
      const float* own = ahead.keys(list, bounds);
      read(
          piece, [&](int j) { return own[j * 32]; }, ranks);
      if (i + step < m.n) ahead.fetch(list + step * m.stride, next);
    }
    if (kWay == Way::direct) {
      const float* own = list + piece.first + thread % 32;
      read(
          piece, [&](int j) { return own[j * 32]; }, ranks);
    }
    if (kWay == Way::pieces)
      each_piece([&](const Piece&) { count_candidates(ranks, shared); });
    else
      count_candidates(ranks, shared);
    const Sample sample(ranks);
    if (kWay != Way::pieces)
      sample([&](uint32_t rank) { Search(least, of_nan).count(rank, shared.counts[0][0]); });
    __syncthreads();
    if (thread == kThreads - 1) keep_bounds(i + 2 * step, shared.bounds[turn % 2]);
    const auto selected = static_cast<unsigned>(min(int64_t{shared.candidates}, m.top_k));
    Threshold t;  // all candidates
    if (selected > 0 && selected < shared.candidates) {
      const auto each = [&](auto&& f) {
        each_piece([&](const Piece&) { for_candidates(ranks, f); });
      };
      if (kWay == Way::pieces)
        t = find_threshold(least, shared.top, each, selected, shared.counts[2], shared.found);
      else
        t = threshold_of(ranks, sample, selected, shared);
    }
    if (thread == 0 && shared.nans) atomicAdd(&counters->nan_scores, shared.nans);
    Row row = {list, nullptr, m.indices.stride[3], offset(m.scores, m.b, m.s + i)};
    if (m.indices.present)
      row.indices = static_cast<int32_t*>(m.indices.data) + offset(m.indices, m.b, m.s + i);
    unsigned written = 0, equal_before = 0;
    const auto emit = [&](const Piece& part) {
      const uint32_t word = taken_word<kThreads>(ranks, t, equal_before, shared);
      const Before place = add_up<kThreads>(__popc(word), shared.sums[1]);
      write_word(m, row, part, word, written + place.before);
      written += place.all;
    };
    if (selected == 0) __syncthreads();
    if (selected > 0 && kWay != Way::pieces) emit(piece);
    if (selected > 0 && kWay == Way::pieces)
      each_piece([&](const Piece& part) {
        emit(part);
        __syncthreads();
      });
    clear();
    write_rest(m, row, selected);
    if (thread == 0 && m.length.present)
      static_cast<int32_t*>(m.length.data)[offset(m.length, m.b, m.s + i)] =
          static_cast<int32_t>(selected);
    bounds = next;
    __syncthreads();
  }
}

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  device::check(cudaGetDevice(&device), "sparse_attention: select");
  device::check(cudaDeviceGetAttribute(&value, which, device), "sparse_attention: select");
  return value;
}

template <Way kWay, int kThreads>
void launch(const Selected& selected, const float* scores, Counters* counters,
            cudaStream_t stream) {
  constexpr size_t bytes = kWay == Way::ahead ? Ahead<kThreads>::bytes : 0;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(
      selected.n, int64_t{blocks_each(kThreads)} * attribute(cudaDevAttrMultiProcessorCount)));
  auto* kernel = select_kernel<kWay, kThreads>;
  if (bytes > 0)
    device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(bytes)),
                  "sparse_attention: shared memory of select");
  kernel<<<blocks, kThreads, bytes, stream>>>(selected, scores, counters);
  device::check_launch("sparse_attention: select");
}

// Whether a block that reads ahead has room on this device.
template <int kThreads>
bool reads_ahead() {
  return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >=
         static_cast<int>(Ahead<kThreads>::bytes + sizeof(Shared) + 1024);
}

}  // namespace

void select_top(const Selected& selected, const float* scores, Counters* counters,
                cudaStream_t stream) {
  if (selected.n == 0) return;
  const int64_t most = std::min(selected.tables.base.keys, selected.most_keys);
  // Of few rows each is to be there soon; of many short ones several share a multiprocessor.
  const bool many = selected.n > 2 * attribute(cudaDevAttrMultiProcessorCount);
  if (most > piece_keys<most_threads>)
    launch<Way::pieces, most_threads>(selected, scores, counters, stream);
  else if (!reads_ahead<most_threads>())
    launch<Way::direct, most_threads>(selected, scores, counters, stream);
  else if (many && most <= piece_keys<256>)
    launch<Way::ahead, 256>(selected, scores, counters, stream);
  else if (many && most <= piece_keys<512>)
    launch<Way::ahead, 512>(selected, scores, counters, stream);
  else
    launch<Way::ahead, most_threads>(selected, scores, counters, stream);
}

}  // namespace talea::sparse_attention::cuda
