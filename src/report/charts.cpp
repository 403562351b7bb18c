// What: the charts of charts.hpp.
// Why: shapes and dashes differ as well as colours, so that print and colour blindness lose
// nothing.
// Never: places text without escaping it.
#include "report/charts.hpp"

#include <algorithm>
#include <cmath>

#include "core/fail.hpp"
#include "report/axis.hpp"
#include "report/html.hpp"

namespace talea::report {
namespace {

constexpr double width = 720, height = 320, left = 86, right = 700, top = 16, bottom = 268;
constexpr int colours = 6;
constexpr const char* dashes[colours] = {"", "7 3", "2 3", "10 3 2 3", "4 4", "1 2"};

std::string begin(const ChartText& text, double total_height) {
  return fmt::format(
      "<figure><figcaption>{}</figcaption>\n<svg viewBox=\"0 0 {} {}\" role=\"img\" "
      "aria-label=\"{}\">\n<title>{}</title><desc>{}</desc>\n",
      escape(text.title), width, total_height, escape(text.title), escape(text.title),
      escape(text.description));
}

std::string end(const ChartText& text, const std::string& note) {
  return fmt::format("</svg>\n<p class=\"quiet\">{}{}{}</p></figure>\n", escape(text.description),
                     note.empty() ? "" : " ", escape(note));
}

std::string axes(const ChartText& text, const Axis& x, const Axis& y) {
  std::string svg;
  for (const double tick : y.ticks())
    svg += fmt::format(
        "<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>"
        "<text x=\"{3}\" y=\"{4:.1f}\" text-anchor=\"end\">{5}</text>\n",
        left, right, y.place(tick), left - 6, y.place(tick) + 4, short_number(tick));
  for (const double tick : x.ticks())
    svg += fmt::format(
        "<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/>"
        "<text x=\"{0:.1f}\" y=\"{3}\" text-anchor=\"middle\">{4}</text>\n",
        x.place(tick), top, bottom, bottom + 18, short_number(tick));
  svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                     (left + right) / 2, height - 10, escape(text.x_label));
  svg += fmt::format(
      "<text transform=\"translate(12 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
      (top + bottom) / 2, escape(text.y_label));
  return svg;
}

std::string legend(const std::vector<Series>& series) {
  std::string html = "<ul class=\"legend\">";
  for (size_t i = 0; i < series.size(); ++i)
    html += fmt::format(
        "<li><svg viewBox=\"0 0 30 10\" aria-hidden=\"true\"><path class=\"line c{}\" "
        "stroke-dasharray=\"{}\" d=\"M0 5H30\"/></svg>{}</li>",
        i % colours, dashes[i % colours], escape(series[i].name));
  return html + "</ul>\n";
}

// At most about `limit` points; the first, the last and every gap stay.
std::string path_of(const Series& s, const Axis& x, const Axis& y, int64_t& missing) {
  constexpr size_t limit = 1500;
  const size_t stride = std::max<size_t>(1, s.points.size() / limit);
  std::string path;
  bool pen_down = false;
  for (size_t i = 0; i < s.points.size(); ++i) {
    const auto& [px, py] = s.points[i];
    if (!x.shows(px) || !y.shows(py)) {
      ++missing;
      pen_down = false;
      continue;
    }
    if (pen_down && i % stride != 0 && i + 1 != s.points.size()) continue;
    path += fmt::format("{}{:.1f} {:.1f}", pen_down ? 'L' : 'M', x.place(px), y.place(py));
    pen_down = true;
  }
  return path;
}

std::string frontier_of(std::vector<Spot> spots, const Axis& x, const Axis& y) {
  std::sort(spots.begin(), spots.end(),
            [](const Spot& a, const Spot& b) { return std::pair(a.x, a.y) < std::pair(b.x, b.y); });
  std::string path;
  double best = INFINITY;
  for (const Spot& s : spots) {
    if (!x.shows(s.x) || !y.shows(s.y) || !(s.y < best)) continue;
    best = s.y;
    path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? 'M' : 'L', x.place(s.x), y.place(s.y));
  }
  return "<path class=\"line frontier\" stroke-dasharray=\"4 4\" d=\"" + path + "\"/>\n";
}

}  // namespace

std::string line_chart(const ChartText& text, const std::vector<Series>& series, bool log_y) {
  std::vector<double> xs, ys;
  for (const Series& s : series)
    for (const auto& [px, py] : s.points) xs.push_back(px), ys.push_back(py);
  const Axis x(xs, false, left, right), y(ys, log_y, bottom, top);
  std::string svg = begin(text, height) + axes(text, x, y);
  int64_t missing = 0;
  for (size_t i = 0; i < series.size(); ++i)
    svg += fmt::format("<path class=\"line c{}\" stroke-dasharray=\"{}\" d=\"{}\"/>\n", i % colours,
                       dashes[i % colours], path_of(series[i], x, y, missing));
  const char* why = log_y ? "zero or not finite" : "not finite";
  const std::string note = missing ? fmt::format("{} values are {}.", missing, why) : "";
  std::string html = svg + end(text, note);
  html.insert(html.find("<svg"), legend(series));
  return html;
}

std::string scatter_chart(const ChartText& text, const std::vector<Spot>& spots,
                          const ScatterStyle& style) {
  std::vector<double> xs, ys;
  for (const Spot& s : spots) xs.push_back(s.x), ys.push_back(s.y);
  if (style.diagonal) {  // the same range both ways
    xs.insert(xs.end(), ys.begin(), ys.end());
    ys = xs;
  }
  const Axis x(xs, style.log_x, left, right), y(ys, style.log_y, bottom, top);
  std::string svg = begin(text, height) + axes(text, x, y);
  if (style.diagonal)
    svg += fmt::format("<path class=\"line frontier\" d=\"M{} {}L{} {}\"/>\n", left, bottom, right,
                       top);
  if (style.frontier) svg += frontier_of(spots, x, y);
  int64_t missing = 0;
  for (const Spot& s : spots) {
    if (!x.shows(s.x) || !y.shows(s.y)) {
      ++missing;
      continue;
    }
    const double px = x.place(s.x), py = y.place(s.y);
    const std::string title = escape(s.label);
    svg += s.passed ? fmt::format(
                          "<circle class=\"spot\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\">"
                          "<title>{}</title></circle>",
                          px, py, title)
                    : fmt::format(
                          "<path class=\"miss\" d=\"M{:.1f} {:.1f}l10 10m0 -10l-10 10\">"
                          "<title>{}</title></path>",
                          px - 5, py - 5, title);
    const bool turn = px > (left + right) / 2 + 100;  // labels stay inside the picture
    if (style.labels)
      svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>",
                         turn ? px - 9 : px + 9, py - 6, turn ? "end" : "start", title);
    svg += "\n";
  }
  const std::string note =
      missing ? fmt::format("{} points are zero or not finite and not shown.", missing) : "";
  return svg + end(text, note);
}

std::string bar_chart(const ChartText& text, const std::vector<Bar>& bars) {
  constexpr double row = 42, left = 2, scale_right = 590;
  double most = 0;
  for (const Bar& b : bars)
    for (const double v : {b.value, b.high})
      if (std::isfinite(v)) most = std::max(most, v);
  const double unit = most > 0 ? (scale_right - left) / most : 0;
  const auto reach = [&](double v) { return left + (std::isfinite(v) && v > 0 ? v * unit : 0); };
  std::string svg = begin(text, row * static_cast<double>(bars.size()) + 8);
  double y = 4;
  for (size_t i = 0; i < bars.size(); ++i, y += row) {
    const Bar& b = bars[i];
    svg += fmt::format(
        "<text x=\"{}\" y=\"{}\">{}</text><rect class=\"bar c{}\" x=\"{}\" y=\"{}\" "
        "width=\"{:.1f}\" height=\"18\"/>",
        left, y + 12, escape(b.label), i % colours, left, y + 17, reach(b.value) - left);
    svg += fmt::format("<path class=\"whisker\" d=\"M{:.1f} {}H{:.1f}\"/>", reach(b.low), y + 26,
                       reach(b.high));
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\">{}</text>\n",
                       std::max(reach(b.value), reach(b.high)) + 8, y + 30, escape(b.note));
  }
  return svg + end(text, "");
}

}  // namespace talea::report
