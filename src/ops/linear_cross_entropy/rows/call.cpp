// What: from a call to what the kernels of the device lanes share of it, and its checks of data.
// Why: both lanes see the same inputs and refuse the same calls with the same words.
// Never: launches a kernel.
#include "ops/linear_cross_entropy/rows/call.hpp"

#include "device/common/cuda_check.hpp"

namespace talea::lce {

TokenRule token_rule(const Call& call) {
  const Problem& p = call.problem;
  TokenRule r{id_rule(p),
              {p.vocab_begin, p.vocab_local},
              p.options.logit_scale,
              View(call.in.targets),
              View(call.in.token_scale),
              {},
              0};
  if (p.soft_targets == SoftTargets::sparse)
    r.soft_ids = View(call.in.soft_target_ids), r.soft_k = p.soft_k;
  return r;
}

TokenTerms token_terms(const Call& call) {
  TokenTerms t{View(call.in.token_weight), View(call.in.upstream), View(call.in.upstream_lse),
               View(call.in.upstream_entropy)};
  if (mutant(Mutant::b1_upstream_first_only)) t.upstream.stride0 = 0;
  if (mutant(Mutant::b2_upstream_stride_ignored)) t.upstream.stride0 = 1;
  t.soft = call.problem.soft_targets != SoftTargets::none;
  t.has_targets = call.problem.has_targets;
  return t;
}

TokenOutputs token_outputs(const Call& call) {
  const Outputs& out = call.out;
  const bool each = call.problem.options.reduction == Reduction::none;
  return {each ? View(out.loss) : View(),
          View(out.lse),
          View(out.target_logprob),
          View(out.entropy),
          View(out.argmax),
          View(out.topk_values),
          View(out.topk_ids),
          View(out.topk_logprobs),
          call.problem.top_k};
}

LossTerms<double> loss_terms(const Problem& p) {
  LossTerms<double> t;
  t.label_smoothing = p.options.label_smoothing;
  t.z_loss = p.options.z_loss;
  t.vocab = static_cast<double>(mutant(Mutant::b9_smoothing_local) ? p.vocab_stored : p.vocab);
  return t;
}

static void require_device(const Communicator& c, const char* name) {
  require(c.size() == 1 || c.device() == DeviceKind::cuda, ErrorKind::usage,
          "{} ranks: engine {} exchanges host memory; device tensors need a device communicator",
          name, c.engine());
}

void require_device(const Call& call) {
  require_device(call.vocab, "vocabulary");
  require_device(call.batch, "batch");
}

BatchFacts checked_facts(const Call& call, const BatchFacts* facts) {
  const cudaStream_t stream = device::cuda_stream(call.stream);
  require(!device::capturing(stream), ErrorKind::usage,
          "target_check = checked: needs a synchronisation, impossible while the stream is "
          "captured");
  BatchFacts f;
  device::check(cudaMemcpyAsync(&f, facts, sizeof(f), cudaMemcpyDeviceToHost, stream),
                "reading the target counts");
  device::check(cudaStreamSynchronize(stream), "target_check = checked");
  const auto data = ErrorKind::invalid_data;
  const Problem& p = call.problem;
  constexpr int64_t none = BatchFacts::kNone;
  require(f.first_bad_weight == none, data, "class_weight[{}]: must be finite and >= 0",
          f.first_bad_weight);
  require(f.first_bad_scale == none, data,
          "token_scale[{}]: must be finite and not 0, within fp32, also times logit_scale {}",
          f.first_bad_scale, p.options.logit_scale);
  if (f.first_bad != none && p.has_targets)
    fail(data, "targets[{}] = {}: outside [0, {}) and not ignore_index {}", f.first_bad,
         f.first_bad_value, p.vocab, p.options.ignore_index);
  require(f.first_bad == none, data, "soft_target_ids[{}]: an id outside [0, {})", f.first_bad,
          p.vocab);
  Result& said = call.result;
  said.valid_tokens = f.valid;
  said.ignored_tokens = f.ignored;
  said.out_of_range_tokens = f.out_of_range;
  said.targets_in_partition = f.in_partition;
  return f;
}

}  // namespace talea::lce
