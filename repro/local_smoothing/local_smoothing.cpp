// What: label smoothing over each rank's own vocabulary shard instead of the whole vocabulary.
// Why: the smoothing mass of other shards is lost; loss and gradient change with the world size.
// Never: runs more than one process; shards are slices here.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

constexpr int ranks = 4;

// The smoothing term of the shard that owns the target, over V / ranks columns.
Answer shard_smoothing(const Data& d) {
  Answer a;
  const auto z = logits_of(d);
  const int64_t shard = d.vocab / ranks;
  const double eps = d.options.label_smoothing, n = static_cast<double>(d.tokens);
  std::vector<PlainRow> rows;
  for (int64_t t = 0; t < d.tokens; ++t) {
    rows.push_back(softmax_row(&z[t * d.stored], d.vocab));
    const int64_t begin = d.y[t] / shard * shard;
    double mean = 0;
    for (int64_t v = begin; v < begin + shard; ++v)
      mean += (rows[t].lse - z[t * d.stored + v]) / static_cast<double>(shard);
    a.loss += ((1 - eps) * (rows[t].lse - z[t * d.stored + d.y[t]]) + eps * mean) / n;
  }
  products(d, a, [&](int64_t t, int64_t v) {
    const double p = std::exp(z[t * d.stored + v] - rows[t].lse);
    const bool own = v / shard == d.y[t] / shard;
    return (p - (v == d.y[t] ? 1 - eps : 0.0) - (own ? eps / static_cast<double>(shard) : 0.0)) / n;
  });
  return a;
}

void run_all(Report& r) {
  Data d = make_data(32, 16, 512, 31, 3.0);
  d.options.label_smoothing = 0.1;
  // Vocabularies are sorted by frequency: the shards do not look alike.
  d.bias.resize(static_cast<size_t>(d.stored));
  for (int64_t v = 0; v < d.vocab; ++v)
    d.bias[v] = -8.f * static_cast<float>(v) / static_cast<float>(d.vocab);
  const Answer truth = run(d, "reference");
  const Answer bad = shard_smoothing(d);
  r.broken("dX with smoothing over one of 4 shards", relative_l2(bad.dx, truth.dx), 0.005);
  r.broken("loss with smoothing over one of 4 shards", relative(bad.loss, truth.loss), 1e-3);
  const Answer good = r.fixed([&] { return run(d, "auto"); }, [&] { return shard_smoothing(d); });
  r.ours("loss, smoothing over the whole vocabulary", relative(good.loss, truth.loss), 1e-6);
  r.ours("dX, smoothing over the whole vocabulary", relative_l2(good.dx, truth.dx), 1e-5);
}

}  // namespace

extern const Reproducer local_smoothing{"local_smoothing", "B9",
                                        "label smoothing over the local shard", run_all};

}  // namespace talea::repro
