// What: the gradients of one chunk of one head, and what they leave for the chunk before.
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
#include "ops/mamba3/mutants.hpp"

namespace talea::mamba3::cpu {

using talea::cpu::lanes;
using talea::cpu::store_row;

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
  job.same = mutant(ScanMutant::m3_3_one_mask_of_three) ? nullptr : m_.gamma;
  job.to = m_.w_seen;
  mask(job);
  const int64_t w = lanes();
  double trace = 0;
  for (int64_t i = 0; i < rows_; ++i) trace += m_.w[i / w * plan_.room * w + i * w + i % w];
  sum_skip_ = trace;
}

// dq = e^L (dO h) + W' K, rows side by side.
void Worker::query_gradients(const ChunkAt& at, float* dq) {
  transpose(at.state, plan_.columns, plan_.values, plan_.columns, m_.transposed);
  whole(m_.o, m_.transposed, plan_.values, plan_.values, plan_.columns, dq);
  scale_rows(dq, rows_, plan_.columns, m_.left_rows);
  lower(m_.w_seen, m_.k, plan_.columns, dq);
}

// What a key gets from later tokens for each unit of s; then ds and dk.
void Worker::key_gradients(const ChunkAt& at, float* dk) {
  transpose(at.gradient, plan_.columns, plan_.values, plan_.columns, m_.transposed);
  whole(m_.v, m_.transposed, plan_.values, plan_.values, plan_.columns, dk);
  scale_rows(dk, rows_, plan_.columns, m_.right_rows);
  upper(m_.w_decay, m_.q, plan_.columns, dk);
  key_rows({n_, p_.rank, plan_.columns, plan_.room, m_.q, m_.k, m_.w, m_.s, m_.gamma, dk, m_.ds});
}

void Worker::value_gradients(const ChunkAt& at) {
  whole(m_.k, at.gradient, plan_.columns, plan_.columns, plan_.values, m_.dv);
  scale_rows(m_.dv, rows_, plan_.values, m_.key_rows);
  upper(m_.seen, m_.o, plan_.values, m_.dv);
}

// Rows of dq and dk: their share of turns and decays; turned back.
void Worker::turn_gradients(float* dq, float* dk, bool last) {
  std::fill_n(m_.turn, n_ * plan_.columns, 0.0f);
  std::fill_n(m_.dot, n_, 0.0);
  for (int64_t i = 0; mutant(Mutant::m3_turned_back_forward) && i < n_ * plan_.turned; ++i)
    m_.sine[i] = -m_.sine[i];
  TurnBackJob job;
  job.rotation = rotation();
  job.tokens = n_;
  job.rank = p_.rank;
  job.padded = plan_.columns;
  job.room = plan_.room;
  job.x = m_.q;
  job.gradient = dq;
  job.turn = m_.turn;
  job.dot = m_.dot;
  job.bias = m_.parameters;
  job.scratch = m_.scratch;
  turn_back(job);
  job.x = m_.k;
  job.gradient = dk;
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
  if (job.extra && mutant(ScanMutant::m3_final_key_in_decay))
    m_.dot[n_ - 1] -= double{m_.extra[0]} * double{m_.k[(rows_ - p_.rank) * lanes()]};
  turn_back(job);
}

// What lies behind the last token of the sequence turns it, too: in columns, as all turns are.
void Worker::last_turns(HeadMemory& u) {
  std::copy_n(m_.anchor, plan_.columns, u.first_anchor);
  std::fill_n(u.last_turn, plan_.columns, 0.0);
  const States& d = c_.in.d_final_states;
  const int64_t w = lanes();
  for (int64_t i = 0; i < p_.pairs; ++i) {
    const auto [a, b] = pair(i);
    u.last_turn[a] = get_or(0, d.angle, s_.row, h_, i);
    for (int64_t r = 0; d.k && r < p_.rank && !mutant(Mutant::m3_final_key_without_turn); ++r) {
      const int64_t row = (rows_ - p_.rank + r) * w;
      const double left = m_.k[a / w * plan_.room * w + row + a % w];
      const double right = m_.k[b / w * plan_.room * w + row + b % w];
      u.last_turn[a] += left * get(d.k, s_.row, r, h_, b);
      u.last_turn[b] += right * get(d.k, s_.row, r, h_, a);
    }
  }
}

void Worker::store_token(const Pending& p, double db) {
  const Gradients& d = c_.out.d;
  const int64_t at = s_.begin + p.token;
  if (d.dt) set(d.dt, p.ddt + double{p.other} * db, s_.batch, h_, at);
  if (d.trap)
    set(d.trap, double{p.lambda} * double{p.other} * double{p.dt} * (p.dgamma - db), s_.batch, h_,
        at);
}

// Gradients of the steps, decays and angles of the chunk's tokens.
void Worker::token_gradients(HeadMemory& u, int64_t slot) {
  const Gradients& d = c_.out.d;
  const int64_t N = plan_.columns, w = lanes();
  constexpr double pi = two_pi / 2;
  // All that turns with the token. Columns u and w are large beside their difference, and sums over
  // tokens larger still: in fp32 that would be the largest error of d_angles.
  double* const turn = m_.turned;
  for (int64_t n = 0; n < N; ++n)
    turn[n] = (u.first_anchor[n] - double{m_.anchor[n]}) + u.last_turn[n];
  float* const dangle = p_.sum_angles ? u.dangle + slot * plan_.tokens * plan_.pairs : nullptr;
  double decay = mutant(Mutant::m3_anchor_dropped) ? 0 : energy_;
  for (int64_t t = n_ - 1; t >= 0; --t) {
    const int64_t at = s_.begin + first_ + t;
    for (int64_t n = 0; n < N; ++n) turn[n] += double{m_.turn[t * N + n]};
    decay += m_.dot[t];
    double same = 0;
    for (int64_t i = t * p_.rank; i < (t + 1) * p_.rank; ++i)
      for (int64_t j = t * p_.rank; j < (t + 1) * p_.rank; ++j) {
        const int64_t place = j / w * plan_.room * w + i * w + j % w;
        same += double{m_.w[place]} * double{m_.scores[place]};
      }
    Pending p = {0, m_.ds[t] + same, m_.lambda[t], m_.other[t], m_.dt[t], first_ + t};
    p.ddt = double{p.lambda} * p.dgamma;
    const float *tanh = m_.tanh + t * plan_.pairs, *slope = m_.slope + t * plan_.pairs;
    double by_rate = 0;
    float* const rates = dangle ? dangle + t * plan_.pairs : m_.rates;
    const double scale = double{m_.dt[t]} * pi;
    for (int64_t i = 0; c_.in.angles && i < p_.pairs; ++i) {
      const auto [a, b] = pair(i);
      const double whole = turn[a] - turn[b];
      by_rate += whole * double{tanh[i]};
      rates[i] = static_cast<float>(whole * scale * double{slope[i]});
    }
    if (d.angles && !dangle)
      store_row(rates, p_.pairs, d.angles.data, d.angles.dtype,
                offset_of(d.angles, s_.batch, at, h_), d.angles.stride[3]);
    p.ddt += pi * by_rate;
    if (d.adt) {
      const bool reset = m_.adt[t] <= static_cast<float>(reset_below);
      set(d.adt, reset ? 0.0 : decay, s_.batch, h_, at);
    }
    if (t > 0)
      store_token(p, m_.ds[t - 1]);
    else
      u.left[slot] = {p, m_.ds[n_ - 1], sum_skip_};
  }
  if (first_ > 0 || !c_.out.d.initial_states.angle) return;
  for (int64_t i = 0; i < p_.pairs; ++i) {
    const auto [a, b] = pair(i);
    set(c_.out.d.initial_states.angle, turn[a] - turn[b], s_.row, h_, i);
  }
}

// d_v, d_z and what the projection of v gets.
void Worker::store_values() {
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

float Worker::gradient_summary(const ChunkAt& at, float* own) {
  std::fill_n(m_.parameters, plan_.parameters(), 0.0f);
  load(at.chunk, at.turns);
  query();
  if (plan_.needs_y) scores();
  upstream(at.state);
  return gradient_summary(own);
}

// (e^L . dO)^T Q of the loaded chunk.
float Worker::gradient_summary(float* own) {
  scale_panels(m_.o, rows_, plan_.values, plan_.room, m_.left_rows, m_.scaled);
  into_state(m_.q, m_.scaled, own);
  return m_.left[n_ - 1];
}

// <Hout, E> and torque(Hout, E) of the chunk's end.
void Worker::anchor_turns(const ChunkAt& at) {
  AnchorJob job;
  job.h = at.state + plan_.state();
  job.e = at.gradient;
  job.columns = p_.state_dim;
  job.room = plan_.columns;
  job.values = plan_.values;
  job.pairs = p_.pairs;
  job.halves = halves_;
  job.turn = m_.anchor;
  std::fill_n(m_.anchor, plan_.columns, 0.0f);
  energy_ = anchor(job);
}

// What all chunks need to know of the sequence's end.
void Worker::find_ends(HeadMemory& u, const ChunkAt& last) {
  load(last.chunk, last.turns);
  anchor_turns(last);
  last_turns(u);
}

void Worker::chunk_back(HeadMemory& u, const ChunkAt& at, bool find_last) {
  const bool last = at.chunk + 1 == chunks();
  float *dq = rows_of(u.dq, at.slot), *dk = rows_of(u.dk, at.slot);
  std::fill_n(m_.parameters, plan_.parameters(), 0.0f);
  load(at.chunk, at.turns);
  query();
  scores();
  upstream(at.state);
  pair_products();
  query_gradients(at, dq);
  key_gradients(at, dk);
  value_gradients(at);
  anchor_turns(at);
  if (last && find_last) last_turns(u);
  turn_gradients(dq, dk, last);
  token_gradients(u, at.slot);
  store_values();
}

void Worker::gradients_of(HeadMemory& u, const ChunkAt& at) { chunk_back(u, at, false); }

// In turn from the last chunk: what waits for the chunk before, and sums over tokens.
void Worker::close_chunk(HeadMemory& u, int64_t slot, const float* sums) {
  if (u.pending.token >= 0) store_token(u.pending, u.left[slot].last_ds);
  u.pending = u.left[slot].first;
  add_to_fp64(sums, plan_.parameters(), u.parameters);
  u.parameters[plan_.parameters()] += u.left[slot].skip;
}

void Worker::chunk_gradients(HeadMemory& u, int64_t chunk) {
  const int level = plan_.levels - 1;
  const int64_t slot = chunk % plan_.stride[level - 1];
  chunk_back(u,
             {chunk, 0, u.turns[level] + slot * 3 * plan_.pairs,
              u.states[level] + slot * plan_.state(), u.gradient},
             true);
  const float decay = gradient_summary(m_.joined);
  join(u.gradient, decay, m_.joined, plan_.state(), u.gradient);
  close_chunk(u, 0, m_.parameters);
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
  store_token(u.pending, db);
}

}  // namespace talea::mamba3::cpu
