// What: the value that every kernel of lane cuda gets: the problem, its options, its tensors.
// Why: kernels read one flat struct; this is the one place that fills it.
// Never: decides anything; plan.cpp does.
#include <numbers>

#include "ops/linear_cross_entropy/cuda/plan.hpp"

namespace talea::lce::cuda {

Shape shape_of(const Call& call, const Plan& plan, const Buffers& b) {
  const Problem& p = call.problem;
  Shape s{};
  s.tokens = p.tokens;
  s.hidden = p.hidden;
  s.vocab = p.vocab;
  s.vocab_begin = p.vocab_begin;
  s.vocab_local = p.vocab_local;
  s.logits_stride = plan.logits_stride;
  s.parts = plan.parts;
  s.kept = plan.kept;
  s.soft_k = p.soft_k;
  s.softcap = static_cast<float>(p.options.softcap);
  if (p.options.softcap > 0)
    s.cap_exponent = static_cast<float>(2 * std::numbers::log2e / p.options.softcap);
  s.logit_scale = p.options.logit_scale;
  s.soft = p.soft_targets;
  s.scaled_rows = plan.scaled_rows;
  s.fast_exp = is_16bit(plan.compute);
  s.fast_cap = is_16bit(plan.compute) && p.options.softcap <= 256;
  s.bias = p.has_bias ? b.bias : nullptr;
  s.class_weight = p.has_class_weight ? b.class_weight : nullptr;
  s.rule = token_rule(call);
  s.terms = token_terms(call);
  s.out = token_outputs(call);
  s.mean = mean_rule(p.options);
  s.loss_terms = loss_terms(p);
  s.class_weights = View(call.in.class_weight);
  s.soft_probs = View(call.in.soft_target_probs);
  if (p.options.reduction != Reduction::none) s.loss = View(call.out.loss);
  s.accuracy = View(call.out.accuracy);
  return s;
}

}  // namespace talea::lce::cuda
