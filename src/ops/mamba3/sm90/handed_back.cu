// What: states that backward is handed, and gradients of states: a block a head of a sequence, before
//       and behind its chunks.
// Why: chains begin from h and E in memory and leave E there; what turns with a whole sequence is
//      formed once.
// Never: runs where nobody hands in or asks.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/sm90/handed_shared.cuh"
#include "ops/mamba3/sm90/launch.cuh"

namespace talea::mamba3::sm90 {
namespace {

constexpr int threads = handed_threads, warps = threads / 32, size = columns * values;

// What a block has of a head of a sequence: chunks [first, end) of it, in the segment at work, or a
// stretch of a round of a pack, in the order in which they go.
struct AtWork {
  Unit u;
  int64_t number = 0;  // of the unit, of a pack of its head
  int64_t home = 0;    // of its E
  int64_t first = 0, end = 0;
  int64_t chunk = 0;                      // the first, among those that the unit has room for
  int64_t slot = 0;                       // and in the segment
  const __nv_bfloat16* behind = nullptr;  // h behind its last chunk
  bool begins = false, ends = false;
};

__device__ __forceinline__ bool find(const Args& a, const UnitBuffers& b, const Wave& w,
                                     AtWork& x) {
  const int64_t J = a.size.segment, heads = a.size.heads;
  const auto* const states = static_cast<const __nv_bfloat16*>(b.inner);
  x.number = blockIdx.x;
  if (!a.pack.rounds) {
    x.home = x.number;
    x.u = unit_at(a, Cut{}, w.first, x.number);
    const int64_t chunks = cuda::chunks_of(a.size, x.u.tokens);
    x.chunk = x.first = w.segment * J;
    x.end = chunks < x.first + J ? chunks : x.first + J;
    x.behind = states + (x.number * (J + 1) + x.end - x.first) * size;
    x.ends = x.end == chunks;
  } else {
    const RoundAt round(a, w.segment);
    const int64_t i = x.number / heads;
    if (i >= round.stretches) return false;
    x.home = 2 * heads + x.number;
    x.number -= i * heads;
    const cuda::Stretch s = a.pack.by_length[round.stretch + i];
    x.u = cuda::unit_of(a, s, static_cast<int>(x.number));
    x.chunk = s.number, x.slot = s.number - round.first;
    x.first = s.first, x.end = s.first + s.count;
    x.behind =
        states + (x.number * (J + a.pack.abreast) + x.slot + b.ordinals[s.number] + s.count) * size;
    x.ends = x.end == cuda::chunks_of(a.size, x.u.tokens);
  }
  x.begins = x.first == 0;
  return x.first < x.end;
}

// E behind the last token.
__device__ __forceinline__ void put_upstream(const Args& a, const Unit& u, float* to) {
  put_state(to, [&](int p, int n) {
    return cuda::load_or(0, a.last.ssm, cuda::at(a.last.ssm, u.row, u.head, p, n));
  });
}

// Where the chains of a wave begin.
__global__ void __launch_bounds__(threads)
    wave_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                const __grid_constant__ Wave w) {
  const int64_t number = blockIdx.x;
  const Unit u = unit_at(a, Cut{}, w.first, number);
  if (u.tokens <= 0) return;
  put_upstream(a, u, b.upstream + number * size);
  if (b.states && starts_with_state(a)) FirstState(a, Cut{}, u).put(b.states + number * size);
}

// Those of a round, and which stretch of it each chunk is of. crossing: h of its last one alone.
__global__ void __launch_bounds__(threads)
    round_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                 const __grid_constant__ Wave w, bool crossing) {
  const RoundAt round(a, w.segment);
  const int64_t heads = a.size.heads, number = blockIdx.x, i = number / heads;
  if (i >= round.stretches) return;
  const cuda::Stretch x = crossing ? a.pack.stretches[round.stretch + round.stretches - 1]
                                   : a.pack.by_length[round.stretch + i];
  const Unit u = cuda::unit_of(a, x, static_cast<int>(number - i * heads));
  if (x.first == 0 && starts_with_state(a))
    FirstState(a, Cut{}, u).put(b.first_states + number * size);
  if (crossing) return;
  if (x.first + x.count >= cuda::chunks_of(a.size, x.tokens))
    put_upstream(a, u, b.upstream + (2 * heads + number) * size);
  if (u.head > 0) return;
  const cuda::Stretch own = a.pack.stretches[round.stretch + i];
  for (int j = static_cast<int>(threadIdx.x); j < own.count; j += threads)
    b.ordinals[own.number + j] = static_cast<int32_t>(i);
}

__global__ void __launch_bounds__(threads) pass_back_kernel(const __grid_constant__ Args a) {
  const Unit u = unit_at(a, Cut{}, 0, blockIdx.x);
  if (u.tokens <= 0) pass_through(a, Cut{}, u, a.last, a.grad.initial, false);
}

// torque(x, g) of pair i, summed over P by parts of a block. x(p, n), g(p, n).
template <class X, class G>
__device__ __forceinline__ float torque_part(const cuda::PairColumns& at, int part, X x, G g) {
  float sum = 0;
  for (int p = part; p < values; p += threads / 64)
    sum += x(p, at.u) * g(p, at.w) - x(p, at.w) * g(p, at.u);
  return sum;
}

// torque(h, d_final_ssm) + torque(k, d_final_k) + d_final_angle of the last token, h and E rounded
// as the gradients of its chunk read them; and d_final_k turned back.
template <int C, int pairs>
__global__ void __launch_bounds__(threads)
    behind_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                  const __grid_constant__ Wave w) {
  __shared__ float parts[threads / 64][64], sums[64];
  AtWork x;
  if (!find(a, b, w, x) || !x.ends) return;
  const cuda::Sizes& s = a.size;
  const Unit& u = x.u;
  const StateViews& d = a.last;
  const int thread = threadIdx.x, pair = thread % 64;
  const int64_t last = u.tokens - 1, unit = u.sequence * s.heads + u.head;
  const auto* const turns =
      reinterpret_cast<const float2*>(b.token_turns) +
      ((x.number * s.segment + x.slot + x.end - 1 - x.first) * C + last % C) * pairs;
  float torque = 0;
  if (pair < s.pairs && d.ssm.data) {
    const auto h = [&](int p, int n) { return __bfloat162float(x.behind[p * columns + n]); };
    const auto e = [&](int p, int n) {
      const float own = cuda::load(d.ssm, cuda::at(d.ssm, u.row, u.head, p, n));
      return __bfloat162float(__float2bfloat16_rn(own));
    };
    torque = torque_part(cuda::pair_columns(s, pair), thread / 64, h, e);
  }
  parts[thread / 64][pair] = torque;
  __syncthreads();
  if (thread < s.pairs) {
    float sum = cuda::load_or(0, d.angle, cuda::at(d.angle, u.row, u.head, thread));
    for (int part = 0; part < threads / 64; ++part) sum += parts[part][thread];
    sums[thread] = sum;
  }
  __syncthreads();
  for (int i = thread; i < columns / 2; i += threads) {
    const cuda::PairColumns at = cuda::pair_columns(s, i);
    const bool turned = i < s.pairs;
    const float2 by = turned ? turns[i] : float2{1, 0};
    for (int r = 0; r < s.rank && d.k.data; ++r) {
      const auto biased = [&](int n) {
        return cuda::read(a.k, cuda::at(a.k, u.batch, u.begin + last, r, u.group, n)) +
               cuda::read_or(0, a.k_bias, cuda::at(a.k_bias, u.head, r, n));
      };
      const float k0 = biased(at.u), k1 = biased(at.w);
      const float g0 = cuda::load(d.k, cuda::at(d.k, u.row, r, u.head, at.u));
      const float g1 = cuda::load(d.k, cuda::at(d.k, u.row, r, u.head, at.w));
      // Both turned back: a torque is the same.
      const float back0 = g0 * by.x + g1 * by.y, back1 = g1 * by.x - g0 * by.y;
      if (turned && !mutant(Mutant::m3_final_key_without_turn)) sums[i] += k0 * back1 - k1 * back0;
      float* const to = b.last_keys + (unit * s.rank + r) * columns;
      to[at.u] = back0, to[at.w] = back1;
    }
    if (turned) b.ends[unit * s.pairs + i] = sums[i];
  }
}

// What the first token hands to the states before it.
__global__ void __launch_bounds__(threads)
    before_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                  const __grid_constant__ Wave w) {
  constexpr int most = 8 * values;
  __shared__ float seen[most];  // [R, P]: E k of the token held over
  AtWork x;
  if (!find(a, b, w, x) || !x.begins) return;
  const cuda::Sizes& s = a.size;
  const Unit& u = x.u;
  const StateViews &in = a.initial, &d = a.grad.initial;
  const int thread = threadIdx.x, lane = thread % 32;
  const float* const e = b.upstream + x.home * size;
  const auto project = [&](int r, int p) {
    return cuda::read_or(1, a.mimo_v, cuda::at(a.mimo_v, u.head, r, p));
  };
  const auto value = [&](int p) {
    return cuda::load_or(0, in.v, cuda::at(in.v, u.row, u.head, p));
  };
  const float other =
      cuda::sigmoid(-cuda::read(a.trap, cuda::at(a.trap, u.batch, u.head, u.begin)));
  const float b0 = other * cuda::read(a.dt, cuda::at(a.dt, u.batch, u.head, u.begin));
  for (int i = thread / 32; i < s.rank * values; i += warps) {
    float sum = 0;
    for (int n = lane; n < columns && in.k.data; n += 32)
      sum += e[i % values * columns + n] *
             cuda::load(in.k, cuda::at(in.k, u.row, i / values, u.head, n));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) seen[i] = sum;
  }
  __syncthreads();
  float* const projections = b.partial +
                             (x.number * w.slice_chunks + x.slot) * cuda::parameter_count(s) +
                             2 * s.rank * columns;
  for (int p = thread; p < values; p += threads) {
    float dv = 0;
    for (int r = 0; r < s.rank; ++r) {
      const float own = b0 * seen[r * values + p];
      dv += own * project(r, p);
      if (a.grad.mimo_v.data && !mutant(Mutant::m3_mimo_v_without_initial))
        projections[r * values + p] += own * value(p);
    }
    if (d.v.data) cuda::store(d.v, cuda::at(d.v, u.row, u.head, p), dv);
  }
  for (int i = thread; i < s.rank * columns && d.k.data; i += threads) {
    const int r = i / columns, n = i % columns;
    float dk = 0;
    for (int p = 0; p < values; ++p) dk += b0 * e[p * columns + n] * value(p) * project(r, p);
    cuda::store(d.k, cuda::at(d.k, u.row, r, u.head, n), dk);
  }
  for (int i = thread; i < size && d.ssm.data; i += threads)
    cuda::store(d.ssm, cuda::at(d.ssm, u.row, u.head, i / columns, i % columns), e[i]);
  // The first token waits for the last key of a chunk before it: here for the one held over.
  if (thread >= 32 || (!a.grad.dt.data && !a.grad.trap.data)) return;
  double db = 0;
  for (int i = lane; i < s.rank * values; i += 32)
    db += static_cast<double>(value(i % values) * project(i / values, i % values) * seen[i]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) db += __shfl_xor_sync(0xffffffffu, db, step);
  cuda::Edge& first = b.edges[x.number * w.segments * s.segment + x.chunk];
  if (lane == 0) first.ddt += static_cast<double>(first.other) * db, first.dgamma -= db;
}

int64_t units_of(const Args& args, const Wave& wave) {
  return (args.pack.rounds ? args.pack.abreast : wave.last - wave.first) * args.size.heads;
}

template <class Kernel, class... Rest>
void launch_each(const char* name, Kernel* kernel, int64_t units, cudaStream_t stream,
                 const Rest&... rest) {
  if (units == 0) return;
  kernel<<<static_cast<unsigned>(units), threads, 0, stream>>>(rest...);
  device::check_launch(name);
}

}  // namespace

void launch_ends(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream,
                 bool crossing) {
  if (!backward_hands(args)) return;
  if (args.pack.rounds)
    launch_each("mamba3: ends of a round", round_kernel,
                crossing ? int64_t{args.size.heads} : units_of(args, wave), stream, args, b, wave,
                crossing);
  else
    launch_each("mamba3: ends of sequences", wave_kernel, units_of(args, wave), stream, args, b,
                wave);
}

void launch_pass_back(const Args& args, cudaStream_t stream) {
  const bool some = args.size.packed || args.size.tokens == 0;
  if (!some || !any_of(args.grad.initial)) return;
  launch_each("mamba3: gradients of empty sequences", pass_back_kernel,
              args.size.sequences * args.size.heads, stream, args);
}

void launch_behind(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  if (!any_of(args.last)) return;
  if (!args.size.packed && wave.segment + 1 < wave.segments) return;
  with_shape<false>(args.size, [&](auto rank, auto blocks) {
    launch_each("mamba3: what lies behind sequences",
                behind_kernel<tokens_of<rank()>, 32 * blocks()>, units_of(args, wave), stream, args,
                b, wave);
  });
}

void launch_before(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream) {
  if (!backward_hands(args)) return;
  if (!args.pack.rounds && (wave.segment > 0 || wave.slice > 0)) return;
  launch_each("mamba3: gradients of first states", before_kernel, units_of(args, wave), stream,
              args, b, wave);
}

}  // namespace talea::mamba3::sm90
