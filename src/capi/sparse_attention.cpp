// What: the C functions of sparse attention, its selection and the indexer's loss.
// Why: C struct -> C++ value -> operator, and the status back: nothing else happens here.
// Never: computes, chooses or allocates tensor memory.
#include "capi/guarded.hpp"
#include "capi/phases.hpp"
#include "capi/result.hpp"
#include "capi/sparse_attention_convert.hpp"
#include "core/fail.hpp"
#include "ops/sparse_attention/fields.hpp"
#include "ops/sparse_attention/receipt.hpp"

namespace talea::capi {
namespace {

namespace sa = sparse_attention;

constexpr const char* name = "sparse_attention";

// The C facts with what their strings and lists point to.
struct AttentionFacts {
  sa::Result result;
  talea_sparse_attention_facts c{};
  std::vector<talea_lane_decline> declined;
  std::vector<const char*> notes;

  explicit AttentionFacts(sa::Result r)
      : result(std::move(r)),
        declined(c_declines(result.declined)),
        notes(c_strings(result.notes)) {
    write_facts(result, c, sa::fact_fields);
    c.declined = declined.data();
    c.declined_count = static_cast<int32_t>(declined.size());
    c.notes = notes.data();
    c.notes_count = static_cast<int32_t>(notes.size());
  }
};

// A pass, named: what convert() gave, and which of forward and backward it is.
template <typename Arguments>
struct Call {
  Arguments a;
  int32_t pass = TALEA_PASS_FORWARD;
};

int32_t checked_pass(int32_t pass) {
  require(pass == TALEA_PASS_FORWARD || pass == TALEA_PASS_BACKWARD, ErrorKind::usage,
          "pass = {}: must be 0 (forward) or 1 (backward)", pass);
  return pass;
}

sa::Problem problem_of(const Call<AttentionArguments>& c) {
  return sa::describe(static_cast<sa::Pass>(c.pass), c.a.inputs, c.a.outputs, c.a.options,
                      c.a.ranks);
}
template <typename Arguments>
sa::Problem problem_of(const Call<Arguments>& c) {
  return sa::describe(c.a.inputs, c.a.outputs, c.a.options, c.a.ranks);
}

sa::Result run(const Call<AttentionArguments>& c, const sa::Ranks& ranks) {
  const auto pass = c.pass == TALEA_PASS_FORWARD ? sa::forward : sa::backward;
  return pass(c.a.inputs, c.a.outputs, c.a.options, c.a.workspace, ranks, c.a.stream);
}
sa::Result run(const Call<SelectArguments>& c, const sa::Ranks& ranks) {
  return sa::select(c.a.inputs, c.a.outputs, c.a.options, c.a.workspace, ranks, c.a.stream);
}
sa::Result run(const Call<IndexLossArguments>& c, const sa::Ranks& ranks) {
  return sa::index_loss(c.a.inputs, c.a.outputs, c.a.options, c.a.workspace, ranks, c.a.stream);
}

void log(const sa::Result& done) {
  if (!anybody_reads_the_log()) return;
  log_lanes(fmt::format("{} {}", name, sa::name_of(done.pass)).c_str(), done.lane, done.declined,
            fmt::format("{} workspace bytes", done.workspace_bytes));
}

talea_result* result_of(sa::Result done) {
  std::string json = sa::result_text(done);
  return make_result<AttentionFacts>(name, std::move(json),
                                     std::make_shared<const AttentionFacts>(std::move(done)));
}

template <typename Args>
auto call_of(const Args* args, Purpose purpose, int32_t pass = TALEA_PASS_FORWARD) {
  return Call<decltype(convert(args, purpose))>{convert(args, purpose), checked_pass(pass)};
}

template <typename Args>
talea_status workspace_of(const Args* args, int32_t pass, int64_t* bytes) {
  return guarded([&] {
    require(bytes, ErrorKind::usage, "bytes: null pointer");
    *bytes = sa::workspace_bytes(problem_of(call_of(args, Purpose::question, pass)));
  });
}

template <typename Args>
talea_status explained(const Args* args, int32_t pass, const TextBuffer& to) {
  return guarded([&] {
    check_buffer(to);
    write_choice(name, sa::explain(problem_of(call_of(args, Purpose::question, pass))), to);
  });
}

template <typename Args>
talea_status called(const Args* args, int32_t pass, talea_result** result) {
  if (result) *result = nullptr;
  return guarded([&] {
    const auto c = call_of(args, Purpose::call, pass);
    sa::Result done = run(c, c.a.ranks);
    log(done);
    if (result) *result = result_of(std::move(done));
  });
}

template <typename Args>
talea_status begun(const Args* args, int32_t pass, talea_phases** phases) {
  if (phases) *phases = nullptr;
  return guarded([&] {
    require(phases, ErrorKind::usage, "phases: null pointer");
    using Converted = decltype(call_of(args, Purpose::phases, pass));
    auto c = std::make_shared<Converted>(call_of(args, Purpose::phases, pass));
    *phases = begin_phases({{ExchangeGroup::heads, c->a.heads},
                            {ExchangeGroup::sequence, c->a.sequence},
                            {ExchangeGroup::batch, c->a.batch}},
                           [c](std::span<Communicator* const> groups) {
                             sa::Ranks ranks = c->a.ranks;
                             if (ranks.heads) ranks.heads = groups[0];
                             if (ranks.sequence) ranks.sequence = groups[1];
                             if (ranks.batch) ranks.batch = groups[2];
                             sa::Result done = run(*c, ranks);
                             log(done);
                             return result_of(std::move(done));
                           });
  });
}

Tensor given(const char* name, const talea_tensor* from) {
  require(from, ErrorKind::usage, "{}: null pointer", name);
  require(from->present, ErrorKind::usage, "{}: not present", name);
  MadeUpAddresses none(Purpose::call);
  return tensor(name, *from, none);
}

}  // namespace
}  // namespace talea::capi

namespace capi = talea::capi;
namespace sa = talea::sparse_attention;

extern "C" {

talea_status talea_sparse_attention_options_init(talea_sparse_attention_options* options,
                                                 int64_t struct_bytes) {
  return capi::guarded(
      [&] { capi::write_defaults<sa::Options>(options, struct_bytes, sa::option_fields); });
}

talea_status talea_sparse_attention_select_options_init(
    talea_sparse_attention_select_options* options, int64_t struct_bytes) {
  return capi::guarded([&] {
    capi::write_defaults<sa::SelectOptions>(options, struct_bytes, sa::select_option_fields);
  });
}

talea_status talea_sparse_attention_index_loss_options_init(
    talea_sparse_attention_index_loss_options* options, int64_t struct_bytes) {
  return capi::guarded([&] {
    capi::write_defaults<sa::IndexLossOptions>(options, struct_bytes, sa::index_loss_option_fields);
  });
}

talea_status talea_sparse_attention_workspace_bytes(const talea_sparse_attention_args* args,
                                                    int32_t pass, int64_t* bytes) {
  return capi::workspace_of(args, pass, bytes);
}

talea_status talea_sparse_attention_select_workspace_bytes(
    const talea_sparse_attention_select_args* args, int64_t* bytes) {
  return capi::workspace_of(args, TALEA_PASS_FORWARD, bytes);
}

talea_status talea_sparse_attention_index_loss_workspace_bytes(
    const talea_sparse_attention_index_loss_args* args, int64_t* bytes) {
  return capi::workspace_of(args, TALEA_PASS_FORWARD, bytes);
}

talea_status talea_sparse_attention_explain(const talea_sparse_attention_args* args, int32_t pass,
                                            int32_t format, char* buffer, int64_t buffer_bytes,
                                            int64_t* needed_bytes) {
  return capi::explained(args, pass, {format, buffer, buffer_bytes, needed_bytes});
}

talea_status talea_sparse_attention_select_explain(const talea_sparse_attention_select_args* args,
                                                   int32_t format, char* buffer,
                                                   int64_t buffer_bytes, int64_t* needed_bytes) {
  return capi::explained(args, TALEA_PASS_FORWARD, {format, buffer, buffer_bytes, needed_bytes});
}

talea_status talea_sparse_attention_index_loss_explain(
    const talea_sparse_attention_index_loss_args* args, int32_t format, char* buffer,
    int64_t buffer_bytes, int64_t* needed_bytes) {
  return capi::explained(args, TALEA_PASS_FORWARD, {format, buffer, buffer_bytes, needed_bytes});
}

talea_status talea_sparse_attention_forward(const talea_sparse_attention_args* args,
                                            talea_result** result) {
  return capi::called(args, TALEA_PASS_FORWARD, result);
}

talea_status talea_sparse_attention_backward(const talea_sparse_attention_args* args,
                                             talea_result** result) {
  return capi::called(args, TALEA_PASS_BACKWARD, result);
}

talea_status talea_sparse_attention_select(const talea_sparse_attention_select_args* args,
                                           talea_result** result) {
  return capi::called(args, TALEA_PASS_FORWARD, result);
}

talea_status talea_sparse_attention_index_loss(const talea_sparse_attention_index_loss_args* args,
                                               talea_result** result) {
  return capi::called(args, TALEA_PASS_FORWARD, result);
}

talea_status talea_sparse_attention_index_mask(const talea_sparse_attention_args* args,
                                               const talea_tensor* mask) {
  return capi::guarded([&] {
    const auto a = capi::convert(args, capi::Purpose::call);
    sa::index_mask(a.inputs, capi::given("mask", mask), a.options, a.stream);
  });
}

talea_status talea_sparse_attention_pack_rows(const talea_tensor* kv, const talea_tensor* rows,
                                              void* stream) {
  return capi::guarded(
      [&] { sa::pack_rows(capi::given("kv", kv), capi::given("rows", rows), stream); });
}

talea_status talea_sparse_attention_require_clean(const talea_tensor* status, void* stream) {
  return capi::guarded([&] { sa::require_clean(capi::given("status", status), stream); });
}

talea_status talea_sparse_attention_phases_begin(const talea_sparse_attention_args* args,
                                                 int32_t pass, talea_phases** phases) {
  return capi::begun(args, pass, phases);
}

talea_status talea_sparse_attention_select_phases_begin(
    const talea_sparse_attention_select_args* args, talea_phases** phases) {
  return capi::begun(args, TALEA_PASS_FORWARD, phases);
}

talea_status talea_sparse_attention_index_loss_phases_begin(
    const talea_sparse_attention_index_loss_args* args, talea_phases** phases) {
  return capi::begun(args, TALEA_PASS_FORWARD, phases);
}

const char* talea_sparse_attention_lanes(void) {
  static const std::string list = capi::comma_list(sa::lanes());
  return list.c_str();
}

const talea_sparse_attention_facts* talea_sparse_attention_result_facts(
    const talea_result* result) {
  const auto* facts = capi::facts_of<capi::AttentionFacts>(result, capi::name);
  return facts ? &facts->c : nullptr;
}

}  // extern "C"
