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

}  // namespace

void slice_dx_product(const SliceDxCall& c, const Launch& launch) {
  using S = Shape<192, 128, 5, true, Major::k, Major::mn>;
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
  e.band = 4;  // 1536 rows of the gradient stay in the cache
  launch_gemm<S, SliceDxEpilogue>(
      {c.gradient.data, c.gradient.rows, c.gradient.columns, c.gradient.stride},
      {c.weight.data, c.weight.rows, c.weight.columns, c.weight.stride}, e, p, launch.blocks, true,
      launch.stream);
}

}  // namespace talea::lce::sm90
