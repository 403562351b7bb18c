// The dX product, built for its shape.
// Exists so that each instantiation compiles on its own.
// Never decides whether it runs.
#include "device/sm90/launch.cuh"
#include "ops/linear_cross_entropy/sm90/gradients.cuh"
#include "ops/linear_cross_entropy/sm90/products.hpp"

namespace talea::lce::sm90 {

using DxShape = Shape<128, 256, 4, false, Major::k, Major::mn>;

void dx_product(const DxCall& c, const Launch& launch) {
  DxParams p;
  p.rows = c.rows;
  p.dx = c.dx.data;
  p.dx_stride = c.dx.stride;
  p.weight = static_cast<const __nv_bfloat16*>(c.weight.data);
  p.weight_stride = c.weight.stride;
  p.hidden = static_cast<int>(c.weight.columns);
  p.smooth_row = c.smooth_row;
  p.smooth_factor = c.smooth_factor;
  Extents e;
  e.m = c.chunk.capacity;
  e.n = p.hidden;
  e.k = static_cast<int>(c.weight.rows);
  e.rows_in_use = c.chunk.in_use;
  e.rows_begin = c.chunk.begin;
  launch_gemm<DxShape, DxEpilogue>(
      {c.exp.data, c.exp.rows, c.exp.columns, c.exp.stride},
      {c.weight.data, c.weight.rows, c.weight.columns, c.weight.stride}, e, p, launch.blocks, false,
      launch.stream);
}

}  // namespace talea::lce::sm90
