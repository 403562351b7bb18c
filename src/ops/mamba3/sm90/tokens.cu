// What: turns and steps of the tokens, ahead of the chunks that read them: a warp a chunk of a head.
// Why: turns add exactly in any order, so no chunk waits for another; what three kernels read of a
//      token is formed once a segment.
// Never: rounds a turn before it is summed.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/sm90/launch.cuh"
#include "ops/mamba3/sm90/turns.cuh"

namespace talea::mamba3::sm90 {
namespace {

constexpr int threads = 128, warps = threads / 32;
using cuda::no_turn;

// A sum that is a number is not the mark of one that is none.
__device__ __forceinline__ uint64_t marked(uint64_t sum, bool lost) {
  return lost ? no_turn : sum == no_turn ? no_turn + 1 : sum;
}

constexpr int piece = cuda::turn_tokens;

// f(token, turn) of `piece` tokens of a chunk from `first` on, in order, of pair i.
template <class F>
__device__ __forceinline__ void each_turn(const Args& a, const Unit& u, const Part& p, int first,
                                          int i, const float* dt, F f) {
  const bool turns = a.angles.data && i < a.size.pairs;
  const int64_t home =
      cuda::at(a.angles, u.batch, u.begin + p.first + first, u.head) + i * a.angles.stride[3];
  uint32_t bits[piece];
#pragma unroll
  for (int j = 0; j < piece; ++j)
    bits[j] =
        turns && first + j < p.n ? cuda::bits_at(a.angles, home + j * a.angles.stride[1]) : 0u;
#pragma unroll
  for (int j = 0; j < piece; ++j) {
    if (first + j >= p.n) break;
    const float rate = turns ? tanhf(cuda::number_of(a.angles.dtype, bits[j])) : 0.0f;
    f(first + j, cuda::to_turn(rate * (0.5f * dt[j])));
  }
}

// The warp's piece of chunks [first, first + count) of each unit, or none.
template <int C>
struct Item {
  Unit unit;
  Part part;
  int64_t number = 0, chunk = 0;
  int first = 0;  // token of the chunk
  bool live = false;

  __device__ __forceinline__ Item(const Args& a, const Wave& w, int64_t from, int64_t count) {
    constexpr int pieces = C / piece;
    const int64_t item = blockIdx.x * int64_t{warps} + threadIdx.x / 32, whole = item / pieces;
    first = static_cast<int>(item % pieces) * piece;
    number = whole / count;
    chunk = from + whole % count;
    if (number >= (w.last - w.first) * a.size.heads) return;
    unit = unit_at(a, w.first, number);
    part = part_of<C>(unit, chunk);
    live = first < part.n;
  }
  // Of [units, most, pieces, A].
  __device__ __forceinline__ uint64_t* turns(const UnitBuffers& b, int64_t most, int64_t A) const {
    return b.piece_turns + ((number * most + chunk) * (C / piece) + first / piece) * A;
  }
};

// What the turns of each piece add up to.
template <int R>
__global__ void __launch_bounds__(threads)
    sums_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                const __grid_constant__ Wave w, int64_t most) {
  constexpr int C = tokens_of<R>;
  __shared__ float steps[warps][piece];
  const Item<C> x(a, w, 0, most);
  if (!x.live) return;
  const int lane = threadIdx.x & 31;
  float* const dt = steps[threadIdx.x / 32];
  if (lane < piece && x.first + lane < x.part.n)
    dt[lane] = cuda::read(a.dt, cuda::at(a.dt, x.unit.batch, x.unit.head,
                                         x.unit.begin + x.part.first + x.first + lane));
  __syncwarp();
  for (int i = lane; i < a.size.pairs; i += 32) {
    uint64_t sum = 0;
    bool lost = false;
    each_turn(a, x.unit, x.part, x.first, i, dt, [&](int, uint64_t turn) {
      lost = lost || turn == no_turn;
      sum += turn;
    });
    x.turns(b, most, a.size.pairs)[i] = marked(sum, lost);
  }
}

// Of each pair what lies before each piece: a block a unit, a warp a share of its pieces.
__global__ void __launch_bounds__(256)
    before_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                  const __grid_constant__ Wave w, int64_t most) {
  constexpr int together = 16, shares = 256 / 32;
  __shared__ uint64_t sums[shares][32];
  const int64_t A = a.size.pairs, number = blockIdx.x;
  const int lane = threadIdx.x & 31, share = threadIdx.x / 32;
  const int64_t pieces = (unit_at(a, w.first, number).tokens + piece - 1) / piece;
  const int64_t each = (pieces + shares - 1) / shares, from = share * each;
  const int64_t end = from + each < pieces ? from + each : pieces;
#pragma unroll 1
  for (int64_t first_pair = 0; first_pair < A; first_pair += 32) {
    const int64_t i = first_pair + lane;
    uint64_t* const own = b.piece_turns + number * most * A + i;
    // put: the sum before each piece is stored.
    const auto walk = [&](uint64_t before, bool put) {
      uint64_t sum = before == no_turn ? 0 : before;
      bool lost = before == no_turn;
#pragma unroll 1
      for (int64_t first = from; first < end && i < A; first += together) {
        uint64_t turns[together];
#pragma unroll
        for (int j = 0; j < together; ++j)
          turns[j] = first + j < end ? own[(first + j) * A] : uint64_t{0};
#pragma unroll
        for (int j = 0; j < together; ++j) {
          if (first + j >= end) break;
          if (put) own[(first + j) * A] = marked(sum, lost);
          lost = lost || turns[j] == no_turn;
          sum += turns[j];
        }
      }
      return marked(sum, lost);
    };
    sums[share][lane] = walk(0, false);
    __syncthreads();
    uint64_t sum = 0;
    bool lost = false;
    for (int before = 0; before < share; ++before) {
      const uint64_t more = sums[before][lane];
      lost = lost || more == no_turn;
      sum += more;
    }
    walk(marked(sum, lost), true);
    __syncthreads();
  }
}

// Cosines, sines and steps of the tokens of some chunks of each unit.
template <int R, int blocks>
__global__ void __launch_bounds__(threads)
    tokens_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                  const __grid_constant__ Wave w, int64_t first, int64_t count, int64_t most) {
  constexpr int C = tokens_of<R>, pairs = 32 * blocks;
  static_assert(sizeof(ChunkSteps<C>) == cuda::chunk_step_bytes(C));
  __shared__ RawTokens<C> raws[warps];
  const Item<C> x(a, w, first, count);
  if (!x.live) return;
  const int lane = threadIdx.x & 31;
  RawTokens<C>& raw = raws[threadIdx.x / 32];
  // The first piece has the steps of its chunk.
  const int end = x.first == 0 ? C + 1 : x.first + piece;
  for (int t = x.first + lane; t < end; t += 32) raw.put(t, raw_token(a, x.unit, x.part, t));
  __syncwarp();
  const int64_t at = x.number * count + x.chunk - first;
  if (x.first == 0) {
    auto& to =
        *reinterpret_cast<ChunkSteps<C>*>(b.token_steps + at * int64_t{sizeof(ChunkSteps<C>)});
    read_steps(raw, x.part, to, [&](int t, float right, float lambda, float other, float dt) {
      to.right[t] = right, to.lambda[t] = lambda, to.other[t] = other;
      to.dt[t] = dt, to.adt[t] = raw.adt[t];
    });
  }
  auto* const turns = reinterpret_cast<float2*>(b.token_turns) + at * (C * pairs);
#pragma unroll 1
  for (int i = lane; i < pairs; i += 32) {
    uint64_t sum = 0;
    if (i < a.size.pairs && a.angles.data) sum = x.turns(b, most, a.size.pairs)[i];
    bool lost = sum == no_turn;
    each_turn(a, x.unit, x.part, x.first, i, raw.dt + x.first, [&](int t, uint64_t turn) {
      lost = lost || turn == no_turn;
      sum += turn;
      float2 by;
      turn_sine_cosine(sum, by.y, by.x);
      if (lost) by.x = by.y = NAN;
      turns[t * pairs + i] = by;
    });
  }
}

// The parameters of a head as backward has them in shared memory.
template <int R>
__global__ void __launch_bounds__(threads)
    parameters_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b) {
  const auto head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  float* to = b.head_parameters + head * cuda::head_parameter_count(R, columns, values);
  for (const View* bias : {&a.q_bias, &a.k_bias}) {
    read_bias<R>(*bias, head, a.size.halves, reinterpret_cast<float4*>(to), thread, threads);
    to += R * columns;
  }
  for (const View* projection : {&a.mimo_v, &a.mimo_z, &a.mimo_out}) {
    read_projection<R>(*projection, head, to, thread, threads);
    to += R * values;
  }
  if (thread < 4) to[thread] = thread == 0 ? cuda::read_or(0, a.d, cuda::at(a.d, head)) : 0.0f;
}

unsigned blocks_of(int64_t items, int64_t each) {
  return static_cast<unsigned>((items + each - 1) / each);
}

}  // namespace

void launch_turns(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t most,
                  cudaStream_t stream) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  const int64_t pieces = most * (args.size.chunk / piece);
  if (units * pieces * args.size.pairs == 0 || !args.angles.data) return;
  with_shape(args.size, [&](auto rank, auto) {
    sums_kernel<rank()>
        <<<blocks_of(units * pieces, warps), threads, 0, stream>>>(args, b, wave, most);
  });
  device::check_launch("mamba3: turns of pieces");
  before_kernel<<<static_cast<unsigned>(units), 256, 0, stream>>>(args, b, wave, pieces);
  device::check_launch("mamba3: turns before pieces");
}

void launch_parameters(const Args& args, const UnitBuffers& b, cudaStream_t stream) {
  with_shape(args.size, [&](auto rank, auto) {
    parameters_kernel<rank()>
        <<<static_cast<unsigned>(args.size.heads), threads, 0, stream>>>(args, b);
  });
  device::check_launch("mamba3: parameters of heads");
}

void launch_tokens(const Args& args, const Wave& wave, const UnitBuffers& b, int64_t first,
                   int64_t count, int64_t most, cudaStream_t stream) {
  const int64_t units = (wave.last - wave.first) * args.size.heads;
  if (units == 0) return;
  with_shape(args.size, [&](auto rank, auto blocks) {
    tokens_kernel<rank(), blocks()>
        <<<blocks_of(units * count * (args.size.chunk / piece), warps), threads, 0, stream>>>(
            args, b, wave, first, count, most);
  });
  device::check_launch("mamba3: tokens of chunks");
}

}  // namespace talea::mamba3::sm90
