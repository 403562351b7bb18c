// What: what a rank does beside the lane's calls on its piece of sequences of device tensors.
// Why: pieces are measured, and the chain is replayed, where the tensors lie: nothing is read back
//      but where `checked` asks for it.
// Never: exchanges, or sums floating numbers with atomics.
#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "ops/mamba3/piece_steps.hpp"
#include "ops/mamba3/rows/machine.hpp"
#include "ops/mamba3/rows/numbers.hpp"

namespace talea::mamba3 {
namespace {

constexpr int threads = 256, warps = threads / 32;
constexpr int64_t span = 512;  // tokens whose turns a block adds up

unsigned blocks_of(int64_t items) {
  return static_cast<unsigned>(std::min<int64_t>((items + threads - 1) / threads, 65536));
}

// The entries of cu_seqlens, cut to [entry before, tokens] of all ranks; what is cut is counted.
struct Entries {
  const int32_t* from = nullptr;
  int64_t apart = 1, sequences = 0, tokens = 0;
  int64_t begin = 0, own = 0;  // tokens of this piece
};

__global__ void __launch_bounds__(threads)
    entries_kernel(Entries x, int32_t* cu, int64_t* lengths, int64_t* status) {
  __shared__ int64_t most[threads];
  __shared__ unsigned long long bad, place;
  const int64_t count = x.sequences + 1, each = (count + threads - 1) / threads;
  const int64_t first = threadIdx.x * each, last = first + each < count ? first + each : count;
  if (threadIdx.x == 0) bad = 0, place = ~0ull;
  int64_t before = 0;
  for (int64_t i = first; i < last; ++i) {
    const int64_t value = x.from[i * x.apart];
    before = value > before ? value : before;
  }
  most[threadIdx.x] = before;
  __syncthreads();
  before = 0;
  for (int i = 0; i < static_cast<int>(threadIdx.x); ++i)
    before = most[i] > before ? most[i] : before;
  for (int64_t i = first; i < last; ++i) {
    const int64_t value = x.from[i * x.apart];
    before = value > before ? value : before;
    before = before < x.tokens ? before : x.tokens;
    if (before != value) {
      atomicAdd(&bad, 1ull);
      atomicMin(&place, static_cast<unsigned long long>(i));
    }
    int64_t here = before - x.begin;
    here = here < 0 ? 0 : here < x.own ? here : x.own;
    cu[i] = static_cast<int32_t>(here);
  }
  __syncthreads();
  for (int64_t i = first; i < last && i < x.sequences; ++i) lengths[i] = cu[i + 1] - cu[i];
  if (threadIdx.x != 0) return;
  status[0] = static_cast<int64_t>(bad);
  status[1] = bad > 0 ? static_cast<int64_t>(place) : -1;
  status[2] = bad > 0 ? x.from[status[1] * x.apart] : 0;
  status[3] = 0;
}

__global__ void whole_kernel(int64_t* lengths, int64_t sequences, int64_t tokens, int64_t* status) {
  for (int64_t i = threadIdx.x; i < sequences; i += blockDim.x) lengths[i] = tokens;
  if (threadIdx.x == 0) status[0] = status[2] = status[3] = 0, status[1] = -1;
}

__global__ void told_kernel(const int64_t* status, int64_t* to, int64_t apart) {
  to[threadIdx.x * apart] = status[threadIdx.x];
}

struct Steps {
  PieceView adt, dt, trap, angles;
  const int32_t* cu = nullptr;  // of packed sequences
  int64_t heads = 0, pairs = 0;
};
struct Piece {
  int64_t batch, first, tokens;
};
__device__ __forceinline__ Piece piece_of(const Steps& x, const int64_t* lengths, int64_t n) {
  return {x.cu ? 0 : n, x.cu ? x.cu[n] : 0, lengths[n]};
}

// A block a head: what is left behind its tokens, and b of the first.
__global__ void __launch_bounds__(threads)
    decays_kernel(const __grid_constant__ Steps x, const int64_t* lengths, double* decays) {
  __shared__ double sums[threads];
  const int64_t n = blockIdx.x / x.heads, h = blockIdx.x % x.heads;
  const Piece own = piece_of(x, lengths, n);
  double sum = 0;
  for (int64_t t = threadIdx.x; t < own.tokens; t += threads) {
    const double adt = element(x.adt, at(x.adt, own.batch, h, own.first + t));
    sum += adt <= reset_below ? -INFINITY : adt;
  }
  sums[threadIdx.x] = sum;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x != 0) return;
  decays[2 * int64_t{blockIdx.x}] = exp(sums[0]);
  double b = 0;
  if (own.tokens > 0)
    b = element(x.dt, at(x.dt, own.batch, h, own.first)) /
        (1 + exp(element(x.trap, at(x.trap, own.batch, h, own.first))));
  decays[2 * int64_t{blockIdx.x} + 1] = b;
}

// A lane a pair, a warp every eighth token: turns of `span` tokens of a head. Integers: in any
// order.
__global__ void __launch_bounds__(threads)
    turns_kernel(const __grid_constant__ Steps x, const int64_t* lengths, uint64_t* turns) {
  __shared__ uint64_t sums[warps][32];
  const int64_t n = blockIdx.x / x.heads, h = blockIdx.x % x.heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Piece own = piece_of(x, lengths, n);
  for (int64_t from = blockIdx.y * span; from < own.tokens; from += gridDim.y * span) {
    const int64_t end = from + span < own.tokens ? from + span : own.tokens;
    for (int64_t pair = 0; pair < x.pairs; pair += 32) {
      const int64_t i = pair + lane;
      uint64_t sum = 0;
      for (int64_t t = from + warp; t < end && i < x.pairs; t += warps) {
        const int64_t token = own.first + t;
        const auto rate =
            static_cast<float>(element(x.angles, at(x.angles, own.batch, token, h, i)));
        const auto dt = static_cast<float>(element(x.dt, at(x.dt, own.batch, h, token)));
        const uint64_t turn = cuda::to_turn(tanhf(rate) * (0.5f * dt));
        if (turn != cuda::no_turn) sum += turn;
      }
      sums[warp][lane] = sum;
      __syncthreads();
      if (warp == 0 && i < x.pairs) {
        for (int other = 1; other < warps; ++other) sum += sums[other][lane];
        atomicAdd(reinterpret_cast<unsigned long long*>(turns) + blockIdx.x * x.pairs + i,
                  static_cast<unsigned long long>(sum));
      }
      __syncthreads();
    }
  }
}

__global__ void before_kernel(const uint64_t* turns, int64_t words, int64_t count, int rank,
                              uint64_t* before) {
  for (int64_t i = blockIdx.x * int64_t{threads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * threads) {
    uint64_t sum = 0;
    for (int r = 0; r < rank; ++r) sum += turns[r * words + i];
    before[i] = mutant(ScanMutant::m3_turns_of_other_ranks) ? 0 : sum;
  }
}

// f(p, i) of every element of a state to `to`, by a block: some at a time, for a load does not go
// ahead of a store.
template <class F>
__device__ __forceinline__ void put_elements(const Pieces& x, const PieceView& to, int64_t n,
                                             int64_t h, F f) {
  constexpr int at_once = 4;
  const int64_t count = to.data ? x.values * x.columns : 0;
  for (int64_t first = threadIdx.x; first < count; first += at_once * threads) {
    double found[at_once];
#pragma unroll
    for (int j = 0; j < at_once; ++j) {
      const int64_t item = first + j * threads;
      if (item < count) found[j] = f(item / x.columns, item % x.columns);
    }
#pragma unroll
    for (int j = 0; j < at_once; ++j) {
      const int64_t item = first + j * threads;
      if (item < count) put_element(to, at(to, n, h, item / x.columns, item % x.columns), found[j]);
    }
  }
}

// A block a head.
__device__ __forceinline__ void put_states(const Pieces& x, int64_t n, int64_t h, int64_t r,
                                           const PieceStates& to) {
  const Chain chain(x, n, h);
  const int64_t last = chain.nearest_before(r);
  put_elements(x, to.ssm, n, h, [&](int64_t p, int64_t i) { return chain.before(r, p, i); });
  for (int64_t p = threadIdx.x; to.v.data && p < x.values; p += threads)
    put_element(to.v, at(to.v, n, h, p), chain.value(last, p));
  for (int64_t item = threadIdx.x; to.k.data && item < x.rows * x.columns; item += threads) {
    const int64_t q = item / x.columns, i = item % x.columns;
    put_element(to.k, at(to.k, n, q, h, i), chain.key(last, q, i));
  }
}

__global__ void __launch_bounds__(threads)
    states_kernel(const __grid_constant__ Pieces x, int rank,
                  const __grid_constant__ PieceStates initial,
                  const __grid_constant__ PieceStates last) {
  const int64_t n = blockIdx.x / x.heads, h = blockIdx.x % x.heads;
  put_states(x, n, h, rank, initial);
  put_states(x, n, h, x.world, last);
  const PieceView& from = x.initial.angle;
  for (int64_t i = threadIdx.x; last.angle.data && i < x.pairs; i += threads) {
    uint64_t sum = 0;
    if (from.data)
      sum = cuda::turn_of_radians(static_cast<float>(element(from, at(from, n, h, i))));
    const bool lost = sum == cuda::no_turn;
    for (int64_t r = 0; r < x.world; ++r) sum += x.turns[r * x.words + blockIdx.x * x.pairs + i];
    put_element(last.angle, at(last.angle, n, h, i),
                lost ? static_cast<double>(NAN) : static_cast<double>(cuda::radians(sum)));
  }
}

// Sums of a warp, the same on all its lanes.
struct OfWarp {
  template <class F>
  __device__ __forceinline__ double operator()(int64_t count, F f) const {
    double sum = 0;
    for (int64_t i = threadIdx.x % 32; i < count; i += 32) sum += f(i);
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    return sum;
  }
};

// Sums of a block of 32 columns, a lane each: a warp has every eighth term. All threads call it.
struct OfColumns {
  double (&parts)[warps][32];

  template <class F>
  __device__ __forceinline__ double operator()(int64_t count, F f) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double sum = 0;
#pragma unroll 4
    for (int64_t i = warp; i < count; i += warps) sum += f(i);
    __syncthreads();  // the sums before have been read
    parts[warp][lane] = sum;
    __syncthreads();
    sum = 0;
    for (const auto& part : parts) sum += part[lane];
    return sum;
  }
};

// Neighbouring lanes have neighbouring columns, of a state as of what is summed over its rows.
__device__ __forceinline__ void put_gradients(const Pieces& x, int64_t n, int64_t h, int64_t r,
                                              const PieceStates& to, double (&parts)[warps][32]) {
  Chain chain(x, n, h);
  const OfWarp over_columns;
  const OfColumns over_values{parts};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  put_elements(x, to.ssm, n, h, [&](int64_t p, int64_t i) { return chain.gradient(r, p, i); });
  if (to.ssm.data && to.ssm.dtype == DType::f32) {
    __syncthreads();
    chain.known = to.ssm;
  }
  for (int64_t p = warp; to.v.data && p < x.values; p += warps) {
    const double d = chain.value_gradient(r, p, over_columns);
    if (lane == 0) put_element(to.v, at(to.v, n, h, p), d);
  }
  // What lies behind the last column is summed of the last and goes nowhere.
  const auto each_column = [&](const PieceView& view, int64_t count, auto sum_of, auto place_of) {
    for (int64_t first = 0; view.data && first < count; first += 32) {
      const int64_t i = first + lane;
      const double d = sum_of(i < count ? i : count - 1);
      if (warp == 0 && i < count) put_element(view, place_of(i), d);
    }
  };
  for (int64_t q = 0; q < x.rows; ++q)
    each_column(
        to.k, x.columns, [&](int64_t i) { return chain.key_gradient(r, q, i, over_values); },
        [&](int64_t i) { return at(to.k, n, q, h, i); });
  each_column(
      to.angle, x.pairs, [&](int64_t i) { return chain.angle_gradient(r, i, over_values); },
      [&](int64_t i) { return at(to.angle, n, h, i); });
}

__global__ void __launch_bounds__(threads)
    gradients_kernel(const __grid_constant__ Pieces x, int rank,
                     const __grid_constant__ PieceStates last,
                     const __grid_constant__ PieceStates initial) {
  __shared__ double parts[warps][32];
  const int64_t n = blockIdx.x / x.heads, h = blockIdx.x % x.heads;
  put_gradients(x, n, h, rank, last, parts);
  put_gradients(x, n, h, -1, initial, parts);
}

}  // namespace

void measure_on_device(const PieceCall& c, const PieceMemory& m, int64_t tokens, bool known) {
  const Problem& p = c.problem;
  const device::DeviceGuard guard(p.device_index);
  const cudaStream_t stream = device::cuda_stream(c.stream);
  device::refuse_earlier_error(stream);
  const Measures own(p, m.measures);
  const auto heads = static_cast<unsigned>(p.sequences * p.heads);
  const bool checked = p.packed && p.options.sequence_check == SequenceCheck::checked;
  if (checked) cuda::refuse_capture(stream);
  if (p.packed) {
    const Entries x = {static_cast<const int32_t*>(c.in.cu_seqlens.data),
                       c.in.cu_seqlens.stride[0],
                       p.sequences,
                       tokens,
                       p.token_begin,
                       p.tokens};
    entries_kernel<<<1, threads, 0, stream>>>(x, m.cu, own.lengths, m.status);
  } else {
    whole_kernel<<<1, threads, 0, stream>>>(own.lengths, p.sequences, p.tokens, m.status);
  }
  device::check_launch("mamba3: sequences of a piece");
  if (c.out.status) {
    told_kernel<<<1, 4, 0, stream>>>(m.status, static_cast<int64_t*>(c.out.status.data),
                                     c.out.status.stride[0]);
    device::check_launch("mamba3: status of a piece");
  }
  if (checked) cuda::check_counts(m.status, stream);
  if (heads == 0 || known) return;
  const Steps x = {view_of(c.in.adt),
                   view_of(c.in.dt),
                   view_of(c.in.trap),
                   view_of(c.in.angles),
                   p.packed ? m.cu : nullptr,
                   p.heads,
                   p.pairs};
  decays_kernel<<<heads, threads, 0, stream>>>(x, own.lengths, own.decays);
  device::check_launch("mamba3: decays of a piece");
  if (p.pairs == 0) return;
  const int64_t bytes = p.sequences * p.heads * p.pairs * 8;
  device::check(cudaMemsetAsync(own.turns, 0, static_cast<size_t>(bytes), stream),
                "mamba3: turns of a piece");
  const auto spans = static_cast<unsigned>(std::min<int64_t>((p.tokens + span - 1) / span, 65535));
  if (!c.in.angles || spans == 0) return;
  turns_kernel<<<dim3(heads, spans), threads, 0, stream>>>(x, own.lengths, own.turns);
  device::check_launch("mamba3: turns of a piece");
}

void turns_before_on_device(const PieceCall& c, const PieceMemory& m) {
  const Problem& p = c.problem;
  const int64_t count = p.sequences * p.heads * p.pairs;
  if (count == 0) return;
  const device::DeviceGuard guard(p.device_index);
  before_kernel<<<blocks_of(count), threads, 0, device::cuda_stream(c.stream)>>>(
      Measures(p, m.told.measures).turns, Measures::words(p), count, p.sequence_rank, m.before);
  device::check_launch("mamba3: turns before a piece");
}

void states_on_device(const PieceCall& c, const Pieces& x, const PieceStates& initial,
                      const PieceStates& last) {
  const int64_t heads = x.sequences * x.heads;
  if (heads == 0) return;
  const device::DeviceGuard guard(c.problem.device_index);
  states_kernel<<<static_cast<unsigned>(heads), threads, 0, device::cuda_stream(c.stream)>>>(
      x, c.problem.sequence_rank, initial, last);
  device::check_launch("mamba3: states before a piece");
}

void gradients_on_device(const PieceCall& c, const Pieces& x, const PieceStates& last,
                         const PieceStates& initial) {
  const int64_t heads = x.sequences * x.heads;
  if (heads == 0) return;
  const device::DeviceGuard guard(c.problem.device_index);
  gradients_kernel<<<static_cast<unsigned>(heads), threads, 0, device::cuda_stream(c.stream)>>>(
      x, c.problem.sequence_rank, last, initial);
  device::check_launch("mamba3: gradients behind a piece");
}

}  // namespace talea::mamba3
