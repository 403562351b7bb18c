// What: what a step forms of its entries and of their head before their states are at work, rows of q
//       and k, values, turns; and the output behind them.
// Why: it waits for memory again and again, so that entries wait together.
// Never: reads a state.
#pragma once

#include "ops/mamba3/rows/step.cuh"

namespace talea::mamba3::cuda::one_step {

// Of all entries: rows biased and turned, values of each rank.
template <int ranks, int loads, bool whole, int wide>
__device__ __forceinline__ void Step<ranks, loads, whole, wide>::begin() {
  Four q[together][items][loads], k[together][items][loads], held_k[together][items][loads];
#pragma unroll
  for (int e = 0; e < together; ++e) {
    const auto [sequence, row] = entry_of(e);
    const bool there = row >= 0;
    ask_rows<queries>(a.q, cuda::at(a.q, sequence, 0, 0, group_), 2, there, q[e]);
    ask_rows<keys>(a.k, cuda::at(a.k, sequence, 0, 0, group_), 2, there, k[e]);
    ask_rows<held_keys>(a.initial.k, cuda::at(a.initial.k, row, 0, head_), 1, there && held,
                        held_k[e]);
  }
  // Mostly by different warps.
  if (is_thread(threads - 32)) {
    const Entry last = entry_of(together - 1);
    find_entries(last.row < 0 ? s.sequences : last.sequence + apart_, list_ ^ together);
  }
  each_of_entries<wide / vector>(
      [&](int e, const Entry& own, int i) { stage_values(place_of(e), own, i * vector); }, 32);
  each_of_entries<width / 2>([&](int e, const Entry& own, int i) {
    if (i < s.pairs) turn(place_of(e), own, i);
  });
#pragma unroll
  for (int e = 0; e < together; ++e) {
    float* const to = place_of(e);
    stage_rows<queries>(a.q, q[e], to, at_);
    stage_rows<keys>(a.k, k[e], to + ranks * width, at_ + ranks * width);
    stage_rows<held_keys>(a.initial.k, held_k[e], to + 2 * ranks * width);
  }
  __syncthreads();
  each_of_entries<ranks * width / 2>(
      [&](int e, const Entry&, int i) { turn_row(place_of(e), i / (width / 2), i % (width / 2)); });
  __syncthreads();
}

// Row r at `at` + r strides of axis `axis`.
template <int ranks, int loads, bool whole, int wide>
template <int kind>
__device__ __forceinline__ void Step<ranks, loads, whole, wide>::ask_rows(
    const View& v, int64_t at, int axis, bool wanted, Four (&x)[items][loads]) const {
  const int last = kind == queries || kind == keys ? 4 : kind == held_keys ? 3 : 2;
#pragma unroll
  for (int i = 0; i < items; ++i) {
    const int r = rank_of<kind>(i), end = wanted && r < s.rank ? s.columns : 0;
#pragma unroll
    for (int j = 0; j < loads; ++j)
      x[i][j] =
          four_at<whole>(v, at + r * v.stride[axis], v.stride[last], j * line + lane * vector, end);
  }
}

// With their biases, where there are some; zeros behind the last rank.
template <int ranks, int loads, bool whole, int wide>
template <int kind>
__device__ __forceinline__ void Step<ranks, loads, whole, wide>::stage_rows(
    const View& v, const Four (&x)[items][loads], float* to, const float* biases) const {
#pragma unroll
  for (int i = 0; i < items; ++i) {
    const int r = rank_of<kind>(i);
    if (r >= ranks) continue;
#pragma unroll
    for (int j = 0; j < loads; ++j) {
      const int at = r * width + j * line + lane * vector;
      float4 own = numbers(v, x[i][j], 0);
      if (biases) {
        const float4 by = *reinterpret_cast<const float4*>(biases + at);
        own.x += by.x, own.y += by.y, own.z += by.z, own.w += by.w;
      }
      *reinterpret_cast<float4*>(to + at) = own;
    }
  }
}

// What every entry takes of the head: biases, projections and weight, neutral where absent.
template <int ranks, int loads, bool whole, int wide>
__device__ __forceinline__ void Step<ranks, loads, whole, wide>::stage_head() {
  Four q_bias[items][loads], k_bias[items][loads];
  ask_rows<query_biases>(a.q_bias, cuda::at(a.q_bias, head_), 1, true, q_bias);
  ask_rows<key_biases>(a.k_bias, cuda::at(a.k_bias, head_), 1, true, k_bias);
  stage_rows<query_biases>(a.q_bias, q_bias, at_);
  stage_rows<key_biases>(a.k_bias, k_bias, at_ + ranks * width);
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

// Values of each rank, weighed and held over, from c on. Ranks behind R have rows of zeros to
// meet.
template <int ranks, int loads, bool whole, int wide>
__device__ __forceinline__ void Step<ranks, loads, whole, wide>::stage_values(float* to,
                                                                              const Entry& of,
                                                                              int c) {
  if (c >= s.values) return;
  const auto [sequence, row] = of;
  const Four v = four_at<whole>(a.v, cuda::at(a.v, sequence, 0, head_), a.v.stride[3], c, s.values);
  const Four before = four_at<whole>(a.initial.v, cuda::at(a.initial.v, row, head_),
                                     a.initial.v.stride[2], c, held ? s.values : 0);
  const Four z = four_at<whole>(a.z, cuda::at(a.z, sequence, 0, head_), a.z.stride[3], c, s.values);
  const Token token = token_of(sequence);
  const float4 own = numbers(a.v, v, 0), old = numbers(a.initial.v, before, 0);
  const auto put = [&](int at, float4 x, float by) {
    *reinterpret_cast<float4*>(to + at + c) = {by * x.x, by * x.y, by * x.z, by * x.w};
  };
#pragma unroll
  for (int r = 0; r < ranks; ++r) {
    const float4 by = *reinterpret_cast<const float4*>(at_ + v_at + r * wide + c);
    const float4 now = {own.x * by.x, own.y * by.y, own.z * by.z, own.w * by.w};
    put(values_at + r * wide, now, 1);
    put(weighed_at + r * wide, now, token.gamma);
    put(held_at + r * wide, {old.x * by.x, old.y * by.y, old.z * by.z, old.w * by.w}, token.b);
  }
  put(gate_at, numbers(a.z, z, 0), 1);
  if (c == 0) to[decay_at] = token.alpha;
  const View& last = a.last.v;
  if (last.data)
    put_four<whole>(last, cuda::at(last, row, head_), last.stride[2], c, s.values,
                    {own.x, own.y, own.z, own.w});
}

template <int ranks, int loads, bool whole, int wide>
__device__ __forceinline__ void Step<ranks, loads, whole, wide>::turn(float* to, const Entry& of,
                                                                      int i) {
  const StateViews &from = a.initial, &last = a.last;
  const auto [sequence, row] = of;
  uint64_t sum = 0, own = 0;
  if (from.angle.data) sum = turn_of_radians(load(from.angle, cuda::at(from.angle, row, head_, i)));
  if (a.angles.data)
    own = to_turn(tanhf(read(a.angles, cuda::at(a.angles, sequence, 0, head_, i))) *
                  (0.5f * dt_of(sequence)));
  const bool lost = sum == no_turn || own == no_turn;
  sum += own;
  sine_cosine(sum, to[sine_at + i], to[cosine_at + i]);
  if (lost) to[sine_at + i] = to[cosine_at + i] = NAN;
  if (last.angle.data)
    store(last.angle, cuda::at(last.angle, row, head_, i), lost ? NAN : radians(sum));
}

// Turns a pair of q and k where they lie.
template <int ranks, int loads, bool whole, int wide>
__device__ __forceinline__ void Step<ranks, loads, whole, wide>::turn_row(float* own, int r,
                                                                          int i) {
  if (r >= s.rank || i >= s.pairs) return;
  const PairColumns c = pair_columns(s, i);
  const float cos = own[cosine_at + i], sin = own[sine_at + i];
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    float* const row = own + (which * ranks + r) * width;
    const float x = row[c.u], w = row[c.w];
    row[c.u] = x * cos - w * sin;
    row[c.w] = x * sin + w * cos;
  }
}

// A lane's columns of every row; a warp hands on a row of the key.
template <int ranks, int loads, bool whole, int wide>
__device__ __forceinline__ void Step<ranks, loads, whole, wide>::hold_rows() {
  const View& to = a.last.k;
#pragma unroll
  for (int j = 0; j < loads; ++j) {
    const int c = j * line + lane * vector;
    const auto take = [&](int item, float(&own)[vector]) {
      const float4 x = *reinterpret_cast<const float4*>(own_ + item * width + c);
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

// d v, 1 / rms of each row of y, the gate and the projections.
template <int ranks, int loads, bool whole, int wide>
__device__ __forceinline__ void Step<ranks, loads, whole, wide>::finish() {
  if (s.head_norm) {
    for (int item = warp; item < together * s.rank; item += warps) {
      const int e = item / s.rank, r = item % s.rank;
      if (entry_of(e).row < 0) break;
      float* const own = place_of(e);
      float squares = 0;
      for (int c = lane; c < s.values; c += 32) {
        const float x = own[y_at + r * wide + c] + skip * own[values_at + r * wide + c];
        squares += x * x;
      }
      squares = device::warp_reduce(squares, device::Sum{});
      if (lane == 0)
        own[norm_at + r] = 1.0f / sqrtf(squares / static_cast<float>(s.values) + s.eps);
    }
    __syncthreads();
  }
  each_of_entries<wide>([&](int e, const Entry& of, int c) {
    if (c < s.values) finish(place_of(e), of.sequence, c);
  });
}

template <int ranks, int loads, bool whole, int wide>
__device__ __forceinline__ void Step<ranks, loads, whole, wide>::finish(const float* own,
                                                                        int64_t sequence, int c) {
  const int64_t at = cuda::at(a.out, sequence, 0, 0, head_, c);
  float sum = 0;
#pragma unroll
  for (int r = 0; r < ranks; ++r) {
    if (r >= s.rank) break;
    float o = own[y_at + r * wide + c] + skip * own[values_at + r * wide + c];
    if (s.head_norm) o = o * own[norm_at + r] * at_[weight_at + c];
    if (a.z.data) {
      const float x = own[gate_at + c] * at_[z_at + r * wide + c];
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

}  // namespace talea::mamba3::cuda::one_step
