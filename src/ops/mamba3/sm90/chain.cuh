// What: how a state walks from chunk to chunk: h to the last, E to the first, in registers.
// Why: two warpgroups share the rows and have half of the state's columns each; what a chunk needs
//      is under way while the chunk before is at work.
// Never: knows what the states are for, or forms a turn or a step.
#pragma once

#include "ops/mamba3/sm90/gate.cuh"

namespace talea::mamba3::sm90 {

inline constexpr int chain_threads = 256;

template <int R, int blocks>
struct ChainShared {
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks;
  char rows[2][wide_bytes], weighed[panel_bytes];
  uint4 v[2][C * 8], up[2][C * 8];  // rows of v or of z, rows of d_out
  float2 turns[2][C * pairs];
  ChunkSteps<C> steps[2];
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

// Half a state: columns 64 w and on, of warpgroup w.
template <class F>
__device__ __forceinline__ void each_of_half(float (&h)[32], F f) {
  const int panel = threadIdx.x / 128 * 64;
  each_two(h, [&](int p, int n, float& x, float& y) { f(p, panel + n, x, y); });
}
__device__ __forceinline__ void take_half(const float* from, float (&h)[32]) {
  each_of_half(h, [&](int p, int n, float& x, float& y) {
    const float2 both = *reinterpret_cast<const float2*>(from + p * columns + n);
    x = both.x, y = both.y;
  });
}
__device__ __forceinline__ void put_half(float* to, float (&h)[32]) {
  each_of_half(h, [&](int p, int n, float x, float y) {
    *reinterpret_cast<float2*>(to + p * columns + n) = {x, y};
  });
}
__device__ __forceinline__ void put_half_rounded(void* to, float (&h)[32]) {
  auto* const tile = static_cast<__nv_bfloat16*>(to);
  each_of_half(h, [&](int p, int n, float x, float y) {
    *reinterpret_cast<uint32_t*>(tile + p * columns + n) = two_rounded(x, y);
  });
}

template <int R, int blocks, bool halves>
class Chain {
 public:
  static constexpr int C = tokens_of<R>, threads = chain_threads, pairs = 32 * blocks;
  static constexpr int size = columns * values;
  using Shared = ChainShared<R, blocks>;

  // first: chunk of the unit with which the segment begins.
  __device__ __forceinline__ Chain(const Args& args, Shared& shared, int first)
      : a(args),
        u(shared.unit),
        sh(shared),
        thread(threadIdx.x),
        segment(first),
        tokens(static_cast<int>(shared.unit.tokens)) {}

  // h over chunks [first, end); before(chunk) ahead of each.
  template <class Before>
  __device__ __forceinline__ void forward(float (&h)[32], int first, int end, Before before) {
    if (first >= end) return;
    read_bias<R>(a.k_bias, u.head, halves, sh.bias, thread, threads);
    read_projection<R>(a.mimo_v, u.head, sh.mimo_v, thread, threads);
    const int64_t rows_home = cuda::at(a.k, u.batch, u.begin, 0, u.group);
    const int64_t v_home = cuda::at(a.v, u.batch, u.begin, u.head);
    const auto begin = [&](int chunk, int stage) {
      const int n = tokens_in(chunk);
      copy_rows<R, threads>(a.k, rows_home + int64_t{chunk} * C * a.k.stride[1], n, sh.rows[stage],
                            thread);
      copy_pieces(a.v, v_home + int64_t{chunk} * C * a.v.stride[1], a.v.stride[1], n, sh.v[stage]);
      copy_tokens(chunk, stage);
    };
    begin(first, 0);
    __syncthreads();
    take_biases();
    float by_v[ranks][8];
#pragma unroll
    for (int i = 0; i < ranks; ++i)
      take_eight(sh.mimo_v + rank(i) * values + thread % 8 * 8, by_v[i]);
#pragma unroll 1
    for (int chunk = first; chunk < end; ++chunk) {
      const int stage = (chunk - first) & 1;
      copies_done();
      __syncthreads();
      if (chunk + 1 < end) begin(chunk + 1, stage ^ 1);
      before(chunk, h);
      const int n = tokens_in(chunk);
      turn_rows(n, stage, a.k_bias.data);
      put_values(n, stage, by_v);
      add_product(h, stage);
    }
  }

  // E from behind chunk end - 1 to before chunk `first`; behind(chunk) with E behind it.
  template <class Behind>
  __device__ __forceinline__ void backward(float (&e)[32], int first, int end, Behind behind) {
    if (first >= end) return;
    read_bias<R>(a.q_bias, u.head, halves, sh.bias, thread, threads);
    read_projection<R>(a.mimo_z, u.head, sh.mimo_z, thread, threads);
    read_projection<R>(a.mimo_out, u.head, sh.mimo_out, thread, threads);
    const int64_t rows_home = cuda::at(a.q, u.batch, u.begin, 0, u.group);
    const int64_t z_home = cuda::at(a.z, u.batch, u.begin, u.head);
    const int64_t up_home = cuda::at(a.d_out, u.batch, u.begin, 0, u.head);
    const bool pieces = Upstream(a).pieces;
    const auto begin = [&](int chunk, int stage) {
      const int n = tokens_in(chunk);
      const int64_t token = int64_t{chunk} * C;
      copy_rows<R, threads>(a.q, rows_home + token * a.q.stride[1], n, sh.rows[stage], thread);
      if (a.z.data) copy_pieces(a.z, z_home + token * a.z.stride[1], a.z.stride[1], n, sh.v[stage]);
      if (pieces)
        copy_pieces(a.d_out, up_home + token * a.d_out.stride[1], a.d_out.stride[1], n,
                    sh.up[stage]);
      copy_tokens(chunk, stage);
    };
    begin(end - 1, 0);
    __syncthreads();
    take_biases();
    const GatedItems<R, threads> items(sh.mimo_z, sh.mimo_out, thread);
#pragma unroll 1
    for (int chunk = end; chunk-- > first;) {
      const int stage = (end - 1 - chunk) & 1;
      copies_done();
      __syncthreads();
      if (chunk > first) begin(chunk - 1, stage ^ 1);
      behind(chunk, e);
      const int n = tokens_in(chunk);
      turn_rows(n, stage, a.q_bias.data);
      items.put(a, n, sh.v[stage], sh.up[stage], pieces, sh.steps[stage].left, sh.weighed,
                [&](int t, int r, int c) {
                  return cuda::read(a.d_out, up_home +
                                                 (int64_t{chunk} * C + t) * a.d_out.stride[1] +
                                                 (a.size.reduce ? 0 : r * a.d_out.stride[2]) +
                                                 c * a.d_out.stride[4]);
                });
      add_product(e, stage);
    }
  }

 private:
  // Rows of v of a thread, or of z, are of one token where R > 1.
  static constexpr int ranks = R > 1 ? 2 : 1;
  __device__ __forceinline__ int rank(int i) const {
    return R > 1 ? thread / (C * 8) + i * (threads / (C * 8)) : 0;
  }
  __device__ __forceinline__ int tokens_in(int chunk) const {
    const int rest = tokens - chunk * C;
    return rest < C ? rest : C;
  }
  __device__ __forceinline__ void take_biases() {
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int r = 0; r < R; ++r) bias[b][r] = sh.bias[r * 32 + (thread & 15) + 16 * b];
  }
  // [C, 8] pieces of rows `apart` elements apart, zeros behind the last token.
  __device__ __forceinline__ void copy_pieces(const View& from, int64_t home, int64_t apart, int n,
                                              uint4* to) {
    const auto* const at = static_cast<const __nv_bfloat16*>(from.data) + home + thread % 8 * 8;
#pragma unroll
    for (int i = 0; i < (C * 8 + threads - 1) / threads; ++i) {
      const int item = thread + i * threads, t = item / 8;
      if (C * 8 % threads != 0 && item >= C * 8) break;
      hopper::copy_16_bytes(hopper::smem_address(to + item), at + (t < n ? t * apart : 0), t < n);
    }
  }
  __device__ __forceinline__ void copy_tokens(int chunk, int stage) {
    const int64_t at = chunk - segment;
    copy_bytes<C * pairs * 8, threads>(sh.turns_from + at * (C * pairs * 2), sh.turns[stage],
                                       thread);
    copy_bytes<sizeof(ChunkSteps<C>), threads>(
        sh.steps_from + at * static_cast<int64_t>(sizeof(ChunkSteps<C>)), &sh.steps[stage],
        threads - 1 - thread);
  }
  // A thread has two pairs of some tokens.
  __device__ __forceinline__ void turn_rows(int n, int stage, bool biased) {
    constexpr int each = C / (threads / 16);
    char* const tile = sh.rows[stage];
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int pp = (thread & 15) + 16 * b;
#pragma unroll
      for (int j = 0; j < each; ++j) {
        const int t = (thread >> 4) * each + j;
        if (t >= n) break;
        const float4 x = *reinterpret_cast<const float4*>(sh.turns[stage] + t * pairs + 2 * pp);
        TwoTurns by;
        by.cos0 = x.x, by.sin0 = x.y, by.cos1 = x.z, by.sin1 = x.w;
        const int at = place_of(t * R, halves ? 2 * pp : 4 * pp);
#pragma unroll
        for (int r = 0; r < R; ++r) turn_words<halves>(tile + row_behind(at, r), bias[b][r], by);
      }
    }
    if (blocks == 1 && biased) bias_rows<R, halves, threads>(tile, n, sh.bias, thread);
  }
  // Projected rows by key of each token.
  __device__ __forceinline__ void put_values(int n, int stage, const float (&by_v)[ranks][8]) {
    constexpr int items = C * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int item = R > 1 ? thread % items : thread + i * threads, t = item >> 3;
      const uint4 raw = sh.v[stage][item];
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
      const float by = sh.steps[stage].key[t];
      const float(&own)[8] = by_v[R > 1 ? i : 0];
      uint32_t scaled[4] = {0, 0, 0, 0};
      if (t < n) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float x = low_of(words[w]) * own[2 * w], y = high_of(words[w]) * own[2 * w + 1];
          scaled[w] = two_rounded(by * x, by * y);
        }
      }
      *reinterpret_cast<uint4*>(sh.weighed + place_of(t * R + rank(i), (item & 7) * 8)) = {
          scaled[0], scaled[1], scaled[2], scaled[3]};
    }
  }
  __device__ __forceinline__ void add_product(float (&h)[32], int stage) {
    hopper::fence_async_shared();
    __syncthreads();
    scale_state(h, sh.steps[stage].whole);
    products_begin(h);
    columns_by_columns<64>(h, Operand(sh.weighed),
                           Operand(sh.rows[stage] + threadIdx.x / 128 * panel_bytes));
    products_end(h);
  }

  const Args& a;
  const Unit& u;
  Shared& sh;
  const int thread, segment, tokens;
  float4 bias[blocks][R];  // of the thread's pairs
};

}  // namespace talea::mamba3::sm90
