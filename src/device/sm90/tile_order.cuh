// What: the extents of a product's launch, and the order in which its pairs of blocks take tiles.
// Why: how two products share a device is read and changed apart from how one multiplies.
// Never: loads or multiplies anything.
#pragma once
#include <cstdint>

#include "core/kernel_mutant.hpp"

namespace talea::sm90 {

// The extents of one launch. rows_in_use, where given, is a count in device memory of which the
// launch covers [rows_begin, rows_begin + m) (or k, with rows_are_k).
struct Extents {
  int m = 0, n = 0, k = 0;
  const int* rows_in_use = nullptr;
  int rows_begin = 0;
  bool rows_are_k = false;
  // Of M: A is a matrix of so many rows, and its last ones are those in use. 0: its first ones.
  int a_rows = 0;
  // A may be a sum of terms that lie `term_offset` elements apart in its rows: K runs over each.
  int terms = 1, term_offset = 0;
  bool raster_along_m = true;
  // Along M: so many pairs of tiles high is a band whose columns are gone through before the next
  // band's, so that its rows of A stay in the cache. 0: one band.
  int band = 0;
  // Pairs of blocks that start earlier than the rest because the kernel before leaves their
  // multiprocessors free: the first `early` to start take `head_start` tiles each beforehand.
  // tickets: a zeroed counter in device memory, from which pairs draw their place.
  int early = 0, head_start = 0;
  int* tickets = nullptr;
  // The two above hold for full_rows of K; with fewer they follow from the product beside: tiles of
  // 256 x 256 over K and N, on so many pairs.
  int full_rows = 0, beside_pairs = 0;
};

// The tile at place `index` of the launch's order, for a pair of blocks stacked along M.
template <class S>
struct TileOrder {
  int pairs_m, tiles_n, k_blocks, term_blocks, term_offset, rows, band;
  int a_begin = 0;                           // row of A where those in use begin
  int place = blockIdx.x / 2, early, ahead;  // ahead: tiles taken by the early pairs alone
  bool along_m;

  __device__ explicit TileOrder(const Extents& e)
      : early(e.early), ahead(e.early * e.head_start), along_m(e.raster_along_m) {
    int m = e.m, k = e.k;
    rows = e.rows_are_k ? k : m;
    if (e.rows_in_use) rows = max(0, min(rows, *e.rows_in_use - e.rows_begin));
    if (e.a_rows > 0) a_begin = e.a_rows - max(0, min(e.a_rows, *e.rows_in_use - e.rows_begin));
    (e.rows_are_k ? k : m) = rows;
    pairs_m = (m + 2 * S::kBlockM - 1) / (2 * S::kBlockM);
    tiles_n = (e.n + S::kBlockN - 1) / S::kBlockN;
    band = e.band > 0 ? min(e.band, pairs_m) : pairs_m;
    term_blocks = (k + S::kBlockK - 1) / S::kBlockK;
    term_offset = e.term_offset;
    k_blocks = term_blocks * e.terms;
    if (e.tickets && rows < e.full_rows) share(e);
  }
  // As the plan of a full chunk does: pairs that the product beside leaves free start at once, or
  // in its last wave. A tile of few rows takes the time of its additions.
  __device__ void share(const Extents& e) {
    const int pairs = gridDim.x / 2, tiles = (rows + 255) / 256 * ((e.n + 255) / 256);
    const int busy = min(tiles, e.beside_pairs), last = tiles % pairs;
    const int waves = (tiles + e.beside_pairs - 1) / e.beside_pairs;
    const int64_t a_wave = int64_t{256} * e.m / (S::kBlockM * max(rows, 768));
    early = busy < pairs ? pairs - busy : last > 0 ? pairs - last : 0;
    ahead =
        static_cast<int>(min(early * (busy < pairs ? waves * a_wave : a_wave), int64_t{count()}));
  }
  __device__ int first() const { return place < early ? place : ahead + place; }
  __device__ int next(int index) const {
    if (index >= ahead) return index + gridDim.x / 2;
    return index + early < ahead ? index + early : ahead + place;
  }
  __device__ int count() const { return pairs_m * tiles_n; }
  __device__ int band_begin(int index) const { return index / (band * tiles_n) * band; }
  __device__ int pair(int index) const {
    if (!along_m) return index / tiles_n;
    const int begin = band_begin(index);
    return begin + (index - begin * tiles_n) % min(band, pairs_m - begin);
  }
  __device__ int tile(int index) const {
    const int begin = along_m ? band_begin(index) : 0;
    const int tile =
        along_m ? (index - begin * tiles_n) / min(band, pairs_m - begin) : index % tiles_n;
    if (mutant(KernelMutant::last_tile_misplaced)) return min(tile, max(0, tiles_n - 2));
    return tile;
  }
};

}  // namespace talea::sm90
