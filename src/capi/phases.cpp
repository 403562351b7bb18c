// What: the C functions of a call cut at its exchanges.
// Why: a handle and a plain struct each turn: any language with a loop can communicate for us.
// Never: keeps a pointer to the caller's structs, only to the tensor memory they name.
#include "capi/phases.hpp"

#include "capi/guarded.hpp"
#include "capi/tensor.hpp"

namespace capi = talea::capi;
using talea::ErrorKind;
using talea::require;

struct talea_phases {
  std::vector<capi::GroupOfCall> groups;  // their engines' names are used to the end
  std::unique_ptr<talea_result> result;
  enum { running, ended, taken, failed } state = running;
  std::unique_ptr<talea::Phases> call;  // the last member: its thread uses the others
};

namespace {

void fill(const talea::Exchange& from, talea_exchange& to) {
  to.kind = static_cast<int32_t>(from.kind);
  to.group = static_cast<int32_t>(from.group);
  to.device = static_cast<int32_t>(from.device);
  to.dtype = static_cast<int32_t>(from.dtype);
  to.send = from.send;
  to.recv = from.recv;
  to.count = from.count;
  to.bytes = from.bytes;
  to.stream = from.stream;
}

}  // namespace

talea_phases* capi::begin_phases(const std::vector<GroupOfCall>& groups, PhasesBody body) {
  auto made = std::make_unique<talea_phases>();
  made->groups = groups;
  std::vector<PhaseGroup> given;
  for (const GroupOfCall& g : made->groups) {
    PhaseGroup group;
    if (g.named) group = {g.named->rank(), g.named->size(), g.named->device(), g.named->engine()};
    if (g.named) group.multiprocessors_beside = g.named->multiprocessors_beside();
    group.group = g.group;
    given.push_back(group);
  }
  made->call = std::make_unique<Phases>(
      given, [phases = made.get(), body = std::move(body)](std::span<Communicator* const> c) {
        phases->result.reset(body(c));
      });
  return made.release();
}

extern "C" {

talea_status talea_phases_next(talea_phases* phases, talea_exchange* exchange) {
  return capi::guarded([&] {
    require(phases, ErrorKind::usage, "phases: null pointer");
    capi::check_size("exchange", exchange);
    require(phases->state != talea_phases::failed, ErrorKind::usage,
            "phases: this call has already ended with an error");
    *exchange = {};
    exchange->struct_bytes = sizeof *exchange;
    const talea::Exchange* next = nullptr;
    if (phases->state == talea_phases::running) {
      phases->state = talea_phases::failed;  // unless next() returns
      next = phases->call->next();
      phases->state = next ? talea_phases::running : talea_phases::ended;
    }
    if (next) fill(*next, *exchange);
  });
}

talea_status talea_phases_finish(talea_phases* phases, talea_result** result) {
  if (result) *result = nullptr;
  return capi::guarded([&] {
    require(phases, ErrorKind::usage, "phases: null pointer");
    require(phases->state == talea_phases::ended, ErrorKind::usage, "phases: {}",
            phases->state == talea_phases::running ? "the call has not ended"
            : phases->state == talea_phases::taken ? "the result was taken before"
                                                   : "the call ended with an error");
    phases->state = talea_phases::taken;
    if (result) *result = phases->result.release();
  });
}

void talea_phases_free(talea_phases* phases) { delete phases; }

}  // extern "C"
