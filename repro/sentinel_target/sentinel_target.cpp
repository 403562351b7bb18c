// What: the mask value of a foreign or ignored target equals the index of a padded column.
// Why: each shard maps targets outside it to a sentinel; the last tile's padding has that very
// index.
// Never: maps a target to an index in our call.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

// Columns [vocab, stored) are padding at -inf; ignored rows get target `vocab`, the first of them.
Answer sentinel_is_a_column(const Data& d) {
  Answer a;
  const auto z = logits_of(d);
  const double n = static_cast<double>(valid_count(d));
  for (int64_t t = 0; t < d.tokens; ++t) {
    const bool ignored = d.y[t] == d.options.ignore_index;
    const int64_t column = ignored ? d.vocab : d.y[t];
    const PlainRow row = softmax_row(&z[t * d.stored], d.vocab);
    for (int64_t v = 0; v < d.stored; ++v)
      if (v == column) a.loss += (row.lse - (v < d.vocab ? z[t * d.stored + v] : -INFINITY)) / n;
  }
  return a;
}

void run_all(Report& r) {
  Data d = make_data(24, 16, 120, 91, 2.0, 8);
  for (int64_t t = 0; t < d.tokens; t += 4) d.y[t] = d.options.ignore_index;
  const Answer truth = run(d, "reference");
  const Answer bad = sentinel_is_a_column(d);
  r.figure("loss when the sentinel matches a padded column", bad.loss);
  r.broken("loss when the sentinel matches a padded column", relative(bad.loss, truth.loss), 1.0);
  const Answer good =
      r.fixed([&] { return run(d, "auto"); }, [&] { return sentinel_is_a_column(d); });
  r.ours("loss with ignored rows and padding", relative(good.loss, truth.loss), 1e-6);
}

}  // namespace

extern const Reproducer sentinel_target{"sentinel_target", "B8",
                                        "a sentinel target matches a padded column", run_all};

}  // namespace talea::repro
