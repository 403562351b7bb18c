// What: the forward kernel of lane sm90: one block a head of a sequence, two warpgroups.
// Why: one reads and turns the rows of a chunk and keeps the state in registers, while the other
//      multiplies the rows of the chunk before, gates them and stores the output.
// Never: writes a state of every chunk, or divides by a decay.
#pragma once

#include "ops/mamba3/sm90/forward_parts.cuh"
#include "ops/mamba3/sm90/launch.cuh"

namespace talea::mamba3::sm90::forward {

// How a stretch weighs the state before it: as its chunks do, one after another.
template <int R>
__device__ __forceinline__ void put_decays(int stretch, SharedAbreast<R>& sh) {
  constexpr int64_t bytes = sizeof(ChunkSteps<tokens_of<R>>);
  const int own = threadIdx.x;
  if (own > sh.before) return;
  const char* const from = sh.steps_from - (sh.before - own) * stretch * bytes;
  float decay = 1;
  for (int chunk = 0; chunk < stretch && (own < sh.before || sh.next); ++chunk)
    decay *= reinterpret_cast<const ChunkSteps<tokens_of<R>>*>(from + chunk * bytes)->whole;
  sh.decays[own] = decay;
}

// The state before the block's stretch, from that before the run; and that behind the run.
template <int R>
__device__ __forceinline__ void join_stretches(const SharedAbreast<R>& sh, float (&h)[64]) {
  const float* from = sh.stretches;
#pragma unroll 1
  for (int i = 0; i < sh.before; ++i, from += columns * values) {
    const float decay = sh.decays[i];
    each_two(h, [&](int p, int n, float& x, float& y) {
      const float2 own = *reinterpret_cast<const float2*>(from + p * columns + n);
      x = joined(x, decay, own.x), y = joined(y, decay, own.y);
    });
  }
  if (!sh.next) return;
  const float decay = sh.decays[sh.before];
  each_two(h, [&](int p, int n, float x, float y) {
    const float2 own = *reinterpret_cast<const float2*>(from + p * columns + n);
    *reinterpret_cast<float2*>(sh.next + p * columns + n) = {joined(x, decay, own.x),
                                                             joined(y, decay, own.y)};
  });
}

template <int R, int blocks, class S>
__device__ __forceinline__ void read_chunks(const Args& a, const Cut& cut, S& sh) {
  const Unit& u = sh.unit;
  constexpr int C = tokens_of<R>, pairs = 32 * blocks, each = C / 8;
  const int thread = threadIdx.x & 127;
  const int pp0 = thread & 15, t0 = (thread >> 4) * each;  // two pairs of some tokens
  using Rows = std::conditional_t<Shared<R>::turns_here, OwnRows<R, blocks>, NoRows>;
  const Rows own_rows(biases_of(sh), biases_of(sh) + R * 32, thread);
  const auto sync = [] { hopper::named_barrier_sync(reading, 128); };
  float h[64];
  if (sh.home) {
    take_state(sh.home, h);
  } else {
#pragma unroll
    for (float& x : h) x = 0;
  }
  if constexpr (std::is_same_v<S, SharedAbreast<R>>)
    if (sh.stretches) join_stretches(sh, h);

  Part p = part_of<C>(u, 0);
  const auto begin = [&](int chunk, int stage) {
    if ((cut.whole || cut.columns >= columns) && p.n == C) {
      copy_tokens<R, 128>(sh.homes.q, a.q, cut, p.first, sh.q[stage], thread);
      copy_tokens<R, 128>(sh.homes.k, a.k, cut, p.first, sh.k[stage], thread);
    } else {
      copy_rows<R, 128>(a.q, cut, u, p, sh.q[stage], thread);
      copy_rows<R, 128>(a.k, cut, u, p, sh.k[stage], thread);
    }
    if constexpr (R == 1) copy_values<128>(a, cut, u, p, sh.v[stage], thread);
    copy_bytes<sizeof(ChunkSteps<C>), 128>(
        sh.steps_from + chunk * static_cast<int64_t>(sizeof(ChunkSteps<C>)), &sh.steps[stage],
        thread);
    if constexpr (Shared<R>::turns_here) {
      constexpr int pieces = 16 * blocks;  // of a token; whole tokens a copy
      const auto* const from =
          reinterpret_cast<const float4*>(sh.turns_from) + chunk * (C * pieces) + thread;
      const uint32_t to = hopper::smem_address(
          sh.template turns_of<blocks>(stage) +
          Shared<R>::template turn_at<blocks>(thread / pieces, thread % pieces));
#pragma unroll
      for (int i = 0; i < C * pieces / 128; ++i)
        hopper::copy_16_bytes(to + static_cast<uint32_t>(i * 128 * sizeof(float4)), from + i * 128,
                              true);
    }
    // What registers take once the product is through. No branch: accumulators would be moved.
    if constexpr (R > 1)
      fetch(sh.homes.v + (p.first + (thread < p.n ? thread : 0)) * a.v.stride[1]);
  };
  begin(0, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < sh.count; ++chunk) {
    const int stage = chunk & 1;
    if (sh.saved && (sh.first + chunk) % a.size.kept_every == 0)
      put_state(sh.saved + (sh.first + chunk) / a.size.kept_every * (columns * values), h);
    // Not under the product of the chunk before: what is loaded there is spilled.
    [[maybe_unused]] const auto* turns =
        reinterpret_cast<const float4*>(sh.turns_from) + chunk * (C * pairs / 2);
    const auto ahead = [&] {
      if constexpr (Shared<R>::turns_here)
        return 0;
      else
        return EightTurns<R, pairs>(turns += t0 * (pairs / 2) + pp0);
    }();
    const auto own = [&] {
      if constexpr (R == 1)
        return RawValues<R, 128>(thread);
      else if constexpr (std::is_same_v<S, SharedOfParts<R>>)  // there the others are spilled
        return RawValues<R, 128>(a, cut, u, p, thread);
      else
        return RankValues<R, 128>(sh.homes.v + p.first * a.v.stride[1], a.v.stride[1], p, thread);
    }();
    __syncwarp();  // what is loaded is asked for before the wait
    copies_done();
    sync();
    const auto turn = [&](auto halves) {
      if constexpr (R < 4) {
#pragma unroll
        for (int b = 0; b < blocks; ++b)
          turn_eight<R, halves(), pairs>(sh, stage, t0, p.n - t0, pp0 + 16 * b,
                                         b == 0 ? ahead : EightTurns<R, pairs>(turns + b * 16));
        // Pairs that never turn.
        if constexpr (blocks == 1) {
          if (a.q_bias.data) bias_tile<R, halves()>(sh.q[stage], p.n, sh.q_bias, thread);
          if (a.k_bias.data) bias_tile<R, halves()>(sh.k[stage], p.n, sh.k_bias, thread);
        }
      } else {
        const bool biased = a.q_bias.data || a.k_bias.data;
        constexpr bool parts = std::is_same_v<S, SharedOfParts<R>>;
        if (parts && cut.pairs_of(a.size, part_of_columns(cut, u)) <= 0)
          own_rows.template turn<halves(), false>(sh, stage, p.n, biased);
        else
          own_rows.template turn<halves(), true>(sh, stage, p.n, biased);
        if constexpr (blocks == 2) sync();  // values take the place of the turns
      }
    };
    if (a.size.halves)
      turn(std::true_type{});
    else
      turn(std::false_type{});
    own.put(p, sh.mimo_v, sh.steps[stage].key, sh.v[stage], sh.weighed);
    if (chunk > 0) hopper::named_barrier_sync(state_read, 256);
    join_chunk(sh, stage, h, sync);
    if (chunk + 1 < sh.count) {
      p = part_of<C>(u, chunk + 1);
      if (chunk > 0) hopper::named_barrier_sync(empty + (stage ^ 1), 256);
      begin(chunk + 1, stage ^ 1);
    }
    hopper::warpgroup_wait<0>();
    hopper::hold_registers(h);
  }
  if (sh.left) put_state(sh.left, h);
}

// The unit of a block, among those of the sequences at work. The parts of a head lie side by side.
__device__ __forceinline__ int64_t number_of_block(const Cut& cut) {
  const int64_t block = blockIdx.x;
  if (cut.part_bits == 0) return block;
  const int64_t of_parts = block >> cut.part_bits, head = of_parts >> cut.slab_bits;
  const int64_t part = block & ((1 << cut.part_bits) - 1);
  return (((head << cut.part_bits) + part) << cut.slab_bits) +
         cut.slab_of(static_cast<int>(of_parts));
}

// A run of `count` chunks from `first` on.
template <int R, class S>
__device__ __forceinline__ void put_run(const Args& a, const Cut& cut, const Unit& u, int first,
                                        int count, S& sh) {
  sh.first = first, sh.count = count;
  if constexpr (std::is_same_v<S, SharedAbreast<R>>)
    sh.stretches = nullptr, sh.next = nullptr, sh.before = 0;
  sh.saved = saved_states(a, cut, u);
  sh.unit = u;
  sh.unit.begin += int64_t{first} * tokens_of<R>;
  sh.unit.tokens -= int64_t{first} * tokens_of<R>;
}
// Chunks [first, first + ahead) of a unit. Where the tokens of its first chunk lie, in chunks.
template <int R, class S>
__device__ __forceinline__ int64_t find_run(const Args& a, const Cut& cut, const UnitBuffers& b,
                                            const Wave& wave, int first, int ahead, S& sh) {
  const int64_t number = number_of_block(cut);
  const Unit u = unit_at(a, cut, wave.first, number);
  const int chunks = static_cast<int>(cuda::chunks_of(a.size, u.tokens));
  const int end = chunks < first + ahead ? chunks : first + ahead;
  put_run<R>(a, cut, u, first, end - first, sh);
  float* const home = b.upstream + number * (columns * values);
  sh.home = first > 0 || starts_with_state(a) ? home : nullptr;
  sh.left = end < chunks || a.last.ssm.data ? home : nullptr;
  return (number >> cut.slab_bits) * ahead;
}
// The same of a stretch of a run, those of a unit beside each other.
template <int R>
__device__ __forceinline__ int64_t find_abreast(const Args& a, const UnitBuffers& b,
                                                const Wave& wave, int first, int ahead,
                                                SharedAbreast<R>& sh) {
  const int64_t number = blockIdx.x / b.abreast, units = gridDim.x / b.abreast;
  const auto i = static_cast<int>(blockIdx.x % b.abreast);
  const Unit u = unit_at(a, Cut{}, wave.first, number);
  const int chunks = static_cast<int>(cuda::chunks_of(a.size, u.tokens));
  const int own = first + i * b.stretch, run = first / ahead;
  const int end = chunks < own + b.stretch ? chunks : own + b.stretch;
  put_run<R>(a, Cut{}, u, own, end - own, sh);
  const auto home = [&](int place) {
    return b.upstream + (place * units + number) * (columns * values);
  };
  sh.home = run > 0 ? home(home_behind(run - 1)) : starts_with_state(a) ? home(0) : nullptr;
  sh.next = i == b.abreast - 1 && end < chunks ? home(home_behind(run)) : nullptr;
  sh.left = end == chunks && a.last.ssm.data ? home(home_behind(run)) : nullptr;
  sh.stretches = b.stretches + number * b.abreast * (columns * values);
  sh.before = i;
  return number * ahead + i * b.stretch;
}
// The same of a stretch of a round, the longest first, by all heads.
template <int R, class S>
__device__ __forceinline__ int64_t find_stretch(const Args& a, const Cut& cut, const UnitBuffers& b,
                                                int64_t round, S& sh) {
  const RoundAt at(a, round);
  const int64_t heads = a.size.heads, number = number_of_block(cut);
  const int64_t i = number / heads, head = number - i * heads;
  sh.count = 0;
  if (i >= at.stretches) return 0;
  const cuda::Stretch x = a.pack.by_length[at.stretch + i];
  put_run<R>(a, cut, unit_of(a, cut, x, static_cast<int>(head)), x.first, x.count, sh);
  // What crosses from a round to the next lies by turns in two places; behind them what is handed.
  const auto home = [&](int64_t place) {
    return b.upstream + (place * heads + head) * (columns * values);
  };
  const bool last = is_last<tokens_of<R>>(x);
  const bool crossed = x.first > 0 || (mutant(ScanMutant::m3_round_not_reset) && round > 0);
  sh.home = crossed ? home(round & 1) : starts_with_state(a) ? home(2 + i) : nullptr;
  sh.left = !last ? home(~round & 1) : a.last.ssm.data ? home(2 + i) : nullptr;
  return (head >> cut.slab_bits) * a.size.segment + x.number - at.first;
}

// first: of a pack the round. Stretches have instructions of their own: what joins their states
// would spill registers of all others.
template <int R, int blocks, class Memory>
__device__ __forceinline__ void forward_block(const Args& a, const UnitBuffers& b, const Wave& wave,
                                              int first, int ahead, const Cut& cut) {
  hopper::begin_after_earlier_kernels();
  extern __shared__ __align__(1024) char memory[];
  constexpr int C = tokens_of<R>;
  constexpr bool parts = std::is_same_v<Memory, SharedOfParts<R>>;
  constexpr bool abreast = std::is_same_v<Memory, SharedAbreast<R>>;
  auto& sh = *reinterpret_cast<Memory*>(memory);
  if (threadIdx.x == 0) {
    int64_t at = 0;
    if constexpr (abreast)
      at = a.pack.rounds   ? find_stretch<R>(a, cut, b, first, sh)
           : b.stretch > 0 ? find_abreast<R>(a, b, wave, first, ahead, sh)
                           : find_run<R>(a, cut, b, wave, first, ahead, sh);
    else
      at = a.pack.rounds ? find_stretch<R>(a, cut, b, first, sh)
                         : find_run<R>(a, cut, b, wave, first, ahead, sh);
    if (sh.count > 0) sh.homes.set(a, cut, sh.unit);
    sh.turns_from = b.token_turns + at * (C * 32 * blocks * 2);
    sh.steps_from = b.token_steps + at * cuda::chunk_step_bytes(C);
    if constexpr (parts) begin_sharing<R>(sh);
  }
  if constexpr (parts)
    hopper::cluster_sync();
  else
    __syncthreads();
  if (sh.count <= 0) return;
  hold_back(ScanMutant::m3_place_not_exchanged);
  if constexpr (abreast)
    if (sh.stretches) put_decays<R>(b.stretch, sh);
  const Unit& u = sh.unit;
  read_bias<R>(a.q_bias, cut, u, a.size.halves, biases_of(sh), threadIdx.x, 256);
  read_bias<R>(a.k_bias, cut, u, a.size.halves, biases_of(sh) + R * 32, threadIdx.x, 256);
  read_projection<R>(a.mimo_v, cut, u, sh.mimo_v, threadIdx.x, 256);
  read_projection<R>(a.mimo_z, cut, u, sh.mimo_z, threadIdx.x, 256);
  read_projection<R>(a.mimo_out, cut, u, sh.mimo_out, threadIdx.x, 256);
  __syncthreads();
  if (warpgroup() == 0) {
    hopper::lower_registers<112>();
    if constexpr (parts)
      multiply_parts<R>(a, sh.unit, sh);
    else
      multiply_chunks<R>(a, cut, sh.unit, sh, 0, sh.count);
  } else {
    hopper::raise_registers<144>();
    read_chunks<R, blocks>(a, cut, sh);
  }
}

template <int R, int blocks, class Memory, class... Units>
__global__ void __launch_bounds__(256, 2)
    forward_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                   const __grid_constant__ Wave wave, int first, int ahead,
                   const __grid_constant__ Units... units) {
  forward_block<R, blocks, Memory>(a, b, wave, first, ahead, cuda::cut_of(units...));
}
// Of two parts of N, side by side in a cluster.
template <int R>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(256, 2)
    forward_parts_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                         const __grid_constant__ Wave wave, int first, int ahead,
                         const __grid_constant__ Cut units) {
  forward_block<R, 2, SharedOfParts<R>>(a, b, wave, first, ahead, cuda::cut_of(units));
}

// Chunks [first, first + ahead) of `count` units, or a round of a pack.
template <class... Units>
void launch_chunks(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t count,
                   int64_t first, int64_t ahead, cudaStream_t stream, const Units&... units) {
  using Kernel = KernelOf<Args, UnitBuffers, Wave, int, int, Units...>;
  const auto one = [&](auto memory, Kernel kernel) {
    using Memory = typename decltype(memory)::type;
    static_assert(sizeof(Memory) <= most_shared);
    launch("mamba3: forward", kernel, count, 256, sizeof(Memory), stream, args, b, wave,
           static_cast<int>(first), static_cast<int>(ahead), units...);
  };
  with_shape<true>(args.size, [&](auto rank, auto blocks) {
    const auto of = [&](auto memory) {
      using Memory = typename decltype(memory)::type;
      one(memory, Kernel(forward_kernel<rank(), blocks(), Memory, Units...>));
    };
    if constexpr (sizeof...(Units) == 0 && rank() <= 4)
      if (b.stretch > 0) return of(std::type_identity<SharedAbreast<rank()>>{});
    if constexpr (blocks() == 2 && sizeof...(Units) > 0)
      if (cuda::cut_of(units...).part_bits > 0)
        return one(std::type_identity<SharedOfParts<rank()>>{}, forward_parts_kernel<rank()>);
    of(std::type_identity<Shared<rank()>>{});
  });
}

}  // namespace talea::mamba3::sm90::forward
