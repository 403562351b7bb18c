// What: forward of one head in fp64, as section 1 of the definition has it.
// Why: the oracle of the library is the recurrence itself.
// Never: uses a chunk, or stores rows of more than one token.
#include "ops/mamba3/reference/head.hpp"

#include <algorithm>
#include <cmath>

#include "algebra/scan_state.hpp"
#include "ops/mamba3/element.hpp"

namespace talea::mamba3::reference {

Memory::Memory(Arena& arena, const Problem& p) {
  const int64_t S = p.tokens, RN = p.rank * p.state_dim, RP = p.rank * p.head_dim;
  const int64_t PN = p.head_dim * p.state_dim, A = p.pairs;
  const auto some = [&](int64_t n) { return arena.take<double>(n); };
  ends = arena.take<int64_t>(std::max(p.sequences, p.batch) + 1);
  turns = arena.take<uint64_t>(S * A);
  taint = some(S * A);
  cosine = some(A), sine = some(A);
  q = some(RN), k = some(RN), k_prev = some(RN);
  v = some(RP), v_prev = some(RP), y = some(RP), dy = some(RP), normed = some(RP);
  h = some(PN), e = some(PN);
  dq = dk = dv = next_dk = next_dv = dtheta = nullptr;
  checkpoints = before = sum_q = sum_k = sum_angle = parameters = nullptr;
  if (!p.backward()) return;
  segment = std::max<int64_t>(
      1, static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(p.tokens)))));
  dq = some(RN), dk = some(RN), next_dk = some(RN), dv = some(RP), next_dv = some(RP);
  dtheta = some(A);
  checkpoints = some((S + segment - 1) / segment * PN);
  before = some(segment * PN);
  sum_q = some(S * RN), sum_k = some(S * RN), sum_angle = some(S * A);
  parameters = some(p.heads * parameter_count(p));
}

Head::Head(const Call& call, Memory& memory, const Sequence& sequence, int64_t head)
    : c_(call),
      p_(call.problem),
      m_(memory),
      s_(sequence),
      h_(head),
      g_(call.problem.group_of(head)),
      T_(sequence.tokens()),
      R_(p_.rank),
      N_(p_.state_dim),
      P_(p_.head_dim),
      A_(p_.pairs),
      parameter_(memory.parameters ? memory.parameters + head * parameter_count(p_) : nullptr) {}

std::pair<int64_t, int64_t> Head::pair_columns(int64_t i) const {
  if (p_.rotary_pairs == RotaryPairs::halves) return {i, i + N_ / 2};
  return {2 * i, 2 * i + 1};
}

void Head::angles() {
  const Inputs& in = c_.in;
  for (int64_t i = 0; i < A_; ++i) {
    const double start = get_or(0, in.initial_states.angle, s_.row, h_, i) / two_pi;
    uint64_t sum = to_turns(start);
    double taint = taint_of(start);
    if (c_.angle_offset) sum += c_.angle_offset[(s_.row * p_.heads + h_) * A_ + i];
    for (int64_t t = 0; t < T_; ++t) {
      if (in.angles) {
        const double rate = std::tanh(get(in.angles, s_.batch, s_.begin + t, h_, i));
        const double turns = 0.5 * rate * get(in.dt, s_.batch, h_, s_.begin + t);
        sum += to_turns(turns);
        taint += taint_of(turns);
      }
      m_.turns[t * A_ + i] = sum;
      m_.taint[t * A_ + i] = taint;
    }
  }
}

void Head::start() {
  const States& s = c_.in.initial_states;
  for (int64_t p = 0; p < P_; ++p)
    for (int64_t n = 0; n < N_; ++n) m_.h[p * N_ + n] = get_or(0, s.ssm, s_.row, h_, p, n);
  for (int64_t r = 0; r < R_; ++r) {
    for (int64_t n = 0; n < N_; ++n) m_.k_prev[r * N_ + n] = get_or(0, s.k, s_.row, r, h_, n);
    for (int64_t p = 0; p < P_; ++p)
      m_.v_prev[r * P_ + p] = get_or(0, s.v, s_.row, h_, p) * get_or(1, c_.in.mimo_v, h_, r, p);
  }
}

Step Head::step(int64_t t) const {
  const int64_t at = s_.begin + t;
  const double dt = get(c_.in.dt, s_.batch, h_, at), trap = get(c_.in.trap, s_.batch, h_, at);
  const double adt = get(c_.in.adt, s_.batch, h_, at);
  const double lambda = 1 / (1 + std::exp(-trap)), other = 1 / (1 + std::exp(trap));
  return {dt, lambda, other, lambda * dt, other * dt, adt <= reset_below ? 0 : std::exp(adt)};
}

void Head::turn(int64_t t) {
  for (int64_t i = 0; i < A_; ++i) {
    const double angle = radians_of(m_.turns[t * A_ + i]) + m_.taint[t * A_ + i];
    m_.cosine[i] = std::cos(angle);
    m_.sine[i] = std::sin(angle);
  }
}

void Head::rotate(double* row, double direction) const {
  for (int64_t i = 0; i < A_; ++i) {
    const auto [a, b] = pair_columns(i);
    const double u = row[a], w = row[b], sine = direction * m_.sine[i];
    row[a] = u * m_.cosine[i] - w * sine;
    row[b] = u * sine + w * m_.cosine[i];
  }
}

void Head::rows(int64_t t, double* q, double* k, double* v) {
  const Inputs& in = c_.in;
  const int64_t b = s_.batch, at = s_.begin + t;
  turn(t);
  for (int64_t r = 0; r < R_; ++r) {
    for (int64_t n = 0; n < N_; ++n) {
      q[r * N_ + n] = get(in.q, b, at, r, g_, n) + get_or(0, in.q_bias, h_, r, n);
      k[r * N_ + n] = get(in.k, b, at, r, g_, n) + get_or(0, in.k_bias, h_, r, n);
    }
    rotate(q + r * N_, 1);
    rotate(k + r * N_, 1);
    for (int64_t p = 0; p < P_; ++p)
      v[r * P_ + p] = get(in.v, b, at, h_, p) * get_or(1, in.mimo_v, h_, r, p);
  }
}

void Head::advance(const Step& s) {
  for (int64_t p = 0; p < P_; ++p)
    for (int64_t n = 0; n < N_; ++n) {
      double held = 0, own = 0;
      for (int64_t r = 0; r < R_; ++r) {
        held += m_.v_prev[r * P_ + p] * m_.k_prev[r * N_ + n];
        own += m_.v[r * P_ + p] * m_.k[r * N_ + n];
      }
      double& h = m_.h[p * N_ + n];
      h = s.alpha * (h + s.b * held) + s.gamma * own;
    }
}

void Head::hold() {
  std::swap(m_.k, m_.k_prev);
  std::swap(m_.v, m_.v_prev);
}

void Head::raw_output() {
  const double skip = get_or(0, c_.in.d, h_);
  for (int64_t r = 0; r < R_; ++r)
    for (int64_t p = 0; p < P_; ++p) {
      double sum = 0;
      for (int64_t n = 0; n < N_; ++n) sum += m_.h[p * N_ + n] * m_.q[r * N_ + n];
      m_.y[r * P_ + p] = sum + skip * m_.v[r * P_ + p];
    }
}

void Head::finish(int64_t t) {
  const Inputs& in = c_.in;
  const int64_t b = s_.batch, at = s_.begin + t;
  for (int64_t p = 0; p < P_; ++p) m_.normed[p] = 0;  // the sum over r
  for (int64_t r = 0; r < R_; ++r) {
    double* y = m_.y + r * P_;
    double squares = 0;
    for (int64_t p = 0; p < P_; ++p) squares += y[p] * y[p];
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(P_) + p_.options.norm_eps);
    for (int64_t p = 0; p < P_; ++p) {
      double value = y[p];
      if (p_.options.head_norm) value *= rstd * get_or(1, in.norm_weight, h_, p);
      if (in.z) {
        const double u = get(in.z, b, at, h_, p) * get_or(1, in.mimo_z, h_, r, p);
        value *= u / (1 + std::exp(-u));
      }
      value *= get_or(1, in.mimo_out, h_, r, p);
      if (p_.reduce)
        m_.normed[p] += value;
      else
        set(c_.out.out, value, b, at, r, h_, p);
    }
  }
  for (int64_t p = 0; p_.reduce && p < P_; ++p) set(c_.out.out, m_.normed[p], b, at, 0, h_, p);
}

void Head::final_states() {
  const States& f = c_.out.final_states;
  for (int64_t i = 0; i < A_; ++i) {
    const int64_t last = (T_ - 1) * A_ + i;
    if (c_.final_turns) c_.final_turns[(s_.row * p_.heads + h_) * A_ + i] = m_.turns[last];
    if (!f.angle) continue;
    set(f.angle, stored_radians(m_.turns[last], f.angle.dtype == DType::f32) + m_.taint[last],
        s_.row, h_, i);
  }
  for (int64_t p = 0; f.ssm && p < P_; ++p)
    for (int64_t n = 0; n < N_; ++n) set(f.ssm, m_.h[p * N_ + n], s_.row, h_, p, n);
  for (int64_t r = 0; f.k && r < R_; ++r)  // hold() has made them those of the token before
    for (int64_t n = 0; n < N_; ++n) set(f.k, m_.k_prev[r * N_ + n], s_.row, r, h_, n);
  for (int64_t p = 0; f.v && p < P_; ++p)
    set(f.v, get(c_.in.v, s_.batch, s_.end - 1, h_, p), s_.row, h_, p);
}

void Head::pass_through() {
  const bool back = p_.backward();
  const States& from = back ? c_.in.d_final_states : c_.in.initial_states;
  const States& to = back ? c_.out.d.initial_states : c_.out.final_states;
  for (int64_t i = 0; i < A_; ++i) {
    double angle = get_or(0, from.angle, s_.row, h_, i);
    if (!back) {
      const int64_t at = (s_.row * p_.heads + h_) * A_ + i;
      uint64_t turns = to_turns(angle / two_pi);
      if (c_.angle_offset) turns += c_.angle_offset[at];
      if (c_.final_turns) c_.final_turns[at] = turns;
      angle = stored_radians(turns, to.angle.dtype == DType::f32) + taint_of(angle);
    }
    if (to.angle) set(to.angle, angle, s_.row, h_, i);
  }
  for (int64_t p = 0; p < P_; ++p) {
    for (int64_t n = 0; to.ssm && n < N_; ++n)
      set(to.ssm, get_or(0, from.ssm, s_.row, h_, p, n), s_.row, h_, p, n);
    if (to.v) set(to.v, get_or(0, from.v, s_.row, h_, p), s_.row, h_, p);
  }
  for (int64_t r = 0; to.k && r < R_; ++r)
    for (int64_t n = 0; n < N_; ++n)
      set(to.k, get_or(0, from.k, s_.row, r, h_, n), s_.row, r, h_, n);
}

void Head::forward() {
  if (T_ == 0) return pass_through();
  angles();
  start();
  for (int64_t t = 0; t < T_; ++t) {
    rows(t, m_.q, m_.k, m_.v);
    advance(step(t));
    if (c_.out.out) {
      raw_output();
      finish(t);
    }
    hold();
  }
  final_states();
}

}  // namespace talea::mamba3::reference
