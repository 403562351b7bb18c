// The logits product, built for its modes.
// Exists so that each instantiation compiles on its own.
// Never decides which mode runs.
#include "device/sm90/launch.cuh"
#include "ops/linear_cross_entropy/sm90/logits.cuh"
#include "ops/linear_cross_entropy/sm90/products.hpp"

namespace talea::lce::sm90 {
namespace {

using LogitsShape = Shape<128, kLogitsTile, 5, true, Major::k, Major::k>;
// Up to 128 rows the call is one read of the weight: half the rows a tile, one stage more in
// flight.
using FewRowsShape = Shape<64, kLogitsTile, 6, true, Major::k, Major::k>;

template <class S, LogitsMode kMode, bool kGeneral>
void run(const LogitsCall& c, const Launch& launch) {
  LogitsParams p;
  if (kMode == LogitsMode::store)
    p.exp_map = tensor_map(c.exp.data, Element::bf16, c.exp.rows, c.exp.columns, c.exp.stride, 16);
  p.rows = c.rows;
  p.tile_sums = c.tile_sums;
  p.tile_shifted = c.tile_shifted;
  p.tile_sums_stride = c.tile_sums_stride;
  p.vocab = static_cast<int>(c.weight.rows);
  p.rule = c.rule;
  p.repair = c.repair;
  p.pair_rows = 2 * S::kBlockM;
  Extents e;
  e.m = c.chunk.capacity;
  e.n = kMode == LogitsMode::shift ? std::min(p.vocab, kLogitsTile) : p.vocab;
  e.k = static_cast<int>(c.x.columns);
  e.rows_in_use = c.chunk.in_use;
  e.rows_begin = c.chunk.begin;
  launch_gemm<S, LogitsEpilogue<kMode, kGeneral>>(
      {c.x.data, c.x.rows, c.x.columns, c.x.stride},
      {c.weight.data, c.weight.rows, c.weight.columns, c.weight.stride}, e, p, launch.blocks, false,
      launch.stream);
}

template <LogitsMode kMode, bool kGeneral>
void run_shape(const LogitsCall& c, const Launch& launch) {
  if (c.chunk.capacity <= 128)
    run<FewRowsShape, kMode, kGeneral>(c, launch);
  else
    run<LogitsShape, kMode, kGeneral>(c, launch);
}

template <bool kGeneral>
void run_kind(const LogitsCall& c, const Launch& launch) {
  switch (c.kind) {
    case LogitsCall::Kind::shift:
      return run_shape<LogitsMode::shift, kGeneral>(c, launch);
    case LogitsCall::Kind::store:
      return run_shape<LogitsMode::store, kGeneral>(c, launch);
    case LogitsCall::Kind::sums:
      return run_shape<LogitsMode::sums, kGeneral>(c, launch);
  }
}

}  // namespace

void logits_product(const LogitsCall& call, const Launch& launch) {
  if (call.general)
    run_kind<true>(call, launch);
  else
    run_kind<false>(call, launch);
}

}  // namespace talea::lce::sm90
