// What: gradients formed in forward, scaled in place by each backward.
// Why: a second backward (retain_graph, pipeline recompute) multiplies what the first one left.
// Never: keeps a gradient between our calls; a second backward is a second call.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

// The layer that keeps its gradient and scales it in place.
struct InPlace {
  Answer kept;
  const Answer& backward(double upstream) {
    for (double& g : kept.dx) g *= upstream;
    for (double& g : kept.dw) g *= upstream;
    return kept;
  }
};

void run_all(Report& r) {
  Data d = make_data(24, 16, 96, 121);
  d.upstream = {3.f};
  const Answer truth = run(d, "reference");
  Data once = d;
  once.upstream.clear();
  InPlace layer{run(once, "reference")};
  layer.backward(3.0);
  const Answer bad = layer.backward(3.0);
  r.broken("second backward with upstream 3, scaled in place", relative_l2(bad.dx, truth.dx), 0.5);
  run(d, "auto");
  const Answer good = r.fixed([&] { return run(d, "auto"); }, [&] { return bad; });
  r.ours("second backward with upstream 3, dX", relative_l2(good.dx, truth.dx), 1e-5);
  r.ours("second backward with upstream 3, dW", relative_l2(good.dw, truth.dw), 1e-5);
}

}  // namespace

extern const Reproducer second_backward{"second_backward", "B18",
                                        "a second backward scales the gradient again", run_all};

}  // namespace talea::repro
