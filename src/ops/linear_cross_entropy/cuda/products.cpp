// What: the products of one chunk as values: sizes, tiles, and how dX's rows are cut among tiles.
// Why: which tile fills the multiprocessors is arithmetic, and tested without a GPU.
// Never: multiplies.
#include "ops/linear_cross_entropy/cuda/products.hpp"

#include <algorithm>

namespace talea::lce::cuda {
namespace {

using Tiles = device::Product::Tiles;

// For which the algorithms are chosen, whatever the rows of a product are.
constexpr int64_t canonical_rows = 1024, narrow_rows = 640;

int64_t weight_stride(const Problem& p, const Plan& plan) {
  return plan.copies_weight ? plan.x_stride : std::max(p.weight_row_stride, p.hidden);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tiles of dX on an H200, their time beside a wave of 128 x 256 ones (docs/cuda.md).
struct TileCost {
  Tiles tiles;
  int64_t rows, columns;
  double wave;
};
constexpr TileCost large{Tiles::large, 128, 256, 1.0};
constexpr TileCost square{Tiles::square, 128, 128, 0.485};
constexpr TileCost narrow{Tiles::narrow, 160, 128, 0.64};

double waves_of(const TileCost& t, int64_t rows, int64_t hidden, int64_t multiprocessors) {
  const int64_t tiles = ceil_div(rows, t.rows) * ceil_div(hidden, t.columns);
  return t.wave * static_cast<double>(ceil_div(tiles, multiprocessors));
}

}  // namespace

device::Product logits_product(const Problem& p, const Plan& plan, int64_t rows, int64_t columns) {
  device::Product g;  // [columns, rows] = W^T(stored [D, columns]) x X(stored [D, rows])
  g.transpose_a = true;
  g.m = columns;
  g.n = rows;
  g.k = p.hidden;
  g.lda = weight_stride(p, plan);
  g.ldb = plan.x_stride;
  g.ldc = plan.logits_stride;
  g.in = plan.compute;
  g.canonical_n = canonical_rows;
  if (plan.choose_tiles) g.tiles = is_16bit(plan.compute) ? Tiles::square : Tiles::middle;
  return g;
}

device::Product dx_product(const Problem& p, const Plan& plan, int64_t rows, int64_t columns,
                           Tiles tiles) {
  device::Product g;  // [D, rows] = W(stored [D, columns]) x dZ(stored [columns, rows])
  g.m = p.hidden;
  g.n = rows;
  g.k = columns;
  g.lda = weight_stride(p, plan);
  g.ldb = plan.logits_stride;
  g.ldc = plan.dx_stride;
  g.in = plan.compute;
  g.tiles = tiles;
  g.canonical_n = tiles == Tiles::narrow ? narrow_rows : canonical_rows;
  return g;
}

device::Product dw_product(const Problem& p, const Plan& plan, int64_t rows, int64_t columns,
                           int64_t dw_stride) {
  device::Product g;  // [D, columns] = X(stored [D, rows]) x dZ^T(stored [columns, rows])
  g.transpose_b = true;
  g.m = p.hidden;
  g.n = columns;
  g.k = rows;
  g.lda = plan.x_stride;
  g.ldb = plan.logits_stride;
  g.ldc = std::max(dw_stride, p.hidden);
  g.in = plan.compute;
  g.out = plan.dw_direct ? plan.compute : DType::f32;
  g.canonical_k = canonical_rows;
  if (plan.choose_tiles) g.tiles = Tiles::middle;
  g.device_scalars = plan.scaled_rows;
  return g;
}

DxCut dx_cut(int64_t rows, int64_t hidden, int multiprocessors) {
  DxCut best{{{rows, Tiles::library}}, 0};
  const int64_t across = ceil_div(hidden, large.columns);
  if (multiprocessors <= 0 || rows <= 0 || across == 0 || across > multiprocessors) return best;
  best.parts[0].tiles = large.tiles;
  const auto cost = [&](const TileCost& t, int64_t n) {
    return waves_of(t, n, hidden, multiprocessors);
  };
  best.waves = cost(large, rows);
  // A cut has to win clearly: what is compared are waves, not times.
  const auto offer = [&](std::vector<DxPart> parts, double waves) {
    if (waves < 0.97 * best.waves) best = {std::move(parts), waves};
  };
  offer({{rows, Tiles::square}}, cost(square, rows));
  const int64_t whole = ceil_div(rows, large.rows) * across / multiprocessors;
  const int64_t first = whole * multiprocessors / across * large.rows;
  if (whole == 0 || first >= rows) return best;
  for (const TileCost& rest : {square, narrow})
    offer({{first, large.tiles}, {rows - first, rest.tiles}},
          cost(large, first) + cost(rest, rows - first));
  return best;
}

// Not far below `most`: what short chunks cost the other two products is not in the sum.
int64_t balanced_rows(const Problem& p, const Plan& plan, int64_t most) {
  const int64_t g = plan.granule_rows,
                least_chunks = std::max<int64_t>(1, ceil_div(p.tokens, most));
  // Equal chunks: the last is as full as the others.
  const int64_t equal = std::max(g, ceil_div(ceil_div(p.tokens, least_chunks), g) * g);
  if (plan.multiprocessors == 0 || !p.wants_dx || least_chunks == 1) return equal;
  // Beside its product, dW costs a chunk the reading and writing of the sum, in part hidden.
  const double each = p.wants_dw ? 0.39 * static_cast<double>(p.hidden) / 4096 : 0.0;
  const auto cost = [&](int64_t rows) {
    const int64_t chunks = ceil_div(p.tokens, rows), last = p.tokens - (chunks - 1) * rows;
    const double full = dx_cut(rows, p.hidden, plan.multiprocessors).waves;
    return static_cast<double>(chunks - 1) * full + static_cast<double>(chunks) * each +
           dx_cut(ceil_div(last, g) * g, p.hidden, plan.multiprocessors).waves;
  };
  int64_t best = equal;
  for (int64_t rows = most / g * g; rows >= std::max(g, most * 4 / 5); rows -= g) {
    // A last chunk of few rows reads and writes as much of dW and of the weight as a full one.
    const bool full = (p.tokens + rows - 1) % rows + 1 >= rows / 2;
    if (full && cost(rows) < 0.99 * cost(best)) best = rows;
  }
  return best;
}

}  // namespace talea::lce::cuda
