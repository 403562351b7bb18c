// What: how a chunk is read: steps and decays by a warp, rows of q and k turned in place.
// Why: forward, the states of backward and its gradients read a chunk alike.
// Never: reads a row that belongs to no token of the chunk, or stores turned rows.
#pragma once

#include "ops/mamba3/mutants.hpp"
#include "ops/mamba3/rows/chunk.hpp"
#include "ops/mamba3/rows/cut.hpp"
#include "ops/mamba3/sm90/tile.cuh"

namespace talea::mamba3::sm90 {

using cuda::Args;
using cuda::Cut;
using cuda::Unit;
using cuda::UnitBuffers;
using cuda::View;
using cuda::Wave;

template <int R>
inline constexpr int tokens_of = rows / R;  // C

// Its number among the units of its sequence, of one that cuda::unit_of has made of its head.
__device__ __forceinline__ void put_number(const Cut& cut, int number, Unit& u) {
  if (!cut.whole) u.number = number;
}
// Unit `number` of a sequence, or of what a stretch or a chunk of a pack is a part of.
template <class From>
__device__ __forceinline__ Unit unit_of(const Args& a, const Cut& cut, const From& from,
                                        int number) {
  if (cut.whole) return cuda::unit_of(a, from, number);
  Unit u = cuda::unit_of(a, from, cut.head_of(number));
  put_number(cut, number, u);
  return u;
}
__device__ __forceinline__ int number_of(const Cut& cut, const Unit& u) {
  return cut.whole ? u.head : static_cast<int>(u.number);
}
// Units of sequences from sequence `first` on, by number.
__device__ __forceinline__ Unit unit_at(const Args& a, const Cut& cut, int64_t first,
                                        int64_t number) {
  const int64_t sequence = number / a.size.heads;
  return unit_of(a, cut, first + sequence, static_cast<int>(number - sequence * a.size.heads));
}
// Its part of N, and the first of P that its slab has.
__device__ __forceinline__ int part_of_columns(const Cut& cut, const Unit& u) {
  return cut.part_of(number_of(cut, u));
}
__device__ __forceinline__ int first_value(const Cut& cut, int number) {
  return cut.slab_of(number) * values;
}
__device__ __forceinline__ int first_value(const Cut& cut, const Unit& u) {
  return first_value(cut, number_of(cut, u));
}
// What turns pair i of the unit before the first token.
__device__ __forceinline__ uint64_t first_turn(const Args& a, const Cut& cut, const Unit& u,
                                               int i) {
  if (cut.whole) return cuda::first_turn(a, u, i);
  const int part = part_of_columns(cut, u);
  if (i >= cut.pairs_of(a.size, part)) return 0;
  i += cut.first_pair(part);
  const View& from = a.initial.angle;
  uint64_t turn =
      from.data ? cuda::turn_of_radians(cuda::load(from, cuda::at(from, u.row, u.head, i))) : 0;
  if (a.turns_before && turn != cuda::no_turn)
    turn += a.turns_before[(u.sequence * cut.heads_of(a.size) + u.head) * cut.pairs + i];
  return turn;
}
// The checkpoints of a unit.
__device__ __forceinline__ float* saved_states(const Args& a, const Cut& cut, const Unit& u) {
  if (cut.whole) return cuda::saved_states(a, u);
  Unit of = u;
  of.head = number_of(cut, u);
  return cuda::saved_states(a, of);
}

// A round of a pack: its chunks [first, end) among those of the pack, and its stretches.
struct RoundAt {
  int first = 0, end = 0, stretch = 0, stretches = 0;
  __device__ __forceinline__ RoundAt(const Args& a, int64_t round) {
    const cuda::Round now = a.pack.rounds[round], next = a.pack.rounds[round + 1];
    first = now.chunk, end = next.chunk;
    stretch = now.stretch, stretches = next.stretch - now.stretch;
  }
};
// Whether a stretch ends its sequence.
template <int C>
__device__ __forceinline__ bool is_last(const cuda::Stretch& x) {
  return x.first + x.count >= (x.tokens + C - 1) / C;
}

// A chunk of a unit: tokens [first, first + n) of it, m rows.
struct Part {
  int64_t first = 0;
  int n = 0;
  bool more = false;  // a token behind it
};
template <int C>
__device__ __forceinline__ Part part_of(const Unit& u, int64_t chunk) {
  Part p;
  p.first = chunk * C;
  const int64_t rest = u.tokens - p.first;
  p.n = static_cast<int>(rest < C ? rest : C);
  p.more = rest > C;
  return p;
}

// What is read of a token before its chunk is at work: thread t of a group has token t.
struct RawToken {
  float dt = 0, adt = 0, trap = 0;
};
__device__ __forceinline__ RawToken raw_token(const Args& a, const Unit& u, const Part& p, int t) {
  RawToken x;
  const bool more = p.more || (mutant(Mutant::m3_b_of_the_next_sequence) &&
                               u.begin + p.first + t < a.size.tokens);
  if (t > p.n || (t == p.n && !more)) return x;
  const int64_t token = u.begin + p.first + t;
  x.dt = cuda::read(a.dt, cuda::at(a.dt, u.batch, u.head, token));
  x.trap = cuda::read(a.trap, cuda::at(a.trap, u.batch, u.head, token));
  if (t < p.n) x.adt = cuda::read(a.adt, cuda::at(a.adt, u.batch, u.head, token));
  if (mutant(Mutant::m3_b_and_gamma_exchanged)) x.trap = -x.trap;
  if (mutant(Mutant::m3_20_decay_clamped) && x.adt > 0) x.adt = 0;
  return x;
}
template <int C>
struct RawTokens {
  float dt[C + 1], trap[C + 1], adt[C + 1];
  __device__ __forceinline__ void put(int t, const RawToken& x) {
    if (t <= C) dt[t] = x.dt, trap[t] = x.trap, adt[t] = x.adt;
  }
};

// Steps and decays of the tokens of a chunk, as they lie in memory.
template <int C>
struct alignas(16) ChunkSteps {
  float4 pair[C];  // L in two floats, s, gamma
  float left[C];   // e^L
  float key[C];    // e^(L_C - L) s
  float right[C];  // e^(L_C - L)
  float lambda[C], other[C], dt[C], adt[C];
  float whole;  // e^(L_C)
};

// What forward alone needs of them.
template <int C>
struct Steps {
  float4 pair[C];
  float left[C], key[C];
  float whole;
};

// One warp. more(token, e^(L_C - L), lambda, other, dt): what `to` has beside Steps.
template <int C, class To, class More>
__device__ __forceinline__ void read_steps(const RawTokens<C>& raw, const Part& p, To& to,
                                           More more) {
  constexpr int each = C > 32 ? C / 32 : 1;
  const int lane = threadIdx.x & 31;
  double own[each], sum = 0;
#pragma unroll
  for (int e = 0; e < each; ++e) {
    const int t = lane * each + e;
    const float x = t < p.n ? raw.adt[t] : 0.0f;
    own[e] = x <= -128.0f ? -128.0 : static_cast<double>(x);
    sum += own[e];
  }
  double before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  const double end = __shfl_sync(0xffffffffu, before, 31);
  before = __shfl_up_sync(0xffffffffu, before, 1);
  if (lane == 0) before = 0;
  const auto top_of = [](double x) { return static_cast<float>(x); };
  const auto rest_of = [](double x, float top) {
    return fabsf(top) <= 3.0e38f ? static_cast<float>(x - static_cast<double>(top)) : 0.0f;
  };
  const float end_top = top_of(end), end_rest = rest_of(end, end_top);
#pragma unroll
  for (int e = 0; e < each; ++e) {
    const int t = lane * each + e;
    before += own[e];
    if (t >= C) break;
    const float dt = raw.dt[t], trap = raw.trap[t];
    const float lambda = cuda::sigmoid(trap), other = cuda::sigmoid(-trap);
    const bool next = p.more || mutant(Mutant::m3_b_of_the_next_sequence);
    const bool known = t + 1 < p.n || (t + 1 == p.n && next);
    const float b = known ? cuda::sigmoid(-raw.trap[t + 1]) * raw.dt[t + 1] : 0.0f;
    const float gamma = lambda * dt, s = t < p.n ? gamma + b : 0.0f;
    const float top = top_of(before), rest = rest_of(before, top);
    const float right = expf((end_top - top) + (end_rest - rest));
    to.pair[t] = {top, rest, s, mutant(Mutant::m3_diagonal_with_s) ? s : gamma};
    to.left[t] = expf(top + rest);
    to.key[t] = t < p.n ? right * s : 0.0f;
    more(t, right, lambda, other, dt);
  }
  if (lane == 0) to.whole = expf(end_top + end_rest);
}

inline constexpr float log2_of_e = 1.4426950408889634f;

// What a query of token t gives a key of an earlier token, or of its own.
__device__ __forceinline__ float decay_of(const float4& t, const float4& earlier) {
  return hopper::exp2_fast(((t.x - earlier.x) + (t.y - earlier.y)) * log2_of_e);
}

// Of a gate: its products are rounded to 16 bits.
__device__ __forceinline__ float gate_sigmoid(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + hopper::exp2_fast(-x * log2_of_e)));
  return y;
}

// Rows (token, r) of q or k as they are, from the chunk's first one at `home` on: 16-byte copies
// into a tile, zeros behind the last token.
template <int R, int threads>
__device__ __forceinline__ void copy_rows(const View& from, const Cut& cut, int part, int64_t home,
                                          int n, char* tile, int thread) {
  constexpr int apart = threads / 16;  // rows
  const int piece = thread & 15, row0 = thread >> 4;
  const uint32_t to = hopper::smem_address(tile) + static_cast<uint32_t>(place_of(row0, piece * 8));
  // The row of a copy is a constant number of tokens behind that of the copy before.
  static_assert(apart % R == 0);
  const int t0 = row0 / R, r = row0 % R;
  const auto* const base = static_cast<const __nv_bfloat16*>(from.data);
  const int column = cut.own_column(part, piece * 8);
  if (!cut.has(column)) n = 0;
  const auto* at = base + home + t0 * from.stride[1] + column;
  if constexpr (R > 1) at += r * from.stride[2];
  const int64_t step = from.stride[1] * (apart / R);
#pragma unroll
  for (int i = 0; i < rows / apart; ++i) {
    const bool present = t0 + i * (apart / R) < n;
    hopper::copy_16_bytes(to + static_cast<uint32_t>(i * apart * 128), present ? at : base,
                          present);
    at += step;
  }
}
template <int R, int threads>
__device__ __forceinline__ void copy_rows(const View& from, const Cut& cut, const Unit& u,
                                          const Part& p, char* tile, int thread) {
  copy_rows<R, threads>(from, cut, part_of_columns(cut, u),
                        cuda::at(from, u.batch, u.begin + p.first, 0, u.group), p.n, tile, thread);
}
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// All but the last committed one are done.
__device__ __forceinline__ void copies_done_but_one() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 16 bytes; nothing is read or written where `wanted` is false.
__device__ __forceinline__ void copy_where(bool wanted, uint32_t to, const void* from) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

// Bytes as they lie, a multiple of 16. No branch, which may stand under a product: threads without
// a piece hold their copy back by a predicate.
template <int bytes, int threads>
__device__ __forceinline__ void copy_bytes(const void* from, void* to, int thread) {
  constexpr int pieces = bytes / 16;
  const uint32_t base = hopper::smem_address(to);
#pragma unroll
  for (int i = 0; i < (pieces + threads - 1) / threads; ++i) {
    const int at = thread + i * threads;
    const auto* const piece = static_cast<const char*>(from) + at * 16;
    if ((i + 1) * threads <= pieces)
      hopper::copy_16_bytes(base + static_cast<uint32_t>(at * 16), piece, true);
    else
      copy_where(at < pieces, base + static_cast<uint32_t>(at * 16), piece);
  }
}

// Two neighbouring pairs of columns, number `pp` of 32, of one row: two words of two columns.
template <bool halves>
__device__ __forceinline__ char* words_at(char* tile, int row, int pp) {
  return tile + place_of(row, halves ? 2 * pp : 4 * pp);
}
template <bool halves>
__device__ __forceinline__ uint2 take_words(const char* at) {
  if constexpr (halves)
    return {*reinterpret_cast<const uint32_t*>(at),
            *reinterpret_cast<const uint32_t*>(at + panel_bytes)};
  else
    return *reinterpret_cast<const uint2*>(at);
}
template <bool halves>
__device__ __forceinline__ void put_words(char* at, uint2 x) {
  if constexpr (halves) {
    *reinterpret_cast<uint32_t*>(at) = x.x;
    *reinterpret_cast<uint32_t*>(at + panel_bytes) = x.y;
  } else {
    *reinterpret_cast<uint2*>(at) = x;
  }
}
// Column of each of the four numbers of words_at.
template <bool halves>
__device__ __forceinline__ int word_column(int pp, int i) {
  return halves ? 2 * pp + (i & 1) + (i >> 1) * 64 : 4 * pp + i;
}

// cos and sin of two pairs.
struct TwoTurns {
  float cos0 = 1, sin0 = 0, cos1 = 1, sin1 = 0;
};
template <bool halves>
__device__ __forceinline__ float4 turned(uint2 words, const float4& bias, const TwoTurns& by) {
  const float a = low_of(words.x) + bias.x, b = high_of(words.x) + bias.y;
  const float c = low_of(words.y) + bias.z, d = high_of(words.y) + bias.w;
  if constexpr (halves)
    return {a * by.cos0 - c * by.sin0, b * by.cos1 - d * by.sin1, a * by.sin0 + c * by.cos0,
            b * by.sin1 + d * by.cos1};
  else
    return {a * by.cos0 - b * by.sin0, a * by.sin0 + b * by.cos0, c * by.cos1 - d * by.sin1,
            c * by.sin1 + d * by.cos1};
}
// Or biased alone.
template <bool halves, bool turns>
__device__ __forceinline__ float4 turned_words(uint2 words, const float4& bias,
                                               const TwoTurns& by) {
  if constexpr (turns) return turned<halves>(words, bias, by);
  return {low_of(words.x) + bias.x, high_of(words.x) + bias.y, low_of(words.y) + bias.z,
          high_of(words.y) + bias.w};
}
// Where the row r behind has the words that a row has at `at`: r is below a power of two of which
// that row is a multiple, so that r swaps its own pieces alone.
__device__ __forceinline__ int row_behind(int at, int r) { return (at ^ (r << 4)) + r * 128; }

// Words at several places, turned or biased alone: all are taken before the first is put back,
// behind which the compiler would leave the others.
template <bool halves, bool turns, int count>
__device__ __forceinline__ void turn_all(char* const (&at)[count], const bool (&live)[count],
                                         const float4 (&bias)[count], const TwoTurns (&by)[count]) {
  uint2 words[count];
#pragma unroll
  for (int i = 0; i < count; ++i) words[i] = take_words<halves>(at[i]);
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const float4 x = turned_words<halves, turns>(words[i], bias[i], by[i]);
    words[i] = {two_rounded(x.x, x.y), two_rounded(x.z, x.w)};
  }
#pragma unroll
  for (int i = 0; i < count; ++i)
    if (live[i]) put_words<halves>(at[i], words[i]);
}

// Biases in shared memory, [R, 32] of four as the words have them.
template <int R>
__device__ __forceinline__ void read_bias(const View& from, const Cut& cut, const Unit& u,
                                          bool halves, float4* to, int thread, int threads) {
  const int head = u.head, part = part_of_columns(cut, u);
  for (int i = thread; i < R * 32; i += threads) {
    const int r = i / 32, pp = i % 32;
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto column = [&] {
        return cut.own_column(part, halves ? word_column<true>(pp, j) : word_column<false>(pp, j));
      };
      x[j] = 0;
      if (cut.whole || column() >= 0)
        x[j] = cuda::read_or(0, from, cuda::at(from, head, r, column()));
    }
    to[i] = {x[0], x[1], x[2], x[3]};
  }
}
// Where column `c` of row r of a projection lies, so that neighbouring r meet no bank twice: eights
// of columns stay together.
__device__ __forceinline__ int projection_at(int r, int c) { return r * values + (c ^ r % 8 * 8); }
// Eight columns from c on, a multiple of eight.
__device__ __forceinline__ void take_projection(const float* from, int r, int c, float (&to)[8]) {
  const auto* const at = reinterpret_cast<const float4*>(from + projection_at(r, c));
  const float4 low = at[0], high = at[1];
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}
template <int R>
__device__ __forceinline__ void read_projection(const View& from, const Cut& cut, const Unit& u,
                                                float* to, int thread, int threads) {
  const int head = u.head, first = first_value(cut, u);
  for (int i = thread; i < R * values; i += threads)
    to[projection_at(i / values, i % values)] =
        cuda::read_or(1, from, cuda::at(from, head, i / values, first + i % values));
}

}  // namespace talea::mamba3::sm90
