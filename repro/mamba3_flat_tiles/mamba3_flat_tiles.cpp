// What: shared tiles of rank 3, (token, r, n), which a compiler that copies rank-2 tiles in bulk
// refuses.
// Why: asynchronous loads are then off in every such kernel, without an error.
// Never: runs upstream's kernels; on a device, kernels of this project show what the driver takes
// and what bulk copies are worth.
#include <set>

#include "repro/support/chunk.hpp"
#include "repro/support/scan.hpp"

namespace talea::repro {
namespace {

// A shared tile: extents, slowest axis first.
using Layout = std::vector<int64_t>;

// The failing compiler's rule: a bulk copy has a shared layout of exactly two dimensions.
bool takes_bulk_copy(const Layout& tile) { return tile.size() == 2; }

// (token, r, n) of the 5-D tensor, and its place in the flat tile [C R, N].
int64_t flat(int64_t c, int64_t r, int64_t n, int64_t rank, int64_t columns) {
  return (c * rank + r) * columns + n;
}
// Same-token blocks [C, R R]: element (c, r1, r2) at column r1 R + r2.
int64_t block(int64_t c, int64_t r1, int64_t r2, int64_t rank) {
  return c * rank * rank + r1 * rank + r2;
}

// What the driver itself refuses, and the gradients of a chunk with bulk copies and without.
void run_on_device(Report& r) {
  r.broken("same-token blocks [C, R, R] in 16 bits: the driver refuses the box",
           describes_blocks(false) ? 0 : 1, 0);
  r.ours("same-token blocks [C, R R]: the driver refuses the box",
         describes_blocks(!r.fix_disabled()) ? 0 : 1, 0);
  if (r.fix_disabled()) return;
  ChunkKernels kernels({4096, 4, 8});
  const ChunkGradients bulk = kernels.run({.bulk = true}), copied = kernels.run({.bulk = false});
  r.ours("gradients of four that differ between bulk copies and copies by threads",
         bulk.differ(copied), 0);
  r.ours("dq and dk with bulk copies, beside fp64", kernels.error(bulk, 5), 6e-3);
  r.figure("ms with bulk copies", bulk.ms);
  r.figure("ms with copies by threads", copied.ms);
}

void run_all(Report& r) {
  if (std::string why; has_chunk_kernels(why)) run_on_device(r);
  constexpr int64_t C = 16, R = 4, N = 32;
  r.broken("tile [C, R, N]: bulk copies refused", takes_bulk_copy({C, R, N}) ? 0 : 1, 0);
  r.broken("blocks [C, R, R]: bulk copies refused", takes_bulk_copy({C, R, R}) ? 0 : 1, 0);
  const Layout rows = r.fix_disabled() ? Layout{C, R, N} : Layout{C * R, N};
  const Layout blocks = r.fix_disabled() ? Layout{C, R, R} : Layout{C, R * R};
  r.ours("tile [C R, N]: bulk copies refused", takes_bulk_copy(rows) ? 0 : 1, 0);
  r.ours("blocks [C, R R]: bulk copies refused", takes_bulk_copy(blocks) ? 0 : 1, 0);
  if (r.fix_disabled()) return;
  // Both ways: every element has one place, and the place gives the element back.
  std::set<int64_t> places, squares;
  int64_t wrong = 0;
  for (int64_t c = 0; c < C; ++c)
    for (int64_t one = 0; one < R; ++one) {
      for (int64_t n = 0; n < N; ++n) {
        const int64_t at = flat(c, one, n, R, N), row = at / N;
        places.insert(at);
        wrong += row / R != c || row % R != one || at % N != n;
      }
      for (int64_t two = 0; two < R; ++two) {
        const int64_t at = block(c, one, two, R);
        squares.insert(at);
        wrong += at / (R * R) != c || at % (R * R) / R != one || at % R != two;
      }
    }
  r.ours("elements that the maps lose",
         static_cast<double>(C * R * N) + C * R * R -
             static_cast<double>(places.size() + squares.size()),
         0);
  r.ours("elements that the maps give back elsewhere", static_cast<double>(wrong), 0);
  // The caller's tensors need no reshaping for it: rank 4 of [B, S, R, G, N] is read as it lies.
  const Scan s = draw_scan({1, 33, 4, 2, R, N, 8, 8, {}, {}, {}},
                           {"mimo_v", "mimo_out", "q_bias", "k_bias", "d_out"}, 61);
  const Values truth = run_scan(s, "reference").t, ours = run_scan(s, "auto").t;
  for (const char* name : {"out", "d_q", "d_k", "d_v", "d_q_bias", "d_mimo_v"})
    r.ours(std::string(name) + " of rank 4", off(ours, truth, name), 2e-6);
}

}  // namespace

extern const Reproducer mamba3_flat_tiles{"mamba3_flat_tiles", "M3-4",
                                          "tiles of rank 3 that no bulk copy takes", run_all};

}  // namespace talea::repro
