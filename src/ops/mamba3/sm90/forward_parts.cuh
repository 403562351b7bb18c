// What: the half of a forward block that multiplies, where a head is cut into parts of N: two
//       blocks of a cluster, each with a part.
// Why: y of a head is the sum over its parts: each block adds up, gates and stores half of the rows,
//      and has the other block's share of them from its shared memory.
// Never: stores a row that the other block has.
#pragma once

#include "device/sm90/cluster.cuh"
#include "ops/mamba3/sm90/forward_rows.cuh"

namespace talea::mamba3::sm90::forward {

inline constexpr uint32_t share_bytes = rows * values * sizeof(float) / 2;
static_assert(share_bytes <= wide_bytes);

// By one thread, ahead of a barrier of the cluster.
template <int R>
__device__ __forceinline__ void begin_sharing(SharedOfParts<R>& sh) {
  hopper::barrier_init(&sh.has_room, 4);  // a warp each
  hopper::barrier_init(&sh.has_come, 1);
  hopper::barrier_init_fence();
}

// Of an accumulator's rows the one of which block `part` has the sum, and the other.
__device__ __forceinline__ void split_rows(bool second, const float (&y)[32], float (&own)[16],
                                           float (&other)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = i / 2 * 4 + i % 2;
    own[i] = second ? y[at + 2] : y[at];
    other[i] = second ? y[at] : y[at + 2];
  }
}

// As sum_ranks, of one row.
template <int R>
__device__ __forceinline__ void sum_ranks_of_row(float (&y)[16]) {
#pragma unroll
  for (int first = 0; first < 8; first += R)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x[R];
#pragma unroll
      for (int k = 0; k < R; ++k) x[k] = y[2 * (first + k) + i];
      y[2 * first + i] = shared_by_ranks<R>(x);
    }
}

template <int R, class T>
__device__ __forceinline__ void store_row(const Args& a, T* to, int r, const float (&y)[16]) {
  const auto store = [&](auto apart) {
#pragma unroll
    for (int j = 0; j < 8; j += apart()) put_two(to + 8 * j, y[2 * j], y[2 * j + 1]);
  };
  if (a.size.reduce) {
    to += 8 * r;
    store(std::integral_constant<int, R>{});
  } else {
    to += r * a.out.stride[2];
    store(std::integral_constant<int, 1>{});
  }
}

// y of the chunk of a stage, `n` tokens, but for the skip. are_read(): once q, k and the state are.
template <int R, class Read>
__device__ __forceinline__ void form_values(SharedOfParts<R>& sh, int stage, int n, float (&y)[32],
                                            Read are_read) {
  const int t0 = own_row() / R, t1 = (own_row() + 8) / R;
  float scores[32];
  const auto with_state = [&] { rows_by_rows<128, false>(y, Operand(sh.q[stage]), Operand(sh.h)); };
  hopper::warpgroup_arrive();
  rows_by_rows<128, false>(scores, Operand(sh.q[stage]), Operand(sh.k[stage]));
  if constexpr (R > 1) with_state();
  products_end(scores);
  if constexpr (R > 1) {
    hopper::hold_registers(y);
    are_read();
  }
  const auto& steps = sh.steps[stage];
  uint32_t seen[4][4];
  const auto see = [&](int j, int second, float x0, float x1) {
    seen[j / 2][(j & 1) * 2 + second] = two_rounded(x0, x1);
  };
  if constexpr (R == 1)
    weigh_tokens(scores, steps, n, see);
  else
    weigh_ranks<R>(scores, steps, see);
  if constexpr (R == 1) {
    // Not beside the scores: there are no registers for both and for z.
    hopper::warpgroup_arrive();
    with_state();
    products_end(y);
    are_read();
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
}

// The chunks of a run, which come through `sh` one after the other. A thread has the row of its
// accumulator that is its block's.
template <int R>
__device__ __forceinline__ void multiply_parts(const Args& a, const Unit& u, SharedOfParts<R>& sh) {
  const int end = sh.count;
  Nothing nothing;
  if (!a.out.data) return pass_chunks(0, end, nothing);
  const uint32_t part = hopper::cluster_rank(), other = part ^ 1;
  const int row = own_row() + 8 * static_cast<int>(part), column = own_column();
  const int t = row / R, r = row % R, thread = threadIdx.x & 127;
  const float skip = cuda::read_or(0, a.d, cuda::at(a.d, u.head));
  const bool gated = a.z.data != nullptr;
  const uint32_t has_come = hopper::address_at(hopper::smem_address(&sh.has_come), other);
#pragma unroll 1
  for (int chunk = 0; chunk < end; ++chunk) {
    const int stage = chunk & 1;
    const uint32_t phase = chunk & 1;
    const Part p = part_of<tokens_of<R>>(u, chunk);
    if (thread == 0) hopper::barrier_expect(&sh.has_come, share_bytes);
    uint32_t z[8];
    if (gated) {
      // A row behind the last token takes its own: none stores it.
      const auto* const from =
          sh.homes.z + column + (p.first + (t < p.n ? t : p.n - 1)) * a.z.stride[1];
#pragma unroll
      for (int j = 0; j < 8; ++j) z[j] = __ldg(reinterpret_cast<const uint32_t*>(from + 8 * j));
    }
    hopper::named_barrier_sync(full + stage, 256);
    float x[16], share[16];
    {
      float y[32];
      form_values<R>(sh, stage, p.n, y, [&] {
        if (chunk + 1 < end) hopper::named_barrier_arrive(state_read, 256);
        // The rows of q are read: the other block's share takes their place.
        __syncwarp();
        if (thread % 32 == 0) hopper::barrier_arrive_at(&sh.has_room, other);
      });
      split_rows(part != 0, y, x, share);
    }
    auto* const came = reinterpret_cast<float4*>(sh.q[stage]) + thread;
    const uint32_t to = hopper::address_at(hopper::smem_address(came), other);
    hopper::barrier_wait(&sh.has_room, phase);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto word = [&](int k) { return __float_as_uint(share[4 * i + k]); };
      hopper::store_words_async(to + static_cast<uint32_t>(i * 128 * sizeof(float4)),
                                {word(0), word(1), word(2), word(3)}, has_come);
    }
    if (!mutant(ScanMutant::m3_share_not_awaited)) hopper::barrier_wait(&sh.has_come, phase);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 more = came[i * 128];
      x[4 * i] += more.x, x[4 * i + 1] += more.y, x[4 * i + 2] += more.z, x[4 * i + 3] += more.w;
    }
    if (skip != 0)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const auto v =
            *reinterpret_cast<const uint32_t*>(sh.v[stage] + place_of(row, column + 8 * j));
        x[2 * j] += skip * low_of(v), x[2 * j + 1] += skip * high_of(v);
      }
    const auto gate = [&](auto gates) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int at = projection_at(r, column + 8 * j);
        const float2 by_out = *reinterpret_cast<const float2*>(sh.mimo_out + at);
        if constexpr (gates()) {
          const float2 by_z = *reinterpret_cast<const float2*>(sh.mimo_z + at);
          const float w0 = low_of(z[j]) * by_z.x, w1 = high_of(z[j]) * by_z.y;
          x[2 * j] *= w0 * gate_sigmoid(w0), x[2 * j + 1] *= w1 * gate_sigmoid(w1);
        }
        x[2 * j] *= by_out.x, x[2 * j + 1] *= by_out.y;
      }
    };
    if (gated)
      gate(std::true_type{});
    else
      gate(std::false_type{});
    if (a.size.reduce) sum_ranks_of_row<R>(x);
    const int64_t token = u.begin + p.first;
    if (t < p.n || (mutant(ScanMutant::m3_tail_stored) && token + t < a.size.tokens)) {
      const int64_t at = sh.homes.out + (p.first + t) * a.out.stride[1] + column;
      if (a.out.dtype == DType::bf16)
        store_row<R>(a, static_cast<__nv_bfloat16*>(a.out.data) + at, r, x);
      else
        store_row<R>(a, static_cast<float*>(a.out.data) + at, r, x);
    }
    if (chunk + 2 < end) hopper::named_barrier_arrive(empty + stage, 256);
  }
}

}  // namespace talea::mamba3::sm90::forward
