// What: the logits product into an fp32 buffer, built for its two dtypes.
// Why: each instantiation compiles on its own.
// Never: decides whether it runs.
#include "device/sm90/launch.cuh"
#include "ops/linear_cross_entropy/sm90/products.hpp"
#include "ops/linear_cross_entropy/sm90/wide_logits.cuh"

namespace talea::lce::sm90 {
namespace {

template <bool kF16>
void run(const WideLogitsCall& c, const Launch& launch) {
  using S = Shape<128, kLogitsTile, 5, true, Major::k, Major::k, kF16>;
  WideLogitsParams p;
  p.map =
      tensor_map(c.logits.data, Element::f32, c.logits.rows, c.logits.columns, c.logits.stride, 16);
  p.vocab = static_cast<int>(c.weight.rows);
  Extents e;
  e.m = c.chunk.capacity;
  e.n = p.vocab;
  e.k = static_cast<int>(c.x.columns);
  e.rows_in_use = c.chunk.in_use;
  e.rows_begin = c.chunk.begin;
  launch_gemm<S, WideLogitsEpilogue>(
      {c.x.data, c.x.rows, c.x.columns, c.x.stride},
      {c.weight.data, c.weight.rows, c.weight.columns, c.weight.stride}, e, p, launch.blocks, false,
      launch.stream);
}

}  // namespace

void wide_logits_product(const WideLogitsCall& call, const Launch& launch) {
  if (call.f16)
    run<true>(call, launch);
  else
    run<false>(call, launch);
}

}  // namespace talea::lce::sm90
