// What: the tensors of each struct of this operator, by name, once.
// Why: views, overlap, handshake and the doors are loops over these lists.
// Never: knows what a tensor means.
#pragma once

#include <span>

#include "talea/sparse_attention.hpp"

namespace talea::sparse_attention {

template <typename Struct>
struct Field {
  const char* name;
  Tensor Struct::*member;
};

inline constexpr Field<Inputs> input_fields[] = {{"q", &Inputs::q},
                                                 {"q_scale", &Inputs::q_scale},
                                                 {"kv", &Inputs::kv},
                                                 {"kv_scale", &Inputs::kv_scale},
                                                 {"indices", &Inputs::indices},
                                                 {"topk_length", &Inputs::topk_length},
                                                 {"sink", &Inputs::sink},
                                                 {"cu_seqlens_q", &Inputs::cu_seqlens_q},
                                                 {"cu_seqlens_k", &Inputs::cu_seqlens_k},
                                                 {"q_positions", &Inputs::q_positions},
                                                 {"block_table", &Inputs::block_table},
                                                 {"kv_lengths", &Inputs::kv_lengths},
                                                 {"d_o", &Inputs::d_o},
                                                 {"d_lse", &Inputs::d_lse},
                                                 {"o", &Inputs::o},
                                                 {"o_residual", &Inputs::o_residual},
                                                 {"lse", &Inputs::lse}};

inline constexpr Field<Outputs> output_fields[] = {
    {"o", &Outputs::o},           {"o_residual", &Outputs::o_residual},
    {"lse", &Outputs::lse},       {"row_max", &Outputs::row_max},
    {"status", &Outputs::status}, {"dq", &Outputs::dq},
    {"dkv", &Outputs::dkv},       {"d_sink", &Outputs::d_sink}};

inline constexpr Field<SelectInputs> select_input_fields[] = {
    {"index_q", &SelectInputs::index_q},
    {"index_q_scale", &SelectInputs::index_q_scale},
    {"index_k", &SelectInputs::index_k},
    {"index_k_scale", &SelectInputs::index_k_scale},
    {"index_weights", &SelectInputs::index_weights},
    {"begin", &SelectInputs::begin},
    {"end", &SelectInputs::end},
    {"cu_seqlens_q", &SelectInputs::cu_seqlens_q},
    {"cu_seqlens_k", &SelectInputs::cu_seqlens_k},
    {"q_positions", &SelectInputs::q_positions}};

inline constexpr Field<SelectOutputs> select_output_fields[] = {
    {"indices", &SelectOutputs::indices},
    {"topk_length", &SelectOutputs::topk_length},
    {"scores", &SelectOutputs::scores},
    {"status", &SelectOutputs::status}};

inline constexpr Field<IndexLossInputs> index_loss_input_fields[] = {
    {"index_q", &IndexLossInputs::index_q},
    {"index_q_scale", &IndexLossInputs::index_q_scale},
    {"index_k", &IndexLossInputs::index_k},
    {"index_k_scale", &IndexLossInputs::index_k_scale},
    {"index_weights", &IndexLossInputs::index_weights},
    {"q", &IndexLossInputs::q},
    {"q_scale", &IndexLossInputs::q_scale},
    {"kv", &IndexLossInputs::kv},
    {"kv_scale", &IndexLossInputs::kv_scale},
    {"indices", &IndexLossInputs::indices},
    {"topk_length", &IndexLossInputs::topk_length},
    {"lse", &IndexLossInputs::lse},
    {"row_weight", &IndexLossInputs::row_weight},
    {"begin", &IndexLossInputs::begin},
    {"end", &IndexLossInputs::end},
    {"cu_seqlens_q", &IndexLossInputs::cu_seqlens_q},
    {"cu_seqlens_k", &IndexLossInputs::cu_seqlens_k},
    {"q_positions", &IndexLossInputs::q_positions}};

inline constexpr Field<IndexLossOutputs> index_loss_output_fields[] = {
    {"loss", &IndexLossOutputs::loss},
    {"dindex_q", &IndexLossOutputs::dindex_q},
    {"dindex_k", &IndexLossOutputs::dindex_k},
    {"dindex_weights", &IndexLossOutputs::dindex_weights},
    {"status", &IndexLossOutputs::status}};

}  // namespace talea::sparse_attention
