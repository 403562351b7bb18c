// What: queries or batch entries on a grid axis that ends at 65535: nothing is launched.
// Why: the launch fails, its error is not read, and the output keeps what the memory held.
// Never: needs a GPU: the limit and the unread error are what is shown.
#include <cmath>

#include "repro/support/sparse.hpp"

namespace talea::repro {
namespace {

constexpr int64_t axis_limit = 65535;

// A launch as the runtime does it: an axis too long is an error code and no work.
bool launch(int64_t queries, const std::function<void()>& kernel) {
  if (queries > axis_limit) return false;
  kernel();
  return true;
}

SparseAnswer on_one_axis(const SparseData& d) {
  SparseAnswer a;
  a.o.assign(static_cast<size_t>(d.queries * d.heads * d.value_dim), NAN);  // unwritten memory
  (void)launch(d.queries, [&] { a = attend(d, "auto"); });                  // nobody looks
  return a;
}

double unwritten(const std::vector<double>& values) {
  double n = 0;
  for (const double v : values) n += std::isnan(v) ? 1 : 0;
  return n;
}

void run_all(Report& r) {
  SparseData d = make_sparse(70001, 64, 1, 16, 16, 4, 61);
  d.d_o.clear();
  const SparseAnswer truth = attend(d, "reference"), bad = on_one_axis(d);
  r.broken("elements of o that were never written, 70001 queries on one axis", unwritten(bad.o), 0);
  const SparseAnswer good = r.fix_disabled() ? bad : attend(d, "auto");
  r.ours("elements of o that were never written", unwritten(good.o), 0);
  r.ours("o of 70001 queries", relative_l2(good.o, truth.o), 1e-5);
}

}  // namespace

extern const Reproducer grid_limit{
    "grid_limit", "SA29", "more than 65535 on a grid axis: nothing runs, nobody is told", run_all};

}  // namespace talea::repro
