// What: the gradients behind the gate where the projections' are wanted as well, or a token has more
//       than one row.
// Why: y is not kept; where it is formed anew, its numbers lie in registers. With more rows a token
//      half of the columns go to the warpgroup that forms values, which has less to do.
// Never: rounds y.
#pragma once

#include "ops/mamba3/sm90/gradients_rows.cuh"

namespace talea::mamba3::sm90 {

// Of columns 8 `from` to 8 `to`. y(j, second): neighbours of column group j.
template <int R, int blocks, bool halves>
template <int from, int to, class Known, class Y>
__device__ __forceinline__ void Gradients<R, blocks, halves>::gates_of(int head, float* sums,
                                                                       int own_barrier, Known known,
                                                                       Y y) {
  constexpr int count = 2 * (to - from);
  const bool projects = a.grad.mimo_out.data || (a.z.data && a.grad.mimo_z.data);
  const int thread = own_thread();
  const int row = thread / 32 * 16 + thread % 32 / 4, r = row % R;  // as own_row and own_column
  const int column = thread % 4 * 2 + 8 * from;
  uint32_t g[count], z[count];  // of d_out, where neighbours are one load
  const auto load = [&](const View& v, int64_t first, int64_t rank, bool has,
                        uint32_t(&to_words)[count]) {
    const auto* at = static_cast<const __nv_bfloat16*>(v.data) + first + row / R * v.stride[1] +
                     r * rank + column;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const bool live = has && (row + 8 * second) / R < n;
      const auto* const words = reinterpret_cast<const uint32_t*>(at);
#pragma unroll
      for (int j = 0; j < to - from; ++j) to_words[2 * j + second] = 0;
      if (live) {
#pragma unroll
        for (int j = 0; j < to - from; ++j) to_words[2 * j + second] = __ldg(words + 4 * j);
      }
      at += 8 / R * v.stride[1];
    }
  };
  load(a.d_out, d_out_home(head), a.size.reduce ? 0 : a.d_out.stride[2], up.pairs, g);
  load(a.z, home(sh.homes.z, a.z, head), 0, a.z.data != nullptr, z);
  known();
  if (!up.pairs && a.d_out.data)
    gates<from, to, false, true>(head, sums, own_barrier, y, g, z);
  else if (projects)
    gates<from, to, true, true>(head, sums, own_barrier, y, g, z);
  else
    gates<from, to, true, false>(head, sums, own_barrier, y, g, z);
}

template <int R, int blocks, bool halves>
template <int from, int to, bool plain, bool projects, class Y>  // g holds d_out; sums of
                                                                 // z's and out's projections
__device__ __forceinline__ void Gradients<R, blocks, halves>::gates(
    int head, float* sums, int own_barrier, Y y, const uint32_t (&g)[2 * (to - from)],
    const uint32_t (&z)[2 * (to - from)]) {
  // Columns together of which d_z, or a sum, is one number a lane.
  constexpr int alike = Shared::alike, together = 4, summed = alike / 2;
  const auto& parameters = sh.of_head[stage(head)];
  const char* const v_tile = sh.operands[stage(head)].v;
  const int thread = own_thread();
  const int row = thread / 32 * 16 + thread % 32 / 4, r = row % R;  // as own_row and own_column
  const int column = thread % 4 * 2 + 8 * from;
  const int t[2] = {row / R, (row + 8) / R};
  const bool gated = a.z.data != nullptr;
  const float skip = parameters.skip;
  const int64_t dz0 = home(sh.homes.d_z, a.grad.z, head) + column;
  float* const partial =
      reinterpret_cast<float*>(sh.from.partial.of(head)) + 2 * R * columns + R * values;
  // Columns eight apart lie in other pieces of a row, of which rows eight apart swap the same.
  const int v_at = place_of(row, column % 8), projection = projection_at(r, column % 8);
  float* const by_z_to = sums;
  float* const by_out_to = sums + 2 * (to - from) * Shared::lanes;
  if (projects) hopper::named_barrier_sync(own_barrier, 128);
#pragma unroll
  for (int first = 0; first < to - from; first += together) {
    float dz[2][2][together];
#pragma unroll
    for (int some = 0; some < together; some += summed) {
      float to_z[alike], to_out[alike];
#pragma unroll
      for (int k = some; k < some + summed; ++k) {
        const int j = first + k, c = column + 8 * j, slot = 2 * (k - some);
        const int by_at = projection ^ (from + j) * 8;
        const float2 by_out = *reinterpret_cast<const float2*>(parameters.mimo_out + by_at);
        const float2 by_z = *reinterpret_cast<const float2*>(parameters.mimo_z + by_at);
        to_z[slot] = to_z[slot + 1] = to_out[slot] = to_out[slot + 1] = 0;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const uint32_t v =
              *reinterpret_cast<const uint32_t*>(v_tile + (v_at ^ (from + j) << 4) + second * 1024);
          const float2 y_here = y(from + j, second);
          const float own[2] = {y_here.x + skip * low_of(v), y_here.y + skip * high_of(v)};
          float2 here = {low_of(g[2 * j + second]), high_of(g[2 * j + second])};
          if (!plain && t[second] < n)
            here = up.two(d_out_home(head) + t[second] * a.d_out.stride[1] +
                          (a.size.reduce ? 0 : r * a.d_out.stride[2]) + c * a.d_out.stride[4]);
          const float ups[2] = {here.x, here.y}, outs[2] = {by_out.x, by_out.y};
          const float bys[2] = {by_z.x, by_z.y};
          const float z_here[2] = {low_of(z[2 * j + second]), high_of(z[2 * j + second])};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float seen = ups[i] * own[i];
            const float w = z_here[i] * bys[i], sg = gate_sigmoid(w), wsg = w * sg;
            float du = seen * outs[i] * fmaf(wsg, 1 - sg, sg);
            if (R == 1 ? mutant(ScanMutant::m3_gate_slope_dropped_projected)
                       : mutant(ScanMutant::m3_gate_slope_dropped_ranks))
              du = seen * outs[i] * sg;
            dz[second][i][k] = du * bys[i];
            to_z[slot + i] = fmaf(du, z_here[i], to_z[slot + i]);
            to_out[slot + i] = fmaf(seen, gated ? wsg : 1.0f, to_out[slot + i]);
          }
        }
      }
      if constexpr (projects) {
        put_alike<R>(by_z_to, 2 * (first + some), to_z);
        put_alike<R>(by_out_to, 2 * (first + some), to_out);
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
  }
  if (projects) {
    hopper::named_barrier_sync(own_barrier, 128);
    constexpr int items = R * values * (to - from) / 8;
    store_alike(by_z_to, items, values, partial + 8 * from);
    store_alike(by_out_to, items, values, partial + R * values + 8 * from);
  } else if (from == 0) {
    for (int i = thread; i < 2 * R * values; i += 128) partial[i] = 0;
  }
}

// The half of the warpgroup that forms values.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::gate_half(int head) {
  const float* const from = sh.y[stage(head)] + own_thread() * 2;
  gates_of<4, 8>(
      head, sh.sums_y, values_own, [&] { hopper::named_barrier_sync(y_known + stage(head), 256); },
      [&](int j, int second) {
        return *reinterpret_cast<const float2*>(from + (2 * (j - 4) + second) * 256);
      });
}

}  // namespace talea::mamba3::sm90
