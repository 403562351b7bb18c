// What: turns and steps of the tokens, ahead of the chunks that read them: a warp a piece of a chunk
//       of some heads.
// Why: turns add exactly in any order, so no chunk waits for another; what three kernels read of a
//      token is formed once a segment.
// Never: rounds a turn before it is summed.
#pragma once

#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/launch.cuh"
#include "ops/mamba3/sm90/turns.cuh"

namespace talea::mamba3::sm90::tokens {

constexpr int threads = 128, warps = threads / 32;
using cuda::no_turn;

template <int C>
constexpr int piece_of = static_cast<int>(cuda::turn_tokens(C));
// Heads, or parts of them, of a warp: where they share their angles, each is read once.
constexpr int summed_together = 4, formed_together = 2;

// The warp's piece of chunks [first, first + count) of some heads of a sequence, or none. Of a
// pack: of the chunks of round `first`, or of all (whole_pack); or of the round's part of the
// sequence that goes on behind it (crossing).
constexpr int64_t whole_pack = -1;
template <int C, int together>
struct Item {
  Unit unit;  // of the first head
  Part part;
  int64_t number = 0, chunk = 0;  // of the unit, among the chunks that it has room for
  int64_t slot = 0;               // among those asked for
  int first = 0;                  // token of the chunk
  int heads = 0;
  bool live = false;
  const Cut& cut;

  static constexpr int piece = piece_of<C>;

  __device__ __forceinline__ Item(const Args& a, const Cut& of, const Wave& w, int64_t from,
                                  int64_t count, bool crossing = false)
      : cut(of) {
    constexpr int pieces = C / piece;
    // Each item has some memory of its own: there are not 2^32.
    const uint32_t item = blockIdx.x * static_cast<uint32_t>(warps) + threadIdx.x / 32;
    const uint32_t whole = item / pieces, some = static_cast<uint32_t>(count);
    first = static_cast<int>(item % pieces) * piece;
    const auto groups = static_cast<uint32_t>((cut.turning_of(a.size) + together - 1) / together);
    const uint32_t group = whole / some, sequence = group / groups;
    slot = whole % some;
    if (sequence >= w.last - w.first) return;
    const int head = static_cast<int>(group - sequence * groups) * together;
    heads = cut.turning_of(a.size) - head < together ? cut.turning_of(a.size) - head : together;
    number = int64_t{sequence} * cut.turning_of(a.size) + head;
    if (a.pack.rounds) {
      const bool all = from == whole_pack;
      chunk = slot + (all ? 0 : a.pack.rounds[from].chunk);
      const int64_t end = all ? a.pack.before[a.size.sequences] : a.pack.rounds[from + 1].chunk;
      if (chunk >= end) return;
      const cuda::PackedChunk x = a.pack.chunks[chunk];
      if (crossing && chunk - x.chunk + (x.tokens + C - 1) / C <= end) return;
      unit = cuda::unit_of(a, x, head >> cut.part_bits);
      part = part_of<C>(unit, x.chunk);
    } else {
      chunk = (from == whole_pack ? 0 : from) + slot;
      unit = cuda::unit_of(a, w.first + sequence, head >> cut.part_bits);
      part = part_of<C>(unit, chunk);
    }
    put_number(cut, head << cut.slab_bits, unit);
    live = first < part.n;
  }
  // Of [units, most, pieces, A], of all chunks or of a segment's.
  __device__ __forceinline__ uint64_t* turns(const UnitBuffers& b, int h, int64_t most,
                                             int64_t A) const {
    const int64_t at = b.segment_turns ? slot : chunk;
    return b.piece_turns + (((number + h) * most + at) * (C / piece) + first / piece) * A;
  }
  __device__ __forceinline__ Unit of_head(int h) const {
    Unit u = unit;
    if (cut.whole)
      u.head += h;
    else
      u.number += h << cut.slab_bits, u.head = cut.head_of(static_cast<int>(u.number));
    return u;
  }
};

// Half of what tokens of the piece step by, of each head: times their rates it is what they turn.
template <int C, int together>
struct HalfSteps {
  static constexpr int piece = piece_of<C>, count = together * piece;
  static constexpr int each = (count + 31) / 32;  // of a lane
  float of_lane[each];
  __device__ __forceinline__ HalfSteps(const Args& a, const Item<C, together>& x) {
#pragma unroll
    for (int e = 0; e < each; ++e) {
      const int i = (threadIdx.x & 31) + 32 * e, h = i / piece, t = x.first + i % piece;
      of_lane[e] = 0;
      if (h < x.heads && t < x.part.n)
        of_lane[e] = cuda::read(
            a.dt, cuda::at(a.dt, x.unit.batch, x.of_head(h).head, x.unit.begin + x.part.first + t));
    }
  }
  __device__ __forceinline__ void put(float (&half_dt)[together][piece]) const {
#pragma unroll
    for (int e = 0; e < each; ++e) {
      const int i = (threadIdx.x & 31) + 32 * e;
      if (count % 32 == 0 || i < count) half_dt[0][i] = 0.5f * of_lane[e];
    }
    __syncwarp();
  }
};

// Angles of the tokens of the piece, as they lie in memory.
template <int C>
struct RawRates {
  static constexpr int piece = piece_of<C>;
  uint32_t bits[piece];
  template <int together>
  __device__ __forceinline__ void load(const Args& a, const Item<C, together>& x, int i, int h) {
    const Unit u = x.of_head(h);
    const int part = part_of_columns(x.cut, u);
    const int left = a.angles.data && i < x.cut.pairs_of(a.size, part) ? x.part.n - x.first : 0;
    const int64_t home = cuda::at(a.angles, u.batch, u.begin + x.part.first + x.first, u.head) +
                         (i + x.cut.first_pair(part)) * a.angles.stride[3];
    const auto from = [&](const auto* at) {
#pragma unroll
      for (int j = 0; j < piece; ++j, at += a.angles.stride[1]) bits[j] = j < left ? __ldg(at) : 0;
    };
    if (a.angles.dtype == DType::f32)
      from(static_cast<const uint32_t*>(a.angles.data) + home);
    else
      from(static_cast<const uint16_t*>(a.angles.data) + home);
  }
};

// f(head, turns of the tokens of the piece, in order, not yet integers) of pair i; raw: of the
// first head.
template <int C, int together, class F>
__device__ __forceinline__ void each_turn(const Args& a, const Item<C, together>& x, int i,
                                          RawRates<C>& raw,
                                          const float (&half_dt)[together][piece_of<C>], F f) {
  constexpr int piece = piece_of<C>;
  const bool shared = a.angles.stride[2] == 0 && x.cut.part_bits == 0;
  float rates[piece];
#pragma unroll 1
  for (int h = 0; h < x.heads; ++h) {
    if (h == 0 || !shared) {
      if (h > 0) raw.load(a, x, i, h);
#pragma unroll
      for (int j = 0; j < piece; ++j)
        rates[j] = tanhf(cuda::number_of(a.angles.dtype, raw.bits[j]));
    }
    float each[piece];
#pragma unroll
    for (int j = 0; j < piece; ++j) each[j] = rates[j] * half_dt[h][j];
    f(h, each);
  }
}

// Not 0 where one of them is no number.
template <int piece>
__device__ __forceinline__ float missing_of(const float (&turns)[piece]) {
  float missing = 0;
#pragma unroll
  for (int j = 0; j < piece; ++j) missing = fmaf(turns[j], 0.0f, missing);
  return missing;
}

// What the turns of each piece add up to.
template <int R, class... Units>
__global__ void __launch_bounds__(threads)
    sums_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                const __grid_constant__ Wave w, int64_t first, int64_t most,
                const __grid_constant__ Units... units) {
  hopper::begin_after_earlier_kernels();
  const Cut cut = cuda::cut_of(units...);
  constexpr int C = tokens_of<R>, together = summed_together, piece = piece_of<C>;
  __shared__ float steps[warps][together][piece];
  const Item<C, together> x(a, cut, w, first, most);
  if (!x.live) return;
  const int lane = threadIdx.x & 31;
  const HalfSteps<C, together> own(a, x);
  RawRates<C> raw;
  raw.load(a, x, lane, 0);
  auto& half_dt = steps[threadIdx.x / 32];
  own.put(half_dt);
  for (int i = lane; i < a.size.pairs; i += 32) {
    if (i > lane) raw.load(a, x, i, 0);
    each_turn(a, x, i, raw, half_dt, [&](int h, const float(&turns)[piece]) {
      uint64_t sum = 0;
#pragma unroll
      for (int j = 0; j < piece; ++j) sum += cuda::to_turn(turns[j]);
      x.turns(b, h, most, a.size.pairs)[i] = marked(sum, missing_of(turns) != 0);
    });
  }
}

// Turns of pieces of a head or a part of it, before which the sums go.
struct Pieces {
  uint64_t* first = nullptr;           // [pieces, A]
  uint64_t* before_segment = nullptr;  // of the one at work, behind which lies that of the next
  int64_t count = 0;
  Unit unit;
  const Cut& cut;
  __device__ __forceinline__ Pieces(const Args& a, const Cut& of, const UnitBuffers& b,
                                    const Wave& w, int64_t number, int64_t most)
      : unit(unit_at(a, of, w.first, number << of.slab_bits)), cut(of) {
    const int64_t A = a.size.pairs;
    const auto piece = mutant(ScanMutant::m3_pieces_of_sixteen)
                           ? 16
                           : static_cast<int>(cuda::turn_tokens(a.size.chunk));
    // A pack has room for its chunks once a head.
    int64_t home = number * most;
    if (a.pack.rounds)
      home = (number_of(cut, unit) >> cut.slab_bits) * most +
             int64_t{a.pack.before[unit.sequence]} * (a.size.chunk / piece);
    first = b.piece_turns + home * A;
    count = (unit.tokens + piece - 1) / piece;
    if (!b.segment_turns) return;
    before_segment = b.segment_turns + (number * w.segments + w.segment) * A;
    count -= w.segment * most;
    count = count < 0 ? 0 : count < most ? count : most;
  }
  // Of pair i what lies before them all.
  __device__ __forceinline__ uint64_t before(const Args& a, const Wave& w, int64_t i) const {
    if (before_segment && w.segment > 0) return before_segment[i];
    return first_turn(a, cut, unit, static_cast<int>(i));
  }
  // What pieces [from, end) of pair i add to `before`; put: the sum before each is stored.
  __device__ __forceinline__ uint64_t walk(int64_t i, int64_t A, int64_t from, int64_t end,
                                           uint64_t before, bool put) const {
    constexpr int at_once = 16;
    uint64_t sum = before == no_turn ? 0 : before;
    bool lost = before == no_turn;
#pragma unroll 1
    for (int64_t start = from; start < end; start += at_once) {
      uint64_t turns[at_once];
#pragma unroll
      for (int j = 0; j < at_once; ++j)
        turns[j] = start + j < end ? first[(start + j) * A + i] : uint64_t{0};
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        if (start + j >= end) break;
        if (put) first[(start + j) * A + i] = marked(sum, lost);
        lost = lost || turns[j] == no_turn;
        sum += turns[j];
      }
    }
    return marked(sum, lost);
  }
};
__device__ __forceinline__ uint64_t sum_of_turns(uint64_t x, uint64_t y) {
  const bool lost = x == no_turn || y == no_turn;
  return marked(lost ? uint64_t{0} : x + y, lost);
}

// Of each pair what lies before each piece, and of a segment before the next one: a block
// `together` units, those of a few pieces a warp each, of the others a warp a share of the pieces.
template <class... Units>
__global__ void __launch_bounds__(256)
    before_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                  const __grid_constant__ Wave w, int64_t most, int64_t count, int together,
                  const __grid_constant__ Units... units) {
  hopper::begin_after_earlier_kernels();
  const Cut cut = cuda::cut_of(units...);
  constexpr int shares = 256 / 32, few = 32;
  __shared__ uint64_t sums[shares][32];
  const int64_t A = a.size.pairs, first_unit = int64_t{blockIdx.x} * together;
  const int lane = threadIdx.x & 31, share = threadIdx.x / 32;
  if (share < together && first_unit + share < count && together > 1) {
    const Pieces x(a, cut, b, w, first_unit + share, most);
    for (int64_t i = lane; i < A && x.count <= few; i += 32) {
      const uint64_t all = x.walk(i, A, 0, x.count, x.before(a, w, i), true);
      if (x.before_segment && w.segment + 1 < w.segments) x.before_segment[A + i] = all;
    }
  }
#pragma unroll 1
  for (int unit = 0; unit < together && first_unit + unit < count; ++unit) {
    const Pieces x(a, cut, b, w, first_unit + unit, most);
    if (together > 1 && x.count <= few) continue;
    const int64_t each = (x.count + shares - 1) / shares, from = share * each;
    const int64_t end = from + each < x.count ? from + each : x.count;
#pragma unroll 1
    for (int64_t first_pair = 0; first_pair < A; first_pair += 32) {
      const int64_t i = first_pair + lane;
      sums[share][lane] = i < A ? x.walk(i, A, from, end, 0, false) : 0;
      __syncthreads();
      if (i < A) {
        uint64_t sum = x.before(a, w, i);
        for (int before = 0; before < share; ++before) sum = sum_of_turns(sum, sums[before][lane]);
        if (x.before_segment && share == shares - 1 && w.segment + 1 < w.segments)
          x.before_segment[A + i] = sum_of_turns(sum, sums[share][lane]);
        x.walk(i, A, from, end, sum, true);
      }
      __syncthreads();
    }
  }
}

// Cosines, sines and steps of the tokens of some chunks of each unit.
template <int R, int blocks, class... Units>
__global__ void __launch_bounds__(threads, R > 1 ? 5 : 4)
    tokens_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                  const __grid_constant__ Wave w, const __grid_constant__ TokenRun run,
                  const __grid_constant__ Units... units) {
  const BesideEarlierKernel beside(run.beside, run.crowds);
  const Cut cut = cuda::cut_of(units...);
  const int64_t count = run.count, most = run.most;
  constexpr int C = tokens_of<R>, pairs = 32 * blocks, together = formed_together;
  constexpr int piece = piece_of<C>;
  static_assert(sizeof(ChunkSteps<C>) == cuda::chunk_step_bytes(C));
  __shared__ RawTokens<C> raws[warps];
  __shared__ float all_steps[warps][together][piece];
  const Item<C, together> x(a, cut, w, run.first, count, run.crossing);
  if (!x.live) return;
  const int lane = threadIdx.x & 31, alive = (x.part.n + piece - 1) / piece;
  RawTokens<C>& raw = raws[threadIdx.x / 32];
  auto& half_dt = all_steps[threadIdx.x / 32];
  // What memory has is under way together: its latency is what a warp is long for.
  const HalfSteps<C, together> own(a, x);
  RawRates<C> rates;
  rates.load(a, x, lane, 0);
  const auto turns_before = [&](int i, uint64_t(&to)[together]) {
#pragma unroll
    for (int h = 0; h < together; ++h) {
      to[h] = 0;
      if (h < x.heads && i < a.size.pairs && turns_asked(a))
        to[h] = x.turns(b, h, most, a.size.pairs)[i];
    }
  };
  uint64_t before[together];
  turns_before(lane, before);
  // The pieces that have tokens share the heads, whose steps are of the whole chunk.
#pragma unroll 1
  for (int h = x.first / piece; h < x.heads; h += alive) {
    const Unit u = x.of_head(h);
    constexpr int each = C / 32 + 1;
    RawToken tokens[each];
#pragma unroll
    for (int e = 0; e < each; ++e) tokens[e] = raw_token(a, u, x.part, lane + 32 * e);
#pragma unroll
    for (int e = 0; e < each; ++e) raw.put(lane + 32 * e, tokens[e]);
    __syncwarp();
    const int64_t at = (x.number + h) * count + x.slot;
    auto& to =
        *reinterpret_cast<ChunkSteps<C>*>(b.token_steps + at * int64_t{sizeof(ChunkSteps<C>)});
    read_steps(raw, x.part, to, [&](int t, float right, float lambda, float other, float own_dt) {
      to.right[t] = right, to.lambda[t] = lambda, to.other[t] = other;
      to.dt[t] = own_dt, to.adt[t] = raw.adt[t];
    });
    __syncwarp();
  }
  own.put(half_dt);
  const int left = x.part.n - x.first;
#pragma unroll 1
  for (int i = lane; i < pairs; i += 32) {
    if (i > lane) rates.load(a, x, i, 0), turns_before(i, before);
    each_turn(a, x, i, rates, half_dt, [&](int h, const float(&turns)[piece]) {
      const int64_t at = (x.number + h) * count + x.slot;
      auto* const to = reinterpret_cast<float2*>(b.token_turns) + (at * C + x.first) * pairs + i;
      uint64_t sum = before[0];
#pragma unroll
      for (int other = 1; other < together; ++other)
        if (h == other) sum = before[other];
      const auto put = [&](auto whole) {
        bool lost = sum == no_turn;
#pragma unroll
        for (int j = 0; j < piece; ++j) {
          const uint64_t turn = cuda::to_turn(turns[j]);
          if constexpr (!whole()) lost = lost || turn == no_turn;
          sum += turn;
          float2 by;
          turn_sine_cosine_fast(sum, by.y, by.x);
          if (whole() || j < left) to[j * pairs] = !whole() && lost ? float2{NAN, NAN} : by;
        }
      };
      if (left >= piece && missing_of(turns) == 0 && sum != no_turn)
        put(std::true_type{});
      else
        put(std::false_type{});
    });
  }
}

// The parameters of a unit as backward has them in shared memory.
template <int R, class... Units>
__global__ void __launch_bounds__(threads)
    parameters_kernel(const __grid_constant__ Args a, const __grid_constant__ UnitBuffers b,
                      const __grid_constant__ Units... units) {
  hopper::begin_after_earlier_kernels();
  const Cut cut = cuda::cut_of(units...);
  const auto number = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  Unit u;
  u.number = number, u.head = cut.head_of(number);
  float* to = b.head_parameters + number * cuda::head_parameter_count(R, columns, values);
  for (const View* bias : {&a.q_bias, &a.k_bias}) {
    read_bias<R>(*bias, cut, u, a.size.halves, reinterpret_cast<float4*>(to), thread, threads);
    to += R * columns;
  }
  for (const View* projection : {&a.mimo_v, &a.mimo_z, &a.mimo_out}) {
    read_projection<R>(*projection, cut, u, to, thread, threads);
    to += R * values;
  }
  if (thread < 4) to[thread] = thread == 0 ? cuda::read_or(0, a.d, cuda::at(a.d, u.head)) : 0.0f;
}

}  // namespace talea::mamba3::sm90::tokens
