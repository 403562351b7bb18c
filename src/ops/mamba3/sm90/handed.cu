// What: states that forward is handed and hands on: a block a head of a sequence, before and behind
//       its chunks.
// Why: the chunks start from h in memory and leave it there, whoever it came from.
// Never: runs where nobody hands in or asks.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/sm90/handed_shared.cuh"
#include "ops/mamba3/sm90/launch.cuh"
#include "ops/mamba3/sm90/turns.cuh"

namespace talea::mamba3::sm90 {
namespace {

constexpr int threads = handed_threads;

__device__ __forceinline__ float* home_of(const UnitBuffers& b, int64_t number) {
  return b.upstream + number * (columns * values);
}

// The unit of a block, and where its state lies: of a pack a stretch of the round, in the order in
// which they go, behind the two places of what crosses. Nothing where it does not begin its
// sequence, or, for what is handed on, end it.
__device__ __forceinline__ bool find_unit(const Args& a, const Cut& cut, const Wave& w, bool behind,
                                          Unit& u, int64_t& number) {
  number = blockIdx.x;
  if (!a.pack.rounds) {
    u = unit_at(a, cut, w.first, number);
    return true;
  }
  const RoundAt round(a, w.segment);
  const int64_t i = number / a.size.heads;
  if (i >= round.stretches) return false;
  const cuda::Stretch x = a.pack.by_length[round.stretch + i];
  u = unit_of(a, cut, x, static_cast<int>(number % a.size.heads));
  number += int64_t{2} * a.size.heads;
  return behind ? x.first + x.count >= cuda::chunks_of(a.size, x.tokens) : x.first == 0;
}

// Chunks before those of the unit in what launch_turns has written.
__device__ __forceinline__ int64_t chunks_before(const Args& a, const Cut& cut, const Unit& u,
                                                 int64_t number, int64_t most) {
  return a.pack.rounds ? (number_of(cut, u) >> cut.slab_bits) * most + a.pack.before[u.sequence]
                       : (number >> cut.slab_bits) * most;
}

// h before the first token, with the token held over.
template <class... Units>
__global__ void __launch_bounds__(threads)
    start_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                 const __grid_constant__ Wave wave, const __grid_constant__ Units... units) {
  const Cut cut = cuda::cut_of(units...);
  Unit u;
  int64_t number = 0;
  if (!find_unit(a, cut, wave, false, u, number) || u.tokens <= 0) return;
  FirstState(a, cut, u).put(home_of(b, number));
}

template <class... Units>
__global__ void __launch_bounds__(threads)
    pass_through_kernel(const __grid_constant__ Args a, const __grid_constant__ Units... units) {
  const Cut cut = cuda::cut_of(units...);
  const Unit u = unit_at(a, cut, 0, blockIdx.x);
  if (u.tokens <= 0) pass_through(a, cut, u, a.initial, a.last, true);
}

// The states behind the last token; `most` as in launch_turns, where the chunks have not left their
// turns.
template <int C, class... Units>
__global__ void __launch_bounds__(threads)
    end_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
               const __grid_constant__ Wave wave, int64_t most,
               const __grid_constant__ Units... units) {
  const Cut cut = cuda::cut_of(units...);
  constexpr int piece = static_cast<int>(cuda::turn_tokens(C));
  __shared__ float cosine[64], sine[64];
  Unit u;
  int64_t number = 0;
  if (!find_unit(a, cut, wave, true, u, number)) return;
  if (u.tokens <= 0) return pass_through(a, cut, u, a.initial, a.last, true);
  const StateViews& to = a.last;
  const cuda::Sizes& s = a.size;
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t last = u.tokens - 1;
  const int part = part_of_columns(cut, u), pairs = cut.pairs_of(s, part);
  const int first_pair = cut.first_pair(part);
  const bool of_slab = cut.slab_of(number_of(cut, u)) == 0;  // what slabs share
  if (thread < pairs) {
    uint64_t sum = 0;
    int64_t first = last / piece * piece;
    if (b.turns)
      sum = b.turns[number * s.pairs + thread], first = u.tokens;
    else if (turns_asked(a))
      sum = b.piece_turns[(chunks_before(a, cut, u, number, most) * (C / piece) + first / piece) *
                              s.pairs +
                          thread];
    bool lost = sum == cuda::no_turn;
    for (int64_t t = first; t <= last && a.angles.data; ++t) {
      const float rate = tanhf(cuda::read(
          a.angles, cuda::at(a.angles, u.batch, u.begin + t, u.head, first_pair + thread)));
      const uint64_t turn = cuda::to_turn(
          rate * (0.5f * cuda::read(a.dt, cuda::at(a.dt, u.batch, u.head, u.begin + t))));
      lost = lost || turn == cuda::no_turn;
      sum += turn;
    }
    turn_sine_cosine(sum, sine[thread], cosine[thread]);
    if (lost) sine[thread] = cosine[thread] = NAN;
    if (to.angle.data && of_slab)
      cuda::store(to.angle, cuda::at(to.angle, u.row, u.head, first_pair + thread),
                  lost ? NAN : cuda::radians(sum));
  }
  __syncthreads();
  for (int item = thread; item < s.rank * (columns / 2) && to.k.data && of_slab; item += threads) {
    const int r = item / (columns / 2), i = item % (columns / 2);
    const cuda::PairColumns of_unit = cuda::pair_columns(s, i);
    const cuda::PairColumns c = {cut.own_column(part, of_unit.u), cut.own_column(part, of_unit.w)};
    if (!cut.has(c.u)) continue;
    const auto biased = [&](int n) {
      return cuda::read(a.k, cuda::at(a.k, u.batch, u.begin + last, r, u.group, n)) +
             cuda::read_or(0, a.k_bias, cuda::at(a.k_bias, u.head, r, n));
    };
    float x = biased(c.u), w = biased(c.w);
    if (i < pairs) {
      const float before = x;
      x = before * cosine[i] - w * sine[i];
      w = before * sine[i] + w * cosine[i];
    }
    cuda::store(to.k, cuda::at(to.k, u.row, r, u.head, c.u), x);
    cuda::store(to.k, cuda::at(to.k, u.row, r, u.head, c.w), w);
  }
  const int first = first_value(cut, u);
  for (int p = thread; p < values && to.v.data && part == 0; p += threads)
    cuda::store(to.v, cuda::at(to.v, u.row, u.head, first + p),
                cuda::read(a.v, cuda::at(a.v, u.batch, u.begin + last, u.head, first + p)));
  if (!to.ssm.data) return;
  const float* const from = home_of(b, number);
  float* const ssm = static_cast<float*>(to.ssm.data) + cuda::at(to.ssm, u.row, u.head, first);
  for (int i = thread; i < columns * values; i += threads) {
    const int n = cut.own_column(part, i % columns);
    if (cut.has(n)) ssm[i / columns * to.ssm.stride[2] + n * to.ssm.stride[3]] = from[i];
  }
}

int64_t units_of(const Args& args, const Wave& wave) {
  return (args.pack.rounds ? args.pack.abreast : wave.last - wave.first) * args.size.heads;
}

}  // namespace

void launch_pass_through(const Args& args, const Cut& cut, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(args.size.sequences * args.size.heads);
  if (units == 0 || !any_of(args.last)) return;
  if (cut.whole)
    pass_through_kernel<<<units, threads, 0, stream>>>(args);
  else
    pass_through_kernel<<<units, threads, 0, stream>>>(args, cut);
  device::check_launch("mamba3: states of empty sequences");
}

void launch_start(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                  cudaStream_t stream) {
  const auto units = static_cast<unsigned>(units_of(args, wave));
  if (units == 0 || !starts_with_state(args)) return;
  if (cut.whole)
    start_kernel<<<units, threads, 0, stream>>>(args, b, wave);
  else
    start_kernel<<<units, threads, 0, stream>>>(args, b, wave, cut);
  device::check_launch("mamba3: states handed in");
}

void launch_end(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                int64_t most, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(units_of(args, wave));
  if (units == 0 || !any_of(args.last)) return;
  with_shape<true>(args.size, [&](auto rank, auto) {
    if (!cut.whole)
      end_kernel<tokens_of<rank()>, Cut><<<units, threads, 0, stream>>>(args, b, wave, most, cut);
    else
      end_kernel<tokens_of<rank()>><<<units, threads, 0, stream>>>(args, b, wave, most);
  });
  device::check_launch("mamba3: states handed on");
}

}  // namespace talea::mamba3::sm90
