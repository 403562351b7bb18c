// What: what a block of the forward kernel has in shared memory, and how it rotates the rows of a chunk.
// Why: below four rows a token biases are read beside the rows; from there on a thread keeps its own.
// Never: copies a row.
#pragma once

#include "ops/mamba3/sm90/forward_shared.cuh"
#include "ops/mamba3/sm90/handed.cuh"

namespace talea::mamba3::sm90::forward {

inline constexpr int most_abreast = 16;
// Two blocks have room beside each other.
inline constexpr size_t most_shared = ((228 << 10) - 2 * 1024) / 2;

template <int R>
struct Shared {
  static constexpr int C = tokens_of<R>;
  char q[2][wide_bytes], k[2][wide_bytes], h[wide_bytes];
  char v[2][panel_bytes], weighed[panel_bytes];
  // R 4 and up: the reading half has its biases in registers, and the turns of a chunk lie here.
  static constexpr bool turns_here = R >= 4;
  float4 q_bias[turns_here ? 1 : R * 32], k_bias[turns_here ? 1 : R * 32];
  float4 turns[turns_here ? C * 16 : 1];                               // by turn_at
  float mimo_v[R * values], mimo_z[R * values], mimo_out[R * values];  // by projection_at
  ChunkSteps<C> steps[2];
  // Of two pairs, number `piece` of 16 a block: eight lanes with two neighbours each meet no bank
  // twice.
  template <int blocks>
  static __device__ __forceinline__ int turn_at(int t, int piece) {
    if constexpr (blocks == 1) return t * 16 + piece % 2 * 8 + piece / 2;
    return t * 32 + piece / 16 * 16 + piece % 2 * 8 + piece % 16 / 2;
  }
  // Those of two blocks lie where the values of the chunk will.
  template <int blocks>
  __device__ __forceinline__ float4* turns_of(int stage) {
    static_assert(C * 16 * blocks * sizeof(float4) <= panel_bytes || !turns_here);
    return blocks == 1 ? turns : reinterpret_cast<float4*>(v[stage]);
  }
  // Read from here: registers that they would take are spilled.
  Unit unit;                    // from the first chunk of the run on
  int first = 0, count = 0;     // chunks of the run
  const float* home = nullptr;  // the state before the run, or zeros
  float* left = nullptr;        // where the state behind it is left, or nowhere
  float* saved = nullptr;       // of the whole unit
  const float* turns_from = nullptr;
  const char* steps_from = nullptr;
  TokenHomes homes;
};
// A number of the state behind a stretch. Nothing stays nothing however states grow, and nothing is
// left of it behind a reset.
__device__ __forceinline__ float joined(float before, float decay, float own) {
  if (mutant(Mutant::m3_merge_out_of_order)) return before + decay * own;
  return (before == 0 || decay == 0 ? 0 : __fmul_rn(before, decay)) + own;
}

// Of stretches side by side: what those of the run add, how many are before the block's, by what
// the state before each is weighed behind it, and where the last leaves the one behind the run.
template <int R>
struct SharedAbreast : Shared<R> {
  const float* stretches = nullptr;
  int before = 0;
  float* next = nullptr;
  float decays[most_abreast];
};
// Of the blocks of a cluster, each with a part of N: the other's share of y has room, and has come.
template <int R>
struct SharedOfParts : Shared<R> {
  uint64_t has_room, has_come;
};

// Of stretches side by side: where a run leaves the state behind it, among the three of a unit.
__host__ __device__ constexpr int home_behind(int64_t run) { return run % 2 == 0 ? 1 : 2; }

// A line that is read soon.
__device__ __forceinline__ void fetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Turns of two pairs of the tokens of eight rows.
template <int R, int pairs>
struct EightTurns {
  uint4 of[8 / R];
  __device__ __forceinline__ explicit EightTurns(const float4* from) {
#pragma unroll
    for (int j = 0; j < 8 / R; ++j) of[j] = load_now(from + j * (pairs / 2));
  }
};

// Two pairs of eight rows of q and of k, of `known` tokens from t0 on: all are taken before the
// first is put back, behind which the compiler would leave them.
template <int R, bool halves, int pairs>
__device__ __forceinline__ void turn_eight(Shared<R>& sh, int stage, int t0, int known, int pp,
                                           const EightTurns<R, pairs>& turns) {
  TwoTurns by[8];
  bool live[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4& x = turns.of[i / R];
    by[i] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
             __uint_as_float(x.w)};
    live[i] = i / R < known;
  }
  // Rows of these tokens begin at a multiple of eight.
  const int place = place_of(0, halves ? 2 * pp : 4 * pp);
#pragma unroll 1
  for (int tile = 0; tile < 2; ++tile) {
    char* const rows_at = (tile == 0 ? sh.q : sh.k)[stage] + t0 * R * 128;
    const float4* const biases = (tile == 0 ? sh.q_bias : sh.k_bias) + pp;
    char* at[8];
    float4 bias[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      at[i] = rows_at + row_behind(place, i);
      bias[i] = biases[i % R * 32];
    }
    turn_all<halves, true>(at, live, bias, by);
  }
}

// Pairs that never turn, with their biases: a thread has four pairs of four rows, 16 rows apart,
// all taken before the first is put back.
template <int R, bool halves>
__device__ __forceinline__ void bias_tile(char* tile, int n, const float4* biases, int thread) {
  const int row = thread / 32 + thread % 32 / 8 * 4, lane = thread % 8;
  const float4* const from = biases + row % R * 32 + 16 + lane * 2;
  const float4 bias[2] = {from[0], from[1]};
  char* const at = tile + place_of(row, halves ? 32 + 4 * lane : 64 + 8 * lane);
  uint2 words[4][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (halves) {
      const uint2 x = *reinterpret_cast<const uint2*>(at + i * 2048);
      const uint2 y = *reinterpret_cast<const uint2*>(at + i * 2048 + panel_bytes);
      words[i][0] = {x.x, y.x}, words[i][1] = {x.y, y.y};
    } else {
      const uint4 x = *reinterpret_cast<const uint4*>(at + i * 2048);
      words[i][0] = {x.x, x.y}, words[i][1] = {x.z, x.w};
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float4 x = turned_words<halves, false>(words[i][e], bias[e], {});
      words[i][e] = {two_rounded(x.x, x.y), two_rounded(x.z, x.w)};
    }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if ((row + i * 16) / R >= n) continue;
    const uint2 x = words[i][0], y = words[i][1];
    if constexpr (halves) {
      *reinterpret_cast<uint2*>(at + i * 2048) = {x.x, y.x};
      *reinterpret_cast<uint2*>(at + i * 2048 + panel_bytes) = {x.y, y.y};
    } else {
      *reinterpret_cast<uint4*>(at + i * 2048) = {x.x, x.y, y.x, y.y};
    }
  }
}

// Four pairs of two rows of q and k, 16 rows apart, turned or biased alone; all of a tile taken
// before the first is put back, as above. at: of the first row and pair.
template <bool halves, bool turns>
__device__ __forceinline__ void turn_two(char* q, char* k, int at, const float4 (&q_bias)[2],
                                         const float4 (&k_bias)[2], const TwoTurns (&by)[2][2],
                                         const bool (&live)[2]) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    char* const own = (tile == 0 ? q : k) + at;
    const auto& bias = tile == 0 ? q_bias : k_bias;
    uint4 words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (halves) {
        const uint2 x = *reinterpret_cast<const uint2*>(own + i * 2048);
        const uint2 y = *reinterpret_cast<const uint2*>(own + i * 2048 + panel_bytes);
        words[i] = {x.x, y.x, x.y, y.y};
      } else {
        words[i] = *reinterpret_cast<const uint4*>(own + i * 2048);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x = turned_words<halves, turns>({words[i].x, words[i].y}, bias[0], by[i][0]);
      const float4 y = turned_words<halves, turns>({words[i].z, words[i].w}, bias[1], by[i][1]);
      words[i] = {two_rounded(x.x, x.y), two_rounded(x.z, x.w), two_rounded(y.x, y.y),
                  two_rounded(y.z, y.w)};
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!live[i]) continue;
      if constexpr (halves) {
        *reinterpret_cast<uint2*>(own + i * 2048) = {words[i].x, words[i].z};
        *reinterpret_cast<uint2*>(own + i * 2048 + panel_bytes) = {words[i].y, words[i].w};
      } else {
        *reinterpret_cast<uint4*>(own + i * 2048) = words[i];
      }
    }
  }
}

// Rows of a chunk by the reading half, R 4 and up: a thread has four pairs of either block of rows
// 16 apart, all of one r, whose biases it keeps.
template <int R, int blocks>
class OwnRows {
 public:
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks, step = 16 / R;  // tokens

  // From the places where read_bias has put them.
  __device__ __forceinline__ OwnRows(const float4* q_bias, const float4* k_bias, int thread)
      : row_(thread / 32 + thread % 32 / 8 * 4), lane_(thread % 8) {
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = row_ % R * 32 + 16 * b + lane_ * 2 + e;
        q_bias_[b][e] = q_bias[at], k_bias_[b][e] = k_bias[at];
      }
  }

  // turns: those of a part of N that has no pairs are biased alone.
  template <bool halves, bool turns>
  __device__ __forceinline__ void turn(Shared<R>& sh, int stage, int n, bool biased) const {
    const float4* const from = sh.template turns_of<blocks>(stage);
    char* const q = sh.q[stage];
    char* const k = sh.k[stage];
    const int t0 = row_ / R;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const bool live[2] = {t0 + i * step < n, t0 + (i + 1) * step < n};
      const auto block = [&](auto b) {
        const int at = place_of(row_, (halves ? 32 : 64) * b() + (halves ? 4 : 8) * lane_);
        TwoTurns by[2][2];
        constexpr bool turned = turns && b() < blocks;
        if constexpr (turned) {
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int t = t0 + (i + j) * step, piece = 16 * b() + 2 * lane_ + e;
              const float4 x = from[Shared<R>::template turn_at<blocks>(t, piece)];
              by[j][e] = {x.x, x.y, x.z, x.w};
            }
        }
        turn_two<halves, turned>(q, k, at + i * 2048, q_bias_[b()], k_bias_[b()], by, live);
      };
      if (turns || biased) block(std::integral_constant<int, 0>{});
      if ((turns && blocks == 2) || biased) block(std::integral_constant<int, 1>{});
    }
  }

 private:
  int row_, lane_;
  float4 q_bias_[2][2], k_bias_[2][2];
};
// Below it they lie in shared memory.
struct NoRows {
  __device__ __forceinline__ NoRows(const float4*, const float4*, int) {}
};

// Where biases lie, those of k behind those of q: as long as the kernel runs, or until the first
// values are weighed.
template <int R>
__device__ __forceinline__ float4* biases_of(Shared<R>& sh) {
  static_assert(!Shared<R>::turns_here || R * 32 * 2 * sizeof(float4) <= panel_bytes);
  return Shared<R>::turns_here ? reinterpret_cast<float4*>(sh.weighed) : sh.q_bias;
}

}  // namespace talea::mamba3::sm90::forward
