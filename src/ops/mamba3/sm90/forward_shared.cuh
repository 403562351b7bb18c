// What: what both forward kernels share: how a chunk joins the state, and the half that multiplies
//       (scores, gate and output of the chunks of a unit).
// Why: the reading warpgroup forms the turns of a chunk itself or finds them; the rest is the same.
// Never: waits for a product that it began for the reading half.
#pragma once

#include "ops/mamba3/sm90/rank_rows.cuh"

namespace talea::mamba3::sm90 {

// Barriers by number: chunks full and empty by stage, the state read, each group's own; and steps
// that the multiplying half has formed.
enum Barrier { full = 1, empty = 3, state_read = 5, reading = 6, multiplying = 7, stepped = 8 };

// The state before the chunk for the other half, then the chunk's own share of it, whose products
// are under way on return.
template <class Shared, class Sync>
__device__ __forceinline__ void join_chunk(Shared& sh, int stage, float (&h)[64], Sync sync) {
  put_tile(sh.h, h);
  hopper::fence_async_shared();
  sync();
  hopper::named_barrier_arrive(full + stage, 256);
  const float whole = sh.steps[stage].whole;
  scale_state(h, whole);
  products_begin(h);
  columns_by_columns<128>(h, Operand(sh.weighed), Operand(sh.k[stage]));
  hopper::warpgroup_commit();
}

// Where steps are formed ahead of the kernel: nothing is left to do before a chunk.
struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

// Where no output is asked for but states: chunks [from, end) go by. A loop of its own, since a
// branch in the other costs it registers that it has not.
template <class Before>
__device__ __forceinline__ void pass_chunks(int from, int end, Before& before) {
#pragma unroll 1
  for (int chunk = from; chunk < end; ++chunk) {
    const int stage = (chunk - from) & 1;
    before(chunk);
    hopper::named_barrier_sync(full + stage, 256);
    if (chunk + 1 < end) hopper::named_barrier_arrive(state_read, 256);
    if (chunk + 2 < end) hopper::named_barrier_arrive(empty + stage, 256);
  }
}

// Chunks [from, end), which come through `sh` one after the other. before(chunk): while the other
// half reads it.
template <int R, class Shared, class Before = Nothing>
__device__ __forceinline__ void multiply_chunks(const Args& a, const Cut& cut, const Unit& u,
                                                Shared& sh, int from, int end, Before before = {}) {
  const int row = own_row(), column = own_column();
  const int t0 = row / R, t1 = (row + 8) / R, r = row % R;  // 8 rows on, the same r
  const float skip = cuda::read_or(0, a.d, cuda::at(a.d, u.head));
  const bool gated = a.z.data != nullptr;
  if (!a.out.data) return pass_chunks(from, end, before);
#pragma unroll 1
  for (int chunk = from; chunk < end; ++chunk) {
    const int stage = (chunk - from) & 1;
    const Part p = part_of<tokens_of<R>>(u, chunk);
    before(chunk);
    uint32_t z[16];
    const int64_t token = u.begin + p.first;
    const auto load_z = [&] {
      if (!gated) return;
      if constexpr (R == 1) {
        const auto* from = static_cast<const __nv_bfloat16*>(a.z.data);
        const int64_t base = cuda::at(a.z, u.batch, token, u.head, first_value(cut, u)) + column;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int64_t first = base + 8 * j;
          z[2 * j] =
              t0 < p.n ? __ldg(reinterpret_cast<const uint32_t*>(from + first + t0 * a.z.stride[1]))
                       : 0u;
          z[2 * j + 1] =
              t1 < p.n ? __ldg(reinterpret_cast<const uint32_t*>(from + first + t1 * a.z.stride[1]))
                       : 0u;
        }
      } else {
        // Rows behind the last token take its own: none stores them.
        const auto* const from = sh.homes.z + column + p.first * a.z.stride[1];
        const int last = p.n - 1;
        const auto* const z0 = from + (t0 < last ? t0 : last) * a.z.stride[1];
        const auto* const z1 = from + (t1 < last ? t1 : last) * a.z.stride[1];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          z[2 * j] = __ldg(reinterpret_cast<const uint32_t*>(z0 + 8 * j));
          z[2 * j + 1] = __ldg(reinterpret_cast<const uint32_t*>(z1 + 8 * j));
        }
      }
    };
    load_z();
    hopper::named_barrier_sync(full + stage, 256);
    float scores[32], y[32];
    const auto with_state = [&] {
      rows_by_rows<128, false>(y, Operand(sh.q[stage]), Operand(sh.h));
    };
    const auto state_is_read = [&] {
      hopper::hold_registers(y);
      if (chunk + 1 < end) hopper::named_barrier_arrive(state_read, 256);
    };
    hopper::warpgroup_arrive();
    rows_by_rows<128, false>(scores, Operand(sh.q[stage]), Operand(sh.k[stage]));
    if constexpr (R > 1) with_state();
    products_end(scores);
    if constexpr (R > 1) state_is_read();
    const auto& steps = sh.steps[stage];
    uint32_t seen[4][4];
    const auto see = [&](int j, int second, float x0, float x1) {
      seen[j / 2][(j & 1) * 2 + second] = two_rounded(x0, x1);
    };
    if constexpr (R == 1)
      weigh_tokens(scores, steps, p.n, see);
    else
      weigh_ranks<R>(scores, steps, see);
    if constexpr (R == 1) {
      // Not beside the scores: there are no registers for both and for z.
      hopper::warpgroup_arrive();
      with_state();
      products_end(y);
      state_is_read();
    }
    const float left0 = steps.left[t0], left1 = steps.left[t1];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      y[4 * j] *= left0, y[4 * j + 1] *= left0;
      y[4 * j + 2] *= left1, y[4 * j + 3] *= left1;
    }
    products_begin(y);
    registers_by_columns<64>(y, seen, Operand(sh.v[stage]));
    products_end(y);
    const auto add_values = [&] {
      if constexpr (R == 1) {
        each_two(y, [&](int i, int c, float& x0, float& x1) {
          const uint32_t v = *reinterpret_cast<const uint32_t*>(sh.v[stage] + place_of(i, c));
          x0 += skip * low_of(v), x1 += skip * high_of(v);
        });
      } else {
        add_tile(y, sh.v[stage], skip);
      }
    };
    if (skip != 0) add_values();
    const auto gate = [&](auto projected, auto gates) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int c = column + 8 * j;
        float2 by_out = {1, 1}, by_z = {1, 1};
        if constexpr (projected()) {
          by_out = *reinterpret_cast<const float2*>(sh.mimo_out + projection_at(r, c));
          by_z = *reinterpret_cast<const float2*>(sh.mimo_z + projection_at(r, c));
        }
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          float& x0 = y[4 * j + 2 * second];
          float& x1 = y[4 * j + 2 * second + 1];
          if (gates()) {
            const float w0 = low_of(z[2 * j + second]) * by_z.x;
            const float w1 = high_of(z[2 * j + second]) * by_z.y;
            x0 *= w0 * gate_sigmoid(w0), x1 *= w1 * gate_sigmoid(w1);
          }
          x0 *= by_out.x, x1 *= by_out.y;
        }
      }
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
    if constexpr (R > 1) {
      if (gated)
        gate(yes, yes);
      else
        gate(yes, no);
    } else if (a.mimo_z.data || a.mimo_out.data) {  // seldom
      gate(yes, [&] { return gated; });
    } else if (gated) {
      gate(no, yes);
    }
    if constexpr (R == 1) {
      store_values(a.out, cuda::at(a.out, u.batch, token, 0, u.head, first_value(cut, u)), p.n, y);
    } else {
      if (a.size.reduce) sum_ranks<R>(y);
      const int64_t at0 = sh.homes.out + (p.first + t0) * a.out.stride[1] + column;
      const auto known = [&](int t) {
        return t < p.n || (mutant(ScanMutant::m3_tail_stored) && token + t < a.size.tokens);
      };
      if (a.out.dtype == DType::bf16)
        store_ranks<R>(a, static_cast<__nv_bfloat16*>(a.out.data) + at0, r, known(t0), known(t1),
                       y);
      else
        store_ranks<R>(a, static_cast<float*>(a.out.data) + at0, r, known(t0), known(t1), y);
    }
    if (chunk + 2 < end) hopper::named_barrier_arrive(empty + stage, 256);
  }
}

}  // namespace talea::mamba3::sm90
