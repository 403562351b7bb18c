// What: the two warpgroups that form operands of a head: rows of q and k turned; values, gated rows of
//       d_out and states.
// Why: they are one head ahead of those that multiply.
// Never: stores a turned row in memory.
#pragma once

#include "ops/mamba3/sm90/gradients.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::put_homes(const Args& a,
                                                                        const UnitBuffers& b,
                                                                        const Wave& wave,
                                                                        Shared& sh) {
  if ((threadIdx.x & 31) != 0) return;
  const Unit& u = sh.unit;
  const Place& place = sh.place;
  const int64_t token = u.begin + sh.part.first;
  Homes& to = sh.homes;
  const auto columns_of = [&](const View& v) { return cuda::at(v, u.batch, token); };
  const auto of_heads = [&](const void* buffer, int64_t each, int64_t at, int64_t bytes) {
    char* const from = static_cast<char*>(const_cast<void*>(buffer));
    return OfHeads{from + (place.sequence * a.size.heads * each + at) * bytes,
                   static_cast<uint32_t>(each * bytes)};
  };
  const int64_t J = a.size.segment;
  switch (threadIdx.x / 32) {
    case 0:
      to.q = cuda::at(a.q, u.batch, token, 0, u.group);
      to.k = cuda::at(a.k, u.batch, token, 0, u.group);
      break;
    case 1:
      to.v = columns_of(a.v);
      to.z = columns_of(a.z);
      break;
    case 2:
      to.d_out = columns_of(a.d_out);
      to.angles = columns_of(a.angles);
      break;
    case 3:
      to.d_v = columns_of(a.grad.v);
      to.d_z = columns_of(a.grad.z);
      break;
    case 4:
      to.d_angles = columns_of(a.grad.angles);
      break;
    case 5:
      sh.from.h = of_heads(b.inner, J + 1, place.in_segment, size * 2);
      break;
    case 6:
      sh.from.e = of_heads(b.inner_upstream, wave.slice_chunks, place.in_slice, size * 2);
      break;
    case 7:
      sh.from.turns = of_heads(b.token_turns, J, place.in_segment, C * pairs * 8);
      break;
    case 8:
      sh.from.steps = of_heads(b.token_steps, J, place.in_segment, cuda::chunk_step_bytes(C));
      break;
    case 9:
      sh.from.partial = of_heads(b.partial, wave.slice_chunks, place.in_slice,
                                 int64_t{cuda::parameter_count(a.size)} * 4);
      break;
  }
}

// A state [P, N] of operands in memory, as a tile.
__device__ __forceinline__ void copy_whole_state(const void* from, char* tile, int thread) {
  const uint32_t to =
      hopper::smem_address(tile) + static_cast<uint32_t>(place_of(thread / 16, thread % 16 * 8));
  const auto* const at = static_cast<const __nv_bfloat16*>(from) + thread * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    hopper::copy_16_bytes(to + static_cast<uint32_t>(i * 1024), at + i * 1024, true);
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::begin_rows(int head) {
  auto& to = sh.operands[stage(head)];
  const int thread = formed_anew(this->thread);
  copy_rows<R, 128>(a.q, sh.homes.q, n, to.q, thread);
  copy_rows<R, 128>(a.k, sh.homes.k, n, to.k, thread);
  copy_bytes<R * columns * 8, 128>(b.head_parameters + head * int64_t{Shared::parameters},
                                   sh.of_head[stage(head)].q_bias, thread);
  const char* const turns = sh.from.turns.of(head) + thread * 16;
  const uint32_t turns_to = hopper::smem_address(sh.turns[stage(head)]);
#pragma unroll
  for (int i = 0; i < C * pairs / 256; ++i) {
    const int item = thread + i * 128, t = item / (pairs / 2), pair = item % (pairs / 2) * 2;
    hopper::copy_16_bytes(turns_to + static_cast<uint32_t>(Shared::turn_at(t, pair) * 8),
                          turns + i * 2048, t < n);
  }
}

// A thread has two pairs of some tokens, and two that no pair turns.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::finish_rows(int head) {
  static_assert(R == 1);
  constexpr int each = C / 8;
  auto& to = sh.operands[stage(head)];
  const auto& parameters = sh.of_head[stage(head)];
  const float2* const turns = sh.turns[stage(head)];
  copies_done();
  hopper::named_barrier_sync(rows_own, 128);
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const int pp = (thread & 15) + 16 * block;
    const bool turned = block < blocks;
    if (!turned && !a.q_bias.data && !a.k_bias.data) break;
    const float4 q_bias = parameters.q_bias[pp], k_bias = parameters.k_bias[pp];
    const float4 bias[4] = {q_bias, k_bias, q_bias, k_bias};
#pragma unroll 1
    for (int j = 0; j < each; j += 2) {
      const int t0 = (thread >> 4) * each + j;
      if (t0 >= n) break;
      TwoTurns by[4];
      char* at[4];
      bool live[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = t0 + i / 2;
        if (turned) {
          const float4 x = *reinterpret_cast<const float4*>(turns + Shared::turn_at(t, 2 * pp));
          by[i] = {x.x, x.y, x.z, x.w};
        }
        at[i] = (i & 1 ? to.k : to.q) + place_of(t, halves ? 2 * pp : 4 * pp);
        live[i] = t < n;
      }
      if (turned)
        turn_all<halves, true>(at, live, bias, by);
      else
        turn_all<halves, false>(at, live, bias, by);
    }
  }
  hopper::fence_async_shared();
  hopper::named_barrier_arrive(full + stage(head), gradient_threads);
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::begin_values(int head) {
  auto& to = sh.operands[stage(head)];
  const int thread = formed_anew(this->thread);
  if constexpr (R == 1) copy_values<128>(a, home(sh.homes.v, a.v, head), sh.part, to.v, thread);
  if (up.pieces) {
    const auto* const from =
        static_cast<const __nv_bfloat16*>(a.d_out.data) + d_out_home(head) + thread % 8 * 8;
    const uint32_t tile =
        hopper::smem_address(to.d_y) + static_cast<uint32_t>(place_of(thread / 8, thread % 8 * 8));
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) {
      const int row = thread / 8 + 16 * i, t = row / R;
      const int64_t at = t * a.d_out.stride[1] + (a.size.reduce ? 0 : row % R * a.d_out.stride[2]);
      hopper::copy_16_bytes(tile + static_cast<uint32_t>(i * 2048), from + (t < n ? at : 0), t < n);
    }
  }
  copy_bytes<(Shared::parameters - 2 * R * columns) * 4, 128>(
      b.head_parameters + head * int64_t{Shared::parameters} + 2 * R * columns,
      sh.of_head[stage(head)].mimo_v, thread);
  const char* const steps_from = sh.from.steps.of(head);
  copy_bytes<sizeof(StepsNear<C>), 128>(steps_from, &sh.near[stage(head)], thread);
  copy_bytes<sizeof(StepsLate<C>), 128>(steps_from + sizeof(StepsNear<C>), &late(head), thread);
  copy_whole_state(sh.from.h.of(head), to.h, thread);
  copy_whole_state(sh.from.e.of(head), to.e, thread);
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::finish_values(int head) {
  auto& to = sh.operands[stage(head)];
  const int row0 = thread / 8, c = thread % 8 * 8;
  RawValues<R, 128> own(thread);
  own.load(a, home(sh.homes.v, a.v, head), sh.part);
  copies_done();
  hopper::named_barrier_sync(values_own, 128);
  if (R > 1 || a.mimo_v.data)
    own.put(sh.part, sh.of_head[stage(head)].mimo_v, nullptr, to.v, nullptr);
    // A loop of two rows: what is unrolled further is fetched longer than it runs.
#pragma unroll 1
  for (int first = row0; up.pieces && first < rows; first += 32) {
    const uint4 z[2] = {z_of(head, first / R, c), z_of(head, (first + 16) / R, c)};
    uint4 both[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      both[i] = *reinterpret_cast<const uint4*>(to.d_y + place_of(first + 16 * i, c));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t words[4] = {both[i].x, both[i].y, both[i].z, both[i].w};
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = j & 1 ? high_of(words[j / 2]) : low_of(words[j / 2]);
      both[i] = gated(head, x, z[i], (first + 16 * i) % R * values + c);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<uint4*>(to.d_y + place_of(first + 16 * i, c)) = both[i];
  }
  if (!up.pieces) gate_apart(head);
  anchor(head);
  hopper::fence_async_shared();
  hopper::named_barrier_arrive(full + stage(head), gradient_threads);
}

// dO of eight columns of a row, rounded.
template <int R, int blocks, bool halves>
__device__ __forceinline__ uint4 Gradients<R, blocks, halves>::gated(int head, float (&x)[8],
                                                                     const uint4& z,
                                                                     int from) const {
  const auto& parameters = sh.of_head[stage(head)];
  float by[8];
  take_eight(parameters.mimo_out + from, by);
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] *= by[j];
  if (a.z.data) {
    const uint32_t words[4] = {z.x, z.y, z.z, z.w};
    take_eight(parameters.mimo_z + from, by);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float w = (j & 1 ? high_of(words[j / 2]) : low_of(words[j / 2])) * by[j];
      x[j] *= w * gate_sigmoid(w);
    }
  }
  return {two_rounded(x[0], x[1]), two_rounded(x[2], x[3]), two_rounded(x[4], x[5]),
          two_rounded(x[6], x[7])};
}

// Where d_out has not been copied: neighbours that are not one load.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::gate_apart(int head) {
#pragma unroll 1
  for (int row = thread / 8; row < rows; row += 16) {
    const int t = row / R, r = row % R, c = thread % 8 * 8;
    uint4 to = {0, 0, 0, 0};
    if (t < n && a.d_out.data) {
      const int64_t from = d_out_home(head) + t * a.d_out.stride[1] +
                           (a.size.reduce ? 0 : r * a.d_out.stride[2]) + c * a.d_out.stride[4];
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = cuda::read(a.d_out, from + j * a.d_out.stride[4]);
      to = gated(head, x, z_of(head, t, c), r * values + c);
    }
    *reinterpret_cast<uint4*>(sh.operands[stage(head)].d_y + place_of(row, c)) = to;
  }
}

// d_z, of rows of one row a token.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::gates_back(int head) {
  const int row0 = thread / 8, c = thread % 8 * 8;
  const auto& parameters = sh.of_head[stage(head)];
  const auto& tiles = sh.operands[stage(head)];
  float* const partial =
      reinterpret_cast<float*>(sh.from.partial.of(head)) + 2 * R * columns + R * values;
  for (int i = thread; i < 2 * R * values; i += 128) partial[i] = 0;
  const float skip = parameters.skip;
  const int64_t home0 = home(sh.homes.d_z, a.grad.z, head) + c;
#pragma unroll 1
  for (int first = row0; first < rows; first += 32) {
    uint4 z[2], ups[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = first + 16 * i;
      z[i] = z_of(head, t, c), ups[i] = {0, 0, 0, 0};
      if (t < n)
        ups[i] =
            __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.d_out.data) +
                                                 d_out_home(head) + t * a.d_out.stride[1] + c));
    }
    if (first == row0) hopper::named_barrier_sync(y_known + stage(head), 256);
    float ys[2][8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = first + 16 * i;
      float(&y)[8] = ys[i];
      float by[8];
      const float4 low = *reinterpret_cast<const float4*>(tiles.h + Shared::y_at(t, c));
      const float4 high = *reinterpret_cast<const float4*>(tiles.h + Shared::y_at(t, c + 4));
      y[0] = low.x, y[1] = low.y, y[2] = low.z, y[3] = low.w;
      y[4] = high.x, y[5] = high.y, y[6] = high.z, y[7] = high.w;
      if (skip != 0) {
        const uint4 v = *reinterpret_cast<const uint4*>(tiles.v + place_of(t, c));
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 8; ++j)
          y[j] += skip * (j & 1 ? high_of(words[j / 2]) : low_of(words[j / 2]));
      }
      const uint32_t own[4] = {ups[i].x, ups[i].y, ups[i].z, ups[i].w};
      take_eight(parameters.mimo_out + c, by);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        y[j] *= (j & 1 ? high_of(own[j / 2]) : low_of(own[j / 2])) * by[j];
      const uint32_t zs[4] = {z[i].x, z[i].y, z[i].z, z[i].w};
      take_eight(parameters.mimo_z + c, by);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float w = (j & 1 ? high_of(zs[j / 2]) : low_of(zs[j / 2])) * by[j];
        const float sg = gate_sigmoid(w);
        y[j] *= by[j] * fmaf(w * sg, 1 - sg, sg);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = first + 16 * i;
      const float(&y)[8] = ys[i];
      if (t >= n) continue;
      const int64_t to = home0 + t * a.grad.z.stride[1];
      if (a.grad.z.dtype == DType::bf16) {
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.grad.z.data) + to) = {
            two_rounded(y[0], y[1]), two_rounded(y[2], y[3]), two_rounded(y[4], y[5]),
            two_rounded(y[6], y[7])};
      } else {
        auto* const wide = reinterpret_cast<float4*>(static_cast<float*>(a.grad.z.data) + to);
        wide[0] = {y[0], y[1], y[2], y[3]}, wide[1] = {y[4], y[5], y[6], y[7]};
      }
    }
  }
}

// <Hout, E>, and torque(Hout, E) of each pair: a thread has 16 columns of four rows of P.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::anchor(int head) {
  const int thread = formed_anew(this->thread);
  const char* const tile = sh.operands[stage(head)].e;
  const int slot = stage(head), j = thread & 7, lane = thread & 31, warp = thread / 32;
  const int first = halves ? 8 * j : 16 * j, second = halves ? 64 + 8 * j : 16 * j + 8;
  const auto* const behind =
      reinterpret_cast<const __nv_bfloat16*>(sh.from.h.of(head)) + size + thread / 8 * columns;
  float work = 0, torque[8];
#pragma unroll
  for (float& x : torque) x = 0;
#pragma unroll 2
  for (int i = 0; i < 4; ++i) {
    const int row = thread / 8 + 16 * i;
    const uint4 x0 = __ldg(reinterpret_cast<const uint4*>(behind + 16 * i * columns + first));
    const uint4 x1 = __ldg(reinterpret_cast<const uint4*>(behind + 16 * i * columns + second));
    const uint4 e0 = *reinterpret_cast<const uint4*>(tile + place_of(row, first));
    const uint4 e1 = *reinterpret_cast<const uint4*>(tile + place_of(row, second));
    const uint32_t hs[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
    const uint32_t es[8] = {e0.x, e0.y, e0.z, e0.w, e1.x, e1.y, e1.z, e1.w};
#pragma unroll
    for (int w = 0; w < 8; ++w)
      work += low_of(hs[w]) * low_of(es[w]) + high_of(hs[w]) * high_of(es[w]);
    if (8 * j >= pairs) continue;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      if constexpr (halves) {
        const auto of = [&](uint32_t both) { return w & 1 ? high_of(both) : low_of(both); };
        torque[w] += of(hs[w / 2]) * of(es[4 + w / 2]) - of(hs[4 + w / 2]) * of(es[w / 2]);
      } else {
        torque[w] += low_of(hs[w]) * high_of(es[w]) - high_of(hs[w]) * low_of(es[w]);
      }
    }
  }
  const double sum = static_cast<double>(over_warp(work));
  if (lane == 0) sh.energy[slot][warp] = sum;
  // Over the four rows of a warp.
  share<4>(torque, 16), share<2>(torque, 8);
  if (8 * j < pairs)
    *reinterpret_cast<float2*>(sh.torque[third(head)][warp] + 8 * j + lane / 16 * 4 +
                               lane / 8 % 2 * 2) = {torque[0], torque[1]};
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::form_rows() {
  const bool shared_angles = a.angles.stride[2] == 0;
  if (shared_angles) read_rates(place.first);
#pragma unroll 1
  for (int head = place.first - 1; head <= place.last; ++head) {
    // Room for the next one, and what the one before has left.
    if (head > place.first) hopper::named_barrier_sync(done, gradient_threads);
    if (head + 1 < place.last) begin_rows(head + 1);
    if (head > place.first) {
      if (!shared_angles) read_rates(head - 1);
      angles_back(head - 1);
      if (head < place.last) hopper::named_barrier_arrive(heard, gradient_threads);
    }
    if (head + 1 < place.last) finish_rows(head + 1);
  }
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::form_values() {
#pragma unroll 1
  for (int head = place.first - 1; head <= place.last; ++head) {
    if (head > place.first) hopper::named_barrier_sync(done, gradient_threads);
    if (head + 1 < place.last) begin_values(head + 1);
    if (head > place.first) {
      decays_back(head - 1);
      if (head < place.last) hopper::named_barrier_arrive(heard, gradient_threads);
    }
    if (head + 1 < place.last) finish_values(head + 1);
    if (head >= place.first && head < place.last && gates_apart()) gates_back(head);
  }
}

}  // namespace talea::mamba3::sm90
