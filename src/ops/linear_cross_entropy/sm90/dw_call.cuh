// What: from a call of the dW product to its extents and the parameters of its epilogue.
// Why: its instantiations in two files agree.
// Never: launches.
#pragma once
#include "device/sm90/tensor_map.hpp"
#include "ops/linear_cross_entropy/sm90/gradients.cuh"
#include "ops/linear_cross_entropy/sm90/products.hpp"

namespace talea::lce::sm90 {

inline DwParams dw_params(const DwCall& c, Element out) {
  DwParams p;
  p.targets = {c.sorted, c.chunk.in_use, c.rows, c.hidden.data, c.hidden.stride, c.first_word};
  p.dw_map = tensor_map(c.dw.data, out, c.dw.rows, c.dw.columns, c.dw.stride, 16);
  p.undo = c.undo;
  p.add = c.add;
  p.vocab = static_cast<int>(c.dw.rows);
  p.hidden = static_cast<int>(c.dw.columns);
  p.smooth_row = c.smooth_row;
  p.class_weight = c.class_weight;
  p.read = c.read;
  return p;
}

inline Extents dw_extents(const DwCall& c) {
  Extents e;
  e.m = static_cast<int>(c.dw.rows);
  e.n = static_cast<int>(c.dw.columns);
  e.k = c.chunk.capacity;
  e.rows_in_use = c.chunk.in_use;
  e.rows_begin = c.chunk.begin;
  e.terms = c.terms.count, e.term_offset = c.terms.offset;
  e.rows_are_k = true;
  e.raster_along_m = false;
  if (c.beside_dx && c.tickets) {
    e.early = c.early, e.head_start = c.head_start, e.tickets = c.tickets;
    e.full_rows = static_cast<int>(c.x.rows), e.beside_pairs = c.dx_pairs;
  }
  return e;
}

}  // namespace talea::lce::sm90
