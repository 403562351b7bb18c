// What: the two warpgroups that form operands of a head: rows of q and k turned; values, gated rows of
//       d_out and states.
// Why: they are one head ahead of those that multiply.
// Never: stores a turned row in memory.
#pragma once

#include "ops/mamba3/sm90/gradients_anchor.cuh"
#include "ops/mamba3/sm90/gradients_gates.cuh"
#include "ops/mamba3/sm90/siso_rows.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves, int slabs>
template <bool handed>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::put_homes(const Args& a,
                                                                               const UnitBuffers& b,
                                                                               const Wave& wave,
                                                                               Shared& sh) {
  if ((threadIdx.x & 31) != 0) return;
  const Unit& u = sh.unit;
  const Place& place = sh.place;
  const int64_t token = u.begin + sh.part.first;
  Homes& to = sh.homes;
  const auto columns_of = [&](const View& v) { return cuda::at(v, u.batch, token); };
  // together: units that share it.
  const auto of_heads = [&](const void* buffer, int64_t each, int64_t at, int64_t bytes,
                            int together = 1) {
    char* const from = static_cast<char*>(const_cast<void*>(buffer));
    return OfHeads{from + (place.sequence * (a.size.heads / together) * each + at) * bytes,
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
      sh.from.h = of_heads(b.inner, states_of_head<handed>(a), state_of_chunk<handed>(a, b, place),
                           size * 2);
      break;
    case 6:
      sh.from.e = of_heads(b.inner_upstream, wave.slice_chunks, place.in_slice, size * 2);
      break;
    case 7:
      sh.from.turns = of_heads(b.token_turns, J, place.in_segment, C * pairs * 8, slabs);
      break;
    case 8:
      sh.from.steps =
          of_heads(b.token_steps, J, place.in_segment, cuda::chunk_step_bytes(C), slabs);
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

// copy_rows where none is missing.
template <int R>
__device__ __forceinline__ void copy_all_rows(const View& from, int64_t home, char* tile,
                                              int thread) {
  const uint32_t to =
      hopper::smem_address(tile) + static_cast<uint32_t>(place_of(thread / 16, thread % 16 * 8));
  const int64_t step = from.stride[1] * (16 / R);  // bytes of eight rows
  const int row0 = thread / 16;
  const auto* first = static_cast<const __nv_bfloat16*>(from.data) + home +
                      row0 / R * from.stride[1] + thread % 16 * 8;
  if constexpr (R > 1) first += row0 % R * from.stride[2];
  const char* at = reinterpret_cast<const char*>(first);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    hopper::copy_16_bytes(to + static_cast<uint32_t>(i * 1024), at, true);
    at += step;
  }
}

template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::begin_rows(int head) {
  auto& to = sh.operands[stage(head)];
  const int thread = own_thread();
  if (!is_first(head)) return copy_whole_state(sh.from.h.of(head), to.h, thread);
  auto& turned = slabs > 1 ? sh.operands[shared_stage(head)] : to;
  const char* const turns = sh.from.turns.of(head_of(head)) + thread * 16;
  // Swapped by row: eight rows on they lie alike.
  const int t0 = thread / (pairs / 2);
  const uint32_t turns_to =
      hopper::smem_address(sh.turns[shared_stage(head)]) +
      static_cast<uint32_t>(Shared::turn_at(t0, thread % (pairs / 2) * 2) * 8);
  constexpr int apart = 256 / pairs;  // tokens
  static_assert(apart % 8 == 0);
  if constexpr (R > 1) hopper::named_barrier_sync(rows_own, 128);  // biases are read
  if (n == C) {
    copy_all_rows<R>(a.q, sh.homes.q, turned.q, thread);
    copy_all_rows<R>(a.k, sh.homes.k, turned.k, thread);
#pragma unroll
    for (int i = 0; i < C / apart; ++i)
      hopper::copy_16_bytes(turns_to + static_cast<uint32_t>(i * 2048), turns + i * 2048, true);
  } else {
    copy_rows<R, 128>(a.q, Cut{}, 0, sh.homes.q, n, turned.q, thread);
    copy_rows<R, 128>(a.k, Cut{}, 0, sh.homes.k, n, turned.k, thread);
#pragma unroll
    for (int i = 0; i < C / apart; ++i)
      hopper::copy_16_bytes(turns_to + static_cast<uint32_t>(i * 2048), turns + i * 2048,
                            t0 + i * apart < n);
  }
  copy_bytes<R * columns * 8, 128>(b.head_parameters + head * int64_t{Shared::parameters},
                                   biases(head).q_bias, thread);
  const char* const steps_from = sh.from.steps.of(head_of(head));
  copy_bytes<sizeof(StepsNear<C>), 128>(steps_from, &sh.near[shared_stage(head)], thread);
  copy_bytes<sizeof(StepsLate<C>), 128>(steps_from + sizeof(StepsNear<C>), &late(head), thread);
  copy_whole_state(sh.from.h.of(head), to.h, thread);
}

// A thread has two pairs of rows eight apart, and two that no pair turns. A warp has rows four
// apart, whose words lie in other halves of a panel.
template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::finish_rows(int head) {
  auto& to = sh.operands[shared_stage(head)];
  static_assert(offsetof(typename Shared::Operands, k) == wide_bytes);
  const auto& parameters = biases(head);
  const float2* const turns = sh.turns[shared_stage(head)];
  copies_done();
  if (is_first(head)) hopper::named_barrier_sync(rows_own, 128);
  const int thread = own_thread();
  const int row0 = thread / 32 + (thread & 16) / 4, r = row0 % R, t0 = row0 / R;
  // whole: no row is behind the last token's.
  const auto turn = [&](auto whole) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int pp = (thread & 15) + 16 * block;
      const bool turned = block < blocks;
      if (!turned && !a.q_bias.data && !a.k_bias.data) break;
      const float4 q_bias = parameters.q_bias[r * 32 + pp];
      const float4 k_bias = parameters.k_bias[r * 32 + pp];
      const float4 bias[4] = {q_bias, k_bias, q_bias, k_bias};
      const int turns_at = Shared::turn_at(t0, 2 * pp);
      // Rows eight apart swap their pieces alike; k lies behind q. That they do not meet is hidden
      // from the compiler, which would have their loads wait for each other's stores.
      int row_at[2] = {place_of(row0, halves ? 2 * pp : 4 * pp), 0};
      row_at[1] = formed_anew(row_at[0] + 1024);
#pragma unroll 1
      for (int first = 0; first < rows; first += 16) {
        if (!whole() && t0 + first / R >= n) break;
        TwoTurns by[4];
        char* at[4];
        bool live[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int behind = (first + i / 2 * 8) / R;  // tokens: none carries into the next of t0
          if (turned) {
            const float4 x = *reinterpret_cast<const float4*>(
                turns + (turns_at ^ (behind & 7) << 2) + behind * pairs);
            by[i] = {x.x, x.y, x.z, x.w};
          }
          at[i] = to.q + row_at[i / 2] + (i & 1) * wide_bytes;
          live[i] = whole() || t0 + behind < n;
        }
        if (turned)
          turn_all<halves, true>(at, live, bias, by);
        else
          turn_all<halves, false>(at, live, bias, by);
        row_at[0] += 2048, row_at[1] += 2048;
      }
    }
  };
  if (is_first(head)) {  // whose rows are those of all its units
    if (n == C)
      turn(std::true_type{});
    else
      turn(std::false_type{});
  }
  hopper::fence_async_shared();
  hopper::named_barrier_arrive(full + stage(head), gradient_threads);
}

template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::begin_values(int head) {
  auto& to = sh.operands[stage(head)];
  const int thread = own_thread();
  const bool whole = n == C;
  if constexpr (R == 1) {
    const int64_t at = home(sh.homes.v, a.v, head);
    if (whole)
      copy_whole<values, 128>(static_cast<const __nv_bfloat16*>(a.v.data) + at, a.v.stride[1], 0,
                              to.v, thread);
    else
      copy_values<128>(a, at, sh.part, to.v, thread);
  }
  if (up.pieces) {
    const int row0 = thread / 8;
    const uint32_t tile =
        hopper::smem_address(to.d_y) + static_cast<uint32_t>(place_of(row0, thread % 8 * 8));
    // Sixteen rows on, the same rank.
    const auto* at = static_cast<const __nv_bfloat16*>(a.d_out.data) + d_out_home(head) +
                     row0 / R * a.d_out.stride[1] +
                     (a.size.reduce ? 0 : row0 % R * a.d_out.stride[2]) + thread % 8 * 8;
    const auto copy = [&](auto all) {
#pragma unroll
      for (int i = 0; i < rows / 16; ++i) {
        const int t = row0 / R + 16 / R * i;
        bool known = t < n;
        if (mutant(ScanMutant::m3_21_rows_behind_the_end))
          known = sh.unit.begin + sh.part.first + t < a.size.tokens;
        if (all()) known = true;
        hopper::copy_16_bytes(tile + static_cast<uint32_t>(i * 2048), known ? at : a.d_out.data,
                              known);
        at += 16 / R * a.d_out.stride[1];
      }
    };
    if (whole)
      copy(std::true_type{});
    else
      copy(std::false_type{});
  }
  copy_bytes<(Shared::parameters - 2 * R * columns) * 4, 128>(
      b.head_parameters + head * int64_t{Shared::parameters} + 2 * R * columns,
      sh.of_head[stage(head)].mimo_v, thread);
  copy_whole_state(sh.from.e.of(head), to.e, thread);
  // What finish_values loads: Hout, which lies behind `h`, and z.
  static_assert(size * 2 == 128 * 128);
  prefetch(sh.from.h.of(head) + size * 2 + thread * 128);
  if (a.z.data && thread < n)
    prefetch(static_cast<const __nv_bfloat16*>(a.z.data) + home(sh.homes.z, a.z, head) +
             thread * a.z.stride[1]);
}

template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::finish_values(int head) {
  auto& to = sh.operands[stage(head)];
  const int thread = own_thread(), row0 = thread / 8, c = thread % 8 * 8;
  float work = 0;
  // Two rows of z are under way while the copies are awaited; the others are in the cache by then.
  uint4 z[2];
  const auto load = [&](int first) {
    if (!up.pieces || !a.z.data) return;
    const auto* const from =
        static_cast<const __nv_bfloat16*>(a.z.data) + home(sh.homes.z, a.z, head) + c;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = (first + 16 * i) / R;
      z[i] = {0, 0, 0, 0};
      if (t < n) z[i] = load_now(from + t * a.z.stride[1]);
    }
  };
  load(row0);
  RawValues<R, 128> own(thread);
  own.load(a, home(sh.homes.v, a.v, head), sh.part);
  AnchorRows behind;
  // With more rows a token there are no registers for it beside their values.
  constexpr bool ahead = R == 1;
  if (ahead) behind.load(sh.from.h.of(head), 0);
  copies_done();
  hopper::named_barrier_sync(values_own, 128);
  if (R > 1 || a.mimo_v.data)
    own.put(sh.part, sh.of_head[stage(head)].mimo_v, nullptr, to.v, nullptr);
    // Two rows through the gate while half of Hout is under way.
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    if (half == 1 || !ahead) behind.load(sh.from.h.of(head), half);
    // Both are gated ahead of the stores, behind which the compiler would load projections anew.
    const auto gate = [&](auto projected) {
      uint4 two[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row0 + 32 * half + 16 * i;
        const uint4 own = *reinterpret_cast<const uint4*>(to.d_y + place_of(row, c));
        const uint32_t words[4] = {own.x, own.y, own.z, own.w};
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = j & 1 ? high_of(words[j / 2]) : low_of(words[j / 2]);
        two[i] = gated<projected()>(head, x, z[i], row0 % R, c);  // sixteen rows on, the same rank
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint4*>(to.d_y + place_of(row0 + 32 * half + 16 * i, c)) = two[i];
    };
    if (up.pieces && projects())
      gate(std::true_type{});
    else if (up.pieces && a.z.data)
      gate(std::false_type{});
    anchor(head, behind, half, work);
    if (half == 0) load(row0 + 32);  // not beside the anchor: there are no registers for both
  }
  if (!up.pieces) gate_apart(head);
  const double sum = static_cast<double>(over_warp(work));
  if ((thread & 31) == 0) add(head, sh.energy[third(head)][thread / 32], sum);
  hopper::fence_async_shared();
  hopper::named_barrier_arrive(full + stage(head), gradient_threads);
}

// dO of eight columns of a row, rounded.
template <int R, int blocks, bool halves, int slabs>
template <bool projected>
__device__ __forceinline__ uint4 Gradients<R, blocks, halves, slabs>::gated(int head, float (&x)[8],
                                                                            const uint4& z, int r,
                                                                            int c) const {
  const auto& parameters = sh.of_head[stage(head)];
  float by[8];
  if constexpr (projected) {
    take_projection(parameters.mimo_out, r, c, by);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] *= by[j];
    take_projection(parameters.mimo_z, r, c, by);
  }
  if (a.z.data) {
    const uint32_t words[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float w = j & 1 ? high_of(words[j / 2]) : low_of(words[j / 2]);
      if constexpr (projected) w *= by[j];
      x[j] *= w * gate_sigmoid(w);
    }
  }
  return {two_rounded(x[0], x[1]), two_rounded(x[2], x[3]), two_rounded(x[4], x[5]),
          two_rounded(x[6], x[7])};
}

// Where d_out has not been copied: neighbours that are not one load.
template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::gate_apart(int head) {
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
      to = gated<true>(head, x, z_of(head, t, c), r, c);
    }
    *reinterpret_cast<uint4*>(sh.operands[stage(head)].d_y + place_of(row, c)) = to;
  }
}

// Rows of q and k, or all else that is multiplied: each a warpgroup. One row a token has no gates
// in common and no registers for both: each has its own text.
template <int R, int blocks, bool halves, int slabs>
template <bool handed, bool forms_rows, bool forms_others>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::form_heads(bool of_rows) {
  const bool shared_angles = a.angles.stride[2] == 0;
#pragma unroll 1
  for (int head = place.first - 1; head <= place.last; ++head) {
    // Room for the next one, and what the one before has left.
    if (head > place.first) hopper::named_barrier_sync(done, gradient_threads);
    const bool is_one = head >= place.first && head < place.last;
    if (forms_rows && (of_rows || !forms_others)) {
      if (head + 1 < place.last) begin_rows(head + 1);
      if (head > place.first) {
        if (is_last(head - 1)) {
          if (!shared_angles) read_rates(head - 1);
          if (n == C && a.size.pairs == pairs && (handed || a.angles.data))
            angles_back<handed, true>(head - 1);
          else
            angles_back<handed, false>(head - 1);
        }
        decays_back(head - 1);
        if (head < place.last) hopper::named_barrier_arrive(heard, gradient_threads);
      }
      if (head + 1 < place.last) finish_rows(head + 1);
      // Behind the first rows, for which others wait.
      if (shared_angles && head < place.first) read_rates(place.first);
    } else if (forms_others) {
      if (head + 1 < place.last) begin_values(head + 1);
      if (head > place.first && is_one) hopper::named_barrier_arrive(heard, gradient_threads);
      if (head + 1 < place.last) finish_values(head + 1);
      if constexpr (R == 1)
        if (is_one && gates_apart()) gates_back(head);
    }
    if constexpr (R > 1)
      if (is_one && needs_y() && (Shared::gating > 1 || !of_rows)) gate_half(head, of_rows);
  }
}

template <int R, int blocks, bool halves, int slabs>
template <bool handed>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::form(bool of_rows) {
  if constexpr (R > 1)
    form_heads<handed, true, true>(of_rows);
  else if (of_rows)
    form_heads<handed, true, false>(true);
  else
    form_heads<handed, false, true>(false);
}

}  // namespace talea::mamba3::sm90
