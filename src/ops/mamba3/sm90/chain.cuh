// What: how a state walks from chunk to chunk: h to the last, E to the first, in registers.
// Why: what a chunk adds does not depend on the state: a warpgroup turns the rows of a chunk while
//      another weighs the values of the one before and adds their product to the state that it
//      holds.
// Never: knows what the states are for, or forms a turn or a step.
#pragma once

#include "ops/mamba3/sm90/gate.cuh"

namespace talea::mamba3::sm90 {

inline constexpr int chain_threads = 256;

template <int R, int blocks>
struct ChainShared {
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks;
  // Of a chunk, and of the one behind it.
  struct alignas(1024) Stage {  // tiles swap their pieces by address
    char rows[wide_bytes], weighed[panel_bytes];
    uint4 z[C * 8];
    float2 turns[C * pairs];
    ChunkSteps<C> steps;
  } stages[2];
  static_assert(sizeof(stages) <= 110 << 10 || blocks > 1);
  float4 bias[R * 32];
  float mimo_v[R * values], mimo_z[R * values], mimo_out[R * values];
  // Read from here: registers that they would take are spilled.
  Unit unit;
  __nv_bfloat16* to = nullptr;  // states of the first chunk as operands
  float* home = nullptr;        // E
  // Of the segment's first chunk.
  const float* turns_from = nullptr;
  const char* steps_from = nullptr;
};

// As operands: neighbouring lanes swap, so that each has eight bytes of a row, and a quad 32.
__device__ __forceinline__ void put_rounded(__nv_bfloat16* to, const float (&h)[64]) {
  const bool odd = threadIdx.x & 1;
  const int row = own_row(), pair = threadIdx.x & 2;
  __nv_bfloat16* const own = to + formed_anew(row * columns + pair * 2 + (odd ? 8 : 0));
#pragma unroll
  for (int j = 0; j < 16; j += 2)
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int at = 4 * j + 2 * second;
      const uint32_t low = two_rounded(h[at], h[at + 1]);
      const uint32_t high = two_rounded(h[at + 4], h[at + 5]);
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
      *reinterpret_cast<uint2*>(own + second * 8 * columns + 8 * j) =
          odd ? uint2{other, high} : uint2{low, other};
    }
}

template <int R, int blocks, bool halves>
class Chain {
 public:
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks;
  using Shared = ChainShared<R, blocks>;

  // first: chunk of the unit with which the segment begins.
  __device__ __forceinline__ Chain(const Args& args, const Cut& of, Shared& shared, int first)
      : a(args),
        cut(of),
        u(shared.unit),
        sh(shared),
        thread(threadIdx.x & 127),
        segment(first),
        tokens(static_cast<int>(shared.unit.tokens)) {}

  // All threads, ahead of a walk; as launch_parameters has written them.
  __device__ __forceinline__ void read_parameters(const float* head_parameters, bool upstream) {
    const float* const from =
        head_parameters + number_of(cut, u) * cuda::head_parameter_count(R, columns, values);
    const int all = threadIdx.x;
    copy_bytes<R * columns * 4, chain_threads>(from + (upstream ? 0 : R * columns), sh.bias, all);
    copy_bytes<3 * R * values * 4, chain_threads>(from + 2 * R * columns, sh.mimo_v, all);
    copies_done();
    __syncthreads();
  }

  // The warpgroup that holds the state: over chunks [first, end), from the last on for E;
  // before(i, h) ahead of the i-th.
  template <bool upstream, class Before>
  __device__ __forceinline__ void add(float (&h)[64], int first, int end, Before before) {
    const View& narrow = upstream ? a.d_out : a.v;
    const int c = first_value(cut, u);
    const int64_t z_home = cuda::at(a.z, u.batch, u.begin, u.head, c);
    const int64_t narrow_home = upstream ? cuda::at(a.d_out, u.batch, u.begin, 0, u.head, c)
                                         : cuda::at(a.v, u.batch, u.begin, u.head, c);
    const bool pieces = !upstream || Upstream(a).pieces;
    const int64_t by_rank = upstream && !a.size.reduce ? a.d_out.stride[2] : 0;
    const int count = end - first;
    const auto begin = [&](int i) {
      const int chunk = upstream ? end - 1 - i : first + i, n = tokens_in(chunk);
      const int64_t token = int64_t{chunk} * C;
      const int thread = formed_anew(this->thread);
      auto& to = sh.stages[i & 1];
      if (pieces)
        copy_narrow(narrow, narrow_home + token * narrow.stride[1], by_rank, n, to.weighed, thread);
      if (upstream && a.z.data)
        copy_pieces(a.z, z_home + token * a.z.stride[1], a.z.stride[1], n, to.z, thread);
      copy_bytes<sizeof(ChunkSteps<C>), 128>(
          sh.steps_from + (chunk - segment) * static_cast<int64_t>(sizeof(ChunkSteps<C>)),
          &to.steps, thread);
      copies_commit();
    };
    begin(0);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int stage = i & 1, chunk = upstream ? end - 1 - i : first + i;
      auto& tiles = sh.stages[stage];
      before(i, h);
      if (i + 1 < count) {
        begin(i + 1);
        copies_done_but_one();
      } else {
        copies_done();
      }
      hopper::named_barrier_sync(adding, 128);
      if constexpr (upstream)
        put_gated(tiles, tokens_in(chunk), pieces,
                  narrow_home + int64_t{chunk} * C * narrow.stride[1], by_rank);
      else
        put_values(tiles, tokens_in(chunk));
      hopper::fence_async_shared();
      hopper::named_barrier_sync(full + stage, 256);
      scale_state(h, tiles.steps.whole);
      products_begin(h);
      columns_by_columns<128>(h, Operand(tiles.weighed), Operand(tiles.rows));
      products_end(h);
      if (i + 2 < count) hopper::named_barrier_arrive(empty + stage, 256);
      // Its tiles are copied anew behind a barrier of all four warps.
      hopper::named_barrier_sync(adding, 128);
    }
  }

  // The warpgroup that turns rows of the same chunks.
  template <bool upstream>
  __device__ __forceinline__ void turn(int first, int end) {
    const View& from = upstream ? a.q : a.k;
    const int64_t home = cuda::at(from, u.batch, u.begin, 0, u.group);
    const int count = end - first;
    const auto begin = [&](int i) {
      const int chunk = upstream ? end - 1 - i : first + i;
      const int thread = formed_anew(this->thread);
      auto& to = sh.stages[i & 1];
      copy_rows<R, 128>(from, cut, part_of_columns(cut, u),
                        home + int64_t{chunk} * C * from.stride[1], tokens_in(chunk), to.rows,
                        thread);
      copy_bytes<C * pairs * 8, 128>(sh.turns_from + int64_t{chunk - segment} * (C * pairs * 2),
                                     to.turns, thread);
      copies_commit();
    };
    begin(0);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i + 1 < count) {
        if (i > 0) hopper::named_barrier_sync(empty + ((i + 1) & 1), 256);
        begin(i + 1);
        copies_done_but_one();
      } else {
        copies_done();
      }
      hopper::named_barrier_sync(turning, 128);
      turn_rows(sh.stages[i & 1], tokens_in(upstream ? end - 1 - i : first + i),
                upstream ? a.q_bias.data : a.k_bias.data);
      hopper::fence_async_shared();
      hopper::named_barrier_arrive(full + (i & 1), 256);
    }
  }

 private:
  enum Barrier { full = 1, empty = 3, adding = 5, turning = 6 };  // full and empty by stage
  using Stage = typename Shared::Stage;

  __device__ __forceinline__ int tokens_in(int chunk) const {
    const int rest = tokens - chunk * C;
    return rest < C ? rest : C;
  }
  // [C, 8] pieces of rows `apart` elements apart, zeros behind the last token.
  __device__ __forceinline__ void copy_pieces(const View& from, int64_t home, int64_t apart, int n,
                                              uint4* to, int thread) {
    constexpr int items = C * 8;
    const auto* const at = static_cast<const __nv_bfloat16*>(from.data) + home + thread % 8 * 8;
#pragma unroll
    for (int i = 0; i < (items + 127) / 128; ++i) {
      // No branch: of fewer pieces than threads some are copied twice.
      const int item = items < 128 ? thread % items : thread + i * 128, t = item / 8;
      hopper::copy_16_bytes(hopper::smem_address(to + item), at + (t < n ? t * apart : 0), t < n);
    }
  }
  // Rows (token, r) of 64 columns into the narrow tile.
  __device__ __forceinline__ void copy_narrow(const View& from, int64_t home, int64_t by_rank,
                                              int n, char* tile, int thread) {
    const int row0 = thread / 8;
    const auto* const at =
        static_cast<const __nv_bfloat16*>(from.data) + home + thread % 8 * 8 + row0 % R * by_rank;
    const uint32_t to =
        hopper::smem_address(tile) + static_cast<uint32_t>(place_of(row0, thread % 8 * 8));
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) {
      const int t = (row0 + 16 * i) / R;
      hopper::copy_16_bytes(to + static_cast<uint32_t>(i * 2048),
                            at + (t < n ? t * from.stride[1] : 0), t < n);
    }
  }
  // A thread has two pairs of some tokens, and two that no pair turns.
  __device__ __forceinline__ void turn_rows(Stage& to, int n, bool biased) {
    constexpr int each = C / 8;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const bool turned = block < blocks;
      if (!turned && !biased) break;
      const int pp = (thread & 15) + 16 * block;
      if constexpr (R == 8) {
        turn_token(to, n, pp, turned);
        continue;
      }
      constexpr int together = R < 4 ? 4 / R : 1;  // tokens
      float4 bias[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) bias[i] = sh.bias[i % R * 32 + pp];
#pragma unroll 1
      for (int j = 0; j < each; j += together) {
        const int t0 = (thread >> 4) * each + j;
        if (t0 >= n) break;
        TwoTurns by[4];
        char* at[4];
        bool live[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int t = t0 + i / R;
          if (turned) {
            const float4 x = *reinterpret_cast<const float4*>(to.turns + t * pairs + 2 * pp);
            by[i] = {x.x, x.y, x.z, x.w};
          }
          at[i] = to.rows + row_behind(place_of(t * R, halves ? 2 * pp : 4 * pp), i % R);
          live[i] = t < n;
        }
        if (turned)
          turn_all<halves, true>(at, live, bias, by);
        else
          turn_all<halves, false>(at, live, bias, by);
      }
    }
  }
  // The same of a token of eight rows, four at a time.
  __device__ __forceinline__ void turn_token(Stage& to, int n, int pp, bool turned) {
    const int t = thread >> 4;
    if (t >= n) return;
    TwoTurns by[4];
    bool live[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (turned) {
        const float4 x = *reinterpret_cast<const float4*>(to.turns + t * pairs + 2 * pp);
        by[i] = {x.x, x.y, x.z, x.w};
      }
      live[i] = true;
    }
    const int place = place_of(t * R, halves ? 2 * pp : 4 * pp);
#pragma unroll 1
    for (int r = 0; r < R; r += 4) {
      char* at[4];
      float4 bias[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        at[i] = to.rows + row_behind(place, r + i);
        bias[i] = sh.bias[(r + i) * 32 + pp];
      }
      if (turned)
        turn_all<halves, true>(at, live, bias, by);
      else
        turn_all<halves, false>(at, live, bias, by);
    }
  }
  // Projected rows by key of each token, in place.
  __device__ __forceinline__ void put_values(Stage& to, int n) {
    const int row0 = thread / 8, c = thread % 8 * 8;
    float by_v[8];
    take_eight(sh.mimo_v + row0 % R * values + c, by_v);
    // All loads ahead of the first store, behind which the compiler would leave them.
    uint4 all[rows / 16];
    float by[rows / 16];
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) {
      const int row = row0 + 16 * i;
      all[i] = *reinterpret_cast<const uint4*>(to.weighed + place_of(row, c));
      by[i] = to.steps.key[row / R];
    }
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) {
      const int row = row0 + 16 * i;
      const uint32_t words[4] = {all[i].x, all[i].y, all[i].z, all[i].w};
      uint32_t scaled[4] = {0, 0, 0, 0};
      if (row / R < n) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float x = low_of(words[w]) * by_v[2 * w], y = high_of(words[w]) * by_v[2 * w + 1];
          scaled[w] = two_rounded(by[i] * x, by[i] * y);
        }
      }
      *reinterpret_cast<uint4*>(to.weighed + place_of(row, c)) = {scaled[0], scaled[1], scaled[2],
                                                                  scaled[3]};
    }
  }
  // Rows of d_out through the gate by e^L of each token, in place where they have been copied.
  __device__ __forceinline__ void put_gated(Stage& to, int n, bool pieces, int64_t up_home,
                                            int64_t up_rank) {
    const int row0 = thread / 8, c = thread % 8 * 8, r = row0 % R;
    float by_out[8], by_z[8];
    take_eight(sh.mimo_out + r * values + c, by_out);
    take_eight(sh.mimo_z + r * values + c, by_z);
#pragma unroll 1
    for (int first = row0; first < rows; first += 32) {
      uint4 all[2], zs[2] = {};
      float left[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first + 16 * i, t = row / R;
        if (pieces) all[i] = *reinterpret_cast<const uint4*>(to.weighed + place_of(row, c));
        if (a.z.data) zs[i] = to.z[t * 8 + thread % 8];
        left[i] = to.steps.left[t];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = (first + 16 * i) / R;
        float x[8];
        if (pieces) {
          const uint32_t words[4] = {all[i].x, all[i].y, all[i].z, all[i].w};
#pragma unroll
          for (int j = 0; j < 8; ++j) x[j] = j & 1 ? high_of(words[j / 2]) : low_of(words[j / 2]);
        } else {
          const int64_t from =
              up_home + t * a.d_out.stride[1] + r * up_rank + c * a.d_out.stride[4];
#pragma unroll
          for (int j = 0; j < 8; ++j)
            x[j] = a.d_out.data && t < n ? cuda::read(a.d_out, from + j * a.d_out.stride[4]) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= by_out[j];
        if (a.z.data) {
          const uint32_t words[4] = {zs[i].x, zs[i].y, zs[i].z, zs[i].w};
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float w = (j & 1 ? high_of(words[j / 2]) : low_of(words[j / 2])) * by_z[j];
            x[j] *= w * gate_sigmoid(w);
          }
        }
        const float by = left[i];
        all[i] = {0, 0, 0, 0};
        if (t < n)
          all[i] = {two_rounded(by * x[0], by * x[1]), two_rounded(by * x[2], by * x[3]),
                    two_rounded(by * x[4], by * x[5]), two_rounded(by * x[6], by * x[7])};
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint4*>(to.weighed + place_of(first + 16 * i, c)) = all[i];
    }
  }

  const Args& a;
  const Cut& cut;
  const Unit& u;
  Shared& sh;
  const int thread, segment, tokens;
};

}  // namespace talea::mamba3::sm90
