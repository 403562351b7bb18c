// What: the fields of sparse attention's structs, each list once, and its enums' words.
// Why: C conversion, view checks, handshake, receipt and facts are loops over these lists.
// Never: a second list of the same fields elsewhere, or what a tensor means.
#pragma once

#include <tuple>

#include "core/fields.hpp"
#include "talea/sparse_attention.hpp"
#include "talea/talea.h"

namespace talea {

template <>
struct Words<sparse_attention::Pass> {
  static constexpr const char* list[] = {"forward", "backward", "select", "index_loss"};
};
template <>
struct Words<sparse_attention::IndexSpace> {
  static constexpr const char* list[] = {"rows", "sequence", "slots"};
};
template <>
struct Words<sparse_attention::IndexCheck> {
  static constexpr const char* list[] = {"ignore", "report", "checked"};
};
template <>
struct Words<sparse_attention::KvStorage> {
  static constexpr const char* list[] = {"plain", "fp8_scaled", "fp8_656"};
};
template <>
struct Words<sparse_attention::Fp8Path> {
  static constexpr const char* list[] = {"any", "in_kernel"};
};
template <>
struct Words<sparse_attention::DkvSum> {
  static constexpr const char* list[] = {"deterministic", "atomic"};
};
template <>
struct Words<sparse_attention::Operands> {
  static constexpr const char* list[] = {"native", "split"};
};
template <>
struct Words<sparse_attention::Activation> {
  static constexpr const char* list[] = {"relu", "identity"};
};
template <>
struct Words<sparse_attention::LossKeys> {
  static constexpr const char* list[] = {"sparse", "dense"};
};
template <>
struct Words<sparse_attention::LossDenominator> {
  static constexpr const char* list[] = {"valid", "given"};
};
template <>
struct Words<sparse_attention::LossScope> {
  static constexpr const char* list[] = {"local", "global"};
};

namespace sparse_attention {

using CInputs = talea_sparse_attention_inputs;
using COutputs = talea_sparse_attention_outputs;
using COptions = talea_sparse_attention_options;
using CSelectInputs = talea_sparse_attention_select_inputs;
using CSelectOutputs = talea_sparse_attention_select_outputs;
using CSelectOptions = talea_sparse_attention_select_options;
using CIndexLossInputs = talea_sparse_attention_index_loss_inputs;
using CIndexLossOutputs = talea_sparse_attention_index_loss_outputs;
using CIndexLossOptions = talea_sparse_attention_index_loss_options;
using CFacts = talea_sparse_attention_facts;

inline constexpr TensorField<Inputs, CInputs, talea_tensor> input_fields[] = {
    {"q", &Inputs::q, &CInputs::q},
    {"q_scale", &Inputs::q_scale, &CInputs::q_scale},
    {"kv", &Inputs::kv, &CInputs::kv},
    {"kv_scale", &Inputs::kv_scale, &CInputs::kv_scale},
    {"indices", &Inputs::indices, &CInputs::indices},
    {"topk_length", &Inputs::topk_length, &CInputs::topk_length},
    {"sink", &Inputs::sink, &CInputs::sink},
    {"cu_seqlens_q", &Inputs::cu_seqlens_q, &CInputs::cu_seqlens_q},
    {"cu_seqlens_k", &Inputs::cu_seqlens_k, &CInputs::cu_seqlens_k},
    {"q_positions", &Inputs::q_positions, &CInputs::q_positions},
    {"block_table", &Inputs::block_table, &CInputs::block_table},
    {"kv_lengths", &Inputs::kv_lengths, &CInputs::kv_lengths},
    {"d_o", &Inputs::d_o, &CInputs::d_o},
    {"d_lse", &Inputs::d_lse, &CInputs::d_lse},
    {"o", &Inputs::o, &CInputs::o},
    {"o_residual", &Inputs::o_residual, &CInputs::o_residual},
    {"lse", &Inputs::lse, &CInputs::lse},
};

inline constexpr TensorField<Outputs, COutputs, talea_tensor> output_fields[] = {
    {"o", &Outputs::o, &COutputs::o},
    {"o_residual", &Outputs::o_residual, &COutputs::o_residual},
    {"lse", &Outputs::lse, &COutputs::lse},
    {"row_max", &Outputs::row_max, &COutputs::row_max},
    {"status", &Outputs::status, &COutputs::status},
    {"dq", &Outputs::dq, &COutputs::dq},
    {"dkv", &Outputs::dkv, &COutputs::dkv},
    {"d_sink", &Outputs::d_sink, &COutputs::d_sink},
};

inline constexpr TensorField<SelectInputs, CSelectInputs, talea_tensor> select_input_fields[] = {
    {"index_q", &SelectInputs::index_q, &CSelectInputs::index_q},
    {"index_q_scale", &SelectInputs::index_q_scale, &CSelectInputs::index_q_scale},
    {"index_k", &SelectInputs::index_k, &CSelectInputs::index_k},
    {"index_k_scale", &SelectInputs::index_k_scale, &CSelectInputs::index_k_scale},
    {"index_weights", &SelectInputs::index_weights, &CSelectInputs::index_weights},
    {"begin", &SelectInputs::begin, &CSelectInputs::begin},
    {"end", &SelectInputs::end, &CSelectInputs::end},
    {"cu_seqlens_q", &SelectInputs::cu_seqlens_q, &CSelectInputs::cu_seqlens_q},
    {"cu_seqlens_k", &SelectInputs::cu_seqlens_k, &CSelectInputs::cu_seqlens_k},
    {"q_positions", &SelectInputs::q_positions, &CSelectInputs::q_positions},
};

inline constexpr TensorField<SelectOutputs, CSelectOutputs, talea_tensor> select_output_fields[] = {
    {"indices", &SelectOutputs::indices, &CSelectOutputs::indices},
    {"topk_length", &SelectOutputs::topk_length, &CSelectOutputs::topk_length},
    {"scores", &SelectOutputs::scores, &CSelectOutputs::scores},
    {"status", &SelectOutputs::status, &CSelectOutputs::status},
};

inline constexpr TensorField<IndexLossInputs, CIndexLossInputs, talea_tensor>
    index_loss_input_fields[] = {
        {"index_q", &IndexLossInputs::index_q, &CIndexLossInputs::index_q},
        {"index_q_scale", &IndexLossInputs::index_q_scale, &CIndexLossInputs::index_q_scale},
        {"index_k", &IndexLossInputs::index_k, &CIndexLossInputs::index_k},
        {"index_k_scale", &IndexLossInputs::index_k_scale, &CIndexLossInputs::index_k_scale},
        {"index_weights", &IndexLossInputs::index_weights, &CIndexLossInputs::index_weights},
        {"q", &IndexLossInputs::q, &CIndexLossInputs::q},
        {"q_scale", &IndexLossInputs::q_scale, &CIndexLossInputs::q_scale},
        {"kv", &IndexLossInputs::kv, &CIndexLossInputs::kv},
        {"kv_scale", &IndexLossInputs::kv_scale, &CIndexLossInputs::kv_scale},
        {"indices", &IndexLossInputs::indices, &CIndexLossInputs::indices},
        {"topk_length", &IndexLossInputs::topk_length, &CIndexLossInputs::topk_length},
        {"lse", &IndexLossInputs::lse, &CIndexLossInputs::lse},
        {"row_weight", &IndexLossInputs::row_weight, &CIndexLossInputs::row_weight},
        {"begin", &IndexLossInputs::begin, &CIndexLossInputs::begin},
        {"end", &IndexLossInputs::end, &CIndexLossInputs::end},
        {"cu_seqlens_q", &IndexLossInputs::cu_seqlens_q, &CIndexLossInputs::cu_seqlens_q},
        {"cu_seqlens_k", &IndexLossInputs::cu_seqlens_k, &CIndexLossInputs::cu_seqlens_k},
        {"q_positions", &IndexLossInputs::q_positions, &CIndexLossInputs::q_positions},
};

inline constexpr TensorField<IndexLossOutputs, CIndexLossOutputs, talea_tensor>
    index_loss_output_fields[] = {
        {"loss", &IndexLossOutputs::loss, &CIndexLossOutputs::loss},
        {"dindex_q", &IndexLossOutputs::dindex_q, &CIndexLossOutputs::dindex_q},
        {"dindex_k", &IndexLossOutputs::dindex_k, &CIndexLossOutputs::dindex_k},
        {"dindex_weights", &IndexLossOutputs::dindex_weights, &CIndexLossOutputs::dindex_weights},
        {"status", &IndexLossOutputs::status, &CIndexLossOutputs::status},
};

// Every tensor of the C struct is in its list: struct_bytes, the tensors, then `tail` bytes.
template <class Struct, class CStruct, size_t n>
constexpr bool complete(const TensorField<Struct, CStruct, talea_tensor> (&)[n], size_t tail = 0) {
  return sizeof(CStruct) == sizeof(int64_t) + n * sizeof(talea_tensor) + tail;
}
static_assert(complete(input_fields) && complete(output_fields, 8));
static_assert(complete(select_input_fields) && complete(select_output_fields));
static_assert(complete(index_loss_input_fields) && complete(index_loss_output_fields, 8));

// `agreed`: ranks must agree on it. Of scale and value_dim the handshake compares what is applied.
inline constexpr std::tuple option_fields = {
    Field{"value_dim", &Options::value_dim, &COptions::value_dim},
    Field{"scale", &Options::scale, &COptions::scale},
    Field{"causal", &Options::causal, &COptions::causal, true},
    Field{"q_position_base", &Options::q_position_base, &COptions::q_position_base},
    Field{"index_space", &Options::index_space, &COptions::index_space, true},
    Field{"index_check", &Options::index_check, &COptions::index_check, true},
    Field{"kv_storage", &Options::kv_storage, &COptions::kv_storage, true},
    Field{"fp8_path", &Options::fp8_path, &COptions::fp8_path, true},
    Field{"dkv_sum", &Options::dkv_sum, &COptions::dkv_sum, true},
    Field{"operands", &Options::operands, &COptions::operands, true},
    Field{"workspace_limit_bytes", &Options::workspace_limit_bytes,
          &COptions::workspace_limit_bytes},
    Field{"threads", &Options::threads, &COptions::threads},
    Field{"lane", &Options::lane, &COptions::lane},
};

inline constexpr std::tuple select_option_fields = {
    Field{"top_k", &SelectOptions::top_k, &CSelectOptions::top_k},
    Field{"act", &SelectOptions::act, &CSelectOptions::act, true},
    Field{"causal", &SelectOptions::causal, &CSelectOptions::causal, true},
    Field{"q_position_base", &SelectOptions::q_position_base, &CSelectOptions::q_position_base},
    Field{"key_stride", &SelectOptions::key_stride, &CSelectOptions::key_stride, true},
    Field{"workspace_limit_bytes", &SelectOptions::workspace_limit_bytes,
          &CSelectOptions::workspace_limit_bytes},
    Field{"threads", &SelectOptions::threads, &CSelectOptions::threads},
    Field{"lane", &SelectOptions::lane, &CSelectOptions::lane},
};

inline constexpr std::tuple index_loss_option_fields = {
    Field{"keys", &IndexLossOptions::keys, &CIndexLossOptions::keys, true},
    Field{"coeff", &IndexLossOptions::coeff, &CIndexLossOptions::coeff, true},
    Field{"denominator", &IndexLossOptions::denominator, &CIndexLossOptions::denominator, true},
    Field{"denominator_value", &IndexLossOptions::denominator_value,
          &CIndexLossOptions::denominator_value, true},
    Field{"denominator_scope", &IndexLossOptions::denominator_scope,
          &CIndexLossOptions::denominator_scope, true},
    Field{"act", &IndexLossOptions::act, &CIndexLossOptions::act, true},
    Field{"scale", &IndexLossOptions::scale, &CIndexLossOptions::scale},
    Field{"causal", &IndexLossOptions::causal, &CIndexLossOptions::causal, true},
    Field{"q_position_base", &IndexLossOptions::q_position_base,
          &CIndexLossOptions::q_position_base},
    Field{"key_stride", &IndexLossOptions::key_stride, &CIndexLossOptions::key_stride, true},
    Field{"index_space", &IndexLossOptions::index_space, &CIndexLossOptions::index_space, true},
    Field{"index_check", &IndexLossOptions::index_check, &CIndexLossOptions::index_check, true},
    Field{"kv_storage", &IndexLossOptions::kv_storage, &CIndexLossOptions::kv_storage, true},
    Field{"dindex_k_sum", &IndexLossOptions::dindex_k_sum, &CIndexLossOptions::dindex_k_sum, true},
    Field{"workspace_limit_bytes", &IndexLossOptions::workspace_limit_bytes,
          &CIndexLossOptions::workspace_limit_bytes},
    Field{"threads", &IndexLossOptions::threads, &CIndexLossOptions::threads},
    Field{"lane", &IndexLossOptions::lane, &CIndexLossOptions::lane},
};

// What a result says of a run, with its place in the receipt's JSON.
inline constexpr std::tuple fact_fields = {
    Field{"pass", &Result::pass, &CFacts::pass, false, "/pass"},
    Field{"lane", &Result::lane, &CFacts::lane, false, "/lane"},
    Field{"lane_kind", &Result::lane_kind, &CFacts::lane_kind, false, "/lane_kind"},
    Field{"scores_home", &Result::scores_home, &CFacts::scores_home, false, "/scores/home"},
    Field{"scores_tile_rows", &Result::scores_tile_rows, &CFacts::scores_tile_rows, false,
          "/scores/tile_rows"},
    Field{"scores_tile_keys", &Result::scores_tile_keys, &CFacts::scores_tile_keys, false,
          "/scores/tile_keys"},
    Field{"scores_tile_bytes", &Result::scores_tile_bytes, &CFacts::scores_tile_bytes, false,
          "/scores/tile_bytes"},
    Field{"full_scores_bytes", &Result::full_scores_bytes, &CFacts::full_scores_bytes, false,
          "/scores/full_scores_bytes"},
    Field{"kv_path", &Result::kv_path, &CFacts::kv_path, false, "/kv/path"},
    Field{"gathered_kv_bytes", &Result::gathered_kv_bytes, &CFacts::gathered_kv_bytes, false,
          "/kv/gathered_bytes"},
    Field{"dequantised_kv_bytes", &Result::dequantised_kv_bytes, &CFacts::dequantised_kv_bytes,
          false, "/kv/dequantised_bytes"},
    Field{"decode_segments", &Result::decode_segments, &CFacts::decode_segments, false,
          "/kv/decode_segments"},
    Field{"operands", &Result::operands, &CFacts::operands, false, "/numerics/operands"},
    Field{"delta_source", &Result::delta_source, &CFacts::delta_source, false,
          "/numerics/delta_source"},
    Field{"accumulator_o", &Result::accumulator_o, &CFacts::accumulator_o, false,
          "/numerics/accumulator_o"},
    Field{"accumulator_dq", &Result::accumulator_dq, &CFacts::accumulator_dq, false,
          "/numerics/accumulator_dq"},
    Field{"accumulator_dkv", &Result::accumulator_dkv, &CFacts::accumulator_dkv, false,
          "/numerics/accumulator_dkv"},
    Field{"dkv_sum", &Result::dkv_sum, &CFacts::dkv_sum, false, "/numerics/dkv_sum"},
    Field{"dkv_order", &Result::dkv_order, &CFacts::dkv_order, false, "/numerics/dkv_order"},
    Field{"lse_base", &Result::lse_base, &CFacts::lse_base, false, "/numerics/lse_base"},
    Field{"forward_repeated", &Result::forward_repeated, &CFacts::forward_repeated, false,
          "/numerics/forward_repeated"},
    Field{"slots_given", &Result::slots_given, &CFacts::slots_given, false, "/slots/given"},
    Field{"slots_valid", &Result::slots_valid, &CFacts::slots_valid, false, "/slots/valid"},
    Field{"slots_absent", &Result::slots_absent, &CFacts::slots_absent, false, "/slots/absent"},
    Field{"slots_foreign", &Result::slots_foreign, &CFacts::slots_foreign, false, "/slots/foreign"},
    Field{"first_foreign_slot", &Result::first_foreign_slot, &CFacts::first_foreign_slot, false,
          "/slots/first_foreign_slot"},
    Field{"first_foreign_value", &Result::first_foreign_value, &CFacts::first_foreign_value, false,
          "/slots/first_foreign_value"},
    Field{"selection_rule", &Result::selection_rule, &CFacts::selection_rule, false,
          "/indexer/selection_rule"},
    Field{"nan_scores", &Result::nan_scores, &CFacts::nan_scores, false, "/indexer/nan_scores"},
    Field{"loss", &Result::loss, &CFacts::loss, false, "/indexer/loss"},
    Field{"denominator", &Result::denominator, &CFacts::denominator, false,
          "/indexer/denominator/value"},
    Field{"denominator_kind", &Result::denominator_kind, &CFacts::denominator_kind, false,
          "/indexer/denominator/kind"},
    Field{"denominator_scope", &Result::denominator_scope, &CFacts::denominator_scope, false,
          "/indexer/denominator/scope"},
    Field{"workspace_bytes", &Result::workspace_bytes, &CFacts::workspace_bytes, false,
          "/workspace_bytes"},
    Field{"flops", &Result::flops, &CFacts::flops, false, "/flops"},
};

}  // namespace sparse_attention
}  // namespace talea
