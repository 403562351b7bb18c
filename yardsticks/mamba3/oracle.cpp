// What: the definition's recurrence and its adjoint in fp64, written down naively.
// Why: an oracle that shares code with the library would share its mistakes.
// Never: includes anything of src/.
#include "yardsticks/mamba3/oracle.hpp"

#include <cmath>

namespace talea::yardsticks::mamba3 {
namespace {

using Row = std::vector<double>;
constexpr double fp32_unit = 0x1p-23;
constexpr double pi = 3.14159265358979323846;
constexpr int64_t few = 64;  // numbers of a tensor whose worst errors luck does not even out
const char* const state_names[] = {"angle", "ssm", "k", "v"};

double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}

size_t index(int64_t i) { return static_cast<size_t>(i); }

// One head of one sequence.
class Head {
 public:
  // `shaken`: each y is moved by a rounding of the terms that it sums.
  Head(const Case& c, Values& answers, int64_t sequence, int64_t batch, int64_t first, int64_t last,
       int64_t head, bool shaken)
      : c_(c),
        to_(answers),
        shaken_(shaken),
        s_(c.size),
        n_(sequence),
        b_(batch),
        lo_(first),
        h_(head),
        g_(head / (c.size.H / c.size.G)),
        T_(last - first) {}

  void run(bool backward) {
    if (T_ == 0) return hand_through(backward);
    prepare();
    scan();
    finish();
    if (backward) adjoint();
  }

 private:
  double in(const std::string& name, double neutral, int64_t flat) const {
    const auto at = c_.in.find(name);
    return at == c_.in.end() ? neutral : at->second.get(flat);
  }
  int64_t token(int64_t t) const { return (b_ * s_.S + lo_ + t) * s_.H + h_; }  // of [B, S, H]
  int64_t early(int64_t t) const { return (b_ * s_.H + h_) * s_.S + lo_ + t; }  // of [B, H, S]
  int64_t row(int64_t t, int64_t r) const {                                     // of q, k
    return ((b_ * s_.S + lo_ + t) * s_.R + r) * s_.G + g_;
  }
  int64_t turned(int64_t t, int64_t i) const {
    return s_.shared_angles ? (b_ * s_.S + lo_ + t) * s_.A + i : token(t) * s_.A + i;
  }
  int64_t own(int64_t r) const { return h_ * s_.R + r; }
  int64_t state(int64_t i, int64_t width) const { return (n_ * s_.H + h_) * width + i; }
  int64_t key(int64_t r, int64_t n) const { return ((n_ * s_.R + r) * s_.H + h_) * s_.N + n; }
  int64_t up(int64_t t, int64_t r, int64_t p) const {
    if (c_.reduce()) return token(t) * s_.P + p;
    return (((b_ * s_.S + lo_ + t) * s_.R + r) * s_.H + h_) * s_.P + p;
  }
  void put(const std::string& name, int64_t flat, double value) { to_[name][index(flat)] = value; }
  void add(const std::string& name, int64_t flat, double value) {
    const auto at = to_.find(name);
    if (at != to_.end()) at->second[index(flat)] += value;
  }
  int64_t left(int64_t i) const { return c_.halves() ? i : 2 * i; }
  int64_t right(int64_t i) const { return c_.halves() ? i + s_.N / 2 : 2 * i + 1; }

  void rotate(Row& x, int64_t t, double sign) const {
    for (int64_t r = 0; r < s_.R; ++r)
      for (int64_t i = 0; i < s_.A; ++i) {
        const double angle = theta_[index(t * s_.A + i)];
        double &u = x[index(r * s_.N + left(i))], &w = x[index(r * s_.N + right(i))];
        const double c = std::cos(angle), s = sign * std::sin(angle), old = u;
        u = old * c - w * s;
        w = old * s + w * c;
      }
  }
  // How large the terms of a torque are, whatever their sum.
  double arm(const Row& x, const Row& g, int64_t i) const {
    double sum = 0;
    for (int64_t r = 0; r < s_.R; ++r)
      sum += std::abs(x[index(r * s_.N + left(i))] * g[index(r * s_.N + right(i))]) +
             std::abs(x[index(r * s_.N + right(i))] * g[index(r * s_.N + left(i))]);
    return sum;
  }
  double torque(const Row& x, const Row& g, int64_t i) const {
    double sum = 0;
    for (int64_t r = 0; r < static_cast<int64_t>(x.size()) / s_.N; ++r)
      sum += x[index(r * s_.N + left(i))] * g[index(r * s_.N + right(i))] -
             x[index(r * s_.N + right(i))] * g[index(r * s_.N + left(i))];
    return sum;
  }

  void prepare() {
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
  double mimo_v(int64_t r, int64_t p) const { return in("mimo_v", 1, own(r) * s_.P + p); }
  double gamma(int64_t t) const { return lambda_[index(t)] * dt_[index(t)]; }
  double b(int64_t t) const { return t < T_ ? rest_[index(t)] * dt_[index(t)] : 0; }

  // to += scale sum over r of v_r k_r^T
  void outer(Row& to, double scale, const Row& v, const Row& k) const {
    for (int64_t r = 0; r < s_.R; ++r)
      for (int64_t p = 0; p < s_.P; ++p) {
        const double left = scale * v[index(r * s_.P + p)];
        for (int64_t n = 0; n < s_.N; ++n) to[index(p * s_.N + n)] += left * k[index(r * s_.N + n)];
      }
  }

  void scan() {
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

  double sign() {  // a fixed sequence
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return random_ >> 63 ? 1 : -1;
  }

  double scale_of(const Row& y, int64_t r) const {  // 1 / rms
    if (!c_.options.head_norm) return 1;
    double sum = 0;
    for (int64_t p = 0; p < s_.P; ++p) sum += y[index(r * s_.P + p)] * y[index(r * s_.P + p)];
    return 1 / std::sqrt(sum / static_cast<double>(s_.P) + c_.options.norm_eps);
  }
  double weight(int64_t p) const {
    return c_.options.head_norm ? in("norm_weight", 1, h_ * s_.P + p) : 1;
  }

  void finish() {
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

  Row finish_adjoint(int64_t t) {  // dy
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

  // A sum, and how large its terms are.
  struct Sum {
    double value = 0, terms = 0;
  };

  // g^T v of each rank (for k), g k (for v), and sum of v g k.
  Sum contract(const Row& g, double scale, const Row& v, const Row& k, Row& dk, Row& dv) const {
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
  double rounding_of(double x) const {
    if (x == 0 || rounded(c_.dtype, x) == x) return 0;
    const double step = std::ldexp(1.0, std::ilogb(x) - (c_.dtype == DType::bf16 ? 7 : 10));
    return step * step / 12;
  }
  // What the roundings of rows v, k and, of g's own token, q and dy leave of v^T g k.
  double variance(const Row& g, const Row& v, const Row& k, const Row* q, const Row* dy) const {
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

  void adjoint() {
    const bool is_few = is_16bit(c_.dtype) && s_.B * s_.H * s_.S < few;
    const int64_t RN = s_.R * s_.N, RP = s_.R * s_.P, PN = s_.P * s_.N;
    Row g(index(PN)), dtheta(index(s_.A)), held_k(index(RN)), held_v(index(RP));
    for (int64_t i = 0; i < PN; ++i) g[index(i)] = in("d_final_ssm", 0, state(i, PN));
    for (int64_t i = 0; i < s_.A; ++i) dtheta[index(i)] = in("d_final_angle", 0, state(i, s_.A));
    for (int64_t r = 0; r < s_.R; ++r)
      for (int64_t n = 0; n < s_.N; ++n)
        held_k[index(r * s_.N + n)] = in("d_final_k", 0, key(r, n));
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

  void store(int64_t t, Row& dq, Row& dk, const Row& dv, Row& dtheta, const Sum& dgamma,
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

  void initial(const Row& g, const Row& dtheta, const Row& dk, const Row& dv) {
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

  void hand_through(bool backward) {
    const auto hand = [&](const std::string& from, const std::string& to, bool angle,
                          int64_t flat) {
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

  const Case& c_;
  Values& to_;
  const bool shaken_;
  uint64_t random_ = 1;
  const Sizes& s_;
  const int64_t n_, b_, lo_, h_, g_, T_;
  double decay_noise_ = 0;
  Row noise_, theta_, dt_, lambda_, rest_, alpha_, k_in_, v_in_;
  std::vector<Row> q_, k_, v_, y_, before_, after_;
};

bool backward_of(const Case& c) {
  bool backward = c.has("d_out");
  for (const char* state : state_names)
    backward = backward || c.has(std::string("d_final_") + state);
  return backward;
}

void make_room(const Case& c, const std::string& name, Values& answers) {
  int64_t n = 1;
  for (const int64_t e : shape_of(c, name)) n *= e;
  answers[name].assign(index(n), 0);
}

Values answers_of(const Case& c, bool shaken) {
  Values answers;
  const bool backward = backward_of(c);
  for (const std::string& name : forward_outputs(c)) make_room(c, name, answers);
  if (backward)
    for (const std::string& name : backward_outputs(c)) {
      make_room(c, name, answers);
      if (name.find("angle") != std::string::npos || name == "d_adt" || name == "d_dt" ||
          name == "d_trap")
        answers["noise:" + name] = answers[name];
      if (name == "d_dt" || name == "d_trap") answers["rounds:" + name] = answers[name];
    }
  for (int64_t n = 0; n < c.sequences(); ++n) {
    const bool packed = c.has("cu_seqlens");
    for (int64_t h = 0; h < c.size.H; ++h)
      Head(c, answers, n, packed ? 0 : n, packed ? c.cu[index(n)] : 0,
           packed ? c.cu[index(n + 1)] : c.size.S, h, shaken)
          .run(backward);
  }
  return answers;
}

}  // namespace

Values oracle(const Case& c) {
  Values answers = answers_of(c, false);
  if (!c.options.head_norm) return answers;
  // The norm of a row near zero magnifies what fp32 leaves of its sums: by so much.
  for (const auto& [name, shaken] : answers_of(c, true)) {
    if (name.find(':') != std::string::npos) continue;
    std::vector<double>& noise = answers["noise:" + name];
    noise.resize(shaken.size());
    for (size_t i = 0; i < shaken.size(); ++i) {
      const double moved = std::abs(shaken[i] - answers.at(name)[i]);
      if (moved > 0) noise[i] += moved / fp32_unit;  // not where the truth is NaN or infinite
    }
  }
  return answers;
}

}  // namespace talea::yardsticks::mamba3
