// What: the gradients of a slice of chunks of one head, from the last to the first.
// Why: decays and angles need no product of their own, and are anchored at each chunk's end.
// Never: sums with atomics, or over heads.
#pragma once

#include "ops/mamba3/cuda/gradients.hpp"

namespace talea::mamba3::cuda {

template <class Team, class T>
class Backward : public Gradients<Team, T> {
 public:
  using Base = Walk<Team, T, 0>;
  using Parent = Gradients<Team, T>;
  using Base::a, Base::s, Base::p, Base::u, Base::team, Base::n, Base::m, Base::first;
  using Base::k, Base::q, Base::y, Base::sums, Base::tok, Base::mimo_v;
  using Parent::wide, Parent::wide_n, Parent::wide_p, Parent::ld_n, Parent::ld_p, Parent::turn,
      Parent::given, Parent::partial, Parent::upstream, Parent::all, Parent::sum_of;

  TALEA_SCAN Backward(Team& of, const Args& args, const ChunkPlaces& places, char* shared,
                      char* scratch, const UnitBuffers& buffers, const Wave& at_work)
      : Parent(of, args, places, shared, scratch), b(buffers), wave(at_work) {}

  // The chunks of the slice of unit `number` of the wave.
  TALEA_SCAN void run(const Unit& unit, int64_t number) {
    const int64_t begin = wave.segment * s.segment;
    int64_t end = chunks_of(s, unit.tokens);
    end = end < begin + s.segment ? end : begin + s.segment;
    const int64_t low = begin + wave.slice;
    const int64_t high = end < low + wave.slice_chunks ? end : low + wave.slice_chunks;
    if (low >= high) return;
    this->begin(unit);
    number_ = number;
    const int64_t size = int64_t{p.padded_columns} * p.padded_values;
    float* home = b.upstream + number * size;
    team.template grid<4>(
        p.padded_values, p.padded_columns,
        [&](int c, int i) { return home[c * p.padded_columns + i]; },
        [&](int c, int i, float x) { wide[c * wide_n + i] = x; });
    team.sync();
    TALEA_ROLLED
    for (int64_t chunk = high; chunk-- > low;) {
      const int64_t i = chunk - begin;
      const T* states = static_cast<const T*>(b.inner) + (number * (s.segment + 1) + i) * size;
      this->take_turns(b.inner_turns + (number * s.segment + i) * s.pairs,
                       b.inner_taints + (number * s.segment + i) * s.pairs);
      chunk_back(chunk, chunk - low, states, states + size);
    }
    if (low == 0) initial_gradients();
    team.grid(p.padded_values, p.padded_columns,
              [&](int c, int i) { home[c * p.padded_columns + i] = wide[c * wide_n + i]; });
    team.sync();
  }

 private:
  TALEA_SCAN double* parameters() { return b.parameters + number_ * parameter_count(s); }

  TALEA_SCAN void chunk_back(int64_t chunk, int64_t slot, const T* before, const T* behind) {
    const bool last = chunk + 1 == this->chunks();
    this->read_tokens(chunk, true);
    this->read_turns(given);
    this->read_rows(true);
    this->read_values(this->v, nullptr);
    this->to_operand(before, p.padded_columns, this->state);
    this->to_operand(wide, wide_n, upstream);
    team.sync();
    this->pair_scores(this->scores);
    if (this->needs_y()) {
      this->outputs();
      this->norms();
    }
    this->finish_back(parameters());
    this->pair_products(parameters() + parameter_count(s) - 1);
    this->value_gradients();
    this->store_values(last, parameters());
    this->query_gradients();
    this->rows_back(row_of(slot, 0), false, false, b.dq, parameters());
    this->key_gradients();
    this->rows_back(row_of(slot, 0), true, last, b.dk, parameters());
    anchor(behind, last);
    token_gradients(slot);
    advance_back();
  }

  // A token of the slice among those of the wave.
  TALEA_SCAN int64_t row_of(int64_t slot, int t) const {
    return ((u.sequence - wave.first) * wave.slice_chunks + slot) * s.chunk + t;
  }

  // <Hout, E> in `energy`; from torque(Hout, E) all that turns with each token, in `turn`.
  TALEA_SCAN void anchor(const T* behind, bool last) {
    constexpr int parts = 8;
    const int slots = (s.columns + 1) / 2;
    double own = 0;
    team.each(parts * slots, [&](int index) {
      const int part = index / slots, i = index - part * slots;
      const PairColumns at = pair_columns(s, i);
      const bool both = at.w < s.columns;
      float work = 0, torque = 0;
      for (int c = part; c < s.values; c += parts) {
        const T* h = behind + c * p.padded_columns;
        const float* e = wide + c * wide_n;
        const float hu = widen(h[at.u]), eu = e[at.u];
        const float hw = both ? widen(h[at.w]) : 0.0f, ew = both ? e[at.w] : 0.0f;
        work += hu * eu + hw * ew;
        torque += hu * ew - hw * eu;
      }
      own += static_cast<double>(work);
      partial[index] = torque;
    });
    energy = team.sum(own);
    float* const ends = b.ends + number_ * 2 * s.pairs;
    const StateViews& d = a.last;
    team.each(s.pairs, [&](int i) {
      float sum = 0;
      TALEA_ROLLED
      for (int part = 0; part < parts; ++part) sum += partial[part * slots + i];
      if (last) {
        ends[i] = sum;
        float more = load_or(0, d.angle, cuda::at(d.angle, u.row, u.head, i));
        const PairColumns at = pair_columns(s, i);
        TALEA_ROLLED
        for (int r = 0; d.k.data && r < s.rank; ++r) {
          const int row = (n - 1) * s.rank + r;
          more += widen(k[row * ld_n + at.u]) * load(d.k, cuda::at(d.k, u.row, r, u.head, at.w)) -
                  widen(k[row * ld_n + at.w]) * load(d.k, cuda::at(d.k, u.row, r, u.head, at.u));
        }
        ends[s.pairs + i] = more;
      }
      float whole = (ends[i] - sum) + ends[s.pairs + i];
      TALEA_ROLLED
      for (int t = n - 1; t >= 0; --t) turn[t * s.pairs + i] = whole += turn[t * s.pairs + i];
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
    team.each_warp(n, [&](int t, auto& warp) {
      const int64_t token = u.begin + first + t, place = row_of(slot, t);
      const float sum = warp.sum(s.pairs, [&](int i) {
        if (!a.angles.data) return 0.0f;
        const float whole = turn[t * s.pairs + i], own = given[t * s.pairs + i];
        const float angle = whole * tok(Base::dt, t) * pi * slope_of_tanh(own);
        if (b.dangles)
          b.dangles[(place * s.heads + u.head) * s.pairs + i] = angle;
        else if (d.angles.data)
          store(d.angles, cuda::at(d.angles, u.batch, token, u.head, i), angle);
        return whole * tanhf(own);
      });
      if (!warp.leads()) return;
      sum_of(Parent::by_rate, t) = sum;
      float far = 0, near = 0;
      for (int j = t * s.rank; j < (t + 1) * s.rank; ++j) {
        far += sum_of(Parent::by_later, j) + sum_of(Parent::by_state, j);
        near += sum_of(Parent::by_same, j);
      }
      sum_of(Parent::of_step, t) = far;
      sum_of(Parent::of_same, t) = near;
    });
    team.sync();
    if (d.adt.data)
      team.prefix(
          n, [&](int t) { return static_cast<double>(sum_of(Parent::dots, n - 1 - t)); },
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
      x.dgamma = static_cast<double>(sum_of(Parent::of_step, t)) +
                 static_cast<double>(sum_of(Parent::of_same, t));
      x.ddt = static_cast<double>(x.lambda) * x.dgamma +
              3.14159265358979323846 * static_cast<double>(sum_of(Parent::by_rate, t));
      if (t > 0) return store_token(x, first + t, sum_of(Parent::of_step, t - 1));
      // The first token of the chunk behind has waited for the last key of this one.
      if (waits->waits) store_token(*waits, first + n, sum_of(Parent::of_step, n - 1));
      x.waits = 1;
      *waits = x;
      if (first == 0 && a.grad.initial.angle.data) TALEA_ROLLED
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
      TALEA_ROLLED
      for (int r = 0; in.k.data && r < s.rank; ++r) {
        const float x = own[r * wide_p + c];
        dv += b0 * x * mimo_v[r * s.values + c];
        to[r * s.values + c] += static_cast<double>(b0 * x * before);
      }
      if (d.v.data) store(d.v, cuda::at(d.v, u.row, u.head, c), dv);
    });
    if (d.k.data)
      team.grid(s.rank, s.columns, [&](int r, int i) {
        float dk = 0;
        TALEA_ROLLED
        for (int c = 0; in.v.data && c < s.values; ++c)
          dk += b0 * wide[c * wide_n + i] * load(in.v, cuda::at(in.v, u.row, u.head, c)) *
                mimo_v[r * s.values + c];
        store(d.k, cuda::at(d.k, u.row, r, u.head, i), dk);
      });
    if (d.ssm.data)
      team.grid(s.values, s.columns, [&](int c, int i) {
        store(d.ssm, cuda::at(d.ssm, u.row, u.head, c, i), wide[c * wide_n + i]);
      });
    team.each(1, [&](int) {
      double db = 0;
      TALEA_ROLLED
      for (int c = 0; in.k.data && in.v.data && c < s.values; ++c) TALEA_ROLLED
      for (int r = 0; r < s.rank; ++r)
        db += static_cast<double>(load(in.v, cuda::at(in.v, u.row, u.head, c)) *
                                  mimo_v[r * s.values + c] * own[r * wide_p + c]);
      store_token(*waits, 0, db);
    });
    team.sync();
  }

  const UnitBuffers& b;
  const Wave& wave;
  int64_t number_ = 0;
  double energy = 0;
};

}  // namespace talea::mamba3::cuda
