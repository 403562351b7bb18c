// What: what comes before the first chunk: targets, denominator, blanks, fp32 vectors, shifts.
// Why: the chunks see compacted rows and local vectors only.
// Never: synchronises, except under TargetCheck::checked: once.
#include "ops/linear_cross_entropy/sm90/block_float.hpp"
#include "ops/linear_cross_entropy/sm90/run.hpp"

namespace talea::lce::sm90 {
namespace {

bool has_shifts(const Run& r) { return !r.c.is_wide() && !r.c.online && !r.c.from_saved(); }

// Each row's shift: its maximum over the first tile of the vocabulary, in a product of its own.
void find_shifts(const Run& r) {
  if (!r.multiplies()) {
    device::check(
        cudaMemsetAsync(r.b.token_shift, 0, static_cast<size_t>(r.p.tokens) * 4, r.stream),
        "zero shifts");
    return;
  }
  LogitsCall first;
  first.x = r.hidden();
  first.weight = r.weight();
  first.chunk = {0, static_cast<int>(r.p.tokens), nullptr};
  first.rows.target = r.b.token_target;
  first.rows.scale = r.b.token_scale;
  first.rows.shift = r.b.token_shift;
  first.rule = r.rule();
  first.general = r.c.general;
  first.mode = LogitsMode::shift;
  first.overlaps = !r.c.gather_tokens;  // there it follows a join of streams
  logits_product(first, r.launch());
}

void compact(const Run& r) {
  const Inputs& in = r.call.in;
  CompactParams q;
  q.tokens = r.p.tokens;
  q.rule = token_rule(r.call);
  q.class_weight = View(in.class_weight);
  q.token_weight = View(in.token_weight);
  if (has_shifts(r) && !r.c.gather_tokens) q.token_shift = r.b.token_shift;
  q.rows = r.b.rows;
  q.row_class_weight = r.b.row_class_weight;
  q.facts = r.b.facts;
  q.sort_keys = r.b.keys;
  Communicator& batch = r.call.batch;
  const bool global = r.p.options.denominator_scope == DenominatorScope::global && batch.size() > 1;
  q.mean = mean_rule(r.p.options);
  if (r.finds_and_gathers())
    find_few_rows({q, r.hidden().data, r.hidden().stride, r.p.hidden, r.x(0).data,
                   (r.p.tokens + kFewRows - 1) / kFewRows * kFewRows, r.b.tickets,
                   !device::capturing(r.stream)},
                  r.stream);
  else
    compact_rows(q, r.stream);
  if (r.p.has_class_weight) sum_class_weights(q.class_weight, r.p.vocab, r.b.facts, r.stream);
  if (global && r.c.gather_tokens) r.call.vocab.join(r.call.stream);  // one engine at a time
  if (global) batch.all_reduce_sum(&r.b.facts->valid_weight, 3, DType::f64, r.call.stream);
  if (r.p.has_class_weight || global) end_facts({q.mean, {}, r.b.facts, nullptr}, r.stream);
  if (r.b.keys)
    sort_keys(r.b.keys, r.b.sorted, r.p.tokens, r.p.vocab_local, r.b.sort_scratch, r.c.sort_bytes,
              r.stream);
}

}  // namespace

void blank(const Run& r) {
  const Outputs& out = r.call.out;
  // A rank without words adds nothing to the summed rows but the blanks that follow.
  if (r.c.gather_tokens && r.p.wants_dx && !r.multiplies())
    device::check(
        cudaMemsetAsync(r.b.dx_all, 0, static_cast<size_t>(r.p.tokens * r.p.hidden) * 4, r.stream),
        "zero dx");
  const bool scalar = r.p.options.reduction != Reduction::none;
  if (scalar && !out.lse && !out.target_logprob && !out.entropy && !out.argmax && r.p.top_k == 0 &&
      !out.dx)
    return;
  BlankParams q;
  q.tokens = r.p.tokens;
  q.rule = token_rule(r.call);
  q.out = token_outputs(r.call);
  q.dx = r.dx(), q.hidden = r.p.hidden;
  q.poison_dx = !r.c.gather_tokens || r.p.rank == 0;  // the ranks' rows are summed
  q.dx_exponents = r.dx_exponents(), q.dx_blocks = BlockFloat::blocks(r.p.hidden);
  q.plain = BlockFloat::kBf16;
  blank_tokens(q, r.stream);
}

namespace {

// Sequence parallel: the rows of all ranks, dense. They travel beside what the targets and the
// weight ask for.
void begin_gather(const Run& r) {
  const int64_t rows = r.p.tokens / r.p.world;
  uint16_t* own = r.b.x_all + rows * r.p.hidden * r.p.rank;
  GatherParams g{
      r.call.in.hidden.data, r.p.hidden_row_stride, r.p.hidden, nullptr, {}, own, r.p.hidden};
  g.range.rows = rows;
  gather_rows(g, r.stream);
  r.call.vocab.begin_all_gather(own, r.b.x_all, rows * r.p.hidden * 2, r.call.stream);
}

// The rows are compacted by then: their shifts follow them.
void end_gather(const Run& r) {
  r.call.vocab.join(r.call.stream);
  if (!has_shifts(r)) return;
  find_shifts(r);
  spread_shifts({r.p.tokens, r.b.facts, r.b.rows.index, r.b.token_shift, r.b.rows.shift}, r.stream);
}

void sum_weights(const Run& r) {
  weight_sums({r.call.in.weight.data, r.p.weight_row_stride, r.p.vocab_local, r.p.hidden,
               r.b.class_weight, r.b.bias, r.b.weight_parts, r.b.weight_sum, r.b.bias_sum},
              r.stream);
}

}  // namespace

void prepare(const Run& r) {
  const Inputs& in = r.call.in;
  if (r.c.gather_tokens) begin_gather(r);
  if (r.c.runs_ahead())
    device::check(
        cudaMemsetAsync(r.b.dx_read, 0,
                        static_cast<size_t>(Readers::counters(r.p.vocab_local)) * sizeof(int),
                        r.stream),
        "zero of the counts of tiles read");
  if (r.b.bias) convert_vector(View(in.bias), 0, r.p.vocab_local, r.b.bias, r.stream);
  if (r.b.class_weight)
    convert_vector(View(in.class_weight), r.p.vocab_begin, r.p.vocab_local, r.b.class_weight,
                   r.stream);
  if (has_shifts(r))
    prepare_tokens({r.p.tokens, token_rule(r.call), r.b.token_target, r.b.token_scale}, r.stream);
  if (has_shifts(r) && !r.c.gather_tokens) find_shifts(r);
  compact(r);
  if (r.p.options.target_check == TargetCheck::checked) {
    if (r.c.gather_tokens) r.call.vocab.join(r.call.stream);  // nothing may run on after an error
    checked_facts(r.call, r.b.facts);
  }
  if (!r.c.borrows_dx()) blank(r);
  if (r.c.sums_weight() && !r.c.from_saved()) sum_weights(r);
  if (r.c.gather_tokens) end_gather(r);
}

}  // namespace talea::lce::sm90
