// What: the gradients of a chunk: four warpgroups, each with products of its own.
// Why: dO V^T is formed once a chunk; decays and angles are anchored at the chunk's end.
// Never: divides by a decay, sums with atomics, or sums over heads.
#pragma once

#include "ops/mamba3/sm90/state.cuh"

namespace talea::mamba3::sm90 {

inline constexpr int back_threads = 512;

struct Slice {
  int64_t number = 0;  // of the unit
  int64_t begin = 0, low = 0, high = 0;
};

template <int R, int blocks>
struct BackShared {
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks, apart = pairs + 4;
  using Turns = TurnReader<R, blocks, back_threads>;
  // Lanes of a warp whose rows have the same r: their sums are one.
  static constexpr int alike = 8 / R, lanes = 128 / alike;
  char q[wide_bytes], k[wide_bytes], h[wide_bytes], e[wide_bytes];
  char v[panel_bytes], d_y[panel_bytes];
  // Queries and keys weighed, dO V^T weighed, e^L dO. Before them: sums of turns.
  char seen[panel_bytes], weights[panel_bytes], scaled[panel_bytes];
  float2 state[32 * 128];  // E in fp32, as the last group's accumulators lie
  // Sums over the slice, of the lanes of a group: rows of q and k, values, z, out.
  float rows_q[32 * lanes], rows_k[32 * lanes];
  float by_v[16 * lanes], by_z[16 * lanes], by_out[16 * lanes];
  float2 turns[C * apart];  // cos, sin
  float turn_q[C * apart], turn_k[C * apart];
  float4 q_bias[R * 32], k_bias[R * 32];
  float mimo_v[R * values], mimo_z[R * values], mimo_out[R * values];
  Steps<C> steps;
  MoreSteps<C> more;
  RawTokens<C> raw;
  Carried carried;
  float dots_q[rows], dots_k[rows], by_state[rows], by_same[rows];
  float by_later[4][C];    // of each warp
  float torque[2][4][64];  // the same, of this chunk and the one before
  double energy[2][4];
  float by_rate[C], of_step[C];
  double traces[4];
  Unit unit;
  Slice slice;
};

// Neighbours of d_out, zeros where there is none.
struct Upstream {
  const View& v;
  bool pairs = false;   // two are one aligned load of bf16
  bool pieces = false;  // eight are
  __device__ __forceinline__ explicit Upstream(const Args& a) : v(a.d_out) {
    const bool plain = v.data && v.dtype == DType::bf16 && v.stride[4] == 1;
    int64_t low = 0;
    for (int i = 0; i < 4; ++i) low |= v.stride[i];
    const auto address = reinterpret_cast<uintptr_t>(v.data);
    pairs = plain && low % 2 == 0 && address % 4 == 0;
    pieces = plain && low % 8 == 0 && address % 16 == 0;
  }
  __device__ __forceinline__ float2 two(int64_t at) const {
    if (!v.data) return {0, 0};
    if (pairs) {
      const uint32_t x =
          __ldg(reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(v.data) + at));
      return {low_of(x), high_of(x)};
    }
    return {cuda::read(v, at), cuda::read(v, at + v.stride[4])};
  }
  __device__ __forceinline__ void eight(int64_t at, float (&x)[8]) const {
    if (pieces) {
      const uint4 all =
          __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(v.data) + at));
      const uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) x[2 * i] = low_of(words[i]), x[2 * i + 1] = high_of(words[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = v.data ? cuda::read(v, at + i * v.stride[4]) : 0.0f;
  }
};

// Over the R rows of a token, which lie R lanes of eight apart.
template <int R>
__device__ __forceinline__ float over_ranks(float x) {
#pragma unroll
  for (int step = 4; step < 4 * R; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ float over_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float over_eight(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

// Over the lanes of a warp whose rows have the same r.
template <int R>
__device__ __forceinline__ float over_alike(float x) {
#pragma unroll
  for (int step = 4 * R; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <int R, int blocks>
class Backward {
 public:
  using Shared = BackShared<R, blocks>;
  static constexpr int C = tokens_of<R>;

  __device__ __forceinline__ Backward(const Args& args, const UnitBuffers& buffers,
                                      const Wave& at_work, Shared& shared)
      : a(args),
        b(buffers),
        wave(at_work),
        sh(shared),
        u(shared.unit),
        slice(shared.slice),
        up(args) {
    group = warpgroup();
    thread = threadIdx.x & 127;
    skip = cuda::read_or(0, a.d, cuda::at(a.d, u.head));
    needs_y = a.grad.mimo_out.data || (a.z.data && (a.grad.z.data || a.grad.mimo_z.data));
  }

  __device__ __forceinline__ void run() {
    constexpr int size = columns * values;
    copy_state(slice.high - slice.begin);
    read_bias<R>(a.q_bias, u.head, a.size.halves, sh.q_bias, threadIdx.x, back_threads);
    read_bias<R>(a.k_bias, u.head, a.size.halves, sh.k_bias, threadIdx.x, back_threads);
    read_projection<R>(a.mimo_v, u.head, sh.mimo_v, threadIdx.x, back_threads);
    read_projection<R>(a.mimo_z, u.head, sh.mimo_z, threadIdx.x, back_threads);
    read_projection<R>(a.mimo_out, u.head, sh.mimo_out, threadIdx.x, back_threads);
    for (int i = threadIdx.x; i < 32 * Shared::lanes; i += back_threads)
      sh.rows_q[i] = sh.rows_k[i] = 0;
    for (int i = threadIdx.x; i < 16 * Shared::lanes; i += back_threads)
      sh.by_v[i] = sh.by_z[i] = sh.by_out[i] = 0;
    float* const home = b.upstream + slice.number * size;
    const int A = a.size.pairs;
    float* const ends = b.ends + slice.number * 2 * A;
    float first_anchor = 0;  // of pair threadIdx.x
    if (static_cast<int>(threadIdx.x) < A) first_anchor = ends[threadIdx.x];
    copies_done();
    __syncthreads();
    if (group == 3) {
      float e[64];
      take_state(home, e);
      hand_on(slice.high, e);
    }
    __syncthreads();
    begin(slice.high - 1);
#pragma unroll 1
    for (int64_t chunk = slice.high; chunk-- > slice.low;) {
      prepare(chunk);
      if (group == 0)
        pairs_and_gates();
      else if (group < 3)
        rows_of_group(chunk);
      else
        state_and_values(chunk);
      const Part at_work = p;
      __syncthreads();
      if (chunk > slice.low) begin(chunk - 1);
      tokens(chunk, at_work, first_anchor);
    }
    if (group == 3) {
      float e[64];
      take_own(e);
      put_state(home, e);
    }
    if (static_cast<int>(threadIdx.x) < A) ends[threadIdx.x] = first_anchor;
    add_parameters();
    if (slice.low == 0 && threadIdx.x == 0) store_token(b.pending[slice.number], 0, 0);
  }

 private:
  // The state before chunk i of the segment, as a tile.
  __device__ __forceinline__ void copy_state(int64_t i) {
    constexpr int size = columns * values;
    const auto* from = static_cast<const __nv_bfloat16*>(b.inner) +
                       (slice.number * (a.size.segment + 1) + i) * size;
    const uint32_t to = hopper::smem_address(sh.h);
#pragma unroll
    for (int item = threadIdx.x; item < size / 8; item += back_threads)
      hopper::copy_16_bytes(to + static_cast<uint32_t>(place_of(item / 16, item % 16 * 8)),
                            from + item * 8, true);
  }

  // What the chunk needs is under way.
  __device__ __forceinline__ void begin(int64_t chunk) {
    p = part_of<C>(u, chunk);
    copy_rows<R, back_threads>(a.q, u, p, sh.q, threadIdx.x);
    copy_rows<R, back_threads>(a.k, u, p, sh.k, threadIdx.x);
    if constexpr (R == 1) copy_values<back_threads>(a, u, p, sh.v, threadIdx.x);
    copy_state(chunk - slice.begin);
    raw = static_cast<int>(threadIdx.x) <= C ? raw_token(a, u, p, threadIdx.x) : RawToken{};
  }

  // Rows of all operands.
  __device__ __forceinline__ void prepare(int64_t chunk) {
    auto& scratch = *reinterpret_cast<typename Shared::Turns::Scratch*>(sh.seen);
    static_assert(sizeof(scratch) <= 3 * panel_bytes);
    typename Shared::Turns turns(threadIdx.x);
    turns.load(a, u, p);
    const RawValues<R, back_threads> own(a, u, p, threadIdx.x);
    sh.raw.put(threadIdx.x, raw);
    if (threadIdx.x < 64) {
      scratch.lost[threadIdx.x] = 0;
      const int64_t at = (slice.number * a.size.segment + chunk - slice.begin) * a.size.pairs;
      if (static_cast<int>(threadIdx.x) < a.size.pairs) {
        sh.carried.turns[threadIdx.x] = b.inner_turns[at + threadIdx.x];
        sh.carried.tainted[threadIdx.x] = b.inner_taints[at + threadIdx.x];
      }
    }
    copies_done();
    __syncthreads();
    if (threadIdx.x < 32)
      read_steps(sh.raw, p, sh.steps, [&](int t, float right, float lambda, float other) {
        sh.more.right[t] = right, sh.more.lambda[t] = lambda, sh.more.other[t] = other;
      });
    turns.add(a, p, sh.raw.dt, scratch, [](int, int, float) {});
    __syncthreads();
    turns.each_turn(a, p, sh.carried, scratch, [&](int t, int j, int pp, const TwoTurns& by) {
      *reinterpret_cast<float4*>(sh.turns + (t + j) * Shared::apart + 2 * pp) = {by.cos0, by.sin0,
                                                                                 by.cos1, by.sin1};
    });
    __syncthreads();
    if (a.size.halves)
      turn_rows<true>();
    else
      turn_rows<false>();
    own.put(p, sh.mimo_v, nullptr, sh.v, nullptr);
    gate_rows();
    hopper::fence_async_shared();
    __syncthreads();
  }

  template <bool halves>
  __device__ __forceinline__ void turn_rows() {
    const int pp = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) {
      const int row = threadIdx.x / 32 + 16 * i, t = row / R, r = row % R;
      if (t >= p.n) continue;
      TwoTurns by;
      if (2 * pp < Shared::pairs) {
        const float4 x = *reinterpret_cast<const float4*>(sh.turns + t * Shared::apart + 2 * pp);
        by = {x.x, x.y, x.z, x.w};
      }
      turn_row<halves>(sh.q, row, pp, sh.q_bias[r * 32 + pp], by);
      turn_row<halves>(sh.k, row, pp, sh.k_bias[r * 32 + pp], by);
    }
  }

  // dO and e^L dO: a thread has eight columns of a row.
  __device__ __forceinline__ void gate_rows() {
    const int row = threadIdx.x / 8, t = row / R, r = row % R, c = (threadIdx.x & 7) * 8;
    uint32_t own[4] = {0, 0, 0, 0}, scaled[4] = {0, 0, 0, 0};
    if (t < p.n) {
      const int64_t token = u.begin + p.first + t;
      float x[8];
      up.eight(cuda::at(a.d_out, u.batch, token, a.size.reduce ? 0 : r, u.head, c), x);
      uint4 z = {0, 0, 0, 0};
      if (a.z.data)
        z = __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.z.data) +
                                                 cuda::at(a.z, u.batch, token, u.head, c)));
      const uint32_t words[4] = {z.x, z.y, z.z, z.w};
      const float left = sh.steps.left[t];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] *= sh.mimo_out[r * values + c + i];
        if (a.z.data) {
          const float w = (i & 1 ? high_of(words[i / 2]) : low_of(words[i / 2])) *
                          sh.mimo_z[r * values + c + i];
          x[i] *= w * gate_sigmoid(w);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own[i] = two_rounded(x[2 * i], x[2 * i + 1]);
        scaled[i] = two_rounded(left * x[2 * i], left * x[2 * i + 1]);
      }
    }
    const int at = place_of(row, c);
    *reinterpret_cast<uint4*>(sh.d_y + at) = {own[0], own[1], own[2], own[3]};
    *reinterpret_cast<uint4*>(sh.scaled + at) = {scaled[0], scaled[1], scaled[2], scaled[3]};
  }

  // f(slot, pair, first, second number) of each pair of an accumulator's row (0 or 1), as indices.
  template <bool halves, class F>
  static __device__ __forceinline__ void each_pair(F f) {
    const int lane = threadIdx.x & 3;
    if constexpr (halves) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) f(2 * j + i, 8 * j + 2 * lane + i, 4 * j + i, 4 * (j + 8) + i);
    } else {
#pragma unroll
      for (int j = 0; j < 16; ++j) f(j, 4 * j + lane, 4 * j, 4 * j + 1);
    }
  }

  // E in fp32, from chunk to chunk.
  __device__ __forceinline__ void take_own(float (&e)[64]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float2 both = sh.state[i * 128 + thread];
      e[2 * i] = both.x, e[2 * i + 1] = both.y;
    }
  }

  // E behind chunk `next` - 1, whose state behind is in sh.h: <Hout, E>, torque(Hout, E) of each
  // pair, and E for the products.
  __device__ __forceinline__ void hand_on(int64_t next, float (&e)[64]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sh.state[i * 128 + thread] = {e[2 * i], e[2 * i + 1]};
    const int which = static_cast<int>(next - 1) & 1;
    if (a.size.halves)
      anchor_of<true>(which, e);
    else
      anchor_of<false>(which, e);
    put_tile(sh.e, e);
  }
  template <bool halves>
  __device__ __forceinline__ void anchor_of(int which, float (&e)[64]) {
    const char* const behind = sh.h;
    const int row = own_row(), column = own_column(), lane = threadIdx.x & 31;
    float work = 0, torque[16];
#pragma unroll
    for (float& x : torque) x = 0;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      if constexpr (halves) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const char* at = behind + place_of(row + 8 * second, column + 8 * j);
          const uint32_t hu = *reinterpret_cast<const uint32_t*>(at);
          const uint32_t hw = *reinterpret_cast<const uint32_t*>(at + panel_bytes);
          const float* eu = e + 4 * j + 2 * second;
          const float* ew = e + 4 * (j + 8) + 2 * second;
          work +=
              low_of(hu) * eu[0] + high_of(hu) * eu[1] + low_of(hw) * ew[0] + high_of(hw) * ew[1];
          torque[2 * j] += low_of(hu) * ew[0] - low_of(hw) * eu[0];
          torque[2 * j + 1] += high_of(hu) * ew[1] - high_of(hw) * eu[1];
        }
      } else {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const uint32_t h = *reinterpret_cast<const uint32_t*>(
              behind + place_of(row + 8 * second, column + 8 * j));
          const float* own = e + 4 * j + 2 * second;
          work += low_of(h) * own[0] + high_of(h) * own[1];
          torque[j] += low_of(h) * own[1] - high_of(h) * own[0];
        }
      }
    }
    double sum = static_cast<double>(work);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) sh.energy[which][thread / 32] = sum;
    each_pair<halves>([&](int slot, int pair, int, int) {
      const float all = over_eight(torque[slot]);
      if (lane < 4) sh.torque[which][thread / 32][pair] = all;
    });
  }

  // Q K^T and dO V^T, weighed; then what the gate gets.
  __device__ __forceinline__ void pairs_and_gates() {
    uint32_t seen[4][4];
    weigh_pairs(seen);
    hopper::fence_async_shared();
    hopper::named_barrier_arrive(weighed, back_threads);
    if (needs_y) gates(seen);
  }
  __device__ __forceinline__ void weigh_pairs(uint32_t (&seen)[4][4]) {
    float scores[32], products[32];
    hopper::warpgroup_arrive();
    rows_by_rows<128, false>(scores, Operand(sh.q), Operand(sh.k));
    rows_by_rows<64, false>(products, Operand(sh.d_y), Operand(sh.v));
    products_end(scores);
    hopper::hold_registers(products);
    const int row = own_row(), column = own_column(), lane = threadIdx.x & 31;
    const int t[2] = {row / R, (row + 8) / R};
    const float4 own[2] = {sh.steps.pair[t[0]], sh.steps.pair[t[1]]};
    const int last = (thread / 32 * 16 + 15) / R;
    float near[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float x[2][2] = {{0, 0}, {0, 0}}, w[2][2] = {{0, 0}, {0, 0}}, far[2] = {0, 0};
      if ((8 * j) / R <= last) {
        float4 key = sh.steps.pair[(column + 8 * j) / R];
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          float decay = 0;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = column + 8 * j + i, earlier = at / R;
            if (R == 1) key = sh.steps.pair[at];
            const float score = scores[4 * j + 2 * second + i];
            const float product = products[4 * j + 2 * second + i];
            if (t[second] > earlier && t[second] < p.n) {
              if (R == 1 || i == 0) decay = decay_of(own[second], key);
              x[second][i] = key.z * decay * score;
              w[second][i] = key.z * decay * product;
              far[i] += decay * product * score;
            } else if (t[second] == earlier && t[second] < p.n) {
              x[second][i] = key.w * score;
              w[second][i] = key.w * product;
              near[second] += product * score;
              if (row + 8 * second == at) trace += product;
            }
          }
        }
      }
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const uint32_t both = two_rounded(x[second][0], x[second][1]);
        seen[j / 2][(j & 1) * 2 + second] = both;
        const int at = place_of(row + 8 * second, column + 8 * j);
        *reinterpret_cast<uint32_t*>(sh.seen + at) = both;
        *reinterpret_cast<uint32_t*>(sh.weights + at) = two_rounded(w[second][0], w[second][1]);
      }
      if constexpr (R == 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float all = over_eight(far[i]);
          if (lane < 4) sh.by_later[thread / 32][column + 8 * j + i] = all;
        }
      } else {
        float all = over_eight(far[0] + far[1]);
        if constexpr (R == 4) all += __shfl_xor_sync(0xffffffffu, all, 1);
        if (lane < 4 && (R == 2 || lane % 2 == 0))
          sh.by_later[thread / 32][(column + 8 * j) / R] = all;
      }
    }
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const float all = over_quad(near[second]);
      if (lane % 4 == 0) sh.by_same[row + 8 * second] = all;
    }
  }

  // y, and with it the gradients of the gate and of the projection behind it.
  __device__ __forceinline__ void gates(const uint32_t (&seen)[4][4]) {
    float y[32];
    hopper::warpgroup_arrive();
    rows_by_rows<128, false>(y, Operand(sh.q), Operand(sh.h));
    products_end(y);
    const int row = own_row();
    const int t[2] = {row / R, (row + 8) / R};
    const float left[2] = {sh.steps.left[t[0]], sh.steps.left[t[1]]};
#pragma unroll
    for (int j = 0; j < 32; ++j) y[j] *= left[j / 2 % 2];
    products_begin(y);
    registers_by_columns<64>(y, seen, Operand(sh.v));
    products_end(y);
    if (up.pairs)
      gates_of<true>(y);
    else
      gates_of<false>(y);
  }
  // pairs: neighbours of d_out are one aligned load.
  template <bool pairs>
  __device__ __forceinline__ void gates_of(const float (&y)[32]) {
    const int row = own_row(), column = own_column(), r = row % R;
    const int t[2] = {row / R, (row + 8) / R};
    const bool live[2] = {t[0] < p.n, t[1] < p.n}, gated = a.z.data != nullptr;
    const int64_t token = u.begin + p.first;
    int64_t up_at[2];
    const __nv_bfloat16* z_at[2];
    int64_t dz_at[2];
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int64_t own = token + (live[second] ? t[second] : 0);
      up_at[second] = cuda::at(a.d_out, u.batch, own, a.size.reduce ? 0 : r, u.head, column);
      z_at[second] =
          static_cast<const __nv_bfloat16*>(a.z.data) + cuda::at(a.z, u.batch, own, u.head, column);
      dz_at[second] = cuda::at(a.grad.z, u.batch, own, u.head, column);
    }
    const char* const v_at = sh.v;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int c = column + 8 * j;
      const float2 by_out = *reinterpret_cast<const float2*>(sh.mimo_out + r * values + c);
      const float2 by_z = *reinterpret_cast<const float2*>(sh.mimo_z + r * values + c);
      float to_z[2] = {0, 0}, to_out[2] = {0, 0};
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        float2 g = {0, 0};
        uint32_t z = 0;
        if (live[second]) {
          if constexpr (pairs) {
            const uint32_t both = __ldg(reinterpret_cast<const uint32_t*>(
                static_cast<const __nv_bfloat16*>(a.d_out.data) + up_at[second] + 8 * j));
            g = {low_of(both), high_of(both)};
          } else {
            g = up.two(up_at[second] + 8 * j * a.d_out.stride[4]);
          }
          if (gated) z = __ldg(reinterpret_cast<const uint32_t*>(z_at[second] + 8 * j));
        }
        const uint32_t v = *reinterpret_cast<const uint32_t*>(v_at + place_of(row + 8 * second, c));
        const float own[2] = {y[4 * j + 2 * second] + skip * low_of(v),
                              y[4 * j + 2 * second + 1] + skip * high_of(v)};
        const float from[2] = {g.x, g.y}, outs[2] = {by_out.x, by_out.y}, bys[2] = {by_z.x, by_z.y};
        const float z_here[2] = {low_of(z), high_of(z)};
        float dz[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float seen = from[i] * own[i];
          const float w = z_here[i] * bys[i], sg = gate_sigmoid(w);
          const float du = seen * outs[i] * fmaf(w * sg, 1 - sg, sg);
          dz[i] = du * bys[i];
          to_z[i] += du * z_here[i];
          to_out[i] += gated ? seen * (w * sg) : seen;
        }
        if (a.grad.z.data) {
          dz[0] = over_ranks<R>(dz[0]), dz[1] = over_ranks<R>(dz[1]);
          if (live[second] && j % R == r) store_two(a.grad.z, dz_at[second] + 8 * j, dz[0], dz[1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (a.grad.mimo_z.data) add_alike(sh.by_z, 2 * j + i, to_z[i]);
        if (a.grad.mimo_out.data) add_alike(sh.by_out, 2 * j + i, to_out[i]);
      }
    }
  }
  // A sum over the slice of what all lanes with the same r have.
  __device__ __forceinline__ void add_alike(float* sums, int slot, float x) {
    x = over_alike<R>(x);
    const int lane = thread & 31;
    if (lane < 4 * R) sums[slot * Shared::lanes + thread / 32 * 4 * R + lane] += x;
  }
  // dq = e^L (dO H) + W' K by one group, dk = e^(L_C - L) s (V E) + W'^T Q by another: one text, so
  // that both run through the same instructions.
  __device__ __forceinline__ void rows_of_group(int64_t chunk) {
    const bool keys = group == 2;
    float g[64];
#pragma unroll
    for (float& x : g) x = 0;
    products_begin(g);
    rows_by_columns<128>(g, Operand(keys ? sh.v : sh.d_y), Operand(keys ? sh.e : sh.h));
    products_end(g);
    if (keys) hopper::named_barrier_arrive(upstream_read, 256);
    scale_rows(g, keys ? sh.steps.key : sh.steps.left);
    hopper::named_barrier_sync(weighed, back_threads);
    if (keys) {
      products_begin(g);
      columns_by_columns<128>(g, Operand(sh.weights), Operand(sh.q));
      products_end(g);
    } else {
      products_begin(g);
      rows_by_columns<128>(g, Operand(sh.weights), Operand(sh.k));
      products_end(g);
    }
    if (a.size.halves)
      rows_back<true>(chunk, g);
    else
      rows_back<false>(chunk, g);
  }

  template <int count>
  static __device__ __forceinline__ void scale_rows(float (&d)[count], const float* by) {
    const int row = own_row();
    const float first = by[row / R], second = by[(row + 8) / R];
#pragma unroll
    for (int j = 0; j < count; ++j) d[j] *= j / 2 % 2 ? second : first;
  }

  // Rows of dq or dk: their share of turns and decays; turned back, handed to the sum over heads.
  template <bool halves>
  __device__ __forceinline__ void rows_back(int64_t chunk, float (&g)[64]) {
    const bool keys = group == 2;
    const char* const tile = keys ? sh.k : sh.q;
    float* const to = keys ? b.dk : b.dq;
    float* const torques = keys ? sh.turn_k : sh.turn_q;
    float* const dots = keys ? sh.dots_k : sh.dots_q;
    float* const sums = keys ? sh.rows_k : sh.rows_q;
    const bool wanted = keys ? a.grad.k_bias.data : a.grad.q_bias.data;
    const int row = own_row(), column = own_column(), r = row % R, lane = threadIdx.x & 31;
    const int A = a.size.pairs;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int own = row + 8 * second, t = own / R;
      const bool known = t < p.n;
      float dot = 0;
      const auto one = [&](int pair, float x, float w, float& gx, float& gw) {
        dot += x * gx + w * gw;
        if (pair >= A) return;  // of a whole block of lanes, or of its end
        const float2 by = sh.turns[t * Shared::apart + pair];
        const float cos = known ? by.x : 1.0f, sin = known ? by.y : 0.0f;
        const float before = gx;
        gx = before * cos + gw * sin;
        gw = gw * cos - before * sin;
      };
      const auto torque = [&](int pair, float x, float w, float gx, float gw) {
        const float all = over_ranks<R>(x * gw - w * gx);
        if (pair < A && r == 0) torques[t * Shared::apart + pair] = all;
      };
      if constexpr (halves) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const char* at = tile + place_of(own, column + 8 * j);
          const uint32_t x = *reinterpret_cast<const uint32_t*>(at);
          const uint32_t w = *reinterpret_cast<const uint32_t*>(at + panel_bytes);
          float* gx = g + 4 * j + 2 * second;
          float* gw = g + 4 * (j + 8) + 2 * second;
          const int pair = column + 8 * j;
          if (8 * j < A) {
            torque(pair, low_of(x), low_of(w), gx[0], gw[0]);
            torque(pair + 1, high_of(x), high_of(w), gx[1], gw[1]);
          }
          one(pair, low_of(x), low_of(w), gx[0], gw[0]);
          one(pair + 1, high_of(x), high_of(w), gx[1], gw[1]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const uint32_t both =
              *reinterpret_cast<const uint32_t*>(tile + place_of(own, column + 8 * j));
          float* gx = g + 4 * j + 2 * second;
          const int pair = 4 * j + lane % 4;
          if (4 * j < A) torque(pair, low_of(both), high_of(both), gx[0], gx[1]);
          one(pair, low_of(both), high_of(both), gx[0], gx[1]);
        }
      }
      dot = over_quad(dot);
      if (lane % 4 == 0) dots[own] = dot;
      if (to && known) {
        const int64_t place =
            ((u.sequence - wave.first) * wave.slice_chunks + (chunk - slice.low)) * C + t;
        float* const line = to + ((place * R + r) * a.size.heads + u.head) * columns + column;
#pragma unroll
        for (int j = 0; j < 16; ++j)
          *reinterpret_cast<float2*>(line + 8 * j) = {g[4 * j + 2 * second],
                                                      g[4 * j + 2 * second + 1]};
      }
    }
    if (!wanted) return;
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) add_alike(sums, 2 * j + i, g[4 * j + i] + g[4 * j + 2 + i]);
  }

  // E before the chunk.
  __device__ __forceinline__ void state_back(int64_t chunk) {
    float e[64];
    take_own(e);
    const float whole = sh.steps.whole;
    scale_state(e, whole);
    products_begin(e);
    columns_by_columns<128>(e, Operand(sh.scaled), Operand(sh.q));
    products_end(e);
    hand_on(chunk, e);
  }

  // dv = e^(L_C - L) s (K E^T) + seen^T dO + d dO; then E before the chunk.
  __device__ __forceinline__ void state_and_values(int64_t chunk) {
    float dv[32];
    const int row = own_row(), column = own_column(), r = row % R, lane = threadIdx.x & 31;
    hopper::warpgroup_arrive();
    rows_by_rows<128, false>(dv, Operand(sh.k), Operand(sh.e));
    products_end(dv);
    float far[2] = {0, 0};
    each_two(dv, [&](int i, int c, float x, float y) {
      const uint32_t v = *reinterpret_cast<const uint32_t*>(sh.v + place_of(i, c));
      far[i != row] += x * low_of(v) + y * high_of(v);
    });
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const float all = over_quad(far[second]);
      if (lane % 4 == 0)
        sh.by_state[row + 8 * second] = sh.more.right[(row + 8 * second) / R] * all;
    }
    scale_rows(dv, sh.steps.key);
    hopper::named_barrier_sync(upstream_read, 256);
    state_back(chunk);
    hopper::named_barrier_sync(weighed, back_threads);
    products_begin(dv);
    columns_by_columns<64>(dv, Operand(sh.seen), Operand(sh.d_y));
    products_end(dv);
    const int64_t token = u.begin + p.first;
    const int64_t dv0 = cuda::at(a.grad.v, u.batch, token, u.head) + column;
    const int64_t v0 = cuda::at(a.v, u.batch, token, u.head) + column;
    const int t[2] = {row / R, (row + 8) / R};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int c = column + 8 * j;
      const float2 by = *reinterpret_cast<const float2*>(sh.mimo_v + r * values + c);
      float to[2] = {0, 0};
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        float x = dv[4 * j + 2 * second], y = dv[4 * j + 2 * second + 1];
        if (skip != 0) {
          const uint32_t up_here =
              *reinterpret_cast<const uint32_t*>(sh.d_y + place_of(row + 8 * second, c));
          x += skip * low_of(up_here), y += skip * high_of(up_here);
        }
        if (a.grad.mimo_v.data && t[second] < p.n) {
          const uint32_t v =
              __ldg(reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(a.v.data) +
                                                      v0 + t[second] * a.v.stride[1] + 8 * j));
          to[0] += x * low_of(v), to[1] += y * high_of(v);
        }
        if (a.grad.v.data) {
          x = over_ranks<R>(x * by.x), y = over_ranks<R>(y * by.y);
          if (t[second] < p.n && j % R == r)
            store_two(a.grad.v, dv0 + t[second] * a.grad.v.stride[1] + 8 * j, x, y);
        }
      }
      if (a.grad.mimo_v.data) {
        add_alike(sh.by_v, 2 * j, to[0]);
        add_alike(sh.by_v, 2 * j + 1, to[1]);
      }
    }
  }

  __device__ __forceinline__ void store_token(const cuda::Pending& x, int64_t token, double db) {
    const cuda::GradientViews& d = a.grad;
    if (d.dt.data)
      cuda::store(d.dt, cuda::at(d.dt, u.batch, u.head, u.begin + token),
                  static_cast<float>(x.ddt + static_cast<double>(x.other) * db));
    if (d.trap.data)
      cuda::store(d.trap, cuda::at(d.trap, u.batch, u.head, u.begin + token),
                  static_cast<float>(static_cast<double>(x.lambda) * static_cast<double>(x.other) *
                                     static_cast<double>(x.dt) * (x.dgamma - db)));
  }

  // Gradients of the steps, decays and angles of the chunk's tokens.
  __device__ __forceinline__ void tokens(int64_t chunk, const Part& at, float& first_anchor) {
    const cuda::GradientViews& d = a.grad;
    const int A = a.size.pairs, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const bool last = !at.more;
    constexpr float pi = 3.14159265358979f;
    if (static_cast<int>(threadIdx.x) < A) {
      const int i = threadIdx.x;
      const auto& of = sh.torque[chunk & 1];
      const float sum = ((of[0][i] + of[1][i]) + of[2][i]) + of[3][i];
      if (last) first_anchor = sum;
      float whole = first_anchor - sum;
#pragma unroll 1
      for (int t = at.n - 1; t >= 0; t -= 8) {
        float some[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int place = (t - j >= 0 ? t - j : 0) * Shared::apart + i;
          some[j] = sh.turn_q[place] + sh.turn_k[place];
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          whole += some[j];
          if (t - j >= 0) sh.turn_q[(t - j) * Shared::apart + i] = whole;
        }
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int t = warp; t < at.n; t += back_threads / 32) {
      float sum = 0;
      const int64_t token = u.begin + at.first + t;
      const int64_t place =
          ((u.sequence - wave.first) * wave.slice_chunks + (chunk - slice.low)) * C + t;
      if (a.angles.data)
#pragma unroll 1
        for (int i = lane; i < A; i += 32) {
          const float rate =
              tanhf(cuda::read(a.angles, cuda::at(a.angles, u.batch, token, u.head, i)));
          const float whole = sh.turn_q[t * Shared::apart + i];
          const auto slope = static_cast<float>(1 - static_cast<double>(rate) * rate);
          const float angle = whole * sh.raw.dt[t] * pi * slope;
          if (b.dangles)
            b.dangles[(place * a.size.heads + u.head) * A + i] = angle;
          else if (d.angles.data)
            cuda::store(d.angles, cuda::at(d.angles, u.batch, token, u.head, i), angle);
          sum += whole * rate;
        }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (lane == 0) {
        float far =
            ((sh.by_later[0][t] + sh.by_later[1][t]) + sh.by_later[2][t]) + sh.by_later[3][t];
#pragma unroll
        for (int r = 0; r < R; ++r) far += sh.by_state[t * R + r];
        sh.by_rate[t] = sum;
        sh.of_step[t] = far;
      }
    }
    __syncthreads();
    if (warp == 0 && d.adt.data) decays_back(chunk, at);
    if (warp >= 2 && warp < 4) {
      const int t = threadIdx.x - 64;
      if (t < at.n) {
        cuda::Pending x;
        x.lambda = sh.more.lambda[t];
        x.other = sh.more.other[t];
        x.dt = sh.raw.dt[t];
        float near = 0;
#pragma unroll
        for (int r = 0; r < R; ++r) near += sh.by_same[t * R + r];
        x.dgamma = static_cast<double>(sh.of_step[t]) + static_cast<double>(near);
        x.ddt = static_cast<double>(x.lambda) * x.dgamma +
                3.14159265358979323846 * static_cast<double>(sh.by_rate[t]);
        if (t > 0) {
          store_token(x, at.first + t, static_cast<double>(sh.of_step[t - 1]));
        } else {
          // The first token of the chunk behind has waited for the last key of this one.
          cuda::Pending* const waits = b.pending + slice.number;
          if (waits->waits)
            store_token(*waits, at.first + at.n, static_cast<double>(sh.of_step[at.n - 1]));
          x.waits = 1;
          *waits = x;
        }
      }
    }
    __syncthreads();
  }

  // d_adt: what the chunk's end is worth, and of each token behind one what it adds.
  __device__ __forceinline__ void decays_back(int64_t chunk, const Part& at) {
    constexpr int each = C > 32 ? C / 32 : 1;
    const int lane = threadIdx.x & 31;
    const auto& of = sh.energy[chunk & 1];
    const double energy = ((of[0] + of[1]) + of[2]) + of[3];
    double own[each], sum = 0;  // from the last token on
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int t = at.n - 1 - (lane * each + i);
      float dot = 0;
      if (t >= 0)
#pragma unroll
        for (int r = 0; r < R; ++r) dot += sh.dots_q[t * R + r] - sh.dots_k[t * R + r];
      own[i] = static_cast<double>(dot);
      sum += own[i];
    }
    double before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double other = __shfl_up_sync(0xffffffffu, before, step);
      if (lane >= step) before += other;
    }
    before = __shfl_up_sync(0xffffffffu, before, 1);
    if (lane == 0) before = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int t = at.n - 1 - (lane * each + i);
      before += own[i];
      if (t >= 0)
        cuda::store(a.grad.adt, cuda::at(a.grad.adt, u.batch, u.head, u.begin + at.first + t),
                    sh.raw.adt[t] <= -128.0f ? 0.0f : static_cast<float>(energy + before));
    }
  }

  // What the slice adds to the sums of the head's parameters.
  __device__ __forceinline__ void add_parameters() {
    double* const to = b.parameters + slice.number * cuda::parameter_count(a.size);
    double own = group == 0 ? static_cast<double>(trace) : 0.0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) own += __shfl_xor_sync(0xffffffffu, own, step);
    if (group == 0 && thread % 32 == 0) sh.traces[thread / 32] = own;
    __syncthreads();
    const auto sum_of = [&](const float* from, int r, int c) {
      double sum = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w)
        sum += static_cast<double>(
            from[(c / 8 * 2 + (c & 1)) * Shared::lanes + w * 4 * R + r * 4 + c % 8 / 2]);
      return sum;
    };
    for (int i = threadIdx.x; i < R * columns; i += back_threads) {
      const int r = i / columns, c = i % columns;
      to[i] += sum_of(sh.rows_q, r, c);
      to[R * columns + i] += sum_of(sh.rows_k, r, c);
    }
    double* const projections = to + 2 * R * columns;
    for (int i = threadIdx.x; i < R * values; i += back_threads) {
      const int r = i / values, c = i % values;
      projections[i] += sum_of(sh.by_v, r, c);
      projections[R * values + i] += sum_of(sh.by_z, r, c);
      projections[2 * R * values + i] += sum_of(sh.by_out, r, c);
    }
    if (threadIdx.x == 0)
      projections[3 * R * values + values] +=
          ((sh.traces[0] + sh.traces[1]) + sh.traces[2]) + sh.traces[3];
  }

  enum Barrier { weighed = 1, upstream_read = 2 };
  const Args& a;
  const UnitBuffers& b;
  const Wave& wave;
  Shared& sh;
  const Unit& u;
  const Slice& slice;
  const Upstream up;
  Part p;
  RawToken raw;
  int group, thread;
  float skip, trace = 0;
  bool needs_y;
};

}  // namespace talea::mamba3::sm90
