// What: an output layer of the right shape that is plain (projection, then a separate loss) beside
//       the fused boundary: the same scalar, another class of memory.
// Why: "fused" is a word in a config; what ran shows in the receipt and in measured peaks.
// Never: infers memory from a formula where it claims a saving.
#include <algorithm>
#include <cstdio>

#include "repro/support/peak.hpp"
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

Data single_thread(Data d) {
  d.options.threads = 1;  // measured in a forked child, which has no thread pool
  d.options.workspace_limit_bytes = int64_t{4} << 20;
  return d;
}

// Column-parallel linear of one rank and a separate loss: logits and their gradient in memory.
// Materialised logits know no limit but their own size.
Answer plain_layer(const Data& d) {
  Data whole = d;
  whole.options.workspace_limit_bytes = LinearCrossEntropyOptions{}.workspace_limit_bytes;
  return run(whole, "unfused");
}

struct Consumers {
  std::vector<double> logp, entropy;
  std::vector<int64_t> top;
  bool full_logits = false;
};

// What a number is worth where nothing may exist but tiles: a full tensor fails at any error.
double without_logits(bool full_logits, double error) { return full_logits ? INFINITY : error; }

// Policy log-probability, entropy and top-1 out of a full tensor.
Consumers from_logits(const Data& d) {
  Consumers c;
  c.full_logits = true;
  const auto z = logits_of(d);
  for (int64_t t = 0; t < d.tokens; ++t) {
    const float* row_z = &z[t * d.stored];
    const PlainRow row = softmax_row(row_z, d.vocab);
    double entropy = 0;
    for (int64_t v = 0; v < d.vocab; ++v)
      entropy -= std::exp(row_z[v] - row.lse) * (row_z[v] - row.lse);
    c.logp.push_back(row_z[d.y[t]] - row.lse);
    c.entropy.push_back(entropy);
    c.top.push_back(std::max_element(row_z, row_z + d.vocab) - row_z);
  }
  return c;
}

Consumers inside_boundary(const Data& d) {
  const int64_t n = d.tokens;
  Consumers c;
  c.logp.resize(static_cast<size_t>(n));
  c.entropy.resize(static_cast<size_t>(n));
  c.top.resize(static_cast<size_t>(n));
  LinearCrossEntropyInputs in;
  in.hidden = make_tensor(d.x.data(), DType::f32, {n, d.hidden});
  in.weight = make_tensor(d.w.data(), DType::f32, {d.stored, d.hidden});
  in.targets = make_tensor(d.y.data(), DType::i64, {n});
  LinearCrossEntropyOutputs out;
  out.target_logprob = make_tensor(c.logp.data(), DType::f64, {n});
  out.entropy = make_tensor(c.entropy.data(), DType::f64, {n});
  out.argmax = make_tensor(c.top.data(), DType::i64, {n});
  LinearCrossEntropyOptions options = d.options;
  options.vocab = d.vocab;
  std::vector<char> workspace(static_cast<size_t>(workspace_bytes(describe(in, out, options))));
  c.full_logits = linear_cross_entropy(in, out, options,
                                       {workspace.data(), static_cast<int64_t>(workspace.size())})
                      .full_logits_tensor;
  return c;
}

void memory(Report& r) {
  const Data d = single_thread(make_data(1024, 32, 16384, 201, 2.0));
  const Peak plain = measure_peak([&] { plain_layer(d); });
  const Peak fused = measure_peak(
      [&] { r.fixed([&] { return run(d, "auto"); }, [&] { return plain_layer(d); }); });
  r.figure("bytes of one full fp32 logits tensor", 4.0 * d.tokens * d.stored);
  r.figure("measured peak of the plain layer, bytes", plain.bytes);
  r.figure("measured peak of the fused boundary, bytes", fused.bytes);
  r.memory("training step, measured peak against the plain layer",
           fused.finished ? fused.bytes : -1, plain.finished ? plain.bytes : 0, 0.35);
  const Peak scored = measure_peak([&] { from_logits(d); });
  const Peak served = measure_peak([&] { r.fix_disabled() ? from_logits(d) : inside_boundary(d); });
  r.memory("log-probability, entropy and top-1, measured peak against a full tensor",
           served.finished ? served.bytes : -1, scored.finished ? scored.bytes : 0, 0.35);
}

void run_all(Report& r) {
  Data d = make_data(1024, 16, 509, 202, 2.0, 3);
  const Answer truth = run(d, "reference");
  d.options.workspace_limit_bytes = int64_t{256} << 10;  // a chunk of rows, not all of them
  Data ours = d;
  ours.options.workspace_limit_bytes = limit_for(d.options.workspace_limit_bytes);
  const Answer plain = plain_layer(d);
  r.figure("loss of the plain layer minus the true loss (looks the same)", plain.loss - truth.loss);
  r.broken("full logits tensor in the layer that has the fused layer's shape (1 = yes)",
           plain.full_logits ? 1.0 : 0.0, 0.5);
  const Answer good = r.fixed([&] { return run(ours, "auto"); }, [&] { return plain_layer(d); });
  r.ours("full logits tensor by the result's own account (0 = none)", good.full_logits ? 1.0 : 0.0,
         0.0);
  r.ours("dX without a full tensor",
         without_logits(good.full_logits, relative_l2(good.dx, truth.dx)), 1e-5);
  const Consumers want = from_logits(d);
  const Consumers have = r.fix_disabled() ? from_logits(d) : inside_boundary(d);
  auto served = [&](double error) { return without_logits(have.full_logits, error); };
  r.ours("log-probability served inside the boundary", served(relative_l2(have.logp, want.logp)),
         1e-5);
  r.ours("entropy served inside the boundary", served(relative_l2(have.entropy, want.entropy)),
         1e-5);
  r.ours("top-1 ids that differ", served(have.top != want.top ? 1.0 : 0.0), 0.0);
  memory(r);
}

}  // namespace

extern const Reproducer hopper_output_layer{"hopper_output_layer", "B13 B15",
                                            "a plain output layer that looks like the fused one",
                                            run_all};

}  // namespace talea::repro
