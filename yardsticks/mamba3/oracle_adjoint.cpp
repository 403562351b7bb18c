// What: a head's gradients, and how large the terms and roundings are that they are sums of.
// Why: see oracle.hpp.
// Never: includes anything of src/.
#include "yardsticks/mamba3/oracle_head.hpp"

namespace talea::yardsticks::mamba3 {

namespace {
constexpr int64_t few = 64;  // numbers of a tensor whose worst errors luck does not even out
}

// How large the terms of a torque are, whatever their sum.
double Head::arm(const Row& x, const Row& g, int64_t i) const {
  double sum = 0;
  for (int64_t r = 0; r < s_.R; ++r)
    sum += std::abs(x[index(r * s_.N + left(i))] * g[index(r * s_.N + right(i))]) +
           std::abs(x[index(r * s_.N + right(i))] * g[index(r * s_.N + left(i))]);
  return sum;
}

double Head::torque(const Row& x, const Row& g, int64_t i) const {
  double sum = 0;
  for (int64_t r = 0; r < static_cast<int64_t>(x.size()) / s_.N; ++r)
    sum += x[index(r * s_.N + left(i))] * g[index(r * s_.N + right(i))] -
           x[index(r * s_.N + right(i))] * g[index(r * s_.N + left(i))];
  return sum;
}

Row Head::finish_adjoint(int64_t t) {
  Row dy(index(s_.R * s_.P));
  for (int64_t r = 0; r < s_.R; ++r) {
    const double rstd = scale_of(y_[index(t)], r);
    double mean = 0;
    for (int64_t p = 0; p < s_.P; ++p) {
      const double y = y_[index(t)][index(r * s_.P + p)], n = y * rstd * weight(p);
      const int64_t at = own(r) * s_.P + p;
      double g = in("d_out", 0, up(t, r, p)), gate = 1;
      const double z = in("z", 0, token(t) * s_.P + p), u = z * in("mimo_z", 1, at);
      if (c_.has("z")) gate = u * sigmoid(u);
      add("d_mimo_out", at, g * n * gate);
      g *= in("mimo_out", 1, at);
      if (c_.has("z")) {
        const double du = g * n * sigmoid(u) * (1 + u * (1 - sigmoid(u)));
        add("d_z", token(t) * s_.P + p, du * in("mimo_z", 1, at));
        add("d_mimo_z", at, du * z);
      }
      const double e = g * gate;
      add("d_norm_weight", h_ * s_.P + p, e * y * rstd);
      dy[index(r * s_.P + p)] = e * weight(p);
      mean += e * weight(p) * y * rstd / static_cast<double>(s_.P);
    }
    if (c_.options.head_norm)
      for (int64_t p = 0; p < s_.P; ++p) {
        const double y = y_[index(t)][index(r * s_.P + p)];
        dy[index(r * s_.P + p)] = rstd * (dy[index(r * s_.P + p)] - y * rstd * mean);
      }
  }
  return dy;
}

// g^T v of each rank (for k), g k (for v), and sum of v g k.
Head::Sum Head::contract(const Row& g, double scale, const Row& v, const Row& k, Row& dk,
                         Row& dv) const {
  Sum sum;
  for (int64_t r = 0; r < s_.R; ++r)
    for (int64_t p = 0; p < s_.P; ++p) {
      double gk = 0, terms = 0;
      const double left = v[index(r * s_.P + p)];
      for (int64_t n = 0; n < s_.N; ++n) {
        const double x = g[index(p * s_.N + n)], product = x * k[index(r * s_.N + n)];
        gk += product;
        terms += std::abs(product);
        dk[index(r * s_.N + n)] += scale * x * left;
      }
      dv[index(r * s_.P + p)] += scale * gk;
      sum.value += left * gk;
      sum.terms += std::abs(left) * terms;
    }
  return sum;
}

// Variance of the one rounding that an operand of a product gets, spread evenly over a step.
double Head::rounding_of(double x) const {
  if (x == 0 || rounded(c_.dtype, x) == x) return 0;
  const double step = std::ldexp(1.0, std::ilogb(x) - (c_.dtype == DType::bf16 ? 7 : 10));
  return step * step / 12;
}

// What the roundings of rows v, k and, of g's own token, q and dy leave of v^T g k.
double Head::variance(const Row& g, const Row& v, const Row& k, const Row* q, const Row* dy) const {
  double sum = 0;
  for (int64_t r = 0; r < s_.R; ++r) {
    const double* const own_k = &k[index(r * s_.N)];
    const double* const own_v = &v[index(r * s_.P)];
    for (int64_t p = 0; p < s_.P; ++p) {
      double by = 0;
      for (int64_t n = 0; n < s_.N; ++n) by += g[index(p * s_.N + n)] * own_k[n];
      sum += by * by * rounding_of(own_v[p]);
    }
    for (int64_t n = 0; n < s_.N; ++n) {
      double by = 0;
      for (int64_t p = 0; p < s_.P; ++p) by += g[index(p * s_.N + n)] * own_v[p];
      sum += by * by * rounding_of(own_k[n]);
    }
  }
  if (!q) return sum;
  for (int64_t r = 0; r < s_.R; ++r) {
    const double *own_q = &(*q)[index(r * s_.N)], *own_dy = &(*dy)[index(r * s_.P)];
    Row by_q(index(s_.N)), by_dy(index(s_.P));
    for (int64_t other = 0; other < s_.R; ++other) {
      double score = 0, product = 0;
      for (int64_t n = 0; n < s_.N; ++n) score += own_q[n] * k[index(other * s_.N + n)];
      for (int64_t p = 0; p < s_.P; ++p) product += own_dy[p] * v[index(other * s_.P + p)];
      for (int64_t n = 0; n < s_.N; ++n) by_q[index(n)] += product * k[index(other * s_.N + n)];
      for (int64_t p = 0; p < s_.P; ++p) by_dy[index(p)] += score * v[index(other * s_.P + p)];
    }
    for (int64_t n = 0; n < s_.N; ++n)
      sum += by_q[index(n)] * by_q[index(n)] * rounding_of(own_q[n]);
    for (int64_t p = 0; p < s_.P; ++p)
      sum += by_dy[index(p)] * by_dy[index(p)] * rounding_of(own_dy[p]);
  }
  return sum;
}

void Head::adjoint() {
  const bool is_few = is_16bit(c_.dtype) && s_.B * s_.H * s_.S < few;
  const int64_t RN = s_.R * s_.N, RP = s_.R * s_.P, PN = s_.P * s_.N;
  Row g(index(PN)), dtheta(index(s_.A)), held_k(index(RN)), held_v(index(RP));
  for (int64_t i = 0; i < PN; ++i) g[index(i)] = in("d_final_ssm", 0, state(i, PN));
  for (int64_t i = 0; i < s_.A; ++i) dtheta[index(i)] = in("d_final_angle", 0, state(i, s_.A));
  for (int64_t r = 0; r < s_.R; ++r)
    for (int64_t n = 0; n < s_.N; ++n) held_k[index(r * s_.N + n)] = in("d_final_k", 0, key(r, n));
  for (int64_t t = T_ - 1; t >= 0; --t) {
    const Row &q = q_[index(t)], &k = k_[index(t)], &v = v_[index(t)], dy = finish_adjoint(t);
    Row dq(index(RN)), dk = held_k, dv = held_v;
    for (int64_t r = 0; r < s_.R; ++r)
      for (int64_t p = 0; p < s_.P; ++p) {
        const double up = dy[index(r * s_.P + p)];
        add("d_d", h_, up * v[index(r * s_.P + p)]);
        dv[index(r * s_.P + p)] += in("d", 0, h_) * up;
        for (int64_t n = 0; n < s_.N; ++n)
          dq[index(r * s_.N + n)] += after_[index(t)][index(p * s_.N + n)] * up;
      }
    outer(g, 1, dy, q);
    const Sum dgamma = contract(g, gamma(t), v, k, dk, dv);
    const double of_gamma = is_few ? variance(g, v, k, &q, &dy) : 0;
    double dadt = 0;
    for (int64_t i = 0; i < PN; ++i) {
      g[index(i)] *= alpha_[index(t)];
      dadt += g[index(i)] * before_[index(t)][index(i)];
    }
    held_k.assign(index(RN), 0), held_v.assign(index(RP), 0);
    const Row &held_v_row = t ? v_[index(t - 1)] : v_in_,
              &held_k_row = t ? k_[index(t - 1)] : k_in_;
    const Sum db = contract(g, b(t), held_v_row, held_k_row, held_k, held_v);
    if (is_few) {
      const double of_b = variance(g, held_v_row, held_k_row, nullptr, nullptr);
      const double lambda = lambda_[index(t)], rest = rest_[index(t)];
      add("rounds:d_dt", early(t), std::sqrt(lambda * lambda * of_gamma + rest * rest * of_b));
      add("rounds:d_trap", early(t),
          lambda * rest * std::abs(dt_[index(t)]) * std::sqrt(of_gamma + of_b));
    }
    store(t, dq, dk, dv, dtheta, dgamma, db, dadt);
  }
  initial(g, dtheta, held_k, held_v);
}

void Head::store(int64_t t, Row& dq, Row& dk, const Row& dv, Row& dtheta, const Sum& dgamma,
                 const Sum& db, double dadt) {
  const double lambda = lambda_[index(t)], rest = rest_[index(t)], dt = dt_[index(t)];
  double ddt = lambda * dgamma.value + rest * db.value;
  double ddt_terms = lambda * dgamma.terms + rest * db.terms;
  for (int64_t i = 0; i < s_.A; ++i) {
    dtheta[index(i)] += torque(q_[index(t)], dq, i) + torque(k_[index(t)], dk, i);
    const double rate = std::tanh(in("angles", 0, turned(t, i)));
    const double arms = arm(q_[index(t)], dq, i) + arm(k_[index(t)], dk, i);
    noise_[index(i)] = std::hypot(noise_[index(i)], arms);
    if (!c_.has("angles")) continue;
    add("noise:d_angles", turned(t, i), noise_[index(i)] * dt * pi * (1 - rate * rate));
    ddt += dtheta[index(i)] * pi * rate;
    ddt_terms += noise_[index(i)] * pi * std::abs(rate);
    add("d_angles", turned(t, i), dtheta[index(i)] * dt * pi * (1 - rate * rate));
  }
  // As the difference of sums over later tokens (definition, section 2.2).
  double terms = 0;
  for (size_t i = 0; i < dq.size(); ++i)
    terms += std::abs(q_[index(t)][i] * dq[i]) + std::abs(k_[index(t)][i] * dk[i]);
  decay_noise_ = std::hypot(decay_noise_, terms);
  add("noise:d_adt", early(t), decay_noise_);
  add("d_adt", early(t), dadt);
  add("d_dt", early(t), ddt);
  add("noise:d_dt", early(t), ddt_terms);
  add("d_trap", early(t), lambda * rest * dt * (dgamma.value - db.value));
  add("noise:d_trap", early(t), lambda * rest * std::abs(dt) * (dgamma.terms + db.terms));
  rotate(dq, t, -1);
  rotate(dk, t, -1);
  for (int64_t r = 0; r < s_.R; ++r) {
    for (int64_t n = 0; n < s_.N; ++n) {
      add("d_q_bias", own(r) * s_.N + n, dq[index(r * s_.N + n)]);
      add("d_k_bias", own(r) * s_.N + n, dk[index(r * s_.N + n)]);
      add("d_q", row(t, r) * s_.N + n, dq[index(r * s_.N + n)]);
      add("d_k", row(t, r) * s_.N + n, dk[index(r * s_.N + n)]);
    }
    for (int64_t p = 0; p < s_.P; ++p) {
      const double own_dv = dv[index(r * s_.P + p)];
      add("d_v", token(t) * s_.P + p, own_dv * mimo_v(r, p));
      add("d_mimo_v", own(r) * s_.P + p, own_dv * in("v", 0, token(t) * s_.P + p));
    }
  }
  for (int64_t p = 0; t == T_ - 1 && p < s_.P; ++p)
    add("d_v", token(t) * s_.P + p, in("d_final_v", 0, state(p, s_.P)));
}

void Head::initial(const Row& g, const Row& dtheta, const Row& dk, const Row& dv) {
  for (int64_t i = 0; i < s_.A; ++i) {
    add("d_initial_angle", state(i, s_.A), dtheta[index(i)]);
    add("noise:d_initial_angle", state(i, s_.A), noise_[index(i)]);
  }
  for (int64_t i = 0; i < s_.P * s_.N; ++i)
    add("d_initial_ssm", state(i, s_.P * s_.N), g[index(i)]);
  for (int64_t r = 0; r < s_.R; ++r) {
    for (int64_t n = 0; n < s_.N; ++n) add("d_initial_k", key(r, n), dk[index(r * s_.N + n)]);
    for (int64_t p = 0; p < s_.P; ++p) {
      const double x = dv[index(r * s_.P + p)];
      add("d_initial_v", state(p, s_.P), x * mimo_v(r, p));
      add("d_mimo_v", own(r) * s_.P + p, x * in("initial_v", 0, state(p, s_.P)));
    }
  }
}

}  // namespace talea::yardsticks::mamba3
