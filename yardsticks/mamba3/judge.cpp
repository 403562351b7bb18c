// What: the rule of "how right is right": a lane's tensors against the truth and the yardstick.
// Why: one rule for every lane and test, written so that NaN fails.
// Never: a tolerance that a test could choose.
#include "yardsticks/mamba3/judge.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace talea::yardsticks::mamba3 {
namespace {

constexpr double two_pi = 6.283185307179586;
constexpr double unit = 0x1p-23;  // roundings of fp32 that a cancelled sum leaves
constexpr double deviations = 5;  // of what roundings of operands leave of one number

std::string text(const char* format, const std::string& name, double a, double b, double c) {
  char line[256];
  std::snprintf(line, sizeof line, format, name.c_str(), a, b, c);
  return line;
}

bool is_row_output(const std::string& n) {
  for (const char* of : {"out", "d_q", "d_k", "d_v", "d_z", "final_ssm"})
    if (n == of) return true;
  return n.rfind("d_initial_", 0) == 0;
}

// The nearest angle to `truth` that is the same on the circle.
std::vector<double> unwound(std::vector<double> angle, const std::vector<double>& truth) {
  for (size_t i = 0; i < angle.size(); ++i)
    angle[i] -= two_pi * std::nearbyint((angle[i] - truth[i]) / two_pi);
  return angle;
}

struct Errors {
  double worst = 0, l2 = 0, largest = 0;
};

// `rounds`: of each element; within that it is not among the worst.
Errors errors_of(const std::vector<double>& ours, const std::vector<double>& truth,
                 const std::vector<double>& rounds = {}) {
  Errors e;
  for (size_t i = 0; i < truth.size(); ++i) {
    const double off = std::abs(ours[i] - truth[i]);
    e.largest = std::max(e.largest, std::abs(truth[i]));
    if (i < rounds.size() && off <= deviations * rounds[i]) continue;
    e.worst = std::isnan(off) || std::isnan(e.worst) ? NAN : std::max(e.worst, off);
  }
  e.l2 = relative_l2(ours, truth);
  return e;
}

}  // namespace

double relative_l2(const std::vector<double>& ours, const std::vector<double>& truth) {
  double off = 0, size = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    off += (ours[i] - truth[i]) * (ours[i] - truth[i]);
    size += truth[i] * truth[i];
  }
  if (off == 0) return 0;
  return size > 0 ? std::sqrt(off / size) : off == off ? INFINITY : NAN;
}

std::string judge_tensor(const Case& c, const std::string& name, const std::vector<double>& ours_in,
                         const std::vector<double>& truth, const std::vector<double>& yardstick_in,
                         const std::vector<double>& noise, const std::vector<double>& rounds) {
  if (ours_in.size() != truth.size() || yardstick_in.size() != truth.size())
    return name + ": sizes differ";
  const bool angle = name == "final_angle";
  const std::vector<double> ours = angle ? unwound(ours_in, truth) : ours_in;
  const std::vector<double> yardstick = angle ? unwound(yardstick_in, truth) : yardstick_in;
  const Errors e = errors_of(ours, truth, rounds), y = errors_of(yardstick, truth);
  const bool wide = !is_16bit(c.dtype) && !is_16bit(output_dtype(c, name));
  double size = 0, left_l2 = 0, left_worst = 0;  // of the truth; what cancellation leaves
  for (const double x : truth) size += x * x;
  for (const double x : noise) {
    left_l2 += x * x * unit * unit;
    left_worst = std::max(left_worst, x * unit);
  }
  const double n = static_cast<double>(std::max<size_t>(truth.size(), 1));
  const double near = wide ? 1e-6 : 1e-4;
  double l2 = wide ? 2e-6 : y.l2;
  l2 *= 1 + 3 / std::sqrt(n);
  if (!is_row_output(name)) l2 *= 1.25;
  // Angles and handed rows are one rounding of what the yardstick stores as well.
  if (name == "final_k" || name == "final_v" || angle) l2 = std::max(l2, wide ? 2e-6 : 1e-2);
  if (left_l2 > 0) l2 += size > 0 ? std::sqrt(left_l2 / size) : INFINITY;
  double spread = 0,
         most = 0;  // no sum of squares is likely beyond (its root + deviations * most)^2
  for (const double x : rounds) spread += x * x, most = std::max(most, x);
  if (size > 0) l2 = std::max(l2, (std::sqrt(spread) + deviations * most) / std::sqrt(size));
  const double worst = 2 * y.worst + near * e.largest + left_worst;
  if (!(e.worst <= worst))
    return text("%s: worst error %.3g, allowed %.3g (largest %.3g)", name, e.worst, worst,
                e.largest);
  if (!(e.l2 <= l2))
    return text("%s: relative L2 %.3g, allowed %.3g (yardstick %.3g)", name, e.l2, l2, y.l2);
  return "";
}

std::string judge(const Case& c, const Values& ours, const Values& truth, const Values& yardstick,
                  bool rounds_operands) {
  std::string said;
  int compared = 0;
  for (const auto& entry : ours) {
    const std::string& name = entry.first;
    ++compared;
    const auto told = [&](const std::string& what) {
      const auto at = truth.find(what + name);
      return at == truth.end() ? std::vector<double>{} : at->second;
    };
    const std::string one =
        judge_tensor(c, name, entry.second, truth.at(name), yardstick.at(name), told("noise:"),
                     rounds_operands ? told("rounds:") : std::vector<double>{});
    if (!one.empty()) said += one + "\n";
  }
  return compared == 0 ? "nothing was compared" : said;
}

std::string judge(const Case& c, const Tensors& ours, const Values& truth, const Tensors& yardstick,
                  bool rounds_operands) {
  Values own, other;
  append(own, ours), append(other, yardstick);
  return judge(c, own, truth, other, rounds_operands);
}

void append(Values& to, const Values& more) {
  for (const auto& [name, values] : more)
    to[name].insert(to[name].end(), values.begin(), values.end());
}

void append(Values& to, const Tensors& outputs) {
  Values values;
  for (const auto& [name, tensor] : outputs)
    if (name != "saved" && name != "status") values[name] = tensor.values();
  append(to, values);
}

}  // namespace talea::yardsticks::mamba3
