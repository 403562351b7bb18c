// What: the fields of linear cross-entropy's structs, each list once, and its enums' words.
// Why: C conversion, view checks, handshake, receipt, the tool's flags and Python's structs are
// loops over these lists, or held to them by a test.
// Never: a second list of the same fields elsewhere.
#pragma once

#include "core/fields.hpp"
#include "ops/linear_cross_entropy/lane.hpp"
#include "talea/talea.h"

namespace talea {

template <>
struct Words<Reduction> {
  static constexpr const char* list[] = {"none", "sum", "mean"};
};
template <>
struct Words<Denominator> {
  static constexpr const char* list[] = {"valid", "weighted", "given"};
};
template <>
struct Words<DenominatorScope> {
  static constexpr const char* list[] = {"local", "global"};
};
template <>
struct Words<OnEmpty> {
  static constexpr const char* list[] = {"nan", "zero"};
};
template <>
struct Words<TargetCheck> {
  static constexpr const char* list[] = {"automatic", "checked", "poison"};
};
template <>
struct Words<SoftTargets> {
  static constexpr const char* list[] = {"none", "dense", "sparse"};
};

namespace lce {

using CInputs = talea_linear_cross_entropy_inputs;
using COutputs = talea_linear_cross_entropy_outputs;
using COptions = talea_linear_cross_entropy_options;
using Late = LinearCrossEntropyLate;
using CLate = talea_linear_cross_entropy_late_args;
using CFacts = talea_linear_cross_entropy_facts;

// With the flag of the problem that says whether it is given or asked for; some have none.
template <class Struct, class CStruct>
struct PresentField : TensorField<Struct, CStruct, talea_tensor> {
  bool Problem::*present = nullptr;
};

inline constexpr PresentField<Inputs, CInputs> input_fields[] = {
    {"hidden", &Inputs::hidden, &CInputs::hidden},
    {"weight", &Inputs::weight, &CInputs::weight},
    {"bias", &Inputs::bias, &CInputs::bias, &Problem::has_bias},
    {"targets", &Inputs::targets, &CInputs::targets, &Problem::has_targets},
    {"class_weight", &Inputs::class_weight, &CInputs::class_weight, &Problem::has_class_weight},
    {"token_weight", &Inputs::token_weight, &CInputs::token_weight, &Problem::has_token_weight},
    {"token_scale", &Inputs::token_scale, &CInputs::token_scale, &Problem::has_token_scale},
    {"soft_target_ids", &Inputs::soft_target_ids, &CInputs::soft_target_ids},
    {"soft_target_probs", &Inputs::soft_target_probs, &CInputs::soft_target_probs},
    {"upstream", &Inputs::upstream, &CInputs::upstream, &Problem::has_upstream},
    {"upstream_lse", &Inputs::upstream_lse, &CInputs::upstream_lse, &Problem::has_upstream_lse},
    {"upstream_entropy", &Inputs::upstream_entropy, &CInputs::upstream_entropy,
     &Problem::has_upstream_entropy},
    {"saved_lse", &Inputs::saved_lse, &CInputs::saved_lse, &Problem::has_saved},
    {"saved_target_logprob", &Inputs::saved_target_logprob, &CInputs::saved_target_logprob,
     &Problem::has_saved},
};

inline constexpr PresentField<Outputs, COutputs> output_fields[] = {
    {"loss", &Outputs::loss, &COutputs::loss, &Problem::wants_loss},
    {"lse", &Outputs::lse, &COutputs::lse, &Problem::wants_lse},
    {"target_logprob", &Outputs::target_logprob, &COutputs::target_logprob,
     &Problem::wants_logprob},
    {"entropy", &Outputs::entropy, &COutputs::entropy, &Problem::wants_entropy},
    {"argmax", &Outputs::argmax, &COutputs::argmax, &Problem::wants_argmax},
    {"accuracy", &Outputs::accuracy, &COutputs::accuracy, &Problem::wants_accuracy},
    {"topk_values", &Outputs::topk_values, &COutputs::topk_values},
    {"topk_ids", &Outputs::topk_ids, &COutputs::topk_ids},
    {"topk_logprobs", &Outputs::topk_logprobs, &COutputs::topk_logprobs},
    {"dx", &Outputs::dx, &COutputs::dx, &Problem::wants_dx},
    {"dw", &Outputs::dw, &COutputs::dw, &Problem::wants_dw},
    {"dx_rest", &Outputs::dx_rest, &COutputs::dx_rest, &Problem::wants_dx_rest},
    {"dw_rest", &Outputs::dw_rest, &COutputs::dw_rest, &Problem::wants_rest},
    {"db", &Outputs::db, &COutputs::db, &Problem::wants_db},
};

inline constexpr TensorField<Late, CLate, talea_tensor> late_fields[] = {
    {"factor", &Late::factor, &CLate::factor},
    {"expected", &Late::expected, &CLate::expected},
    {"dx", &Late::dx, &CLate::dx},
    {"dw", &Late::dw, &CLate::dw},
    {"dx_sum", &Late::dx_sum, &CLate::dx_sum},
    {"dw_sum", &Late::dw_sum, &CLate::dw_sum},
    {"dx_rest", &Late::dx_rest, &CLate::dx_rest},
    {"dw_rest", &Late::dw_rest, &CLate::dw_rest},
};

// Every tensor of a call, inputs first.
inline std::vector<NamedTensor> memory_of(const Inputs& in, const Outputs& out) {
  std::vector<NamedTensor> all = tensors_of(in, input_fields);
  for (const NamedTensor& t : tensors_of(out, output_fields)) all.push_back(t);
  return all;
}

// `agreed`: ranks must agree on it, those of the batch too. The handshake says of the others where
// they must.
inline constexpr std::tuple option_fields = {
    Field{"reduction", &Options::reduction, &COptions::reduction, true, "of the loss"},
    Field{"denominator", &Options::denominator, &COptions::denominator, true,
          "of the mean: valid, weighted, or a number"},
    Field{"denominator_value", &Options::denominator_value, &COptions::denominator_value, true},
    Field{"denominator_scope", &Options::denominator_scope, &COptions::denominator_scope, true,
          "local, or global over the batch ranks"},
    Field{"on_empty", &Options::on_empty, &COptions::on_empty, true,
          "mean of a batch without a valid row"},
    Field{"target_check", &Options::target_check, &COptions::target_check, false,
          "targets outside the vocabulary"},
    Field{"ignore_index", &Options::ignore_index, &COptions::ignore_index, true,
          "target that takes no part"},
    Field{"vocab", &Options::vocab, &COptions::vocab, false,
          "logical vocabulary; rows of the weight above it are padding"},
    Field{"label_smoothing", &Options::label_smoothing, &COptions::label_smoothing, true,
          "in [0, 1)"},
    Field{"z_loss", &Options::z_loss, &COptions::z_loss, true, "weight of lse^2"},
    Field{"softcap", &Options::softcap, &COptions::softcap, true,
          "k of k * tanh(logit / k), > 0; default off"},
    Field{"logit_scale", &Options::logit_scale, &COptions::logit_scale, true, "1 / temperature"},
    Field{"workspace_limit_bytes", &Options::workspace_limit_bytes,
          &COptions::workspace_limit_bytes, false,
          "auto, or bytes, e.g. 64MiB; one that cannot be kept is an error that names the least"},
    Field{"dw_sum", &Options::dw_sum, &COptions::dw_sum, false,
          "in which a 16-bit dw is summed over chunks: fp32, or its own dtype"},
    Field{"threads", &Options::threads, &COptions::threads, false, "of the cpu lanes; 0: all"},
    Field{"lane", &Options::lane, &COptions::lane, false,
          "auto, or a lane by name (it runs or says why not)"},
};

// What a result says of a run, with its place in the receipt's JSON.
inline constexpr std::tuple fact_fields = {
    Field{"lane", &Result::lane, &CFacts::lane, false, "/lane"},
    Field{"lane_kind", &Result::lane_kind, &CFacts::lane_kind, false, "/lane_kind"},
    Field{"logits_home", &Result::logits_home, &CFacts::logits_home, false, "/logits/home"},
    Field{"logits_tile_rows", &Result::logits_tile_rows, &CFacts::logits_tile_rows, false,
          "/logits/tile_rows"},
    Field{"logits_tile_columns", &Result::logits_tile_columns, &CFacts::logits_tile_columns, false,
          "/logits/tile_columns"},
    Field{"logits_tile_bytes", &Result::logits_tile_bytes, &CFacts::logits_tile_bytes, false,
          "/logits/tile_bytes"},
    Field{"full_logits_tensor", &Result::full_logits_tensor, &CFacts::full_logits_tensor, false,
          "/logits/full_tensor"},
    Field{"accumulator_softmax", &Result::accumulator_softmax, &CFacts::accumulator_softmax, false,
          "/accumulators/softmax"},
    Field{"accumulator_dx", &Result::accumulator_dx, &CFacts::accumulator_dx, false,
          "/accumulators/dx"},
    Field{"accumulator_dw", &Result::accumulator_dw, &CFacts::accumulator_dw, false,
          "/accumulators/dw"},
    Field{"accumulator_loss", &Result::accumulator_loss, &CFacts::accumulator_loss, false,
          "/accumulators/loss"},
    Field{"upstream_handling", &Result::upstream_handling, &CFacts::upstream_handling, false,
          "/upstream_handling"},
    Field{"merges", &Result::merges, &CFacts::merges, false, "/merges"},
    Field{"chunk_rows", &Result::chunk_rows, &CFacts::chunk_rows, false, "/chunk_rows"},
    Field{"chunks", &Result::chunks, &CFacts::chunks, false, "/chunks"},
    Field{"workspace_bytes", &Result::workspace_bytes, &CFacts::workspace_bytes, false,
          "/workspace_bytes"},
    Field{"flops", &Result::flops, &CFacts::flops, false, "/flops"},
    Field{"products", &Result::products, &CFacts::products, false, "/products"},
    Field{"valid_tokens", &Result::valid_tokens, &CFacts::valid_tokens, false, "/valid_tokens"},
    Field{"ignored_tokens", &Result::ignored_tokens, &CFacts::ignored_tokens, false,
          "/ignored_tokens"},
    Field{"out_of_range_tokens", &Result::out_of_range_tokens, &CFacts::out_of_range_tokens, false,
          "/out_of_range_tokens"},
    Field{"targets_in_partition", &Result::targets_in_partition, &CFacts::targets_in_partition,
          false, "/targets_in_partition"},
    Field{"denominator", &Result::denominator, &CFacts::denominator, false, "/denominator"},
};

}  // namespace lce
}  // namespace talea
