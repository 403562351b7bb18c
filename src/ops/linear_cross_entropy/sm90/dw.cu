// The dW product, built for its shape.
// Exists so that each instantiation compiles on its own.
// Never decides whether it runs.
#include "device/sm90/launch.cuh"
#include "ops/linear_cross_entropy/sm90/gradients.cuh"
#include "ops/linear_cross_entropy/sm90/products.hpp"

namespace talea::lce::sm90 {

namespace {

// kStages and staging bytes a warp: both come out of the same shared memory.
template <bool kF16, bool kDirect, int kStages = 5, int kStagingBytes = 2048>
void run(const DwCall& c, const Launch& launch) {
  using S = Shape<192, 128, kStages, true, Major::mn, Major::mn, kF16, kStagingBytes>;
  static_assert(S::kBlockM == Readers::kWords, "what it counts");
  constexpr Element kOut = !kDirect ? Element::f32 : kF16 ? Element::f16 : Element::bf16;
  DwParams p;
  p.targets = {c.sorted, c.chunk.in_use, c.rows, c.hidden.data, c.hidden.stride, c.first_word};
  p.dw_map = tensor_map(c.dw.data, kOut, c.dw.rows, c.dw.columns, c.dw.stride, 16);
  p.undo = c.undo;
  p.add = c.add;
  p.vocab = static_cast<int>(c.dw.rows);
  p.hidden = static_cast<int>(c.dw.columns);
  p.smooth_row = c.smooth_row;
  p.class_weight = c.class_weight;
  p.read = c.read;
  Extents e;
  e.m = p.vocab;
  e.n = p.hidden;
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
  launch_gemm<S, DwEpilogue<kF16, kDirect>>({c.exp.data, c.exp.rows, c.exp.columns, c.exp.stride},
                                            {c.x.data, c.x.rows, c.x.columns, c.x.stride}, e, p,
                                            launch.blocks, c.beside_dx, launch.stream);
}

}  // namespace

void dw_product(const DwCall& call, const Launch& launch) {
  if (call.f16)
    call.rounds ? run<true, true>(call, launch) : run<true, false>(call, launch);
  else if (call.read && !call.rounds)  // on few multiprocessors the way out of them counts
    run<false, false, 4, 8192>(call, launch);
  else
    call.rounds ? run<false, true>(call, launch) : run<false, false>(call, launch);
}

}  // namespace talea::lce::sm90
