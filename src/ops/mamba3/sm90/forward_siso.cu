// What: forward of one row a token (SISO) where every multiprocessor has heads enough: a block a head
//       of a sequence, two warpgroups.
// Why: as in forward.cu, but that the warpgroup which reads the rows forms their turns as well.
// Never: writes a state of every chunk, or divides by a decay.
#include <cstddef>

#include "device/common/cuda_check.hpp"
#include "ops/mamba3/sm90/forward_shared.cuh"
#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/launch.cuh"
#include "ops/mamba3/sm90/own_turns.cuh"
#include "ops/mamba3/sm90/siso_rows.cuh"

namespace talea::mamba3::sm90 {
namespace {

constexpr int C = tokens_of<1>;

struct Shared {
  char q[2][wide_bytes], k[2][wide_bytes], h[wide_bytes];
  char v[2][panel_bytes], weighed[panel_bytes];
  float4 q_bias[32], k_bias[32];
  float mimo_v[values], mimo_z[values], mimo_out[values];  // by projection_at
  Steps<C> steps[2];
  RawTokens<C> raw;
  Carried carried;
  // Read from here: registers that they would take are spilled.
  RowHomes homes;
  float* home = nullptr;      // the state before the first chunk and behind the last
  uint64_t* turns = nullptr;  // what lies behind the last chunk
};

// From a row of q to that of k.
constexpr int behind_q = static_cast<int>(offsetof(Shared, k) - offsetof(Shared, q));

// Steps of a chunk, by the half that multiplies: it waits for the other one.
struct StepsOfChunk {
  const Args& a;
  const Unit& u;
  Shared& sh;
  const int thread = threadIdx.x & 127;
  RawToken next = raw_token(a, u, part_of<C>(u, 0), thread <= C ? thread : C);

  __device__ __forceinline__ void operator()(int chunk) {
    sh.raw.put(thread, next);
    hopper::named_barrier_sync(multiplying, 128);
    if (thread < 32)
      read_steps(sh.raw, part_of<C>(u, chunk), sh.steps[chunk & 1],
                 [](int, float, float, float, float) {});
    hopper::named_barrier_arrive(stepped, 256);
    // Of no token behind the last chunk.
    next = raw_token(a, u, part_of<C>(u, chunk + 1), thread <= C ? thread : C);
  }
};

template <int blocks>
__device__ __forceinline__ void read_chunks(const Args& a, const Unit& u, bool formed, Shared& sh) {
  using Turns = TurnReader<C, blocks, 128>;
  struct Scratch {
    typename Turns::Scratch turns;
    float dt[C];
  };
  static_assert(sizeof(Scratch) <= panel_bytes);
  auto& scratch = *reinterpret_cast<Scratch*>(sh.weighed);
  const int thread = threadIdx.x & 127;
  const int chunks = static_cast<int>(cuda::chunks_of(a.size, u.tokens));
  const auto sync = [] { hopper::named_barrier_sync(reading, 128); };
  Turns turns(thread);
  float h[64];
  if (starts_with_state(a)) {
    take_state(sh.home, h);
  } else {
#pragma unroll
    for (float& x : h) x = 0;
  }
  float* const saved = cuda::saved_states(a, u);

  Part p = part_of<C>(u, 0);
  const auto begin = [&](int stage) {
    if (p.n == C) {
      copy_whole<columns, 128>(sh.homes.q, a.q.stride[1], p.first, sh.q[stage], thread);
      copy_whole<columns, 128>(sh.homes.k, a.k.stride[1], p.first, sh.k[stage], thread);
      copy_whole<values, 128>(sh.homes.v, a.v.stride[1], p.first, sh.v[stage], thread);
      return;
    }
    copy_rows<1, 128>(a.q, Cut{}, u, p, sh.q[stage], thread);
    copy_rows<1, 128>(a.k, Cut{}, u, p, sh.k[stage], thread);
    copy_values<128>(a, Cut{}, u, p, sh.v[stage], thread);
  };
  begin(0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int stage = chunk & 1;
    if (saved && chunk % a.size.kept_every == 0)
      put_state(saved + chunk / a.size.kept_every * (columns * values), h);
    // What is kept of them from chunk to chunk would be spilled, and wait for them there.
    turns.load(a, u, p, formed);
    if (thread < C)
      scratch.dt[thread] =
          thread < p.n
              ? cuda::read(a.dt, cuda::at(a.dt, u.batch, u.head, u.begin + p.first + thread))
              : 0.0f;
    if (thread < 64) scratch.turns.lost[thread] = 0;
    const RawValues<1, 128> own(a, Cut{}, u, p, thread);
    copies_done();
    sync();
    turns.add(a, p, scratch.dt, formed, scratch.turns);
    sync();
    const auto turn = [&](auto halves) {
      // Eight rows begin at a multiple of 1024 bytes: row and swapped piece are bits of the place.
      const auto at = [&](int row0, int pp) {
        return stage * wide_bytes + row0 * 128 + place_of(0, halves() ? 2 * pp : 4 * pp);
      };
      const auto two_rows = [&](auto turned, int first, bool now, bool next, const float4& q_bias,
                                const float4& k_bias, const TwoTurns(&by)[2]) {
        char* const q0 = sh.q[0] + first;
        char* const q1 = sh.q[0] + (first ^ 144);
        turn_all<halves(), turned(), 4>({q0, q0 + behind_q, q1, q1 + behind_q},
                                        {now, now, next, next}, {q_bias, k_bias, q_bias, k_bias},
                                        {by[0], by[0], by[1], by[1]});
      };
      turns.each_turn(a, p, sh.carried, scratch.turns,
                      [&](int j, int pp, const TwoTurns(&by)[2], bool next) {
                        two_rows(std::true_type{}, at(turns.first_token(), pp) ^ j * 144, true,
                                 next, sh.q_bias[pp], sh.k_bias[pp], by);
                      });
      // Pairs that never turn.
      if constexpr (blocks == 1) {
        const int pp = 16 + (thread & 15), row0 = thread / 16 * 8, home = at(row0, pp);
        const float4 q_bias = sh.q_bias[pp], k_bias = sh.k_bias[pp];
#pragma unroll 1
        for (int i = 0; i < 8; i += 2)
          two_rows(std::false_type{}, home ^ i * 144, row0 + i < p.n, row0 + i + 1 < p.n, q_bias,
                   k_bias, {});
      }
    };
    if (a.size.halves)
      turn(std::true_type{});
    else
      turn(std::false_type{});
    sync();
    turns.finish(a, sh.carried);
    hopper::named_barrier_sync(stepped, 256);
    if (a.mimo_v.data)
      own.put(p, sh.mimo_v, sh.steps[stage].key, sh.v[stage], sh.weighed);
    else
      weigh_values<128>(sh.v[stage], sh.steps[stage].key, sh.weighed, thread);
    if (chunk > 0) hopper::named_barrier_sync(state_read, 256);
    join_chunk(sh, stage, h, sync);
    if (chunk + 1 < chunks) {
      p = part_of<C>(u, chunk + 1);
      if (chunk > 0) hopper::named_barrier_sync(empty + (stage ^ 1), 256);
      begin(stage ^ 1);
    }
    hopper::warpgroup_wait<0>();
    hopper::hold_registers(h);
    sync();  // the scratch lies where the weighed values are
  }
  if (a.last.ssm.data) put_state(sh.home, h);
  if (sh.turns && thread < a.size.pairs)
    sh.turns[thread] = marked(sh.carried.turns[thread], sh.carried.tainted[thread] != 0);
}

template <int blocks>
__global__ void __launch_bounds__(256, 2)
    siso_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                const __grid_constant__ Wave wave) {
  hopper::begin_after_earlier_kernels();
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<Shared*>(memory);
  int64_t number = blockIdx.x;
  // The longest sequence of a pack first: a block that begins late is short.
  if (a.pack.rounds) {
    const int64_t i = number / a.size.heads;
    if (i >= a.pack.rounds[1].stretch) return;
    number += (a.pack.by_length[i].sequence - i) * a.size.heads;
  }
  const Unit u = unit_at(a, Cut{}, wave.first, number);
  if (u.tokens <= 0) return;
  // Each by warps of its own: none waits for the numbers of another.
  const int thread = threadIdx.x, warp = thread / 32;
  if (warp == 0)
    read_bias<1>(a.q_bias, Cut{}, u, a.size.halves, sh.q_bias, thread, 32);
  else if (warp == 1)
    read_bias<1>(a.k_bias, Cut{}, u, a.size.halves, sh.k_bias, thread - 32, 32);
  else if (warp < 4)
    read_projection<1>(a.mimo_v, Cut{}, u, sh.mimo_v, thread - 64, 64);
  else if (warp < 6)
    read_projection<1>(a.mimo_z, Cut{}, u, sh.mimo_z, thread - 128, 64);
  else
    read_projection<1>(a.mimo_out, Cut{}, u, sh.mimo_out, thread - 192, 64);
  if (threadIdx.x < 64) {
    const int i = threadIdx.x;
    const uint64_t turn = i < a.size.pairs ? cuda::first_turn(a, u, i) : 0;
    sh.carried.tainted[i] = turn == cuda::no_turn;
    sh.carried.turns[i] = turn == cuda::no_turn ? 0 : turn;
  }
  if (threadIdx.x == 0) {
    sh.homes.set(a, u);
    sh.home = b.upstream ? b.upstream + number * (columns * values) : nullptr;
    sh.turns = b.turns ? b.turns + number * a.size.pairs : nullptr;
  }
  __syncthreads();
  if (warpgroup() == 0) {
    multiply_chunks<1>(a, Cut{}, u, sh, 0, static_cast<int>(cuda::chunks_of(a.size, u.tokens)),
                       StepsOfChunk{a, u, sh});
  } else {
    read_chunks<blocks>(a, u, b.rates != nullptr, sh);
  }
}

constexpr int rate_threads = 256;

// tanh of angles that heads share.
__global__ void __launch_bounds__(rate_threads)
    rates_kernel(const __grid_constant__ Args a, float* rates, int64_t pairs, int64_t count) {
  hopper::begin_after_earlier_kernels();
  const int64_t i = int64_t{blockIdx.x} * rate_threads + threadIdx.x;
  if (i >= count) return;
  int64_t token = i / pairs;
  const int64_t pair = i - token * pairs;
  if (mutant(ScanMutant::m3_rates_of_the_token_before) && token > 0) --token;
  const int64_t batch = token / a.size.tokens;
  const int of = mutant(ScanMutant::m3_rates_of_the_first_batch) ? 0 : static_cast<int>(batch);
  const int64_t at = cuda::at(a.angles, of, token - batch * a.size.tokens);
  rates[i] = tanhf(cuda::read(a.angles, at + pair * a.angles.stride[3]));
}

// The angles of a call become their rates.
void launch_rates(Args& args, float* rates, cudaStream_t stream) {
  const cuda::Sizes& s = args.size;
  const int64_t count = int64_t{s.batch} * s.tokens * s.pairs;
  launch("mamba3: rates", rates_kernel, (count + rate_threads - 1) / rate_threads, rate_threads, 0,
         stream, args, rates, int64_t{s.pairs}, count);
  args.angles = {};
  args.angles.data = rates;
  args.angles.dtype = DType::f32;
  args.angles.stride[0] = int64_t{s.tokens} * s.pairs;
  args.angles.stride[1] = s.pairs;
  args.angles.stride[3] = 1;
}

}  // namespace

void launch_forward_siso(const Args& args, const Wave& wave, const UnitBuffers& b,
                         cudaStream_t stream) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  Args apart = args;  // states by unit, whatever the order of a pack
  apart.pack = {};
  launch_start(apart, Cut{}, wave, b, stream);
  Args formed = args;
  if (b.rates) launch_rates(formed, b.rates, stream);
  with_shape<false>(args.size, [&](auto, auto blocks) {
    launch("mamba3: forward", siso_kernel<blocks()>, units, 256, sizeof(Shared), stream, formed, b,
           wave);
  });
  launch_end(apart, Cut{}, wave, b, 0, stream);
}

}  // namespace talea::mamba3::sm90
