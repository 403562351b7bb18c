// What: dX added up over chunks of the vocabulary in bf16, and where training goes with it.
// Why: each chunk's part is rounded into the sum; one step hides it, a hundred show it.
// Never: rounds our dX before it is whole.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

constexpr int steps = 100;
constexpr int64_t chunks = 8;
constexpr double rate = 0.5;

std::vector<double> exact(const Data& d) { return run(d, "reference").dx; }
std::vector<double> fused(const Data& d) { return run(d, "auto").dx; }

std::vector<double> chunked_in_bf16(const Data& d) {
  std::vector<double> dx(d.x.size(), 0);
  const auto z = logits_of(d);
  const int64_t width = d.vocab / chunks;
  for (int64_t t = 0; t < d.tokens; ++t) {
    const PlainRow row = softmax_row(&z[t * d.stored], d.vocab);
    for (int64_t c = 0; c < chunks; ++c)
      for (int64_t i = 0; i < d.hidden; ++i) {
        double part = 0;
        for (int64_t v = c * width; v < (c + 1) * width; ++v) {
          const double p = std::exp(z[t * d.stored + v] - row.lse);
          part += (p - (v == d.y[t] ? 1.0 : 0.0)) / double(d.tokens) * d.w[v * d.hidden + i];
        }
        double& sum = dx[t * d.hidden + i];
        sum = round_to_bf16(static_cast<float>(sum + part));
      }
  }
  return dx;
}

// Plain descent on the hidden states themselves, in fp64 but for the gradient; where it ends.
template <typename Gradient>
std::vector<double> trained(Data d, int updates, Gradient gradient) {
  std::vector<double> x(d.x.begin(), d.x.end());
  for (int s = 0; s < updates; ++s) {
    for (size_t i = 0; i < x.size(); ++i) d.x[i] = static_cast<float>(x[i]);
    const std::vector<double> dx = gradient(d);
    for (size_t i = 0; i < x.size(); ++i) x[i] -= rate * dx[i];
  }
  return x;
}

void run_all(Report& r) {
  // Rows of the weight share a direction: parts of dX are large along it and cancel.
  Data d = make_data(16, 24, 128, 171, 1.0);
  for (float& w : d.w) w += 2.f;
  const auto after_one = trained(d, 1, exact), end = trained(d, steps, exact);
  r.figure("states after 1 step, dX chunked in bf16",
           relative_l2(trained(d, 1, chunked_in_bf16), after_one));
  const auto bad = trained(d, steps, chunked_in_bf16);
  r.broken("states after 100 steps, dX chunked in bf16", relative_l2(bad, end), 1e-3);
  const auto good = r.fix_disabled() ? bad : trained(d, steps, fused);
  r.ours("states after 100 steps", relative_l2(good, end), 1e-5);
}

}  // namespace

extern const Reproducer dx_chunks_in_bf16{"dx_chunks_in_bf16", "B31",
                                          "dX chunks rounded to bf16, over 100 steps", run_all};

}  // namespace talea::repro
