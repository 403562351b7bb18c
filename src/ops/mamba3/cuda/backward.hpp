// What: the gradients of chunks of one head, from the last of a slice to the first.
// Why: dO V^T is formed once a chunk and feeds every gradient that has it; decays and angles need
//      no product of their own, and are anchored at each chunk's end.
// Never: divides by a decay, sums with atomics, or sums over heads.
#pragma once

#include "ops/mamba3/cuda/forward.hpp"

namespace talea::mamba3::cuda {

template <class Team, class T>
class Backward : public Forward<Team, T> {
 public:
  using Base = Walk<Team, T>;
  using Base::a, Base::s, Base::p, Base::u, Base::team, Base::n, Base::m, Base::first;
  using Base::q, Base::k, Base::v, Base::seen, Base::state, Base::y, Base::sums, Base::tok;
  using Base::wide_state, Base::projected;

  TALEA_SCAN Backward(Team& of, const Args& args, const ChunkPlaces& places, char* shared,
                      char* scratch, const UnitBuffers& buffers, const Wave& at_work)
      : Forward<Team, T>(of, args, places, shared, scratch), b(buffers), wave(at_work) {
    d_y = this->template at<T>(p.d_y);
    weights = this->template at<T>(p.weights);
    scores = this->template at<float>(p.scores);
    products = this->template at<float>(p.products);
    gradient = this->template at<float>(p.gradient);
    tanh = this->template at<float>(p.tanh);
    turn = this->template at<float>(p.turn);
    row_sums = this->template at<float>(p.row_sums);
    upstream = this->template at<T>(p.upstream);
    wide = this->template at<float>(p.wide_upstream);
    ld_n = p.padded_columns + p.pad;
    ld_p = p.padded_values + p.pad;
    ld_m = p.rows + p.pad;
    wide_n = p.padded_columns + 4;
    wide_p = p.padded_values + 4;
    wide_m = p.rows + 4;
  }

  // The chunks of the slice of unit `number` of the wave.
  TALEA_SCAN void run(const Unit& unit, int64_t number) {
    this->begin(unit);
    number_ = number;
    const int64_t begin = wave.segment * s.segment;
    int64_t end = this->chunks();
    end = end < begin + s.segment ? end : begin + s.segment;
    const int64_t low = begin + wave.slice;
    const int64_t high = end < low + wave.slice_chunks ? end : low + wave.slice_chunks;
    if (low >= high) return;
    const int64_t size = int64_t{p.padded_columns} * p.padded_values;
    float* home = b.upstream + number * size;
    team.each_warp(p.padded_values, [&](int c, auto& warp) {
      warp.each(p.padded_columns,
                [&](int i) { wide[c * wide_n + i] = home[c * p.padded_columns + i]; });
    });
    team.sync();
    for (int64_t chunk = high; chunk-- > low;) {
      const int64_t i = chunk - begin;
      const float* states = b.inner + (number * (s.segment + 1) + i) * size;
      this->take_turns(b.inner_turns + (number * s.segment + i) * s.pairs,
                       b.inner_taints + (number * s.segment + i) * s.pairs);
      chunk_back(chunk, chunk - low, states, states + size);
    }
    if (low == 0) initial_gradients();
    team.each_warp(p.padded_values, [&](int c, auto& warp) {
      warp.each(p.padded_columns,
                [&](int i) { home[c * p.padded_columns + i] = wide[c * wide_n + i]; });
    });
    team.sync();
  }

 private:
  TALEA_SCAN Span all(int depth) const { return {Span::all, depth, 1}; }
  TALEA_SCAN Span later() const { return {Span::from_token, p.rows, s.rank}; }
  TALEA_SCAN double* parameters() { return b.parameters + number_ * parameter_count(s); }
  TALEA_SCAN bool needs_y() const {
    return s.head_norm || a.grad.mimo_out.data ||
           (a.z.data && (a.grad.z.data || a.grad.mimo_z.data));
  }

  TALEA_SCAN void chunk_back(int64_t chunk, int64_t slot, const float* before,
                             const float* behind) {
    const bool last = chunk + 1 == this->chunks();
    this->read_tokens(chunk);
    this->read_turns(tanh);
    this->read_rows(a.q, a.q_bias, q);
    this->read_rows(a.k, a.k_bias, k);
    this->read_values(false);
    this->to_operands(before, p.padded_columns, state);
    this->to_operands(wide, wide_n, upstream);
    team.sync();
    this->pair_scores(scores);
    if (needs_y()) {
      this->outputs();
      this->norms();
    }
    finish_back();
    pair_products();
    value_gradients();
    store_values(last);
    query_gradients();
    rows_back(slot, false, false);
    key_gradients();
    rows_back(slot, true, last);
    anchor(behind, last);
    token_gradients(slot);
    advance_back();
  }

  // What the finish of one element needs, backwards.
  struct Gate {
    float up, g, gate, slope, z, scaled, normed, e;
  };
  TALEA_SCAN Gate gate_of(int t, int r, int c) {
    Gate x;
    const int64_t token = u.begin + first + t;
    const View& from = a.d_out;
    x.up =
        from.data ? load(from, cuda::at(from, u.batch, token, s.reduce ? 0 : r, u.head, c)) : 0.0f;
    x.g = x.up * projected(a.mimo_out, r, c);
    x.gate = 1;
    x.slope = x.z = 0;
    if (a.z.data) {
      x.z = load(a.z, cuda::at(a.z, u.batch, token, u.head, c));
      const float w = x.z * projected(a.mimo_z, r, c), sg = sigmoid(w);
      x.gate = w * sg;
      x.slope = sg * (1 + w * (1 - sg));
    }
    const float weight =
        a.norm_weight.data ? load(a.norm_weight, cuda::at(a.norm_weight, u.head, c)) : 1.0f;
    const int i = t * s.rank + r;
    x.scaled = needs_y() ? y[i * wide_p + c] * (s.head_norm ? sums[i] : 1.0f) : 0.0f;
    x.normed = s.head_norm ? x.scaled * weight : x.scaled;
    x.e = s.head_norm ? x.g * x.gate * weight : x.g * x.gate;
    return x;
  }

  // dO and e^L dO; d_z and the sums of the finish's parameters.
  TALEA_SCAN void finish_back() {
    team.each_warp(p.rows, [&](int i, auto& warp) {
      const bool inside = i < m;
      const int t = i / s.rank, r = i - t * s.rank;
      float mean = 0;
      if (inside && s.head_norm)
        mean = warp.sum(s.values, [&](int c) {
          const Gate x = gate_of(t, r, c);
          return x.e * x.scaled;
        }) / static_cast<float>(s.values);
      const float left = inside ? tok(Base::left, t) : 0.0f;
      warp.each(p.padded_values, [&](int c) {
        float dy = 0;
        if (inside && c < s.values) {
          const Gate x = gate_of(t, r, c);
          dy = s.head_norm ? sums[i] * (x.e - x.scaled * mean) : x.e;
        }
        narrow(dy, d_y[i * ld_p + c]);
        narrow(inside ? left * dy : 0.0f, this->scaled[i * ld_p + c]);
      });
    });
    const GradientViews& d = a.grad;
    if (d.z.data)
      team.each_warp(n, [&](int t, auto& warp) {
        warp.each(s.values, [&](int c) {
          float sum = 0;
          for (int r = 0; r < s.rank; ++r) {
            const Gate x = gate_of(t, r, c);
            sum += x.g * x.normed * x.slope * projected(a.mimo_z, r, c);
          }
          store(d.z, cuda::at(d.z, u.batch, u.begin + first + t, u.head, c), sum);
        });
      });
    double* const to = parameters() + 2 * s.rank * s.columns + s.rank * s.values;
    if (d.mimo_z.data || d.mimo_out.data)
      team.each_warp(s.rank, [&](int r, auto& warp) {
        warp.each(s.values, [&](int c) {
          float by_z = 0, by_out = 0;
          for (int t = 0; t < n; ++t) {
            const Gate x = gate_of(t, r, c);
            by_z += x.g * x.normed * x.slope * x.z;
            by_out += x.up * x.normed * x.gate;
          }
          to[r * s.values + c] += by_z;
          to[(s.rank + r) * s.values + c] += by_out;
        });
      });
    if (d.norm_weight.data)
      team.each(s.values, [&](int c) {
        float sum = 0;
        for (int t = 0; t < n; ++t)
          for (int r = 0; r < s.rank; ++r) {
            const Gate x = gate_of(t, r, c);
            sum += x.g * x.gate * x.scaled;
          }
        to[2 * s.rank * s.values + c] += sum;
      });
    team.sync();
  }

  // W = dO V^T, once: weighed as an operand; under the decays and times Q K^T in `scores`, of the
  // same token in `products`; row_sums: [0] its diagonal, [1] ds by later tokens, [2] of the same.
  TALEA_SCAN void pair_products() {
    team.product(
        p.rows, this->pairs(), all(p.padded_values), Rows<T>{d_y, ld_p}, Rows<T>{v, ld_p},
        [](int, int) { return 0.0f; },
        [&](int i, int j, float x) { products[i * wide_m + j] = x; });
    team.sync();
    team.each_warp(p.rows, [&](int i, auto& warp) {
      const int t = i / s.rank;
      warp.each(p.rows, [&](int j) {
        const int earlier = j / s.rank;
        float seen_by = 0, far = 0, near = 0;
        if (i < m && earlier <= t) {
          const float w = products[i * wide_m + j], score = scores[i * wide_m + j];
          if (i == j) row_sums[i] = w;
          if (earlier < t) {
            const float d = this->decay_of(t, earlier);
            seen_by = tok(Base::step, earlier) * d * w;
            far = d * w * score;
          } else {
            seen_by = tok(Base::gamma, t) * w;
            near = w * score;
          }
        }
        narrow(seen_by, weights[i * ld_m + j]);
        scores[i * wide_m + j] = far;
        products[i * wide_m + j] = near;
      });
    });
    team.sync();
    team.each(m, [&](int j) {
      float far = 0, near = 0;
      const int from = j / s.rank * s.rank;
      for (int i = from; i < m; ++i) far += scores[i * wide_m + j];
      for (int i = from; i < from + s.rank; ++i) near += products[i * wide_m + j];
      row_sums[p.rows + j] = far;
      row_sums[2 * p.rows + j] = near;
    });
    team.sync();
    team.each(1, [&](int) {  // the trace of W
      float trace = 0;
      for (int i = 0; i < m; ++i) trace += row_sums[i];
      parameters()[parameter_count(s) - 1] += trace;
    });
  }

  // dv = seen^T dO + e^(L_C - L) s (K E^T) + d dO, in `gradient`; the plain K E^T in y.
  TALEA_SCAN void value_gradients() {
    const float skip = load_or(0, a.d, cuda::at(a.d, u.head));
    team.product(
        p.rows, all(p.padded_values), all(p.padded_columns), Rows<T>{k, ld_n},
        Rows<T>{upstream, ld_n},
        [&](int j, int c, float x) {
          y[j * wide_p + c] = x;
          return j < m ? tok(Base::key, j / s.rank) * x : 0.0f;
        },
        later(), Columns<T>{seen, ld_m}, Columns<T>{d_y, ld_p},
        [&](int j, int c, float x) {
          gradient[j * wide_p + c] = x + skip * widen(d_y[j * ld_p + c]);
        });
    team.sync();
    // What a key gets from the state behind for each unit of s.
    team.each_warp(m, [&](int j, auto& warp) {
      const float far =
          warp.sum(s.values, [&](int c) { return y[j * wide_p + c] * widen(v[j * ld_p + c]); });
      if (warp.leads()) row_sums[3 * p.rows + j] = tok(Base::right, j / s.rank) * far;
    });
  }

  // d_v and what the projection of v gets.
  TALEA_SCAN void store_values(bool last) {
    const GradientViews& d = a.grad;
    if (d.v.data)
      team.each_warp(n, [&](int t, auto& warp) {
        warp.each(s.values, [&](int c) {
          float sum = 0;
          for (int r = 0; r < s.rank; ++r)
            sum += gradient[(t * s.rank + r) * wide_p + c] * projected(a.mimo_v, r, c);
          if (last && t == n - 1) sum += load_or(0, a.last.v, cuda::at(a.last.v, u.row, u.head, c));
          store(d.v, cuda::at(d.v, u.batch, u.begin + first + t, u.head, c), sum);
        });
      });
    if (d.mimo_v.data) {
      double* const to = parameters() + 2 * s.rank * s.columns;
      team.each_warp(s.rank, [&](int r, auto& warp) {
        warp.each(s.values, [&](int c) {
          float sum = 0;
          for (int t = 0; t < n; ++t)
            sum += gradient[(t * s.rank + r) * wide_p + c] * this->raw_value(t, c);
          to[r * s.values + c] += sum;
        });
      });
    }
    team.sync();
  }

  // dq = e^L (dO h) + W' K
  TALEA_SCAN void query_gradients() {
    team.product(
        p.rows, all(p.padded_columns), all(p.padded_values), Rows<T>{d_y, ld_p},
        Columns<T>{state, ld_n},
        [&](int i, int, float x) { return i < m ? tok(Base::left, i / s.rank) * x : 0.0f; },
        this->pairs(), Rows<T>{weights, ld_m}, Columns<T>{k, ld_n},
        [&](int i, int c, float x) { gradient[i * wide_n + c] = x; });
    team.sync();
  }

  // dk = e^(L_C - L) s (V E) + W'^T Q
  TALEA_SCAN void key_gradients() {
    team.product(
        p.rows, all(p.padded_columns), all(p.padded_values), Rows<T>{v, ld_p},
        Columns<T>{upstream, ld_n},
        [&](int j, int, float x) { return j < m ? tok(Base::key, j / s.rank) * x : 0.0f; }, later(),
        Columns<T>{weights, ld_m}, Columns<T>{q, ld_n},
        [&](int j, int c, float x) { gradient[j * wide_n + c] = x; });
    team.sync();
  }

  // Rows of dq or dk: their share of turns and decays; turned back, handed to the sum over heads.
  TALEA_SCAN void rows_back(int64_t slot, bool keys, bool last) {
    const T* rows = keys ? k : q;
    const View& final_k = a.last.k;
    float* const to = keys ? b.dk : b.dq;
    const int slots = (s.columns + 1) / 2;
    float* const dots = row_sums + 4 * p.rows;  // [C]
    team.each_warp(n, [&](int t, auto& warp) {
      const int64_t place = row_of(slot, t);
      float dot = 0;
      for (int r = 0; r < s.rank; ++r) {
        const int i = t * s.rank + r;
        const bool handed = keys && last && t == n - 1 && final_k.data;
        dot += warp.sum(slots, [&](int pair) {
          const PairColumns c = pair_columns(s, pair);
          const bool both = c.w < s.columns;
          const float x = widen(rows[i * ld_n + c.u]);
          const float w = both ? widen(rows[i * ld_n + c.w]) : 0.0f;
          float gx = gradient[i * wide_n + c.u];
          float gw = both ? gradient[i * wide_n + c.w] : 0.0f;
          const float own = x * gx + w * gw;
          if (pair < s.pairs) {
            const float torque = x * gw - w * gx;
            float& sum = turn[t * s.pairs + pair];
            sum = keys || r > 0 ? sum + torque : torque;
          }
          if (handed) {
            gx += load(final_k, cuda::at(final_k, u.row, r, u.head, c.u));
            if (both) gw += load(final_k, cuda::at(final_k, u.row, r, u.head, c.w));
          }
          if (pair < s.pairs) {
            const float cos = this->cosine(t, pair), sin = this->sine(t, pair), g = gx;
            gx = g * cos + gw * sin;
            gw = gw * cos - g * sin;
          }
          gradient[i * wide_n + c.u] = gx;
          if (both) gradient[i * wide_n + c.w] = gw;
          if (to) {
            float* own_row = to + ((place * s.rank + r) * s.heads + u.head) * s.columns;
            own_row[c.u] = gx;
            if (both) own_row[c.w] = gw;
          }
          return own;
        });
      }
      if (warp.leads()) dots[t] = keys ? dots[t] - dot : dot;
    });
    team.sync();
    const View& bias = keys ? a.grad.k_bias : a.grad.q_bias;
    if (bias.data) {
      double* const sum_to = parameters() + (keys ? s.rank * s.columns : 0);
      team.each_warp(s.rank, [&](int r, auto& warp) {
        warp.each(s.columns, [&](int c) {
          float sum = 0;
          for (int t = 0; t < n; ++t) sum += gradient[(t * s.rank + r) * wide_n + c];
          sum_to[r * s.columns + c] += sum;
        });
      });
      team.sync();
    }
  }

  // A token of the slice among those of the wave.
  TALEA_SCAN int64_t row_of(int64_t slot, int t) const {
    return ((u.sequence - wave.first) * wave.slice_chunks + slot) * s.chunk + t;
  }

  // <Hout, E> in `energy`, torque(Hout, E) in sums [A]; behind the last chunk also what it turns.
  TALEA_SCAN void anchor(const float* behind, bool last) {
    energy = team.sum(s.values, s.columns, [&](int c, int i) {
      return static_cast<double>(behind[c * p.padded_columns + i] * wide[c * wide_n + i]);
    });
    constexpr int parts = 4;
    float* const partial = this->sums;
    team.each(parts * s.pairs, [&](int index) {
      const int part = index / s.pairs, i = index - part * s.pairs;
      const PairColumns at = pair_columns(s, i);
      float sum = 0;
      for (int c = part; c < s.values; c += parts) {
        const float* h = behind + c * p.padded_columns;
        const float* e = wide + c * wide_n;
        sum += h[at.u] * e[at.w] - h[at.w] * e[at.u];
      }
      partial[index] = sum;
    });
    team.sync();
    float* const ends = b.ends + number_ * 2 * s.pairs;
    const StateViews& d = a.last;
    team.each(s.pairs, [&](int i) {
      float sum = 0;
      for (int part = 0; part < parts; ++part) sum += partial[part * s.pairs + i];
      if (last) {
        ends[i] = sum;
        float more = load_or(0, d.angle, cuda::at(d.angle, u.row, u.head, i));
        const PairColumns at = pair_columns(s, i);
        for (int r = 0; d.k.data && r < s.rank; ++r) {
          const int row = (n - 1) * s.rank + r;
          more += widen(k[row * ld_n + at.u]) * load(d.k, cuda::at(d.k, u.row, r, u.head, at.w)) -
                  widen(k[row * ld_n + at.w]) * load(d.k, cuda::at(d.k, u.row, r, u.head, at.u));
        }
        ends[s.pairs + i] = more;
      }
      // From here on: all that turns with the token.
      float all = (ends[i] - sum) + ends[s.pairs + i];
      for (int t = n - 1; t >= 0; --t) turn[t * s.pairs + i] = all += turn[t * s.pairs + i];
    });
    team.sync();
  }

  TALEA_SCAN void store_token(const Pending& x, int64_t token, double db) {
    const GradientViews& d = a.grad;
    if (d.dt.data)
      store(d.dt, cuda::at(d.dt, u.batch, u.head, u.begin + token),
            static_cast<float>(x.ddt + static_cast<double>(x.other) * db));
    if (d.trap.data)
      store(d.trap, cuda::at(d.trap, u.batch, u.head, u.begin + token),
            static_cast<float>(static_cast<double>(x.lambda) * static_cast<double>(x.other) *
                               static_cast<double>(x.dt) * (x.dgamma - db)));
  }

  // Gradients of the steps, decays and angles of the chunk's tokens.
  TALEA_SCAN void token_gradients(int64_t slot) {
    const GradientViews& d = a.grad;
    constexpr float pi = 3.14159265358979f;
    float* const dots = row_sums + 4 * p.rows;
    float* const by_rate = row_sums + 5 * p.rows;  // [C]
    float* const ds = row_sums + 6 * p.rows;       // [C] each
    float* const same = row_sums + 7 * p.rows;
    team.each_warp(n, [&](int t, auto& warp) {
      const int64_t token = u.begin + first + t, place = row_of(slot, t);
      const float sum = warp.sum(s.pairs, [&](int i) {
        if (!a.angles.data) return 0.0f;
        const float whole = turn[t * s.pairs + i], rate = tanh[t * s.pairs + i];
        const auto slope =
            static_cast<float>(1 - static_cast<double>(rate) * static_cast<double>(rate));
        const float angle = whole * tok(Base::dt, t) * pi * slope;
        if (b.dangles)
          b.dangles[(place * s.heads + u.head) * s.pairs + i] = angle;
        else if (d.angles.data)
          store(d.angles, cuda::at(d.angles, u.batch, token, u.head, i), angle);
        return whole * rate;
      });
      if (!warp.leads()) return;
      by_rate[t] = sum;
      float far = 0, near = 0;
      for (int j = t * s.rank; j < (t + 1) * s.rank; ++j) {
        far += row_sums[p.rows + j] + row_sums[3 * p.rows + j];
        near += row_sums[2 * p.rows + j];
      }
      ds[t] = far;
      same[t] = near;
    });
    team.sync();
    if (d.adt.data)
      team.prefix(
          n, [&](int t) { return static_cast<double>(dots[n - 1 - t]); },
          [&](int from_end, double sum) {
            const int t = n - 1 - from_end;
            const bool reset = tok(Base::adt, t) <= -128.0f;
            store(d.adt, cuda::at(d.adt, u.batch, u.head, u.begin + first + t),
                  reset ? 0.0f : static_cast<float>(energy + sum));
          });
    Pending* const waits = b.pending + number_;
    team.each(n, [&](int t) {
      Pending x;
      x.lambda = tok(Base::lambda, t);
      x.other = tok(Base::other, t);
      x.dt = tok(Base::dt, t);
      x.dgamma = static_cast<double>(ds[t]) + static_cast<double>(same[t]);
      x.ddt = static_cast<double>(x.lambda) * x.dgamma +
              3.14159265358979323846 * static_cast<double>(by_rate[t]);
      if (t > 0) return store_token(x, first + t, ds[t - 1]);
      // The first token of the chunk behind has waited for the last key of this one.
      if (waits->waits) store_token(*waits, first + n, ds[n - 1]);
      x.waits = 1;
      *waits = x;
      if (first == 0 && a.grad.initial.angle.data)
        for (int i = 0; i < s.pairs; ++i)
          store(a.grad.initial.angle, cuda::at(a.grad.initial.angle, u.row, u.head, i), turn[i]);
    });
    team.sync();
  }

  // E before the chunk = decay E + (e^L dO)^T Q
  TALEA_SCAN void advance_back() {
    const float whole = this->decay();
    team.product(
        p.padded_values, all(p.padded_columns), all(p.rows), Columns<T>{this->scaled, ld_p},
        Columns<T>{q, ld_n}, [&](int c, int i) { return left_of(whole, wide[c * wide_n + i]); },
        [&](int c, int i, float x) { wide[c * wide_n + i] = x; });
    team.sync();
  }

  // What the first token hands to the initial states.
  TALEA_SCAN void initial_gradients() {
    const StateViews &in = a.initial, &d = a.grad.initial;
    Pending* const waits = b.pending + number_;
    const float b0 = waits->other * waits->dt;
    float* const own = y;  // [R, Pp]: E k_in
    if (in.k.data)
      team.each_warp(s.rank * s.values, [&](int index, auto& warp) {
        const int r = index / s.values, c = index - r * s.values;
        const float sum = warp.sum(s.columns, [&](int i) {
          return wide[c * wide_n + i] * load(in.k, cuda::at(in.k, u.row, r, u.head, i));
        });
        if (warp.leads()) own[r * wide_p + c] = sum;
      });
    team.sync();
    double* const to = parameters() + 2 * s.rank * s.columns;
    team.each(s.values, [&](int c) {
      float dv = 0;
      const float before = load_or(0, in.v, cuda::at(in.v, u.row, u.head, c));
      for (int r = 0; in.k.data && r < s.rank; ++r) {
        const float x = own[r * wide_p + c];
        dv += b0 * x * projected(a.mimo_v, r, c);
        to[r * s.values + c] += static_cast<double>(b0 * x * before);
      }
      if (d.v.data) store(d.v, cuda::at(d.v, u.row, u.head, c), dv);
    });
    if (d.k.data)
      team.each_warp(s.rank, [&](int r, auto& warp) {
        warp.each(s.columns, [&](int i) {
          float dk = 0;
          for (int c = 0; in.v.data && c < s.values; ++c)
            dk += b0 * wide[c * wide_n + i] * load(in.v, cuda::at(in.v, u.row, u.head, c)) *
                  projected(a.mimo_v, r, c);
          store(d.k, cuda::at(d.k, u.row, r, u.head, i), dk);
        });
      });
    if (d.ssm.data)
      team.each_warp(s.values, [&](int c, auto& warp) {
        warp.each(s.columns, [&](int i) {
          store(d.ssm, cuda::at(d.ssm, u.row, u.head, c, i), wide[c * wide_n + i]);
        });
      });
    team.each(1, [&](int) {
      double db = 0;
      for (int c = 0; in.k.data && in.v.data && c < s.values; ++c)
        for (int r = 0; r < s.rank; ++r)
          db += static_cast<double>(load(in.v, cuda::at(in.v, u.row, u.head, c)) *
                                    projected(a.mimo_v, r, c) * own[r * wide_p + c]);
      store_token(*waits, 0, db);
    });
    team.sync();
  }

  const UnitBuffers& b;
  const Wave& wave;
  T *d_y, *weights, *upstream;
  float *scores, *products, *gradient, *tanh, *turn, *row_sums, *wide;
  int ld_n, ld_p, ld_m, wide_n, wide_p, wide_m;
  int64_t number_ = 0;
  double energy = 0;
};

}  // namespace talea::mamba3::cuda
