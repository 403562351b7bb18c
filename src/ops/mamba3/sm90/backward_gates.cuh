// What: the gradients of what lies behind y.
// Why: y is not kept; gate and projection read it where it has been formed once more.
// Never: rounds y.
#pragma once

#include "ops/mamba3/sm90/backward_values.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves>
template <bool plain>
__device__ __forceinline__ void Backward<R, blocks, halves>::gates_of(int head,
                                                                      const float (&y)[32]) {
  constexpr int alike = Shared::alike, together = 4;
  const int row = own_row(), column = own_column(), r = row % R;
  const int t[2] = {row / R, (row + 8) / R};
  const bool gated = a.z.data != nullptr;
  const float skip = sh.skip;
  const OutRows to_dz = out_rows(a.grad.z, sh.homes.d_z, head, column + 8 * r);
  const int64_t z0 = home(sh.homes.z, a.z, head) + column;
  const int64_t up0 =
      d_out_home(head) + (a.size.reduce ? 0 : r * a.d_out.stride[2]) + column * a.d_out.stride[4];
  const __nv_bfloat16* const z_at[2] = {in_row(a.z, z0, 0), in_row(a.z, z0, 1)};
  const __nv_bfloat16* const up_at[2] = {in_row(a.d_out, up0, 0), in_row(a.d_out, up0, 1)};
#pragma unroll
  for (int first = 0; first < 8; first += together) {
    uint32_t g[together][2] = {}, z[together][2] = {};  // of d_out; gate
    const auto load = [&](uint32_t(&to)[together][2], const __nv_bfloat16* const(&from)[2]) {
#pragma unroll
      for (int k = 0; k < together; ++k)
#pragma unroll
        for (int second = 0; second < 2; ++second)
          to[k][second] = __ldg(reinterpret_cast<const uint32_t*>(from[second] + 8 * (first + k)));
    };
    if (plain && a.d_out.data) load(g, up_at);
    if (gated) load(z, z_at);
    float dz[2][2][together], to_z[alike], to_out[alike];
#pragma unroll
    for (int k = 0; k < together; ++k) {
      const int j = first + k, c = column + 8 * j;
      const float2 by_out = *reinterpret_cast<const float2*>(sh.mimo_out + r * values + c);
      const float2 by_z = *reinterpret_cast<const float2*>(sh.mimo_z + r * values + c);
      const int slot = 2 * k % alike;
      to_z[slot] = to_z[slot + 1] = to_out[slot] = to_out[slot + 1] = 0;
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const uint32_t v = *reinterpret_cast<const uint32_t*>(sh.v + place_of(row + 8 * second, c));
        const float own[2] = {fmaf(skip, low_of(v), y[4 * j + 2 * second]),
                              fmaf(skip, high_of(v), y[4 * j + 2 * second + 1])};
        float2 here = {low_of(g[k][second]), high_of(g[k][second])};
        if (!plain && t[second] < p.n)
          here = up.two(up0 + t[second] * a.d_out.stride[1] + 8 * j * a.d_out.stride[4]);
        const float from[2] = {here.x, here.y}, outs[2] = {by_out.x, by_out.y};
        const float bys[2] = {by_z.x, by_z.y};
        const float z_here[2] = {low_of(z[k][second]), high_of(z[k][second])};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float seen = from[i] * own[i];
          const float w = z_here[i] * bys[i], sg = gate_sigmoid(w), wsg = w * sg;
          const float du = seen * outs[i] * fmaf(wsg, 1 - sg, sg);
          dz[second][i][k] = du * bys[i];
          to_z[slot + i] = fmaf(du, z_here[i], to_z[slot + i]);
          to_out[slot + i] = fmaf(seen, gated ? wsg : 1.0f, to_out[slot + i]);
        }
      }
      if (slot + 2 < alike) continue;
      if (a.grad.mimo_z.data) put_alike(sh.by_value[1], 2 * j - slot, to_z);
      if (a.grad.mimo_out.data) put_alike(sh.by_value[2], 2 * j - slot, to_out);
    }
    if (a.grad.z.data) {
#pragma unroll
      for (int second = 0; second < 2; ++second)
#pragma unroll
        for (int k = 0; k < together; k += R) {
          float low[R], high[R];
#pragma unroll
          for (int i = 0; i < R; ++i) low[i] = dz[second][0][k + i], high[i] = dz[second][1][k + i];
          const float x = shared_by_ranks<R>(low), w = shared_by_ranks<R>(high);
          to_dz.store(second, 8 * (first + k), x, w);
        }
    }
  }
}

}  // namespace talea::mamba3::sm90
