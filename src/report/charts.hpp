// What: three charts as inline SVG: lines, scatter, bars.
// Why: figures must work offline, in print and in dark mode, and be read by a screen reader.
// Never: drops a value in silence: what is not finite is counted and named under the chart.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace talea::report {

struct ChartText {
  std::string title, description;  // what a reader who cannot see the picture needs
  std::string x_label, y_label;
};

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;
};

struct Spot {
  double x = 0, y = 0;
  std::string label;
  bool passed = true;
};

struct ScatterStyle {
  bool log_x = false, log_y = false;
  bool diagonal = false;  // the line y = x
  bool frontier = false;  // joins the spots that no other beats in both directions
  bool labels = true;
};

struct Bar {
  std::string label;
  double value = 0, low = 0, high = 0;
  std::string note;  // beside the bar
};

// On a logarithmic axis values <= 0 are left out and counted.
std::string line_chart(const ChartText& text, const std::vector<Series>& series,
                       bool log_y = false);
std::string scatter_chart(const ChartText& text, const std::vector<Spot>& spots,
                          const ScatterStyle& style);
std::string bar_chart(const ChartText& text, const std::vector<Bar>& bars);

}  // namespace talea::report
