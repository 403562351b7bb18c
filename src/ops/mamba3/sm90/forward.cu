// What: the forward kernel of lane sm90: one block a head of a sequence, two warpgroups.
// Why: one reads and turns the rows of a chunk and keeps the state in registers, while the other
//      multiplies the rows of the chunk before, gates them and stores the output.
// Never: writes a state of every chunk, or divides by a decay.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/sm90/launch.cuh"
#include "ops/mamba3/sm90/state.cuh"

namespace talea::mamba3::sm90 {
namespace {

template <int R>
struct Shared {
  static constexpr int C = tokens_of<R>;
  char q[2][wide_bytes], k[2][wide_bytes], h[wide_bytes];
  char v[2][panel_bytes], weighed[panel_bytes];
  float4 q_bias[R * 32], k_bias[R * 32];
  float mimo_v[R * values], mimo_z[R * values], mimo_out[R * values];
  Steps<C> steps[2];
  Carried carried;
};

// Barriers by number: chunks full and empty by stage, the state read, the first group's own.
enum Barrier { full = 1, empty = 3, state_read = 5, reading = 6 };

template <int R, int blocks>
__device__ __forceinline__ void read_chunks(const Args& a, const Unit& u, Shared<R>& sh) {
  constexpr int C = tokens_of<R>;
  using Turns = TurnReader<R, blocks, 128>;
  struct Scratch {
    typename Turns::Scratch turns;
    RawTokens<C> raw;
  };
  static_assert(sizeof(Scratch) <= panel_bytes);
  auto& scratch = *reinterpret_cast<Scratch*>(sh.weighed);
  const int thread = threadIdx.x & 127;
  const int chunks = static_cast<int>(cuda::chunks_of(a.size, u.tokens));
  const auto sync = [] { hopper::named_barrier_sync(reading, 128); };
  Turns turns(thread);
  float h[64];
#pragma unroll
  for (float& x : h) x = 0;
  float* const saved = cuda::saved_states(a, u);

  Part p = part_of<C>(u, 0);
  const auto begin = [&](int stage) -> RawToken {
    copy_rows<R, 128>(a.q, u, p, sh.q[stage], thread);
    copy_rows<R, 128>(a.k, u, p, sh.k[stage], thread);
    if constexpr (R == 1) copy_values<128>(a, u, p, sh.v[stage], thread);
    turns.load(a, u, p);
    return thread <= C ? raw_token(a, u, p, thread) : RawToken{};
  };
  RawToken raw = begin(0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int stage = chunk & 1;
    if (saved && chunk % a.size.segment == 0)
      put_state(saved + chunk / a.size.segment * (columns * values), h);
    scratch.raw.put(thread, raw);
    if (thread < 64) scratch.turns.lost[thread] = 0;
    const RawValues<R, 128> own(a, u, p, thread);
    copies_done();
    sync();
    if (thread < 32) read_steps(scratch.raw, p, sh.steps[stage], [](int, float, float, float) {});
    turns.add(a, p, scratch.raw.dt, scratch.turns, [](int, int, float) {});
    sync();
    const auto turn = [&](auto halves) {
      turns.each_turn(a, p, sh.carried, scratch.turns,
                      [&](int t0, int j, int pp, const TwoTurns& by) {
                        // The rows of a group of tokens begin at a multiple of eight.
                        char* const q = sh.q[stage] + t0 * R * 128;
                        char* const k = sh.k[stage] + t0 * R * 128;
#pragma unroll
                        for (int r = 0; r < R; ++r) {
                          turn_row<halves()>(q, j * R + r, pp, sh.q_bias[r * 32 + pp], by);
                          turn_row<halves()>(k, j * R + r, pp, sh.k_bias[r * 32 + pp], by);
                        }
                      });
      // Pairs that never turn.
      if constexpr (blocks == 1) {
        const int pp = 16 + (thread & 15), row0 = thread / 16 * 8;
        char* const q = sh.q[stage] + row0 * 128;
        char* const k = sh.k[stage] + row0 * 128;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if ((row0 + i) / R >= p.n) break;
          bias_row<halves()>(q, i, pp, sh.q_bias[i % R * 32 + pp]);
          bias_row<halves()>(k, i, pp, sh.k_bias[i % R * 32 + pp]);
        }
      }
    };
    if (a.size.halves)
      turn(std::true_type{});
    else
      turn(std::false_type{});
    sync();
    turns.finish(a, sh.carried);
    own.put(p, sh.mimo_v, sh.steps[stage].key, sh.v[stage], sh.weighed);
    if (chunk > 0) hopper::named_barrier_sync(state_read, 256);
    put_tile(sh.h, h);
    hopper::fence_async_shared();
    sync();
    hopper::named_barrier_arrive(full + stage, 256);
    const float whole = sh.steps[stage].whole;
    scale_state(h, whole);
    products_begin(h);
    columns_by_columns<128>(h, Operand(sh.weighed), Operand(sh.k[stage]));
    hopper::warpgroup_commit();
    if (chunk + 1 < chunks) {
      p = part_of<C>(u, chunk + 1);
      if (chunk > 0) hopper::named_barrier_sync(empty + (stage ^ 1), 256);
      raw = begin(stage ^ 1);
    }
    hopper::warpgroup_wait<0>();
    hopper::hold_registers(h);
    sync();  // the scratch lies where the weighed values are
  }
}

template <int R>
__device__ __forceinline__ void multiply_chunks(const Args& a, const Unit& u, Shared<R>& sh) {
  constexpr int C = tokens_of<R>;
  const int chunks = static_cast<int>(cuda::chunks_of(a.size, u.tokens));
  const int row = own_row(), column = own_column();
  const int t0 = row / R, t1 = (row + 8) / R, r = row % R;  // 8 rows on, the same r
  const float skip = cuda::read_or(0, a.d, cuda::at(a.d, u.head));
  const bool gated = a.z.data != nullptr;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int stage = chunk & 1;
    const Part p = part_of<C>(u, chunk);
    uint32_t z[16];
    const int64_t token = u.begin + p.first;
    if (gated) {
      const auto* from = static_cast<const __nv_bfloat16*>(a.z.data);
      const int64_t base = cuda::at(a.z, u.batch, token, u.head) + column;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int64_t first = base + 8 * j;
        z[2 * j] = t0 < p.n
                       ? __ldg(reinterpret_cast<const uint32_t*>(from + first + t0 * a.z.stride[1]))
                       : 0u;
        z[2 * j + 1] =
            t1 < p.n ? __ldg(reinterpret_cast<const uint32_t*>(from + first + t1 * a.z.stride[1]))
                     : 0u;
      }
    }
    hopper::named_barrier_sync(full + stage, 256);
    float scores[32], y[32];
    hopper::warpgroup_arrive();
    rows_by_rows<128, false>(scores, Operand(sh.q[stage]), Operand(sh.k[stage]));
    rows_by_rows<128, false>(y, Operand(sh.q[stage]), Operand(sh.h));
    products_end(scores);
    hopper::hold_registers(y);
    if (chunk + 1 < chunks) hopper::named_barrier_arrive(state_read, 256);
    const Steps<C>& steps = sh.steps[stage];
    uint32_t seen[4][4];
    weigh<R>(scores, steps, p.n, [&](int j, int second, float x0, float x1) {
      seen[j / 2][(j & 1) * 2 + second] = two_rounded(x0, x1);
    });
    const float left0 = steps.left[t0], left1 = steps.left[t1];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      y[4 * j] *= left0, y[4 * j + 1] *= left0;
      y[4 * j + 2] *= left1, y[4 * j + 3] *= left1;
    }
    products_begin(y);
    registers_by_columns<64>(y, seen, Operand(sh.v[stage]));
    products_end(y);
    if (skip != 0) {
      each_two(y, [&](int i, int c, float& x0, float& x1) {
        const uint32_t v = *reinterpret_cast<const uint32_t*>(sh.v[stage] + place_of(i, c));
        x0 += skip * low_of(v), x1 += skip * high_of(v);
      });
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int c = column + 8 * j;
      const float2 by_out = *reinterpret_cast<const float2*>(sh.mimo_out + r * values + c);
      const float2 by_z = *reinterpret_cast<const float2*>(sh.mimo_z + r * values + c);
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        float& x0 = y[4 * j + 2 * second];
        float& x1 = y[4 * j + 2 * second + 1];
        if (gated) {
          const float w0 = low_of(z[2 * j + second]) * by_z.x;
          const float w1 = high_of(z[2 * j + second]) * by_z.y;
          x0 *= w0 * gate_sigmoid(w0), x1 *= w1 * gate_sigmoid(w1);
        }
        x0 *= by_out.x, x1 *= by_out.y;
      }
    }
    const int64_t out0 = cuda::at(a.out, u.batch, token, 0, u.head) + column;
    if (R > 1 && a.size.reduce) {
#pragma unroll
      for (int step = 4; step < 4 * R; step *= 2)
#pragma unroll
        for (float& x : y) x += __shfl_xor_sync(0xffffffffu, x, step);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j % R != r) continue;
        if (t0 < p.n) store_two(a.out, out0 + t0 * a.out.stride[1] + 8 * j, y[4 * j], y[4 * j + 1]);
        if (t1 < p.n)
          store_two(a.out, out0 + t1 * a.out.stride[1] + 8 * j, y[4 * j + 2], y[4 * j + 3]);
      }
    } else {
      const int64_t at0 = out0 + t0 * a.out.stride[1] + r * a.out.stride[2];
      const int64_t at1 = out0 + t1 * a.out.stride[1] + r * a.out.stride[2];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (t0 < p.n) store_two(a.out, at0 + 8 * j, y[4 * j], y[4 * j + 1]);
        if (t1 < p.n) store_two(a.out, at1 + 8 * j, y[4 * j + 2], y[4 * j + 3]);
      }
    }
    if (chunk + 2 < chunks) hopper::named_barrier_arrive(empty + stage, 256);
  }
}

template <int R, int blocks>
__global__ void __launch_bounds__(256, R < 8 ? 2 : 1)
    forward_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<Shared<R>*>(memory);
  const int64_t sequence = blockIdx.x / static_cast<unsigned>(a.size.heads);
  const Unit u = cuda::unit_of(a, sequence, static_cast<int>(blockIdx.x - sequence * a.size.heads));
  if (u.tokens <= 0) return;
  read_bias<R>(a.q_bias, u.head, a.size.halves, sh.q_bias, threadIdx.x, 256);
  read_bias<R>(a.k_bias, u.head, a.size.halves, sh.k_bias, threadIdx.x, 256);
  read_projection<R>(a.mimo_v, u.head, sh.mimo_v, threadIdx.x, 256);
  read_projection<R>(a.mimo_z, u.head, sh.mimo_z, threadIdx.x, 256);
  read_projection<R>(a.mimo_out, u.head, sh.mimo_out, threadIdx.x, 256);
  if (threadIdx.x < 64) sh.carried.turns[threadIdx.x] = 0, sh.carried.tainted[threadIdx.x] = 0;
  __syncthreads();
  if (warpgroup() == 0)
    multiply_chunks<R>(a, u, sh);
  else
    read_chunks<R, blocks>(a, u, sh);
}

}  // namespace

void launch_forward(const Args& args, cudaStream_t stream) {
  const int64_t units = args.size.sequences * args.size.heads;
  with_shape(args.size, [&](auto rank, auto blocks) {
    launch("mamba3: forward", forward_kernel<rank(), blocks()>, units, 256, sizeof(Shared<rank()>),
           stream, args);
  });
}

}  // namespace talea::mamba3::sm90
