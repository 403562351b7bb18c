// What: a body with communicators as a sequence of exchanges that the caller performs.
// Why: any lane runs unchanged; the cut lies in the communicator, where every rank must stop
// anyway.
// Never: runs body and caller at the same time.
#include "talea/phases.hpp"

#include <omp.h>

#include <condition_variable>
#include <cstring>
#include <future>
#include <mutex>
#include <thread>

#include "core/fail.hpp"

namespace talea {
namespace {

// Whose turn it is; `exchange` is set while the caller has one in his hands.
struct Turns {
  std::mutex mutex;
  std::condition_variable changed;
  bool bodys_turn = false, over = false, given_up = false;
  Exchange exchange;

  void wait(std::unique_lock<std::mutex>& lock, bool body) {
    changed.wait(lock, [&] { return bodys_turn == body; });
  }
  void hand_over(bool to_body) {
    bodys_turn = to_body;
    changed.notify_all();
  }
};

class PhaseCommunicator final : public Communicator {
 public:
  PhaseCommunicator(const PhaseGroup& group, Turns& turns) : group_(group), turns_(turns) {}
  const char* engine() const override { return group_.engine; }
  int rank() const override { return group_.rank; }
  int size() const override { return group_.size; }
  DeviceKind device() const override { return group_.device; }

  void all_gather(const void* send, void* recv, int64_t bytes, Stream stream) override {
    gather(ExchangeKind::all_gather, send, recv, bytes, stream);
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) override {
    reduce(ExchangeKind::all_reduce_sum, buffer, count, dtype, stream);
  }
  void reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                          Stream stream) override {
    if (group_.size == 1) return all_gather(send, recv, count * size_of(dtype), stream);
    scatter(ExchangeKind::reduce_scatter_sum, send, recv, count, dtype, stream);
  }
  void begin_all_gather(const void* send, void* recv, int64_t bytes, Stream stream) override {
    gather(begun(ExchangeKind::all_gather), send, recv, bytes, stream);
  }
  void begin_all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) override {
    reduce(begun(ExchangeKind::all_reduce_sum), buffer, count, dtype, stream);
  }
  void begin_reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                                Stream stream) override {
    if (group_.size == 1) return all_gather(send, recv, count * size_of(dtype), stream);
    scatter(begun(ExchangeKind::reduce_scatter_sum), send, recv, count, dtype, stream);
  }
  void join(Stream stream) override {
    if (!open_) return;
    open_ = false;
    Exchange e{ExchangeKind::join, group_.group, group_.device};
    e.stream = stream;
    ask(e);
  }
  int multiprocessors_beside() const override {
    return group_.size > 1 ? group_.multiprocessors_beside : 0;
  }
  bool host_gather(const void* send, void* recv, int64_t bytes) override {
    ask({ExchangeKind::all_gather, group_.group, DeviceKind::cpu, send, recv, bytes, DType::f32,
         bytes, nullptr});
    return true;
  }

 private:
  ExchangeKind begun(ExchangeKind kind) const {
    if (multiprocessors_beside() == 0) return kind;
    constexpr int to_begun = static_cast<int>(ExchangeKind::begun_all_gather) -
                             static_cast<int>(ExchangeKind::all_gather);
    return static_cast<ExchangeKind>(static_cast<int>(kind) + to_begun);
  }
  void gather(ExchangeKind kind, const void* send, void* recv, int64_t bytes, Stream stream) {
    if (bytes == 0 || (group_.size == 1 && send == recv)) return;
    if (group_.size == 1 && group_.device == DeviceKind::cpu) {
      std::memmove(recv, send, static_cast<size_t>(bytes));
      return;
    }
    ask({kind, group_.group, group_.device, send, recv, bytes, DType::f32, bytes, stream});
  }
  void reduce(ExchangeKind kind, void* buffer, int64_t count, DType dtype, Stream stream) {
    if (group_.size > 1 && count > 0)
      ask({kind, group_.group, group_.device, buffer, buffer, count, dtype, count * size_of(dtype),
           stream});
  }
  void scatter(ExchangeKind kind, const void* send, void* recv, int64_t count, DType dtype,
               Stream stream) {
    if (count > 0)
      ask({kind, group_.group, group_.device, send, recv, count, dtype, count * size_of(dtype),
           stream});
  }
  void ask(const Exchange& exchange) {
    if (exchange.kind >= ExchangeKind::begun_all_gather && exchange.kind < ExchangeKind::join)
      open_ = true;
    std::unique_lock lock(turns_.mutex);
    turns_.exchange = exchange;
    turns_.hand_over(false);
    turns_.wait(lock, true);
    require(!turns_.given_up, ErrorKind::runtime,
            "phases: the call was given up at an exchange on rank {} of {}", group_.rank,
            group_.size);
  }

  const PhaseGroup group_;
  Turns& turns_;
  bool open_ = false;  // something was begun since the last join
};

void check(const PhaseGroup& g) {
  constexpr const char* names[] = {"vocab", "batch", "heads", "sequence"};
  const char* name = names[static_cast<int>(g.group)];
  require(g.size >= 1, ErrorKind::usage, "{}: size = {}: must be >= 1", name, g.size);
  require(g.rank >= 0 && g.rank < g.size, ErrorKind::usage, "{}: rank = {}: must lie in [0, {})",
          name, g.rank, g.size);
}

PhaseGroup with(PhaseGroup g, ExchangeGroup group) {
  g.group = group;
  return g;
}

}  // namespace

struct Phases::State {
  Turns turns;
  std::vector<PhaseCommunicator> groups;
  std::vector<Communicator*> communicators;
  std::future<void> result;  // the last member: its thread ends before the others

  explicit State(const std::vector<PhaseGroup>& given) {
    groups.reserve(given.size());
    for (const PhaseGroup& g : given) communicators.push_back(&groups.emplace_back(g, turns));
  }

  void start(GroupsBody body) {
    const int threads = omp_get_max_threads();
    result = std::async(std::launch::async, [this, threads, body = std::move(body)] {
      struct Over {  // also where the body throws
        Turns& turns;
        ~Over() {
          const std::lock_guard lock(turns.mutex);
          turns.over = true;
          turns.hand_over(false);
        }
      };
      std::unique_lock lock(turns.mutex);
      turns.wait(lock, true);
      lock.unlock();
      const Over over{turns};
      if (turns.given_up) return;
      omp_set_num_threads(threads);
      body(communicators);
    });
  }
};

Phases::Phases(std::vector<PhaseGroup> groups, GroupsBody body) {
  for (const PhaseGroup& g : groups) check(g);
  state_ = std::make_unique<State>(groups);
  state_->start(std::move(body));
}

Phases::Phases(const PhaseGroup& vocab, const PhaseGroup& batch, Body body)
    : Phases({with(vocab, ExchangeGroup::vocab), with(batch, ExchangeGroup::batch)},
             [body = std::move(body)](std::span<Communicator* const> c) { body(*c[0], *c[1]); }) {}

Phases::~Phases() {
  Turns& t = state_->turns;
  std::unique_lock lock(t.mutex);
  t.given_up = true;
  // A body that asks again after it was refused is refused again.
  while (!t.over) {
    t.hand_over(true);
    t.wait(lock, false);
  }
}

const Exchange* Phases::next() {
  Turns& t = state_->turns;
  std::unique_lock lock(t.mutex);
  if (!t.over) {
    t.hand_over(true);
    t.wait(lock, false);
  }
  if (!t.over) return &t.exchange;
  lock.unlock();
  if (state_->result.valid()) state_->result.get();
  return nullptr;
}

}  // namespace talea
