// What: reading a chunk of one head of one sequence: steps, decays, turns, and rows as operands.
// Why: forward, the states of backward and its gradients share how a chunk is read.
// Never: reads a row that belongs to no token of the chunk, or stores rotated rows.
//
// Team is a block of threads (team.cuh) or, in a test, one thread of a host. Between two phases
// that share an array stands sync().
#pragma once

#include "ops/mamba3/rows/numbers.hpp"

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
  if (mutant(Mutant::m3_1_groups_as_heads)) u.group = head % s.groups;
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

// The head of a sequence of which a stretch or a chunk of the schedule is a part.
template <class Part>
TALEA_SCAN Unit unit_of(const Args& a, const Part& part, int head) {
  Unit u;
  u.sequence = u.row = part.sequence;
  u.head = head;
  u.group = static_cast<int>(group_of(a.size, head));
  if (mutant(Mutant::m3_1_groups_as_heads)) u.group = head % a.size.groups;
  u.begin = part.begin;
  u.tokens = part.tokens;
  return u;
}

// What turns a pair before the first token, or no_turn.
TALEA_SCAN uint64_t first_turn(const Args& a, const Unit& u, int i) {
  const View& from = a.initial.angle;
  uint64_t turn = from.data ? turn_of_radians(load(from, at(from, u.row, u.head, i))) : 0;
  if (a.turns_before && turn != no_turn)
    turn += a.turns_before[(u.sequence * a.size.heads + u.head) * a.size.pairs + i];
  return turn;
}

// The checkpoints of a sequence lie behind those of the sequences before.
TALEA_SCAN float* saved_states(const Args& a, const Unit& u) {
  if (!a.saved) return nullptr;
  const Sizes& s = a.size;
  const auto kept = [&](int64_t tokens) {
    return (chunks_of(s, tokens) + s.kept_every - 1) / s.kept_every;
  };
  const int64_t before = s.packed ? a.kept[u.sequence] : u.sequence * kept(s.tokens);
  return a.saved + (before * s.heads + u.head * kept(u.tokens)) * s.columns * s.values;
}

template <class Team, class T>
class Chunk {
 public:
  TALEA_SCAN Chunk(Team& of, const Args& args, const ChunkPlaces& places, char* shared,
                   char* scratch)
      : team(of), a(args), s(args.size), p(places), shared_(shared), scratch_(scratch) {
    tokens_ = at<float>(p.tokens);
    turns = at<uint64_t>(p.turns);
    angle = at<uint64_t>(p.angle);
    tainted = at<int>(p.tainted);
    q = at<T>(p.q), k = at<T>(p.k), v = at<T>(p.v), scaled = at<T>(p.scaled);
    seen = at<T>(p.seen), state = at<T>(p.state);
    y = at<float>(p.y), wide_state = at<float>(p.wide_state);
    sums = at<float>(p.sums);
    decays = at<float>(p.decays);
    q_bias = at<float>(p.parameters);
    k_bias = q_bias + s.rank * s.columns;
    mimo_v = k_bias + s.rank * s.columns;
    mimo_z = mimo_v + s.rank * s.values;
    mimo_out = mimo_z + s.rank * s.values;
    weight = mimo_out + s.rank * s.values;
  }

  // The head's parameters, neutral where absent.
  TALEA_SCAN void begin(const Unit& unit) {
    u = unit;
    const int rn = s.rank * s.columns, rp = s.rank * s.values;
    const auto rows = [&](const View& from, int count, int width, float neutral, float* to) {
      team.each(count, [&](int i) {
        const int r = i / width;
        to[i] = read_or(neutral, from, cuda::at(from, u.head, r, i - r * width));
      });
    };
    rows(a.q_bias, rn, s.columns, 0, q_bias);
    rows(a.k_bias, rn, s.columns, 0, k_bias);
    rows(a.mimo_v, rp, s.values, 1, mimo_v);
    rows(a.mimo_z, rp, s.values, 1, mimo_z);
    rows(a.mimo_out, rp, s.values, 1, mimo_out);
    team.each(s.values, [&](int c) {
      weight[c] = read_or(1, a.norm_weight, cuda::at(a.norm_weight, u.head, c));
    });
    skip = read_or(0, a.d, cuda::at(a.d, u.head));
    team.sync();
  }
  TALEA_SCAN int64_t chunks() const { return chunks_of(s, u.tokens); }
  TALEA_SCAN int token_of(int row) const {
    return static_cast<int>((static_cast<unsigned>(row) * s.reciprocal) >> 16);
  }

  // [C + 1] numbers of the chunk's tokens and the one behind them.
  enum Token { dt, lambda, other, gamma, b, step, high, low, left, right, key, adt, token_rows };
  TALEA_SCAN float& tok(Token which, int t) { return tokens_[which * (s.chunk + 1) + t]; }

  // Steps, gates and decays; with `pairs` those of each token to each earlier one.
  TALEA_SCAN void read_tokens(int64_t chunk, bool pairs) {
    first = chunk * s.chunk;
    n = static_cast<int>(u.tokens - first < s.chunk ? u.tokens - first : s.chunk);
    m = n * s.rank;
    bool more = first + n < u.tokens;
    if (mutant(Mutant::m3_b_of_the_next_sequence)) more = u.begin + first + n < s.tokens;
    const int64_t dt0 = cuda::at(a.dt, u.batch, u.head, u.begin + first);
    const int64_t trap0 = cuda::at(a.trap, u.batch, u.head, u.begin + first);
    const int64_t adt0 = cuda::at(a.adt, u.batch, u.head, u.begin + first);
    team.each(s.chunk + 1, [&](int t) {
      const bool known = t < n || (t == n && more);
      const float own = known ? read(a.dt, dt0 + t * a.dt.stride[2]) : 0.0f;
      const float logit = known ? read(a.trap, trap0 + t * a.trap.stride[2]) : 0.0f;
      tok(adt, t) = t < n ? read(a.adt, adt0 + t * a.adt.stride[2]) : 0.0f;
      tok(dt, t) = own;
      const bool exchanged = mutant(Mutant::m3_b_and_gamma_exchanged);
      tok(lambda, t) = sigmoid(exchanged ? -logit : logit);
      tok(other, t) = sigmoid(exchanged ? logit : -logit);
      tok(gamma, t) = tok(lambda, t) * own;
      tok(b, t) = known ? tok(other, t) * own : 0.0f;
    });
    team.sync();
    team.prefix(
        s.chunk + 1,
        [&](int t) -> double {
          float x = tok(adt, t);
          if (mutant(Mutant::m3_20_decay_clamped)) x = x > 0 ? 0.0f : x;
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
    if (pairs)
      team.grid(n, n, [&](int t, int earlier) {
        if (earlier < t)
          decays[t * s.chunk + earlier] =
              expf((tok(high, t) - tok(high, earlier)) + (tok(low, t) - tok(low, earlier)));
      });
    team.sync();
  }

  TALEA_SCAN float decay() { return tok(left, n - 1); }  // of the whole chunk

  TALEA_SCAN void start_turns() {
    team.each(s.pairs, [&](int i) {
      const uint64_t turn = first_turn(a, u, i);
      tainted[i] = turn == no_turn;
      turns[i] = turn == no_turn ? 0 : turn;
    });
    team.sync();
  }

  // Cosine and sine of each token and pair, and the turns behind the chunk. given: [C, A] or null,
  // for the angles as they are.
  TALEA_SCAN void read_turns(float* given, bool angles = true) {
    if (s.pairs == 0) return;
    const View& from = a.angles;
    const int64_t first_at = cuda::at(from, u.batch, u.begin + first, u.head);
    team.grid(
        n, s.pairs,
        [&](int t, int i) {
          return from.data ? bits_at(from, first_at + t * from.stride[1] + i * from.stride[3]) : 0u;
        },
        [&](int t, int i, uint32_t bits) {
          const float own = from.data ? number_of(from.dtype, bits) : 0.0f;
          angle[t * s.pairs + i] = from.data ? to_turn(tanhf(own) * (0.5f * tok(dt, t))) : 0;
          if (given) given[t * s.pairs + i] = own;
        });
    team.sync();
    team.each(s.pairs, [&](int i) { add_turns(i); });
    team.sync();
    if (!angles) return;
    team.grid(n, s.pairs, [&](int t, int i) {
      float sine, cosine;
      sine_cosine(angle[t * s.pairs + i], sine, cosine);
      if (t >= lost_from()[i]) sine = cosine = NAN;
      float* both = reinterpret_cast<float*>(angle + t * s.pairs + i);
      both[0] = cosine;
      both[1] = sine;
    });
    team.sync();
  }

  TALEA_SCAN void add_turns(int i) {
    uint64_t sum = turns[i];
    int lost = tainted[i] ? 0 : s.chunk + 1;  // from this token on
    TALEA_ROLLED
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
  }

  TALEA_SCAN float cosine(int t, int i) {
    return reinterpret_cast<const float*>(angle + t * s.pairs + i)[0];
  }
  TALEA_SCAN float sine(int t, int i) {
    return reinterpret_cast<const float*>(angle + t * s.pairs + i)[1];
  }
  TALEA_SCAN void rotate(int t, int i, float& x, float& w) {
    if (i >= s.pairs) return;
    const float cos = cosine(t, i), sin = sine(t, i), before = x;
    x = before * cos - w * sin;
    w = before * sin + w * cos;
  }

  // Of a tensor that has the dtype of q, which is known where operands are bf16.
  static TALEA_SCAN DType own_dtype(const View& v) {
    return sizeof(T) == 2 ? DType::bf16 : v.dtype;
  }
  static TALEA_SCAN uint32_t own_bits(View v, int64_t place) {
    v.dtype = own_dtype(v);
    return bits_at(v, place);
  }
  static TALEA_SCAN float own_number(const View& v, uint32_t bits) {
    return number_of(own_dtype(v), bits);
  }

  // Biased, turned and rounded rows (token, r); zeros behind the last.
  TALEA_SCAN void read_rows(bool queries) {
    TALEA_ROLLED
    for (int which = 0; which < (queries ? 2 : 1); ++which) {
      View from;
      from.data = which ? a.q.data : a.k.data;
      from.dtype = own_dtype(a.q);
      for (int axis = 0; axis < 5; ++axis)
        from.stride[axis] = which ? a.q.stride[axis] : a.k.stride[axis];
      read_rows_of(from, which ? q_bias : k_bias, which ? q : k);
    }
  }
  TALEA_SCAN void read_rows_of(const View& from, const float* bias, T* to) {
    const int stride = p.padded_columns + p.pad;
    const int64_t from0 = cuda::at(from, u.batch, u.begin + first, 0, u.group);
    if (s.even_rows) {
      const int half = s.halves ? s.columns / 2 : 2;
      struct Four {
        TwoBits x, w;
      };
      team.template grid<4>(
          p.rows, p.padded_columns / 4,
          [&](int row, int i) -> Four {
            row = row < m ? row : 0;
            i = 4 * i < s.columns ? i : 0;
            const int t = token_of(row), r = row - t * s.rank, c = s.halves ? 2 * i : 4 * i;
            const int64_t place = from0 + t * from.stride[1] + r * from.stride[2] + c;
            return {two_bits_at(from, place), two_bits_at(from, place + half)};
          },
          [&](int row, int i, Four bits) {
            T* own = to + row * stride;
            if (row >= m || 4 * i >= s.columns) {
              put_two(own + 4 * i, {0, 0}), put_two(own + 4 * i + 2, {0, 0});
              return;
            }
            struct {
              Two x, w;
            } f = {two_of(from.dtype, bits.x), two_of(from.dtype, bits.w)};
            const int t = token_of(row), r = row - t * s.rank, c = s.halves ? 2 * i : 4 * i;
            const float* by = bias + r * s.columns + c;
            f.x.a += by[0], f.x.b += by[1], f.w.a += by[half], f.w.b += by[half + 1];
            if (s.halves) {
              rotate(t, 2 * i, f.x.a, f.w.a), rotate(t, 2 * i + 1, f.x.b, f.w.b);
            } else {
              rotate(t, 2 * i, f.x.a, f.x.b), rotate(t, 2 * i + 1, f.w.a, f.w.b);
            }
            put_two(own + c, f.x), put_two(own + c + half, f.w);
          });
      return;
    }
    team.grid(p.rows, p.padded_columns, [&](int row, int c) {
      if (row >= m || c >= s.columns) narrow(0.0f, to[row * stride + c]);
    });
    team.grid(m, (s.columns + 1) / 2, [&](int row, int i) {
      const int t = token_of(row), r = row - t * s.rank;
      float x, w;
      const PairColumns c = turned(from, from0 + t * from.stride[1] + r * from.stride[2],
                                   bias + r * s.columns, t, i, x, w);
      narrow(x, to[row * stride + c.u]);
      if (c.w < s.columns) narrow(w, to[row * stride + c.w]);
    });
  }

  // The pair of columns of one row in fp32.
  TALEA_SCAN PairColumns turned(const View& from, int64_t place, const float* bias, int t, int i,
                                float& x, float& w) {
    const PairColumns c = pair_columns(s, i);
    x = read(from, place + c.u * from.stride[4]) + bias[c.u];
    w = c.w < s.columns ? read(from, place + c.w * from.stride[4]) + bias[c.w] : 0.0f;
    rotate(t, i, x, w);
    return c;
  }

  TALEA_SCAN float raw_value(int t, int c) {
    return own_number(a.v, own_bits(a.v, cuda::at(a.v, u.batch, u.begin + first + t, u.head, c)));
  }

  // v_tr; `weighed`: those that the state behind the chunk takes. Either may be null.
  TALEA_SCAN void read_values(T* plain, T* weighed) {
    const int stride = p.padded_values + p.pad;
    const int64_t v0 = cuda::at(a.v, u.batch, u.begin + first, u.head);
    team.grid((p.rows + s.rank - 1) / s.rank, p.padded_values,
              [&](int t, int c) {
                t = t < n ? t : 0, c = c < s.values ? c : 0;
                return own_bits(a.v, v0 + t * a.v.stride[1] + c * a.v.stride[3]);
              },
              [&](int t, int c, uint32_t bits) {
                const bool inside = t < n && c < s.values;
                const float x = own_number(a.v, bits);
                const float by = inside ? tok(key, t) : 0.0f;
                TALEA_ROLLED
                for (int r = 0; r < s.rank; ++r) {
                  const int row = t * s.rank + r;
                  if (row >= p.rows) break;
                  const float own = inside ? x * mimo_v[r * s.values + c] : 0.0f;
                  if (plain) narrow(own, plain[row * stride + c]);
                  if (weighed) narrow(inside ? by * own : 0.0f, weighed[row * stride + c]);
                }
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
  float skip = 0;

  float* tokens_;
  uint64_t *turns, *angle;
  int* tainted;  // [A] flags, then [A] tokens
  T *q, *k, *v, *scaled, *seen, *state;
  float *y, *wide_state, *sums, *decays;
  float *q_bias, *k_bias, *mimo_v, *mimo_z, *mimo_out, *weight;

 private:
  char *shared_, *scratch_;
};

}  // namespace talea::mamba3::cuda
