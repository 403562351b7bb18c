// What: the log-probabilities of one policy from two programs, one of them from 16-bit logits.
// Why: their ratio should be exactly 1 before the first update; rounding makes it noise to learn
// from.
// Never: rounds a logit of ours.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

std::vector<double> from_bf16_logits(const Data& d) {
  auto z = logits_of(d);
  for (float& value : z) value = round_to_bf16(value);
  std::vector<double> logp;
  for (int64_t t = 0; t < d.tokens; ++t)
    logp.push_back(z[t * d.stored + d.y[t]] - softmax_row(&z[t * d.stored], d.vocab).lse);
  return logp;
}

std::vector<double> fused(Data d, const char* lane, int64_t limit_bytes) {
  d.options.reduction = Reduction::none;
  d.options.workspace_limit_bytes = limit_bytes;
  std::vector<double> logp = run(d, lane).losses;
  for (double& value : logp) value = -value;
  return logp;
}

// The largest |exp(new - old) - 1|: 0 where both programs are one policy.
double off_one(const std::vector<double>& now, const std::vector<double>& old) {
  double worst = 0;
  for (size_t t = 0; t < now.size(); ++t) {
    const double off = std::abs(std::expm1(now[t] - old[t]));
    if (!(off <= worst)) worst = off;
  }
  return worst;
}

void run_all(Report& r) {
  Data d = make_data(64, 64, 512, 161, 6.0);
  const int64_t large = int64_t{64} << 20, small = limit_for(int64_t{256} << 10);
  const auto truth = fused(d, "reference", large);
  const auto rounded = from_bf16_logits(d);
  r.broken("ratio - 1, trainer in fp32, sampler from bf16 logits", off_one(truth, rounded), 0.01);
  int64_t clipped = 0;
  for (size_t t = 0; t < truth.size(); ++t)
    clipped += std::abs(std::expm1(truth[t] - rounded[t])) > 0.02;
  r.figure("tokens of 64 off by more than 2 %", static_cast<double>(clipped));
  const auto first = fused(d, "auto", large);
  const auto second = r.fix_disabled() ? rounded : fused(d, "auto", small);
  r.ours("ratio - 1, two programs of ours in other chunks", off_one(first, second), 0);
  r.ours("ratio - 1, ours against fp64", off_one(second, truth), 3e-5);
}

}  // namespace

extern const Reproducer ratio_not_one{
    "ratio_not_one", "B30", "16-bit log-probabilities of one policy whose ratio is not 1", run_all};

}  // namespace talea::repro
