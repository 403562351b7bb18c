// What: the C functions of the Mamba-3 scan.
// Why: C struct -> C++ value -> operator, and the status back: nothing else happens here.
// Never: computes, chooses or allocates tensor memory.
#include "capi/guarded.hpp"
#include "capi/phases.hpp"
#include "capi/result.hpp"
#include "capi/tensor.hpp"
#include "ops/mamba3/fields.hpp"
#include "ops/mamba3/receipt.hpp"

namespace talea::capi {
namespace {

namespace m3 = mamba3;
constexpr const char* name = "mamba3";

struct Arguments {
  m3::Inputs inputs;
  m3::Outputs outputs;
  m3::StepArguments step;
  m3::Options options;
  m3::Ranks ranks;
  Workspace workspace;
  Stream stream = nullptr;
  std::shared_ptr<Communicator> heads, sequence;  // what ranks points to
};

void read_states(const m3::StateNames& names, const m3::CStates& from, m3::States& to,
                 MadeUpAddresses& addresses) {
  for (size_t i = 0; i < std::size(m3::state_members); ++i)
    to.*m3::state_members[i] = tensor(names.names[i], from.*m3::c_state_members[i], addresses);
}

void read_inputs(const m3::CInputs* from, m3::Inputs& to, MadeUpAddresses& addresses) {
  check_size("inputs", from);
  read_tensors(*from, to, m3::input_fields, addresses);
  read_states(m3::initial_names, from->initial_states, to.initial_states, addresses);
  read_states(m3::d_final_names, from->d_final_states, to.d_final_states, addresses);
}

void read_outputs(const m3::COutputs* from, m3::Outputs& to, MadeUpAddresses& addresses) {
  check_size("outputs", from);
  read_tensors(*from, to, m3::output_fields, addresses);
  read_states(m3::final_names, from->final_states, to.final_states, addresses);
  const m3::CGradients& d = from->d;
  read_tensors(d, to.d, m3::gradient_fields, addresses);
  read_states(m3::d_initial_names, d.initial_states, to.d.initial_states, addresses);
  require(d.reserved == 0, ErrorKind::usage, "outputs.d: reserved = {}: must be 0", d.reserved);
  to.d.accumulate_parameters = d.accumulate_parameters != 0;
}

void read_step(const m3::CStep* from, const m3::Inputs& inputs, m3::StepArguments& to,
               MadeUpAddresses& addresses) {
  check_size("step", from);
  to.in = inputs;
  to.slots = tensor("slots", from->slots, addresses);
  to.out = tensor("out", from->out, addresses);
  to.status = tensor("status", from->status, addresses);
  read_states(m3::step_state_names, from->state, to.state, addresses);
}

void read_ranks(const talea_mamba3_ranks* from, Purpose purpose, Arguments& to) {
  if (!from) return;
  check_size("ranks", from);
  require(from->shared_angles == 0 || from->shared_angles == 1, ErrorKind::usage,
          "ranks: shared_angles = {}: must be 0 or 1", from->shared_angles);
  const auto callbacks = purpose == Purpose::call ? Callbacks::needed : Callbacks::optional;
  if (from->heads) to.heads = make_communicator("ranks.heads", from->heads, callbacks);
  if (from->sequence) to.sequence = make_communicator("ranks.sequence", from->sequence, callbacks);
  to.ranks.heads = to.heads.get();
  to.ranks.sequence = to.sequence.get();
  to.ranks.head_begin = from->head_begin;
  to.ranks.total_heads = from->total_heads;
  to.ranks.total_groups = from->total_groups;
  to.ranks.token_begin = from->token_begin;
  to.ranks.shared_angles = from->shared_angles != 0;
  to.ranks.handshake = from->skip_handshake == 0;
}

// Throws Error(usage) for a struct, enum or pointer that is wrong in itself.
Arguments read(const talea_mamba3_args* args, m3::Pass pass, Purpose purpose) {
  check_args(args);
  MadeUpAddresses addresses(purpose);
  Arguments to;
  read_inputs(args->inputs, to.inputs, addresses);
  if (pass == m3::Pass::step)
    read_step(args->step, to.inputs, to.step, addresses);
  else
    read_outputs(args->outputs, to.outputs, addresses);
  read_options("options", args->options, to.options, m3::option_fields);
  require(!args->options || args->options->reserved == 0, ErrorKind::usage,
          "options: reserved = {}: must be 0", args->options ? args->options->reserved : 0);
  if (pass == m3::Pass::step)
    require(!args->ranks, ErrorKind::usage, "ranks: a step has none");
  else
    read_ranks(args->ranks, purpose, to);
  to.workspace = {args->workspace, args->workspace_bytes};
  to.stream = args->stream;
  return to;
}

m3::Pass pass_of(int32_t pass) {
  return checked_enum<m3::Pass>("pass", pass, last_value<m3::Pass>());
}

m3::Problem problem_of(const talea_mamba3_args* args, m3::Pass pass) {
  const Arguments a = read(args, pass, Purpose::question);
  return pass == m3::Pass::step ? describe(a.step, a.options)
                                : describe(pass, a.inputs, a.outputs, a.options, a.ranks);
}

// The C facts with what their strings and lists point to.
struct Facts {
  m3::Result result;
  m3::CFacts c{};
  std::vector<talea_lane_decline> declined;
  std::vector<const char*> notes;
  std::vector<talea_mamba3_product> products;
  std::vector<talea_mamba3_exchange> exchanges;

  explicit Facts(m3::Result r)
      : result(std::move(r)),
        declined(c_declines(result.declined)),
        notes(c_strings(result.notes)) {
    for (const m3::ProductFact& p : result.products)
      products.push_back({p.name.c_str(), p.per_chunk, p.flops});
    for (const m3::ExchangeFact& e : result.exchanges)
      exchanges.push_back({e.name.c_str(), e.collective.c_str(), e.bytes});
    write_facts(result, c, m3::fact_fields);
    c.declined = declined.data();
    c.declined_count = static_cast<int32_t>(declined.size());
    c.notes = notes.data();
    c.notes_count = static_cast<int32_t>(notes.size());
    c.products = products.data();
    c.products_count = static_cast<int32_t>(products.size());
    c.exchanges = exchanges.data();
    c.exchanges_count = static_cast<int32_t>(exchanges.size());
  }
};

talea_result* result_of(m3::Result done) {
  std::string json = m3::result_text(done);
  return make_result<Facts>(name, std::move(json), std::make_shared<const Facts>(std::move(done)));
}

m3::Result run(const Arguments& a, m3::Pass pass, const m3::Ranks& ranks) {
  if (pass == m3::Pass::step) return step(a.step, a.options, a.workspace, a.stream);
  const auto call = pass == m3::Pass::forward ? m3::forward : m3::backward;
  return call(a.inputs, a.outputs, a.options, a.workspace, ranks, a.stream);
}

talea_status run_pass(const talea_mamba3_args* args, m3::Pass pass, talea_result** result) {
  if (result) *result = nullptr;
  return guarded([&] {
    const Arguments a = read(args, pass, Purpose::call);
    m3::Result done = run(a, pass, a.ranks);
    if (anybody_reads_the_log())
      log_lanes(name, done.lane, done.declined,
                fmt::format("{}, {} workspace bytes", word(pass), done.workspace_bytes));
    if (result) *result = result_of(std::move(done));
  });
}

}  // namespace
}  // namespace talea::capi

namespace capi = talea::capi;
using talea::ErrorKind;
using talea::require;
using talea::mamba3::Pass;

extern "C" {

talea_status talea_mamba3_options_init(talea_mamba3_options* options, int64_t struct_bytes) {
  return capi::guarded([&] {
    capi::write_defaults<talea::mamba3::Options>(options, struct_bytes,
                                                 talea::mamba3::option_fields);
  });
}

talea_status talea_mamba3_workspace_bytes(const talea_mamba3_args* args, int32_t pass,
                                          int64_t* bytes) {
  return capi::guarded([&] {
    require(bytes, ErrorKind::usage, "bytes: null pointer");
    *bytes = workspace_bytes(capi::problem_of(args, capi::pass_of(pass)));
  });
}

talea_status talea_mamba3_saved_bytes(const talea_mamba3_args* args, int64_t* bytes) {
  return capi::guarded([&] {
    require(bytes, ErrorKind::usage, "bytes: null pointer");
    *bytes = saved_bytes(capi::problem_of(args, Pass::forward));
  });
}

talea_status talea_mamba3_explain(const talea_mamba3_args* args, int32_t pass, int32_t format,
                                  char* buffer, int64_t buffer_bytes, int64_t* needed_bytes) {
  return capi::guarded([&] {
    const capi::TextBuffer text = {format, buffer, buffer_bytes, needed_bytes};
    capi::check_buffer(text);
    capi::write_choice(capi::name, explain(capi::problem_of(args, capi::pass_of(pass))), text);
  });
}

talea_status talea_mamba3_forward(const talea_mamba3_args* args, talea_result** result) {
  return capi::run_pass(args, Pass::forward, result);
}

talea_status talea_mamba3_backward(const talea_mamba3_args* args, talea_result** result) {
  return capi::run_pass(args, Pass::backward, result);
}

talea_status talea_mamba3_step(const talea_mamba3_args* args, talea_result** result) {
  return capi::run_pass(args, Pass::step, result);
}

talea_status talea_mamba3_phases_begin(const talea_mamba3_args* args, int32_t pass,
                                       talea_phases** phases) {
  if (phases) *phases = nullptr;
  return capi::guarded([&] {
    require(phases, ErrorKind::usage, "phases: null pointer");
    const Pass which = capi::pass_of(pass);
    require(which != Pass::step, ErrorKind::usage, "pass = {}: a step has no exchanges", pass);
    const auto a =
        std::make_shared<const capi::Arguments>(capi::read(args, which, capi::Purpose::phases));
    using talea::ExchangeGroup;
    *phases = capi::begin_phases(
        {{ExchangeGroup::heads, a->heads}, {ExchangeGroup::sequence, a->sequence}},
        [a, which](std::span<talea::Communicator* const> c) {
          talea::mamba3::Ranks ranks = a->ranks;
          ranks.heads = c[0];
          ranks.sequence = c[1];
          return capi::result_of(capi::run(*a, which, ranks));
        });
  });
}

const char* talea_mamba3_lanes(void) {
  static const std::string list = capi::comma_list(talea::mamba3::lanes());
  return list.c_str();
}

const talea_mamba3_facts* talea_mamba3_result_facts(const talea_result* result) {
  const auto* facts = capi::facts_of<capi::Facts>(result, capi::name);
  return facts ? &facts->c : nullptr;
}

}  // extern "C"
