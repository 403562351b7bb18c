// What: the dX product, built for its shape and dtypes.
// Why: each instantiation compiles on its own.
// Never: decides whether it runs.
#include "device/sm90/launch.cuh"
#include "ops/linear_cross_entropy/sm90/gradients.cuh"
#include "ops/linear_cross_entropy/sm90/products.hpp"

namespace talea::lce::sm90 {
namespace {

template <bool kF16>
using Square = Shape<128, 256, 4, false, Major::k, Major::mn, kF16>;
template <bool kF16>
using Tall = Shape<192, 128, 5, true, Major::k, Major::mn, kF16>;
using Narrow = Shape<128, 128, 6, true, Major::k, Major::mn>;  // bf16 alone

template <class S, bool kF32Out>
void run(const DxCall& c, const Launch& launch) {
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
  p.exponents = c.exponents;
  Extents e;
  e.m = c.chunk.capacity;
  e.n = p.hidden;
  e.k = static_cast<int>(c.weight.rows);
  e.rows_in_use = c.chunk.in_use;
  e.rows_begin = c.chunk.begin;
  e.terms = c.terms.count, e.term_offset = c.terms.offset;
  launch_gemm<S, DxEpilogue<S::kF16, kF32Out>>(
      {c.exp.data, c.exp.rows, c.exp.columns, c.exp.stride},
      {c.weight.data, c.weight.rows, c.weight.columns, c.weight.stride}, e, p, launch.blocks,
      c.overlaps, launch.stream);
}

template <bool kF16>
void of_dtype(const DxCall& c, const Launch& launch) {
  if (!kF16 && c.tile == DxTile::narrow)
    c.f32_out ? run<Narrow, true>(c, launch) : run<Narrow, false>(c, launch);
  else if (c.tile == DxTile::tall)
    c.f32_out ? run<Tall<kF16>, true>(c, launch) : run<Tall<kF16>, false>(c, launch);
  else
    c.f32_out ? run<Square<kF16>, true>(c, launch) : run<Square<kF16>, false>(c, launch);
}

}  // namespace

void dx_product(const DxCall& call, const Launch& launch) {
  call.f16 ? of_dtype<true>(call, launch) : of_dtype<false>(call, launch);
}

}  // namespace talea::lce::sm90
