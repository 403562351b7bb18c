// What: a whole-module cast puts dt_bias into bf16; the steps made of it lose their digits in
// silence.
// Why: shapes and losses look right; every decay and every weight of a token is off by up to 2^-9.
// Never: casts for the caller.
#include <cmath>

#include "repro/support/scan.hpp"
#include "talea/error.hpp"

namespace talea::repro {
namespace {

float softplus(float x) { return std::log1p(std::exp(x)); }

// dt = softplus(x + dt_bias), adt = -A dt with A = 1, as the model makes them.
Scan with_bias(const Scan& from, const std::vector<float>& bias) {
  Scan s = from;
  for (int64_t h = 0; h < s.H; ++h)
    for (int64_t t = 0; t < s.S; ++t) {
      const int64_t i = h * s.S + t;
      s.at("dt", i) = softplus(from.in.at("trap")[static_cast<size_t>(i)] * 0.1f +
                               bias[static_cast<size_t>(h)]);
      s.at("adt", i) = -s.at("dt", i);
    }
  return s;
}

// Empty: dt in bf16 was taken without a word.
std::string refusal(const Scan& s) {
  std::vector<uint16_t> rounded(s.in.at("dt").size(), 0);
  mamba3::Inputs in;
  const auto& q = s.in.at("q");
  in.q = make_tensor(q.data(), DType::f32, {1, s.S, s.G, s.N});
  in.k = make_tensor(s.in.at("k").data(), DType::f32, {1, s.S, s.G, s.N});
  in.v = make_tensor(s.in.at("v").data(), DType::f32, {1, s.S, s.H, s.P});
  in.adt = make_tensor(s.in.at("adt").data(), DType::f32, {1, s.H, s.S});
  in.dt = make_tensor(rounded.data(), DType::bf16, {1, s.H, s.S});
  in.trap = make_tensor(s.in.at("trap").data(), DType::f32, {1, s.H, s.S});
  std::vector<float> room(s.in.at("v").size());
  mamba3::Outputs out;
  out.out = make_tensor(room.data(), DType::f32, {1, s.S, s.H, s.P});
  try {
    describe(mamba3::Pass::forward, in, out, {});
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

void run_all(Report& r) {
  const Scan drawn = draw_scan({1, 512, 4, 1, 1, 8, 8, 0, {}, {}, {}}, {"d_out"}, 9);
  // Steps of 0.001 to 0.1, whose inverse softplus are biases around -7 to -2.
  std::vector<float> bias = {-6.907f, -5.123f, -3.467f, -2.252f}, cast = bias;
  for (float& x : cast) x = round_to_bf16(x);
  const Scan right = with_bias(drawn, bias), broken = with_bias(drawn, cast);
  const ScanAnswer truth = run_scan(right, "reference"), moved = run_scan(broken, "reference");
  r.broken("dt itself, relative L2",
           relative_l2({broken.in.at("dt").begin(), broken.in.at("dt").end()},
                       {right.in.at("dt").begin(), right.in.at("dt").end()}),
           1e-3);
  r.broken("out, dt_bias in bf16", off(moved.t, truth.t, "out"), 1e-4);
  r.broken("d_dt, dt_bias in bf16", off(moved.t, truth.t, "d_dt"), 1e-4);
  const std::string said = refusal(right);
  const bool named = said.find("dt") != std::string::npos && said.find("bf16") != std::string::npos;
  r.ours("dt in bf16 is refused by name (0: it is)", r.fix_disabled() || !named ? 1 : 0, 0);
  const Values ours = r.fix_disabled() ? moved.t : run_scan(right, "auto").t;
  r.ours("out with steps in fp32", off(ours, truth.t, "out"), 2e-6);
  r.ours("d_dt with steps in fp32", off(ours, truth.t, "d_dt"), 2e-6);
}

}  // namespace

extern const Reproducer mamba3_fp32_steps{"mamba3_fp32_steps", "M3-5 M3-18",
                                          "dt_bias in bf16 moves every decay in silence", run_all};

}  // namespace talea::repro
