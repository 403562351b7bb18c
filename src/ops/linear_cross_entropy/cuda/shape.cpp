// What: the value that every kernel of lane cuda gets: the problem, its options, its tensors.
// Why: kernels read one flat struct; this is the one place that fills it.
// Never: decides anything; plan.cpp does.
#include <numbers>

#include "ops/linear_cross_entropy/cuda/plan.hpp"

namespace talea::lce::cuda {

Shape shape_of(const Call& call, const Plan& plan, const Buffers& b) {
  const Problem& p = call.problem;
  const Inputs& in = call.in;
  const Outputs& out = call.out;
  Shape s{};
  s.tokens = p.tokens;
  s.hidden = p.hidden;
  s.vocab = p.vocab;
  s.vocab_begin = p.vocab_begin;
  s.vocab_local = p.vocab_local;
  s.vocab_stored = p.vocab_stored;
  s.logits_stride = plan.logits_stride;
  s.parts = plan.parts;
  s.kept = plan.kept;
  s.top_k = p.top_k;
  s.soft_k = p.soft_k;
  s.ignore_index = p.options.ignore_index;
  s.softcap = static_cast<float>(p.options.softcap);
  if (p.options.softcap > 0)
    s.cap_exponent = static_cast<float>(2 * std::numbers::log2e / p.options.softcap);
  s.logit_scale = p.options.logit_scale;
  s.label_smoothing = p.options.label_smoothing;
  s.z_loss = p.options.z_loss;
  s.denominator_value = p.options.denominator_value;
  s.reduction = p.options.reduction;
  s.denominator = p.options.denominator;
  s.on_empty = p.options.on_empty;
  s.soft = p.soft_targets;
  s.has_targets = p.has_targets;
  s.scaled_rows = plan.scaled_rows;
  s.fast_exp = is_16bit(plan.compute);
  s.fast_cap = is_16bit(plan.compute) && p.options.softcap <= 256;
  s.bias = p.has_bias ? b.bias : nullptr;
  s.class_weight = p.has_class_weight ? b.class_weight : nullptr;
  s.targets = View(in.targets);
  s.class_weights = View(in.class_weight);
  s.token_weight = View(in.token_weight);
  s.token_scale = View(in.token_scale);
  s.soft_ids = View(in.soft_target_ids);
  s.soft_probs = View(in.soft_target_probs);
  s.upstream = View(in.upstream);
  if (mutant(Mutant::b1_upstream_first_only)) s.upstream.stride0 = 0;
  if (mutant(Mutant::b2_upstream_stride_ignored)) s.upstream.stride0 = 1;
  s.upstream_lse = View(in.upstream_lse);
  s.upstream_entropy = View(in.upstream_entropy);
  s.loss = View(out.loss);
  s.lse = View(out.lse);
  s.logprob = View(out.target_logprob);
  s.entropy = View(out.entropy);
  s.argmax = View(out.argmax);
  s.accuracy = View(out.accuracy);
  s.topk_values = View(out.topk_values);
  s.topk_ids = View(out.topk_ids);
  s.topk_logprobs = View(out.topk_logprobs);
  return s;
}

}  // namespace talea::lce::cuda
