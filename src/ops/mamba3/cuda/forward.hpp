// What: forward of one head of one sequence: chunks in turn, the state in the block.
// Why: each chunk's rows are formed, used by every product that needs them, and dropped.
// Never: divides by a decay, or stores a state of every chunk.
#pragma once

#include "ops/mamba3/cuda/walk.hpp"

namespace talea::mamba3::cuda {

template <class Team, class T, int kept>
class Forward : public Walk<Team, T, kept> {
 public:
  using Base = Walk<Team, T, kept>;
  using Base::a, Base::s, Base::p, Base::u, Base::team, Base::n, Base::m, Base::first, Base::q,
      Base::k, Base::v, Base::seen, Base::state, Base::y, Base::sums, Base::tok, Base::token_of;
  using Base::Base;

  // A product of rows of the chunk with those of the same and earlier tokens.
  TALEA_SCAN Span pairs() const { return {Span::up_to_token, p.rows, s.rank}; }
  TALEA_SCAN Span all(int depth) const { return {Span::all, depth, 1}; }

  // What row i of queries gives row j of keys.
  TALEA_SCAN float weighed(int i, int j, float score) {
    if (i >= m || j >= m) return 0.0f;
    const int t = token_of(i), earlier = token_of(j);
    if (t > earlier) return tok(Base::step, earlier) * this->decays[t * s.chunk + earlier] * score;
    if (t < earlier) return 0.0f;
    return tok(mutant(Mutant::m3_diagonal_with_s) ? Base::step : Base::gamma, t) * score;
  }

  // Q K^T, weighed, as an operand; scores: where the plain one is kept, or null.
  TALEA_SCAN void pair_scores(float* scores) {
    const int stride = p.padded_columns + p.pad;
    team.product(
        p.rows, pairs(), all(p.padded_columns), Rows<T>{q, stride}, Rows<T>{k, stride},
        [](int, int) { return 0.0f; },
        [&](int i, int j, float x) {
          if (scores) scores[i * (p.rows + 4) + j] = x;
          narrow(weighed(i, j, x), seen[i * (p.rows + p.pad) + j]);
        });
    team.sync();
  }

  // y = e^L (Q h) + seen V + d V
  TALEA_SCAN void outputs() {
    const int stride = p.padded_columns + p.pad, values = p.padded_values + p.pad;
    team.product(
        p.rows, all(p.padded_values), all(p.padded_columns), Rows<T>{q, stride},
        Rows<T>{state, stride},
        [&](int i, int, float x) { return i < m ? tok(Base::left, token_of(i)) * x : 0.0f; },
        pairs(), Rows<T>{seen, p.rows + p.pad}, Columns<T>{v, values},
        [&](int i, int c, float x) {
          y[i * (p.padded_values + 4) + c] = x + this->skip * widen(v[i * values + c]);
        });
    team.sync();
  }

  // 1 / rms of each row of y, in sums.
  TALEA_SCAN void norms() {
    if (!s.head_norm) return;
    team.each_warp(m, [&](int i, auto& warp) {
      const float* own = y + i * (p.padded_values + 4);
      const float squares = warp.sum(s.values, [&](int c) { return own[c] * own[c]; });
      if (warp.leads()) sums[i] = 1.0f / sqrtf(squares / static_cast<float>(s.values) + s.eps);
    });
    team.sync();
  }

  TALEA_SCAN void finish() {
    norms();
    const int stride = p.padded_values + 4;
    const int64_t z0 = cuda::at(a.z, u.batch, u.begin + first, u.head);
    const int64_t out0 = cuda::at(a.out, u.batch, u.begin + first, 0, u.head);
    team.grid(
        n, s.values,
        [&](int t, int c) {
          return a.z.data ? Base::own_bits(a.z, z0 + t * a.z.stride[1] + c * a.z.stride[3]) : 0u;
        },
        [&](int t, int c, uint32_t bits) {
          const float z = Base::own_number(a.z, bits);
          float sum = 0;
          TALEA_ROLLED
          for (int r = 0; r < s.rank; ++r) {
            float o = y[(t * s.rank + r) * stride + c];
            if (s.head_norm) o = o * sums[t * s.rank + r] * this->weight[c];
            if (a.z.data) {
              const float x = z * this->mimo_z[r * s.values + c];
              o *= x * sigmoid(x);
            }
            o *= this->mimo_out[r * s.values + c];
            if (s.reduce)
              sum += o;
            else
              store(a.out, out0 + t * a.out.stride[1] + r * a.out.stride[2] + c * a.out.stride[4],
                    o);
          }
          if (s.reduce) store(a.out, out0 + t * a.out.stride[1] + c * a.out.stride[4], sum);
        });
  }

  // Of the last chunk, still in the block.
  TALEA_SCAN void final_states() {
    const StateViews& f = a.last;
    if (f.angle.data)
      team.each(s.pairs, [&](int i) {
        const float x = this->tainted[i] ? NAN : radians(this->turns[i]);
        store(f.angle, cuda::at(f.angle, u.row, u.head, i), x);
      });
    if (auto* to = static_cast<float*>(f.ssm.data)) {
      const int64_t to0 = cuda::at(f.ssm, u.row, u.head);
      this->each_state([&](int c, int i, float& x) {
        if (c < s.values && i < s.columns) to[to0 + c * f.ssm.stride[2] + i * f.ssm.stride[3]] = x;
      });
    }
    if (f.k.data)
      team.grid(s.rank, (s.columns + 1) / 2, [&](int r, int i) {
        const int64_t place = cuda::at(a.k, u.batch, u.begin + first + n - 1, r, u.group);
        float x, w;
        const PairColumns c =
            this->turned(a.k, place, this->k_bias + r * s.columns, n - 1, i, x, w);
        store(f.k, cuda::at(f.k, u.row, r, u.head, c.u), x);
        if (c.w < s.columns) store(f.k, cuda::at(f.k, u.row, r, u.head, c.w), w);
      });
    if (f.v.data)
      team.each(s.values, [&](int c) {
        store(f.v, cuda::at(f.v, u.row, u.head, c), this->raw_value(n - 1, c));
      });
  }

  TALEA_SCAN void run(const Unit& unit) {
    this->begin(unit);
    if (unit.tokens <= 0) return this->pass_through(a.initial, a.last, true);
    this->start_state();
    this->start_turns();
    float* const saved = saved_states(a, unit);
    const int64_t chunks = this->chunks();
    const bool wanted = a.out.data != nullptr;
    TALEA_ROLLED
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (saved && chunk % s.segment == 0)
        this->put_state(saved + chunk / s.segment * s.columns * s.values, s.columns, s.values,
                        s.columns);
      const bool advances = chunk + 1 < chunks || a.last.ssm.data;
      this->read_tokens(chunk, wanted);
      this->read_turns(nullptr);
      this->read_rows(wanted);
      if (wanted) {
        this->state_to_operand();
        this->read_values(v, nullptr);
        team.sync();
        pair_scores(nullptr);
        outputs();
      }
      // The weighed values lie where the queries were.
      if (advances) this->read_values(nullptr, this->scaled);
      if (wanted) finish();
      team.sync();
      if (advances) this->advance();
    }
    final_states();
    team.sync();
  }
};

// The states that backward starts from: before each segment, then before each chunk of one.
template <class Team, class T, int kept>
class States : public Walk<Team, T, kept> {
 public:
  using Base = Walk<Team, T, kept>;
  using Base::a, Base::s, Base::p, Base::u, Base::team, Base::k;
  using Base::Base;

  TALEA_SCAN int64_t state_size() const { return int64_t{p.padded_columns} * p.padded_values; }

  // A chunk's turns, and where asked the state behind it.
  TALEA_SCAN void pass(int64_t chunk, bool states) {
    this->read_tokens(chunk, false);
    this->read_turns(nullptr, states);
    if (!states) return;
    this->read_rows(false);
    this->read_values(nullptr, this->scaled);
    team.sync();
    this->advance();
  }

  // Number `unit` of the wave: what it keeps from launch to launch, and its checkpoints.
  TALEA_SCAN void begin_unit(const Unit& unit, int64_t number, const UnitBuffers& b,
                             const Wave& wave) {
    this->begin(unit);
    const int64_t size = state_size();
    const StateViews& d = a.last;
    float* upstream = b.upstream + number * size;
    team.grid(p.padded_values, p.padded_columns, [&](int c, int i) {
      const bool inside = c < s.values && i < s.columns;
      upstream[c * p.padded_columns + i] =
          inside ? load_or(0, d.ssm, cuda::at(d.ssm, u.row, u.head, c, i)) : 0.0f;
    });
    const int count = parameter_count(s);
    team.each(count, [&](int i) { b.parameters[number * count + i] = 0; });
    team.each(1, [&](int) { b.pending[number] = Pending{}; });
    if (unit.tokens <= 0) return this->pass_through(a.last, a.grad.initial, false);
    const float* const from = saved_states(a, unit);
    if (!from) this->start_state();
    this->start_turns();
    const int64_t last = (this->chunks() - 1) / s.segment;
    TALEA_ROLLED
    for (int64_t segment = 0;; ++segment) {
      const int64_t slot = number * wave.segments + segment;
      if (from)
        this->take_state(from + segment * s.columns * s.values, s.columns, s.values, s.columns);
      this->put_state(b.states + slot * size, p.padded_columns, p.padded_values, p.padded_columns);
      this->put_turns(b.turns + slot * s.pairs, b.taints + slot * s.pairs);
      team.sync();
      if (segment == last) break;
      TALEA_ROLLED
      for (int64_t i = 0; i < s.segment; ++i) pass(segment * s.segment + i, !from);
    }
  }

  // The states before each chunk of the segment at work, and the one behind it.
  TALEA_SCAN void segment(const Unit& unit, int64_t number, const UnitBuffers& b,
                          const Wave& wave) {
    const int64_t first = wave.segment * s.segment;
    int64_t end = chunks_of(s, unit.tokens);
    if (first >= end) return;
    this->begin(unit);
    end = end < first + s.segment ? end : first + s.segment;
    const int64_t size = state_size(), slot = number * wave.segments + wave.segment;
    T* inner = static_cast<T*>(b.inner) + number * (s.segment + 1) * size;
    uint64_t* turns = b.inner_turns + number * s.segment * s.pairs;
    int* taints = b.inner_taints + number * s.segment * s.pairs;
    this->take_state(b.states + slot * size, p.padded_columns, p.padded_values, p.padded_columns);
    this->take_turns(b.turns + slot * s.pairs, b.taints + slot * s.pairs);
    TALEA_ROLLED
    for (int64_t chunk = first; chunk < end; ++chunk) {
      const int64_t i = chunk - first;
      this->put_state(inner + i * size, p.padded_columns, p.padded_values, p.padded_columns);
      this->put_turns(turns + i * s.pairs, taints + i * s.pairs);
      team.sync();
      pass(chunk, true);
    }
    this->put_state(inner + (end - first) * size, p.padded_columns, p.padded_values,
                    p.padded_columns);
    team.sync();
  }
};

}  // namespace talea::mamba3::cuda
