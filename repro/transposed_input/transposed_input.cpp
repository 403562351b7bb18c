// What: a transposed view passes a stride guard and is read as contiguous.
// Why: shape and element count are right, so nothing crashes and the loss is plausible.
// Never: ignores a stride in our call.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

void run_all(Report& r) {
  const Data d = make_data(32, 32, 96, 161);
  const Answer truth = run(d, "reference");
  // The caller holds X column-major: element (t, i) at i * tokens + t.
  std::vector<float> turned(d.x.size());
  for (int64_t t = 0; t < d.tokens; ++t)
    for (int64_t i = 0; i < d.hidden; ++i) turned[i * d.tokens + t] = d.x[t * d.hidden + i];
  Data read_flat = d;
  read_flat.x = turned;
  const Answer bad = run(read_flat, "reference");
  r.broken("loss of a transposed view read as contiguous", relative(bad.loss, truth.loss), 1e-3);

  double loss = 0, error = relative(bad.loss, truth.loss);
  if (!r.fix_disabled()) {
    LinearCrossEntropyInputs in;
    in.hidden = make_tensor(turned.data(), DType::f32, {d.tokens, d.hidden});
    in.hidden.stride = {1, d.tokens};
    in.weight = make_tensor(d.w.data(), DType::f32, {d.stored, d.hidden});
    in.targets = make_tensor(d.y.data(), DType::i64, {d.tokens});
    LinearCrossEntropyOutputs out;
    out.loss = make_tensor(&loss, DType::f64, {});
    const LinearCrossEntropyOptions options;
    std::vector<char> workspace(static_cast<size_t>(workspace_bytes(describe(in, out, options))));
    linear_cross_entropy(in, out, options,
                         {workspace.data(), static_cast<int64_t>(workspace.size())});
    error = relative(loss, truth.loss);
  }
  r.ours("loss of the transposed view", error, 1e-6);
}

}  // namespace

extern const Reproducer transposed_input{"transposed_input", "B3",
                                         "a transposed input is read as contiguous", run_all,
                                         "it says how a view on the host is read"};

}  // namespace talea::repro
