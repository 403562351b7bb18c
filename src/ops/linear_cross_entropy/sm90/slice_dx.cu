// What: the dX product of one slice of the vocabulary, which adds into an fp32 sum.
// Why: each instantiation compiles on its own.
// Never: decides whether it runs.
#include "device/sm90/launch.cuh"
#include "ops/linear_cross_entropy/sm90/gradients.cuh"
#include "ops/linear_cross_entropy/sm90/products.hpp"

namespace talea::lce::sm90 {
namespace {

// TMA adds, as for dW; the dW product that follows may start beside it.
struct SliceDxEpilogue : DwEpilogue<false, false, WaitsFirst> {};

using Tall = Shape<192, 128, 5, true, Major::k, Major::mn>;
using Square = Shape<128, 256, 4, false, Major::k, Major::mn, false, 4096>;

template <class S>
void run(const SliceDxCall& c, const Launch& launch) {
  DwParams p;
  p.dw_map = tensor_map(c.sum.data, Element::f32, c.sum.rows, c.sum.columns, c.sum.stride, 16);
  p.add = c.add;
  p.hidden = static_cast<int>(c.sum.columns);
  Extents e;
  e.m = c.chunk.capacity;
  e.n = p.hidden;
  e.k = static_cast<int>(c.weight.rows);
  e.rows_in_use = c.chunk.in_use;
  e.rows_begin = c.chunk.begin;
  e.band = 1536 / (2 * S::kBlockM);  // so many rows of the gradient stay in the cache
  launch_gemm<S, SliceDxEpilogue>(
      {c.gradient.data, c.gradient.rows, c.gradient.columns, c.gradient.stride},
      {c.weight.data, c.weight.rows, c.weight.columns, c.weight.stride}, e, p, launch.blocks, true,
      launch.stream);
}

}  // namespace

void slice_dx_product(const SliceDxCall& c, const Launch& launch) {
  c.tile == DxTile::square ? run<Square>(c, launch) : run<Tall>(c, launch);
}

}  // namespace talea::lce::sm90
