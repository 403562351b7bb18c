// What: the C functions of the linear cross-entropy operator.
// Why: C struct -> C++ value -> operator, and the status back: nothing else happens here.
// Never: computes, chooses or allocates tensor memory.
#include "capi/guarded.hpp"
#include "capi/phases.hpp"
#include "capi/result.hpp"
#include "capi/tensor.hpp"
#include "ops/linear_cross_entropy/again.hpp"
#include "ops/linear_cross_entropy/fields.hpp"
#include "ops/linear_cross_entropy/receipt.hpp"

struct talea_linear_cross_entropy_prepared {
  talea::lce::Again call;
};

namespace talea::capi {
namespace {

constexpr const char* name = "linear_cross_entropy";

struct Arguments {
  LinearCrossEntropyInputs inputs;
  LinearCrossEntropyOutputs outputs;
  LinearCrossEntropyOptions options;
  LinearCrossEntropyRanks ranks;
  Workspace workspace;
  Stream stream = nullptr;
  std::shared_ptr<Communicator> vocab, batch;  // what ranks points to
};

template <class Struct>
void check_reserved(const char* name, const Struct* s) {
  require(s->reserved == 0, ErrorKind::usage, "{}: reserved = {}: must be 0", name, s->reserved);
}

void read_ranks(const talea_linear_cross_entropy_ranks* from, Purpose purpose, Arguments& to) {
  if (!from) return;
  check_size("ranks", from);
  check_reserved("ranks", from);
  const auto callbacks = purpose == Purpose::call ? Callbacks::needed : Callbacks::optional;
  if (from->vocab) to.vocab = make_communicator("ranks.vocab", from->vocab, callbacks);
  if (from->batch) to.batch = make_communicator("ranks.batch", from->batch, callbacks);
  to.ranks.vocab = to.vocab.get();
  to.ranks.batch = to.batch.get();
  to.ranks.vocab_begin = from->vocab_begin;
  to.ranks.sequence_parallel = from->sequence_parallel != 0;
  to.ranks.handshake = from->skip_handshake == 0;
  to.ranks.dx_sum = checked_enum<DType>("ranks.dx_sum", from->dx_sum, last_value<DType>());
}

// Throws Error(usage) for a struct, enum or pointer that is wrong in itself.
Arguments read(const talea_linear_cross_entropy_args* args, Purpose purpose) {
  check_args(args);
  check_size("inputs", args->inputs);
  check_size("outputs", args->outputs);
  MadeUpAddresses addresses(purpose);
  Arguments to;
  read_tensors(*args->inputs, to.inputs, lce::input_fields, addresses);
  read_tensors(*args->outputs, to.outputs, lce::output_fields, addresses);
  check_reserved("outputs", args->outputs);
  if (args->options) check_reserved("options", args->options);
  to.outputs.accumulate_dw = args->outputs->accumulate_dw != 0;
  to.outputs.accumulate_db = args->outputs->accumulate_db != 0;
  to.outputs.late_factor = args->outputs->late_factor != 0;
  read_options("options", args->options, to.options, lce::option_fields);
  read_ranks(args->ranks, purpose, to);
  to.workspace = {args->workspace, args->workspace_bytes};
  to.stream = args->stream;
  return to;
}

LinearCrossEntropyProblem problem_of(const talea_linear_cross_entropy_args* args) {
  const Arguments a = read(args, Purpose::question);
  return describe(a.inputs, a.outputs, a.options, a.ranks);
}

// The C facts with what their strings and lists point to.
struct Facts {
  LinearCrossEntropyResult result;
  talea_linear_cross_entropy_facts c{};
  std::vector<talea_lane_decline> declined;
  std::vector<const char*> notes;

  explicit Facts(LinearCrossEntropyResult r)
      : result(std::move(r)),
        declined(c_declines(result.declined)),
        notes(c_strings(result.notes)) {
    write_facts(result, c, lce::fact_fields);
    c.declined = declined.data();
    c.declined_count = static_cast<int32_t>(declined.size());
    c.notes = notes.data();
    c.notes_count = static_cast<int32_t>(notes.size());
  }
};

talea_result* result_of(LinearCrossEntropyResult done) {
  std::string json = lce::result_text(done);
  return make_result<Facts>(name, std::move(json), std::make_shared<const Facts>(std::move(done)));
}

LinearCrossEntropyResult run(const Arguments& a, const LinearCrossEntropyRanks& ranks) {
  return linear_cross_entropy(a.inputs, a.outputs, a.options, a.workspace, ranks, a.stream);
}

}  // namespace
}  // namespace talea::capi

namespace capi = talea::capi;
using talea::ErrorKind;
using talea::require;

extern "C" {

talea_status talea_linear_cross_entropy_options_init(talea_linear_cross_entropy_options* options,
                                                     int64_t struct_bytes) {
  return capi::guarded([&] {
    capi::write_defaults<talea::LinearCrossEntropyOptions>(options, struct_bytes,
                                                           talea::lce::option_fields);
  });
}

talea_status talea_linear_cross_entropy_workspace_bytes(const talea_linear_cross_entropy_args* args,
                                                        int64_t* bytes) {
  return capi::guarded([&] {
    require(bytes, ErrorKind::usage, "bytes: null pointer");
    *bytes = talea::workspace_bytes(capi::problem_of(args));
  });
}

talea_status talea_linear_cross_entropy_rest_bytes(const talea_linear_cross_entropy_args* args,
                                                   int64_t* bytes) {
  return capi::guarded([&] {
    require(bytes, ErrorKind::usage, "bytes: null pointer");
    *bytes = talea::rest_bytes(capi::problem_of(args));
  });
}

talea_status talea_linear_cross_entropy_late(const talea_linear_cross_entropy_late_args* args) {
  return capi::guarded([&] {
    capi::check_size("args", args);
    capi::MadeUpAddresses addresses(capi::Purpose::call);
    talea::LinearCrossEntropyLate late;
    capi::read_tensors(*args, late, talea::lce::late_fields, addresses);
    talea::linear_cross_entropy_late(late, args->stream);
  });
}

talea_status talea_require_clean(void) {
  return capi::guarded([] { talea::require_clean(); });
}

const volatile int32_t* talea_fault_flag(void) { return talea::fault_flag(); }

talea_status talea_linear_cross_entropy(const talea_linear_cross_entropy_args* args,
                                        talea_result** result) {
  if (result) *result = nullptr;
  return capi::guarded([&] {
    const capi::Arguments a = capi::read(args, capi::Purpose::call);
    auto done = capi::run(a, a.ranks);
    if (capi::anybody_reads_the_log())
      capi::log_lanes(
          capi::name, done.lane, done.declined,
          fmt::format("{} workspace bytes, {} chunks", done.workspace_bytes, done.chunks));
    if (result) *result = capi::result_of(std::move(done));
  });
}

talea_status talea_linear_cross_entropy_explain(const talea_linear_cross_entropy_args* args,
                                                int32_t format, char* buffer, int64_t buffer_bytes,
                                                int64_t* needed_bytes) {
  return capi::guarded([&] {
    const capi::TextBuffer text = {format, buffer, buffer_bytes, needed_bytes};
    capi::check_buffer(text);
    capi::write_choice(capi::name, talea::explain(capi::problem_of(args)), text);
  });
}

talea_status talea_linear_cross_entropy_phases_begin(const talea_linear_cross_entropy_args* args,
                                                     talea_phases** phases) {
  if (phases) *phases = nullptr;
  return capi::guarded([&] {
    require(phases, ErrorKind::usage, "phases: null pointer");
    const auto a = std::make_shared<const capi::Arguments>(capi::read(args, capi::Purpose::phases));
    using talea::ExchangeGroup;
    *phases =
        capi::begin_phases({{ExchangeGroup::vocab, a->vocab}, {ExchangeGroup::batch, a->batch}},
                           [a](std::span<talea::Communicator* const> c) {
                             talea::LinearCrossEntropyRanks ranks = a->ranks;
                             ranks.vocab = c[0];
                             ranks.batch = c[1];
                             return capi::result_of(capi::run(*a, ranks));
                           });
  });
}

talea_status talea_linear_cross_entropy_prepare(const talea_linear_cross_entropy_args* args,
                                                talea_linear_cross_entropy_prepared** prepared) {
  if (prepared) *prepared = nullptr;
  return capi::guarded([&] {
    require(prepared, ErrorKind::usage, "prepared: null pointer");
    const capi::Arguments a = capi::read(args, capi::Purpose::question);
    require(!args->ranks, ErrorKind::usage, "ranks: a call of several ranks is not prepared");
    *prepared = new talea_linear_cross_entropy_prepared{
        {a.inputs, a.outputs, a.options, a.workspace.bytes}};
  });
}

talea_status talea_linear_cross_entropy_again(const talea_linear_cross_entropy_prepared* prepared,
                                              const talea_linear_cross_entropy_places* places) {
  return capi::guarded([&] {
    require(prepared, ErrorKind::usage, "prepared: null pointer");
    capi::check_size("places", places);
    require(places->count == static_cast<int64_t>(prepared->call.tensors()), ErrorKind::usage,
            "places: {} addresses for {} tensors", places->count, prepared->call.tensors());
    prepared->call.run({places->data, prepared->call.tensors()}, places->workspace, places->stream);
    if (capi::anybody_reads_the_log())
      capi::log_lanes(capi::name, prepared->call.lane(), {}, "as prepared");
  });
}

void talea_linear_cross_entropy_prepared_free(talea_linear_cross_entropy_prepared* prepared) {
  delete prepared;
}

const char* talea_linear_cross_entropy_lanes(void) {
  static const std::string list = capi::comma_list(talea::linear_cross_entropy_lanes());
  return list.c_str();
}

const talea_linear_cross_entropy_facts* talea_linear_cross_entropy_result_facts(
    const talea_result* result) {
  const auto* facts = capi::facts_of<capi::Facts>(result, capi::name);
  return facts ? &facts->c : nullptr;
}

}  // extern "C"
