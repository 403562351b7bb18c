// What: sizes that the kernels of the field refuse, sent to the dense path without a word.
// Why: 128/64 at 8 or 28 heads is a small model, and [heads, queries, keys] is what it pays then.
// Never: infers memory from a formula where it claims a saving.
#include <fmt/format.h>

#include <cmath>

#include "repro/support/peak.hpp"
#include "repro/support/sparse.hpp"

namespace talea::repro {
namespace {

// What the fused kernels of the field take: two sizes, heads in blocks of 64.
bool fused_takes(const SparseData& d) {
  return (d.dim == 576 || d.dim == 512) && d.value_dim == 512 && d.heads % 64 == 0;
}

// A dispatcher that falls back in silence.
SparseAnswer dispatched(const SparseData& d) {
  return attend(d, fused_takes(d) ? "auto" : "unfused");
}

void run_all(Report& r) {
  for (const int64_t heads : {8, 28}) {
    const SparseData d =
        make_sparse(40, 160, heads, 128, 64, 24, 91 + static_cast<uint64_t>(heads));
    const SparseAnswer truth = attend(d, "reference"), dense = dispatched(d);
    r.broken(fmt::format("bytes of [heads, queries, keys] scores, 128/64 at {} heads", heads),
             static_cast<double>(dense.forward.full_scores_bytes), 0);
    const SparseAnswer good = r.fix_disabled() ? dense : attend(d, "auto");
    // What a number is worth where no dense tensor may exist.
    const auto sparse = [&](double error) {
      return good.forward.full_scores_bytes > 0 ? INFINITY : error;
    };
    r.ours(fmt::format("o, 128/64 at {} heads", heads), sparse(relative_l2(good.o, truth.o)), 1e-5);
    r.ours(fmt::format("dq, 128/64 at {} heads", heads), sparse(relative_l2(good.dq, truth.dq)),
           1e-5);
    r.ours(fmt::format("dkv, 128/64 at {} heads", heads), sparse(relative_l2(good.dkv, truth.dkv)),
           1e-5);
  }
  SparseData large = make_sparse(512, 4096, 8, 128, 64, 32, 93);
  large.options.threads = 1;  // measured in a forked child, which has no thread pool
  const Peak dense = measure_peak([&] { dispatched(large); });
  const Peak ours =
      measure_peak([&] { r.fix_disabled() ? dispatched(large) : attend(large, "auto"); });
  r.figure("bytes of dense fp32 scores, 512 queries, 4096 keys, 8 heads", 4.0 * 512 * 4096 * 8);
  r.figure("measured peak of the dense path, bytes", dense.bytes);
  r.figure("measured peak of the sparse path, bytes", ours.bytes);
  r.memory("forward and backward, measured peak against the dense path",
           ours.finished ? ours.bytes : -1, dense.finished ? dense.bytes : 0, 0.35);
}

}  // namespace

extern const Reproducer sparse_dims{
    "sparse_dims", "SA31", "sizes no fused kernel takes, computed densely in silence", run_all};

}  // namespace talea::repro
