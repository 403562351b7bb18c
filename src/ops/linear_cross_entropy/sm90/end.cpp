// What: what comes after the last chunk: the targets' share of dW, its rounding, padding, db,
// scalars.
// Why: each output is finished in one place.
// Never: reads a logit.
#include "ops/linear_cross_entropy/sm90/run.hpp"

namespace talea::lce::sm90 {
namespace {

ScatterParams to_fp32(ScatterParams s, const Matrix& dw) {
  s.dw = static_cast<float*>(dw.data), s.dw_stride = dw.stride;
  return s;
}

// The sum was begun beside the last chunk's dW.
void end_dx(const Run& r) {
  if (r.multiprocessors_beside() > 0) r.call.vocab.join(r.call.stream);
  ScatterRowsParams s{r.own_dx(), false, r.p.hidden, nullptr, {}, View(r.call.out.dx)};
  s.range.rows = r.p.tokens / r.p.world;
  scatter_rows(s, r.stream);
}

ScatterParams targets_of(const Run& r) {
  return {r.b.sorted, r.p.tokens,      r.p.hidden,        r.b.facts,
          r.b.rows,   r.hidden().data, r.hidden().stride, r.c.f16};
}

void end_dw(const Run& r) {
  const Outputs& out = r.call.out;
  if (r.multiplies()) {
    const Matrix dw = r.dw();
    const ScatterParams targets = targets_of(r);
    if (r.c.sums_in_codes()) {
      // Added before the last chunk, which rounds.
    } else if (r.c.dw == DwOutput::split && r.b.sorted)
      add_targets_to_split(r);
    else if (r.c.dw != DwOutput::direct && r.b.sorted)
      scatter_targets(to_fp32(targets, dw), r.stream);
    if (r.c.dw == DwOutput::workspace)
      round_rows({r.b.dw, r.p.vocab_local, r.p.hidden, out.dw.data, r.c.f16, out.dw.stride[0]},
                 r.stream);
  }
  if (r.p.accumulate_dw || r.p.vocab_stored <= r.p.vocab_local) return;
  const int64_t size = size_of(r.p.dw_dtype), pitch = out.dw.stride[0] * size;
  device::check(
      cudaMemset2DAsync(static_cast<char*>(out.dw.data) + r.p.vocab_local * pitch, pitch, 0,
                        r.p.hidden * size, r.p.vocab_stored - r.p.vocab_local, r.stream),
      "zero of the padded rows of dw");
}

void end_db(const Run& r) {
  BiasEndParams q;
  q.sorted = r.b.sorted;
  q.facts = r.b.facts;
  q.rows = r.b.rows;
  q.row_smooth = r.c.rank_one() ? r.b.row_smooth : nullptr;
  q.class_weight = r.b.class_weight;
  q.scale = r.p.options.logit_scale;
  q.vocab = r.p.vocab_local, q.stored = r.p.vocab_stored, q.tokens = r.p.tokens;
  q.accumulate = r.call.out.accumulate_db;
  q.db = r.b.db, q.smooth_sum = r.b.bias_sum;
  q.to = View(r.call.out.db);
  end_bias_gradient(q, r.stream);
}

}  // namespace

void add_targets_to_split(const Run& r) {
  const Matrix dw = r.dw();
  scatter_targets(
      SplitScatterParams{targets_of(r), static_cast<uint16_t*>(dw.data), dw.stride, r.rest()},
      r.stream);
}

ReduceParams reduce_params(const Run& r) {
  const Outputs& out = r.call.out;
  ReduceParams q;
  q.facts = r.b.facts, q.row_loss = r.b.row_loss, q.hit = r.b.hit;
  if (r.p.options.reduction != Reduction::none) q.loss = View(out.loss);
  q.accuracy = View(out.accuracy);
  q.mean = mean_rule(r.p.options);
  q.follows = !r.p.backward() && !r.exchanged();
  return q;
}

void end(const Run& r) {
  const Outputs& out = r.call.out;
  if (r.p.wants_dw) end_dw(r);
  if (r.p.wants_dx && r.c.gather_tokens) end_dx(r);
  if (r.c.exchange_dx) end_dx_sum(r, (r.c.chunks - 1) * r.c.chunk_rows);
  if (r.p.wants_db) end_db(r);
  if (r.ends_and_sums()) return;
  const ReduceParams q = reduce_params(r);
  if (q.loss.data || out.accuracy) reduce_scalars(q, r.stream);
}

}  // namespace talea::lce::sm90
