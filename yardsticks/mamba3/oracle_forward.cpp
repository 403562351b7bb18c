// What: a head's rows, states and outputs.
// Why: see oracle.hpp.
// Never: includes anything of src/.
#include "yardsticks/mamba3/oracle_head.hpp"

namespace talea::yardsticks::mamba3 {

void Head::rotate(Row& x, int64_t t, double sign) const {
  for (int64_t r = 0; r < s_.R; ++r)
    for (int64_t i = 0; i < s_.A; ++i) {
      const double angle = theta_[index(t * s_.A + i)];
      double &u = x[index(r * s_.N + left(i))], &w = x[index(r * s_.N + right(i))];
      const double c = std::cos(angle), s = sign * std::sin(angle), old = u;
      u = old * c - w * s;
      w = old * s + w * c;
    }
}

void Head::prepare() {
  noise_.assign(index(s_.A), 0);
  decay_noise_ = 0;
  theta_.resize(index(T_ * s_.A));
  for (int64_t i = 0; i < s_.A; ++i) {
    double angle = in("initial_angle", 0, state(i, s_.A));
    for (int64_t t = 0; t < T_; ++t) {
      angle += pi * std::tanh(in("angles", 0, turned(t, i))) * in("dt", 0, early(t));
      angle = std::remainder(angle, 2 * pi);
      theta_[index(t * s_.A + i)] = angle;
    }
  }
  for (int64_t t = 0; t < T_; ++t) {
    Row q(index(s_.R * s_.N)), k = q, v(index(s_.R * s_.P));
    for (int64_t r = 0; r < s_.R; ++r) {
      for (int64_t n = 0; n < s_.N; ++n) {
        q[index(r * s_.N + n)] =
            in("q", 0, row(t, r) * s_.N + n) + in("q_bias", 0, own(r) * s_.N + n);
        k[index(r * s_.N + n)] =
            in("k", 0, row(t, r) * s_.N + n) + in("k_bias", 0, own(r) * s_.N + n);
      }
      for (int64_t p = 0; p < s_.P; ++p)
        v[index(r * s_.P + p)] = in("v", 0, token(t) * s_.P + p) * mimo_v(r, p);
    }
    rotate(q, t, 1);
    rotate(k, t, 1);
    q_.push_back(q), k_.push_back(k), v_.push_back(v);
    const double dt = in("dt", 0, early(t)), trap = in("trap", 0, early(t));
    const double adt = in("adt", 0, early(t));
    dt_.push_back(dt);
    lambda_.push_back(sigmoid(trap)), rest_.push_back(sigmoid(-trap));
    alpha_.push_back(adt <= -128 ? 0 : std::exp(adt));
  }
  k_in_.resize(index(s_.R * s_.N)), v_in_.resize(index(s_.R * s_.P));
  for (int64_t r = 0; r < s_.R; ++r) {
    for (int64_t n = 0; n < s_.N; ++n) k_in_[index(r * s_.N + n)] = in("initial_k", 0, key(r, n));
    for (int64_t p = 0; p < s_.P; ++p)
      v_in_[index(r * s_.P + p)] = in("initial_v", 0, state(p, s_.P)) * mimo_v(r, p);
  }
}

// to += scale sum over r of v_r k_r^T
void Head::outer(Row& to, double scale, const Row& v, const Row& k) const {
  for (int64_t r = 0; r < s_.R; ++r)
    for (int64_t p = 0; p < s_.P; ++p) {
      const double left = scale * v[index(r * s_.P + p)];
      for (int64_t n = 0; n < s_.N; ++n) to[index(p * s_.N + n)] += left * k[index(r * s_.N + n)];
    }
}

void Head::scan() {
  Row h(index(s_.P * s_.N));
  for (int64_t i = 0; i < s_.P * s_.N; ++i)
    h[index(i)] = in("initial_ssm", 0, state(i, s_.P * s_.N));
  for (int64_t t = 0; t < T_; ++t) {
    outer(h, b(t), t ? v_[index(t - 1)] : v_in_, t ? k_[index(t - 1)] : k_in_);
    before_.push_back(h);
    for (double& x : h) x *= alpha_[index(t)];
    outer(h, gamma(t), v_[index(t)], k_[index(t)]);
    after_.push_back(h);
    Row y(index(s_.R * s_.P));
    for (int64_t r = 0; r < s_.R; ++r)
      for (int64_t p = 0; p < s_.P; ++p) {
        double sum = in("d", 0, h_) * v_[index(t)][index(r * s_.P + p)], terms = std::abs(sum);
        for (int64_t n = 0; n < s_.N; ++n) {
          const double term = h[index(p * s_.N + n)] * q_[index(t)][index(r * s_.N + n)];
          sum += term;
          terms += std::abs(term);
        }
        y[index(r * s_.P + p)] = sum + (shaken_ ? sign() * fp32_unit * terms : 0);
      }
    y_.push_back(y);
  }
  for (int64_t i = 0; i < s_.A; ++i) {
    double angle = std::fmod(theta_[index((T_ - 1) * s_.A + i)], 2 * pi);
    put("final_angle", state(i, s_.A), angle < 0 ? angle + 2 * pi : angle);
  }
  for (int64_t i = 0; i < s_.P * s_.N; ++i) put("final_ssm", state(i, s_.P * s_.N), h[index(i)]);
  for (int64_t r = 0; r < s_.R; ++r)
    for (int64_t n = 0; n < s_.N; ++n)
      put("final_k", key(r, n), k_[index(T_ - 1)][index(r * s_.N + n)]);
  for (int64_t p = 0; p < s_.P; ++p)
    put("final_v", state(p, s_.P), in("v", 0, token(T_ - 1) * s_.P + p));
}

double Head::sign() {
  random_ = random_ * 6364136223846793005u + 1442695040888963407u;
  return random_ >> 63 ? 1 : -1;
}

double Head::scale_of(const Row& y, int64_t r) const {
  if (!c_.options.head_norm) return 1;
  double sum = 0;
  for (int64_t p = 0; p < s_.P; ++p) sum += y[index(r * s_.P + p)] * y[index(r * s_.P + p)];
  return 1 / std::sqrt(sum / static_cast<double>(s_.P) + c_.options.norm_eps);
}

void Head::finish() {
  for (int64_t t = 0; t < T_; ++t)
    for (int64_t r = 0; r < s_.R; ++r) {
      const double rstd = scale_of(y_[index(t)], r);
      for (int64_t p = 0; p < s_.P; ++p) {
        double o = y_[index(t)][index(r * s_.P + p)] * rstd * weight(p);
        if (c_.has("z")) {
          const double u = in("z", 0, token(t) * s_.P + p) * in("mimo_z", 1, own(r) * s_.P + p);
          o *= u * sigmoid(u);
        }
        add("out", up(t, r, p), o * in("mimo_out", 1, own(r) * s_.P + p));
      }
    }
}

void Head::hand_through(bool backward) {
  const auto hand = [&](const std::string& from, const std::string& to, bool angle, int64_t flat) {
    double value = in(from, 0, flat);
    if (angle) value = std::fmod(std::fmod(value, 2 * pi) + 2 * pi, 2 * pi);
    add(to, flat, value);
  };
  const auto all = [&](const std::string& from, const std::string& to, bool reduce) {
    for (int64_t i = 0; i < s_.A; ++i) hand(from + "angle", to + "angle", reduce, state(i, s_.A));
    for (int64_t i = 0; i < s_.P * s_.N; ++i)
      hand(from + "ssm", to + "ssm", false, state(i, s_.P * s_.N));
    for (int64_t r = 0; r < s_.R; ++r)
      for (int64_t n = 0; n < s_.N; ++n) hand(from + "k", to + "k", false, key(r, n));
    for (int64_t p = 0; p < s_.P; ++p) hand(from + "v", to + "v", false, state(p, s_.P));
  };
  all("initial_", "final_", true);
  if (backward) all("d_final_", "d_initial_", false);
}

}  // namespace talea::yardsticks::mamba3
