// What: an epilogue that turns logits into their gradient in place, run twice by a tuner.
// Why: an autotuner runs every candidate on the real buffers; the second one reads the first's end.
// Never: lets a call of ours depend on what an earlier one left in its outputs.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

Answer in_place(const Data& d, int launches) {
  Answer a;
  auto z = logits_of(d);
  std::vector<PlainRow> rows;
  for (int64_t t = 0; t < d.tokens; ++t) rows.push_back(softmax_row(&z[t * d.stored], d.vocab));
  for (int launch = 0; launch < launches; ++launch)
    for (int64_t t = 0; t < d.tokens; ++t)
      for (int64_t v = 0; v < d.vocab; ++v) {
        float& cell = z[t * d.stored + v];  // the logit, or what a launch before left of it
        const double p = std::exp(cell - rows[t].lse);
        cell = static_cast<float>((p - (v == d.y[t] ? 1.0 : 0.0)) / double(d.tokens));
      }
  products(d, a, [&](int64_t t, int64_t v) { return double(z[t * d.stored + v]); });
  return a;
}

void run_all(Report& r) {
  const Data d = make_data(24, 40, 80, 141);
  const Answer truth = run(d, "reference");
  r.figure("dX, the epilogue run once", relative_l2(in_place(d, 1).dx, truth.dx));
  const Answer bad = in_place(d, 2);
  r.broken("dX, the epilogue run twice", relative_l2(bad.dx, truth.dx), 0.1);
  r.broken("dW, the epilogue run twice", relative_l2(bad.dw, truth.dw), 0.1);
  const Answer first = run(d, "auto");
  const Answer again = r.fixed([&] { return run(d, "auto"); }, [&] { return in_place(d, 2); });
  r.ours("dX of a second call", relative_l2(again.dx, truth.dx), 1e-5);
  r.ours("dX, a second call against the first", relative_l2(again.dx, first.dx), 0);
  r.ours("dW, a second call against the first", relative_l2(again.dw, first.dw), 0);
}

}  // namespace

extern const Reproducer tuned_twice{"tuned_twice", "B28",
                                    "an in-place epilogue run twice by an autotuner", run_all};

}  // namespace talea::repro
