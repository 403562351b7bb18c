// What: the gradients of the rows of one chunk: through the finish, of values, queries and keys.
// Why: dO V^T is formed once a chunk and feeds every gradient that has it.
// Never: divides by a decay, sums with atomics, or sums over heads.
#pragma once

#include "ops/mamba3/cuda/forward.hpp"

namespace talea::mamba3::cuda {

template <class Team, class T>
class Gradients : public Forward<Team, T, 0> {
 public:
  using Base = Walk<Team, T, 0>;
  using Base::a, Base::s, Base::p, Base::u, Base::team, Base::n, Base::m, Base::first;
  using Base::q, Base::k, Base::v, Base::seen, Base::state, Base::y, Base::sums, Base::tok;
  using Base::token_of, Base::scaled;

  TALEA_SCAN Gradients(Team& of, const Args& args, const ChunkPlaces& places, char* shared,
                       char* scratch)
      : Forward<Team, T, 0>(of, args, places, shared, scratch) {
    d_y = this->template at<T>(p.d_y);
    weights = this->template at<T>(p.weights);
    scores = this->template at<float>(p.scores);
    products = this->template at<float>(p.products);
    gradient = this->template at<float>(p.gradient);
    given = this->template at<float>(p.given);
    turn = this->template at<float>(p.turn);
    row_sums = this->template at<float>(p.row_sums);
    partial = this->template at<float>(p.partial);
    upstream = this->template at<T>(p.upstream);
    wide = this->template at<float>(p.wide_upstream);
    ld_n = p.padded_columns + p.pad;
    ld_p = p.padded_values + p.pad;
    ld_m = p.rows + p.pad;
    wide_n = p.padded_columns + 4;
    wide_p = p.padded_values + 4;
    wide_m = p.rows + 4;
  }

 protected:
  // Rows of row_sums, [M] each: the diagonal of W; ds by later tokens, of the same token, by the
  // state behind; then of tokens: what decays turn on, turns times rates, ds, X; rms's mean.
  enum RowSum { diagonal, by_later, by_same, by_state, dots, by_rate, of_step, of_same, means };
  TALEA_SCAN float& sum_of(RowSum which, int i) { return row_sums[which * p.rows + i]; }

  TALEA_SCAN Span all(int depth) const { return {Span::all, depth, 1}; }
  TALEA_SCAN Span later() const { return {Span::from_token, p.rows, s.rank}; }
  TALEA_SCAN bool needs_y() const {
    return s.head_norm || a.grad.mimo_out.data ||
           (a.z.data && (a.grad.z.data || a.grad.mimo_z.data));
  }

  // Parts of the tokens that sums over them are cut in: a function of sizes alone.
  static TALEA_SCAN int parts_of(int width) {
    return width <= 64 ? 8 : width <= 128 ? 4 : width <= 256 ? 2 : 1;
  }

  // to[i] += the sum over tokens of f(t, i), i < width.
  template <class F>
  TALEA_SCAN void add_over_tokens(int width, double* to, F f) {
    const int parts = parts_of(width);
    team.each(parts * width, [&](int index) {
      const int part = index / width, i = index - part * width;
      float sum = 0;
      constexpr int together = 4;
      TALEA_ROLLED
      for (int t = part; t < n; t += together * parts) {
        float some[together];
        for (int j = 0; j < together; ++j)
          some[j] = f(t + j * parts < n ? t + j * parts : n - 1, i);
        for (int j = 0; j < together; ++j) sum += t + j * parts < n ? some[j] : 0.0f;
      }
      partial[index] = sum;
    });
    team.sync();
    team.each(width, [&](int i) {
      float sum = 0;
      TALEA_ROLLED
      for (int part = 0; part < parts; ++part) sum += partial[part * width + i];
      to[i] += static_cast<double>(sum);
    });
    team.sync();
  }

  // What the finish of one element needs, backwards.
  struct Gate {
    float up, g, z, gate, slope, scaled, normed, e;
  };
  TALEA_SCAN Gate gate_of(int t, int r, int c, float up, float z) {
    const int i = t * s.rank + r, at = r * s.values + c;
    Gate x;
    x.up = up;
    x.z = z;
    x.g = up * this->mimo_out[at];
    x.gate = 1;
    x.slope = 0;
    if (a.z.data) {
      const float w = z * this->mimo_z[at], sg = sigmoid(w);
      x.gate = w * sg;
      x.slope = sg * (1 + w * (1 - sg));
    }
    x.scaled = needs_y() ? y[i * wide_p + c] * (s.head_norm ? sums[i] : 1.0f) : 0.0f;
    x.normed = s.head_norm ? x.scaled * this->weight[c] : x.scaled;
    x.e = s.head_norm ? x.g * x.gate * this->weight[c] : x.g * x.gate;
    return x;
  }
  struct GateBits {
    uint32_t up, z;
  };
  TALEA_SCAN GateBits gate_bits(int t, int r, int c) {
    GateBits bits = {0, 0};
    const int64_t token = u.begin + first + t;
    if (a.d_out.data)
      bits.up = bits_at(a.d_out, cuda::at(a.d_out, u.batch, token, s.reduce ? 0 : r, u.head, c));
    if (a.z.data) bits.z = Base::own_bits(a.z, cuda::at(a.z, u.batch, token, u.head, c));
    return bits;
  }
  TALEA_SCAN Gate gate_of(int t, int r, int c, GateBits bits) {
    return gate_of(t, r, c, number_of(a.d_out.dtype, bits.up), Base::own_number(a.z, bits.z));
  }

  // dO and e^L dO; d_z and the sums of the finish's parameters.
  TALEA_SCAN void finish_back(double* parameters) {
    if (s.head_norm) {
      team.each_warp(m, [&](int i, auto& warp) {
        const int t = token_of(i), r = i - t * s.rank;
        const float sum = warp.sum(s.values, [&](int c) {
          const Gate x = gate_of(t, r, c, gate_bits(t, r, c));
          return x.e * x.scaled;
        });
        if (warp.leads()) sum_of(means, i) = sum / static_cast<float>(s.values);
      });
      team.sync();
    }
    team.grid(p.rows, p.padded_values, [&](int i, int c) {
      if (i >= m || c >= s.values)
        narrow(0.0f, d_y[i * ld_p + c]), narrow(0.0f, scaled[i * ld_p + c]);
    });
    const GradientViews& d = a.grad;
    const int width = s.rank * s.values, parts = parts_of(width);
    const bool sums_z = d.mimo_z.data, sums_out = d.mimo_out.data, sums_w = d.norm_weight.data;
    team.each(parts * width, [&](int index) {
      const int part = index / width, at = index - part * width;
      const int r = at / s.values, c = at - r * s.values;
      float by_z = 0, by_out = 0, by_weight = 0;
      constexpr int together = 4;
      TALEA_ROLLED
      for (int t0 = part; t0 < n; t0 += together * parts) {
        GateBits bits[together];
        for (int j = 0; j < together; ++j) {
          const int t = t0 + j * parts;
          bits[j] = gate_bits(t < n ? t : n - 1, r, c);
        }
        for (int j = 0; j < together; ++j) {
          const int t = t0 + j * parts, i = t * s.rank + r;
          if (t >= n) break;
          const Gate x = gate_of(t, r, c, bits[j]);
          const float dy = s.head_norm ? sums[i] * (x.e - x.scaled * sum_of(means, i)) : x.e;
          narrow(dy, d_y[i * ld_p + c]);
          narrow(tok(Base::left, t) * dy, scaled[i * ld_p + c]);
          const float du = x.g * x.normed * x.slope;
          y[i * wide_p + c] = du * this->mimo_z[at];
          by_z += du * x.z;
          by_out += x.up * x.normed * x.gate;
          by_weight += x.g * x.gate * x.scaled;
        }
      }
      partial[index] = by_z;
      partial[parts * width + index] = by_out;
      partial[2 * parts * width + index] = by_weight;
    });
    team.sync();
    if (d.z.data)
      team.grid(n, s.values, [&](int t, int c) {
        float sum = 0;
        TALEA_ROLLED
        for (int r = 0; r < s.rank; ++r) sum += y[(t * s.rank + r) * wide_p + c];
        store(d.z, cuda::at(d.z, u.batch, u.begin + first + t, u.head, c), sum);
      });
    double* const to = parameters + 2 * s.rank * s.columns + width;
    const auto over_parts = [&](int which, int i) {
      float sum = 0;
      TALEA_ROLLED
      for (int part = 0; part < parts; ++part) sum += partial[(which * parts + part) * width + i];
      return sum;
    };
    if (sums_z || sums_out)
      team.each(width, [&](int i) {
        if (sums_z) to[i] += static_cast<double>(over_parts(0, i));
        if (sums_out) to[width + i] += static_cast<double>(over_parts(1, i));
      });
    if (sums_w)
      team.each(s.values, [&](int c) {
        float sum = 0;
        TALEA_ROLLED
        for (int r = 0; r < s.rank; ++r) sum += over_parts(2, r * s.values + c);
        to[2 * width + c] += static_cast<double>(sum);
      });
    team.sync();
  }

  // W = dO V^T, once: weighed as an operand; under the decays and times Q K^T in `scores`, of the
  // same token in `products`.
  TALEA_SCAN void pair_products(double* trace_to) {
    team.product(
        p.rows, this->pairs(), all(p.padded_values), Rows<T>{d_y, ld_p}, Rows<T>{v, ld_p},
        [](int, int) { return 0.0f; },
        [&](int i, int j, float x) { products[i * wide_m + j] = x; });
    team.sync();
    team.grid(p.rows, p.rows, [&](int i, int j) {
      const int t = token_of(i), earlier = token_of(j);
      float seen_by = 0, far = 0, near = 0;
      if (i < m && earlier <= t) {
        const float w = products[i * wide_m + j], score = scores[i * wide_m + j];
        if (i == j) sum_of(diagonal, i) = w;
        if (earlier < t) {
          const float d = this->decays[t * s.chunk + earlier];
          seen_by = tok(Base::step, earlier) * d * w;
          far = d * w * score;
        } else {
          seen_by = tok(mutant(Mutant::m3_diagonal_with_s) ? Base::step : Base::gamma, t) * w;
          near = w * score;
        }
      }
      narrow(seen_by, weights[i * ld_m + j]);
      scores[i * wide_m + j] = far;
      products[i * wide_m + j] = near;
    });
    team.sync();
    constexpr int parts = 4;
    team.each(parts * m, [&](int index) {
      const int part = index / m, j = index - part * m;
      float far = 0;
      TALEA_ROLLED
      for (int i = token_of(j) * s.rank + part; i < m; i += parts) far += scores[i * wide_m + j];
      partial[index] = far;
    });
    team.sync();
    team.each(m, [&](int j) {
      float far = 0, near = 0;
      TALEA_ROLLED
      for (int part = 0; part < parts; ++part) far += partial[part * m + j];
      const int from = token_of(j) * s.rank;
      TALEA_ROLLED
      for (int i = from; i < from + s.rank; ++i) near += products[i * wide_m + j];
      sum_of(by_later, j) = far;
      sum_of(by_same, j) = near;
    });
    team.each(1, [&](int) {
      float trace = 0;
      TALEA_ROLLED
      for (int i = 0; i < m; ++i) trace += sum_of(diagonal, i);
      *trace_to += static_cast<double>(trace);
    });
    team.sync();
  }

  // dv = seen^T dO + e^(L_C - L) s (K E^T) + d dO, in `gradient`; the plain K E^T in y.
  TALEA_SCAN void value_gradients() {
    team.product(
        p.rows, all(p.padded_values), all(p.padded_columns), Rows<T>{k, ld_n},
        Rows<T>{upstream, ld_n},
        [&](int j, int c, float x) {
          y[j * wide_p + c] = x;
          return j < m ? tok(Base::key, token_of(j)) * x : 0.0f;
        },
        later(), Columns<T>{seen, ld_m}, Columns<T>{d_y, ld_p},
        [&](int j, int c, float x) {
          gradient[j * wide_p + c] = x + this->skip * widen(d_y[j * ld_p + c]);
        });
    team.sync();
    // What a key gets from the state behind for each unit of s.
    team.each_warp(m, [&](int j, auto& warp) {
      const float far =
          warp.sum(s.values, [&](int c) { return y[j * wide_p + c] * widen(v[j * ld_p + c]); });
      if (warp.leads()) sum_of(by_state, j) = tok(Base::right, token_of(j)) * far;
    });
  }

  // d_v and what the projection of v gets.
  TALEA_SCAN void store_values(bool last, double* parameters) {
    const GradientViews& d = a.grad;
    if (d.v.data)
      team.grid(n, s.values, [&](int t, int c) {
        float sum = 0;
        TALEA_ROLLED
        for (int r = 0; r < s.rank; ++r)
          sum += gradient[(t * s.rank + r) * wide_p + c] * this->mimo_v[r * s.values + c];
        if (last && t == n - 1) sum += load_or(0, a.last.v, cuda::at(a.last.v, u.row, u.head, c));
        store(d.v, cuda::at(d.v, u.batch, u.begin + first + t, u.head, c), sum);
      });
    if (d.mimo_v.data)
      add_over_tokens(s.rank * s.values, parameters + 2 * s.rank * s.columns, [&](int t, int i) {
        const int r = i / s.values, c = i - r * s.values;
        return gradient[(t * s.rank + r) * wide_p + c] * this->raw_value(t, c);
      });
    team.sync();
  }

  // dq = e^L (dO h) + W' K
  TALEA_SCAN void query_gradients() {
    team.product(
        p.rows, all(p.padded_columns), all(p.padded_values), Rows<T>{d_y, ld_p},
        Columns<T>{state, ld_n},
        [&](int i, int, float x) { return i < m ? tok(Base::left, token_of(i)) * x : 0.0f; },
        this->pairs(), Rows<T>{weights, ld_m}, Columns<T>{k, ld_n},
        [&](int i, int c, float x) { gradient[i * wide_n + c] = x; });
    team.sync();
  }

  // dk = e^(L_C - L) s (V E) + W'^T Q
  TALEA_SCAN void key_gradients() {
    team.product(
        p.rows, all(p.padded_columns), all(p.padded_values), Rows<T>{v, ld_p},
        Columns<T>{upstream, ld_n},
        [&](int j, int, float x) { return j < m ? tok(Base::key, token_of(j)) * x : 0.0f; },
        later(), Columns<T>{weights, ld_m}, Columns<T>{q, ld_n},
        [&](int j, int c, float x) { gradient[j * wide_n + c] = x; });
    team.sync();
  }

  // Rows of dq or dk: their share of turns and decays; turned back, handed to the sum over heads.
  // place: of the chunk's first token among those of the slice.
  TALEA_SCAN void rows_back(int64_t place, bool keys, bool last, float* to, double* parameters) {
    const T* rows = keys ? k : q;
    const View& final_k = a.last.k;
    const bool handed = keys && last && final_k.data;
    team.each_warp(n, [&](int t, auto& warp) {
      const float dot = warp.sum((s.columns + 1) / 2, [&](int pair) {
        const PairColumns c = pair_columns(s, pair);
        const bool both = c.w < s.columns, turns = pair < s.pairs;
        const float cos = turns ? this->cosine(t, pair) : 1.0f;
        const float back = mutant(Mutant::m3_turned_back_forward) ? -1.0f : 1.0f;
        const float sin = turns ? back * this->sine(t, pair) : 0.0f;
        float own = 0, torque = 0;
        TALEA_ROLLED
        for (int r = 0; r < s.rank; ++r) {
          const int i = t * s.rank + r;
          const float x = widen(rows[i * ld_n + c.u]);
          const float w = both ? widen(rows[i * ld_n + c.w]) : 0.0f;
          float gx = gradient[i * wide_n + c.u];
          float gw = both ? gradient[i * wide_n + c.w] : 0.0f;
          own += x * gx + w * gw;
          torque += x * gw - w * gx;
          if (handed && t == n - 1) {
            gx += load(final_k, cuda::at(final_k, u.row, r, u.head, c.u));
            if (both) gw += load(final_k, cuda::at(final_k, u.row, r, u.head, c.w));
          }
          if (turns) {
            const float g = gx;
            gx = g * cos + gw * sin;
            gw = gw * cos - g * sin;
          }
          gradient[i * wide_n + c.u] = gx;
          if (both) gradient[i * wide_n + c.w] = gw;
          if (to) {
            float* own_row = to + (((place + t) * s.rank + r) * s.heads + u.head) * s.columns;
            own_row[c.u] = gx;
            if (both) own_row[c.w] = gw;
          }
        }
        if (turns) {
          float& sum = turn[t * s.pairs + pair];
          sum = keys ? sum + torque : torque;
        }
        return own;
      });
      if (warp.leads()) sum_of(dots, t) = keys ? sum_of(dots, t) - dot : dot;
    });
    team.sync();
    const int width = s.rank * s.columns;
    const View& bias = keys ? a.grad.k_bias : a.grad.q_bias;
    if (bias.data)
      add_over_tokens(width, parameters + (keys ? width : 0), [&](int t, int i) {
        const int r = i / s.columns, c = i - r * s.columns;
        return gradient[(t * s.rank + r) * wide_n + c];
      });
  }

  T *d_y, *weights, *upstream;
  float *scores, *products, *gradient, *given, *turn, *row_sums, *partial, *wide;
  int ld_n, ld_p, ld_m, wide_n, wide_p, wide_m;
};

}  // namespace talea::mamba3::cuda
