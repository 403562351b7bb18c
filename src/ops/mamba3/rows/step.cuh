// What: the text of a step: one token an entry, on states in place; a block has a head.
// Why: it reads a state once and writes it once; a chunk's products would be mostly empty rows.
//      The same text runs on a host in a test, with threads that take turns.
// Never: rounds an operand: rows, state and sums are fp32.
#pragma once

#include <type_traits>

#include "ops/mamba3/rows/chunk.hpp"
#include "ops/mamba3/rows/vectors.cuh"

namespace talea::mamba3::cuda::one_step {

constexpr int threads = 128, warps = threads / 32;
constexpr int line = 32 * vector;  // columns of a warp
constexpr int wide = 256;          // values of a head, at most

// A head of some entries, one after another. ranks: R, up to a power of two; loads: lines of a row
// of N; whole: all rows lie in vectors.
template <int ranks, int loads, bool whole>
class Step {
 public:
  static constexpr int width = loads * line;
  // Blocks that registers let a multiprocessor have: while one waits for a state, others work.
  static constexpr int blocks = ranks * loads <= 4 ? 4 : 2;
  static constexpr int rows = (ranks == 8 ? 2 : 4) / loads;  // neighbours, of a warp at work
  static constexpr int items = (ranks + warps - 1) / warps;  // ranks that a warp stages
  enum Kind { queries, keys, held_keys, query_biases, key_biases, kinds };  // rows of N

  // Places in the floats of a block: rows of N of each kind; values, those weighed, those held
  // over, y and what the head has of its own, each of every rank; gate, weight, cosines, sines.
  static constexpr int values_at = kinds * ranks * width, weighed_at = values_at + ranks * wide,
                       held_at = weighed_at + ranks * wide, y_at = held_at + ranks * wide,
                       v_at = y_at + ranks * wide, z_at = v_at + ranks * wide,
                       out_at = z_at + ranks * wide, gate_at = out_at + ranks * wide,
                       weight_at = gate_at + wide, cosine_at = weight_at + wide,
                       sine_at = cosine_at + wide / 2, norm_at = sine_at + wide / 2,
                       shared_floats = norm_at + ranks;

  __device__ Step(const Args& args, float* shared, int head)
      : a(args), s(args.size), at_(shared), head_(head) {
    warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    group_ = (s.head_offset + head) / s.heads_per_group;
    if (mutant(Mutant::m3_1_groups_as_heads)) group_ = head % s.groups;
    held = a.initial.k.data && a.initial.v.data && !mutant(Mutant::m3_22_initial_token_ignored);
    skip = a.d.data ? read(a.d, cuda::at(a.d, head_)) : 0.0f;
    stage_head();
  }

  __device__ void run(int64_t sequence) {
    row_ = a.ends[sequence], sequence_ = sequence;
    if (row_ < 0) return;
    const auto state = [&](const View& v) {
      return static_cast<float*>(v.data) + cuda::at(v, row_, head_, 0, lane * vector);
    };
    from_state = state(a.initial.ssm), to_state = state(a.last.ssm);
    Four q_asked[items][loads], k_asked[items][loads], held_asked[items][loads];
    ask_rows<queries>(a.q, cuda::at(a.q, sequence_, 0, 0, group_), 2, true, q_asked);
    ask_rows<keys>(a.k, cuda::at(a.k, sequence_, 0, 0, group_), 2, true, k_asked);
    ask_rows<held_keys>(a.initial.k, cuda::at(a.initial.k, row_, 0, head_), 1, held, held_asked);
    Held one, other;  // one is loaded while the other is at work
    load_state(row_of(0), one);
    load_state(row_of(1), other);
    read_token();
    stage_values();
    for (int i = static_cast<int>(threadIdx.x); i < s.pairs; i += threads) turn(i);
    stage_rows<queries>(a.q, q_asked, query_biases);
    stage_rows<keys>(a.k, k_asked, key_biases);
    stage_rows<held_keys>(a.initial.k, held_asked, kinds);
    __syncthreads();
    turn_rows();
    __syncthreads();
    hold_rows();
    for (int turn = 0; row_of(turn) < s.values; turn += 2) {
      advance(row_of(turn), one);
      load_state(row_of(turn + 2), one);
      advance(row_of(turn + 1), other);
      load_state(row_of(turn + 3), other);
    }
    __syncthreads();
    if (a.out.data) finish();
    __syncthreads();
  }

 private:
  using Held = float[rows][loads][vector];  // rows of the state

  __device__ __forceinline__ int row_of(int turn) const { return (turn * warps + warp) * rows; }

  // Item i of a warp among the rows of a kind: a rank, or one that is not. Few ranks of two kinds
  // are of different warps.
  template <int kind>
  __device__ __forceinline__ int rank_of(int i) const {
    if (ranks >= warps) return warp + i * warps;
    return (warp + kinds * warps - kind * ranks) % warps;
  }
  // Row r at `at` + r strides of axis `axis`.
  template <int kind>
  __device__ __forceinline__ void ask_rows(const View& v, int64_t at, int axis, bool wanted,
                                           Four (&x)[items][loads]) const {
    const int last = kind == queries || kind == keys ? 4 : kind == held_keys ? 3 : 2;
#pragma unroll
    for (int i = 0; i < items; ++i) {
      const int r = rank_of<kind>(i), end = wanted && r < s.rank ? s.columns : 0;
#pragma unroll
      for (int j = 0; j < loads; ++j)
        x[i][j] = four_at<whole>(v, at + r * v.stride[axis], v.stride[last],
                                 j * line + lane * vector, end);
    }
  }
  // With the bias that lies among the rows of another kind; zeros behind the last rank.
  template <int kind>
  __device__ __forceinline__ void stage_rows(const View& v, const Four (&x)[items][loads],
                                             int bias) {
#pragma unroll
    for (int i = 0; i < items; ++i) {
      const int r = rank_of<kind>(i);
      if (r >= ranks) continue;
#pragma unroll
      for (int j = 0; j < loads; ++j) {
        const int c = j * line + lane * vector;
        float4 own = numbers(v, x[i][j], 0);
        if (bias < kinds) {
          const float4 by = *reinterpret_cast<const float4*>(at_ + (bias * ranks + r) * width + c);
          own.x += by.x, own.y += by.y, own.z += by.z, own.w += by.w;
        }
        *reinterpret_cast<float4*>(at_ + (kind * ranks + r) * width + c) = own;
      }
    }
  }

  // What every entry takes of the head: biases, projections and weight, neutral where absent.
  __device__ __forceinline__ void stage_head() {
    Four q_bias[items][loads], k_bias[items][loads];
    ask_rows<query_biases>(a.q_bias, cuda::at(a.q_bias, head_), 1, true, q_bias);
    ask_rows<key_biases>(a.k_bias, cuda::at(a.k_bias, head_), 1, true, k_bias);
    stage_rows<query_biases>(a.q_bias, q_bias, kinds);
    stage_rows<key_biases>(a.k_bias, k_bias, kinds);
    for (int r = warp; r < ranks; r += warps)
      for (int c = lane * vector; c < s.values; c += line) {
        const auto put = [&](const View& v, int to, float neutral) {
          const Four x =
              four_at<whole>(v, cuda::at(v, head_, r), v.stride[2], c, r < s.rank ? s.values : 0);
          *reinterpret_cast<float4*>(at_ + to + r * wide + c) = numbers(v, x, neutral);
        };
        put(a.mimo_v, v_at, 1), put(a.mimo_z, z_at, 1), put(a.mimo_out, out_at, 1);
      }
    for (int c = static_cast<int>(threadIdx.x); c < s.values; c += threads)
      at_[weight_at + c] = read_or(1, a.norm_weight, cuda::at(a.norm_weight, head_, c));
    __syncthreads();
  }

  // Rows from `from` on of the state before the token, which is fp32 (rules.cpp). Where rows lie in
  // vectors, P is a multiple of those at work.
  __device__ __forceinline__ void load_state(int from, Held& h) const {
    each_row(from_state, a.initial.ssm, from, s.values, [&](const float* row, int i, int j, int c) {
      float4 x = {0, 0, 0, 0};
      const int64_t apart = a.initial.ssm.stride[3];
      if constexpr (whole) {
        if (row) x = *reinterpret_cast<const float4*>(row);
      } else if (row) {
        x.x = row[0];
        if (c + 1 < s.columns) x.y = row[apart];
        if (c + 2 < s.columns) x.z = row[2 * apart];
        if (c + 3 < s.columns) x.w = row[3 * apart];
      }
      h[i][j][0] = x.x, h[i][j][1] = x.y, h[i][j][2] = x.z, h[i][j][3] = x.w;
    });
  }
  __device__ __forceinline__ void put_state(int from, const Held& h) const {
    const int end = s.values + (mutant(Mutant::m3_12_step_beyond_the_head) ? 1 : 0);
    each_row(to_state, a.last.ssm, from, end, [&](float* row, int i, int j, int c) {
      const float(&x)[vector] = h[i][j];
      if (!row) return;
      if constexpr (whole) {
        *reinterpret_cast<float4*>(row) = {x[0], x[1], x[2], x[3]};
      } else {
#pragma unroll
        for (int e = 0; e < vector; ++e)
          if (c + e < s.columns) row[e * a.last.ssm.stride[3]] = x[e];
      }
    });
  }
  // f(address of a lane's first column, row at work, load, column), null where there is none.
  template <class T, class F>
  __device__ __forceinline__ void each_row(T* state, const View& v, int from, int end, F f) const {
    T* row = state + from * v.stride[2];
    const int64_t line_apart = whole ? line : line * v.stride[3];
#pragma unroll
    for (int i = 0; i < rows; ++i, row += v.stride[2])
#pragma unroll
      for (int j = 0; j < loads; ++j) {
        const int c = j * line + lane * vector;
        const bool inside = (whole ? from : from + i) < end && c < s.columns;
        f(inside ? row + j * line_apart : nullptr, i, j, c);
      }
  }

  __device__ __forceinline__ void read_token() {
    const uint32_t dt_bits = bits_at(a.dt, cuda::at(a.dt, sequence_, head_));
    const uint32_t trap_bits = bits_at(a.trap, cuda::at(a.trap, sequence_, head_));
    const uint32_t adt_bits = bits_at(a.adt, cuda::at(a.adt, sequence_, head_));
    const float adt = number_of(a.adt.dtype, adt_bits);
    float logit = number_of(a.trap.dtype, trap_bits);
    if (mutant(Mutant::m3_b_and_gamma_exchanged)) logit = -logit;
    dt = number_of(a.dt.dtype, dt_bits);
    gamma = sigmoid(logit) * dt;
    b = sigmoid(-logit) * dt;
    alpha = expf(adt <= -128.0f ? -128.0f : adt);
    if (mutant(Mutant::m3_20_decay_clamped)) alpha = alpha > 1 ? 1.0f : alpha;
  }

  // Values of each rank, weighed and held over; a warp has some of the columns. Ranks behind R have
  // rows of zeros to meet.
  __device__ __forceinline__ void stage_values() {
    const int c = static_cast<int>(threadIdx.x) * vector;
    if (c >= s.values) return;
    const Four v =
        four_at<whole>(a.v, cuda::at(a.v, sequence_, 0, head_), a.v.stride[3], c, s.values);
    const Four before = four_at<whole>(a.initial.v, cuda::at(a.initial.v, row_, head_),
                                       a.initial.v.stride[2], c, held ? s.values : 0);
    const Four z =
        four_at<whole>(a.z, cuda::at(a.z, sequence_, 0, head_), a.z.stride[3], c, s.values);
    const float4 own = numbers(a.v, v, 0), old = numbers(a.initial.v, before, 0);
    const auto put = [&](int to, float4 x, float by) {
      *reinterpret_cast<float4*>(at_ + to + c) = {by * x.x, by * x.y, by * x.z, by * x.w};
    };
#pragma unroll
    for (int r = 0; r < ranks; ++r) {
      const float4 by = *reinterpret_cast<const float4*>(at_ + v_at + r * wide + c);
      const float4 now = {own.x * by.x, own.y * by.y, own.z * by.z, own.w * by.w};
      put(values_at + r * wide, now, 1);
      put(weighed_at + r * wide, now, gamma);
      put(held_at + r * wide, {old.x * by.x, old.y * by.y, old.z * by.z, old.w * by.w}, b);
    }
    put(gate_at, numbers(a.z, z, 0), 1);
    const View& to = a.last.v;
    if (to.data)
      put_four<whole>(to, cuda::at(to, row_, head_), to.stride[2], c, s.values,
                      {own.x, own.y, own.z, own.w});
  }

  __device__ __forceinline__ void turn(int i) {
    const StateViews &from = a.initial, &to = a.last;
    uint64_t sum = 0, own = 0;
    if (from.angle.data)
      sum = turn_of_radians(load(from.angle, cuda::at(from.angle, row_, head_, i)));
    if (a.angles.data)
      own =
          to_turn(tanhf(read(a.angles, cuda::at(a.angles, sequence_, 0, head_, i))) * (0.5f * dt));
    const bool lost = sum == no_turn || own == no_turn;
    sum += own;
    sine_cosine(sum, at_[sine_at + i], at_[cosine_at + i]);
    if (lost) at_[sine_at + i] = at_[cosine_at + i] = NAN;
    if (to.angle.data)
      store(to.angle, cuda::at(to.angle, row_, head_, i), lost ? NAN : radians(sum));
  }

  // Turns q and k where they lie.
  __device__ __forceinline__ void turn_rows() {
    constexpr int half = width / 2;  // pairs that a row has room for
#pragma unroll
    for (int first = 0; first < ranks * half; first += threads) {
      const int item = first + static_cast<int>(threadIdx.x), r = item / half, i = item % half;
      if (r >= s.rank || i >= s.pairs) continue;
      const PairColumns c = pair_columns(s, i);
      const float cos = at_[cosine_at + i], sin = at_[sine_at + i];
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        float* const row = at_ + (which * ranks + r) * width;
        const float x = row[c.u], w = row[c.w];
        row[c.u] = x * cos - w * sin;
        row[c.w] = x * sin + w * cos;
      }
    }
  }

  // A lane's columns of every row; a warp hands on a row of the key.
  __device__ __forceinline__ void hold_rows() {
    const View& to = a.last.k;
#pragma unroll
    for (int j = 0; j < loads; ++j) {
      const int c = j * line + lane * vector;
      const auto take = [&](int item, float(&own)[vector]) {
        const float4 x = *reinterpret_cast<const float4*>(at_ + item * width + c);
        own[0] = x.x, own[1] = x.y, own[2] = x.z, own[3] = x.w;
      };
#pragma unroll
      for (int r = 0; r < ranks; ++r)
        take(r, q[r][j]), take(ranks + r, k[r][j]), take(2 * ranks + r, held_k[r][j]);
      if (!to.data) continue;
      for (int r = warp; r < s.rank; r += warps) {
        float own[vector];
        take(ranks + r, own);
        put_four<whole>(to, cuda::at(to, row_, r, head_), to.stride[3], c, s.columns, own);
      }
    }
  }

  // Of each of the rows at work.
  __device__ __forceinline__ static void take(const float* from, float (&to)[rows]) {
    if constexpr (rows == 4) {
      const float4 x = *reinterpret_cast<const float4*>(from);
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else {
#pragma unroll
      for (int i = 0; i < rows; ++i) to[i] = from[i];
    }
  }
  // f(row at work, load, column) of each element that a lane has.
  template <class F>
  __device__ __forceinline__ static void each_element(F f) {
#pragma unroll
    for (int i = 0; i < rows; ++i)
#pragma unroll
      for (int j = 0; j < loads; ++j)
#pragma unroll
        for (int e = 0; e < vector; ++e) f(i, j, e);
  }

  // h = alpha (h + b v_held k_held) + gamma v k, in place, and y = h q.
  __device__ __forceinline__ void advance(int from, Held& h) {
    if (from >= s.values) return;
    float sums[rows * ranks] = {};
#pragma unroll
    for (int r = 0; r < ranks; ++r) {
      float by[rows];
      take(at_ + held_at + r * wide + from, by);
      each_element([&](int i, int j, int e) { h[i][j][e] += by[i] * held_k[r][j][e]; });
    }
    if (alpha != 0)
      each_element([&](int i, int j, int e) { h[i][j][e] *= alpha; });
    else  // nothing is left behind a reset, not 0 * Inf
      each_element([&](int i, int j, int e) { h[i][j][e] = 0; });
#pragma unroll
    for (int r = 0; r < ranks; ++r) {
      float by[rows];
      take(at_ + weighed_at + r * wide + from, by);
      each_element([&](int i, int j, int e) { h[i][j][e] += by[i] * k[r][j][e]; });
    }
    put_state(from, h);
#pragma unroll
    for (int r = 0; r < ranks; ++r)
      each_element([&](int i, int j, int e) { sums[i * ranks + r] += h[i][j][e] * q[r][j][e]; });
    warp_sums<rows * ranks>(sums, lane);
    constexpr int lanes = 32 / (rows * ranks);
    const int j = lane / lanes, row = from + j / ranks;
    if (lane % lanes == 0 && row < s.values) at_[y_at + j % ranks * wide + row] = sums[0];
  }

  // d v, 1 / rms of each row of y, the gate and the projections.
  __device__ __forceinline__ void finish() {
    if (s.head_norm) {
      for (int r = warp; r < s.rank; r += warps) {
        float squares = 0;
        for (int c = lane; c < s.values; c += 32) {
          const float x = at_[y_at + r * wide + c] + skip * at_[values_at + r * wide + c];
          squares += x * x;
        }
        squares = device::warp_reduce(squares, device::Sum{});
        if (lane == 0)
          at_[norm_at + r] = 1.0f / sqrtf(squares / static_cast<float>(s.values) + s.eps);
      }
      __syncthreads();
    }
    for (int c = static_cast<int>(threadIdx.x); c < s.values; c += threads) finish(c);
  }
  __device__ __forceinline__ void finish(int c) {
    const int64_t at = cuda::at(a.out, sequence_, 0, 0, head_, c);
    float sum = 0;
#pragma unroll
    for (int r = 0; r < ranks; ++r) {
      if (r >= s.rank) break;
      float o = at_[y_at + r * wide + c] + skip * at_[values_at + r * wide + c];
      if (s.head_norm) o = o * at_[norm_at + r] * at_[weight_at + c];
      if (a.z.data) {
        const float x = at_[gate_at + c] * at_[z_at + r * wide + c];
        o *= x * sigmoid(x);
      }
      o *= at_[out_at + r * wide + c];
      if (s.reduce)
        sum += o;
      else
        store(a.out, at + r * a.out.stride[2], o);
    }
    if (s.reduce) store(a.out, at, sum);
  }

  const Args& a;
  const Sizes& s;
  float* const at_;
  int64_t sequence_ = 0, row_ = 0;
  int head_, group_, warp, lane;
  bool held;
  const float* from_state;  // of a lane's first column
  float* to_state;
  float alpha = 0, b = 0, gamma = 0, skip = 0, dt = 0;
  float q[ranks][loads][vector], k[ranks][loads][vector], held_k[ranks][loads][vector];
};

inline bool lie_in_vectors(const Args& a) {
  const Sizes& s = a.size;
  if (s.columns % vector != 0 || s.values % vector != 0) return false;
  const int64_t B = s.batch, H = s.heads, R = s.rank, rows = s.state_rows;
  for (const StateViews* x : {&a.initial, &a.last})
    if (!lies_in_vectors(x->ssm, {rows, H, s.values}) || !lies_in_vectors(x->k, {rows, R, H}) ||
        !lies_in_vectors(x->v, {rows, H}))
      return false;
  for (const View* x : {&a.q, &a.k})
    if (!lies_in_vectors(*x, {B, 1, R, s.groups})) return false;
  for (const View* x : {&a.v, &a.z})
    if (!lies_in_vectors(*x, {B, 1, H})) return false;
  for (const View* x : {&a.q_bias, &a.k_bias, &a.mimo_v, &a.mimo_z, &a.mimo_out})
    if (!lies_in_vectors(*x, {H, R})) return false;
  return lies_in_vectors(a.norm_weight, {H});
}

// f(a Step as a type) of the call's sizes.
template <class F>
void with_step(const Args& a, F f) {
  const bool whole = lie_in_vectors(a);
  const auto by_lines = [&](auto ranks, auto loads) {
    if (whole) return f(std::type_identity<Step<ranks(), loads(), true>>{});
    f(std::type_identity<Step<ranks(), loads(), false>>{});
  };
  const auto by_rank = [&](auto ranks) {
    if (a.size.columns <= line) return by_lines(ranks, std::integral_constant<int, 1>{});
    by_lines(ranks, std::integral_constant<int, 2>{});
  };
  if (a.size.rank == 1) return by_rank(std::integral_constant<int, 1>{});
  if (a.size.rank == 2) return by_rank(std::integral_constant<int, 2>{});
  if (a.size.rank <= 4) return by_rank(std::integral_constant<int, 4>{});
  by_rank(std::integral_constant<int, 8>{});
}

}  // namespace talea::mamba3::cuda::one_step
