// What: the gradients behind the gate of a head whose projections have gradients as well.
// Why: y is not kept; where it is formed anew, its numbers lie in registers.
// Never: rounds y.
#pragma once

#include "ops/mamba3/sm90/gradients_rows.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::gates_of(int head, float (&y)[32]) {
  const bool projects = a.grad.mimo_out.data || (a.z.data && a.grad.mimo_z.data);
  const int row = own_row(), column = own_column(), r = row % R;
  const int t[2] = {row / R, (row + 8) / R};
  uint32_t g[16], z[16];  // of d_out, where neighbours are one load
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const bool live = t[second] < n;
    const int64_t up_at = d_out_home(head) + t[second] * a.d_out.stride[1] +
                          (a.size.reduce ? 0 : r * a.d_out.stride[2]) + column * a.d_out.stride[4];
    const auto* const z_at = static_cast<const __nv_bfloat16*>(a.z.data) +
                             home(sh.homes.z, a.z, head) + t[second] * a.z.stride[1] + column;
#pragma unroll
    for (int j = 0; j < 8; ++j) g[2 * j + second] = live && up.pairs ? up.both(up_at + 8 * j) : 0u;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      z[2 * j + second] =
          live && a.z.data ? __ldg(reinterpret_cast<const uint32_t*>(z_at + 8 * j)) : 0u;
  }
  if (!up.pairs && a.d_out.data)
    gates<false, true>(head, y, g, z);
  else if (projects)
    gates<true, true>(head, y, g, z);
  else
    gates<true, false>(head, y, g, z);
}

template <int R, int blocks, bool halves>
template <bool plain, bool projects>  // g holds d_out; sums of z's and out's projections
__device__ __forceinline__ void Gradients<R, blocks, halves>::gates(int head, float (&y)[32],
                                                                    const uint32_t (&g)[16],
                                                                    const uint32_t (&z)[16]) {
  constexpr int alike = Shared::alike, together = 4;
  const auto& parameters = sh.of_head[stage(head)];
  const char* const v_tile = sh.operands[stage(head)].v;
  const int row = own_row(), column = own_column(), r = row % R;
  const int t[2] = {row / R, (row + 8) / R};
  const bool gated = a.z.data != nullptr;
  const float skip = parameters.skip;
  const int64_t dz0 = home(sh.homes.d_z, a.grad.z, head) + column;
  float* const to =
      reinterpret_cast<float*>(sh.from.partial.of(head)) + 2 * R * columns + R * values;
  float* const by_z_to = sh.sums_q;
  float* const by_out_to = sh.sums_q + 16 * Shared::lanes;
  if (projects) hopper::named_barrier_sync(queries, 128);
#pragma unroll
  for (int first = 0; first < 8; first += together) {
    float dz[2][2][together], to_z[2 * together], to_out[2 * together];
#pragma unroll
    for (int k = 0; k < together; ++k) {
      const int j = first + k, c = column + 8 * j;
      const float2 by_out =
          *reinterpret_cast<const float2*>(parameters.mimo_out + projection_at(r, c));
      const float2 by_z = *reinterpret_cast<const float2*>(parameters.mimo_z + projection_at(r, c));
      to_z[2 * k] = to_z[2 * k + 1] = to_out[2 * k] = to_out[2 * k + 1] = 0;
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const uint32_t v =
            *reinterpret_cast<const uint32_t*>(v_tile + place_of(row + 8 * second, c));
        const float own[2] = {y[4 * j + 2 * second] + skip * low_of(v),
                              y[4 * j + 2 * second + 1] + skip * high_of(v)};
        float2 here = {low_of(g[2 * j + second]), high_of(g[2 * j + second])};
        if (!plain && t[second] < n)
          here = up.two(d_out_home(head) + t[second] * a.d_out.stride[1] +
                        (a.size.reduce ? 0 : r * a.d_out.stride[2]) + c * a.d_out.stride[4]);
        const float from[2] = {here.x, here.y}, outs[2] = {by_out.x, by_out.y};
        const float bys[2] = {by_z.x, by_z.y};
        const float z_here[2] = {low_of(z[2 * j + second]), high_of(z[2 * j + second])};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float seen = from[i] * own[i];
          const float w = z_here[i] * bys[i], sg = gate_sigmoid(w), wsg = w * sg;
          float du = seen * outs[i] * fmaf(wsg, 1 - sg, sg);
          if (R == 1 ? mutant(ScanMutant::m3_gate_slope_dropped_projected)
                     : mutant(ScanMutant::m3_gate_slope_dropped))
            du = seen * outs[i] * sg;
          dz[second][i][k] = du * bys[i];
          to_z[2 * k + i] += du * z_here[i];
          to_out[2 * k + i] += gated ? seen * wsg : seen;
        }
      }
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
          if (t[second] < n)
            store_two(a.grad.z, dz0 + t[second] * a.grad.z.stride[1] + 8 * (first + k + r), x, w);
        }
    }
    if constexpr (projects) {
#pragma unroll
      for (int slot = 0; slot < 2 * together; slot += alike) {
        float by_z[alike], by_out[alike];
#pragma unroll
        for (int i = 0; i < alike; ++i) by_z[i] = to_z[slot + i], by_out[i] = to_out[slot + i];
        put_alike<R>(by_z_to, 2 * first + slot, by_z);
        put_alike<R>(by_out_to, 2 * first + slot, by_out);
      }
    }
  }
  if (projects) {
    hopper::named_barrier_sync(queries, 128);
    store_alike(by_z_to, R * values, values, to);
    store_alike(by_out_to, R * values, values, to + R * values);
  } else {
    for (int i = thread; i < 2 * R * values; i += 128) to[i] = 0;
  }
}

}  // namespace talea::mamba3::sm90
