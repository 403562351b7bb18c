// The dX product, built for its shape and dtypes.
// Exists so that each instantiation compiles on its own.
// Never decides whether it runs.
#include "device/sm90/launch.cuh"
#include "ops/linear_cross_entropy/sm90/gradients.cuh"
#include "ops/linear_cross_entropy/sm90/products.hpp"

namespace talea::lce::sm90 {
namespace {

template <bool kF16, bool kF32Out>
void run(const DxCall& c, const Launch& launch) {
  using S = Shape<128, 256, 4, false, Major::k, Major::mn, kF16>;
  DxParams p;
  p.rows = c.rows;
  p.dx = c.dx.data;
  p.index = c.scatters ? c.rows.index : nullptr;
  p.dx_stride = c.dx.stride;
  p.weight = c.weight.data;
  p.weight_stride = c.weight.stride;
  p.hidden = static_cast<int>(c.weight.columns);
  p.smooth_row = c.smooth_row;
  p.smooth_factor = c.smooth_factor;
  p.read = c.read;
  p.rest = c.rest;
  Extents e;
  e.m = c.chunk.capacity;
  e.n = p.hidden;
  e.k = static_cast<int>(c.weight.rows);
  e.rows_in_use = c.chunk.in_use;
  e.rows_begin = c.chunk.begin;
  e.terms = c.terms.count, e.term_offset = c.terms.offset;
  launch_gemm<S, DxEpilogue<kF16, kF32Out>>(
      {c.exp.data, c.exp.rows, c.exp.columns, c.exp.stride},
      {c.weight.data, c.weight.rows, c.weight.columns, c.weight.stride}, e, p, launch.blocks,
      c.overlaps, launch.stream);
}

}  // namespace

void dx_product(const DxCall& call, const Launch& launch) {
  if (call.f16)
    call.f32_out ? run<true, true>(call, launch) : run<true, false>(call, launch);
  else
    call.f32_out ? run<false, true>(call, launch) : run<false, false>(call, launch);
}

}  // namespace talea::lce::sm90
