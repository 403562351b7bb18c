// What: what both warpgroups that multiply do alike: pairs weighed in registers, rows turned back.
// Why: the same pairs, once by rows and once by columns, cost less than handing them over.
// Never: multiplies what a query does not see, or sums over heads before the bias has had its share.
#pragma once

#include "ops/mamba3/sm90/gradients.cuh"

namespace talea::mamba3::sm90 {

// Pairs weighed, a row of the accumulator a query or a key; what the rows have of the pair of one
// token (`near`, and its dO V^T in `trace`) and of later queries (`behind`, of keys).
template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::weigh(
    int head, bool of_keys, const Seen& sees, const float (&scores)[32],
    const float (&products)[32], uint32_t (&seen)[4][4], uint32_t (&weights)[4][4],
    float (&near)[2], float (&behind)[2], float& trace) {
  static_assert(R == 1);
  const auto& of = steps(head);
  const int row = own_row(), column = own_column(), warp = thread / 32;
  const float4 own[2] = {of.pair[row], of.pair[row + 8]};
  const float sign = of_keys ? -log2_of_e : log2_of_e;  // a query's decay less a key's
  // Of pairs whose tokens lie on either side of the warp's last row (its first, of queries): the
  // decay up to there by that from there on, each of at most one where no decay grows.
  const float4 mark = of.pair[16 * warp + (of_keys ? 15 : 0)];
  float to_mark[2], by_row[2], past[2] = {0, 0};
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const float2 from = {own[second].x - mark.x, own[second].y - mark.y};
    to_mark[second] = hopper::exp2_fast((from.x + from.y) * sign);
    by_row[second] = of_keys ? to_mark[second] * own[second].z : to_mark[second];
  }
  float same[2] = {0, 0};
  near[0] = near[1] = behind[0] = behind[1] = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float x[2][2] = {{0, 0}, {0, 0}}, w[2][2] = {{0, 0}, {0, 0}};
    if (j / 2 == warp) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 far = of.pair[column + 8 * j + i];
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const int at = 4 * j + 2 * second + i;
          const float2 from = {own[second].x - far.x, own[second].y - far.y};
          // Of later keys it may be infinite: chosen, not multiplied.
          const float whole = hopper::exp2_fast((from.x + from.y) * sign);
          const float decay = sees.apart >> at & 1 ? whole : 0.0f;
          const float both = products[at] * scores[at];
          float by = decay * (of_keys ? own[second].z : far.z);
          behind[second] += decay * both;
          if ((j & 1) == second) {  // a token's own pair lies nowhere else
            const bool alike = sees.alike >> at & 1;
            by = alike ? own[second].w : by;
            near[second] = alike ? both : near[second];
            same[second] = alike ? products[at] : same[second];
          }
          x[second][i] = by * scores[at];
          w[second][i] = by * products[at];
        }
      }
    } else if (of_keys ? j / 2 > warp : j / 2 < warp) {  // nothing of later keys
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 far = of.pair[column + 8 * j + i];
        const float2 from = {far.x - mark.x, far.y - mark.y};
        const float whole = hopper::exp2_fast((from.x + from.y) * -sign);
        const float by_column = of_keys ? whole : whole * far.z;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const int at = 4 * j + 2 * second + i;
          const float by = by_row[second] * by_column;
          x[second][i] = by * scores[at];
          w[second][i] = by * products[at];
          past[second] = fmaf(whole, products[at] * scores[at], past[second]);
        }
      }
    }
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      seen[j / 2][(j & 1) * 2 + second] = two_rounded(x[second][0], x[second][1]);
      weights[j / 2][(j & 1) * 2 + second] = two_rounded(w[second][0], w[second][1]);
    }
  }
  // Where nothing lies past the mark, the way to it is not worth Inf * 0.
#pragma unroll
  for (int second = 0; second < 2; ++second)
    if (past[second] != 0) behind[second] = fmaf(to_mark[second], past[second], behind[second]);
  trace = same[0] + same[1];
}

// Their share of turns and decays; turned back, added to the sums over the heads.
template <int R, int blocks, bool halves, int slabs>
template <bool handed>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::rows_back(int head,
                                                                               bool of_keys,
                                                                               float (&g)[64],
                                                                               float (&sums)[64]) {
  const auto& operands = sh.operands[shared_stage(head)];
  const char* const tile = of_keys ? operands.k : operands.q;
  const float2* const turns = sh.turns[shared_stage(head)];
  float* const torques = of_keys ? sh.turn_k : sh.turn_q;
  float* const dots = of_keys ? sh.dots_k : sh.dots_q;
  const int row = own_row(), column = own_column(), r = row % R, lane = thread & 31;
  if (head > place.first) hopper::named_barrier_sync(heard, gradient_threads);
  const int words_at = place_of(row, column);
  const int turns_at = Shared::turn_at(row / R, halves ? column : lane % 4);
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    // The token of the row eight behind: no number of a warp's tokens carries into the next.
    const int swap = second * (8 / R % 8) << 2, apart = second * (8 / R) * pairs;
    float dot = 0;
    // Numbers of the pair (x, w), whose gradients are (gx, gw); its torque.
    const auto one = [&](bool turned, const float2& by, float x, float w, float& gx, float& gw) {
      dot = fmaf(w, gw, fmaf(x, gx, dot));
      if (!turned) return 0.0f;
      const float torque = x * gw - w * gx, before = gx;
      const bool forward = R == 1 ? mutant(ScanMutant::m3_turned_back_forward_siso)
                                  : mutant(ScanMutant::m3_turned_back_forward_ranks);
      const float sin = forward ? -by.y : by.y;
      gx = before * by.x + gw * sin;
      gw = gw * by.x - before * sin;
      return torque;
    };
    // All loads ahead of the first store, behind which the compiler leaves them. Rows eight apart
    // swap their pieces alike.
    uint32_t words[16];
    float2 by[pairs / 4];  // zeros behind the last token
    float torque[pairs / 4];
#pragma unroll
    for (int j = 0; j < 16; ++j)
      words[j] = *reinterpret_cast<const uint32_t*>(tile + (words_at ^ (j & 7) << 4) +
                                                    j / 8 * panel_bytes + second * 1024);
#pragma unroll
    for (int j = 0; j < pairs / 4; ++j) {
      const int swapped = halves ? j / 2 * 8 + (j & 1) : 4 * j;  // within a token's pairs
      by[j] = turns[(turns_at ^ swapped ^ swap) + apart];
    }
    if constexpr (halves) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const bool turned = 8 * j < pairs;
        const uint32_t x = words[j], w = words[j + 8];
        float* gx = g + 4 * j + 2 * second;
        float* gw = g + 4 * (j + 8) + 2 * second;
        const int at = turned ? 2 * j : 0;
        const float low = one(turned, by[at], low_of(x), low_of(w), gx[0], gw[0]);
        const float high = one(turned, by[at + 1], high_of(x), high_of(w), gx[1], gw[1]);
        if (turned) torque[at] = low, torque[at + 1] = high;
      }
      if constexpr (R > pairs / 8) {
        static_assert(R == pairs / 4);
        add(head, torques[(turns_at ^ 8 * (r / 2) ^ swap) + r % 2 + apart],
            shared_by_ranks<R>(torque));
      } else {
#pragma unroll
        for (int first = 0; first < pairs / 8; first += R) {
          float low[R], high[R];
#pragma unroll
          for (int k = 0; k < R; ++k)
            low[k] = torque[2 * (first + k)], high[k] = torque[2 * (first + k) + 1];
          auto& to =
              *reinterpret_cast<float2*>(torques + (turns_at ^ 8 * (first + r) ^ swap) + apart);
          const float2 x = {shared_by_ranks<R>(low), shared_by_ranks<R>(high)};
          if constexpr (slabs > 1)
            add(head, to.x, x.x), add(head, to.y, x.y);
          else
            to = x;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const bool turned = 4 * j < pairs;
        float* gx = g + 4 * j + 2 * second;
        const int at = turned ? j : 0;
        const float x = one(turned, by[at], low_of(words[j]), high_of(words[j]), gx[0], gx[1]);
        if (turned) torque[at] = x;
      }
#pragma unroll
      for (int first = 0; first < pairs / 4; first += R) {
        float of[R];
#pragma unroll
        for (int k = 0; k < R; ++k) of[k] = torque[first + k];
        add(head, torques[(turns_at ^ 4 * (first + r) ^ swap) + apart], shared_by_ranks<R>(of));
      }
    }
    dot = over_ranks<R>(over_quad(dot));
    if (lane % (4 * R) == 0) add(head, dots[(row + 8 * second) / R], dot);
  }
  // Nothing of the head's operands is read from here on.
  hopper::named_barrier_arrive(done, gradient_threads);
  if constexpr (handed)
    if (of_keys) add_last_key<R>(a, b, sh.unit, sh.part, head, g);
#pragma unroll
  for (int i = 0; i < 64; ++i) sums[i] += g[i];
  constexpr int alike = Shared::alike;
  float* const alike_to = of_keys ? sh.sums_k : sh.sums_q;
  float* const to =
      reinterpret_cast<float*>(sh.from.partial.of(head)) + (of_keys ? R * columns : 0);
  if (of_keys ? !a.grad.k_bias.data : !a.grad.q_bias.data) {
    for (int i = thread; i < R * columns; i += 128) to[i] = 0;
    return;
  }
  const auto add_biases = [&](auto from) {
    constexpr int slots = Shared::slots;
    // The place of the sums before is free.
    hopper::named_barrier_sync(of_keys ? keys : queries, 128);
#pragma unroll
    for (int slot = 0; slot < slots; slot += alike) {
      float x[alike];
#pragma unroll
      for (int i = 0; i < alike; ++i) {
        const int own = from() + slot + i, at = own / 2 * 4 + own % 2;
        x[i] = g[at] + g[at + 2];
        if (R == 1 ? mutant(ScanMutant::m3_2_bias_after_group_sum_siso)
                   : mutant(ScanMutant::m3_2_bias_after_group_sum_ranks))
          x[i] = sums[at] + sums[at + 2];
      }
      put_alike<R>(alike_to, slot, x);
    }
    hopper::named_barrier_sync(of_keys ? keys : queries, 128);
    store_alike(alike_to, R * columns / 32 * slots, columns, to + from() / 2 * 8);
  };
  add_biases(std::integral_constant<int, 0>{});
  if constexpr (!Shared::has_room) add_biases(std::integral_constant<int, Shared::slots>{});
}

// Sums over the heads of the part: the gradient itself where it is the group's only one.
template <int R, int blocks, bool halves, int slabs>
template <bool of_keys>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::store_rows(
    const float (&sums)[64]) {
  const View& to = of_keys ? a.grad.k : a.grad.q;
  float* const by_part = of_keys ? b.dk : b.dq;
  if (!to.data) return;
  const Unit& u = sh.unit;
  const int row = own_row(), r = row % R;
  const int64_t place0 = (place.sequence * wave.slice_chunks + place.in_slice) * int64_t{C};
  const bool whole = b.parts == 1;
  const bool pieces = to.dtype == DType::bf16 && to.stride[4] == 1;
  if (!whole) {
    const int64_t line = ((place0 * R + row) * a.size.groups + place.group) * b.parts + place.part;
    const int64_t apart = int64_t{8} * a.size.groups * b.parts * columns;
    float* const own = by_part + line * columns + own_column();
#pragma unroll
    for (int second = 0; second < 2; ++second)
#pragma unroll
      for (int j = 0; j < 16; ++j)
        if ((row + 8 * second) / R < n)
          *reinterpret_cast<float2*>(own + second * apart + 8 * j) = {sums[4 * j + 2 * second],
                                                                      sums[4 * j + 2 * second + 1]};
    return;
  }
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int t = (row + 8 * second) / R;
    if (t >= n) continue;
    const int64_t at = cuda::at(to, u.batch, u.begin + sh.part.first + t, r, place.group);
    auto* const own = static_cast<__nv_bfloat16*>(to.data) + at + own_column();
    // One question a row: each of a block's instructions is fetched for this once.
    if (pieces && reinterpret_cast<uintptr_t>(own) % 4 == 0) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
        *reinterpret_cast<uint32_t*>(own + 8 * j) =
            two_rounded(sums[4 * j + 2 * second], sums[4 * j + 2 * second + 1]);
      continue;
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int c = own_column() + j * 8;
      cuda::store(to, at + c * to.stride[4], sums[4 * j + 2 * second]);
      cuda::store(to, at + (c + 1) * to.stride[4], sums[4 * j + 2 * second + 1]);
    }
  }
}

}  // namespace talea::mamba3::sm90
