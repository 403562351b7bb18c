// What: a reset token (adt = -1e4) in a chunk spoils an fp32 prefix sum of log decays.
// Why: exp(L_i - L_j) of two sums near -1e4 has three digits; without a reset it has seven.
// Never: clamps a decay for the caller.
#include <cmath>

#include "repro/support/scan.hpp"

namespace talea::repro {
namespace {

// out of one head by the chunk form over the whole sequence, L an fp32 prefix sum of adt.
Values prefix_sum(const Scan& s) {
  Values made;
  auto& out = made["out"];
  out.assign(s.in.at("v").size(), 0);
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  for (int64_t h = 0; h < s.H; ++h) {
    std::vector<float> L(static_cast<size_t>(s.S));
    float sum = 0;
    for (int64_t t = 0; t < s.S; ++t)
      L[static_cast<size_t>(t)] = sum += s.in.at("adt")[static_cast<size_t>(h * s.S + t)];
    for (int64_t t = 0; t < s.S; ++t)
      for (int64_t j = 0; j <= t; ++j) {
        const auto dt = [&](int64_t i) { return s.in.at("dt")[static_cast<size_t>(h * s.S + i)]; };
        const auto lambda = [&](int64_t i) {
          return sigmoid(s.in.at("trap")[static_cast<size_t>(h * s.S + i)]);
        };
        double scale = lambda(j) * dt(j);
        if (j < t) scale += (1 - lambda(j + 1)) * dt(j + 1);
        double dot = 0;
        for (int64_t n = 0; n < s.N; ++n)
          dot += s.in.at("q")[static_cast<size_t>(t * s.N + n)] *
                 s.in.at("k")[static_cast<size_t>(j * s.N + n)];
        const float gap = L[static_cast<size_t>(t)] - L[static_cast<size_t>(j)];
        const double weight = dot * scale * std::exp(static_cast<double>(gap));
        for (int64_t p = 0; p < s.P; ++p)
          out[static_cast<size_t>((t * s.H + h) * s.P + p)] +=
              weight * s.in.at("v")[static_cast<size_t>((j * s.H + h) * s.P + p)];
      }
  }
  return made;
}

void run_all(Report& r) {
  Scan s = draw_scan({1, 256, 2, 1, 1, 8, 8, 0, {}, {}, {}}, {"d_out"}, 13);
  const Values plain = plain_scan(s);
  r.figure("out without a reset, fp32 prefix sum", off(prefix_sum(s), plain, "out"));
  for (int64_t h = 0; h < s.H; ++h)
    for (int64_t t = 17; t < s.S; t += 64) s.at("adt", h * s.S + t) = -1e4f;
  const Values truth = plain_scan(s), broken = prefix_sum(s);
  r.broken("out with a reset every 64 tokens, fp32 prefix sum", off(broken, truth, "out"), 1e-5);
  const ScanAnswer answer = run_scan(s, "auto");
  r.ours("out with resets", off(r.fix_disabled() ? broken : answer.t, truth, "out"), 2e-6);
  // d_adt of a reset token is exactly 0: nothing passes it.
  double largest = 0;
  for (int64_t h = 0; h < s.H; ++h)
    for (int64_t t = 17; t < s.S; t += 64) {
      const double d = answer.t.at("d_adt")[static_cast<size_t>(h * s.S + t)];
      largest = std::max(largest, std::isfinite(d) ? std::abs(d) : 1.0);
    }
  r.ours("d_adt at the resets, largest", r.fix_disabled() ? 1 : largest, 0);
}

}  // namespace

extern const Reproducer mamba3_reset{"mamba3_reset", "M3-19 M3-20",
                                     "one reset a chunk costs an fp32 prefix sum its digits",
                                     run_all};

}  // namespace talea::repro
