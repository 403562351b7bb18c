// What: every tensor of the scan by name, one list a struct.
// Why: views, overlap, handshake, receipt, the C interface and the tools are loops over these
// lists. Never: holds a rule; shapes and dtypes stand in describe.cpp.
#pragma once

#include <iterator>

#include "talea/mamba3.hpp"

namespace talea::mamba3 {

template <typename Struct>
struct Field {
  const char* name;
  Tensor Struct::*member;
};

inline constexpr Field<Inputs> input_fields[] = {
    {"q", &Inputs::q},
    {"k", &Inputs::k},
    {"v", &Inputs::v},
    {"z", &Inputs::z},
    {"adt", &Inputs::adt},
    {"dt", &Inputs::dt},
    {"trap", &Inputs::trap},
    {"angles", &Inputs::angles},
    {"q_bias", &Inputs::q_bias},
    {"k_bias", &Inputs::k_bias},
    {"d", &Inputs::d},
    {"mimo_v", &Inputs::mimo_v},
    {"mimo_z", &Inputs::mimo_z},
    {"mimo_out", &Inputs::mimo_out},
    {"norm_weight", &Inputs::norm_weight},
    {"cu_seqlens", &Inputs::cu_seqlens},
    {"d_out", &Inputs::d_out},
    {"saved", &Inputs::saved},
};

inline constexpr Field<Gradients> gradient_fields[] = {
    {"d_q", &Gradients::q},
    {"d_k", &Gradients::k},
    {"d_v", &Gradients::v},
    {"d_z", &Gradients::z},
    {"d_adt", &Gradients::adt},
    {"d_dt", &Gradients::dt},
    {"d_trap", &Gradients::trap},
    {"d_angles", &Gradients::angles},
    {"d_q_bias", &Gradients::q_bias},
    {"d_k_bias", &Gradients::k_bias},
    {"d_d", &Gradients::d},
    {"d_mimo_v", &Gradients::mimo_v},
    {"d_mimo_z", &Gradients::mimo_z},
    {"d_mimo_out", &Gradients::mimo_out},
    {"d_norm_weight", &Gradients::norm_weight},
};

inline constexpr Field<Outputs> output_fields[] = {
    {"out", &Outputs::out}, {"saved", &Outputs::saved}, {"status", &Outputs::status}};

// The names of the four states under each prefix.
struct StateNames {
  const char* names[4];
};
inline constexpr Tensor States::*state_members[4] = {&States::angle, &States::ssm, &States::k,
                                                     &States::v};
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

}  // namespace talea::mamba3
