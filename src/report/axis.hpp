// What: one axis of a chart: range, ticks and the place of a value.
// Why: linear and logarithmic axes behave alike for the charts.
// Never: divides by an empty range.
#pragma once

#include <vector>

namespace talea::report {

class Axis {
 public:
  // Non-finite values, and values <= 0 on a logarithmic axis, are left out.
  Axis(const std::vector<double>& values, bool logarithmic, double from, double to);

  bool shows(double value) const;
  double place(double value) const;  // in picture units between from and to
  std::vector<double> ticks() const;

 private:
  double scale(double value) const;

  bool logarithmic_;
  double from_, to_;
  double low_ = 0, high_ = 1;  // scaled
};

}  // namespace talea::report
