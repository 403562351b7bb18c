// What: the gradients behind the gate: with the projections', or of more rows a token, where y is
//       formed; d_z alone of one row a token where the next head's values are.
// Why: y is not kept; where it is formed anew, its numbers lie in registers. With more rows a token
//      the columns go to the warpgroups that form operands, which have less to do.
// Never: rounds y.
#pragma once

#include "ops/mamba3/sm90/gradients_anchor.cuh"
#include "ops/mamba3/sm90/gradients_rows.cuh"

namespace talea::mamba3::sm90 {

// Of `count` eights of columns from `from` on, a multiple of `count`. y(j, second): neighbours of
// column group `from` + j.
template <int R, int blocks, bool halves, int slabs>
template <int count, class Known, class Y>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::gates_of(int head, int from,
                                                                              float* sums,
                                                                              int own_barrier,
                                                                              Known known, Y y) {
  const bool projects = a.grad.mimo_out.data || (a.z.data && a.grad.mimo_z.data);
  const int thread = own_thread();
  const int row = thread / 32 * 16 + thread % 32 / 4, r = row % R;  // as own_row and own_column
  const int column = thread % 4 * 2 + 8 * from;
  uint32_t g[2 * count], z[2 * count];  // of d_out, where neighbours are one load
  const auto load = [&](const View& v, int64_t first, int64_t rank, bool has,
                        uint32_t(&to_words)[2 * count]) {
    const auto* at = static_cast<const __nv_bfloat16*>(v.data) + first + row / R * v.stride[1] +
                     r * rank + column;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const bool live = has && (row + 8 * second) / R < n;
      const auto* const words = reinterpret_cast<const uint32_t*>(at);
#pragma unroll
      for (int j = 0; j < count; ++j) to_words[2 * j + second] = 0;
      if (live) {
#pragma unroll
        for (int j = 0; j < count; ++j) to_words[2 * j + second] = __ldg(words + 4 * j);
      }
      at += 8 / R * v.stride[1];
    }
  };
  load(a.d_out, d_out_home(head), a.size.reduce ? 0 : a.d_out.stride[2], up.pairs, g);
  load(a.z, home(sh.homes.z, a.z, head), 0, a.z.data != nullptr, z);
  known();
  if (!up.pairs && a.d_out.data)
    gates<count, false, true>(head, from, sums, own_barrier, y, g, z);
  else if (projects)
    gates<count, true, true>(head, from, sums, own_barrier, y, g, z);
  else
    gates<count, true, false>(head, from, sums, own_barrier, y, g, z);
}

template <int R, int blocks, bool halves, int slabs>
template <int count, bool plain, bool projects, class Y>  // g holds d_out; sums of z's and out's
                                                          // projections
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::gates(
    int head, int from, float* sums, int own_barrier, Y y, const uint32_t (&g)[2 * count],
    const uint32_t (&z)[2 * count]) {
  // Columns together of which d_z, or a sum, is one number a lane.
  constexpr int alike = Shared::alike, together = 4, summed = alike > 1 ? alike / 2 : 1;
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
  const int v_at = place_of(row, column % 8) ^ from << 4;
  const int projection = projection_at(r, column % 8) ^ from * 8;
  float* const by_z_to = sums;
  float* const by_out_to = sums + 2 * count * Shared::lanes;
  if (projects) hopper::named_barrier_sync(own_barrier, 128);
#pragma unroll
  for (int first = 0; first < count; first += together) {
    float dz[2][2][together];
#pragma unroll
    for (int some = 0; some < together; some += summed) {
      float to_z[2 * summed], to_out[2 * summed];
#pragma unroll
      for (int k = some; k < some + summed; ++k) {
        const int j = first + k, c = column + 8 * j, slot = 2 * (k - some);
        const int by_at = projection ^ j * 8;
        const float2 by_out = *reinterpret_cast<const float2*>(parameters.mimo_out + by_at);
        const float2 by_z = *reinterpret_cast<const float2*>(parameters.mimo_z + by_at);
        to_z[slot] = to_z[slot + 1] = to_out[slot] = to_out[slot + 1] = 0;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const uint32_t v =
              *reinterpret_cast<const uint32_t*>(v_tile + (v_at ^ j << 4) + second * 1024);
          const float2 y_here = y(j, second);
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
        if constexpr (alike > 1) {
          put_alike<R>(by_z_to, 2 * (first + some), to_z);
          put_alike<R>(by_out_to, 2 * (first + some), to_out);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float of_z[1] = {to_z[i]}, of_out[1] = {to_out[i]};
            put_alike<R>(by_z_to, 2 * (first + some) + i, of_z);
            put_alike<R>(by_out_to, 2 * (first + some) + i, of_out);
          }
        }
      }
    }
    if (a.grad.z.data) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        if constexpr (R > together) {
          // Both neighbours of a column group are numbers of their own, of rows beside each other.
          float all[R];
#pragma unroll
          for (int i = 0; i < R; ++i) all[i] = dz[second][i & 1][i / 2];
          const float x = shared_by_ranks<R>(all), w = __shfl_xor_sync(0xffffffffu, x, 4);
          if (r % 2 == 0 && t[second] < n)
            store_two(a.grad.z, dz0 + t[second] * a.grad.z.stride[1] + 8 * (first + r / 2), x, w);
        } else {
#pragma unroll
          for (int k = 0; k < together; k += R) {
            float low[R], high[R];
#pragma unroll
            for (int i = 0; i < R; ++i)
              low[i] = dz[second][0][k + i], high[i] = dz[second][1][k + i];
            const float x = shared_by_ranks<R>(low), w = shared_by_ranks<R>(high);
            if (t[second] < n)
              store_two(a.grad.z, dz0 + t[second] * a.grad.z.stride[1] + 8 * (first + k + r), x, w);
          }
        }
      }
    }
  }
  if (projects) {
    hopper::named_barrier_sync(own_barrier, 128);
    constexpr int items = R * values * count / 8;
    store_alike(by_z_to, items, values, partial + 8 * from);
    store_alike(by_out_to, items, values, partial + R * values + 8 * from);
  } else if (from == 0) {
    for (int i = thread; i < 2 * R * values; i += 128) partial[i] = 0;
  }
}

// The columns that others gate, as they lie in registers.
template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::hand_on(int head,
                                                                             const float (&y)[32]) {
  if constexpr (R == 1) return;
  constexpr int first = 4 * Shared::own_gates;
  if (head > place.first) hopper::named_barrier_sync(y_read, of_y);
  float* const to = sh.y + thread * 2;
#pragma unroll
  for (int i = 0; i < (32 - first) / 2; ++i)
    *reinterpret_cast<float2*>(to + i * 256) = {y[first + 2 * i], y[first + 2 * i + 1]};
  hopper::named_barrier_arrive(y_known + stage(head), of_y);
}

// Four eights of columns by a warpgroup that forms operands; as one text its instructions are
// fetched for both.
template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::gate_half(int head,
                                                                               bool of_rows) {
  const int place_of_half = Shared::gating > 1 && !of_rows;
  const float* const from = sh.y + place_of_half * (rows * values / 2) + own_thread() * 2;
  gates_of<4>(
      head, of_rows ? 0 : 4, sh.sums_y[place_of_half], of_rows ? rows_own : values_own,
      [&] { hopper::named_barrier_sync(y_known + stage(head), of_y); },
      [&](int j, int second) {
        return *reinterpret_cast<const float2*>(from + (2 * j + second) * 256);
      });
  if (head + 1 < place.last) hopper::named_barrier_arrive(y_read, of_y);
}

// d_z, of rows of one row a token. What is read of memory is under way while y is awaited, and the
// next two rows' while those at hand are at work.
template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::gates_back(int head) {
  const int thread = own_thread(), c = thread % 8 * 8;
  float* const partial =
      reinterpret_cast<float*>(sh.from.partial.of(head)) + 2 * R * columns + R * values;
  partial[thread] = 0;
  static_assert(2 * R * values == 128);
  // From here on all is sixteen rows behind the one before, of which shared places are alike.
  const int t0 = thread / 8;
  const auto row_of = [&](const View& v, int64_t first) {
    return static_cast<const __nv_bfloat16*>(v.data) + first + t0 * v.stride[1] + c;
  };
  const auto* z_at = row_of(a.z, home(sh.homes.z, a.z, head));
  const auto* up_at = row_of(a.d_out, d_out_home(head));
  int64_t to = home(sh.homes.d_z, a.grad.z, head) + t0 * a.grad.z.stride[1] + c;
  uint4 z[2], ups[2];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool live = first + 16 * i < n;  // or any, of which nothing is stored
      z[i] = load_now(live ? z_at : a.z.data);
      ups[i] = load_now(live ? up_at : a.d_out.data);
      z_at += 16 * a.z.stride[1], up_at += 16 * a.d_out.stride[1];
    }
  };
  load(t0);
  const auto& tiles = sh.operands[stage(head)];
  const char* y_at = tiles.h + Shared::y_at(t0, c);
  const char* v_at = tiles.v + place_of(t0, c);
  const float skip = sh.of_head[stage(head)].skip;
  hopper::named_barrier_sync(y_known + stage(head), 256);
  const auto back = [&](auto projected) {
#pragma unroll 1
    for (int first = t0; first < rows; first += 32) {
      const uint4 z_here[2] = {z[0], z[1]}, up_here[2] = {ups[0], ups[1]};
      if (first + 32 < rows) load(first + 32);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        gate_back<projected()>(head, y_at + i * 4096, v_at + i * 2048, skip, z_here[i], up_here[i],
                               first + 16 * i < n, to);
        to += 16 * a.grad.z.stride[1];
      }
      y_at += 8192, v_at += 4096;
    }
  };
  if (projects())
    back(std::true_type{});
  else
    back(std::false_type{});
}

// Eight columns of y to where they go in d_z, if anywhere.
template <int R, int blocks, bool halves, int slabs>
template <bool projected>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::gate_back(
    int head, const char* y_at, const char* v_at, float skip, const uint4& z, const uint4& up_here,
    bool live, int64_t to) {
  const auto* const eight = reinterpret_cast<const float4*>(y_at);
  const float4 low = eight[0], high = eight[1];
  float y[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, by[8];
  if (skip != 0) {
    const uint4 v = *reinterpret_cast<const uint4*>(v_at);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      y[j] += skip * (j & 1 ? high_of(words[j / 2]) : low_of(words[j / 2]));
  }
  const uint32_t own[4] = {up_here.x, up_here.y, up_here.z, up_here.w};
  const auto& parameters = sh.of_head[stage(head)];
  if constexpr (projected) {
    const int c = own_thread() % 8 * 8;
    take_projection(parameters.mimo_out, 0, c, by);
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] *= by[j];
    take_projection(parameters.mimo_z, 0, c, by);
  }
  const uint32_t zs[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float w = j & 1 ? high_of(zs[j / 2]) : low_of(zs[j / 2]);
    y[j] *= j & 1 ? high_of(own[j / 2]) : low_of(own[j / 2]);
    if constexpr (projected) w *= by[j], y[j] *= by[j];
    const float sg = gate_sigmoid(w);
    if (mutant(ScanMutant::m3_gate_slope_dropped_siso)) w = 0;
    y[j] *= fmaf(w * sg, 1 - sg, sg);
  }
  if (!live) return;
  if (a.grad.z.dtype == DType::bf16) {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.grad.z.data) + to) = {
        two_rounded(y[0], y[1]), two_rounded(y[2], y[3]), two_rounded(y[4], y[5]),
        two_rounded(y[6], y[7])};
  } else {
    auto* const wide = reinterpret_cast<float4*>(static_cast<float*>(a.grad.z.data) + to);
    wide[0] = {y[0], y[1], y[2], y[3]}, wide[1] = {y[4], y[5], y[6], y[7]};
  }
}

}  // namespace talea::mamba3::sm90
