// What: an accumulation window of K micro-batches: not divided by K, or a mean of unequal means.
// Why: each micro-batch's loss looks right; only the optimizer step is wrong.
// Never: averages means; our window is divided by its tokens (Denominator::given).
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

Data slice(const Data& d, int64_t begin, int64_t end) {
  Data part = d;
  part.tokens = end - begin;
  part.x.assign(d.x.begin() + begin * d.hidden, d.x.begin() + end * d.hidden);
  part.y.assign(d.y.begin() + begin, d.y.begin() + end);
  return part;
}

// Sum of dW over micro-batches that each divide by their own count, times `factor`.
std::vector<double> window(const Data& d, const std::vector<int64_t>& cuts, double factor,
                           double given, const std::string& lane) {
  std::vector<double> dw(d.w.size(), 0.0);
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    Data part = slice(d, cuts[i], cuts[i + 1]);
    if (given > 0) {
      part.options.denominator = Denominator::given;
      part.options.denominator_value = given;
    }
    const Answer one = run(part, lane);
    for (size_t j = 0; j < dw.size(); ++j) dw[j] += factor * one.dw[j];
  }
  return dw;
}

void run_all(Report& r) {
  const Data d = make_data(96, 16, 64, 141);
  const std::vector<int64_t> cuts = {0, 64, 80, 92, 96};  // windows of 64, 16, 12 and 4 tokens
  const Answer truth = run(d, "reference");
  r.broken("dW of a window of 4, 1 / K missing",
           relative_l2(window(d, cuts, 1.0, 0, "reference"), truth.dw), 1.0);
  const auto means = window(d, cuts, 0.25, 0, "reference");
  r.broken("dW of a window of 4 unequal micro-batches, mean of means", relative_l2(means, truth.dw),
           0.1);
  const std::vector<int64_t> equal = {0, 24, 48, 72, 96};
  r.figure("mean of means over equal micro-batches (exact only there)",
           relative_l2(window(d, equal, 0.25, 0, "reference"), truth.dw));
  const auto good = r.fix_disabled() ? means : window(d, cuts, 1.0, 96, "auto");
  r.ours("dW, every micro-batch divided by the window's tokens", relative_l2(good, truth.dw), 1e-5);
}

}  // namespace

extern const Reproducer accumulation_window{"accumulation_window", "B23",
                                            "1/K missing, or a mean of unequal means", run_all};

}  // namespace talea::repro
