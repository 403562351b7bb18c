// What: what a walk keeps in shared memory, and how a chunk gets there.
// Why: one warpgroup copies for both: addresses are most of a copy, and its pairs turn last, if at
//      all, so that it has the time.
// Never: waits for a copy.
#pragma once

#include <cstddef>

#include "ops/mamba3/sm90/chain_columns.cuh"
#include "ops/mamba3/sm90/gate.cuh"

namespace talea::mamba3::sm90 {

inline constexpr int chain_threads = 256;

template <int R, int blocks>
struct ChainShared {
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks;
  // Of a chunk, and of those behind it.
  struct alignas(1024) Stage {  // tiles swap their pieces by address
    char rows[wide_bytes];
    uint4 z[C * 8];
    float2 turns[C * pairs];  // a token's pairs swap places, turn_at
    float by[C];              // key of each token, or e^L for E
    float whole;              // e^(L_C)
  };
  // A chunk is asked for one ahead, or two where two blocks have room for it.
  static constexpr int depth = 3 * sizeof(Stage) + 4 * panel_bytes <= 102 << 10 ? 3 : 2;
  Stage stages[depth];
  // By turns: the product of the chunk before may still read its own.
  char values_of[depth + 1][panel_bytes];
  float4 bias[R * 32];
  float mimo_v[R * values], mimo_z[R * values], mimo_out[R * values];
  Unit unit;
  __nv_bfloat16* to = nullptr;  // states of the first chunk as operands
  float* home = nullptr;        // E
  // Of the segment's first chunk.
  const float* turns_from = nullptr;
  const char* steps_from = nullptr;

  // Where a pair of a token lies: the tokens of eight rows, which a warp reads at once, meet no
  // bank twice.
  static __device__ __forceinline__ constexpr int turn_swap(int t) {
    return (R == 1 ? t % 8 / 2 : t % (8 / R)) << 2;
  }
  static __device__ __forceinline__ int turn_at(int t, int pair) {
    return t * pairs + (pair ^ turn_swap(t));
  }
};

// All but the last `count` committed copies are done.
template <int count>
__device__ __forceinline__ void copies_done_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(count) : "memory");
}

// Copies the chunks of a walk, one after another: by the threads of the second warpgroup.
template <int R, int blocks, bool upstream>
class ChunkSource {
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks, threads = 128;
  using Shared = ChainShared<R, blocks>;
  using Stage = typename Shared::Stage;
  static constexpr int z_pieces = C * 8, turn_pieces = C * pairs / 2, by_pieces = C / 4;
  static constexpr int turn_tokens = threads / (pairs / 2);  // of one copy by each thread
  static constexpr int64_t turn_bytes = C * pairs * 8, step_bytes = sizeof(ChunkSteps<C>);
  static_assert(turn_pieces % threads == 0 && by_pieces < threads);

 public:
  // From chunk `chunk` of the unit on, number `at` of its segment.
  __device__ __forceinline__ ChunkSource(const Args& a, const Cut& cut, const Unit& u,
                                         const Shared& sh, int chunk, int at) {
    const int thread = threadIdx.x % threads, row0 = thread / 16, narrow0 = thread / 8;
    const int64_t token = u.begin + int64_t{chunk} * C;
    const View& wide = upstream ? a.q : a.k;
    const View& v = upstream ? a.d_out : a.v;
    const int column = cut.own_column(part_of_columns(cut, u), thread % 16 * 8);
    has_column_ = cut.has(column);
    const int64_t row = cuda::at(wide, u.batch, token + row0 / R, 0, u.group) +
                        (R > 1 ? row0 % R * wide.stride[2] : 0) + column;
    rows_ = static_cast<const char*>(wide.data) + row * 2;
    const int first = first_value(cut, u), piece = thread % 8 * 8;
    const int r = upstream && !a.size.reduce ? narrow0 % R : 0;
    const int64_t value = upstream ? cuda::at(v, u.batch, token + narrow0 / R, r, u.head, first)
                                   : cuda::at(v, u.batch, token + narrow0 / R, u.head, first);
    narrow_ = static_cast<const char*>(v.data) + (value + piece) * 2;
    z_ = static_cast<const char*>(a.z.data) +
         (cuda::at(a.z, u.batch, token + thread % z_pieces / 8, u.head, first) + piece) * 2;
    turns_ = reinterpret_cast<const char*>(sh.turns_from) + at * turn_bytes + thread * 16;
    steps_ = sh.steps_from + at * step_bytes +
             (thread >= by_pieces
                  ? offsetof(ChunkSteps<C>, whole)
                  : (upstream ? offsetof(ChunkSteps<C>, left) : offsetof(ChunkSteps<C>, key)) +
                        thread * 16);
    row_bytes_ = wide.stride[1] * 2, narrow_bytes_ = v.stride[1] * 2, z_bytes_ = a.z.stride[1] * 2;
    rows_to_ = place_of(row0, thread % 16 * 8);
    narrow_to_ = place_of(narrow0, piece);
    turns_to_ = Shared::turn_at(thread / (pairs / 2), thread % (pairs / 2) * 2) * 8;
    pieces_ = !upstream || Upstream(a).pieces;
    gated_ = upstream && a.z.data;
  }
  // Whether rows of values are copied: not where eight neighbours are not one load.
  __device__ __forceinline__ bool pieces() const { return pieces_; }

  // One chunk, of n tokens, its values into `tile`; the next call has the one behind it, or before
  // it for E.
  __device__ __forceinline__ void copy(Stage& to, char* tile, int n) {
    if (n == C && has_column_)
      copy_chunk<true>(to, tile, n);
    else
      copy_chunk<false>(to, tile, n);
    constexpr int by = upstream ? -1 : 1;
    rows_ += by * C * row_bytes_, narrow_ += by * C * narrow_bytes_, z_ += by * C * z_bytes_;
    turns_ += by * turn_bytes, steps_ += by * step_bytes;
  }

 private:
  // Rows behind the last token are zeros; whole: there are none.
  template <bool whole>
  __device__ __forceinline__ void copy_chunk(Stage& to, char* tile, int n) const {
    const int thread = threadIdx.x % threads;
    const auto base = static_cast<uint32_t>(hopper::smem_address(&to));
    const auto copy = [&](size_t part, int at, const char* from, bool present) {
      hopper::copy_16_bytes(base + static_cast<uint32_t>(part) + static_cast<uint32_t>(at), from,
                            whole || present);
    };
    const int rows_n = has_column_ ? n : 0;
    const char* at = rows_;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      copy(offsetof(Stage, rows), rows_to_ + i * 1024, at, thread / 16 / R + i * (8 / R) < rows_n);
      at += 8 / R * row_bytes_;
    }
    if (pieces_) {
      const auto narrow_to = hopper::smem_address(tile) + static_cast<uint32_t>(narrow_to_);
      at = narrow_;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        hopper::copy_16_bytes(narrow_to + static_cast<uint32_t>(i * 2048), at,
                              whole || thread / 8 / R + i * (16 / R) < n);
        at += 16 / R * narrow_bytes_;
      }
    }
    if (gated_) {
      at = z_;
#pragma unroll
      for (int i = 0; i < (z_pieces + threads - 1) / threads; ++i) {
        const int item = thread % z_pieces + i * threads;
        copy(offsetof(Stage, z), item * 16, at, item / 8 < n);
        at += threads / 8 * z_bytes_;
      }
    }
#pragma unroll
    for (int i = 0; i < turn_pieces / threads; ++i) {
      // Swapped by the token's place among eight rows; no carry.
      const int t = i * turn_tokens;
      copy(offsetof(Stage, turns), (turns_to_ ^ Shared::turn_swap(t) * 8) + t * pairs * 8,
           turns_ + i * threads * 16, true);
    }
    copy_where(thread <= by_pieces,
               base + static_cast<uint32_t>(offsetof(Stage, by) + static_cast<size_t>(thread) * 16),
               steps_);
  }

  const char *rows_, *narrow_, *z_, *turns_, *steps_;
  int64_t row_bytes_, narrow_bytes_, z_bytes_;  // of a token
  int rows_to_, narrow_to_, turns_to_;
  bool has_column_, pieces_, gated_;
};

}  // namespace talea::mamba3::sm90
