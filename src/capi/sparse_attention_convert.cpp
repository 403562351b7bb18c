// What: see sparse_attention_convert.hpp.
// Why: a caller built against another header, or a zeroed struct, gets an error, never a crash.
// Never: guesses a missing field.
#include "capi/sparse_attention_convert.hpp"

#include "core/fail.hpp"
#include "ops/sparse_attention/fields.hpp"

namespace talea::capi {
namespace {

namespace sa = sparse_attention;
constexpr auto usage = ErrorKind::usage;

void read_ranks(const talea_sparse_attention_ranks* from, Purpose purpose, PassArguments& to) {
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

// The fields of a pass, as sparse_attention/fields.hpp lists them.
template <class In, class Out, class Options>
struct PassFields {
  const In& in;
  const Out& out;
  const Options& options;
};
template <class In, class Out, class Options>
PassFields(const In&, const Out&, const Options&) -> PassFields<In, Out, Options>;

template <class Arguments, class Args, class Fields>
Arguments converted(const Args* args, Purpose purpose, const Fields& fields) {
  check_args(args);
  check_size("inputs", args->inputs);
  check_size("outputs", args->outputs);
  MadeUpAddresses addresses(purpose);
  Arguments to;
  read_tensors(*args->inputs, to.inputs, fields.in, addresses);
  read_tensors(*args->outputs, to.outputs, fields.out, addresses);
  read_options("options", args->options, to.options, fields.options);
  read_ranks(args->ranks, purpose, to);
  to.workspace = {args->workspace, args->workspace_bytes};
  to.stream = args->stream;
  return to;
}

template <class Struct>
void check_reserved(const char* name, const Struct* s) {
  if (s) require(s->reserved == 0, usage, "{}: reserved = {}: must be 0", name, s->reserved);
}

}  // namespace

AttentionArguments convert(const talea_sparse_attention_args* args, Purpose purpose) {
  auto to = converted<AttentionArguments>(
      args, purpose, PassFields{sa::input_fields, sa::output_fields, sa::option_fields});
  check_reserved("outputs", args->outputs);
  to.outputs.accumulate_dkv = args->outputs->accumulate_dkv != 0;
  return to;
}

SelectArguments convert(const talea_sparse_attention_select_args* args, Purpose purpose) {
  auto to = converted<SelectArguments>(
      args, purpose,
      PassFields{sa::select_input_fields, sa::select_output_fields, sa::select_option_fields});
  check_reserved("options", args->options);
  return to;
}

IndexLossArguments convert(const talea_sparse_attention_index_loss_args* args, Purpose purpose) {
  auto to = converted<IndexLossArguments>(
      args, purpose,
      PassFields{sa::index_loss_input_fields, sa::index_loss_output_fields,
                 sa::index_loss_option_fields});
  check_reserved("outputs", args->outputs);
  to.outputs.accumulate_dindex_k = args->outputs->accumulate_dindex_k != 0;
  return to;
}

}  // namespace talea::capi
