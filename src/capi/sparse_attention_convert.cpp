// What: see sparse_attention_convert.hpp.
// Why: a caller built against another header, or a zeroed struct, gets an error, never a crash.
// Never: guesses a missing field.
#include "capi/sparse_attention_convert.hpp"

#include <cstddef>

#include "core/fail.hpp"

namespace talea::capi {
namespace {

namespace sa = sparse_attention;
constexpr auto usage = ErrorKind::usage;

template <typename From, typename To>
struct Pair {
  const char* name;
  talea_tensor From::*from;
  Tensor To::*to;
};

using In = talea_sparse_attention_inputs;
using Out = talea_sparse_attention_outputs;
using SelectIn = talea_sparse_attention_select_inputs;
using SelectOut = talea_sparse_attention_select_outputs;
using LossIn = talea_sparse_attention_index_loss_inputs;
using LossOut = talea_sparse_attention_index_loss_outputs;

#define F(name) \
  { #name, &In::name, &sa::Inputs::name }
constexpr Pair<In, sa::Inputs> input_fields[] = {
    F(q),           F(q_scale),    F(kv),           F(kv_scale),     F(indices),
    F(topk_length), F(sink),       F(cu_seqlens_q), F(cu_seqlens_k), F(q_positions),
    F(block_table), F(kv_lengths), F(d_o),          F(d_lse),        F(o),
    F(o_residual),  F(lse)};
#undef F
#define F(name) \
  { #name, &Out::name, &sa::Outputs::name }
constexpr Pair<Out, sa::Outputs> output_fields[] = {F(o),      F(o_residual), F(lse), F(row_max),
                                                    F(status), F(dq),         F(dkv), F(d_sink)};
#undef F
#define F(name) \
  { #name, &SelectIn::name, &sa::SelectInputs::name }
constexpr Pair<SelectIn, sa::SelectInputs> select_input_fields[] = {
    F(index_q), F(index_q_scale), F(index_k),      F(index_k_scale), F(index_weights),
    F(begin),   F(end),           F(cu_seqlens_q), F(cu_seqlens_k),  F(q_positions)};
#undef F
#define F(name) \
  { #name, &SelectOut::name, &sa::SelectOutputs::name }
constexpr Pair<SelectOut, sa::SelectOutputs> select_output_fields[] = {F(indices), F(topk_length),
                                                                       F(scores), F(status)};
#undef F
#define F(name) \
  { #name, &LossIn::name, &sa::IndexLossInputs::name }
constexpr Pair<LossIn, sa::IndexLossInputs> loss_input_fields[] = {
    F(index_q),       F(index_q_scale),
    F(index_k),       F(index_k_scale),
    F(index_weights), F(q),
    F(q_scale),       F(kv),
    F(kv_scale),      F(indices),
    F(topk_length),   F(lse),
    F(row_weight),    F(begin),
    F(end),           F(cu_seqlens_q),
    F(cu_seqlens_k),  F(q_positions)};
#undef F
#define F(name) \
  { #name, &LossOut::name, &sa::IndexLossOutputs::name }
constexpr Pair<LossOut, sa::IndexLossOutputs> loss_output_fields[] = {
    F(loss), F(dindex_q), F(dindex_k), F(dindex_weights), F(status)};
#undef F

// Every tensor of the struct is in its list: struct_bytes, the tensors, then `tail` bytes.
template <typename From, typename To, size_t n>
constexpr bool complete(const Pair<From, To> (&)[n], size_t tail = 0) {
  return sizeof(From) == sizeof(int64_t) + n * sizeof(talea_tensor) + tail;
}
static_assert(complete(input_fields) && complete(output_fields, 8));
static_assert(complete(select_input_fields) && complete(select_output_fields));
static_assert(complete(loss_input_fields) && complete(loss_output_fields, 8));

template <typename From, typename To, size_t n>
void copy_tensors(const char* name, const From* from, const Pair<From, To> (&fields)[n], To& to,
                  MadeUpAddresses& addresses) {
  check_size(name, from);
  for (const auto& f : fields) to.*f.to = tensor(f.name, from->*f.from, addresses);
}

template <typename Enum>
void copy_enum(const char* name, int32_t from, Enum last, Enum& to) {
  to = checked_enum<Enum>(name, from, static_cast<int32_t>(last));
}

void copy_options(const talea_sparse_attention_options* from, sa::Options& to) {
  if (!from) return;
  check_size("options", from);
  to.value_dim = from->value_dim;
  to.scale = from->scale;
  to.q_position_base = from->q_position_base;
  to.causal = from->causal != 0;
  copy_enum("index_space", from->index_space, sa::IndexSpace::slots, to.index_space);
  copy_enum("index_check", from->index_check, sa::IndexCheck::checked, to.index_check);
  copy_enum("kv_storage", from->kv_storage, sa::KvStorage::fp8_656, to.kv_storage);
  copy_enum("fp8_path", from->fp8_path, sa::Fp8Path::in_kernel, to.fp8_path);
  copy_enum("dkv_sum", from->dkv_sum, sa::DkvSum::atomic, to.dkv_sum);
  copy_enum("operands", from->operands, sa::Operands::split, to.operands);
  to.threads = from->threads;
  to.workspace_limit_bytes = from->workspace_limit_bytes;
  if (from->lane) to.lane = from->lane;
}

void copy_options(const talea_sparse_attention_select_options* from, sa::SelectOptions& to) {
  if (!from) return;
  check_size("options", from);
  require(from->reserved == 0, usage, "options: reserved = {}: must be 0", from->reserved);
  to.top_k = from->top_k;
  to.q_position_base = from->q_position_base;
  to.key_stride = from->key_stride;
  copy_enum("act", from->act, sa::Activation::identity, to.act);
  to.causal = from->causal != 0;
  to.threads = from->threads;
  to.workspace_limit_bytes = from->workspace_limit_bytes;
  if (from->lane) to.lane = from->lane;
}

void copy_options(const talea_sparse_attention_index_loss_options* from, sa::IndexLossOptions& to) {
  if (!from) return;
  check_size("options", from);
  to.coeff = from->coeff;
  to.denominator_value = from->denominator_value;
  to.scale = from->scale;
  to.q_position_base = from->q_position_base;
  to.key_stride = from->key_stride;
  copy_enum("keys", from->keys, sa::LossKeys::dense, to.keys);
  copy_enum("denominator", from->denominator, sa::LossDenominator::given, to.denominator);
  copy_enum("denominator_scope", from->denominator_scope, sa::LossScope::global,
            to.denominator_scope);
  copy_enum("act", from->act, sa::Activation::identity, to.act);
  to.causal = from->causal != 0;
  copy_enum("index_space", from->index_space, sa::IndexSpace::slots, to.index_space);
  copy_enum("index_check", from->index_check, sa::IndexCheck::checked, to.index_check);
  copy_enum("kv_storage", from->kv_storage, sa::KvStorage::fp8_656, to.kv_storage);
  copy_enum("dindex_k_sum", from->dindex_k_sum, sa::DkvSum::atomic, to.dindex_k_sum);
  to.threads = from->threads;
  to.workspace_limit_bytes = from->workspace_limit_bytes;
  if (from->lane) to.lane = from->lane;
}

void copy_ranks(const talea_sparse_attention_ranks* from, Purpose purpose, PassArguments& to) {
  if (!from) return;
  check_size("ranks", from);
  const auto callbacks = purpose == Purpose::call ? Callbacks::needed : Callbacks::optional;
  const auto made = [&](const char* name,
                        const talea_communicator* c) -> std::shared_ptr<Communicator> {
    return c ? make_communicator(name, c, callbacks) : nullptr;
  };
  to.heads = made("ranks.heads", from->heads);
  to.sequence = made("ranks.sequence", from->sequence);
  to.batch = made("ranks.batch", from->batch);
  to.ranks.heads = to.heads.get();
  to.ranks.sequence = to.sequence.get();
  to.ranks.batch = to.batch.get();
  to.ranks.head_begin = from->head_begin;
  to.ranks.row_begin = from->row_begin;
  to.ranks.total_heads = from->total_heads;
  to.ranks.total_kv_rows = from->total_kv_rows;
  to.ranks.gather_kv = from->gather_kv != 0;
  to.ranks.handshake = from->skip_handshake == 0;
}

template <typename Arguments, typename Args, typename InFields, typename OutFields>
Arguments converted(const Args* args, Purpose purpose, const InFields& in, const OutFields& out) {
  check_args(args);
  MadeUpAddresses addresses(purpose);
  Arguments to;
  copy_tensors("inputs", args->inputs, in, to.inputs, addresses);
  copy_tensors("outputs", args->outputs, out, to.outputs, addresses);
  copy_options(args->options, to.options);
  copy_ranks(args->ranks, purpose, to);
  to.workspace = {args->workspace, args->workspace_bytes};
  to.stream = args->stream;
  return to;
}

template <typename Options>
void start_defaults(Options* to, int64_t struct_bytes) {
  check_init("options", to, struct_bytes);
  *to = {};  // the enums' first value is the default
  to->struct_bytes = struct_bytes;
}

}  // namespace

AttentionArguments convert(const talea_sparse_attention_args* args, Purpose purpose) {
  auto to = converted<AttentionArguments>(args, purpose, input_fields, output_fields);
  require(args->outputs->reserved == 0, usage, "outputs: reserved = {}: must be 0",
          args->outputs->reserved);
  to.outputs.accumulate_dkv = args->outputs->accumulate_dkv != 0;
  return to;
}

SelectArguments convert(const talea_sparse_attention_select_args* args, Purpose purpose) {
  return converted<SelectArguments>(args, purpose, select_input_fields, select_output_fields);
}

IndexLossArguments convert(const talea_sparse_attention_index_loss_args* args, Purpose purpose) {
  auto to = converted<IndexLossArguments>(args, purpose, loss_input_fields, loss_output_fields);
  require(args->outputs->reserved == 0, usage, "outputs: reserved = {}: must be 0",
          args->outputs->reserved);
  to.outputs.accumulate_dindex_k = args->outputs->accumulate_dindex_k != 0;
  return to;
}

void write_defaults(talea_sparse_attention_options* to, int64_t struct_bytes) {
  start_defaults(to, struct_bytes);
  to->workspace_limit_bytes = sa::Options{}.workspace_limit_bytes;
}

void write_defaults(talea_sparse_attention_select_options* to, int64_t struct_bytes) {
  start_defaults(to, struct_bytes);
  const sa::SelectOptions from;
  to->key_stride = from.key_stride;
  to->workspace_limit_bytes = from.workspace_limit_bytes;
}

void write_defaults(talea_sparse_attention_index_loss_options* to, int64_t struct_bytes) {
  start_defaults(to, struct_bytes);
  const sa::IndexLossOptions from;
  to->coeff = from.coeff;
  to->key_stride = from.key_stride;
  to->workspace_limit_bytes = from.workspace_limit_bytes;
}

talea_sparse_attention_facts facts_of(const sa::Result& r,
                                      const std::vector<talea_lane_decline>& declined,
                                      const std::vector<const char*>& notes) {
  talea_sparse_attention_facts f{};
  f.struct_bytes = sizeof(f);
#define TEXT(name) f.name = r.name.c_str()
  TEXT(lane), TEXT(lane_kind), TEXT(scores_home), TEXT(kv_path), TEXT(operands);
  TEXT(delta_source), TEXT(accumulator_o), TEXT(accumulator_dq), TEXT(accumulator_dkv);
  TEXT(dkv_sum), TEXT(dkv_order), TEXT(lse_base), TEXT(selection_rule);
  TEXT(denominator_kind), TEXT(denominator_scope);
#undef TEXT
#define SAME(name) f.name = r.name
  SAME(workspace_bytes), SAME(slots_given), SAME(slots_valid), SAME(slots_absent);
  SAME(slots_foreign), SAME(first_foreign_slot), SAME(first_foreign_value);
  SAME(scores_tile_rows), SAME(scores_tile_keys), SAME(scores_tile_bytes);
  SAME(full_scores_bytes), SAME(gathered_kv_bytes), SAME(dequantised_kv_bytes);
  SAME(decode_segments), SAME(nan_scores), SAME(flops), SAME(loss), SAME(denominator);
  SAME(forward_repeated);
#undef SAME
  f.pass = static_cast<int32_t>(r.pass);
  f.declined_count = static_cast<int32_t>(declined.size());
  f.declined = declined.data();
  f.notes_count = static_cast<int32_t>(notes.size());
  f.notes = notes.data();
  return f;
}

}  // namespace talea::capi
