// What: the C members of the scan's structs beside the C++ ones, a list a struct.
// Why: conversion is a loop over these lists, whose lengths are held to those of fields.hpp.
// Never: holds a rule, or a name that fields.hpp does not have.
#pragma once

#include <tuple>

#include "core/fields.hpp"
#include "ops/mamba3/fields.hpp"
#include "ops/mamba3/words.hpp"
#include "talea/talea.h"

namespace talea::mamba3 {

using CStates = talea_mamba3_states;
using CInputs = talea_mamba3_inputs;
using CGradients = talea_mamba3_gradients;
using COutputs = talea_mamba3_outputs;
using CStep = talea_mamba3_step_tensors;
using COptions = talea_mamba3_options;
using CFacts = talea_mamba3_facts;

inline constexpr talea_tensor CStates::*c_states[] = {&CStates::angle, &CStates::ssm, &CStates::k,
                                                      &CStates::v};
inline constexpr talea_tensor CInputs::*c_inputs[] = {
    &CInputs::q,      &CInputs::k,        &CInputs::v,           &CInputs::z,
    &CInputs::adt,    &CInputs::dt,       &CInputs::trap,        &CInputs::angles,
    &CInputs::q_bias, &CInputs::k_bias,   &CInputs::d,           &CInputs::mimo_v,
    &CInputs::mimo_z, &CInputs::mimo_out, &CInputs::norm_weight, &CInputs::cu_seqlens,
    &CInputs::d_out,  &CInputs::saved};
inline constexpr talea_tensor CGradients::*c_gradients[] = {
    &CGradients::q,      &CGradients::k,        &CGradients::v,          &CGradients::z,
    &CGradients::adt,    &CGradients::dt,       &CGradients::trap,       &CGradients::angles,
    &CGradients::q_bias, &CGradients::k_bias,   &CGradients::d,          &CGradients::mimo_v,
    &CGradients::mimo_z, &CGradients::mimo_out, &CGradients::norm_weight};
inline constexpr talea_tensor COutputs::*c_outputs[] = {&COutputs::out, &COutputs::saved,
                                                        &COutputs::status};
static_assert(std::size(c_states) == std::size(state_members));
static_assert(std::size(c_inputs) == std::size(input_fields));
static_assert(std::size(c_gradients) == std::size(gradient_fields));
static_assert(std::size(c_outputs) == std::size(output_fields));

inline constexpr std::tuple option_fields = {
    talea::Field{"rotary_pairs", &Options::rotary_pairs, &COptions::rotary_pairs},
    talea::Field{"sequence_check", &Options::sequence_check, &COptions::sequence_check},
    talea::Field{"schedule", &Options::schedule, &COptions::schedule},
    talea::Field{"head_norm", &Options::head_norm, &COptions::head_norm},
    talea::Field{"norm_eps", &Options::norm_eps, &COptions::norm_eps},
    talea::Field{"chunk", &Options::chunk, &COptions::chunk},
    talea::Field{"workspace_limit_bytes", &Options::workspace_limit_bytes,
                 &COptions::workspace_limit_bytes},
    talea::Field{"threads", &Options::threads, &COptions::threads},
    talea::Field{"lane", &Options::lane, &COptions::lane}};

inline constexpr std::tuple fact_fields = {
    talea::Field{"lane", &Result::lane, &CFacts::lane},
    talea::Field{"lane_kind", &Result::lane_kind, &CFacts::lane_kind},
    talea::Field{"memory_order", &Result::memory_order, &CFacts::memory_order},
    talea::Field{"state_home", &Result::state_home, &CFacts::state_home},
    talea::Field{"state_dtype", &Result::state_dtype, &CFacts::state_dtype},
    talea::Field{"accumulator_angle", &Result::accumulator_angle, &CFacts::accumulator_angle},
    talea::Field{"accumulator_decay", &Result::accumulator_decay, &CFacts::accumulator_decay},
    talea::Field{"accumulator_state", &Result::accumulator_state, &CFacts::accumulator_state},
    talea::Field{"accumulator_state_gradient", &Result::accumulator_state_gradient,
                 &CFacts::accumulator_state_gradient},
    talea::Field{"accumulator_rows", &Result::accumulator_rows, &CFacts::accumulator_rows},
    talea::Field{"accumulator_parameters", &Result::accumulator_parameters,
                 &CFacts::accumulator_parameters},
    talea::Field{"accumulator_groups", &Result::accumulator_groups, &CFacts::accumulator_groups},
    talea::Field{"shared_product", &Result::shared_product, &CFacts::shared_product},
    talea::Field{"pass", &Result::pass, &CFacts::pass},
    talea::Field{"rotary_pairs", &Result::rotary_pairs, &CFacts::rotary_pairs},
    talea::Field{"schedule", &Result::schedule, &CFacts::schedule},
    talea::Field{"threads", &Result::threads, &CFacts::threads},
    talea::Field{"chunk_tokens", &Result::chunk_tokens, &CFacts::chunk_tokens},
    talea::Field{"chunk_rows", &Result::chunk_rows, &CFacts::chunk_rows},
    talea::Field{"per_head_bytes", &Result::per_head_bytes, &CFacts::per_head_bytes},
    talea::Field{"quadratic_bytes", &Result::quadratic_bytes, &CFacts::quadratic_bytes},
    talea::Field{"segment_chunks", &Result::segment_chunks, &CFacts::segment_chunks},
    talea::Field{"saved_bytes", &Result::saved_bytes, &CFacts::saved_bytes},
    talea::Field{"workspace_bytes", &Result::workspace_bytes, &CFacts::workspace_bytes},
    talea::Field{"flops", &Result::flops, &CFacts::flops},
    talea::Field{"padding_tokens", &Result::padding_tokens, &CFacts::padding_tokens},
    talea::Field{"bad_entries", &Result::bad_entries, &CFacts::bad_entries},
    talea::Field{"bad_slots", &Result::bad_slots, &CFacts::bad_slots},
    talea::Field{"states_from_saved", &Result::states_from_saved, &CFacts::states_from_saved}};

}  // namespace talea::mamba3
