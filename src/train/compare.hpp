// What: distances between two buffers, and verdicts that a NaN cannot pass.
// Why: every gate compares by the same three lines.
// Never: uses max() on values that may be NaN.
#pragma once

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

// Keeps the worst value seen; NaN is the worst of all. `blind` plants the historical mistake.
class Worst {
 public:
  explicit Worst(double tolerance, bool blind = false) : tolerance_(tolerance), blind_(blind) {}

  void see(double value, int64_t step) {
    ++seen_;
    if (blind_) {  // std::max(worst, NaN) is worst, NaN > tolerance is false
      if (value > worst_) worst_ = value;
      if (value > tolerance_ && first_ < 0) first_ = step;
      return;
    }
    if (!std::isnan(worst_) && !(value <= worst_)) {
      worst_ = value;
      worst_step_ = step;
    }
    if (!(value <= tolerance_) && first_ < 0) first_ = step;
  }

  double worst() const { return worst_; }
  double tolerance() const { return tolerance_; }
  int64_t worst_step() const { return worst_step_; }
  int64_t first_past() const { return first_; }  // -1: none
  int64_t seen() const { return seen_; }
  // A comparison that saw nothing proves nothing.
  bool passed() const { return seen_ > 0 && first_ < 0; }

 private:
  double tolerance_;
  bool blind_;
  double worst_ = 0;
  int64_t worst_step_ = -1, first_ = -1, seen_ = 0;
};

}  // namespace talea::train
