// What: how a state walks from chunk to chunk: h to the last, E to the first, in registers.
// Why: two warpgroups share the rows and have half of the state's columns each; what a chunk needs
//      is under way while the chunk before is at work.
// Never: knows what the states are for.
#pragma once

#include "ops/mamba3/sm90/gate.cuh"

namespace talea::mamba3::sm90 {

inline constexpr int chain_threads = 256;

template <int R, int blocks>
struct ChainShared {
  static constexpr int C = tokens_of<R>;
  char rows[2][wide_bytes], v[2][panel_bytes], weighed[panel_bytes];
  float4 bias[R * 32];
  float mimo_v[R * values], mimo_z[R * values], mimo_out[R * values];
  Steps<C> steps[2];
  RawTokens<C> raw[2];
  Carried carried;
  typename TurnReader<R, blocks, chain_threads>::Scratch turns;
  // Read from here: registers that they would take are spilled.
  Unit unit;
  __nv_bfloat16* to = nullptr;  // states of the first chunk as operands
  float* home = nullptr;        // E
  uint32_t* token_angles = nullptr;
  const uint32_t* chunk_angles = nullptr;
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
  static constexpr int C = tokens_of<R>, threads = chain_threads;
  static constexpr int size = columns * values;
  using Shared = ChainShared<R, blocks>;
  using Turns = TurnReader<R, blocks, threads>;

  __device__ __forceinline__ Chain(const Args& args, Shared& shared)
      : a(args), u(shared.unit), sh(shared), thread(threadIdx.x) {}

  // h over chunks [first, end); before(chunk) ahead of each. keeps_angles: [C, A] of each chunk.
  template <class Before>
  __device__ __forceinline__ void forward(float (&h)[32], int first, int end, bool keeps_angles,
                                          Before before) {
    if (first >= end) return;
    read_bias<R>(a.k_bias, u.head, halves, sh.bias, thread, threads);
    read_projection<R>(a.mimo_v, u.head, sh.mimo_v, thread, threads);
    Part p = part_of<C>(u, first);
    Turns turns(thread);
    copy(a.k, p, 0, true);
    turns.load(a, u, p);
    sh.raw[0].put(thread, token(p));
    RawValues<R, threads> own(a, u, p, thread);
    __syncthreads();
    steps_of(p, 0);
#pragma unroll 1
    for (int chunk = first; chunk < end; ++chunk) {
      const int stage = (chunk - first) & 1;
      if (thread < 64) sh.turns.lost[thread] = 0;
      copies_done();
      __syncthreads();
      const Part next = part_of<C>(u, chunk + 1);
      Turns next_turns(thread);
      RawToken next_raw;
      RawValues<R, threads> next_own(thread);
      if (chunk + 1 < end) {
        copy(a.k, next, stage ^ 1, true);
        next_turns.load(a, u, next);
        next_raw = token(next);
        next_own.load(a, u, next);
      }
      turns.add(a, p, sh.raw[stage].dt, sh.turns, [](int, int, float) {});
      before(chunk, h);
      __syncthreads();
      turn_rows(
          turns, p, stage, a.k_bias.data,
          keeps_angles ? sh.token_angles + (chunk - first) * int64_t{C} * a.size.pairs : nullptr);
      own.put(p, sh.mimo_v, sh.steps[stage].key, R == 1 ? sh.v[stage] : nullptr, sh.weighed);
      sh.raw[stage ^ 1].put(thread, next_raw);
      hopper::fence_async_shared();
      __syncthreads();
      turns.finish(a, sh.carried);
      add_product(h, stage, next);
      p = next, turns = next_turns, own = next_own;
    }
  }

  // E from behind chunk end - 1 to before chunk `first`; behind(chunk) with E behind it.
  // sh.chunk_angles: [chunk, A] before each chunk, from chunk 0 of the unit.
  template <class Behind>
  __device__ __forceinline__ void backward(float (&e)[32], int first, int end, Behind behind) {
    if (first >= end) return;
    read_bias<R>(a.q_bias, u.head, halves, sh.bias, thread, threads);
    read_projection<R>(a.mimo_z, u.head, sh.mimo_z, thread, threads);
    read_projection<R>(a.mimo_out, u.head, sh.mimo_out, thread, threads);
    const auto angle_before = [&](int chunk) {
      return thread < a.size.pairs ? sh.chunk_angles[int64_t{chunk} * a.size.pairs + thread] : 0u;
    };
    Part p = part_of<C>(u, end - 1);
    Turns turns(thread);
    copy(a.q, p, 0, false);
    turns.load(a, u, p);
    sh.raw[0].put(thread, token(p));
    uint32_t angle = angle_before(end - 1);
    GatedRow<R> own[2];
    own[0].load(a, u, p, thread), own[1].load(a, u, p, thread + threads);
    __syncthreads();
    steps_of(p, 0);
#pragma unroll 1
    for (int chunk = end; chunk-- > first;) {
      const int stage = (end - 1 - chunk) & 1;
      if (thread < 64) {
        sh.turns.lost[thread] = 0;
        sh.carried.turns[thread] = static_cast<uint64_t>(angle) << 32;
        sh.carried.tainted[thread] = angle == no_angle;
      }
      copies_done();
      __syncthreads();
      const bool more = chunk > first;
      const Part next = part_of<C>(u, more ? chunk - 1 : chunk);
      Turns next_turns(thread);
      RawToken raw;
      if (more) {
        copy(a.q, next, stage ^ 1, false);
        next_turns.load(a, u, next);
        raw = token(next);
        angle = angle_before(chunk - 1);
      }
      turns.add(a, p, sh.raw[stage].dt, sh.turns, [](int, int, float) {});
      behind(chunk, e);
      __syncthreads();
      turn_rows(turns, p, stage, a.q_bias.data, nullptr);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int item = thread + i * threads, row = item / 8, c = item % 8 * 8;
        *reinterpret_cast<uint4*>(sh.weighed + place_of(row, c)) =
            own[i].gated(a, p, item, sh.mimo_z + row % R * values + c,
                         sh.mimo_out + row % R * values + c, sh.steps[stage].left[row / R],
                         [&] { return cuda::at(a.d_out, u.batch, u.begin + p.first, 0, u.head); });
        if (more) own[i].load(a, u, next, item);
      }
      sh.raw[stage ^ 1].put(thread, raw);
      hopper::fence_async_shared();
      __syncthreads();
      add_product(e, stage, next);
      p = next, turns = next_turns;
    }
  }

  // Turns alone, over chunks [first, end).
  template <class Before>
  __device__ __forceinline__ void turns_alone(int first, int end, Before before) {
#pragma unroll 1
    for (int chunk = first; chunk < end; ++chunk) {
      const Part p = part_of<C>(u, chunk);
      Turns turns(thread);
      turns.load(a, u, p);
      sh.raw[0].put(thread, token(p));
      if (thread < 64) sh.turns.lost[thread] = 0;
      __syncthreads();
      before(chunk);
      turns.add(a, p, sh.raw[0].dt, sh.turns, [](int, int, float) {});
      __syncthreads();
      turns.each_turn(a, p, sh.carried, sh.turns, [](int, int, int, const TwoTurns&) {});
      __syncthreads();
      turns.finish(a, sh.carried);
    }
    __syncthreads();
  }

 private:
  __device__ __forceinline__ void copy(const View& from, const Part& p, int stage, bool with_v) {
    copy_rows<R, threads>(from, u, p, sh.rows[stage], thread);
    if constexpr (R == 1)
      if (with_v) copy_values<threads>(a, u, p, sh.v[stage], thread);
  }
  __device__ __forceinline__ RawToken token(const Part& p) const {
    return thread <= C ? raw_token(a, u, p, thread) : RawToken{};
  }
  __device__ __forceinline__ void turn_rows(Turns& turns, const Part& p, int stage, bool biased,
                                            uint32_t* angles) {
    char* const tile = sh.rows[stage];
    turns.each_turn(a, p, sh.carried, sh.turns, [&](int t0, int j, int pp, const TwoTurns& by) {
      const int t = t0 + j, at = place_of(t * R, halves ? 2 * pp : 4 * pp);
#pragma unroll
      for (int r = 0; r < R; ++r)
        turn_words<halves>(tile + row_behind(at, r), sh.bias[r * 32 + pp], by);
      if (angles && 2 * pp < a.size.pairs)
        *reinterpret_cast<uint2*>(angles + t * a.size.pairs + 2 * pp) = by.angle;
    });
    if (blocks == 1 && biased) bias_rows<R, halves, threads>(tile, p, sh.bias, thread);
  }
  // One warp; what it reads was put before the last barrier.
  __device__ __forceinline__ void steps_of(const Part& p, int stage) {
    if (thread < 32) read_steps(sh.raw[stage], p, sh.steps[stage], [](int, float, float, float) {});
  }
  // The steps of the next chunk are not read while the product is under way: what they need of
  // registers would make of it four that wait for each other.
  __device__ __forceinline__ void add_product(float (&h)[32], int stage, const Part& next) {
    scale_state(h, sh.steps[stage].whole);
    products_begin(h);
    columns_by_columns<64>(h, Operand(sh.weighed),
                           Operand(sh.rows[stage] + threadIdx.x / 128 * panel_bytes));
    products_end(h);
    steps_of(next, stage ^ 1);
  }

  const Args& a;
  const Unit& u;
  Shared& sh;
  const int thread;
};

}  // namespace talea::mamba3::sm90
