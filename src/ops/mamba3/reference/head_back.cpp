// What: backward of one head in fp64, as section 2.1 of the definition has it.
// Why: every gradient by the adjoint of the recurrence, token by token from the end.
// Never: divides by a decay; states behind a segment are computed anew from its checkpoint.
#include <algorithm>
#include <cmath>

#include "algebra/scan_state.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/reference/head.hpp"

namespace talea::mamba3::reference {

constexpr double pi = two_pi / 2;

double Head::torque(const double* row, const double* gradient, int64_t pair) const {
  const auto [a, b] = pair_columns(pair);
  return row[a] * gradient[b] - row[b] * gradient[a];
}

// From the gradient of out to dy; the token's y is in memory.
void Head::finish_adjoint(int64_t t) {
  const Inputs& in = c_.in;
  const Gradients& d = c_.out.d;
  const int64_t b = s_.batch, at = s_.begin + t, RP = R_ * P_;
  double* const d_norm = parameter_ + 2 * R_ * N_ + 3 * RP;
  for (int64_t p = 0; d.z && p < P_; ++p) m_.normed[p] = 0;
  for (int64_t r = 0; r < R_; ++r) {
    const double* y = m_.y + r * P_;
    double squares = 0, mean = 0;
    for (int64_t p = 0; p < P_; ++p) squares += y[p] * y[p];
    const bool norm = p_.options.head_norm;
    const double rstd =
        norm ? 1 / std::sqrt(squares / static_cast<double>(P_) + p_.options.norm_eps) : 1;
    for (int64_t p = 0; p < P_; ++p) {
      const double w = norm ? get_or(1, in.norm_weight, h_, p) : 1, n = y[p] * rstd * w;
      double gate = 1, up = get_or(0, in.d_out, b, at, p_.reduce ? 0 : r, h_, p), slope = 0;
      const double z = get_or(0, in.z, b, at, h_, p), mz = get_or(1, in.mimo_z, h_, r, p);
      if (in.z) {
        const double u = z * mz, sg = 1 / (1 + std::exp(-u));
        gate = u * sg;
        slope = sg * (1 + u * (1 - sg));
      }
      parameter_[2 * R_ * N_ + 2 * RP + r * P_ + p] += up * n * gate;
      up *= get_or(1, in.mimo_out, h_, r, p);
      const double du = up * n * slope, e = up * gate;
      if (d.z) m_.normed[p] += du * mz;
      parameter_[2 * R_ * N_ + RP + r * P_ + p] += du * z;
      if (norm) d_norm[p] += e * y[p] * rstd;
      m_.dy[r * P_ + p] = e * w;
      mean += e * w * y[p] * rstd;
    }
    mean /= static_cast<double>(P_);
    for (int64_t p = 0; norm && p < P_; ++p)
      m_.dy[r * P_ + p] = rstd * (m_.dy[r * P_ + p] - y[p] * rstd * mean);
  }
  for (int64_t p = 0; d.z && p < P_; ++p) set(d.z, m_.normed[p], b, at, h_, p);
}

// Rows of dq and dk turned back: biases of this head, then the sums of the group.
void Head::turn_back(int64_t t) {
  const int64_t RN = R_ * N_;
  for (int64_t r = 0; r < R_; ++r) {
    rotate(m_.dq + r * N_, -1);
    rotate(m_.dk + r * N_, -1);
  }
  for (int64_t i = 0; i < RN; ++i) {
    parameter_[i] += m_.dq[i];
    parameter_[RN + i] += m_.dk[i];
    m_.sum_q[t * RN + i] += m_.dq[i];
    m_.sum_k[t * RN + i] += m_.dk[i];
  }
}

void Head::store_token_gradients(int64_t t, const Step& s, double dgamma, double db, double dadt) {
  const Gradients& d = c_.out.d;
  const int64_t b = s_.batch, at = s_.begin + t;
  double ddt = s.lambda * dgamma + s.other * db;
  for (int64_t i = 0; c_.in.angles && i < A_; ++i) {
    const double rate = std::tanh(get(c_.in.angles, b, at, h_, i));
    ddt += m_.dtheta[i] * pi * rate;
    const double dangle = m_.dtheta[i] * s.dt * pi * (1 - rate * rate);
    m_.sum_angle[t * A_ + i] += dangle;
    if (d.angles && !p_.sum_angles) set(d.angles, dangle, b, at, h_, i);
  }
  if (d.adt) set(d.adt, dadt, b, h_, at);
  if (d.dt) set(d.dt, ddt, b, h_, at);
  if (d.trap) set(d.trap, s.lambda * s.other * s.dt * (dgamma - db), b, h_, at);
  for (int64_t p = 0; p < P_; ++p) {
    double dv = t == T_ - 1 ? get_or(0, c_.in.d_final_states.v, s_.row, h_, p) : 0;
    for (int64_t r = 0; r < R_; ++r) {
      const double own = m_.dv[r * P_ + p];
      dv += own * get_or(1, c_.in.mimo_v, h_, r, p);
      parameter_[2 * R_ * N_ + r * P_ + p] += own * get(c_.in.v, b, at, h_, p);
    }
    if (d.v) set(d.v, dv, b, at, h_, p);
  }
}

// e: dL/dHs of t on entry, of t - 1 on return; next_dk, next_dv: what key and value of t get as
// those held over, on return what those of t - 1 get.
void Head::token_back(int64_t t, const double* before) {
  const Step s = step(t);
  const double skip = get_or(0, c_.in.d, h_);
  if (t > 0) {
    rows(t - 1, m_.q, m_.k_prev, m_.v_prev);
  } else {
    start();
  }
  rows(t, m_.q, m_.k, m_.v);
  std::copy_n(before, P_ * N_, m_.h);
  for (int64_t p = 0; p < P_; ++p)
    for (int64_t n = 0; n < N_; ++n) {
      double own = 0;
      for (int64_t r = 0; r < R_; ++r) own += m_.v[r * P_ + p] * m_.k[r * N_ + n];
      m_.h[p * N_ + n] = s.alpha * before[p * N_ + n] + s.gamma * own;
    }
  raw_output();
  finish_adjoint(t);
  std::copy_n(m_.next_dk, R_ * N_, m_.dk);
  std::copy_n(m_.next_dv, R_ * P_, m_.dv);
  std::fill_n(m_.dq, R_ * N_, 0.0);
  std::fill_n(m_.next_dk, R_ * N_, 0.0);
  std::fill_n(m_.next_dv, R_ * P_, 0.0);
  double dgamma = 0, db = 0, dadt = 0, dskip = 0;
  for (int64_t r = 0; r < R_; ++r)
    for (int64_t p = 0; p < P_; ++p) {
      m_.dv[r * P_ + p] += skip * m_.dy[r * P_ + p];
      dskip += m_.dy[r * P_ + p] * m_.v[r * P_ + p];
    }
  parameter_[parameter_count(p_) - 1] += dskip;
  for (int64_t p = 0; p < P_; ++p)
    for (int64_t n = 0; n < N_; ++n) {
      double& e = m_.e[p * N_ + n];
      double f = e;
      for (int64_t r = 0; r < R_; ++r) {
        m_.dq[r * N_ + n] += m_.h[p * N_ + n] * m_.dy[r * P_ + p];
        f += m_.dy[r * P_ + p] * m_.q[r * N_ + n];
      }
      e = s.alpha * f;
      dadt += e * before[p * N_ + n];
      for (int64_t r = 0; r < R_; ++r) {
        const double v = m_.v[r * P_ + p], k = m_.k[r * N_ + n];
        const double v_in = m_.v_prev[r * P_ + p], k_in = m_.k_prev[r * N_ + n];
        m_.dk[r * N_ + n] += s.gamma * f * v;
        m_.dv[r * P_ + p] += s.gamma * f * k;
        dgamma += v * f * k;
        m_.next_dk[r * N_ + n] += s.b * e * v_in;
        m_.next_dv[r * P_ + p] += s.b * e * k_in;
        db += v_in * e * k_in;
      }
    }
  for (int64_t r = 0; t == T_ - 1 && r < R_; ++r)
    for (int64_t n = 0; n < N_; ++n)
      m_.dk[r * N_ + n] += get_or(0, c_.in.d_final_states.k, s_.row, r, h_, n);
  for (int64_t i = 0; i < A_; ++i)
    for (int64_t r = 0; r < R_; ++r)
      m_.dtheta[i] +=
          torque(m_.q + r * N_, m_.dq + r * N_, i) + torque(m_.k + r * N_, m_.dk + r * N_, i);
  store_token_gradients(t, s, dgamma, db, dadt);
  turn_back(t);
}

void Head::checkpoint_pass() {
  start();
  for (int64_t t = 0; t < T_; ++t) {
    if (t % m_.segment == 0) std::copy_n(m_.h, P_ * N_, m_.checkpoints + t / m_.segment * P_ * N_);
    rows(t, m_.q, m_.k, m_.v);
    advance(step(t));
    hold();
  }
}

// Tokens [first, last): their states anew, then from the last to the first.
void Head::segment_back(int64_t first, int64_t last) {
  if (first > 0)
    rows(first - 1, m_.q, m_.k_prev, m_.v_prev);
  else
    start();
  std::copy_n(m_.checkpoints + first / m_.segment * P_ * N_, P_ * N_, m_.h);
  for (int64_t t = first; t < last; ++t) {
    const Step s = step(t);
    double* before = m_.before + (t - first) * P_ * N_;
    for (int64_t p = 0; p < P_; ++p)
      for (int64_t n = 0; n < N_; ++n) {
        double held = 0;
        for (int64_t r = 0; r < R_; ++r) held += m_.v_prev[r * P_ + p] * m_.k_prev[r * N_ + n];
        before[p * N_ + n] = m_.h[p * N_ + n] + s.b * held;
      }
    rows(t, m_.q, m_.k, m_.v);
    advance(s);
    hold();
  }
  for (int64_t t = last - 1; t >= first; --t) token_back(t, m_.before + (t - first) * P_ * N_);
}

void Head::initial_gradients() {
  const States& d = c_.out.d.initial_states;
  for (int64_t i = 0; d.angle && i < A_; ++i) set(d.angle, m_.dtheta[i], s_.row, h_, i);
  for (int64_t p = 0; p < P_; ++p) {
    for (int64_t n = 0; d.ssm && n < N_; ++n) set(d.ssm, m_.e[p * N_ + n], s_.row, h_, p, n);
    double dv = 0;
    const double v_in = get_or(0, c_.in.initial_states.v, s_.row, h_, p);
    for (int64_t r = 0; r < R_; ++r) {
      const double own = m_.next_dv[r * P_ + p];
      dv += own * get_or(1, c_.in.mimo_v, h_, r, p);
      parameter_[2 * R_ * N_ + r * P_ + p] += own * v_in;
    }
    if (d.v) set(d.v, dv, s_.row, h_, p);
  }
  for (int64_t r = 0; d.k && r < R_; ++r)
    for (int64_t n = 0; n < N_; ++n) set(d.k, m_.next_dk[r * N_ + n], s_.row, r, h_, n);
}

void Head::backward() {
  if (T_ == 0) return pass_through();
  angles();
  checkpoint_pass();
  for (int64_t p = 0; p < P_; ++p)
    for (int64_t n = 0; n < N_; ++n)
      m_.e[p * N_ + n] = get_or(0, c_.in.d_final_states.ssm, s_.row, h_, p, n);
  for (int64_t i = 0; i < A_; ++i)
    m_.dtheta[i] = get_or(0, c_.in.d_final_states.angle, s_.row, h_, i);
  std::fill_n(m_.next_dk, R_ * N_, 0.0);
  std::fill_n(m_.next_dv, R_ * P_, 0.0);
  for (int64_t last = T_; last > 0;) {
    const int64_t first = (last - 1) / m_.segment * m_.segment;
    segment_back(first, last);
    last = first;
  }
  initial_gradients();
}

}  // namespace talea::mamba3::reference
