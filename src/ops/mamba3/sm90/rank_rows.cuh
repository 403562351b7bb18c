// What: rows of several rows a token: copied, projected, weighed and seen with places known ahead.
// Why: as for one row a token, each instruction that a chunk need not issue is time.
// Never: knows which half of a block is at work.
#pragma once

#include "ops/mamba3/sm90/siso_rows.cuh"

namespace talea::mamba3::sm90 {

// Where the first token of a run has its rows, of q and k those of the unit's part; out by number.
struct TokenHomes {
  const __nv_bfloat16 *q = nullptr, *k = nullptr, *v = nullptr, *z = nullptr;
  int64_t out = 0;
  __device__ __forceinline__ void set(const Args& a, const Cut& cut, const Unit& u) {
    const auto of = [](const View& from, int64_t at) {
      return from.data ? static_cast<const __nv_bfloat16*>(from.data) + at : nullptr;
    };
    const int first = first_value(cut, u);
    const int part = cut.whole ? 0 : part_of_columns(cut, u) * cut.part_apart;
    q = of(a.q, cuda::at(a.q, u.batch, u.begin, 0, u.group) + part);
    k = of(a.k, cuda::at(a.k, u.batch, u.begin, 0, u.group) + part);
    v = of(a.v, cuda::at(a.v, u.batch, u.begin, u.head, first));
    z = of(a.z, cuda::at(a.z, u.batch, u.begin, u.head, first));
    out = cuda::at(a.out, u.batch, u.begin, 0, u.head, first);
  }
};

// Sixteen bytes, asked for ahead of the barrier that follows: behind it the compiler would leave a
// load of what nothing writes.
__device__ __forceinline__ uint4 load_now(const void* from) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// All rows of a chunk of q or k whose tokens begin `first` behind `home`, as copy_rows has them, of
// heads that fill both panels.
template <int R, int threads>
__device__ __forceinline__ void copy_tokens(const __nv_bfloat16* home, const View& from,
                                            const Cut& cut, int64_t first, char* tile, int thread) {
  constexpr int apart = threads / 16;  // rows
  static_assert(apart % R == 0);
  const int piece = thread & 15, row0 = thread >> 4;
  const uint32_t to = hopper::smem_address(tile) + static_cast<uint32_t>(place_of(row0, piece * 8));
  const int column = cut.whole ? piece * 8 : piece % 8 * 8 + piece / 8 * cut.panel_apart;
  const auto* at = home + (first + row0 / R) * from.stride[1] + column;
  if constexpr (R > 1) at += row0 % R * from.stride[2];
  const int64_t step = from.stride[1] * (apart / R);
#pragma unroll
  for (int i = 0; i < rows / apart; ++i) {
    hopper::copy_16_bytes(to + static_cast<uint32_t>(i * apart * 128), at, true);
    at += step;
  }
}

// As RawValues has them, of several rows a token.
template <int R, int threads>
class RankValues {
  static constexpr int C = tokens_of<R>, items = C * 8, each = (items + threads - 1) / threads;
  // Threads beyond the items have some of the R rows each.
  static constexpr int shares = items < threads ? threads / items : 1;
  static_assert(R > 1 && R % shares == 0 && (each == 1 || items % threads == 0));

 public:
  // home: of the chunk's first token. Threads behind the last token read that one.
  __device__ __forceinline__ RankValues(const __nv_bfloat16* home, int64_t stride, const Part& p,
                                        int thread)
      : thread_(thread) {
    const auto* const own = home + (thread & 7) * 8;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int t = token_of(i), last = p.n - 1;
      raw_[i] = load_now(own + (t < last ? t : last) * stride);
    }
  }

  // Projected rows into `plain` and, by key of each token, into `weighed`; zeros behind the last.
  __device__ __forceinline__ void put(const Part& p, const float* mimo_v, const float* key,
                                      char* plain, char* weighed) const {
    const int c = (thread_ & 7) * 8, r0 = shares > 1 ? thread_ / items : 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int t = token_of(i), at0 = place_of(t * R, c);
      const float by = key[t];
      const uint32_t words[4] = {raw_[i].x, raw_[i].y, raw_[i].z, raw_[i].w};
#pragma unroll
      for (int share = 0; share < R; share += shares) {
        const int r = share + r0, at = row_behind(at0, r);
        float project[8];
        take_projection(mimo_v, r, c, project);
        uint32_t own[4], scaled[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float x = __fmul_rn(low_of(words[w]), project[2 * w]);
          const float y = __fmul_rn(high_of(words[w]), project[2 * w + 1]);
          own[w] = two_rounded(x, y);
          scaled[w] = two_rounded(by * x, by * y);
        }
        *reinterpret_cast<uint4*>(plain + at) = {own[0], own[1], own[2], own[3]};
        *reinterpret_cast<uint4*>(weighed + at) = {scaled[0], scaled[1], scaled[2], scaled[3]};
      }
      if (t < p.n) continue;
#pragma unroll
      for (int share = 0; share < R; share += shares) {
        const int at = row_behind(at0, share + r0);
        *reinterpret_cast<uint4*>(plain + at) = {0, 0, 0, 0};
        *reinterpret_cast<uint4*>(weighed + at) = {0, 0, 0, 0};
      }
    }
  }

 private:
  __device__ __forceinline__ int token_of(int i) const {
    return (shares > 1 ? thread_ % items : thread_ + i * threads) >> 3;
  }
  int thread_;
  uint4 raw_[each];
};

// As weigh_tokens, of several rows a token: without a look where every token of eight columns is
// earlier than the rows' own. A row behind the last token is weighed as if it were one: none stores
// it.
template <int R, class Steps, class F>
__device__ __forceinline__ void weigh_ranks(const float (&scores)[32], const Steps& steps, F f) {
  static_assert(R > 1 && 8 % R == 0);
  const int row = own_row(), top = row - (threadIdx.x & 31) / 4;  // the warp's first row
  const int t[2] = {row / R, (row + 8) / R}, t0 = own_column() / R;
  const float4 own[2] = {steps.pair[t[0]], steps.pair[t[1]]};
  const float4* const keys = steps.pair + t0;
  const auto put = [&](int j, int second, float by) {
    f(j, second, by * scores[4 * j + 2 * second], by * scores[4 * j + 2 * second + 1]);
  };
  const auto earlier = [&](int j, int second) {
    const float4 key = keys[8 * j / R];
    put(j, second, key.z * decay_of(own[second], key));
  };
  const auto diagonal = [&](int j, int second) {
    const int of = t0 + 8 * j / R;
    const float4 key = keys[8 * j / R];
    const float by = t[second] == of ? key.w : key.z * decay_of(own[second], key);
    const float x = by * scores[4 * j + 2 * second], y = by * scores[4 * j + 2 * second + 1];
    // Not 0 * Inf: what is not seen is not multiplied.
    const bool seen = t[second] >= of;
    f(j, second, seen ? x : 0.0f, seen ? y : 0.0f);
  };
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    if (8 * j < top) {
      earlier(j, 0), earlier(j, 1), earlier(j + 1, 0), earlier(j + 1, 1);
    } else {
      f(j + 1, 0, 0.0f, 0.0f);
      if (8 * j == top) {
        diagonal(j, 0), earlier(j, 1), diagonal(j + 1, 1);
      } else {
        f(j, 0, 0.0f, 0.0f), f(j, 1, 0.0f, 0.0f), f(j + 1, 1, 0.0f, 0.0f);
      }
    }
  }
}

// A tile of 64 columns, weighed, to an accumulator: four matrices of eight rows at once, as
// put_tile has them.
__device__ __forceinline__ void add_tile(float (&d)[32], const char* tile, float by) {
  const int lane = threadIdx.x & 31, row = (threadIdx.x & 127) / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    uint32_t x[4];
    hopper::load_matrix_x4(x, tile + place_of(row, 8 * j + lane / 16 * 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      d[4 * j + 2 * i] += by * low_of(x[i]);
      d[4 * j + 2 * i + 1] += by * high_of(x[i]);
    }
  }
}

// Over the R rows of a token: row r is left with the sums of groups r, R + r, ... of eight columns,
// which lie where the first R groups begin.
template <int R>
__device__ __forceinline__ void sum_ranks(float (&y)[32]) {
#pragma unroll
  for (int first = 0; first < 8; first += R)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[R];
#pragma unroll
      for (int k = 0; k < R; ++k) x[k] = y[4 * (first + k) + i];
      y[4 * first + i] = shared_by_ranks<R>(x);
    }
}

__device__ __forceinline__ void put_two(__nv_bfloat16* to, float x, float y) {
  *reinterpret_cast<uint32_t*>(to) = two_rounded(x, y);
}
__device__ __forceinline__ void put_two(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = {x, y};
}
// Rows of an accumulator, or what sum_ranks leaves of them, to `to`: of the first row's token and
// the thread's first column.
template <int R, class T>
__device__ __forceinline__ void store_ranks(const Args& a, T* to, int r, bool first, bool second,
                                            const float (&y)[32]) {
  to += a.size.reduce ? 8 * r : r * a.out.stride[2];
  T* const behind = to + 8 / R * a.out.stride[1];
  const auto store = [&](auto apart) {
    if (first)
#pragma unroll
      for (int j = 0; j < 8; j += apart()) put_two(to + 8 * j, y[4 * j], y[4 * j + 1]);
    if (second)
#pragma unroll
      for (int j = 0; j < 8; j += apart()) put_two(behind + 8 * j, y[4 * j + 2], y[4 * j + 3]);
  };
  if (a.size.reduce)
    store(std::integral_constant<int, R>{});
  else
    store(std::integral_constant<int, 1>{});
}

}  // namespace talea::mamba3::sm90
