// What: the running angle kept in bf16, or in fp32 without bound: digits go with every token.
// Why: outputs of the first tokens are right, and tests are short.
// Never: judges by the angle alone; what it turns is compared.
#include <cmath>

#include "repro/support/scan.hpp"

namespace talea::repro {
namespace {

void run_all(Report& r) {
  // Rates near the end of tanh, as trained models have them: the angle grows by 0.3 a token.
  Scan s = draw_scan({1, 4096, 2, 1, 1, 8, 8, 4, {}, {}, {}}, {}, 5);
  for (float& x : s.in["angles"]) x = 2.f + 0.1f * x;
  const Values truth = plain_scan(s);
  const auto in_bf16 = [](double a, double b) {
    return static_cast<double>(round_to_bf16(static_cast<float>(a + b)));
  };
  const auto in_fp32 = [](double a, double b) {
    return static_cast<double>(static_cast<float>(a) + static_cast<float>(b));
  };
  Loop bf16, fp32;
  bf16.turn = in_bf16;
  fp32.turn = in_fp32;
  const Values stored = plain_scan(s, bf16), running = plain_scan(s, fp32);
  r.broken("out, angle kept in bf16", off(stored, truth, "out"), 1e-2);
  r.broken("out, angle a running fp32 sum without bound", off(running, truth, "out"), 1e-5);
  const Values ours = r.fix_disabled() ? stored : run_scan(s, "auto").t;
  r.ours("out of 4096 tokens, exact turns", off(ours, truth, "out"), 2e-6);
}

}  // namespace

extern const Reproducer mamba3_angles{"mamba3_angles", "M3-16 M3-17",
                                      "the rotation's angle loses its digits over tokens", run_all};

}  // namespace talea::repro
