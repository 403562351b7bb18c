// What: problems of lane sm90 whose decisions its tests ask for, on one Hopper GPU.
// Why: those tests are several files.
// Never: looks at the machine at hand.
#pragma once

#include "ops/linear_cross_entropy/sm90/config.hpp"

namespace talea::lce {

inline DeviceFacts hopper() {
  DeviceFacts d;
  d.cuda_built = true;
  d.cuda_devices = 1;
  d.sm = 90;
  d.sm_count = 132;
  return d;
}

// Its memory gives two thirds of an H200's.
inline DeviceFacts h100() {
  DeviceFacts d = hopper();
  d.memory_mhz = 2619, d.memory_bus_bits = 5120;
  return d;
}

inline Problem training(int64_t tokens, int64_t hidden, int64_t vocab, int64_t limit_mib) {
  Problem p;
  p.device = DeviceKind::cuda;
  p.tokens = tokens, p.hidden = hidden;
  p.vocab = p.vocab_local = p.vocab_stored = vocab;
  p.hidden_dtype = p.weight_dtype = p.dx_dtype = DType::bf16;
  p.dw_dtype = DType::f32;
  p.hidden_row_stride = p.weight_row_stride = p.dx_row_stride = p.dw_row_stride = hidden;
  p.has_targets = p.wants_loss = p.wants_dx = p.wants_dw = true;
  p.options.workspace_limit_bytes = limit_mib << 20;
  return p;
}

inline int64_t workspace(const Problem& p) { return sm90_lane().plan(p, hopper()).workspace_bytes; }

// A weight without a gradient: nothing fills the multiprocessors that a wave of dX leaves.
inline Problem frozen(int64_t hidden, int64_t vocab, int64_t limit_mib) {
  Problem p = training(8192, hidden, vocab, limit_mib);
  p.wants_dw = false, p.late_factor = p.wants_dx_rest = true;
  return p;
}

}  // namespace talea::lce
