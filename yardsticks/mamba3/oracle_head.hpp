// What: one head of one sequence, token by token: its forward and its adjoint.
// Why: see oracle.hpp.
// Never: includes anything of src/.
#pragma once

#include <cmath>

#include "yardsticks/mamba3/oracle.hpp"

namespace talea::yardsticks::mamba3 {

using Row = std::vector<double>;
constexpr double fp32_unit = 0x1p-23;
constexpr double pi = 3.14159265358979323846;

inline double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}

inline size_t index(int64_t i) { return static_cast<size_t>(i); }

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

  double mimo_v(int64_t r, int64_t p) const { return in("mimo_v", 1, own(r) * s_.P + p); }
  double gamma(int64_t t) const { return lambda_[index(t)] * dt_[index(t)]; }
  double b(int64_t t) const { return t < T_ ? rest_[index(t)] * dt_[index(t)] : 0; }

  double weight(int64_t p) const {
    return c_.options.head_norm ? in("norm_weight", 1, h_ * s_.P + p) : 1;
  }

  // A sum, and how large its terms are.
  struct Sum {
    double value = 0, terms = 0;
  };

  void rotate(Row& x, int64_t t, double sign) const;
  void prepare();
  void outer(Row& to, double scale, const Row& v, const Row& k) const;
  void scan();
  double sign();                                   // a fixed sequence
  double scale_of(const Row& y, int64_t r) const;  // 1 / rms
  void finish();
  void hand_through(bool backward);

  double arm(const Row& x, const Row& g, int64_t i) const;
  double torque(const Row& x, const Row& g, int64_t i) const;
  Row finish_adjoint(int64_t t);  // dy
  Sum contract(const Row& g, double scale, const Row& v, const Row& k, Row& dk, Row& dv) const;
  double rounding_of(double x) const;
  double variance(const Row& g, const Row& v, const Row& k, const Row* q, const Row* dy) const;
  void adjoint();
  void store(int64_t t, Row& dq, Row& dk, const Row& dv, Row& dtheta, const Sum& dgamma,
             const Sum& db, double dadt);
  void initial(const Row& g, const Row& dtheta, const Row& dk, const Row& dv);

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

}  // namespace talea::yardsticks::mamba3
