// What: one head of one sequence on one block: reading a chunk, its rows, and the state behind it.
// Why: forward, the states of backward and its gradients share how a chunk is read.
// Never: reads a row that belongs to no token of the chunk, or stores rotated rows.
//
// Team is a block of threads (team.cuh) or, in a test, one thread of a host. Between two phases
// that share an array stands sync().
#pragma once

#include "ops/mamba3/cuda/numbers.hpp"

namespace talea::mamba3::cuda {

struct Unit {
  int64_t number = 0, sequence = 0, batch = 0, row = 0, begin = 0, tokens = 0;
  int head = 0, group = 0;
};

TALEA_SCAN Unit unit_of(const Args& a, int64_t sequence, int head) {
  const Sizes& s = a.size;
  Unit u;
  u.sequence = sequence;
  u.head = head;
  u.group = static_cast<int>(group_of(s, head));
  u.row = u.batch = sequence;
  u.tokens = s.tokens;
  if (s.step) u.row = a.ends[sequence];
  if (s.packed) {
    u.batch = 0;
    u.begin = a.ends[sequence];
    u.tokens = a.ends[sequence + 1] - u.begin;
  }
  return u;
}

// The checkpoints of a sequence lie behind those of the sequences before.
TALEA_SCAN float* saved_states(const Args& a, const Unit& u) {
  if (!a.saved) return nullptr;
  const Sizes& s = a.size;
  const auto kept = [&](int64_t tokens) {
    return (chunks_of(s, tokens) + s.segment - 1) / s.segment;
  };
  const int64_t before = s.packed ? a.kept[u.sequence] : u.sequence * kept(s.tokens);
  return a.saved + (before * s.heads + u.head * kept(u.tokens)) * s.columns * s.values;
}

template <class Team, class T>
class Walk {
 public:
  TALEA_SCAN Walk(Team& team, const Args& args, const ChunkPlaces& places, char* shared,
                  char* scratch)
      : team(team), a(args), s(args.size), p(places), shared_(shared), scratch_(scratch) {
    tokens_ = at<float>(p.tokens);
    turns = at<uint64_t>(p.turns);
    angle = at<uint64_t>(p.angle);
    tainted = at<int>(p.tainted);
    q = at<T>(p.q), k = at<T>(p.k), v = at<T>(p.v), scaled = at<T>(p.scaled);
    seen = at<T>(p.seen), state = at<T>(p.state);
    y = at<float>(p.y), wide_state = at<float>(p.wide_state);
    sums = at<float>(p.sums);
  }

  TALEA_SCAN void begin(const Unit& unit) { u = unit; }
  TALEA_SCAN int64_t chunks() const { return chunks_of(s, u.tokens); }

  // [C + 1] numbers of the chunk's tokens and the one behind them.
  enum Token { dt, lambda, other, gamma, b, step, high, low, left, right, key, adt, token_rows };
  TALEA_SCAN float& tok(Token which, int t) { return tokens_[which * (s.chunk + 1) + t]; }

  // Steps, gates and decays.
  TALEA_SCAN void read_tokens(int64_t chunk) {
    first = chunk * s.chunk;
    n = static_cast<int>(u.tokens - first < s.chunk ? u.tokens - first : s.chunk);
    m = n * s.rank;
    const bool more = first + n < u.tokens;
    const int64_t dt0 = cuda::at(a.dt, u.batch, u.head, u.begin + first);
    const int64_t trap0 = cuda::at(a.trap, u.batch, u.head, u.begin + first);
    const int64_t adt0 = cuda::at(a.adt, u.batch, u.head, u.begin + first);
    team.each(s.chunk + 1, [&](int t) {
      const bool known = t < n || (t == n && more);
      const float own = known ? load(a.dt, dt0 + t * a.dt.stride[2]) : 0.0f;
      const float logit = known ? load(a.trap, trap0 + t * a.trap.stride[2]) : 0.0f;
      float decay = t < n ? load(a.adt, adt0 + t * a.adt.stride[2]) : 0.0f;
      tok(adt, t) = decay;
      tok(dt, t) = own;
      tok(lambda, t) = sigmoid(logit);
      tok(other, t) = sigmoid(-logit);
      tok(gamma, t) = tok(lambda, t) * own;
      tok(b, t) = known ? tok(other, t) * own : 0.0f;
    });
    team.sync();
    team.prefix(
        s.chunk + 1,
        [&](int t) -> double {
          const float x = tok(adt, t);
          return t >= n ? 0.0 : x <= -128.0f ? -128.0 : static_cast<double>(x);
        },
        [&](int t, double sum) {
          const auto top = static_cast<float>(sum);
          tok(high, t) = top;
          tok(low, t) =
              fabsf(top) <= 3.0e38f ? static_cast<float>(sum - static_cast<double>(top)) : 0.0f;
        });
    team.sync();
    const float end_high = tok(high, n - 1), end_low = tok(low, n - 1);
    team.each(s.chunk + 1, [&](int t) {
      tok(step, t) = t < n ? tok(gamma, t) + tok(b, t + 1) : 0.0f;
      tok(left, t) = expf(tok(high, t) + tok(low, t));
      tok(right, t) = expf((end_high - tok(high, t)) + (end_low - tok(low, t)));
      tok(key, t) = tok(right, t) * tok(step, t);
    });
    team.sync();
  }

  TALEA_SCAN float decay() { return tok(left, n - 1); }  // of the whole chunk

  // e^(L_i - L_j); the caller has chosen tokens i > j.
  TALEA_SCAN float decay_of(int i, int j) {
    return expf((tok(high, i) - tok(high, j)) + (tok(low, i) - tok(low, j)));
  }

  TALEA_SCAN void start_turns() {
    team.each(s.pairs, [&](int i) {
      uint64_t turn = 0;
      if (a.initial.angle.data)
        turn = turn_of_radians(load(a.initial.angle, cuda::at(a.initial.angle, u.row, u.head, i)));
      tainted[i] = turn == no_turn;
      turns[i] = turn == no_turn ? 0 : turn;
    });
    team.sync();
  }

  // Cosine and sine of each token and pair, and the turns behind the chunk. tanh: [C, A] or null.
  TALEA_SCAN void read_turns(float* tanh) {
    if (s.pairs == 0) return;
    const View& from = a.angles;
    const int64_t first_at = cuda::at(from, u.batch, u.begin + first, u.head);
    team.each_warp(n, [&](int t, auto& warp) {
      const float half = 0.5f * tok(dt, t);
      warp.each(s.pairs, [&](int i) {
        uint64_t turn = 0;
        float rate = 0;
        if (from.data) {
          rate = tanhf(load(from, first_at + t * from.stride[1] + i * from.stride[3]));
          turn = to_turn(rate * half);
        }
        angle[t * s.pairs + i] = turn;
        if (tanh) tanh[t * s.pairs + i] = rate;
      });
    });
    team.sync();
    team.each(s.pairs, [&](int i) {
      uint64_t sum = turns[i];
      int lost = tainted[i] ? 0 : s.chunk + 1;  // from this token on
      for (int t = 0; t < n; t += 8) {
        uint64_t some[8];
        for (int j = 0; j < 8; ++j) some[j] = t + j < n ? angle[(t + j) * s.pairs + i] : 0;
        for (int j = 0; j < 8; ++j) {
          if (some[j] == no_turn)
            lost = lost < t + j ? lost : t + j;
          else
            sum += some[j];
          if (t + j < n) angle[(t + j) * s.pairs + i] = sum;
        }
      }
      turns[i] = sum;
      tainted[i] = lost <= n;
      lost_from()[i] = lost;
    });
    team.sync();
    team.each_warp(n, [&](int t, auto& warp) {
      warp.each(s.pairs, [&](int i) {
        float sine, cosine;
        sine_cosine(angle[t * s.pairs + i], sine, cosine);
        if (t >= lost_from()[i]) sine = cosine = NAN;
        float* both = reinterpret_cast<float*>(angle + t * s.pairs + i);
        both[0] = cosine;
        both[1] = sine;
      });
    });
    team.sync();
  }

  TALEA_SCAN float cosine(int t, int i) {
    return reinterpret_cast<const float*>(angle + t * s.pairs + i)[0];
  }
  TALEA_SCAN float sine(int t, int i) {
    return reinterpret_cast<const float*>(angle + t * s.pairs + i)[1];
  }

  // Biased, turned and rounded rows (token, r); zeros behind the last.
  TALEA_SCAN void read_rows(const View& from, const View& bias, T* to) {
    const int stride = p.padded_columns + p.pad, slots = (s.columns + 1) / 2;
    const int64_t from0 = cuda::at(from, u.batch, u.begin + first, 0, u.group);
    team.each_warp(p.rows, [&](int row, auto& warp) {
      T* own = to + row * stride;
      if (row >= m) {
        warp.each(p.padded_columns, [&](int c) { narrow(0.0f, own[c]); });
        return;
      }
      const int t = row / s.rank, r = row - t * s.rank;
      const int64_t place = from0 + t * from.stride[1] + r * from.stride[2];
      warp.each(slots, [&](int i) {
        float x, w;
        const PairColumns c = turned(from, place, bias, r, t, i, x, w);
        narrow(x, own[c.u]);
        if (c.w < s.columns) narrow(w, own[c.w]);
      });
      warp.each(p.padded_columns - s.columns, [&](int c) { narrow(0.0f, own[s.columns + c]); });
    });
  }

  // The pair of columns of one row in fp32.
  TALEA_SCAN PairColumns turned(const View& from, int64_t place, const View& bias, int r, int t,
                                int i, float& x, float& w) {
    const PairColumns c = pair_columns(s, i);
    x = load(from, place + c.u * from.stride[4]);
    w = c.w < s.columns ? load(from, place + c.w * from.stride[4]) : 0.0f;
    if (bias.data) {
      x += load(bias, cuda::at(bias, u.head, r, c.u));
      if (c.w < s.columns) w += load(bias, cuda::at(bias, u.head, r, c.w));
    }
    if (i < s.pairs) {
      const float cos = cosine(t, i), sin = sine(t, i);
      const float before = x;
      x = before * cos - w * sin;
      w = before * sin + w * cos;
    }
    return c;
  }

  TALEA_SCAN float raw_value(int t, int c) {
    return load(a.v, cuda::at(a.v, u.batch, u.begin + first + t, u.head, c));
  }
  TALEA_SCAN float projected(const View& by, int r, int c) {
    return by.data ? load(by, cuda::at(by, u.head, r, c)) : 1.0f;
  }

  // v_tr, and where asked those weighed for the state behind the chunk.
  TALEA_SCAN void read_values(bool weighed) {
    const int stride = p.padded_values + p.pad;
    team.each_warp(p.rows, [&](int row, auto& warp) {
      const bool inside = row < m;
      const int t = row / s.rank, r = row - t * s.rank;
      const float weight = inside ? tok(key, t) : 0.0f;
      warp.each(p.padded_values, [&](int c) {
        const float x = inside && c < s.values ? raw_value(t, c) * projected(a.mimo_v, r, c) : 0.0f;
        narrow(x, v[row * stride + c]);
        if (weighed) narrow(inside ? weight * x : 0.0f, scaled[row * stride + c]);
      });
    });
  }

  // h before the first token, with the token held over from before.
  TALEA_SCAN void start_state() {
    const StateViews& f = a.initial;
    const bool held = f.k.data && f.v.data;
    const float b0 = held ? load(a.dt, cuda::at(a.dt, u.batch, u.head, u.begin)) *
                                sigmoid(-load(a.trap, cuda::at(a.trap, u.batch, u.head, u.begin)))
                          : 0.0f;
    const int stride = p.padded_columns + 4;
    team.each_warp(p.padded_values, [&](int c, auto& warp) {
      warp.each(p.padded_columns, [&](int i) {
        float x = 0;
        if (c < s.values && i < s.columns) {
          x = load_or(0, f.ssm, cuda::at(f.ssm, u.row, u.head, c, i));
          for (int r = 0; held && r < s.rank; ++r)
            x += b0 * load(f.v, cuda::at(f.v, u.row, u.head, c)) * projected(a.mimo_v, r, c) *
                 load(f.k, cuda::at(f.k, u.row, r, u.head, i));
        }
        wide_state[c * stride + i] = x;
      });
    });
    team.sync();
  }

  // The operands of a state that lies in fp32 at `from`, its rows `stride` apart.
  TALEA_SCAN void to_operands(const float* from, int stride, T* to) {
    if (static_cast<const void*>(from) == static_cast<const void*>(to)) return;
    team.each_warp(p.padded_values, [&](int c, auto& warp) {
      warp.each(p.padded_columns, [&](int i) {
        narrow(from[c * stride + i], to[c * (p.padded_columns + p.pad) + i]);
      });
    });
  }

  // h behind the chunk: wide_state = decay wide_state + scaled^T K.
  TALEA_SCAN void advance() {
    const float whole = decay();
    const int stride = p.padded_columns + 4;
    team.product(
        p.padded_values, Span{Span::all, p.padded_columns, 1}, Span{Span::all, p.rows, 1},
        Columns<T>{scaled, p.padded_values + p.pad}, Columns<T>{k, p.padded_columns + p.pad},
        [&](int c, int i) { return left_of(whole, wide_state[c * stride + i]); },
        [&](int c, int i, float x) { wide_state[c * stride + i] = x; });
    team.sync();
  }

  // The state as others keep it, [Pp, Np].
  TALEA_SCAN void put_state(float* to, int64_t stride, int values, int columns) {
    team.each_warp(values, [&](int c, auto& warp) {
      warp.each(columns,
                [&](int i) { to[c * stride + i] = wide_state[c * (p.padded_columns + 4) + i]; });
    });
  }
  TALEA_SCAN void take_state(const float* from, int64_t stride, int values, int columns) {
    team.each_warp(p.padded_values, [&](int c, auto& warp) {
      warp.each(p.padded_columns, [&](int i) {
        wide_state[c * (p.padded_columns + 4) + i] =
            c < values && i < columns ? from[c * stride + i] : 0.0f;
      });
    });
    team.sync();
  }
  TALEA_SCAN void put_turns(uint64_t* to, int* taints) {
    team.each(s.pairs, [&](int i) { to[i] = turns[i], taints[i] = tainted[i]; });
  }
  TALEA_SCAN void take_turns(const uint64_t* from, const int* taints) {
    team.each(s.pairs, [&](int i) { turns[i] = from[i], tainted[i] = taints[i]; });
    team.sync();
  }

  // What an empty sequence is handed goes through; of gradients the other way.
  TALEA_SCAN void pass_through(const StateViews& from, const StateViews& to, bool reduce) {
    team.each(s.pairs, [&](int i) {
      const float x = load_or(0, from.angle, cuda::at(from.angle, u.row, u.head, i));
      const uint64_t turn = turn_of_radians(x);
      const float reduced = turn == no_turn ? NAN : radians(turn);
      if (to.angle.data)
        store(to.angle, cuda::at(to.angle, u.row, u.head, i), reduce ? reduced : x);
    });
    team.each_warp(s.values, [&](int c, auto& warp) {
      warp.each(s.columns, [&](int i) {
        if (to.ssm.data)
          store(to.ssm, cuda::at(to.ssm, u.row, u.head, c, i),
                load_or(0, from.ssm, cuda::at(from.ssm, u.row, u.head, c, i)));
      });
    });
    team.each(s.values, [&](int c) {
      if (to.v.data)
        store(to.v, cuda::at(to.v, u.row, u.head, c),
              load_or(0, from.v, cuda::at(from.v, u.row, u.head, c)));
    });
    team.each_warp(s.rank, [&](int r, auto& warp) {
      warp.each(s.columns, [&](int i) {
        if (to.k.data)
          store(to.k, cuda::at(to.k, u.row, r, u.head, i),
                load_or(0, from.k, cuda::at(from.k, u.row, r, u.head, i)));
      });
    });
  }

  template <class X>
  TALEA_SCAN X* at(Place place) {
    return reinterpret_cast<X*>(place.at >= 0 ? shared_ + place.at : scratch_ - 1 - place.at);
  }
  TALEA_SCAN int* lost_from() { return tainted + s.pairs; }

  Team& team;
  const Args& a;
  const Sizes& s;
  const ChunkPlaces& p;
  Unit u{};
  int64_t first = 0;  // token of the chunk within the sequence
  int n = 0, m = 0;   // tokens, rows

  float* tokens_;
  uint64_t *turns, *angle;
  int* tainted;  // [A] flags, then [A] tokens
  T *q, *k, *v, *scaled, *seen, *state;
  float *y, *wide_state, *sums;

 private:
  char *shared_, *scratch_;
};

}  // namespace talea::mamba3::cuda
