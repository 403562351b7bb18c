// What: Axis: the range of the values with a margin, and round ticks.
// Why: charts of a benchmark span decades, charts of a loss a few percent.
// Never: more than about ten ticks.
#include "report/axis.hpp"

#include <algorithm>
#include <cmath>

namespace talea::report {

double Axis::scale(double value) const { return logarithmic_ ? std::log10(value) : value; }

bool Axis::shows(double value) const {
  return std::isfinite(value) && (!logarithmic_ || value > 0);
}

Axis::Axis(const std::vector<double>& values, bool logarithmic, double from, double to)
    : logarithmic_(logarithmic), from_(from), to_(to) {
  bool any = false;
  for (const double value : values) {
    if (!shows(value)) continue;
    const double scaled = scale(value);
    low_ = any ? std::min(low_, scaled) : scaled;
    high_ = any ? std::max(high_, scaled) : scaled;
    any = true;
  }
  // Halves keep the difference of two huge values finite.
  const double half_span = high_ / 2 - low_ / 2;
  const double margin = half_span > 0 ? half_span * 0.1 : std::max(0.5, std::fabs(low_) * 0.1);
  // Every tick, and 10^tick on a logarithmic axis, must be a finite number.
  low_ = std::max(low_ - margin, logarithmic_ ? -307.0 : -1e308);
  high_ = std::min(high_ + margin, logarithmic_ ? 307.9 : 1e308);
  if (!(low_ < high_)) low_ = high_ - 1;
}

double Axis::place(double value) const {
  const double share = (scale(value) / 2 - low_ / 2) / (high_ / 2 - low_ / 2);
  return from_ + share * (to_ - from_);
}

std::vector<double> Axis::ticks() const {
  std::vector<double> ticks;
  const double span = high_ / 2 - low_ / 2;
  double step = std::pow(10.0, std::floor(std::log10(span / 2)));
  if (logarithmic_) step = std::max(1.0, std::ceil(span / 3));
  while (!logarithmic_ && span * 2 / step > 8) step *= span * 2 / step > 16 ? 5 : 2;
  if (logarithmic_ && high_ - low_ < 3) {  // few decades: 1, 2, 5
    for (double decade = std::floor(low_); decade <= high_; ++decade)
      for (const double digit : {1.0, 2.0, 5.0}) {
        const double value = digit * std::pow(10.0, decade);
        if (scale(value) >= low_ && scale(value) <= high_) ticks.push_back(value);
      }
    return ticks;
  }
  double at = std::ceil(low_ / step) * step;
  for (int n = 0; n < 12 && at <= high_; ++n, at += step)
    ticks.push_back(logarithmic_ ? std::pow(10.0, at) : std::fabs(at) < step / 2 ? 0 : at);
  return ticks;
}

}  // namespace talea::report
