// What: the rows of a chunk of a head as operands: read ahead, turned, projected, gated; the decays
//       of its pairs of tokens.
// Why: what a head needs is under way while the head before ends.
// Never: stores a turned row in memory.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"
#include "ops/mamba3/sm90/backward_anchor.cuh"

namespace talea::mamba3::sm90 {

// A state [P, N] of operands in memory, as a tile, by a warpgroup.
__device__ __forceinline__ void copy_state(const void* from, char* tile, int thread) {
  const uint32_t to =
      hopper::smem_address(tile) + static_cast<uint32_t>(place_of(thread / 16, thread % 16 * 8));
  const auto* const at = static_cast<const __nv_bfloat16*>(from) + thread * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    hopper::copy_16_bytes(to + static_cast<uint32_t>(i * 1024), at + i * 1024, true);
}

__device__ __forceinline__ void prefetch_row(const View& from, int64_t at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const __nv_bfloat16*>(from.data) + at));
}
// Zeros in place of what no token has.
__device__ __forceinline__ uint4 live_only(uint4 x, bool live) {
  if (!live) x = {0, 0, 0, 0};
  return x;
}

// A warp two tensors.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::put_homes() {
  if ((threadIdx.x & 31) != 0) return;
  const Unit& u = sh.unit;
  const int64_t token = u.begin + p.first, J = a.size.segment;
  Homes& to = sh.homes;
  const auto columns_of = [&](const View& v) { return cuda::at(v, u.batch, token); };
  const auto of_heads = [&](const void* buffer, int64_t each, int64_t at, int64_t bytes) {
    char* const from = static_cast<char*>(const_cast<void*>(buffer));
    return OfHeads{from + (number(0) * each + at) * bytes, static_cast<uint32_t>(each * bytes)};
  };
  // Sums of the part, [tokens of the slice, R, G, parts, N].
  const auto sums_of = [&](float* sums) -> float* {
    if (!sums) return nullptr;
    const int64_t row = (place.sequence * wave.slice_chunks + place.in_slice) * int64_t{rows};
    return sums + ((row * a.size.groups + place.group) * b.parts + place.part) * columns;
  };
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
      sh.sums_q = a.grad.q.data ? sums_of(b.dq) : nullptr;
      sh.sums_k = a.grad.k.data ? sums_of(b.dk) : nullptr;
      break;
    case 5:
      sh.from.h = of_heads(b.inner, J + 1, place.in_segment, size * 2);
      sh.from.e = of_heads(b.inner_upstream, wave.slice_chunks, place.in_slice, size * 2);
      break;
    case 6:
      sh.from.turns = of_heads(b.token_turns, J, place.in_segment, C * pairs * 8);
      sh.from.steps = of_heads(b.token_steps, J, place.in_segment, cuda::chunk_step_bytes(C));
      break;
    case 7:
      sh.from.partial = of_heads(b.partial, wave.slice_chunks, place.in_slice,
                                 int64_t{cuda::parameter_count(a.size)} * 4);
      break;
  }
}

// The state of the group's own products, where nothing reads that of the head before.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::begin_state(int head) {
  const OfHeads& from = of_keys ? sh.from.e : sh.from.h;
  copy_state(from.of(head), of_keys ? sh.e : sh.h, formed_anew(thread));
}

// All else that a head needs is under way.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::begin(int head) {
  const int all = formed_anew(static_cast<int>(threadIdx.x)), own = formed_anew(thread);
  const char* const turns = sh.from.turns.of(head);
  const uint32_t turns_to = hopper::smem_address(sh.turns);
#pragma unroll
  for (int i = 0; i < C * pairs / 2 / back_threads; ++i) {
    const int item = all + i * back_threads, t = item / (pairs / 2);
    hopper::copy_16_bytes(
        turns_to + static_cast<uint32_t>(Shared::turn_at(t, item % (pairs / 2) * 2) * 8),
        turns + item * 16, t < p.n);  // zeros behind the last token
  }
  copy_bytes<Shared::parameters * 4, back_threads>(
      b.head_parameters + head * int64_t{Shared::parameters}, sh.q_bias, all);
  copy_bytes<sizeof(ChunkSteps<C>), back_threads>(sh.from.steps.of(head), &sh.steps[head & 1], all);
  // The thread's own pieces of rows; behind the last token those of the first, which are not used.
  const View& from = of_keys ? a.k : a.q;
  const auto* const base = static_cast<const __nv_bfloat16*>(from.data) +
                           (of_keys ? sh.homes.k : sh.homes.q) + piece_column(own & 3);
  const int row0 = first_row();
  const uint32_t tile = hopper::smem_address(of_keys ? sh.k : sh.q);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row0 + i, t = row / R < p.n ? row / R : 0;
    const auto* const at = base + t * from.stride[1] + (R > 1 ? row % R * from.stride[2] : 0);
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        hopper::copy_16_bytes(
            tile + static_cast<uint32_t>(
                       place_of(row, piece_column((own & 3) + 4 * s) + half * second_piece)),
            at + piece_column(4 * s) + half * second_piece, true);
  }
  // A row of v, of z and of d_out a thread: read from the cache when the head is at work.
  const int lane_row = own % 64, t = lane_row < p.n ? lane_row : 0;
  if (of_keys && own < 64)
    prefetch_row(a.v, home(sh.homes.v, a.v, head) + t * a.v.stride[1]);
  else if (of_keys && a.z.data)
    prefetch_row(a.z, home(sh.homes.z, a.z, head) + t * a.z.stride[1]);
  else if (!of_keys && own < 64 && up.pieces)
    prefetch_row(a.d_out, d_out_home(head) + t * a.d_out.stride[1]);
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::load_values(int head) {
  const int own = formed_anew(thread), c = own % 8 * 8;
  const auto* const v =
      static_cast<const __nv_bfloat16*>(a.v.data) + home(sh.homes.v, a.v, head) + c;
  const auto* const z =
      static_cast<const __nv_bfloat16*>(a.z.data) + home(sh.homes.z, a.z, head) + c;
  const auto* const d = static_cast<const __nv_bfloat16*>(a.d_out.data) + d_out_home(head) + c;
#pragma unroll
  for (int i = 0; i < own_tokens; ++i) {
    const int t = own / 8 + 16 * i < p.n ? own / 8 + 16 * i : 0;
    v_[i] = take_now(v + t * a.v.stride[1]);
    if (a.z.data) z_[i] = take_now(z + t * a.z.stride[1]);
    if (!up.pieces) continue;
    up_[i] = take_now(d + t * a.d_out.stride[1]);
  }
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::form(int head) {
  if (of_keys) load_values(head);  // under way while rows are turned
  turn_rows();
  AnchorRows<halves> behind;
  behind.load(sh.from.h.of(head), of_keys ? 1 : 0);
  form_tables(head);
  if (of_keys) form_values(head);
  anchor<halves, pairs>(sh.e, behind, of_keys ? 1 : 0, sh.torque, sh.energy + (of_keys ? 4 : 0));
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::turn_rows() {
  char* const tile = of_keys ? sh.k : sh.q;
  const float4* const biases = of_keys ? sh.k_bias : sh.q_bias;
  const int row0 = first_row(), piece = thread & 3;
  const bool whole = p.n == C;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const bool turns = s < blocks;
    const int pp = 4 * (piece + 4 * s), c = piece_column(piece + 4 * s);
    TwoTurns by[4];
    // All loads ahead of the first store, behind which the compiler would leave them.
    uint4 raw[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        raw[i][half] =
            *reinterpret_cast<const uint4*>(tile + place_of(row0 + i, c + half * second_piece));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row0 + i, t = row / R, r = row % R;
      if (turns && (i == 0 || R == 1)) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float4 x =
              *reinterpret_cast<const float4*>(sh.turns + Shared::turn_at(t, 2 * (pp + w)));
          by[w] = {x.x, x.y, x.z, x.w};
        }
      }
      const uint4 low = raw[i][0], high = raw[i][1];
      uint32_t x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t& first = x[halves ? w : 2 * w];
        uint32_t& second = x[halves ? w + 4 : 2 * w + 1];
        const float4 bias = biases[r * 32 + pp + w];
        float4 to = {low_of(first) + bias.x, high_of(first) + bias.y, low_of(second) + bias.z,
                     high_of(second) + bias.w};
        if (turns) to = turned<halves>({first, second}, bias, by[w]);
        first = two_rounded(to.x, to.y), second = two_rounded(to.z, to.w);
      }
      if (!whole && t >= p.n) {
#pragma unroll
        for (uint32_t& y : x) y = 0;
      }
      *reinterpret_cast<uint4*>(tile + place_of(row, c)) = {x[0], x[1], x[2], x[3]};
      *reinterpret_cast<uint4*>(tile + place_of(row, c + second_piece)) = {x[4], x[5], x[6], x[7]};
    }
  }
}

// Rows of v projected, and of d_out through the gate.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::form_values(int head) {
  const int c = thread % 8 * 8;
  const bool gated = a.z.data != nullptr;
#pragma unroll
  for (int i = 0; i < own_tokens; ++i) {
    const int t = thread / 8 + 16 * i;
    const bool live = t < p.n;
    const uint4 v = live_only(v_[i], live), z = live_only(z_[i], live);
    const uint32_t vs[4] = {v.x, v.y, v.z, v.w}, zs[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int at = r * values + c, to = place_of(t * R + r, c);
      float by[8], x[8];
      take_eight(sh.mimo_v + at, by);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = by[j] * (j & 1 ? high_of(vs[j / 2]) : low_of(vs[j / 2]));
      *reinterpret_cast<uint4*>(sh.v + to) = {two_rounded(x[0], x[1]), two_rounded(x[2], x[3]),
                                              two_rounded(x[4], x[5]), two_rounded(x[6], x[7])};
      uint4 here = up_[i];  // of all r, where they are reduced
      if (r > 0 && !a.size.reduce && up.pieces)
        here = take_now(static_cast<const __nv_bfloat16*>(a.d_out.data) + d_out_home(head) +
                        (live ? t : 0) * a.d_out.stride[1] + r * a.d_out.stride[2] + c);
      here = live_only(here, live && up.pieces);
      const uint32_t ups[4] = {here.x, here.y, here.z, here.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = j & 1 ? high_of(ups[j / 2]) : low_of(ups[j / 2]);
      if (!up.pieces && a.d_out.data && live) {
        const int64_t from = d_out_home(head) + t * a.d_out.stride[1] +
                             (a.size.reduce ? 0 : r * a.d_out.stride[2]) + c * a.d_out.stride[4];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = cuda::read(a.d_out, from + j * a.d_out.stride[4]);
      }
      take_eight(sh.mimo_out + at, by);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] *= by[j];
      if (gated) {
        take_eight(sh.mimo_z + at, by);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float w = by[j] * (j & 1 ? high_of(zs[j / 2]) : low_of(zs[j / 2]));
          x[j] *= w * gate_sigmoid(w);
        }
      }
      *reinterpret_cast<uint4*>(sh.d_y + to) = {two_rounded(x[0], x[1]), two_rounded(x[2], x[3]),
                                                two_rounded(x[4], x[5]), two_rounded(x[6], x[7])};
    }
  }
}

// Of each query's token and each earlier key's: the decay, and that by the key's step.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::form_tables(int head) {
#pragma unroll
  for (int i = 0; i < (C * C + back_threads - 1) / back_threads; ++i) {
    const int item = threadIdx.x + i * back_threads, t = item / C, earlier = item % C;
    const float4 query = steps(head).pair[t], key = steps(head).pair[earlier];
    // Of later keys it may be infinite: chosen, not multiplied.
    const float decay = t > earlier ? decay_of(query, key) : 0.0f;
    sh.of_group[0].table.of[Table<R>::place(t, earlier)] = decay * key.z;
    sh.of_group[1].table.of[Table<R>::place(earlier, t)] = decay;
  }
}

}  // namespace talea::mamba3::sm90
