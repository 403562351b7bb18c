// What: backward of one head in the chunk form, every intermediate stored in the input's dtype.
// Why: what eager tensor code computes: the yardstick of accuracy, and a comparison by name.
// Never: an anchor for the angles: their sums run from the sequence's end.
#include <algorithm>
#include <cmath>

#include "algebra/scan_state.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/unfused/head.hpp"

namespace talea::mamba3::unfused {

constexpr float pi = static_cast<float>(two_pi / 2);

void Head::finish_adjoint(int64_t t) {
  const Inputs& in = c_.in;
  const Gradients& d = c_.out.d;
  const int64_t RN = R_ * N_, RP = R_ * P_, at = s_.begin + t;
  const auto some = [&](const Tensor& x, float neutral, auto... i) {
    return static_cast<float>(get_or(neutral, x, i...));
  };
  float* dz = m_.result;
  std::fill_n(dz, P_, 0.0f);
  for (int64_t r = 0; r < R_; ++r) {
    const Matrix y = m_.y.slice(t * R_ + r, 1), dy = m_.dy.slice(t * R_ + r, 1);
    float squares = 0, mean = 0;
    for (int64_t p = 0; p < P_; ++p) squares += y.at(0, p) * y.at(0, p);
    const bool norm = p_.options.head_norm;
    const float eps = static_cast<float>(p_.options.norm_eps);
    const float rstd = norm ? 1 / std::sqrt(squares / static_cast<float>(P_) + eps) : 1;
    for (int64_t p = 0; p < P_; ++p) {
      const float w = norm ? some(in.norm_weight, 1, h_, p) : 1, n = y.at(0, p) * rstd * w;
      const float z = some(in.z, 0, s_.batch, at, h_, p), mz = some(in.mimo_z, 1, h_, r, p);
      const float u = z * mz, sg = 1 / (1 + std::exp(-u)), gate = in.z ? u * sg : 1;
      float g = some(in.d_out, 0, s_.batch, at, p_.reduce ? 0 : r, h_, p);
      parameter_[2 * RN + 2 * RP + r * P_ + p] += g * n * gate;
      g *= some(in.mimo_out, 1, h_, r, p);
      const float du = in.z ? g * n * sg * (1 + u * (1 - sg)) : 0, e = g * gate;
      dz[p] += du * mz;
      parameter_[2 * RN + RP + r * P_ + p] += du * z;
      parameter_[2 * RN + 3 * RP + p] += e * y.at(0, p) * rstd;
      dy.set(0, p, e * w);
      mean += e * w * y.at(0, p) * rstd / static_cast<float>(P_);
    }
    for (int64_t p = 0; norm && p < P_; ++p)
      dy.set(0, p, rstd * (dy.at(0, p) - y.at(0, p) * rstd * mean));
  }
  for (int64_t p = 0; d.z && p < P_; ++p) set(d.z, dz[p], s_.batch, at, h_, p);
}

// W = dO V^T under the masks of dq, dk and of the decays.
void Head::weight_gradients(const Chunk& c) {
  const int64_t row = c.first * R_;
  const Matrix q = m_.q.slice(row, c.rows), k = m_.k.slice(row, c.rows);
  const auto square = [&](const Matrix& x) { return Matrix{x.data, x.dtype, c.rows, c.rows}; };
  const Matrix W = square(m_.products), weighted = square(m_.weighted), S = square(m_.scores);
  product(m_.dy.slice(row, c.rows), false, m_.v.slice(row, c.rows), true, W, 0);
  product(q, false, k, true, S, 0);
  for (int64_t t = 0; t < c.tokens; ++t) {
    double same = 0;
    for (int64_t i = t * R_; i < (t + 1) * R_; ++i)
      for (int64_t j = t * R_; j < (t + 1) * R_; ++j) same += W.at(i, j) * S.at(i, j);
    m_.dgamma[c.first + t] = same;
    for (int64_t i = t * R_; i < (t + 1) * R_; ++i)
      parameter_[parameter_count(p_) - 1] += W.at(i, i);
  }
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t j = 0; j < c.rows; ++j)
      weighted.set(i, j, j / R_ > i / R_ ? 0 : W.at(i, j) * m_.decay.at(i, j));
  product(weighted, false, k, false, m_.dq.slice(row, c.rows), 0);
  product(weighted, true, q, false, m_.dk.slice(row, c.rows), 0);
  // The decays alone, for the gradients of s.
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t j = 0; j < c.rows; ++j) {
      const int64_t ti = c.first + i / R_, tj = c.first + j / R_;
      weighted.set(i, j, ti > tj ? W.at(i, j) * std::exp(m_.L[ti] - m_.L[tj]) : 0);
    }
  const Matrix alone = {m_.shaped.data, p_.dtype, c.rows, N_};
  product(weighted, true, q, false, alone, 0);
}

void Head::value_gradients(const Chunk& c) {
  const int64_t row = c.first * R_;
  const auto square = [&](const Matrix& x) { return Matrix{x.data, x.dtype, c.rows, c.rows}; };
  const Matrix weighted = square(m_.weighted), S = square(m_.scores);
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t j = 0; j < c.rows; ++j)
      weighted.set(i, j, j / R_ > i / R_ ? 0 : S.at(i, j) * m_.decay.at(i, j));
  const Matrix dv = m_.dv.slice(row, c.rows), dy = m_.dy.slice(row, c.rows);
  product(weighted, true, dy, false, dv, 0);
  const Matrix far = {m_.pairs.data, p_.dtype, c.rows, P_};
  product(m_.k.slice(row, c.rows), false, m_.copy, true, far, 0);
  const auto skip = static_cast<float>(get_or(0, c_.in.d, h_));
  for (int64_t j = 0; j < c.rows; ++j)
    for (int64_t p = 0; p < P_; ++p)
      dv.set(
          j, p,
          dv.at(j, p) + right(c, j) * scale(c.first + j / R_) * far.at(j, p) + skip * dy.at(j, p));
}

// Gradients of the decays (from the chunk's end on) and the turn of each token.
void Head::turns(const Chunk& c) {
  const auto torque = [&](const Matrix& x, const Matrix& g, int64_t i, int64_t pair) {
    const auto [a, b] = columns_of(pair);
    return x.at(i, a) * g.at(i, b) - x.at(i, b) * g.at(i, a);
  };
  for (int64_t t = 0; t < c.tokens; ++t) {
    double ahead = 0;
    for (int64_t r = 0; r < R_; ++r) {
      const int64_t i = (c.first + t) * R_ + r;
      for (int64_t n = 0; n < N_; ++n)
        ahead += m_.q.at(i, n) * m_.dq.at(i, n) - m_.k.at(i, n) * m_.dk.at(i, n);
    }
    m_.ddecay[c.first + t] = ahead;
    for (int64_t pair = 0; pair < A_; ++pair) {
      double turn = 0;
      for (int64_t r = 0; r < R_; ++r) {
        const int64_t i = (c.first + t) * R_ + r;
        turn += torque(m_.q, m_.dq, i, pair) + torque(m_.k, m_.dk, i, pair);
      }
      m_.turn[(c.first + t) * A_ + pair] = turn;
    }
  }
}

void Head::backward(const Chunk& c, int64_t number) {
  const int64_t row = c.first * R_, last = c.first + c.tokens - 1;
  const Matrix held = m_.states.slice(number * P_, P_),
               next = m_.states.slice((number + 1) * P_, P_);
  const Matrix dq = m_.dq.slice(row, c.rows), dk = m_.dk.slice(row, c.rows);
  const Matrix k = m_.k.slice(row, c.rows);
  m_.decay.columns = c.rows;
  weights(c);
  double end = 0;
  for (int64_t i = 0; i < P_ * N_; ++i) {
    m_.copy.set(0, i, static_cast<const float*>(m_.gradient.data)[i]);
    end += next.at(0, i) * m_.copy.at(0, i);
  }
  weight_gradients(c);
  const Matrix far = {m_.pairs.data, p_.dtype, c.rows, N_};
  const Matrix alone = {m_.shaped.data, p_.dtype, c.rows, N_};
  product(m_.dy.slice(row, c.rows), false, held, false, far, 0);
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t n = 0; n < N_; ++n) dq.set(i, n, dq.at(i, n) + left(c, i) * far.at(i, n));
  product(m_.v.slice(row, c.rows), false, m_.copy, false, far, 0);
  for (int64_t t = 0; t < c.tokens; ++t) {
    double ds = 0;
    for (int64_t j = t * R_; j < (t + 1) * R_; ++j)
      for (int64_t n = 0; n < N_; ++n) {
        const float behind = right(c, j) * far.at(j, n);
        dk.set(j, n, dk.at(j, n) + scale(c.first + t) * behind);
        ds += k.at(j, n) * (alone.at(j, n) + behind);
      }
    m_.dgamma[c.first + t] += ds;
    if (c.first + t + 1 < T_) m_.db[c.first + t + 1] = ds;
  }
  value_gradients(c);
  turns(c);
  for (int64_t t = last; t >= c.first; --t) m_.ddecay[t] = end += m_.ddecay[t];
  const Matrix scaled = {m_.pairs.data, p_.dtype, c.rows, P_};
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t p = 0; p < P_; ++p) scaled.set(i, p, left(c, i) * m_.dy.at(row + i, p));
  product(scaled, true, m_.q.slice(row, c.rows), false, m_.gradient, std::exp(m_.L[last]));
}

void Head::row_gradients(int64_t t) {
  const int64_t RN = R_ * N_;
  float* row = m_.result;
  for (int64_t r = 0; r < R_; ++r)
    for (const bool key : {false, true}) {
      const Matrix& from = key ? m_.dk : m_.dq;
      for (int64_t n = 0; n < N_; ++n) row[n] = from.at(t * R_ + r, n);
      rotate(row, t, -1);
      for (int64_t n = 0; n < N_; ++n) {
        parameter_[(key ? RN : 0) + r * N_ + n] += row[n];
        (key ? m_.sum_k : m_.sum_q)[(t * R_ + r) * N_ + n] += row[n];
      }
    }
}

void Head::token_gradients() {
  const Gradients& d = c_.out.d;
  const States& last = c_.in.d_final_states;
  for (int64_t r = 0; r < R_; ++r)
    for (int64_t n = 0; n < N_; ++n) {
      const int64_t i = (T_ - 1) * R_ + r;
      m_.dk.set(i, n, m_.dk.at(i, n) + static_cast<float>(get_or(0, last.k, s_.row, r, h_, n)));
    }
  double dfirst = 0;  // of b_0
  for (int64_t p = 0; p < P_; ++p)
    for (int64_t r = 0; r < R_; ++r)
      for (int64_t n = 0; n < N_; ++n)
        dfirst += m_.gradient.at(p, n) * get_or(0, c_.in.initial_states.v, s_.row, h_, p) *
                  get_or(1, c_.in.mimo_v, h_, r, p) *
                  get_or(0, c_.in.initial_states.k, s_.row, r, h_, n);
  m_.db[0] = dfirst;
  for (int64_t i = 0; i < A_; ++i) {  // d_final_k came after the turns
    const auto [a, b] = columns_of(i);
    double& turn = m_.turn[(T_ - 1) * A_ + i];
    turn += get_or(0, last.angle, s_.row, h_, i);
    for (int64_t r = 0; r < R_; ++r) {
      const int64_t row = (T_ - 1) * R_ + r;
      turn += m_.k.at(row, a) * get_or(0, last.k, s_.row, r, h_, b) -
              m_.k.at(row, b) * get_or(0, last.k, s_.row, r, h_, a);
    }
    for (int64_t t = T_ - 1; t-- > 0;) m_.turn[t * A_ + i] += m_.turn[(t + 1) * A_ + i];
  }
  for (int64_t t = 0; t < T_; ++t) {
    const int64_t b = s_.batch, at = s_.begin + t;
    const float lambda = m_.lambda[t], dt = m_.dt[t];
    double ddt = lambda * m_.dgamma[t] + (1 - lambda) * m_.db[t];
    for (int64_t i = 0; c_.in.angles && i < A_; ++i) {
      const double rate = m_.tanh[t * A_ + i], turn = m_.turn[t * A_ + i];
      ddt += turn * pi * rate;
      const double angle = turn * dt * pi * (1 - rate * rate);
      m_.sum_angle[t * A_ + i] += static_cast<float>(angle);
      if (d.angles && !p_.sum_angles) set(d.angles, angle, b, at, h_, i);
    }
    if (d.adt) set(d.adt, m_.alpha[t] <= reset_below ? 0 : m_.ddecay[t], b, h_, at);
    if (d.dt) set(d.dt, ddt, b, h_, at);
    if (d.trap) set(d.trap, lambda * (1 - lambda) * dt * (m_.dgamma[t] - m_.db[t]), b, h_, at);
    row_gradients(t);
    for (int64_t p = 0; p < P_; ++p) {
      double dv = t == T_ - 1 ? get_or(0, last.v, s_.row, h_, p) : 0;
      for (int64_t r = 0; r < R_; ++r) {
        const double own = m_.dv.at(t * R_ + r, p);
        dv += own * get_or(1, c_.in.mimo_v, h_, r, p);
        parameter_[2 * R_ * N_ + r * P_ + p] += own * get(c_.in.v, b, at, h_, p);
      }
      if (d.v) set(d.v, dv, b, at, h_, p);
    }
  }
}

void Head::initial_gradients() {
  const States &d = c_.out.d.initial_states, &in = c_.in.initial_states;
  for (int64_t i = 0; d.angle && i < A_; ++i) set(d.angle, m_.turn[i], s_.row, h_, i);
  for (int64_t p = 0; p < P_; ++p) {
    double dv = 0;
    for (int64_t r = 0; r < R_; ++r) {
      double own = 0;
      for (int64_t n = 0; n < N_; ++n)
        own += m_.b[0] * m_.gradient.at(p, n) * get_or(0, in.k, s_.row, r, h_, n);
      dv += own * get_or(1, c_.in.mimo_v, h_, r, p);
      parameter_[2 * R_ * N_ + r * P_ + p] += own * get_or(0, in.v, s_.row, h_, p);
    }
    if (d.v) set(d.v, dv, s_.row, h_, p);
    for (int64_t n = 0; d.ssm && n < N_; ++n) set(d.ssm, m_.gradient.at(p, n), s_.row, h_, p, n);
  }
  for (int64_t r = 0; d.k && r < R_; ++r)
    for (int64_t n = 0; n < N_; ++n) {
      double sum = 0;
      for (int64_t p = 0; p < P_; ++p)
        sum += m_.b[0] * m_.gradient.at(p, n) * get_or(0, in.v, s_.row, h_, p) *
               get_or(1, c_.in.mimo_v, h_, r, p);
      set(d.k, sum, s_.row, r, h_, n);
    }
}

}  // namespace talea::mamba3::unfused
