// What: the logits product of one slice of the vocabulary that leaves da, built for its two
// epilogues.
// Why: each instantiation compiles on its own.
// Never: decides whether it runs.
#include "device/sm90/launch.cuh"
#include "ops/linear_cross_entropy/sm90/products.hpp"
#include "ops/linear_cross_entropy/sm90/slice_logits.cuh"

namespace talea::lce::sm90 {
namespace {

constexpr int kBand = 8;  // pairs of row tiles: 2048 rows of x stay in the cache

template <bool kGeneral>
void run(const SliceLogitsCall& c, const Launch& launch) {
  using S = Shape<128, kLogitsTile, 5, true, Major::k, Major::k>;
  SliceLogitsParams p;
  p.map = tensor_map(c.gradient.data, Element::bf16, c.gradient.rows, c.gradient.columns,
                     c.gradient.stride, 16);
  p.rows = c.rows;
  p.factors = c.factors;
  p.class_weight = c.class_weight;
  p.vocab = static_cast<int>(c.weight.rows);
  p.first_word = c.first_word;
  p.rule = c.rule;
  Extents e;
  e.m = c.chunk.capacity;
  e.n = p.vocab;
  e.k = static_cast<int>(c.x.columns);
  e.rows_in_use = c.chunk.in_use;
  e.rows_begin = c.chunk.begin;
  e.band = kBand;
  launch_gemm<S, SliceLogitsEpilogue<kGeneral>>(
      {c.x.data, c.x.rows, c.x.columns, c.x.stride},
      {c.weight.data, c.weight.rows, c.weight.columns, c.weight.stride}, e, p, launch.blocks, true,
      launch.stream);
}

}  // namespace

void slice_logits_product(const SliceLogitsCall& call, const Launch& launch) {
  call.general ? run<true>(call, launch) : run<false>(call, launch);
}

}  // namespace talea::lce::sm90
