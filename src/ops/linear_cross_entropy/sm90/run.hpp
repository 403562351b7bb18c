// What: one call of lane sm90 as its steps see it: the problem, the decisions, the buffers, the
// stream.
// Why: the steps before, per chunk and after stand in files of their own.
// Never: owns memory.
#pragma once
#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/rows/call.hpp"
#include "ops/linear_cross_entropy/sm90/layout.hpp"
#include "ops/linear_cross_entropy/sm90/products.hpp"
#include "ops/linear_cross_entropy/sm90/smoothing.hpp"
#include "ops/linear_cross_entropy/sm90/wide.hpp"

namespace talea::lce::sm90 {

struct Run {
  const Call& call;
  const Problem& p;
  Config c;
  Buffers b;
  cudaStream_t stream;

  bool multiplies() const { return p.vocab_local > 0; }
  bool exchanged() const { return p.world > 1; }
  // Few tokens: their rows are found and gathered at once, ended and summed at once.
  bool finds_and_gathers() const { return c.online && !c.gather_tokens; }
  bool ends_and_sums() const { return c.online && !exchanged(); }
  // What the sum of dX takes from the dW product beside it; 0: the sum comes first. Whole pairs of
  // blocks, and at least half of the device for the product.
  int multiprocessors_beside() const {
    const int taken = (call.vocab.multiprocessors_beside() + 1) / 2 * 2;
    return p.wants_dw && multiplies() && taken <= c.blocks / 2 ? taken : 0;
  }

  Matrix hidden() const {
    if (c.gather_tokens) return {b.x_all, p.tokens, p.hidden, p.hidden};
    return {call.in.hidden.data, p.tokens, p.hidden, p.hidden_row_stride};
  }
  // The compacted rows of the chunk that begins there; by slices, every row's, in dX until dX
  // itself is written. Chunks whose logits run ahead take turns in two buffers; where dX's memory
  // holds them, they are the last of its rows.
  Matrix x(int64_t begin) const {
    const int64_t turn = c.runs_ahead() ? begin / c.chunk_rows % 2 : 0;
    if (!c.x_in_dx) return {b.x + turn * c.chunk_rows * p.hidden, c.chunk_rows, p.hidden, p.hidden};
    const int64_t rows = std::min(c.chunk_rows, p.tokens - begin), stride = call.out.dx.stride[0];
    return {static_cast<uint16_t*>(call.out.dx.data) + (p.tokens - rows) * stride, rows, p.hidden,
            stride};
  }
  // The sums per tile of a chunk, in dX at its end.
  float* tile_sums() const {
    if (!c.sums_in_dx) return b.tile_sums;
    return reinterpret_cast<float*>(static_cast<char*>(call.out.dx.data) +
                                    p.tokens * p.hidden * size_of(p.dx_dtype));
  }
  TilePlaces tile_places() const {
    if (!c.sums_in_dx) return {c.state_rows, 0};
    return {0, -static_cast<int>(c.tiles)};
  }
  Matrix weight() const {
    return {call.in.weight.data, p.vocab_local, p.hidden, p.weight_row_stride};
  }
  // dW: the caller's, or the workspace's fp32 sum that is rounded at the end.
  Matrix dw() const {
    if (c.dw == DwOutput::workspace) return {b.dw, p.vocab_local, p.hidden, p.hidden};
    return {call.out.dw.data, p.vocab_local, p.hidden, call.out.dw.stride[0]};
  }
  // What the caller's 16-bit dW is too short for.
  Rest rest() const {
    if (c.dw != DwOutput::split) return {};
    return {p.wants_rest ? call.out.dw_rest.data : b.rest, c.rest_bits, p.hidden};
  }
  // Of a bf16 dX whose factor comes later: it is in codes. Null: it is rounded.
  uint8_t* dx_exponents() const {
    return p.wants_dx_rest ? static_cast<uint8_t*>(call.out.dx_rest.data) : nullptr;
  }
  // Where blanks and rows of dX go: the caller's, or, sequence parallel, all ranks' in fp32.
  View dx() const {
    if (!c.gather_tokens) return View(call.out.dx);
    View v;
    if (p.wants_dx) v.data = b.dx_all, v.stride0 = p.hidden, v.stride1 = 1;
    return v;
  }
  // Sequence parallel: behind every rank's rows, the sum of this rank's.
  float* own_dx() const { return b.dx_all + p.tokens * p.hidden; }
  Launch launch() const { return {stream, c.blocks}; }
  LogitRule rule() const {
    return {static_cast<float>(p.options.logit_scale), static_cast<float>(p.options.softcap),
            b.bias, p.options.softcap > 0 ? static_cast<float>(1 / p.options.softcap) : 0.f};
  }
  RowRange range(int64_t begin, int64_t rows) const { return {&b.facts->in_use, begin, rows}; }
};

// prepare.cpp: what the targets say, blanks, vectors in fp32, each row's shift.
void prepare(const Run& r);
// What ignored and poisoned rows show, after dX's memory has served its turn.
void blank(const Run& r);
// chunk.cpp: the three products of one chunk and what lies between them. The sum of the last
// chunk's dX over the ranks is left running: end() has work beside it.
void run_chunk(const Run& r, int64_t begin, bool first);
void end_dx_sum(const Run& r, int64_t begin);
// slices.cpp: the gradients of every row, a slice of the vocabulary at a time.
void run_slices(const Run& r);
// end.cpp: dW's last pieces, db, the scalars.
void add_targets_to_split(const Run& r);
ReduceParams reduce_params(const Run& r);
void end(const Run& r);

}  // namespace talea::lce::sm90
