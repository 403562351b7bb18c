// What: distances between two buffers, and verdicts that a NaN cannot pass.
// Why: every gate compares by the same three lines.
// Never: uses max() on values that may be NaN.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace talea::train {

// ||a - b|| / ||b|| in fp64; 0 for two zero buffers; NaN where either holds a NaN.
template <typename A, typename B>
double relative_l2(const A* a, const B* b, int64_t count) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double d = double(a[i]) - double(b[i]);
    difference += d * d;
    norm += double(b[i]) * double(b[i]);
  }
  if (difference == 0) return 0;
  return std::sqrt(difference / norm);
}

template <typename A, typename B>
double relative_l2(const std::vector<A>& a, const std::vector<B>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  return relative_l2(a.data(), b.data(), static_cast<int64_t>(a.size()));
}

// Largest |a - b| relative to max(floor, largest |b|).
template <typename A, typename B>
double relative_max(const std::vector<A>& a, const std::vector<B>& b, double floor) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0, scale = floor;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(double(a[i]) - double(b[i])), s = std::fabs(double(b[i]));
    if (!(d <= worst)) worst = d;  // a NaN is kept, and stays: d <= NaN is false, so is NaN <= d
    if (std::isnan(worst)) return worst;
    if (s > scale) scale = s;
  }
  return worst / scale;
}

inline double relative(double a, double b) {
  const double d = std::fabs(a - b);
  return d == 0 ? 0 : d / std::fabs(b);
}

// The last values of a quantity. A bad one loosens what follows it for so many steps and no longer,
// where a running maximum would for ever.
class Trailing {
 public:
  static constexpr int64_t span = 16;

  void see(double value) { last_[static_cast<size_t>(seen_++ % span)] = value; }
  // NaN where one of them is.
  double rms() const {
    double sum = 0;
    for (int64_t i = 0; i < held(); ++i) sum += value(i) * value(i);
    return held() == 0 ? 0 : std::sqrt(sum / static_cast<double>(held()));
  }
  double largest() const {
    double most = 0;
    for (int64_t i = 0; i < held(); ++i)
      if (!std::isnan(most) && !(value(i) <= most)) most = value(i);
    return most;
  }

 private:
  int64_t held() const { return seen_ < span ? seen_ : span; }
  double value(int64_t i) const { return last_[static_cast<size_t>(i)]; }

  std::array<double, span> last_{};
  int64_t seen_ = 0;
};

// Keeps the value that is worst against its tolerance; NaN is the worst of all. `blind` plants the
// historical mistake.
class Worst {
 public:
  explicit Worst(double tolerance, bool blind = false) : tolerance_(tolerance), blind_(blind) {}

  void see(double value, int64_t step) { see(value, step, tolerance_); }

  // `tolerance`: of this value, where it is not the same for all.
  void see(double value, int64_t step, double tolerance) {
    ++seen_;
    const double rank = tolerance > 0 ? value / tolerance : value;
    if (blind_) {  // std::max(worst, NaN) is worst, NaN > tolerance is false
      if (rank > rank_) keep(value, step, tolerance, rank);
      if (value > tolerance && first_ < 0) first_ = step;
      return;
    }
    if (!std::isnan(rank_) && !(rank <= rank_)) keep(value, step, tolerance, rank);
    if (!(value <= tolerance) && first_ < 0) first_ = step;
  }

  double worst() const { return worst_; }
  double tolerance() const { return shown_; }  // of the worst value
  int64_t worst_step() const { return worst_step_; }
  int64_t first_past() const { return first_; }  // -1: none
  int64_t seen() const { return seen_; }
  // A comparison that saw nothing proves nothing.
  bool passed() const { return seen_ > 0 && first_ < 0; }

 private:
  void keep(double value, int64_t step, double tolerance, double rank) {
    worst_ = value;
    worst_step_ = step;
    shown_ = tolerance;
    rank_ = rank;
  }

  double tolerance_, shown_ = tolerance_;
  bool blind_;
  double worst_ = 0, rank_ = 0;
  int64_t worst_step_ = -1, first_ = -1, seen_ = 0;
};

}  // namespace talea::train
