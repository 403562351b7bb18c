// What: the state of one head of one sequence, from before its first token to behind its last.
// Why: forward and backward start, hand on and keep it in the same ways.
// Never: divides by a decay.
#pragma once

#include "ops/mamba3/rows/chunk.hpp"

namespace talea::mamba3::cuda {

// kept: tiles of the state that a warp holds in registers; 0: it lies in wide_state.
template <class Team, class T, int kept>
class Walk : public Chunk<Team, T> {
 public:
  using Base = Chunk<Team, T>;
  using Base::a, Base::s, Base::p, Base::u, Base::team, Base::n, Base::m, Base::first;
  using Base::Base;
  using Base::k, Base::scaled, Base::state, Base::wide_state, Base::mimo_v, Base::turns;
  using Base::tainted, Base::decay;

  // f(row of P, column of N, element) of the state in fp32, wherever it is.
  template <class F>
  TALEA_SCAN void each_state(F f) {
    if constexpr (kept > 0) {
      team.each_kept(home, p.padded_values, p.padded_columns, f);
    } else {
      const int stride = p.padded_columns + 4;
      team.grid(p.padded_values, p.padded_columns,
                [&](int c, int i) { f(c, i, wide_state[c * stride + i]); });
    }
  }

  // h before the first token, with the token held over from before. States are fp32 (rules.cpp).
  TALEA_SCAN void start_state() {
    const StateViews& f = a.initial;
    const auto* from = static_cast<const float*>(f.ssm.data);
    const int64_t from0 = cuda::at(f.ssm, u.row, u.head);
    each_state([&](int c, int i, float& x) {
      x = from && c < s.values && i < s.columns
              ? from[from0 + c * f.ssm.stride[2] + i * f.ssm.stride[3]]
              : 0.0f;
    });
    if (f.k.data && f.v.data && !mutant(Mutant::m3_22_initial_token_ignored)) {
      const float b0 = read(a.dt, cuda::at(a.dt, u.batch, u.head, u.begin)) *
                       sigmoid(-read(a.trap, cuda::at(a.trap, u.batch, u.head, u.begin)));
      float *held_v = this->template at<float>(p.held), *held_k = held_v + s.values;
      TALEA_ROLLED
      for (int r = 0; r < s.rank; ++r) {
        team.each(s.values, [&](int c) {
          held_v[c] = b0 * load(f.v, cuda::at(f.v, u.row, u.head, c)) * mimo_v[r * s.values + c];
        });
        team.each(s.columns,
                  [&](int i) { held_k[i] = load(f.k, cuda::at(f.k, u.row, r, u.head, i)); });
        team.sync();
        each_state([&](int c, int i, float& x) {
          if (c < s.values && i < s.columns) x += held_v[c] * held_k[i];
        });
        team.sync();
      }
    }
    team.sync();
  }

  // The state as an operand; nothing to do where it is its own.
  TALEA_SCAN void state_to_operand() {
    if (static_cast<void*>(state) == static_cast<void*>(wide_state)) return;
    const int stride = p.padded_columns + p.pad;
    each_state([&](int c, int i, float& x) { narrow(x, state[c * stride + i]); });
  }
  // One that lies at `from`, its rows `stride` apart.
  template <class X>
  TALEA_SCAN void to_operand(const X* from, int stride, T* to) {
    if (static_cast<const void*>(from) == static_cast<const void*>(to)) return;
    team.template grid<4>(
        p.padded_values, p.padded_columns, [&](int c, int i) { return from[c * stride + i]; },
        [&](int c, int i, X x) { narrow(widen(x), to[c * (p.padded_columns + p.pad) + i]); });
  }

  // h behind the chunk: decay h + weighed^T K.
  TALEA_SCAN void advance() {
    const float whole = decay();
    const Span rows{Span::all, p.rows, 1}, columns{Span::all, p.padded_columns, 1};
    const Columns<T> left{scaled, p.padded_values + p.pad}, right{k, p.padded_columns + p.pad};
    if constexpr (kept > 0) {
      each_state([&](int, int, float& x) { x = left_of(whole, x); });
      team.add_kept(home, p.padded_values, columns, rows, left, right);
    } else {
      const int stride = p.padded_columns + 4;
      team.product(
          p.padded_values, columns, rows, left, right,
          [&](int c, int i) { return left_of(whole, wide_state[c * stride + i]); },
          [&](int c, int i, float x) { wide_state[c * stride + i] = x; });
    }
    team.sync();
  }

  // The state as others keep it.
  template <class X>
  TALEA_SCAN void put_state(X* to, int64_t stride, int values, int columns) {
    each_state([&](int c, int i, float& x) {
      if (c < values && i < columns) narrow(x, to[c * stride + i]);
    });
  }
  TALEA_SCAN void take_state(const float* from, int64_t stride, int values, int columns) {
    each_state([&](int c, int i, float& x) {
      x = c < values && i < columns ? from[c * stride + i] : 0.0f;
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
    team.grid(s.values, s.columns, [&](int c, int i) {
      if (to.ssm.data)
        store(to.ssm, cuda::at(to.ssm, u.row, u.head, c, i),
              load_or(0, from.ssm, cuda::at(from.ssm, u.row, u.head, c, i)));
    });
    team.each(s.values, [&](int c) {
      if (to.v.data)
        store(to.v, cuda::at(to.v, u.row, u.head, c),
              load_or(0, from.v, cuda::at(from.v, u.row, u.head, c)));
    });
    team.grid(s.rank, s.columns, [&](int r, int i) {
      if (to.k.data)
        store(to.k, cuda::at(to.k, u.row, r, u.head, i),
              load_or(0, from.k, cuda::at(from.k, u.row, r, u.head, i)));
    });
  }

  typename Team::template Kept<kept> home;
};

}  // namespace talea::mamba3::cuda
