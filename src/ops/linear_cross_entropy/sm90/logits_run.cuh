// What: from a call to the launch of one instantiation of the logits product.
// Why: the files that instantiate it hold nothing else.
// Never: decides which mode runs.
#pragma once
#include "device/sm90/launch.cuh"
#include "ops/linear_cross_entropy/sm90/logits.cuh"
#include "ops/linear_cross_entropy/sm90/products.hpp"

namespace talea::lce::sm90 {

void general_logits_product(const LogitsCall& call, const Launch& launch);
void full_logits_product(const LogitsCall& call, const Launch& launch);

using LogitsShape = Shape<128, kLogitsTile, 5, true, Major::k, Major::k>;
// Up to kFewRows the call is one read of the weight: half the rows a tile, more of the weight in
// flight.
using FewRowsShape = Shape<64, kLogitsTile, 6, true, Major::k, Major::k>;
using WideFewRowsShape = Shape<64, kWideLogitsTile, 5, true, Major::k, Major::k>;

template <class S, LogitsMode kMode, bool kGeneral, bool kFull>
void run_logits(const LogitsCall& c, const Launch& launch) {
  LogitsParams p;
  if (kMode == LogitsMode::store || kMode == LogitsMode::ahead)
    p.exp_map = tensor_map(c.exp.data, Element::bf16, c.exp.rows, c.exp.columns, c.exp.stride, 16);
  p.rows = c.rows;
  p.tile_sums = c.tile_sums;
  p.tile_shifted = c.tile_shifted;
  p.tile_classes = c.tile_classes;
  p.tile_peaks = c.tile_peaks;
  p.class_weight = c.class_weight;
  p.places = c.places;
  p.vocab = static_cast<int>(c.weight.rows);
  p.rule = c.rule;
  p.repair = c.repair;
  p.readers = c.readers;
  p.pair_rows = 2 * S::kBlockM;
  Extents e;
  e.m = c.chunk.capacity;
  e.n = kMode == LogitsMode::shift ? std::min(p.vocab, kLogitsTile) : p.vocab;
  e.k = static_cast<int>(c.x.columns);
  e.rows_in_use = c.chunk.in_use;
  e.rows_begin = c.chunk.begin;
  if (c.x_at_end) e.a_rows = static_cast<int>(c.x.rows);
  e.early = c.early, e.head_start = c.head_start, e.tickets = c.tickets;
  launch_gemm<S, LogitsEpilogue<kMode, kGeneral, kFull>>(
      {c.x.data, c.x.rows, c.x.columns, c.x.stride},
      {c.weight.data, c.weight.rows, c.weight.columns, c.weight.stride}, e, p, launch.blocks,
      c.overlaps, launch.stream);
}

template <LogitsMode kMode, bool kGeneral>
void run_shape(const LogitsCall& c, const Launch& launch) {
  if constexpr (kMode == LogitsMode::online)
    if (c.tile_columns == kWideLogitsTile)
      return run_logits<WideFewRowsShape, kMode, kGeneral, false>(c, launch);
  // The shift takes one tile of the vocabulary: shorter tiles fill more of the device.
  if (kMode == LogitsMode::shift || c.chunk.capacity <= kFewRows)
    run_logits<FewRowsShape, kMode, kGeneral, false>(c, launch);
  else if constexpr (kMode != LogitsMode::shift)
    run_logits<LogitsShape, kMode, kGeneral, false>(c, launch);
}

}  // namespace talea::lce::sm90
