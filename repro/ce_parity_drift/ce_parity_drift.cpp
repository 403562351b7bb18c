// What: the historical variants of p - one_hot over one step and over 850 AdamW steps.
// Why: some are wrong at once, some only drift, some are harmless; figures of a run tell them
// apart.
// Never: compares against figures that were not measured by this program.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

enum class Variant { ours, clamp, ignored_counted, full_denominator, subtract_bf16, no_window };

constexpr const char* names[] = {
    "ours",          "clamp -log(p + 1e-8)", "ignored tokens counted", "denominator of all tokens",
    "p - 1 in bf16", "1 / K missing"};

// One micro-batch's gradient of the head under a variant.
std::vector<double> gradient(const Data& d, Variant variant) {
  if (variant == Variant::ours) return run(d, "auto").dw;
  Answer a;
  const auto z = logits_of(d);
  const double n = static_cast<double>(
      variant == Variant::full_denominator || variant == Variant::ignored_counted ? d.tokens
                                                                                  : valid_count(d));
  std::vector<PlainRow> rows;
  for (int64_t t = 0; t < d.tokens; ++t) rows.push_back(softmax_row(&z[t * d.stored], d.vocab));
  products(d, a, [&](int64_t t, int64_t v) {
    int64_t y = d.y[t];
    if (y == d.options.ignore_index) {
      if (variant != Variant::ignored_counted) return 0.0;
      y = 0;
    }
    double p = std::exp(z[t * d.stored + v] - rows[t].lse);
    const double own = std::exp(z[t * d.stored + y] - rows[t].lse);
    if (variant == Variant::subtract_bf16) p = round_to_bf16(static_cast<float>(p));
    const double share = variant == Variant::clamp ? own / (own + 1e-8) : 1.0;
    return share * (p - (v == y ? 1.0 : 0.0)) / n;
  });
  return a.dw;
}

// Softmax regression on a fixed stream, AdamW, windows of 2 micro-batches. Returns the weights.
std::vector<float> train(Data d, const Data& stream, Variant variant, int steps, bool exact) {
  const int64_t rows = d.tokens, total = stream.tokens / rows;
  std::vector<double> m(d.w.size()), s(d.w.size());
  for (int step = 1; step <= steps; ++step) {
    std::vector<double> g(d.w.size(), 0.0);
    for (int k = 0; k < 2; ++k) {
      const int64_t at = (2 * step + k) % total * rows;
      std::copy_n(stream.x.begin() + at * d.hidden, rows * d.hidden, d.x.begin());
      std::copy_n(stream.y.begin() + at, rows, d.y.begin());
      const std::vector<double> part = exact ? run(d, "reference").dw : gradient(d, variant);
      const double factor = variant == Variant::no_window && !exact ? 1.0 : 0.5;
      for (size_t i = 0; i < g.size(); ++i) g[i] += factor * part[i];
    }
    for (size_t i = 0; i < g.size(); ++i) {
      m[i] = 0.9 * m[i] + 0.1 * g[i];
      s[i] = 0.999 * s[i] + 0.001 * g[i] * g[i];
      const double mean = m[i] / (1 - std::pow(0.9, step));
      const double square = s[i] / (1 - std::pow(0.999, step));
      d.w[i] -= static_cast<float>(1e-2 * (mean / (std::sqrt(square) + 1e-8) + 0.01 * d.w[i]));
    }
  }
  return d.w;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  return relative_l2({a.begin(), a.end()}, {b.begin(), b.end()});
}

void run_all(Report& r) {
  // Targets that a linear head can learn: confident rows appear as it does.
  Data stream = make_data(512, 8, 24, 221, 6.0);
  const auto z = logits_of(stream);
  for (int64_t t = 0; t < stream.tokens; ++t) {
    const float* row = &z[t * stream.stored];
    stream.y[t] = std::max_element(row, row + stream.vocab) - row;
    if (t % 5 == 0) stream.y[t] = stream.options.ignore_index;
  }
  Data model = make_data(16, 8, 24, 222, 0.1);
  for (int steps : {1, 850}) {
    const std::string after = ", weights after " + std::to_string(steps) + " steps";
    const auto exact = train(model, stream, Variant::ours, steps, true);
    Data moved = model;  // the noise band: initial weights one unit in the last place away
    for (float& w : moved.w) w = std::nextafter(w, INFINITY);
    const double band = distance(train(moved, stream, Variant::ours, steps, true), exact);
    r.figure("one-ulp band" + after, band);
    for (int i = 1; i <= 5; ++i) {
      const double drift =
          distance(train(model, stream, static_cast<Variant>(i), steps, false), exact);
      r.figure(std::string(names[i]) + after, drift);
      if (steps == 850 && static_cast<Variant>(i) == Variant::ignored_counted)
        r.broken(std::string(names[i]) + after, drift, 0.05);
      if (steps == 850 && static_cast<Variant>(i) == Variant::subtract_bf16)
        r.broken(std::string(names[i]) + after, drift, 1e-5);
    }
    const auto ours = train(
        model, stream, r.fix_disabled() ? Variant::subtract_bf16 : Variant::ours, steps, false);
    // AdamW's first step is a sign: it cannot tell a fix from its absence.
    if (steps == 1)
      r.figure("ours" + after, distance(ours, exact));
    else
      r.ours("ours" + after, distance(ours, exact), 1e-5);
  }
}

}  // namespace

extern const Reproducer ce_parity_drift{"ce_parity_drift", "B21 B22 B23 B24",
                                        "variants of p - one_hot, one step and 850", run_all};

}  // namespace talea::repro
