// What: the turns of a chunk: exact sums over its tokens by groups of threads of the block that
//       reads it.
// Why: one row a token is as few numbers as its turns, so turns that lie in memory would double
//      what is read.
// Never: rounds a turn before it is summed.
#pragma once

#include "ops/mamba3/sm90/turns.cuh"

namespace talea::mamba3::sm90 {

// The turns that lie before the chunk at work, of each pair, and whether one was not finite.
struct Carried {
  uint64_t turns[64];
  int tainted[64];
};

// Turns of a chunk by `threads` threads: sixteen have two pairs each of a group of tokens.
template <int C, int blocks, int threads>
class TurnReader {
 public:
  static constexpr int groups = threads / 16, each = C / groups;
  static_assert(each >= 1);
  struct Scratch {
    ulonglong2 sums[groups][16 * blocks];
    unsigned lost[64];  // bit g: a turn of group g is not finite
  };

  __device__ __forceinline__ explicit TurnReader(int thread)
      : pair_(thread & 15), group_(thread >> 4) {}

  __device__ __forceinline__ int first_token() const { return group_ * each; }
  __device__ __forceinline__ int pair_pair(int block) const { return pair_ + 16 * block; }

  // Rates as they lie in memory: all loads are under way together. formed: by launch_rates, whose
  // pairs lie side by side.
  __device__ __forceinline__ void load(const Args& a, const Unit& u, const Part& p, bool formed) {
    const View& from = a.angles;
    const int64_t base = cuda::at(from, u.batch, u.begin + p.first + first_token(), u.head);
    const int left = p.n - first_token();
    if (!from.data) {
#pragma unroll
      for (int b = 0; b < blocks; ++b)
#pragma unroll
        for (int j = 0; j < each; ++j) bits_[b][j][0] = bits_[b][j][1] = 0;
      return;
    }
    if (formed) {
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
        const int i = 2 * pair_pair(b), known = i < a.size.pairs ? left : 0;  // A is even
        const auto* at = static_cast<const uint32_t*>(from.data) + base + i;
#pragma unroll
        for (int j = 0; j < each; ++j) {
          uint2 both = {0, 0};
          if (j < known) both = __ldg(reinterpret_cast<const uint2*>(at));
          bits_[b][j][0] = both.x, bits_[b][j][1] = both.y;
          at += from.stride[1];
        }
      }
      return;
    }
    const auto all = [&](auto get) {
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
        // A is even.
        const int i = 2 * pair_pair(b), known = i < a.size.pairs ? left : 0;
        int64_t at = base + i * from.stride[3];
#pragma unroll
        for (int j = 0; j < each; ++j) {
          bits_[b][j][0] = j < known ? get(at) : 0u;
          bits_[b][j][1] = j < known ? get(at + from.stride[3]) : 0u;
          at += from.stride[1];
        }
      }
    };
    if (from.dtype == DType::f32)
      all([&](int64_t at) { return __ldg(static_cast<const uint32_t*>(from.data) + at); });
    else
      all([&](int64_t at) -> uint32_t {
        return __ldg(static_cast<const uint16_t*>(from.data) + at);
      });
  }

  // Rates become scaled turns, in their place; their sums go to the other groups. A few tokens at a
  // time: a rate does not wait for the one before it, and code that the loop comes back to is
  // fetched once. formed: the rates are.
  __device__ __forceinline__ void add(const Args& a, const Part& p, const float* dt, bool formed,
                                      Scratch& scratch) {
    if (formed)
      add_turns<true>(a, p, dt, scratch);
    else
      add_turns<false>(a, p, dt, scratch);
  }

  // f(token within the group, pair of pairs, turns of it and of the next, whether there is a next)
  // of every second token of the group. Behind it, `finish` has what lies before the next chunk.
  template <class F>
  __device__ __forceinline__ void each_turn(const Args& a, const Part& p, const Carried& carried,
                                            const Scratch& scratch, F f) {
    static_assert(each % 2 == 0);
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int pp = pair_pair(b);
      const bool turns = a.angles.data && 2 * pp < a.size.pairs;
      uint64_t sum[2] = {0, 0};
      float taint[2] = {0, 0};
      if (turns) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          sum[e] = carried.turns[2 * pp + e];
          const unsigned before = scratch.lost[2 * pp + e] & ((1u << group_) - 1);
          if ((before | static_cast<unsigned>(carried.tainted[2 * pp + e])) != 0) taint[e] = NAN;
        }
#pragma unroll 1
        for (int g = 0; g < group_; ++g) {
          if (g >= group_) continue;  // without it the compiler unrolls the loop by four
          const ulonglong2 more = scratch.sums[g][pp];
          sum[0] += more.x, sum[1] += more.y;
        }
      }
#pragma unroll 1
      for (int j = 0; j < each; j += 2) {
        const int t = first_token() + j;
        if (t >= p.n) break;
        TwoTurns by[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // None behind the last, nor of a pair that never turns: of 0 they are 0 and 1.
          add_whole(bits_[b][i], sum, taint);
          tainted_sine_cosine(sum[0], taint[0], by[i].sin0, by[i].cos0);
          tainted_sine_cosine(sum[1], taint[1], by[i].sin1, by[i].cos1);
        }
        f(j, pp, by, t + 1 < p.n);
        behind<2>(bits_[b]);
      }
      end_[b][0] = sum[0], end_[b][1] = sum[1];
      lost_[b] = (isnan(taint[0]) ? 1 : 0) + (isnan(taint[1]) ? 2 : 0);
    }
  }

  // After a barrier behind each_turn.
  __device__ __forceinline__ void finish(const Args& a, Carried& carried) {
    if (group_ != groups - 1 || !a.angles.data) return;
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int i = 2 * pair_pair(b);
      if (i >= a.size.pairs) continue;
      carried.turns[i] = end_[b][0], carried.turns[i + 1] = end_[b][1];
      carried.tainted[i] = lost_[b] & 1, carried.tainted[i + 1] = lost_[b] >> 1;
    }
  }

 private:
  template <bool formed>
  __device__ __forceinline__ void add_turns(const Args& a, const Part& p, const float* dt,
                                            Scratch& scratch) {
    if (!a.angles.data) return;
    if (!formed && a.angles.dtype != DType::f32) {
#pragma unroll
      for (int b = 0; b < blocks; ++b)
#pragma unroll
        for (int j = 0; j < each; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            bits_[b][j][e] = __float_as_uint(cuda::number_of(a.angles.dtype, bits_[b][j][e]));
    }
    constexpr int at_once = each % 4 == 0 ? 4 : 2;
    static_assert(each % at_once == 0);
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const bool turns = 2 * pair_pair(b) < a.size.pairs;
      uint64_t sum[2] = {0, 0};
      float taint[2] = {0, 0};
#pragma unroll 1
      for (int first = 0; first < each; first += at_once) {
        uint32_t scaled[at_once][2];
#pragma unroll
        for (int j = 0; j < at_once; ++j) {
          // Behind the last token both are 0, and of a pair that never turns.
          const float half = turns ? 0.5f * dt[first_token() + first + j] : 0.0f;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float rate = __uint_as_float(bits_[b][j][e]);
            scaled[j][e] = __float_as_uint(scaled_turn((formed ? rate : tanhf(rate)) * half));
          }
          add_whole(scaled[j], sum, taint);
        }
        behind<at_once>(bits_[b]);
#pragma unroll
        for (int j = 0; j < at_once; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) bits_[b][each - at_once + j][e] = scaled[j][e];
      }
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (isnan(taint[e])) atomicOr(&scratch.lost[2 * pair_pair(b) + e], 1u << group_);
      scratch.sums[group_][pair_pair(b)] = {sum[0], sum[1]};
    }
  }

  // cuda::to_turn before it is an integer. A rate is at most 1, so that half a dt times it is below
  // the bound of to_turn or not finite, and of that the difference is no number.
  static __device__ __forceinline__ float scaled_turn(float turns) {
    const float rest = turns - rintf(turns);
    return rest >= 0.5f ? -9223372036854775808.0f : rest * 18446744073709551616.0f;
  }
  // Two scaled turns to their sums. taint: 0, or no number behind a turn that is none; a sum that
  // such a turn is part of is read by none.
  static __device__ __forceinline__ void add_whole(const uint32_t (&scaled)[2], uint64_t (&sum)[2],
                                                   float (&taint)[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float turn = __uint_as_float(scaled[e]);
      sum[e] += static_cast<uint64_t>(cuda::nearest_integer(turn));
      taint[e] = fmaf(turn, 0.0f, taint[e]);
    }
  }

  // The first numbers make room for others behind the last: a loop that counted through them would
  // have them in memory.
  template <int count>
  static __device__ __forceinline__ void behind(uint32_t (&x)[each][2]) {
#pragma unroll
    for (int j = 0; j + count < each; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) x[j][e] = x[j + count][e];
  }

  int pair_, group_;
  uint32_t bits_[blocks][each][2];  // rates, from add() on scaled turns
  uint64_t end_[blocks][2];
  int lost_[blocks];
};

}  // namespace talea::mamba3::sm90
