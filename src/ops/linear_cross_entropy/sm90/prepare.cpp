// What comes before the first chunk: targets, denominator, blanks, fp32 vectors, shifts.
// Exists so that the chunks see compacted rows and local vectors only.
// Never synchronises, except under TargetCheck::checked: once.
#include <climits>

#include "ops/linear_cross_entropy/sm90/run.hpp"

namespace talea::lce::sm90 {
namespace {

bool has_shifts(const Run& r) { return !r.c.wide && !r.c.online && !r.c.from_saved; }

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
  first.kind = LogitsCall::Kind::shift;
  first.overlaps = !r.c.gather_tokens;  // there it follows a join of streams
  logits_product(first, r.launch());
}

void compact(const Run& r) {
  const Inputs& in = r.call.in;
  CompactParams q;
  q.tokens = r.p.tokens;
  q.rule = r.target_rule();
  q.class_weight = device_vector(in.class_weight);
  q.token_weight = device_vector(in.token_weight);
  if (has_shifts(r) && !r.c.gather_tokens) q.token_shift = r.b.token_shift;
  q.rows = r.b.rows;
  q.row_class_weight = r.b.row_class_weight;
  q.facts = r.b.facts;
  q.sort_keys = r.b.keys;
  Communicator& batch = r.call.batch;
  const bool global = r.p.options.denominator_scope == DenominatorScope::global && batch.size() > 1;
  q.denominator =
      r.p.options.reduction == Reduction::mean ? static_cast<int>(r.p.options.denominator) : 3;
  q.given = r.p.options.denominator_value;
  q.forms_denominator = !r.p.has_class_weight && !global;
  if (r.finds_and_gathers())
    find_few_rows({q, r.hidden().data, r.hidden().stride, r.p.hidden, r.x(0).data,
                   (r.p.tokens + kFewRows - 1) / kFewRows * kFewRows, r.b.tickets,
                   !device::capturing(r.stream)},
                  r.stream);
  else
    compact_rows(q, r.stream);
  if (r.p.has_class_weight) sum_class_weights(q.class_weight, r.p.vocab, r.b.facts, r.stream);
  if (global && r.c.gather_tokens) r.call.vocab.join(r.call.stream);  // one engine at a time
  if (global) batch.all_reduce_sum(r.b.facts->weights, 3, DType::f64, r.call.stream);
  if (!q.forms_denominator) form_denominator(r.b.facts, q.denominator, q.given, r.stream);
  if (r.b.keys)
    sort_keys(r.b.keys, r.b.sorted, r.p.tokens, r.p.vocab_local, r.b.sort_scratch, r.c.sort_bytes,
              r.stream);
}

// The one synchronisation of TargetCheck::checked.
void check_data(const Run& r) {
  require(!device::capturing(r.stream), ErrorKind::usage,
          "target_check = checked: needs a synchronisation, impossible while the stream is "
          "captured");
  BatchFacts f;
  device::check(cudaMemcpyAsync(&f, r.b.facts, sizeof(f), cudaMemcpyDeviceToHost, r.stream),
                "reading the target counts");
  device::check(cudaStreamSynchronize(r.stream), "target_check = checked");
  const auto data = ErrorKind::invalid_data;
  require(f.first_bad_weight < 0, data, "class_weight[{}]: must be finite and >= 0",
          f.first_bad_weight);
  require(f.first_bad_scale == INT_MAX, data, "token_scale[{}]: must be finite and not 0",
          f.first_bad_scale);
  if (f.first_bad != INT_MAX && r.p.has_targets)
    fail(data, "targets[{}] = {}: outside [0, {}) and not ignore_index {}", f.first_bad,
         f.first_bad_value, r.p.vocab, r.p.options.ignore_index);
  require(f.first_bad == INT_MAX, data, "soft_target_ids[{}]: an id outside [0, {})", f.first_bad,
          r.p.vocab);
  Result& said = r.call.result;
  said.valid_tokens = f.valid;
  said.ignored_tokens = f.ignored;
  said.out_of_range_tokens = f.poisoned;
  said.targets_in_partition = f.in_partition;
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
  q.rule = r.target_rule();
  q.hidden = r.p.hidden;
  if (!scalar) q.loss = device_vector(out.loss);
  q.lse = device_vector(out.lse);
  q.logprob = device_vector(out.target_logprob);
  q.entropy = device_vector(out.entropy);
  q.argmax = device_vector(out.argmax);
  q.topk_values = device::View(out.topk_values);
  q.topk_ids = device::View(out.topk_ids);
  q.topk_logprobs = device::View(out.topk_logprobs);
  q.top_k = r.p.top_k;
  q.dx = r.dx();
  q.poison_dx = !r.c.gather_tokens || r.p.rank == 0;  // the ranks' rows are summed
  blank_rows(q, r.stream);
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
  DeviceVector weights, bias;
  if (r.b.class_weight) weights = {r.b.class_weight, DType::f32, 1};
  if (r.b.bias) bias = {r.b.bias, DType::f32, 1};
  weight_sums({r.call.in.weight.data, r.p.weight_row_stride, r.p.vocab_local, r.p.hidden, weights,
               bias, r.b.weight_parts, r.b.weight_sum, r.b.bias_sum},
              r.stream);
}

}  // namespace

void prepare(const Run& r) {
  const Inputs& in = r.call.in;
  if (r.c.gather_tokens) begin_gather(r);
  if (r.c.logits_ahead)
    device::check(
        cudaMemsetAsync(r.b.dx_read, 0,
                        static_cast<size_t>(Readers::counters(r.p.vocab_local)) * sizeof(int),
                        r.stream),
        "zero of the counts of tiles read");
  if (r.b.bias) convert_vector(device_vector(in.bias), 0, r.p.vocab_local, r.b.bias, r.stream);
  if (r.b.class_weight)
    convert_vector(device_vector(in.class_weight), r.p.vocab_begin, r.p.vocab_local,
                   r.b.class_weight, r.stream);
  if (has_shifts(r))
    prepare_tokens({r.p.tokens, r.target_rule(), r.b.token_target, r.b.token_scale}, r.stream);
  if (has_shifts(r) && !r.c.gather_tokens) find_shifts(r);
  compact(r);
  if (r.p.options.target_check == TargetCheck::checked) {
    if (r.c.gather_tokens) r.call.vocab.join(r.call.stream);  // nothing may run on after an error
    check_data(r);
  }
  if (!r.c.x_in_dx) blank(r);
  if (r.c.smoothing && !r.c.from_saved) sum_weights(r);
  if (r.c.gather_tokens) end_gather(r);
}

}  // namespace talea::lce::sm90
