// What: the forward kernel of lane sm90: one block a head of a sequence, two warpgroups.
// Why: one reads and turns the rows of a chunk and keeps the state in registers, while the other
//      multiplies the rows of the chunk before, gates them and stores the output.
// Never: writes a state of every chunk, or divides by a decay.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/sm90/forward_shared.cuh"
#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/launch.cuh"

namespace talea::mamba3::sm90 {
namespace {

template <int R>
struct Shared {
  static constexpr int C = tokens_of<R>;
  char q[2][wide_bytes], k[2][wide_bytes], h[wide_bytes];
  char v[2][panel_bytes], weighed[panel_bytes];
  float4 q_bias[R * 32], k_bias[R * 32];
  float mimo_v[R * values], mimo_z[R * values], mimo_out[R * values];
  ChunkSteps<C> steps[2];
  // Read from here: registers that they would take are spilled.
  Unit unit;
  float* home = nullptr;  // the state between runs
  const float* turns_from = nullptr;
  const char* steps_from = nullptr;
};

// A line that is read soon.
__device__ __forceinline__ void fetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

template <int R, int blocks>
__device__ __forceinline__ void read_chunks(const Args& a, Shared<R>& sh, int first, int end,
                                            bool last) {
  const Unit& u = sh.unit;
  constexpr int C = tokens_of<R>, pairs = 32 * blocks, each = C / 8;
  const int thread = threadIdx.x & 127, pp0 = thread & 15, t0 = (thread >> 4) * each;
  const auto sync = [] { hopper::named_barrier_sync(reading, 128); };
  float h[64];
  if (first > 0 || starts_with_state(a)) {
    take_state(sh.home, h);
  } else {
#pragma unroll
    for (float& x : h) x = 0;
  }
  float* const saved = cuda::saved_states(a, u);

  Part p = part_of<C>(u, first);
  const auto begin = [&](int chunk, int stage) {
    copy_rows<R, 128>(a.q, u, p, sh.q[stage], thread);
    copy_rows<R, 128>(a.k, u, p, sh.k[stage], thread);
    if constexpr (R == 1) copy_values<128>(a, u, p, sh.v[stage], thread);
    copy_bytes<sizeof(ChunkSteps<C>), 128>(
        sh.steps_from + (chunk - first) * static_cast<int64_t>(sizeof(ChunkSteps<C>)),
        &sh.steps[stage], thread);
    // What registers take once the product is through. No branch: accumulators would be moved.
    if constexpr (R > 1)
      fetch(static_cast<const char*>(a.v.data) +
            cuda::at(a.v, u.batch, u.begin + p.first + (thread < p.n ? thread : 0), u.head) * 2);
  };
  begin(first, 0);
#pragma unroll 1
  for (int chunk = first; chunk < end; ++chunk) {
    const int stage = (chunk - first) & 1;
    if (saved && chunk % a.size.segment == 0)
      put_state(saved + chunk / a.size.segment * (columns * values), h);
    // Not under the product of the chunk before: what is loaded there is spilled.
    const auto* const turns = reinterpret_cast<const float4*>(sh.turns_from) +
                              (chunk - first) * (C * pairs / 2) + t0 * (pairs / 2) + pp0;
    const float4 ahead = __ldg(turns);
    const RawValues<R, 128> own(a, u, p, thread);
    copies_done();
    sync();
    const auto turn = [&](auto halves) {
      const auto one = [&](int j, int b, const float4& x) {
        TwoTurns by;
        by.cos0 = x.x, by.sin0 = x.y, by.cos1 = x.z, by.sin1 = x.w;
        // The rows of a group of tokens begin at a multiple of eight.
        char* const q = sh.q[stage] + t0 * R * 128;
        char* const k = sh.k[stage] + t0 * R * 128;
        const int pp = pp0 + 16 * b;
#pragma unroll
        for (int r = 0; r < R; ++r) {
          turn_row<halves()>(q, j * R + r, pp, sh.q_bias[r * 32 + pp], by);
          turn_row<halves()>(k, j * R + r, pp, sh.k_bias[r * 32 + pp], by);
        }
      };
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
        float4 next = b == 0 ? ahead : __ldg(turns + b * 16);
#pragma unroll 1
        for (int j = 0; j < each; ++j) {
          const float4 x = next;
          if (j + 1 < each) next = __ldg(turns + (j + 1) * (pairs / 2) + b * 16);
          if (t0 + j >= p.n) break;
          one(j, b, x);
        }
      }
      // Pairs that never turn.
      if constexpr (blocks == 1) {
        if (a.q_bias.data) bias_rows<R, halves(), 128>(sh.q[stage], p.n, sh.q_bias, thread);
        if (a.k_bias.data) bias_rows<R, halves(), 128>(sh.k[stage], p.n, sh.k_bias, thread);
      }
    };
    if (a.size.halves)
      turn(std::true_type{});
    else
      turn(std::false_type{});
    own.put(p, sh.mimo_v, sh.steps[stage].key, sh.v[stage], sh.weighed);
    if (chunk > first) hopper::named_barrier_sync(state_read, 256);
    join_chunk(sh, stage, h, sync);
    if (chunk + 1 < end) {
      p = part_of<C>(u, chunk + 1);
      if (chunk > first) hopper::named_barrier_sync(empty + (stage ^ 1), 256);
      begin(chunk + 1, stage ^ 1);
    }
    hopper::warpgroup_wait<0>();
    hopper::hold_registers(h);
  }
  if (!last || a.last.ssm.data) put_state(sh.home, h);
}

// Chunks [first, first + ahead) of a unit.
template <int R, int blocks>
__global__ void __launch_bounds__(256, 2)
    forward_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                   const __grid_constant__ Wave wave, int first, int ahead) {
  hopper::begin_after_earlier_kernels();
  extern __shared__ __align__(1024) char memory[];
  constexpr int C = tokens_of<R>;
  auto& sh = *reinterpret_cast<Shared<R>*>(memory);
  const int64_t number = blockIdx.x;
  const Unit u = unit_at(a, wave.first, number);
  const int chunks = static_cast<int>(cuda::chunks_of(a.size, u.tokens));
  if (first >= chunks) return;
  const int end = chunks < first + ahead ? chunks : first + ahead;
  read_bias<R>(a.q_bias, u.head, a.size.halves, sh.q_bias, threadIdx.x, 256);
  read_bias<R>(a.k_bias, u.head, a.size.halves, sh.k_bias, threadIdx.x, 256);
  read_projection<R>(a.mimo_v, u.head, sh.mimo_v, threadIdx.x, 256);
  read_projection<R>(a.mimo_z, u.head, sh.mimo_z, threadIdx.x, 256);
  read_projection<R>(a.mimo_out, u.head, sh.mimo_out, threadIdx.x, 256);
  if (threadIdx.x == 0) {
    sh.unit = u;
    sh.home = b.upstream + number * (columns * values);
    sh.turns_from = b.token_turns + number * ahead * (C * 32 * blocks * 2);
    sh.steps_from = b.token_steps + number * ahead * cuda::chunk_step_bytes(C);
  }
  __syncthreads();
  if (warpgroup() == 0) {
    hopper::lower_registers<104>();
    multiply_chunks<R>(a, sh.unit, sh, first, end);
  } else {
    hopper::raise_registers<152>();
    read_chunks<R, blocks>(a, sh, first, end, end == chunks);
  }
}

}  // namespace

void launch_forward(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t ahead,
                    cudaStream_t stream) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  const int64_t chunks = (args.size.tokens + args.size.chunk - 1) / args.size.chunk;
  launch_turns(args, wave, b, chunks, stream);
  launch_start(args, wave, b, stream);
  for (int64_t first = 0; first < chunks; first += ahead) {
    launch_tokens(args, wave, b, first, ahead, chunks, stream);
    with_shape(args.size, [&](auto rank, auto blocks) {
      launch("mamba3: forward", forward_kernel<rank(), blocks()>, units, 256,
             sizeof(Shared<rank()>), stream, args, b, wave, static_cast<int>(first),
             static_cast<int>(ahead));
    });
  }
  launch_end(args, wave, b, chunks, stream);
}

}  // namespace talea::mamba3::sm90
