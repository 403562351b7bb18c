// What: a parity gate that NaN passes: max(0, NaN) is 0, and NaN > tolerance is false.
// Why: the harness reports a perfect match for a run that diverged.
// Never: compares with `>` in our own gate.
#include <algorithm>
#include <cmath>

#include "repro/support/repro.hpp"

namespace talea::repro {
namespace {

// The worst gap as harnesses write it.
bool blind_gate(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return !(worst > tolerance);
}

void run_all(Report& r) {
  Data d = make_data(8, 8, 32, 81);
  const Answer truth = run(d, "reference");
  std::vector<double> diverged = truth.dx;
  std::fill(diverged.begin(), diverged.end(), NAN);
  const bool passed = blind_gate(diverged, truth.dx, 1e-6);
  r.broken("a gradient of NaN, error the blind gate reports as passing", passed ? NAN : 0.0, 0.0);
  // Ours: the error itself is NaN, and `error <= bound` is false.
  const double ours = r.fix_disabled() ? (passed ? 1.0 : 0.0)
                                       : (relative_l2(diverged, truth.dx) <= 1e-6 ? 1.0 : 0.0);
  r.ours("NaN let through by our comparison (0 = none)", ours, 0.0);
}

}  // namespace

extern const Reproducer nan_gate{"nan_gate", "B25", "a parity gate that NaN passes", run_all,
                                 "it compares numbers and calls no operator"};

}  // namespace talea::repro
