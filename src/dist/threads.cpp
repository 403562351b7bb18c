// What: ranks as threads of one process.
// Why: a world of any size on one machine, for the command line, tests and CPU servers.
// Never: writes into another rank's memory; blocks travel through slots that the world owns.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <future>
#include <mutex>

#include "core/fail.hpp"
#include "dist/host_collectives.hpp"
#include "talea/ranks.hpp"

namespace talea {
namespace {

// Shared by the communicators of one world; lives as long as the last of them, so that a rank which
// wakes up late still finds its slots.
struct ThreadWorld {
  ThreadWorld(int ranks, double timeout)
      : size(ranks),
        timeout_s(timeout),
        block_bytes(HostCommunicator::block_bytes(ranks)),
        slots(static_cast<size_t>(int64_t{2} * ranks * ranks * block_bytes)),
        arrived(static_cast<size_t>(ranks)),
        left(static_cast<size_t>(ranks)) {}

  // Two sets of slots: a rank may fill the next set while a slower one still reads the last.
  char* slot(int64_t turn, int from, int to) {
    return slots.data() + (((turn % 2) * size + from) * size + to) * block_bytes;
  }

  const int size;
  const double timeout_s;
  const int64_t block_bytes;
  std::vector<char> slots;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int64_t> arrived;  // exchanges begun, by rank
  std::vector<char> left;        // its communicator is gone
  std::atomic<bool> given_up{false};
};

class ThreadCommunicator final : public HostCommunicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadWorld> world, int rank)
      : HostCommunicator(rank, world->size),
        world_(std::move(world)),
        timeout_s_(world_->timeout_s) {}
  ~ThreadCommunicator() override {
    const std::lock_guard lock(world_->mutex);
    world_->left[rank()] = 1;
    world_->changed.notify_all();
  }
  const char* engine() const override { return "threads"; }
  void set_timeout(double seconds) override { timeout_s_ = seconds; }
  bool give_up() override { return world_->given_up = true; }
  bool given_up() override { return world_->given_up; }

 protected:
  void exchange(const void* const* send, void* const* recv, int64_t bytes,
                const char* what) override {
    const auto size_bytes = static_cast<size_t>(bytes);
    for (int r = 0; r < size(); ++r)
      std::memcpy(world_->slot(turn_, rank(), r), send[r], size_bytes);
    arrive(what);
    for (int r = 0; r < size(); ++r)
      if (r != rank() || recv[r] != send[r])
        std::memcpy(recv[r], world_->slot(turn_, r, rank()), size_bytes);
    ++turn_;
  }

 private:
  // Waits until every rank has filled its slots of this turn, or names those that have not.
  void arrive(const char* what) {
    std::unique_lock lock(world_->mutex);
    world_->arrived[rank()] = turn_ + 1;
    world_->changed.notify_all();
    auto missing = [&](bool gone_only) {
      std::string names;
      for (int r = 0; r < size(); ++r)
        if (world_->arrived[r] <= turn_ && (!gone_only || world_->left[r]))
          names += fmt::format("{}{}", names.empty() ? "" : ", ", r);
      return names;
    };
    // For ever is a number of nanoseconds, too: some thirty years.
    const auto limit = std::chrono::duration<double>(std::min(timeout_s_, 1e9));
    world_->changed.wait_for(lock, limit, [&] { return missing(false).empty() || gone(); });
    const std::string late = missing(false);
    if (late.empty()) return;
    const std::string dead = missing(true);
    require(dead.empty(), ErrorKind::runtime, "rank {}: left the world of {} threads before {}",
            dead, size(), what);
    fail(ErrorKind::runtime, "rank {}: did not arrive at {} of the world of {} threads within {} s",
         late, what, size(), timeout_s_);
  }
  bool gone() const {
    for (int r = 0; r < size(); ++r)
      if (world_->left[r] && world_->arrived[r] <= turn_) return true;
    return false;
  }

  std::shared_ptr<ThreadWorld> world_;
  double timeout_s_;
  int64_t turn_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int ranks, double timeout_s) {
  require(ranks >= 1, ErrorKind::usage, "ranks = {}: at least one is needed", ranks);
  require(timeout_s > 0, ErrorKind::usage, "timeout = {} s: must be > 0", timeout_s);
  auto world = std::make_shared<ThreadWorld>(ranks, timeout_s);
  std::vector<std::unique_ptr<Communicator>> all;
  for (int r = 0; r < ranks; ++r) all.push_back(std::make_unique<ThreadCommunicator>(world, r));
  return all;
}

void run_thread_ranks(int ranks, double timeout_s, const std::function<void(Communicator&)>& body) {
  auto all = make_thread_communicators(ranks, timeout_s);
  const int threads_each = std::max(1, omp_get_max_threads() / ranks);
  std::atomic<int> ended{0};
  std::vector<int> by_end(static_cast<size_t>(ranks));
  // A rank that throws takes its place in the order before the others can notice that it left.
  struct Leaving {
    std::unique_ptr<Communicator> own;
    std::atomic<int>& ended;
    std::vector<int>& by_end;
    ~Leaving() {
      by_end[ended++] = own->rank();
      own.reset();
    }
  };
  std::vector<std::future<void>> threads;
  for (int r = 0; r < ranks; ++r)
    threads.push_back(std::async(std::launch::async, [&, r] {
      const Leaving leaving{std::move(all[r]), ended, by_end};
      omp_set_num_threads(threads_each);  // of this thread's parallel regions only
      body(*leaving.own);
    }));
  for (std::future<void>& t : threads) t.wait();
  for (int r : by_end) threads[r].get();
}

}  // namespace talea
