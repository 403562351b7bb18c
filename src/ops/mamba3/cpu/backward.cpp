// What: backward of one head: states from checkpoints, then a chunk at a time from the end.
// Why: dO V^T is formed once a chunk and feeds every gradient that has it; decays and angles need
//      no product of their own, and are anchored at each chunk's end.
// Never: divides by a decay, or stores a gradient of a row beyond its chunk.
#include <algorithm>
#include <cmath>

#include "algebra/scan_state.hpp"
#include "core/mutant.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/mamba3/cpu/turns.hpp"
#include "ops/mamba3/cpu/worker.hpp"
#include "ops/mamba3/element.hpp"

namespace talea::mamba3::cpu {

using talea::cpu::lanes;
using talea::cpu::store_row;

namespace {

int64_t in_panels(int64_t n, int64_t p, int64_t columns) {
  const int64_t w = lanes();
  return p / w * columns * w + n * w + p % w;
}

}  // namespace

void Worker::checkpoints(HeadMemory& u, const float* from) {
  std::fill_n(u.parameters, p_.rank * (2 * plan_.columns + 3 * plan_.values) + plan_.values + 1,
              0.0);
  u.pending.token = -1;
  if (T_ == 0) return;
  start_turns();
  float* state = m_.state;
  if (!from) start_state(state);
  for (int64_t chunk = 0; chunk < chunks(); ++chunk) {
    const int64_t segment = chunk / plan_.segment;
    if (chunk % plan_.segment == 0) {
      keep_turns(u.segment_turns + segment * 3 * plan_.pairs);
      if (!from) std::copy_n(state, plan_.state(), u.checkpoints + segment * plan_.state());
      if (segment == (chunks() - 1) / plan_.segment) break;
    }
    tokens(chunk);
    turns(!from);
    if (from) continue;
    key_and_value();
    advance(state);
  }
}

void Worker::segment_states(HeadMemory& u, int64_t segment, const float* from) {
  const int64_t begin = segment * plan_.segment;
  const int64_t end = std::min(begin + plan_.segment, chunks());
  take_turns(u.segment_turns + segment * 3 * plan_.pairs);
  float* state = u.states;
  if (from) {
    const float* kept = from + segment * p_.state_dim * p_.head_dim;
    std::fill_n(state, plan_.state(), 0.0f);
    for (int64_t n = 0; n < p_.state_dim; ++n)
      for (int64_t p = 0; p < p_.head_dim; ++p)
        state[in_panels(n, p, plan_.columns)] = kept[n * p_.head_dim + p];
  } else {
    std::copy_n(u.checkpoints + segment * plan_.state(), plan_.state(), state);
  }
  for (int64_t chunk = begin; chunk < end; ++chunk, state += plan_.state()) {
    keep_turns(u.chunk_turns + (chunk - begin) * 3 * plan_.pairs);
    tokens(chunk);
    turns(true);
    key_and_value();
    std::copy_n(state, plan_.state(), state + plan_.state());
    advance(state + plan_.state());
  }
}

// The gradient of the last state, of its key and angle.
void Worker::start_gradients(HeadMemory& u) {
  const States& d = c_.in.d_final_states;
  std::fill_n(u.gradient, plan_.state(), 0.0f);
  for (int64_t p = 0; d.ssm && p < p_.head_dim; ++p)
    for (int64_t n = 0; n < p_.state_dim; ++n)
      u.gradient[in_panels(n, p, plan_.columns)] = static_cast<float>(get(d.ssm, s_.row, h_, p, n));
}

void Worker::first_pair(int64_t i, int64_t& u, int64_t& w) const {
  if (rotation().halves)
    u = i, w = i + p_.state_dim / 2;
  else
    u = 2 * i, w = 2 * i + 1;
}

// dy of the chunk's rows, in panels, from d_out; y anew where the finish needs it.
void Worker::upstream(const float* state) {
  const Inputs& in = c_.in;
  const int64_t P = plan_.values, ranks = p_.reduce ? 1 : p_.rank;
  if (!in.d_out) {
    std::fill_n(m_.o, plan_.room * P, 0.0f);
    std::fill_n(m_.dz, n_ * P, 0.0f);
    return;
  }
  const Tensor& up = in.d_out;
  for (int64_t r = 0; r < ranks; ++r)
    load_rows(up, offset_of(up, s_.batch, s_.begin + first_, r, h_), up.stride[1], n_, up.stride[4],
              p_.head_dim, P, m_.out + r * P, ranks);
  if (!in.z && !plan_.needs_y) {
    const float* factor = in.mimo_out ? m_.mimo_out : nullptr;
    if (p_.reduce) return spread_rows(m_.out, n_, p_.rank, P, plan_.room, factor, m_.o);
    return panels_of(m_.out, rows_, P, plan_.room, m_.o);
  }
  if (plan_.needs_y) outputs(state);
  FinishJob job;
  job.tokens = n_;
  job.rank = p_.rank;
  job.columns = p_.head_dim;
  job.stride = P;
  job.norm = p_.options.head_norm;
  job.eps = static_cast<float>(p_.options.norm_eps);
  job.y = plan_.needs_y ? m_.y : nullptr;
  if (in.z) {
    const Tensor& z = in.z;
    load_rows(z, offset_of(z, s_.batch, s_.begin + first_, h_), z.stride[1], n_, z.stride[3],
              p_.head_dim, P, m_.z_raw);
    job.z = m_.z_raw;
    job.d_z = m_.dz;
  }
  job.weight = in.norm_weight ? m_.weight : nullptr;
  job.mimo_z = in.mimo_z ? m_.mimo_z : nullptr;
  job.mimo_out = in.mimo_out ? m_.mimo_out : nullptr;
  job.reduce = p_.reduce;
  job.d_out = m_.out;
  job.dy = m_.dy;
  float* sums = m_.parameters + 2 * p_.rank * plan_.columns + p_.rank * P;
  job.d_mimo_z = sums;
  job.d_mimo_out = sums + p_.rank * P;
  job.d_weight = sums + 2 * p_.rank * P;
  finish_adjoint(job);
  panels_of(m_.dy, rows_, P, plan_.room, m_.o);
}

// W = dO V^T, once: under the decays alone, under all weights, and its blocks of one token.
void Worker::pair_products() {
  transpose(m_.v, up16(rows_), plan_.values, plan_.room, m_.vt);
  pairs(m_.o, m_.vt, plan_.values, m_.w);
  MaskJob job;
  job.tokens = n_;
  job.rank = p_.rank;
  job.room = plan_.room;
  job.decay = m_.decay;
  job.decay_stride = up16(plan_.tokens + 1);
  job.from = m_.w;
  job.to = m_.w_decay;
  job.scratch = m_.scratch;
  mask(job);
  job.scale = m_.s;
  job.same = m_.gamma;
  job.to = m_.w_seen;
  mask(job);
  const int64_t w = lanes();
  double trace = 0;
  for (int64_t i = 0; i < rows_; ++i) trace += m_.w[i / w * plan_.room * w + i * w + i % w];
  sum_skip_ = trace;
}

// dq = e^L (dO h) + W' K, rows side by side in u.dq.
void Worker::query_gradients(HeadMemory& u, const float* state) {
  transpose(state, plan_.columns, plan_.values, plan_.columns, m_.transposed);
  whole(m_.o, m_.transposed, plan_.values, plan_.values, plan_.columns, u.dq);
  scale_rows(u.dq, rows_, plan_.columns, m_.left_rows);
  lower(m_.w_seen, m_.k, plan_.columns, u.dq);
}

// What a key gets from later tokens for each unit of s; then ds and dk.
void Worker::key_gradients(HeadMemory& u) {
  transpose(u.gradient, plan_.columns, plan_.values, plan_.columns, m_.transposed);
  whole(m_.v, m_.transposed, plan_.values, plan_.values, plan_.columns, u.dk);
  scale_rows(u.dk, rows_, plan_.columns, m_.right_rows);
  upper(m_.w_decay, m_.q, plan_.columns, u.dk);
  key_rows({n_, p_.rank, plan_.columns, plan_.room, m_.q, m_.k, m_.w, m_.s, m_.gamma, u.dk, m_.ds});
}

void Worker::value_gradients(HeadMemory& u) {
  whole(m_.k, u.gradient, plan_.columns, plan_.columns, plan_.values, m_.dv);
  scale_rows(m_.dv, rows_, plan_.values, m_.key_rows);
  upper(m_.seen, m_.o, plan_.values, m_.dv);
}

// Rows of dq and dk: their share of turns and decays; turned back.
void Worker::turn_gradients(HeadMemory& u, bool last) {
  std::fill_n(m_.turn, n_ * plan_.columns, 0.0f);
  std::fill_n(m_.dot, n_, 0.0f);
  for (int64_t i = 0; mutant(Mutant::m3_turned_back_forward) && i < n_ * plan_.turned; ++i)
    m_.sine[i] = -m_.sine[i];
  TurnBackJob job;
  job.rotation = rotation();
  job.tokens = n_;
  job.rank = p_.rank;
  job.padded = plan_.columns;
  job.room = plan_.room;
  job.x = m_.q;
  job.gradient = u.dq;
  job.turn = m_.turn;
  job.dot = m_.dot;
  job.bias = m_.parameters;
  job.scratch = m_.scratch;
  turn_back(job);
  job.x = m_.k;
  job.gradient = u.dk;
  job.sign = -1;
  job.bias = m_.parameters + p_.rank * plan_.columns;
  const Tensor& extra = c_.in.d_final_states.k;
  if (last && extra) {
    std::fill_n(m_.extra, p_.rank * plan_.columns, 0.0f);
    for (int64_t r = 0; r < p_.rank; ++r)
      for (int64_t n = 0; n < p_.state_dim; ++n)
        m_.extra[r * plan_.columns + n] = static_cast<float>(get(extra, s_.row, r, h_, n));
    job.extra = m_.extra;
  }
  turn_back(job);
}

// What lies behind the last token of the sequence turns it, too: in columns, as all turns are.
void Worker::last_turns(HeadMemory& u) {
  std::copy_n(m_.anchor, plan_.columns, u.first_anchor);
  std::fill_n(u.last_turn, plan_.columns, 0.0f);
  const States& d = c_.in.d_final_states;
  const int64_t w = lanes();
  for (int64_t i = 0; i < p_.pairs; ++i) {
    int64_t a = 0, b = 0;
    first_pair(i, a, b);
    u.last_turn[a] = static_cast<float>(get_or(0, d.angle, s_.row, h_, i));
    for (int64_t r = 0; d.k && r < p_.rank && !mutant(Mutant::m3_final_key_without_turn); ++r) {
      const int64_t row = (rows_ - p_.rank + r) * w;
      const float left = m_.k[a / w * plan_.room * w + row + a % w];
      const float right = m_.k[b / w * plan_.room * w + row + b % w];
      u.last_turn[a] += left * static_cast<float>(get(d.k, s_.row, r, h_, b));
      u.last_turn[b] += right * static_cast<float>(get(d.k, s_.row, r, h_, a));
    }
  }
}

void Worker::store_token(int64_t token, const HeadMemory::Pending& p, double db) {
  const Gradients& d = c_.out.d;
  const int64_t at = s_.begin + token;
  if (d.dt) set(d.dt, p.ddt + double{p.other} * db, s_.batch, h_, at);
  if (d.trap)
    set(d.trap, double{p.lambda} * double{p.other} * double{p.dt} * (p.dgamma - db), s_.batch, h_,
        at);
}

// Gradients of the steps, decays and angles of the chunk's tokens.
void Worker::token_gradients(HeadMemory& u, double energy) {
  const Gradients& d = c_.out.d;
  const int64_t N = plan_.columns, w = lanes();
  constexpr double pi = two_pi / 2;
  float* turn = m_.anchor;  // from here on: all that turns with the token
  for (int64_t n = 0; n < N; ++n) turn[n] = (u.first_anchor[n] - m_.anchor[n]) + u.last_turn[n];
  if (u.pending.token >= 0) store_token(u.pending.token, u.pending, m_.ds[n_ - 1]);
  double decay = mutant(Mutant::m3_anchor_dropped) ? 0 : energy;
  for (int64_t t = n_ - 1; t >= 0; --t) {
    const int64_t at = s_.begin + first_ + t;
    for (int64_t n = 0; n < N; ++n) turn[n] += m_.turn[t * N + n];
    decay += m_.dot[t];
    double same = 0;
    for (int64_t i = t * p_.rank; i < (t + 1) * p_.rank; ++i)
      for (int64_t j = t * p_.rank; j < (t + 1) * p_.rank; ++j) {
        const int64_t place = j / w * plan_.room * w + i * w + j % w;
        same += double{m_.w[place]} * double{m_.scores[place]};
      }
    HeadMemory::Pending p = {0, m_.ds[t] + same, m_.lambda[t], m_.other[t], m_.dt[t], first_ + t};
    p.ddt = double{p.lambda} * p.dgamma;
    const float* tanh = m_.tanh + t * plan_.pairs;
    double by_rate = 0;
    for (int64_t i = 0; i < p_.pairs; ++i) {
      int64_t a = 0, b = 0;
      first_pair(i, a, b);
      const float whole = turn[a] - turn[b];
      if (!c_.in.angles) continue;
      by_rate += double{whole} * double{tanh[i]};
      if (!d.angles) continue;
      const float angle = whole * m_.dt[t] * static_cast<float>(pi) *
                          static_cast<float>(1 - double{tanh[i]} * double{tanh[i]});
      if (p_.sum_angles)
        u.dangle[t * plan_.pairs + i] = angle;
      else
        set(d.angles, angle, s_.batch, at, h_, i);
    }
    p.ddt += pi * by_rate;
    if (d.adt) {
      const bool reset = m_.adt[t] <= static_cast<float>(reset_below);
      set(d.adt, reset ? 0.0 : decay, s_.batch, h_, at);
    }
    if (t > 0)
      store_token(first_ + t, p, m_.ds[t - 1]);
    else
      u.pending = p;
  }
  if (first_ > 0 || !c_.out.d.initial_states.angle) return;
  for (int64_t i = 0; i < p_.pairs; ++i) {
    int64_t a = 0, b = 0;
    first_pair(i, a, b);
    set(c_.out.d.initial_states.angle, turn[a] - turn[b], s_.row, h_, i);
  }
}

// d_v, d_z and what the projection of v gets.
void Worker::store_values(HeadMemory&) {
  const Gradients& d = c_.out.d;
  const int64_t P = plan_.values;
  float* sums = m_.parameters + 2 * p_.rank * plan_.columns;
  const Tensor& last = c_.in.d_final_states.v;
  for (int64_t t = 0; t < n_; ++t) {
    float* row = m_.dv + t * p_.rank * P;
    const float* v = m_.v_raw + t * P;
    for (int64_t r = 0; r < p_.rank; ++r)
      for (int64_t p = 0; p < P; ++p) {
        const float own = row[r * P + p];
        sums[r * P + p] += own * v[p];
        const float back = c_.in.mimo_v ? own * m_.mimo_v[r * P + p] : own;
        row[p] = r == 0 ? back : row[p] + back;
      }
    if (last && first_ + t == T_ - 1)
      for (int64_t p = 0; p < p_.head_dim; ++p)
        row[p] += static_cast<float>(get(last, s_.row, h_, p));
    const int64_t at = s_.begin + first_ + t;
    if (d.v)
      store_row(row, p_.head_dim, d.v.data, d.v.dtype, offset_of(d.v, s_.batch, at, h_),
                d.v.stride[3]);
    if (d.z)
      store_row(m_.dz + t * P, p_.head_dim, d.z.data, d.z.dtype, offset_of(d.z, s_.batch, at, h_),
                d.z.stride[3]);
  }
}

void Worker::advance_gradient(HeadMemory& u) {
  scale_panels(m_.o, rows_, plan_.values, plan_.room, m_.left_rows, m_.scaled);
  scale_all(u.gradient, plan_.state(), m_.left[n_ - 1]);
  into_state(m_.q, m_.scaled, u.gradient);
}

void Worker::chunk_gradients(HeadMemory& u, int64_t chunk) {
  const int64_t in_segment = chunk % plan_.segment;
  const float* state = u.states + in_segment * plan_.state();
  const bool last = chunk + 1 == chunks();
  const int64_t count = p_.rank * (2 * plan_.columns + 3 * plan_.values) + plan_.values;
  std::fill_n(m_.parameters, count, 0.0f);
  take_turns(u.chunk_turns + in_segment * 3 * plan_.pairs);
  tokens(chunk);
  turns(true);
  key_and_value();
  query();
  scores();
  upstream(state);
  pair_products();
  query_gradients(u, state);
  key_gradients(u);
  value_gradients(u);
  AnchorJob job;
  job.h = state + plan_.state();
  job.e = u.gradient;
  job.columns = p_.state_dim;
  job.room = plan_.columns;
  job.values = plan_.values;
  job.pairs = p_.pairs;
  job.halves = rotation().halves;
  job.turn = m_.anchor;
  std::fill_n(m_.anchor, plan_.columns, 0.0f);
  const double energy = anchor(job);
  if (last) last_turns(u);
  turn_gradients(u, last);
  token_gradients(u, energy);
  store_values(u);
  advance_gradient(u);
  add_to_fp64(m_.parameters, count, u.parameters);
  u.parameters[count] += sum_skip_;
}

// What the first token hands to the initial states.
void Worker::end_gradients(HeadMemory& u) {
  if (T_ == 0) return pass_through();
  const States &in = c_.in.initial_states, &d = c_.out.d.initial_states;
  const double b = double{u.pending.other} * double{u.pending.dt};
  double db = 0;
  double* sums = u.parameters + 2 * p_.rank * plan_.columns;
  const auto e = [&](int64_t n, int64_t p) {
    return double{u.gradient[in_panels(n, p, plan_.columns)]};
  };
  for (int64_t p = 0; in.k && (in.v || d.v) && p < p_.head_dim; ++p) {
    double dv = 0;
    const double v = get_or(0, in.v, s_.row, h_, p);
    for (int64_t r = 0; r < p_.rank; ++r) {
      double own = 0;
      const double project = get_or(1, c_.in.mimo_v, h_, r, p);
      for (int64_t n = 0; n < p_.state_dim; ++n) own += e(n, p) * get(in.k, s_.row, r, h_, n);
      db += v * project * own;
      dv += b * own * project;
      if (!mutant(Mutant::m3_mimo_v_without_initial)) sums[r * plan_.values + p] += b * own * v;
    }
    if (d.v) set(d.v, dv, s_.row, h_, p);
  }
  for (int64_t p = 0; d.v && !in.k && p < p_.head_dim; ++p) set(d.v, 0.0, s_.row, h_, p);
  for (int64_t r = 0; d.k && r < p_.rank; ++r)
    for (int64_t n = 0; n < p_.state_dim; ++n) {
      double dk = 0;
      for (int64_t p = 0; in.v && p < p_.head_dim; ++p)
        dk += b * e(n, p) * get(in.v, s_.row, h_, p) * get_or(1, c_.in.mimo_v, h_, r, p);
      set(d.k, dk, s_.row, r, h_, n);
    }
  for (int64_t p = 0; d.ssm && p < p_.head_dim; ++p)
    for (int64_t n = 0; n < p_.state_dim; ++n) set(d.ssm, e(n, p), s_.row, h_, p, n);
  store_token(0, u.pending, db);
}

}  // namespace talea::mamba3::cpu
