// What: the fp32 gradient of the logits written back into the 16-bit logits buffer, scaled by 1 /
// N.
// Why: with fp16 the small entries underflow to 0; with bf16 every entry loses 16 bits.
// Never: stores a gradient in 16 bits in our fp32 call.
#include "core/half.hpp"
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

Answer stored_in_fp16(const Data& d) {
  Answer a;
  const auto z = logits_of(d);
  const double n = static_cast<double>(d.tokens) * 8192;  // a window of many tokens
  products(d, a, [&](int64_t t, int64_t v) {
    const PlainRow row = softmax_row(&z[t * d.stored], d.vocab);
    const double dz = (std::exp(z[t * d.stored + v] - row.lse) - (v == d.y[t] ? 1.0 : 0.0)) / n;
    return static_cast<double>(f16_to_float(float_to_f16(static_cast<float>(dz))));
  });
  return a;
}

void run_all(Report& r) {
  Data d = make_data(16, 16, 2048, 41, 1.0);
  d.options.denominator = Denominator::given;
  d.options.denominator_value = static_cast<double>(d.tokens) * 8192;
  // Only what lies beside the target shows the loss of small entries: compare rows of dW that are
  // no target.
  const Answer truth = run(d, "reference");
  auto others = [&](const std::vector<double>& dw) {
    std::vector<double> rest = dw;
    for (int64_t y : d.y)
      std::fill_n(rest.begin() + static_cast<std::ptrdiff_t>(y * d.hidden), d.hidden, 0.0);
    return rest;
  };
  const Answer bad = stored_in_fp16(d);
  r.broken("dW rows of words that are no target, gradient kept in fp16",
           relative_l2(others(bad.dw), others(truth.dw)), 0.1);
  const Answer good = r.fixed([&] { return run(d, "auto"); }, [&] { return stored_in_fp16(d); });
  r.ours("dW rows of words that are no target", relative_l2(others(good.dw), others(truth.dw)),
         1e-5);
}

}  // namespace

extern const Reproducer gradient_in_16_bits{
    "gradient_in_16_bits", "B4", "the logits' gradient kept in the 16-bit logits buffer", run_all};

}  // namespace talea::repro
