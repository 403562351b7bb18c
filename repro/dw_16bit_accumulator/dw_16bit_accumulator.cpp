// What: dW accumulated over chunks in bf16.
// Why: after enough chunks an addend is smaller than half a unit in the last place and is lost.
// Never: accumulates in 16 bits in our call.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

Answer accumulated_in_bf16(const Data& d, int64_t chunk) {
  Answer a;
  a.dw.assign(d.w.size(), 0);
  for (int64_t begin = 0; begin < d.tokens; begin += chunk) {
    Data part = d;
    part.tokens = chunk;
    part.x.assign(d.x.begin() + begin * d.hidden, d.x.begin() + (begin + chunk) * d.hidden);
    part.y.assign(d.y.begin() + begin, d.y.begin() + begin + chunk);
    part.options.denominator = Denominator::given;
    part.options.denominator_value = static_cast<double>(d.tokens);
    const Answer one = run(part, "reference");
    for (size_t i = 0; i < a.dw.size(); ++i)
      a.dw[i] = round_to_bf16(static_cast<float>(a.dw[i] + one.dw[i]));
  }
  return a;
}

void run_all(Report& r) {
  // Every token has the same direction and target, as a frequent word has.
  Data d = make_data(2048, 8, 64, 51, 0.5);
  for (int64_t t = 0; t < d.tokens; ++t) {
    d.y[t] = 3;
    for (int64_t i = 0; i < d.hidden; ++i)
      d.x[t * d.hidden + i] = 1.f + 0.05f * d.x[t * d.hidden + i];
  }
  const Answer truth = run(d, "reference");
  for (int64_t chunks : {16, 256}) {
    const Answer bad = accumulated_in_bf16(d, d.tokens / chunks);
    const std::string what = "dW over " + std::to_string(chunks) + " chunks, bf16 accumulator";
    if (chunks < 100)
      r.figure(what, relative_l2(bad.dw, truth.dw));
    else
      r.broken(what, relative_l2(bad.dw, truth.dw), 0.01);
  }
  const Answer good =
      r.fixed([&] { return run(d, "auto"); }, [&] { return accumulated_in_bf16(d, 8); });
  r.ours("dW, fp32 accumulator", relative_l2(good.dw, truth.dw), 1e-5);
}

}  // namespace

extern const Reproducer dw_16bit_accumulator{"dw_16bit_accumulator", "B6",
                                             "dW accumulated over chunks in bf16", run_all};

}  // namespace talea::repro
