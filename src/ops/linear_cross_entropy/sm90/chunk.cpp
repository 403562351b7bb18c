// What: one chunk of rows: logits product, row states, gradient factors, dX and dW products.
// Why: the order of the kernels shows on one page.
// Never: allocates, synchronises or leaves the caller's stream.
#include "ops/linear_cross_entropy/sm90/chunk.hpp"

#include "ops/linear_cross_entropy/forced.hpp"
#include "ops/linear_cross_entropy/sm90/cost.hpp"

namespace talea::lce::sm90 {
namespace {

FinishParams finish_params(const Run& r, const Chunk& k) {
  FinishParams f;
  f.rows = r.b.rows.from(k.begin);
  f.row_class_weight = r.b.row_class_weight + k.begin;
  f.range = k.range, f.facts = r.b.facts;
  f.terms = loss_terms(r.p);
  f.scale = r.p.options.logit_scale, f.softcap = r.p.options.softcap;
  f.f16 = r.c.f16;
  f.own = token_terms(r.call);
  f.out = token_outputs(r.call);
  f.row_loss = r.b.row_loss + k.begin;
  f.hidden = r.p.hidden;
  f.zeroed = r.b.tickets;
  if (r.b.db_factor) f.db_factor = r.b.db_factor + k.offset;
  return f;
}

// States become outputs and factors; between ranks, after all have seen all states.
void finish_states(const Run& r, FinishParams f) {
  f.states = r.b.own_states, f.parts = 1;
  if (r.exchanged()) {
    r.call.vocab.all_gather(r.b.own_states, r.b.all_states,
                            r.c.chunk_rows * static_cast<int64_t>(sizeof(RowState<double>)),
                            r.call.stream);
    f.states = r.b.all_states, f.parts = r.p.world;
  }
  finish_rows(f, r.stream);
}

// ---- the folded path: exp(z - shift) in bf16, factors of rows ----------------------------------

LogitsCall logits_call(const Run& r, const Chunk& k) {
  LogitsCall q;
  q.x = x_of(r, k), q.x_at_end = r.c.x_ends_dx();
  q.weight = r.weight();
  q.chunk = k.rows;
  q.rows = r.b.rows.from(k.begin);
  q.tile_sums = r.tile_sums(), q.tile_shifted = r.b.tile_shifted;
  q.places = r.tile_places();
  q.rule = r.rule();
  q.tile_classes = r.b.tile_classes, q.tile_peaks = r.b.tile_peaks;
  q.class_weight = r.b.class_weight;
  q.general = r.c.general, q.full = r.c.full;
  q.mode = LogitsMode::sums;
  if (r.b.exp && !r.c.by_slices()) q.mode = LogitsMode::store, q.exp = buffer(r, k);
  if (r.c.online) q.mode = LogitsMode::online, q.tile_columns = r.c.tile_columns;
  return q;
}

// The tiles of the gradient products that have read the buffer once the chunk before k is done.
Readers readers_before(const Run& r, const Chunk& k) {
  const auto up = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  const int chunks = static_cast<int>(k.begin / r.c.chunk_rows);
  const int dx =
      up(r.c.chunk_rows, 256) * 2 * up(r.p.hidden, dx_tile_columns(r.c.dx_tile));  // never tall
  return {r.b.dx_read, r.b.dw_read, chunks * dx, chunks * up(r.p.hidden, 128)};
}

void logits_ahead(const Run& r, const Chunk& k) {
  LogitsCall q = logits_call(r, k);
  q.mode = LogitsMode::ahead;
  q.readers = readers_before(r, k);
  q.early = r.c.dx_blocks / 2, q.head_start = r.c.logits_head_start;
  q.tickets = r.b.tickets + 1;
  logits_product(q, r.launch());
}

void folded_logits(const Run& r, const Chunk& k) {
  if (!r.multiplies()) return;
  LogitsCall q = logits_call(r, k);
  if (!r.c.runs_ahead() || k.begin == 0) logits_product(q, r.launch());
  if (r.c.online) return;
  q.repair = true;  // ends at once where every row is within reach of its shift
  logits_product(q, r.launch());
}

void smoothing_dots(const Run& r, const Chunk& k) {
  RowDotParams d;
  d.x = x_of(r, k).data, d.stride = r.x(0).stride;
  d.hidden = r.p.hidden, d.capacity = k.capacity, d.begin = k.begin;
  d.facts = r.b.facts, d.vector = r.b.weight_sum, d.sums = r.b.bias_sum;
  d.scale = r.p.options.logit_scale;
  d.row_scale = r.b.rows.scale ? r.b.rows.scale + k.begin : nullptr;
  d.out = r.b.row_class_sum + k.begin;
  row_dots(d, r.stream);
}

// The best words are found while the gathered rows are as they came.
void best_words(const Run& r, const Chunk& k) {
  BestParams q;
  q.buffer = static_cast<uint16_t*>(buffer(r, k).data), q.stride = r.c.exp_stride;
  q.range = k.range;
  q.rows = r.b.rows.from(k.begin);
  q.rule = r.rule();
  q.vocab = static_cast<int>(r.p.vocab_local), q.vocab_begin = r.p.vocab_begin;
  q.tile_peaks = r.b.tile_peaks, q.tile_stride = r.c.state_rows;
  q.tiles = static_cast<int>(r.c.tiles), q.tile_columns = kLogitsTile;
  q.x = x_of(r, k).data, q.hidden = r.p.hidden;
  q.weight = r.weight().data, q.weight_stride = r.weight().stride;
  q.kept = r.c.kept, q.best = r.b.own_best;
  rank_rows(q, r.stream);
}

void transform(const Run& r, const Chunk& k) {
  transform_rows(
      {static_cast<uint16_t*>(buffer(r, k).data), r.c.exp_stride, k.range,
       r.b.rows.target + k.begin, r.b.factors + k.offset, static_cast<float>(r.p.options.softcap),
       r.b.class_weight, static_cast<int>(r.p.vocab_local), r.p.has_upstream_entropy},
      r.stream);
}

void rank_words(const Run& r, const Chunk& k);

void folded_states(const Run& r, const Chunk& k) {
  folded_logits(r, k);
  if (r.c.kept > 0) best_words(r, k);
  if (r.c.sums_weight()) smoothing_dots(r, k);
  FinishParams f = finish_params(r, k);
  f.tile_sums = r.tile_sums(), f.tile_shifted = r.b.tile_shifted;
  f.tile_classes = r.b.tile_classes;
  if (r.c.online) f.tile_maxima = r.b.tile_peaks;
  f.places = r.tile_places(), f.tiles = static_cast<int>(r.c.tiles);
  f.row_lse = r.b.row_lse;
  const bool by_slices = r.c.by_slices();
  if (r.c.is_transformed() || by_slices) f.factors = r.b.factors + k.offset;
  f.shifted_buffer = !by_slices;
  const bool scales = r.p.wants_dw && !r.c.is_transformed() && !by_slices;
  if (r.c.sums_weight()) f.row_class_sum = r.b.row_class_sum + k.begin;
  if (r.c.rank_one()) f.row_smooth = r.b.row_smooth + k.begin;
  if (r.ends_and_sums()) {
    const ReduceParams scalar = reduce_params(r);
    end_few_rows({f, scalar, scalar.loss.data ? r.b.tickets : nullptr}, k.capacity, r.stream);
  } else if (!r.exchanged()) {
    f.scaled = scales ? x_of(r, k).data : nullptr;
    finish_rows(f, r.stream);
  } else {
    f.own_states = r.b.own_states;
    finish_rows(f, r.stream);
    f.own_states = nullptr;
    f.scaled = scales ? x_of(r, k).data : nullptr;
    finish_states(r, f);
  }
  rank_words(r, k);
  if (r.c.is_transformed()) transform(r, k);
}

// The states of a chunk's rows, as many at once as there is room for sums per tile.
void form_states(const Run& r, const Chunk& k) {
  const int64_t step = r.c.state_rows;
  for (int64_t offset = 0; offset < k.capacity; offset += step)
    folded_states(r, rows_of(r, k.begin, offset, std::min(step, r.c.chunk_rows - offset),
                             std::min(step, k.capacity - offset)));
  if (r.c.rank_one() && r.p.wants_dw)
    weighted_rows(
        {r.hidden().data, r.hidden().stride, r.p.hidden, r.b.rows.index + k.begin, r.b.facts,
         k.begin, k.capacity, r.b.row_smooth + k.begin, r.b.weight_parts, r.b.smooth_row},
        r.stream);
}

// By slices: the states from what an earlier call said of the rows.
void saved_states(const Run& r, const Chunk& k) {
  restore_states({r.b.rows.from(k.begin), k.range, View(r.call.in.saved_lse),
                  View(r.call.in.saved_target_logprob), r.b.own_states},
                 r.stream);
  FinishParams f = finish_params(r, k);
  f.factors = r.b.factors;
  f.shifted_buffer = false;
  finish_states(r, f);
}

// ---- the wide path: fp32 logits, then da in their place ----------------------------------------

WideParams wide_params(const Run& r, const Chunk& k) {
  const Inputs& in = r.call.in;
  WideParams w;
  w.logits = r.b.logits, w.stride = r.c.exp_stride / 2;
  w.columns = r.c.exp_stride / (r.c.two_terms ? 3 : 2), w.two_terms = r.c.two_terms;
  w.range = k.range;
  w.rows = r.b.rows.from(k.begin);
  w.rule = r.rule();
  w.vocab = static_cast<int>(r.p.vocab_local), w.vocab_begin = r.p.vocab_begin;
  w.class_weight = r.b.class_weight;
  w.soft = r.p.soft_targets;
  w.soft_probs = View(in.soft_target_probs);
  w.soft_ids = View(in.soft_target_ids);
  w.soft_k = r.p.soft_k;
  w.entropy = r.p.wants_entropy || r.p.has_upstream_entropy;
  w.class_sum = r.p.options.label_smoothing > 0;
  w.f16 = r.c.f16;
  w.sparse_logits = r.b.sparse_logits;
  w.target_slope = r.b.target_slope;
  w.factors = r.b.factors;
  return w;
}

void rank_words(const Run& r, const Chunk& k) {
  if (r.c.kept == 0) return;
  RankedParams q;
  q.range = k.range;
  q.index = r.b.rows.index + k.begin;
  q.best = r.b.own_best;
  q.kept = r.c.kept;
  q.lse = r.b.row_lse;
  q.targets = View(r.call.in.targets);
  q.out = token_outputs(r.call);
  q.hit = r.b.hit ? r.b.hit + k.begin : nullptr;
  if (r.exchanged()) {
    r.call.vocab.all_gather(
        r.b.own_best, r.b.all_best,
        r.c.chunk_rows * r.c.kept * static_cast<int64_t>(sizeof(Candidate<float>)), r.call.stream);
    q.best = r.b.all_best, q.parts = r.p.world;
  }
  write_ranked(q, r.stream);
}

void wide_states(const Run& r, const Chunk& k) {
  const WideParams w = wide_params(r, k);
  if (r.multiplies()) {
    WideLogitsCall q;
    q.x = r.x(0);
    q.weight = r.weight();
    q.logits = {r.b.logits, r.c.chunk_rows, r.p.vocab_local, w.stride};
    q.chunk = k.rows;
    q.f16 = r.c.f16;
    wide_logits_product(q, r.launch());
  }
  state_rows(w, r.b.own_states, r.stream);
  rank_rows(w, r.c.kept, r.b.own_best, r.stream);
  FinishParams f = finish_params(r, k);
  f.shifted_buffer = false;
  f.row_lse = r.b.row_lse;
  f.target_slope = r.b.target_slope;
  f.factors = r.b.factors;
  f.least_exponent = r.b.least_exponent;
  if (r.c.f16)
    device::check(cudaMemsetAsync(r.b.least_exponent, 0x7f, 4, r.stream), "least exponent");
  finish_states(r, f);
  rank_words(r, k);
  if (!r.p.backward()) return;
  form_gradient(w, r.stream);
  if (r.c.f16 && r.p.wants_dw)
    scale_rows(
        {r.b.x, true, r.p.hidden, k.range, nullptr, r.b.factors, r.b.least_exponent, r.b.undo},
        r.stream);
}

// ---- gradients ----------------------------------------------------------------------------------

// This rank's share of a chunk's dX from row `offset` on, which the ranks then sum.
Matrix dx_share(const Run& r, int64_t offset) {
  const int64_t bytes = r.c.bf16_sum ? 2 : 4;
  return {reinterpret_cast<char*>(r.b.dx_part) + offset * r.p.hidden * bytes,
          r.c.chunk_rows - offset, r.p.hidden, r.p.hidden};
}

// The tile is the plan's, for whole chunks. A short last one, where nothing runs beside it, may be
// done sooner by smaller ones, as its cost was predicted.
DxTile dx_tile_of(const Run& r, const Chunk& k) {
  if (r.p.wants_dw || k.capacity == r.c.chunk_rows) return r.c.dx_tile;
  return dx_tiles(r.p, r.c, r.c.blocks / 2.0, k.capacity).tile;
}

void dx_of(const Run& r, const Chunk& k, int blocks) {
  DxCall q;
  q.exp = buffer(r, k), q.terms = terms(r), q.weight = r.weight(), q.chunk = k.rows;
  q.rows = r.b.rows.from(k.begin);
  q.f16 = r.c.f16, q.tile = dx_tile_of(r, k);
  q.f32_out = true;
  if (r.c.exchange_dx) {
    q.dx = dx_share(r, k.offset);
    q.f32_out = !r.c.bf16_sum;
    q.scatters = false;
  } else if (r.c.gather_tokens) {
    q.dx = {r.b.dx_all, r.p.tokens, r.p.hidden, r.p.hidden};
  } else {
    q.dx = {r.call.out.dx.data, r.p.tokens, r.p.hidden, r.call.out.dx.stride[0]};
    q.f32_out = r.p.dx_dtype == DType::f32;
  }
  if (r.c.rank_one()) q.smooth_row = r.b.weight_sum, q.smooth_factor = r.b.row_smooth + k.begin;
  q.overlaps = !r.exchanged();
  q.exponents = r.dx_exponents();
  if (is_followed(r, k.begin)) q.read = r.b.dx_read;
  if (r.multiplies())
    dx_product(q, {r.stream, blocks});
  else if (!r.c.gather_tokens)  // there the rows of a rank without words were zeroed before
    device::check(cudaMemsetAsync(
                      q.dx.data, 0,
                      static_cast<size_t>(q.dx.rows * q.dx.stride) * (q.f32_out ? 4 : 2), r.stream),
                  "zero dx");
}

// The sum over the ranks travels while the next product runs, where multiprocessors are left to it.
void begin_dx_sum(const Run& r, const Chunk& k) {
  const DType dtype = r.c.bf16_sum ? DType::bf16 : DType::f32;
  void* share = dx_share(r, k.offset).data;
  if (r.multiprocessors_beside() > 0)
    r.call.vocab.begin_all_reduce_sum(share, k.capacity * r.p.hidden, dtype, r.call.stream);
  else
    r.call.vocab.all_reduce_sum(share, k.capacity * r.p.hidden, dtype, r.call.stream);
}

// The stream of the sums that run beside products, where the lane may queue what follows them.
cudaStream_t stream_beside(const Run& r) {
  return r.multiprocessors_beside() > 0 ? device::cuda_stream(r.call.vocab.stream_beside())
                                        : nullptr;
}

// The summed rows, rounded once.
void store_dx(const Run& r, int64_t begin, cudaStream_t stream) {
  scatter_rows({r.b.dx_part, r.c.bf16_sum, r.p.hidden, r.b.rows.index + begin,
                r.range(begin, r.c.chunk_rows), r.dx()},
               stream);
}

// dX of a chunk over the ranks. All sum the same parts; where what dX leaves free is enough for a
// sum, that of the first part runs beside the product of the second.
void exchange_dx_of(const Run& r, const Chunk& k) {
  const int64_t step = r.c.dx_part_rows;
  const int taken = r.multiprocessors_beside();
  const bool staggered = taken > 0 && taken <= r.c.blocks - r.c.dx_part_blocks;
  if (!staggered) dx_of(r, k, r.c.dx_blocks);
  for (int64_t offset = 0; offset < k.capacity; offset += step) {
    const Chunk part = rows_of(r, k.begin, offset, std::min(step, r.c.chunk_rows - offset),
                               std::min(step, k.capacity - offset));
    if (staggered) dx_of(r, part, r.c.dx_part_blocks);
    begin_dx_sum(r, part);
  }
  if (const cudaStream_t beside = stream_beside(r)) store_dx(r, k.begin, beside);
}

// Sequence parallel: each rank is to have the sum of its own tokens' dX.
bool scatters_dx(const Run& r) { return r.c.gather_tokens && r.p.wants_dx; }
void begin_dx_scatter(const Run& r) {
  const int64_t count = r.p.tokens / r.p.world * r.p.hidden;
  if (r.multiprocessors_beside() > 0)
    r.call.vocab.begin_reduce_scatter_sum(r.b.dx_all, r.own_dx(), count, DType::f32, r.call.stream);
  else
    r.call.vocab.reduce_scatter_sum(r.b.dx_all, r.own_dx(), count, DType::f32, r.call.stream);
}

void dw_of(const Run& r, const Chunk& k, bool first) {
  DwCall q;
  q.exp = buffer(r, k), q.terms = terms(r), q.dw = r.dw(), q.chunk = k.rows;
  q.x = r.x(k.begin);
  q.f16 = r.c.f16;
  q.undo = r.c.f16 ? r.b.undo : nullptr;
  const bool main_grad = r.p.accumulate_dw && !mutant(Mutant::main_grad_overwritten);
  q.add = !first || (main_grad && r.c.dw != DwOutput::workspace);
  q.beside_dx = r.p.wants_dx && !r.exchanged();
  q.rounds = r.c.dw == DwOutput::direct, q.sorted = r.b.sorted, q.rows = r.b.rows;
  q.hidden = r.hidden();
  q.dx_pairs = r.c.dx_blocks / 2;
  q.early = r.c.dw_early, q.head_start = r.c.dw_head_start, q.tickets = r.b.tickets;
  if (r.c.rank_one()) q.smooth_row = r.b.smooth_row, q.class_weight = r.b.class_weight;
  q.rest = r.rest();
  q.ends = is_last(r, k.begin) && !(r.c.sums_in_codes() && r.p.wants_rest);  // its factor rounds
  Launch launch = r.launch();
  if (is_followed(r, k.begin)) {
    q.read = r.b.dw_read, q.tickets = nullptr;
    launch.blocks = forced.slow.value_or(false) ? 2 : r.c.blocks - r.c.dx_blocks;
  }
  if (r.c.exchange_dx || (scatters_dx(r) && is_last(r, k.begin)))
    launch.blocks -= r.multiprocessors_beside();
  r.c.dw == DwOutput::split ? split_dw_product(q, launch) : dw_product(q, launch);
}

void gather(const Run& r, const Chunk& k) {
  const Matrix x = r.x(k.begin);
  gather_rows({r.hidden().data, r.hidden().stride, r.p.hidden, r.b.rows.index, k.range, x.data,
               x.stride, r.c.x_ends_dx() ? x.rows : 0, !r.exchanged()},
              r.stream);
}

}  // namespace

void run_chunk(const Run& r, int64_t begin, bool first) {
  const auto at = [&](int64_t from) {
    return rows_of(r, from, 0, r.c.chunk_rows, std::min(r.c.chunk_rows, r.p.tokens - from));
  };
  const Chunk k = at(begin);
  const bool followed = is_followed(r, begin);
  if (!r.finds_and_gathers() && (!r.c.runs_ahead() || first)) gather(r, k);
  if (r.c.is_wide())
    wide_states(r, k);
  else if (r.c.from_saved())
    saved_states(r, k);
  else
    form_states(r, k);
  if (!r.p.backward()) return;
  if (r.c.by_slices()) return run_slices(r);
  if (followed) gather(r, at(begin + r.c.chunk_rows));
  // Every row's share is known, and codes take it before the last product rounds them.
  if (r.c.sums_in_codes() && is_last(r, begin) && r.multiplies() && r.b.sorted)
    add_targets_to_split(r);
  if (r.c.exchange_dx)
    exchange_dx_of(r, k);
  else if (r.p.wants_dx)
    dx_of(r, k, r.c.dx_blocks);
  if (scatters_dx(r) && is_last(r, begin)) begin_dx_scatter(r);
  const bool missing = mutant(Mutant::b19_dw_missing_when_dx_frozen) && !r.p.wants_dx;
  if (r.multiplies() && r.p.wants_dw && !missing) dw_of(r, k, first);
  if (followed) logits_ahead(r, at(begin + r.c.chunk_rows));
  if (r.multiplies() && r.p.wants_db)
    add_bias_gradient({r.b.exp, r.c.exp_stride, r.c.f16, k.range, static_cast<int>(r.p.vocab_local),
                       terms(r).offset, r.b.db_factor, first, r.b.db},
                      r.stream);
  if (r.c.exchange_dx && !is_last(r, begin)) end_dx_sum(r, begin);
}

void end_dx_sum(const Run& r, int64_t begin) {
  if (r.multiprocessors_beside() > 0) r.call.vocab.join(r.call.stream);
  if (!stream_beside(r)) store_dx(r, begin, r.stream);
}

}  // namespace talea::lce::sm90
