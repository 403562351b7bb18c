// What: a target outside the vocabulary is skipped in loss and denominator, in silence.
// Why: a tokenizer mismatch turns into a slightly different mean instead of an error.
// Never: accepts such a target in our checked call.
#include <cmath>

#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

Answer skipped(const Data& d) {
  Data kept = d;
  for (int64_t& y : kept.y)
    if (y < 0 || y >= d.vocab) y = d.options.ignore_index;
  return run(kept, "reference");
}

// 0 where the call refuses and names the row, 1 where it goes on.
double goes_on(const Data& d) {
  try {
    run(d, "auto");
  } catch (const Error& error) {
    return std::string_view(error.what()).find("targets[5] = 64") == std::string_view::npos;
  }
  return 1;
}

void run_all(Report& r) {
  Data d = make_data(16, 8, 64, 151);
  d.y[5] = 64;
  Data clean = d;
  clean.y[5] = 0;
  const Answer bad = skipped(d);
  r.broken("a batch with target 64 of 64 entries: loss is finite and says nothing (1 = silent)",
           std::isfinite(bad.loss) ? 1.0 : 0.0, 0.5);
  r.ours("checked call goes on without naming row and value (0 = refused)",
         r.fix_disabled() ? 1.0 : goes_on(d), 0.0);
  Data poison = d;
  poison.options.target_check = TargetCheck::poison;
  const Answer marked = r.fixed([&] { return run(poison, "auto"); }, [&] { return bad; });
  r.ours("poisoned call: loss is NaN (0 = yes)", std::isnan(marked.loss) ? 0.0 : 1.0, 0.0);
}

}  // namespace

extern const Reproducer invalid_target{
    "invalid_target", "B24", "an invalid target leaves the denominator in silence", run_all};

}  // namespace talea::repro
