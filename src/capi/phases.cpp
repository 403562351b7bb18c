// What: the C functions of a call cut at its exchanges.
// Why: a handle and a plain struct each turn: any language with a loop can communicate for us.
// Never: keeps a pointer to the caller's structs, only to the tensor memory they name.
#include "talea/phases.hpp"

#include <string>

#include "capi/convert.hpp"
#include "capi/guarded.hpp"
#include "capi/result.hpp"
#include "core/fail.hpp"

namespace capi = talea::capi;
using talea::ErrorKind;
using talea::require;

struct talea_phases {
  capi::Arguments args;
  std::string vocab_engine, batch_engine;
  talea::LinearCrossEntropyResult result;
  enum { running, ended, taken, failed } state = running;
  std::unique_ptr<talea::Phases> call;  // the last member: its thread uses the others

  void start();
};

namespace {

talea::PhaseGroup group_of(const talea::Communicator* c, std::string& engine) {
  if (!c) return {};
  engine = c->engine();
  return {c->rank(), c->size(), c->device(), engine.c_str()};
}

void fill(const talea::Exchange& from, talea_exchange& to) {
  to.kind = static_cast<int32_t>(from.kind);
  to.group = from.batch ? TALEA_GROUP_BATCH : TALEA_GROUP_VOCAB;
  to.device = static_cast<int32_t>(from.device);
  to.dtype = static_cast<int32_t>(from.dtype);
  to.send = from.send;
  to.recv = from.recv;
  to.count = from.count;
  to.bytes = from.bytes;
  to.stream = from.stream;
}

}  // namespace

void talea_phases::start() {
  const talea::PhaseGroup vocab = group_of(args.vocab.get(), vocab_engine);
  const talea::PhaseGroup batch = group_of(args.batch.get(), batch_engine);
  call = std::make_unique<talea::Phases>(
      vocab, batch, [this](talea::Communicator& v, talea::Communicator& b) {
        talea::LinearCrossEntropyRanks ranks = args.ranks;
        ranks.vocab = &v;
        ranks.batch = &b;
        result = talea::linear_cross_entropy(args.inputs, args.outputs, args.options,
                                             args.workspace, ranks, args.stream);
      });
}

extern "C" {

talea_status talea_linear_cross_entropy_phases_begin(const talea_linear_cross_entropy_args* args,
                                                     talea_phases** phases) {
  if (phases) *phases = nullptr;
  return capi::guarded([&] {
    require(phases, ErrorKind::usage, "phases: null pointer");
    auto made = std::make_unique<talea_phases>();
    made->args = capi::convert(args, capi::Purpose::phases);
    made->start();
    *phases = made.release();
  });
}

talea_status talea_phases_next(talea_phases* phases, talea_exchange* exchange) {
  const talea_status status = capi::guarded([&] {
    require(phases, ErrorKind::usage, "phases: null pointer");
    require(exchange, ErrorKind::usage, "exchange: null pointer");
    require(exchange->struct_bytes == static_cast<int64_t>(sizeof *exchange), ErrorKind::usage,
            "exchange: struct_bytes = {} where this library (ABI version {}) has {}",
            exchange->struct_bytes, TALEA_ABI_VERSION, sizeof *exchange);
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
  return status;
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
    if (result) *result = capi::make_result(std::move(phases->result));
  });
}

void talea_phases_free(talea_phases* phases) { delete phases; }

}  // extern "C"
