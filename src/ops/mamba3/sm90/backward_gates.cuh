// What: the last warpgroup: y once more, and the gradients of what lies behind it.
// Why: y is not kept; gate and projection read it while rows are turned back elsewhere.
// Never: rounds y.
#pragma once

#include "ops/mamba3/sm90/backward_units.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::gates(int head) {
  float y[32];
  if (needs_y) {
    hopper::warpgroup_arrive();
    rows_by_rows<128, false>(y, Operand(sh.q), Operand(sh.h));
    products_end(y);
    scale_rows(y, steps().left);
  }
  hopper::named_barrier_sync(weighed, back_threads);
  if (needs_y) {
    products_begin(y);
    rows_by_columns<64>(y, Operand(sh.seen), Operand(sh.v));
    products_end(y);
  }
  if constexpr (Shared::has_room)
    hopper::named_barrier_arrive(used, back_threads);
  else
    hopper::named_barrier_sync(used, back_threads);
  if (!needs_y || !sum_of_parts(head, 0, y)) return;
  // Behind the products: what is loaded before them is spilled, and the cache has no room for that.
  uint32_t g[16];  // of d_out, where neighbours are one load
  uint32_t z[16];
  const int row = own_row(), column = own_column(), r = row % R;
  const int t[2] = {row / R, (row + 8) / R};
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const bool live = t[second] < p.n;
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
  if (up.pairs || !a.d_out.data)
    gates_of<true>(head, y, g, z);
  else
    gates_of<false>(head, y, g, z);
}

template <int R, int blocks, bool halves>
template <bool plain>
__device__ __forceinline__ void Backward<R, blocks, halves>::gates_of(int head,
                                                                      const float (&y)[32],
                                                                      const uint32_t (&g)[16],
                                                                      const uint32_t (&z)[16]) {
  constexpr int alike = Shared::alike, together = R > 4 ? 8 : 4;
  const int row = own_row(), column = own_column(), r = row % R;
  const int t[2] = {row / R, (row + 8) / R};
  const bool gated = a.z.data != nullptr;
  const float skip = sh.skip;
  const int64_t dz0 = home(sh.homes.d_z, a.grad.z, head) + column;
#pragma unroll
  for (int first = 0; first < 8; first += together) {
    float dz[2][2][together], to_z[2 * together], to_out[2 * together];
#pragma unroll
    for (int k = 0; k < together; ++k) {
      const int j = first + k, c = column + 8 * j;
      const float2 by_out = *reinterpret_cast<const float2*>(sh.mimo_out + projection_at(r, c));
      const float2 by_z = *reinterpret_cast<const float2*>(sh.mimo_z + projection_at(r, c));
      to_z[2 * k] = to_z[2 * k + 1] = to_out[2 * k] = to_out[2 * k + 1] = 0;
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const uint32_t v = *reinterpret_cast<const uint32_t*>(sh.v + place_of(row + 8 * second, c));
        const float own[2] = {y[4 * j + 2 * second] + skip * low_of(v),
                              y[4 * j + 2 * second + 1] + skip * high_of(v)};
        float2 here = {low_of(g[2 * j + second]), high_of(g[2 * j + second])};
        if (!plain && t[second] < p.n)
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
          if (mutant(ScanMutant::m3_gate_slope_dropped)) du = seen * outs[i] * sg;
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
          if (t[second] < p.n)
            store_two(a.grad.z, dz0 + t[second] * a.grad.z.stride[1] + 8 * (first + k + r), x, w);
        }
    }
#pragma unroll
    for (int slot = 0; slot < 2 * together; slot += alike) {
      float by_z[alike], by_out[alike];
#pragma unroll
      for (int i = 0; i < alike; ++i) by_z[i] = to_z[slot + i], by_out[i] = to_out[slot + i];
      if (a.grad.mimo_z.data) put_alike<R>(sh.by_z(), 2 * first + slot, by_z);
      if (a.grad.mimo_out.data) put_alike<R>(sh.by_out(), 2 * first + slot, by_out);
    }
  }
}

}  // namespace talea::mamba3::sm90
