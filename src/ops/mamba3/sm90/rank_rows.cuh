// What: rows of several rows a token: copied, projected, weighed and seen with places known ahead.
// Why: as for one row a token, each instruction that a chunk need not issue is time.
// Never: knows which half of a block is at work.
#pragma once

#include "ops/mamba3/sm90/siso_rows.cuh"

namespace talea::mamba3::sm90 {

// Where the first token of a run has its rows; out by number.
struct TokenHomes {
  const __nv_bfloat16 *q = nullptr, *k = nullptr, *v = nullptr, *z = nullptr;
  int64_t out = 0;
  __device__ __forceinline__ void set(const Args& a, const Cut& cut, const Unit& u) {
    const auto of = [](const View& from, int64_t at) {
      return from.data ? static_cast<const __nv_bfloat16*>(from.data) + at : nullptr;
    };
    const int first = first_value(cut, u);
    q = of(a.q, cuda::at(a.q, u.batch, u.begin, 0, u.group));
    k = of(a.k, cuda::at(a.k, u.batch, u.begin, 0, u.group));
    v = of(a.v, cuda::at(a.v, u.batch, u.begin, u.head, first));
    z = of(a.z, cuda::at(a.z, u.batch, u.begin, u.head, first));
    out = cuda::at(a.out, u.batch, u.begin, 0, u.head, first);
  }
};

// All rows of a chunk of q or k whose tokens begin `first` behind `home`, as copy_rows has them.
template <int R, int threads>
__device__ __forceinline__ void copy_tokens(const __nv_bfloat16* home, const View& from,
                                            int64_t first, char* tile, int thread) {
  constexpr int apart = threads / 16;  // rows
  static_assert(apart % R == 0);
  const int piece = thread & 15, row0 = thread >> 4;
  const uint32_t to = hopper::smem_address(tile) + static_cast<uint32_t>(place_of(row0, piece * 8));
  const auto* at = home + (first + row0 / R) * from.stride[1] + piece * 8;
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
      raw_[i] = __ldg(reinterpret_cast<const uint4*>(own + (t < last ? t : last) * stride));
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

}  // namespace talea::mamba3::sm90
