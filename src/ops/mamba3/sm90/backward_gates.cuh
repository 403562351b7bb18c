// What: the first warpgroup: Q K^T and dO V^T weighed, then the gradients of the gate.
// Why: dO V^T is formed once and serves every other group.
// Never: waits for another group.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

namespace talea::mamba3::sm90 {

// Q K^T and dO V^T, weighed; then what the gate gets.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::pairs_and_gates() {
  uint32_t seen[4][4];
  weigh_pairs(seen);
  hopper::fence_async_shared();
  hopper::named_barrier_arrive(weighed, back_threads);
  if (needs_y) gates(seen);
}

template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::weigh_pairs(uint32_t (&seen)[4][4]) {
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
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::gates(const uint32_t (&seen)[4][4]) {
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
template <int R, int blocks>
template <bool pairs>
__device__ __forceinline__ void Backward<R, blocks>::gates_of(const float (&y)[32]) {
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
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::add_alike(float* sums, int slot, float x) {
  x = over_alike<R>(x);
  const int lane = thread & 31;
  if (lane < 4 * R) sums[slot * Shared::lanes + thread / 32 * 4 * R + lane] += x;
}

}  // namespace talea::mamba3::sm90
