// What: how a state walks from chunk to chunk: h to the last, E to the first, in registers.
// Why: what a chunk adds is a product of its rows with its weighed values. A warpgroup has half of
//      the pairs of columns; it turns their rows in registers, as the left operand of that product,
//      so turned rows are never stored.
// Never: knows what the states are for, or forms a turn or a step.
#pragma once

#include "ops/mamba3/sm90/chain_source.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves>
class Chain {
 public:
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks;
  using Shared = ChainShared<R, blocks>;
  static_assert(sizeof(Shared) <= 113 << 10 || blocks > 1);

  // first: chunk of the unit with which the segment begins.
  __device__ __forceinline__ Chain(const Args& args, const Cut& of, Shared& shared, int first)
      : a(args), cut(of), u(shared.unit), sh(shared), segment(first) {}

  // Ahead of a walk, which waits for them; as launch_parameters has written them. Behind a barrier:
  // what a thread has put into `shared` is seen by all.
  __device__ __forceinline__ void ask_parameters(const float* head_parameters, bool upstream) {
    const float* const from =
        head_parameters + number_of(cut, u) * cuda::head_parameter_count(R, columns, values);
    const int thread = threadIdx.x;
    copy_bytes<R * columns * 4, chain_threads>(from + (upstream ? 0 : R * columns), sh.bias,
                                               thread);
    copy_bytes<3 * R * values * 4, chain_threads>(from + 2 * R * columns, sh.mimo_v, thread);
    copies_commit();
    __syncthreads();
  }

  // Over chunks [first, end), from the last on for E. to: where the state ahead of the first of
  // them goes as an operand, those of the others behind it; or null.
  template <bool upstream>
  __device__ __forceinline__ void walk(float (&h)[32], int first, int end, __nv_bfloat16* to) {
    const int tokens = static_cast<int>(u.tokens), step = upstream ? -1 : 1;
    int chunk = upstream ? end - 1 : first;
    const auto known = [&](int of) {
      const int rest = tokens - of * C;
      return rest < C ? rest : C;
    };
    ChunkSource<R, blocks, upstream> source(a, cut, u, sh, chunk, chunk - segment);
    constexpr int depth = Shared::depth, ahead = depth - 1;
    const bool copies = threadIdx.x >= 128;
    if (copies) source.copy(sh.stages[0], sh.values_of[0], known(chunk));
    copies_commit();
    copies_done_but<1>();
    __syncthreads();  // the parameters, while the first chunk is under way
    if (depth > 2) {
      if (copies && end - first > 1)
        source.copy(sh.stages[1], sh.values_of[1], known(chunk + step));
      copies_commit();
    }
    const Bias bias(sh);
    const Values<upstream> own_values(*this);
    const char* const tile = sh.stages[0].rows + place_of(threadIdx.x / 16, threadIdx.x % 16 * 8);
    if (to) to += int64_t{chunk - first} * (columns * values) + threadIdx.x * 8;
    // Kept from chunk to chunk.
    const int place = formed_anew(own.place());
    const int turns_at = formed_anew(Shared::turn_at(own.value / R, own.pair));
    // Chunk i of the walk is there, its rows in stage `at`, its values in `slot`; the one that is
    // `ahead` of it is asked for.
    int at = 0, slot = 0;
    const auto begin = [&](int i) {
      copies_done_but<depth - 2>();
      __syncthreads();  // the stage before has been read as well
      if (copies && i + ahead < end - first)
        source.copy(sh.stages[behind<depth>(at, ahead)],
                    sh.values_of[behind<depth + 1>(slot, ahead)], known(chunk + ahead * step));
      copies_commit();
      own_values.put(sh.stages[at], sh.values_of[slot], known(chunk), chunk, source.pieces());
      hopper::fence_async_shared();
    };
    begin(0);
#pragma unroll 1
    for (int i = 0; i < end - first; ++i) {
      const int n = known(chunk);
      auto& stage = sh.stages[at];
      uint32_t turned[4][4];
      if (blocks == 2 || threadIdx.x < 128)
        turn_rows<true>(stage, place, turns_at, bias, turned);
      else
        turn_rows<false>(stage, place, turns_at, bias, turned);
      if (n < C) keep_rows(n, turned);
      if (to) {
        // A warp has read all that it needs of its columns: the state takes their place.
        __syncwarp();
        own.put_rounded(stage.rows, place, h);
      }
      scale_state(h, stage.whole);
      __syncthreads();
      products_begin(h);
      registers_by_columns<64>(h, turned, Operand(sh.values_of[slot]));
      hopper::warpgroup_commit();
      if (to) {
        store_tile(tile + at * sizeof(Stage), to);
        to += step * (columns * values);
      }
      // Under the product.
      chunk += step;
      at = behind<depth>(at, 1), slot = behind<depth + 1>(slot, 1);
      if (i + 1 < end - first) begin(i + 1);
      hopper::warpgroup_wait<0>();
      hopper::hold_registers(h);
    }
  }
  // The state behind a walk as an operand.
  __device__ __forceinline__ void put_last(const float (&h)[32], __nv_bfloat16* to) {
    char* const tile = sh.stages[0].rows;
    __syncthreads();
    own.put_rounded(tile, own.place(), h);
    __syncthreads();
    store_tile(tile + place_of(threadIdx.x / 16, threadIdx.x % 16 * 8), to + threadIdx.x * 8);
  }

  const Columns<halves> own;

 private:
  using Stage = typename Shared::Stage;

  // The place `on` behind `at`, of `count` that are taken by turns.
  template <int count>
  static __device__ __forceinline__ int behind(int at, int on) {
    return at + on >= count ? at + on - count : at + on;
  }

  // A tile of 64 rows of 128 columns to memory, row by row; the thread's first piece of either.
  static __device__ __forceinline__ void store_tile(const char* tile, __nv_bfloat16* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      __stcg(reinterpret_cast<uint4*>(to) + i * chain_threads,
             *reinterpret_cast<const uint4*>(tile + i * (16 * 128)));
  }

  // Of the two columns of the lane's pair, of its rows 2 (lane % 4) and the next of each eight.
  struct Bias {
    float first[2], second[2];
    __device__ __forceinline__ explicit Bias(const Shared& sh) {
      const Columns<halves> own;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto* const at =
            reinterpret_cast<const float*>(&sh.bias[(own.value + i) % R * 32 + own.pair / 2]);
        const int column = (own.pair & 1) * (halves ? 1 : 2);
        first[i] = at[column], second[i] = at[column + (halves ? 2 : 1)];
      }
    }
  };

  // Rows of the warp's columns as left operands: `to[k]` of rows 16 k and on, biased and turned.
  template <bool turns>
  __device__ __forceinline__ void turn_rows(const Stage& from, int place, int turns_place,
                                            const Bias& bias, uint32_t (&to)[4][4]) const {
    const float2* const turns_at = from.turns + turns_place;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      // [first or second column][rows, and those eight on]: two rows a word.
      uint32_t raw[2][2];
      if constexpr (halves) {
        uint32_t x[4];
        hopper::load_matrix_x4_transposed(x, from.rows + place + k * 2048);
        raw[0][0] = x[0], raw[1][0] = x[1], raw[0][1] = x[2], raw[1][1] = x[3];
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const char* const at = from.rows + (2 * k + i) * 1024;
          const uint32_t even = *reinterpret_cast<const uint32_t*>(at + place);
          const uint32_t odd = *reinterpret_cast<const uint32_t*>(at + row_behind(place, 1));
          raw[0][i] = __byte_perm(even, odd, 0x5410), raw[1][i] = __byte_perm(even, odd, 0x7632);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x[2], y[2];  // of the two rows
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          x[e] = (e ? high_of(raw[0][i]) : low_of(raw[0][i])) + bias.first[e];
          y[e] = (e ? high_of(raw[1][i]) : low_of(raw[1][i])) + bias.second[e];
        }
        if constexpr (turns) {
          const float2* const at = turns_at + (16 * k + 8 * i) / R * pairs;
          const bool apart = R == 1 && !mutant(ScanMutant::m3_state_turned_by_two_rows);
          const float2 by[2] = {at[0], at[apart ? pairs : 0]};
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float first = x[e], second = y[e];
            x[e] = first * by[e].x - second * by[e].y;
            y[e] = first * by[e].y + second * by[e].x;
          }
        }
        to[k][2 * i] = two_rounded(x[0], x[1]);
        to[k][2 * i + 1] = two_rounded(y[0], y[1]);
      }
    }
  }
  // Zeros behind the last token.
  __device__ __forceinline__ void keep_rows(int n, uint32_t (&x)[4][4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 16 * k + 8 * i + own.value;
        const uint32_t keep = (row / R < n ? 0xffffu : 0u) | ((row + 1) / R < n ? 0xffff0000u : 0u);
        x[k][2 * i] &= keep, x[k][2 * i + 1] &= keep;
      }
  }

  // Eight values of two rows: projected and by key of their token, or rows of d_out through the
  // gate by e^L; in place where they have been copied.
  template <bool upstream>
  struct Values {
    const Chain& c;
    int row0, at, z_at;
    float by_value[8], by_z[upstream ? 8 : 1];

    __device__ __forceinline__ explicit Values(const Chain& of) : c(of) {
      const int piece = threadIdx.x % 8;
      row0 = threadIdx.x / 8, at = place_of(row0, piece * 8);
      z_at = row0 / R * 8 + piece;
      const int r = row0 % R, column = piece * 8;
      if constexpr (upstream)
        take_projection(c.sh.mimo_out, r, column, by_value),
            take_projection(c.sh.mimo_z, r, column, by_z);
      else
        take_projection(c.sh.mimo_v, r, column, by_value);
    }
    // pieces: they have been copied.
    __device__ __forceinline__ void put(const Stage& from, char* tile, int n, int chunk,
                                        bool pieces) const {
      if (upstream && !pieces) return put_apart(from, tile, n, chunk);
      if (upstream && c.a.z.data)
        put_copied<true>(from, tile);
      else
        put_copied<false>(from, tile);
      if (n < C) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (row0 / R + i * (32 / R) >= n)
            *reinterpret_cast<uint4*>(tile + at + i * 4096) = {0, 0, 0, 0};
      }
    }

   private:
    template <bool gates>
    __device__ __forceinline__ void put_copied(const Stage& from, char* tile) const {
      // All loads ahead of the first store, behind which the compiler would leave them.
      uint4 own[2], z[2];
      float by[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        own[i] = *reinterpret_cast<const uint4*>(tile + at + i * 4096);
        const int behind = mutant(ScanMutant::m3_state_weighed_by_halves) ? 0 : i * (32 / R);
        by[i] = from.by[row0 / R + behind];
        if (gates) z[i] = from.z[z_at + i * (32 / R) * 8];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x[8];
        eight_of(own[i], x);
        project<gates>(z[i], x);
        own[i] = weighed(by[i], x);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) *reinterpret_cast<uint4*>(tile + at + i * 4096) = own[i];
    }
    // Of d_out where eight neighbours are not one load.
    __device__ __forceinline__ void put_apart(const Stage& from, char* tile, int n,
                                              int chunk) const {
      const View& v = c.a.d_out;
      const int first = first_value(c.cut, c.u) + threadIdx.x % 8 * 8;
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const int t = row0 / R + i * (32 / R);
        uint4 own = {0, 0, 0, 0};
        if (t < n) {
          const int64_t home = cuda::at(v, c.u.batch, c.u.begin + int64_t{chunk} * C + t,
                                        c.a.size.reduce ? 0 : row0 % R, c.u.head, first);
          float x[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) x[j] = v.data ? cuda::read(v, home + j * v.stride[4]) : 0.0f;
          if (c.a.z.data)
            project<true>(from.z[z_at + i * (32 / R) * 8], x);
          else
            project<false>({}, x);
          own = weighed(from.by[t], x);
        }
        *reinterpret_cast<uint4*>(tile + at + i * 4096) = own;
      }
    }
    static __device__ __forceinline__ void eight_of(const uint4& from, float (&x)[8]) {
      const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = j & 1 ? high_of(words[j / 2]) : low_of(words[j / 2]);
    }
    static __device__ __forceinline__ uint4 weighed(float by, const float (&x)[8]) {
      return {two_rounded(by * x[0], by * x[1]), two_rounded(by * x[2], by * x[3]),
              two_rounded(by * x[4], by * x[5]), two_rounded(by * x[6], by * x[7])};
    }
    template <bool gates>
    __device__ __forceinline__ void project(const uint4& z, float (&x)[8]) const {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] *= by_value[j];
      if constexpr (gates) {
        float w[8];
        eight_of(z, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) w[j] *= by_z[j], x[j] *= w[j] * gate_sigmoid(w[j]);
      }
    }
  };

  const Args& a;
  const Cut& cut;
  const Unit& u;
  Shared& sh;
  const int segment;
};

}  // namespace talea::mamba3::sm90
