// What: the kernels that give backward its states: checkpoints, then those of a segment.
// Why: what was not kept is computed anew, a segment at a time; two warpgroups share the rows and
//      have half of the state's columns each.
// Never: reads a query.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/sm90/launch.cuh"
#include "ops/mamba3/sm90/state.cuh"

namespace talea::mamba3::sm90 {
namespace {

constexpr int threads = 256;

template <int R, int blocks>
struct Shared {
  static constexpr int C = tokens_of<R>;
  char k[2][wide_bytes], v[2][panel_bytes], weighed[panel_bytes];
  float4 k_bias[R * 32];
  float mimo_v[R * values];
  Steps<C> steps;
  RawTokens<C> raw;
  Carried carried;
  typename TurnReader<R, blocks, threads>::Scratch turns;
};

// Half a state: columns 64 w and on, of warpgroup w.
template <class F>
__device__ __forceinline__ void each_of_half(float (&h)[32], F f) {
  const int panel = threadIdx.x / 128 * 64;
  each_two(h, [&](int p, int n, float& x, float& y) { f(p, panel + n, x, y); });
}

__device__ __forceinline__ void put_turns(const Args& a, const Carried& carried, uint64_t* turns,
                                          int* taints) {
  const int i = threadIdx.x;
  if (i >= a.size.pairs) return;
  turns[i] = carried.turns[i];
  taints[i] = carried.tainted[i];
}

// Chunks [first, end); before(chunk, h) ahead of each. Without `states` turns alone are carried on.
template <int R, int blocks, class Before>
__device__ __forceinline__ void walk(const Args& a, const Unit& u, Shared<R, blocks>& sh,
                                     float (&h)[32], int first, int end, bool states,
                                     Before before) {
  constexpr int C = tokens_of<R>;
  const int thread = threadIdx.x;
  TurnReader<R, blocks, threads> turns(thread);
  Part p = part_of<C>(u, first);
  const auto begin = [&](int stage) -> RawToken {
    if (states) {
      copy_rows<R, threads>(a.k, u, p, sh.k[stage], thread);
      if constexpr (R == 1) copy_values<threads>(a, u, p, sh.v[stage], thread);
    }
    turns.load(a, u, p);
    return thread <= C ? raw_token(a, u, p, thread) : RawToken{};
  };
  RawToken raw = begin(first & 1);
#pragma unroll 1
  for (int chunk = first; chunk < end; ++chunk) {
    const int stage = chunk & 1;
    before(chunk, h);
    sh.raw.put(thread, raw);
    if (thread < 64) sh.turns.lost[thread] = 0;
    const RawValues<R, threads> own(a, u, p, thread);
    copies_done();
    __syncthreads();
    if (states && thread < 32) read_steps(sh.raw, p, sh.steps, [](int, float, float, float) {});
    turns.add(a, p, sh.raw.dt, sh.turns, [](int, int, float) {});
    __syncthreads();
    const Part next = part_of<C>(u, chunk + 1);
    if (states) {
      const auto turn = [&](auto halves) {
        turns.each_turn(a, p, sh.carried, sh.turns, [&](int t, int j, int pp, const TwoTurns& by) {
#pragma unroll
          for (int r = 0; r < R; ++r)
            turn_row<halves()>(sh.k[stage], (t + j) * R + r, pp, sh.k_bias[r * 32 + pp], by);
        });
        // Pairs that never turn: the rows of eight warps.
        if constexpr (blocks == 1) {
          const int pp = 16 + (thread & 15);
#pragma unroll
          for (int i = 0; i < rows / 16; ++i) {
            const int row = thread / 16 + 16 * i;
            if (row / R < p.n)
              bias_row<halves()>(sh.k[stage], row, pp, sh.k_bias[row % R * 32 + pp]);
          }
        }
      };
      if (a.size.halves)
        turn(std::true_type{});
      else
        turn(std::false_type{});
      own.put(p, sh.mimo_v, sh.steps.key, R == 1 ? sh.v[stage] : nullptr, sh.weighed);
    } else {
      turns.each_turn(a, p, sh.carried, sh.turns, [](int, int, int, const TwoTurns&) {});
    }
    hopper::fence_async_shared();
    __syncthreads();
    turns.finish(a, sh.carried);
    p = next;
    if (states) {
      const float whole = sh.steps.whole;
      scale_state(h, whole);
      products_begin(h);
      columns_by_columns<64>(h, Operand(sh.weighed),
                             Operand(sh.k[stage] + threadIdx.x / 128 * panel_bytes));
      hopper::warpgroup_commit();
      if (chunk + 1 < end) raw = begin(stage ^ 1);
      hopper::warpgroup_wait<0>();
      hopper::hold_registers(h);
    } else if (chunk + 1 < end) {
      raw = begin(stage ^ 1);
    }
    __syncthreads();
  }
}

template <int R, int blocks>
__device__ __forceinline__ void prepare(const Args& a, const Unit& u, Shared<R, blocks>& sh) {
  read_bias<R>(a.k_bias, u.head, a.size.halves, sh.k_bias, threadIdx.x, threads);
  read_projection<R>(a.mimo_v, u.head, sh.mimo_v, threadIdx.x, threads);
}

__device__ __forceinline__ Unit unit_at(const Args& a, int64_t first) {
  const int64_t sequence = blockIdx.x / static_cast<unsigned>(a.size.heads);
  return cuda::unit_of(a, first + sequence, static_cast<int>(blockIdx.x - sequence * a.size.heads));
}

// The state before each segment, and what a unit keeps from launch to launch.
template <int R, int blocks>
__global__ void __launch_bounds__(threads, 2)
    begin_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                 const __grid_constant__ Wave wave) {
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<Shared<R, blocks>*>(memory);
  const Unit u = unit_at(a, wave.first);
  const int64_t number = blockIdx.x;
  constexpr int size = columns * values;
  const int count = cuda::parameter_count(a.size);
  for (int i = threadIdx.x; i < size; i += threads) b.upstream[number * size + i] = 0;
  for (int i = threadIdx.x; i < count; i += threads) b.parameters[number * count + i] = 0;
  if (threadIdx.x == 0) b.pending[number] = cuda::Pending{};
  if (u.tokens <= 0) return;
  prepare<R>(a, u, sh);
  if (threadIdx.x < 64) sh.carried.turns[threadIdx.x] = 0, sh.carried.tainted[threadIdx.x] = 0;
  __syncthreads();
  const float* const saved = cuda::saved_states(a, u);
  const auto each = static_cast<int>(a.size.segment);
  const int last = static_cast<int>(cuda::chunks_of(a.size, u.tokens) - 1) / each;
  const auto keep = [&](int segment, float(&h)[32]) {
    const int64_t slot = number * wave.segments + segment;
    float* const to = b.states + slot * size;
    each_of_half(h, [&](int p, int n, float x, float y) {
      const int at = p * columns + n;
      const float2 both =
          saved ? *reinterpret_cast<const float2*>(saved + int64_t{segment} * size + at)
                : float2{x, y};
      *reinterpret_cast<float2*>(to + at) = both;
    });
    put_turns(a, sh.carried, b.turns + slot * a.size.pairs, b.taints + slot * a.size.pairs);
  };
  float h[32];
#pragma unroll
  for (float& x : h) x = 0;
  if (last > 0)
    walk<R, blocks>(a, u, sh, h, 0, last * each, !saved, [&](int chunk, float(&own)[32]) {
      if (chunk % each == 0) keep(chunk / each, own);
    });
  keep(last, h);
}

// The states before each chunk of the segment at work, and the one behind it, as operands.
template <int R, int blocks>
__global__ void __launch_bounds__(threads, 2)
    segment_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                   const __grid_constant__ Wave wave) {
  extern __shared__ __align__(1024) char memory[];
  auto& sh = *reinterpret_cast<Shared<R, blocks>*>(memory);
  const Unit u = unit_at(a, wave.first);
  const int64_t number = blockIdx.x;
  constexpr int size = columns * values;
  const int64_t chunks = cuda::chunks_of(a.size, u.tokens), first = wave.segment * a.size.segment;
  if (first >= chunks) return;
  const int64_t end = chunks < first + a.size.segment ? chunks : first + a.size.segment;
  prepare<R>(a, u, sh);
  const int64_t slot = number * wave.segments + wave.segment;
  if (threadIdx.x < a.size.pairs) {
    sh.carried.turns[threadIdx.x] = b.turns[slot * a.size.pairs + threadIdx.x];
    sh.carried.tainted[threadIdx.x] = b.taints[slot * a.size.pairs + threadIdx.x];
  }
  __syncthreads();
  float h[32];
  const float* const from = b.states + slot * size;
  each_of_half(h, [&](int p, int n, float& x, float& y) {
    const float2 both = *reinterpret_cast<const float2*>(from + p * columns + n);
    x = both.x, y = both.y;
  });
  auto* const inner = static_cast<__nv_bfloat16*>(b.inner) + number * (a.size.segment + 1) * size;
  const int64_t kept = number * a.size.segment * a.size.pairs;
  const auto keep = [&](int64_t i, float(&own)[32]) {
    each_of_half(own, [&](int p, int n, float x, float y) {
      *reinterpret_cast<uint32_t*>(inner + i * size + p * columns + n) = two_rounded(x, y);
    });
  };
  walk<R, blocks>(a, u, sh, h, static_cast<int>(first), static_cast<int>(end), true,
                  [&](int chunk, float(&own)[32]) {
                    const int64_t i = chunk - first;
                    keep(i, own);
                    put_turns(a, sh.carried, b.inner_turns + kept + i * a.size.pairs,
                              b.inner_taints + kept + i * a.size.pairs);
                  });
  keep(end - first, h);
}

}  // namespace

void launch_begin(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  with_shape(args.size, [&](auto rank, auto blocks) {
    launch("mamba3: states", begin_kernel<rank(), blocks()>, units, threads,
           sizeof(Shared<rank(), blocks()>), stream, args, b, wave);
  });
}

void launch_segment(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  with_shape(args.size, [&](auto rank, auto blocks) {
    launch("mamba3: states", segment_kernel<rank(), blocks()>, units, threads,
           sizeof(Shared<rank(), blocks()>), stream, args, b, wave);
  });
}

}  // namespace talea::mamba3::sm90
