// What: a tile of 64 rows that spans several queries and takes the first one's index list.
// Why: with fewer than 64 heads a tile filled with rows of the next query reads foreign keys.
// Never: compares with anything but the fp64 truth.
#include <fmt/format.h>

#include "repro/support/sparse.hpp"

namespace talea::repro {
namespace {

SparseAnswer shared_list(SparseData d) {
  const int64_t a_tile = 64 / d.heads;  // queries of one tile
  for (int64_t s = 0; s < d.queries; ++s)
    for (int64_t k = 0; k < d.slots; ++k)
      d.indices[static_cast<size_t>(s * d.slots + k)] =
          d.indices[static_cast<size_t>(s / a_tile * a_tile * d.slots + k)];
  return attend(d, "auto");
}

void run_all(Report& r) {
  for (const int64_t heads : {8, 11, 28}) {
    const SparseData d = make_sparse(24, 96, heads, 64, 32, 16, 31 + static_cast<uint64_t>(heads));
    const SparseAnswer truth = attend(d, "reference"), bad = shared_list(d);
    r.broken(fmt::format("o of {} heads, one list for a tile", heads), relative_l2(bad.o, truth.o),
             1e-2);
    r.broken(fmt::format("dkv of {} heads, one list for a tile", heads),
             relative_l2(bad.dkv, truth.dkv), 1e-2);
    const SparseAnswer good = r.fix_disabled() ? bad : attend(d, "auto");
    r.ours(fmt::format("o of {} heads", heads), relative_l2(good.o, truth.o), 1e-5);
    r.ours(fmt::format("dq of {} heads", heads), relative_l2(good.dq, truth.dq), 1e-5);
    r.ours(fmt::format("dkv of {} heads", heads), relative_l2(good.dkv, truth.dkv), 1e-5);
  }
}

}  // namespace

extern const Reproducer shared_list_tile{
    "shared_list_tile", "SA3", "a tile of rows of two queries takes the first one's list", run_all};

}  // namespace talea::repro
