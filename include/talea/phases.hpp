// What: an operator cut at its exchanges between ranks: the caller's own group does each of them.
// Why: torch.distributed, Megatron's tp_group and others are loops of the caller, not callbacks.
// Never: communicates; nothing runs while the caller has an exchange in his hands.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "talea/communicator.hpp"

namespace talea {

// begun_...: as the one without; what follows may run beside it until `join`, which waits for all
// that was begun in its group and moves nothing itself. Only groups that say how many
// multiprocessors an exchange takes meet them.
enum class ExchangeKind : int32_t {
  all_gather = 1,
  all_reduce_sum = 2,
  reduce_scatter_sum = 3,
  begun_all_gather = 4,
  begun_all_reduce_sum = 5,
  begun_reduce_scatter_sum = 6,
  join = 7
};

// Which ranks exchange: those that share the vocabulary, the batch, the heads or the sequence.
enum class ExchangeGroup : int32_t { vocab = 0, batch = 1, heads = 2, sequence = 3 };

// What the caller must do before the next phase. As the calls of Communicator: `send` may lie
// inside `recv`; all_reduce_sum is in place (send == recv). There is always something to move, but
// for a join. On a device the work may be queued on `stream` and need not have run.
struct Exchange {
  ExchangeKind kind = ExchangeKind::all_gather;
  ExchangeGroup group = ExchangeGroup::vocab;
  DeviceKind device = DeviceKind::cpu;  // where the buffers lie; the handshake's: the host
  const void* send = nullptr;
  void* recv = nullptr;
  int64_t count = 0;         // elements: of send, in place, or of recv under reduce_scatter_sum
  DType dtype = DType::f32;  // of all_gather: bytes, whatever this says
  int64_t bytes = 0;         // of `count` elements, or what every rank gives to all_gather
  Stream stream = nullptr;
};

struct PhaseGroup {
  int rank = 0, size = 1;
  DeviceKind device = DeviceKind::cpu;
  const char* engine = "phases";  // for the receipt: who communicates
  ExchangeGroup group = ExchangeGroup::vocab;
  int multiprocessors_beside = 0;  // as Communicator's; 0: every exchange comes before what follows
};

// A call in progress. The body is any code that takes communicators, such as one call of an
// operator; it runs on a thread of its own, in turns with the caller, never beside
// him. Thread-local settings are not carried over, but OpenMP's number of threads is.
//
//   Phases call({rank, size}, {}, [&](Communicator& vocab, Communicator& batch) { ... });
//   while (const Exchange* e = call.next()) my_group(*e);
class Phases {
 public:
  using Body = std::function<void(Communicator& vocab, Communicator& batch)>;

  Phases(const PhaseGroup& vocab, const PhaseGroup& batch, Body body);

  // The same over any groups; the body gets a communicator for each, in their order.
  using GroupsBody = std::function<void(std::span<Communicator* const>)>;
  Phases(std::vector<PhaseGroup> groups, GroupsBody body);

  // A call that has not ended is given up: its outputs are unfinished.
  ~Phases();
  Phases(const Phases&) = delete;
  Phases& operator=(const Phases&) = delete;

  // Runs to the next exchange, taking the last one as done. Null: the body has returned. Throws
  // what the body threw.
  const Exchange* next();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace talea
