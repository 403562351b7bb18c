// What: gradients by slices of the vocabulary: every row at once, a slice of da at a time.
// Why: in backward passes that know each row's lse, dW of a slice is complete at once, so it needs
// no fp32 sum of its own, and the buffer is as small as the room; dX is summed in fp32.
// Never: allocates, synchronises or leaves the caller's stream.
#include "ops/linear_cross_entropy/forced.hpp"
#include "ops/linear_cross_entropy/sm90/run.hpp"

namespace talea::lce::sm90 {
namespace {

struct Slice {
  int64_t begin = 0, words = 0;
  ChunkRows rows;
};

Matrix gradient(const Run& r, const Slice& s) {
  return {r.b.exp, r.c.chunk_rows, s.words, r.c.exp_stride};
}

Matrix weight(const Run& r, const Slice& s) {
  const Matrix w = r.weight();
  return {static_cast<uint16_t*>(w.data) + s.begin * w.stride, s.words, w.columns, w.stride};
}

void gradient_of(const Run& r, const Slice& s) {
  SliceLogitsCall q;
  q.x = r.x(0), q.weight = weight(r, s), q.gradient = gradient(r, s);
  q.chunk = s.rows;
  q.rows = r.b.rows;
  q.factors = r.b.factors;
  q.rule = r.rule();
  if (q.rule.bias) q.rule.bias += s.begin;
  if (r.b.class_weight) q.class_weight = r.b.class_weight + s.begin;
  q.first_word = static_cast<int>(s.begin);
  q.general = r.c.general || r.p.options.label_smoothing > 0;
  slice_logits_product(q, r.launch());
}

void dx_of(const Run& r, const Slice& s) {
  SliceDxCall q;
  q.gradient = gradient(r, s), q.weight = weight(r, s), q.chunk = s.rows;
  q.sum = {r.b.dx_part, r.c.chunk_rows, r.p.hidden, r.p.hidden};
  q.add = s.begin > 0;
  q.tile = r.c.dx_tile;
  slice_dx_product(q, r.launch());
}

void dw_of(const Run& r, const Slice& s) {
  DwCall q;
  q.exp = gradient(r, s), q.x = r.x(0), q.chunk = s.rows;
  const Matrix dw = r.dw();
  const int64_t size = r.c.dw == DwOutput::direct ? 2 : 4;
  q.dw = {static_cast<char*>(dw.data) + s.begin * dw.stride * size, s.words, dw.columns, dw.stride};
  q.add = r.p.accumulate_dw;
  q.beside_dx = r.p.wants_dx;
  q.rounds = r.c.dw == DwOutput::direct, q.sorted = r.b.sorted, q.rows = r.b.rows;
  q.first_word = static_cast<int>(s.begin);
  q.hidden = r.hidden();
  dw_product(q, {r.stream, forced.slow.value_or(false) ? 2 : r.c.blocks});
}

}  // namespace

void run_slices(const Run& r) {
  for (int64_t begin = 0; begin < r.p.vocab_local; begin += r.c.slice_words) {
    Slice s;
    s.begin = begin;
    s.words = std::min(r.c.slice_words, r.p.vocab_local - begin);
    s.rows = {0, static_cast<int>(r.p.tokens), &r.b.facts->in_use};
    gradient_of(r, s);
    if (r.p.wants_dx) dx_of(r, s);
    if (r.p.wants_dw) dw_of(r, s);
    if (r.p.wants_db)
      add_bias_gradient({r.b.exp, r.c.exp_stride, false, r.range(0, r.p.tokens),
                         static_cast<int>(s.words), 0, r.b.db_factor, true, r.b.db + begin},
                        r.stream);
  }
  if (!r.p.wants_dx) return;
  end_rows({r.b.dx_part, r.p.hidden, r.b.rows, r.range(0, r.p.tokens), r.weight().data,
            r.weight().stride, View(r.call.out.dx), r.dx_exponents()},
           r.stream);
}

}  // namespace talea::lce::sm90
