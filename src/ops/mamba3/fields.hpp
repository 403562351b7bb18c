// What: the fields of the scan's structs, each list once, and its enums' words.
// Why: C conversion, view checks, handshake, receipt and the tool's flags are loops over these
//      lists, or held to them by a test.
// Never: holds a rule; shapes and dtypes stand in rules.cpp.
#pragma once

#include <iterator>

#include "core/fields.hpp"
#include "talea/mamba3.hpp"
#include "talea/talea.h"

namespace talea {

template <>
struct Words<mamba3::Pass> {
  static constexpr const char* list[] = {"forward", "backward", "step"};
};
template <>
struct Words<mamba3::RotaryPairs> {
  static constexpr const char* list[] = {"automatic", "interleaved", "halves"};
};
template <>
struct Words<mamba3::SequenceCheck> {
  static constexpr const char* list[] = {"automatic", "checked", "clamp"};
};
template <>
struct Words<mamba3::Schedule> {
  static constexpr const char* list[] = {"automatic", "sequential", "parallel"};
};
namespace mamba3 {

using CStates = talea_mamba3_states;
using CInputs = talea_mamba3_inputs;
using CGradients = talea_mamba3_gradients;
using COutputs = talea_mamba3_outputs;
using CStep = talea_mamba3_step_tensors;
using COptions = talea_mamba3_options;
using CFacts = talea_mamba3_facts;

inline constexpr TensorField<Inputs, CInputs, talea_tensor> input_fields[] = {
    {"q", &Inputs::q, &CInputs::q},
    {"k", &Inputs::k, &CInputs::k},
    {"v", &Inputs::v, &CInputs::v},
    {"z", &Inputs::z, &CInputs::z},
    {"adt", &Inputs::adt, &CInputs::adt},
    {"dt", &Inputs::dt, &CInputs::dt},
    {"trap", &Inputs::trap, &CInputs::trap},
    {"angles", &Inputs::angles, &CInputs::angles},
    {"q_bias", &Inputs::q_bias, &CInputs::q_bias},
    {"k_bias", &Inputs::k_bias, &CInputs::k_bias},
    {"d", &Inputs::d, &CInputs::d},
    {"mimo_v", &Inputs::mimo_v, &CInputs::mimo_v},
    {"mimo_z", &Inputs::mimo_z, &CInputs::mimo_z},
    {"mimo_out", &Inputs::mimo_out, &CInputs::mimo_out},
    {"norm_weight", &Inputs::norm_weight, &CInputs::norm_weight},
    {"cu_seqlens", &Inputs::cu_seqlens, &CInputs::cu_seqlens},
    {"d_out", &Inputs::d_out, &CInputs::d_out},
    {"saved", &Inputs::saved, &CInputs::saved},
};

inline constexpr TensorField<Gradients, CGradients, talea_tensor> gradient_fields[] = {
    {"d_q", &Gradients::q, &CGradients::q},
    {"d_k", &Gradients::k, &CGradients::k},
    {"d_v", &Gradients::v, &CGradients::v},
    {"d_z", &Gradients::z, &CGradients::z},
    {"d_adt", &Gradients::adt, &CGradients::adt},
    {"d_dt", &Gradients::dt, &CGradients::dt},
    {"d_trap", &Gradients::trap, &CGradients::trap},
    {"d_angles", &Gradients::angles, &CGradients::angles},
    {"d_q_bias", &Gradients::q_bias, &CGradients::q_bias},
    {"d_k_bias", &Gradients::k_bias, &CGradients::k_bias},
    {"d_d", &Gradients::d, &CGradients::d},
    {"d_mimo_v", &Gradients::mimo_v, &CGradients::mimo_v},
    {"d_mimo_z", &Gradients::mimo_z, &CGradients::mimo_z},
    {"d_mimo_out", &Gradients::mimo_out, &CGradients::mimo_out},
    {"d_norm_weight", &Gradients::norm_weight, &CGradients::norm_weight},
};

inline constexpr TensorField<Outputs, COutputs, talea_tensor> output_fields[] = {
    {"out", &Outputs::out, &COutputs::out},
    {"saved", &Outputs::saved, &COutputs::saved},
    {"status", &Outputs::status, &COutputs::status},
};

// The names of the four states under each prefix.
struct StateNames {
  const char* names[4];
};
inline constexpr Tensor States::*state_members[4] = {&States::angle, &States::ssm, &States::k,
                                                     &States::v};
inline constexpr talea_tensor CStates::*c_state_members[4] = {&CStates::angle, &CStates::ssm,
                                                              &CStates::k, &CStates::v};
inline constexpr StateNames initial_names = {
    {"initial_angle", "initial_ssm", "initial_k", "initial_v"}};
inline constexpr StateNames final_names = {{"final_angle", "final_ssm", "final_k", "final_v"}};
inline constexpr StateNames d_initial_names = {
    {"d_initial_angle", "d_initial_ssm", "d_initial_k", "d_initial_v"}};
inline constexpr StateNames d_final_names = {
    {"d_final_angle", "d_final_ssm", "d_final_k", "d_final_v"}};
inline constexpr StateNames step_state_names = {{"state_angle", "state_ssm", "state_k", "state_v"}};

template <typename S, typename F>
void for_states(S& states, const StateNames& names, F f) {
  for (int i = 0; i < 4; ++i) f(names.names[i], states.*state_members[i]);
}

// f(name, tensor) of every tensor, present or not. In, Out: const or not.
template <typename In, typename F>
void for_inputs(In& in, F f) {
  for (const auto& field : input_fields) f(field.name, in.*field.member);
  for_states(in.initial_states, initial_names, f);
  for_states(in.d_final_states, d_final_names, f);
}
template <typename G, typename F>
void for_gradients(G& d, F f) {
  for (const auto& field : gradient_fields) f(field.name, d.*field.member);
  for_states(d.initial_states, d_initial_names, f);
}
template <typename Out, typename F>
void for_outputs(Out& out, F f) {
  for (const auto& field : output_fields) f(field.name, out.*field.member);
  for_states(out.final_states, final_names, f);
  for_gradients(out.d, f);
}

// Present or not, as the checks of memory take them.
inline std::vector<NamedTensor> tensors_of(const Inputs& in) {
  std::vector<NamedTensor> list;
  for_inputs(in, [&](const char* name, const Tensor& t) { list.push_back({name, &t}); });
  return list;
}
inline std::vector<NamedTensor> tensors_of(const Outputs& out) {
  std::vector<NamedTensor> list;
  for_outputs(out, [&](const char* name, const Tensor& t) { list.push_back({name, &t}); });
  return list;
}

// `agreed`: ranks that share heads or tokens must agree on it.
inline constexpr std::tuple option_fields = {
    Field{"rotary_pairs", &Options::rotary_pairs, &COptions::rotary_pairs},
    Field{"sequence_check", &Options::sequence_check, &COptions::sequence_check},
    Field{"schedule", &Options::schedule, &COptions::schedule, true},
    Field{"head_norm", &Options::head_norm, &COptions::head_norm, true},
    Field{"norm_eps", &Options::norm_eps, &COptions::norm_eps, true},
    Field{"chunk", &Options::chunk, &COptions::chunk, true},
    Field{"workspace_limit_bytes", &Options::workspace_limit_bytes,
          &COptions::workspace_limit_bytes},
    Field{"threads", &Options::threads, &COptions::threads},
    Field{"lane", &Options::lane, &COptions::lane}};

// What a result says of a run, as C has it.
inline constexpr std::tuple fact_fields = {
    Field{"lane", &Result::lane, &CFacts::lane},
    Field{"lane_kind", &Result::lane_kind, &CFacts::lane_kind},
    Field{"memory_order", &Result::memory_order, &CFacts::memory_order},
    Field{"state_home", &Result::state_home, &CFacts::state_home},
    Field{"state_dtype", &Result::state_dtype, &CFacts::state_dtype},
    Field{"accumulator_angle", &Result::accumulator_angle, &CFacts::accumulator_angle},
    Field{"accumulator_decay", &Result::accumulator_decay, &CFacts::accumulator_decay},
    Field{"accumulator_state", &Result::accumulator_state, &CFacts::accumulator_state},
    Field{"accumulator_state_gradient", &Result::accumulator_state_gradient,
          &CFacts::accumulator_state_gradient},
    Field{"accumulator_rows", &Result::accumulator_rows, &CFacts::accumulator_rows},
    Field{"accumulator_parameters", &Result::accumulator_parameters,
          &CFacts::accumulator_parameters},
    Field{"accumulator_groups", &Result::accumulator_groups, &CFacts::accumulator_groups},
    Field{"shared_product", &Result::shared_product, &CFacts::shared_product},
    Field{"pass", &Result::pass, &CFacts::pass},
    Field{"rotary_pairs", &Result::rotary_pairs, &CFacts::rotary_pairs},
    Field{"schedule", &Result::schedule, &CFacts::schedule},
    Field{"threads", &Result::threads, &CFacts::threads},
    Field{"chunk_tokens", &Result::chunk_tokens, &CFacts::chunk_tokens},
    Field{"chunk_rows", &Result::chunk_rows, &CFacts::chunk_rows},
    Field{"per_head_bytes", &Result::per_head_bytes, &CFacts::per_head_bytes},
    Field{"quadratic_bytes", &Result::quadratic_bytes, &CFacts::quadratic_bytes},
    Field{"segment_chunks", &Result::segment_chunks, &CFacts::segment_chunks},
    Field{"saved_bytes", &Result::saved_bytes, &CFacts::saved_bytes},
    Field{"workspace_bytes", &Result::workspace_bytes, &CFacts::workspace_bytes},
    Field{"flops", &Result::flops, &CFacts::flops},
    Field{"padding_tokens", &Result::padding_tokens, &CFacts::padding_tokens},
    Field{"bad_entries", &Result::bad_entries, &CFacts::bad_entries},
    Field{"bad_slots", &Result::bad_slots, &CFacts::bad_slots},
    Field{"states_from_saved", &Result::states_from_saved, &CFacts::states_from_saved}};

}  // namespace mamba3
}  // namespace talea
