// What: ranks as processes of one host, through a file that all of them map.
// Why: processes without MPI (one a GPU) need the handshake and must name a lost rank.
// Never: locks: a rank that dies or stops holds nothing that another waits for, but its turn.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/fail.hpp"
#include "dist/host_collectives.hpp"
#include "talea/ranks.hpp"

namespace talea {
namespace {

using Clock = std::chrono::steady_clock;

// One for each rank. A new file is all zeros, which is the state before anybody came.
struct alignas(64) Place {
  std::atomic<int64_t> arrived;  // exchanges begun
  std::atomic<int32_t> process;  // its id; 0: has not come
  std::atomic<int32_t> left;
  std::atomic<int32_t> given_up;
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

class Mapping {
 public:
  Mapping(const std::string& file, int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    const int fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    require(fd >= 0, ErrorKind::runtime, "shared ranks: {}: {}", file, std::strerror(errno));
    const bool sized = ::ftruncate(fd, static_cast<off_t>(bytes)) == 0;
    data_ = sized ? ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    const int why = errno;
    ::close(fd);
    require(data_ != MAP_FAILED, ErrorKind::runtime, "shared ranks: {}: {} bytes: {}", file, bytes,
            std::strerror(why));
  }
  ~Mapping() { ::munmap(data_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

class SharedCommunicator final : public HostCommunicator {
 public:
  explicit SharedCommunicator(const SharedOptions& o)
      : HostCommunicator(o.rank, o.size),
        timeout_s_(o.timeout_s),
        places_bytes_(static_cast<int64_t>(sizeof(Place)) * o.size),
        map_(o.file, places_bytes_ + int64_t{2} * o.size * o.size * block_bytes(o.size)) {
    place(rank()).process.store(static_cast<int32_t>(::getpid()), std::memory_order_release);
  }
  ~SharedCommunicator() override { place(rank()).left.store(1, std::memory_order_release); }
  SharedCommunicator(const SharedCommunicator&) = delete;
  SharedCommunicator& operator=(const SharedCommunicator&) = delete;
  const char* engine() const override { return "shared memory"; }
  void set_timeout(double seconds) override { timeout_s_ = seconds; }
  bool give_up() override {
    place(rank()).given_up.store(1, std::memory_order_seq_cst);
    return true;
  }
  bool given_up() override {
    for (int r = 0; r < size(); ++r)
      if (place(r).given_up.load(std::memory_order_seq_cst) != 0) return true;
    return false;
  }

 protected:
  void exchange(const void* const* send, void* const* recv, int64_t bytes,
                const char* what) override {
    const auto size_bytes = static_cast<size_t>(bytes);
    for (int r = 0; r < size(); ++r) std::memcpy(slot(rank(), r), send[r], size_bytes);
    arrive(what);
    for (int r = 0; r < size(); ++r)
      if (r != rank() || recv[r] != send[r]) std::memcpy(recv[r], slot(r, rank()), size_bytes);
    ++turn_;
  }

 private:
  Place& place(int r) const { return reinterpret_cast<Place*>(map_.data())[r]; }
  // Two sets of slots: a rank may fill the next set while a slower one still reads the last.
  char* slot(int from, int to) const {
    return map_.data() + places_bytes_ +
           (((turn_ % 2) * size() + from) * size() + to) * block_bytes(size());
  }
  bool here(int r) const { return place(r).arrived.load(std::memory_order_acquire) > turn_; }
  bool gone(int r) const {
    const int32_t process = place(r).process.load(std::memory_order_acquire);
    return place(r).left.load(std::memory_order_acquire) != 0 ||
           (process != 0 && ::kill(process, 0) != 0 && errno == ESRCH);
  }

  void arrive(const char* what) {
    place(rank()).arrived.store(turn_ + 1, std::memory_order_release);
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s_);
    for (int64_t polls = 0;; ++polls) {
      std::string late, dead;
      for (int r = 0; r < size(); ++r) {
        if (here(r)) continue;
        late += fmt::format("{}{}", late.empty() ? "" : ", ", r);
        // It may have arrived and left between the two looks.
        if (polls % 100 == 99 && gone(r) && !here(r))
          dead += fmt::format("{}{}", dead.empty() ? "" : ", ", r);
      }
      if (late.empty()) return;
      require(dead.empty(), ErrorKind::runtime, "rank {}: left the world of {} processes before {}",
              dead, size(), what);
      require(Clock::now() < deadline, ErrorKind::runtime,
              "rank {}: did not arrive at {} of the world of {} processes within {} s", late, what,
              size(), timeout_s_);
      if (polls < 200)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(polls < 2000 ? 20 : 500));
    }
  }

  double timeout_s_;
  int64_t places_bytes_;
  Mapping map_;
  int64_t turn_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_shared_communicator(const SharedOptions& o) {
  require(o.timeout_s > 0, ErrorKind::usage, "timeout = {} s: must be > 0", o.timeout_s);
  require(o.size >= 1, ErrorKind::usage, "ranks = {}: at least one is needed", o.size);
  require(o.rank >= 0 && o.rank < o.size, ErrorKind::usage, "rank = {}: must lie in [0, {})",
          o.rank, o.size);
  return std::make_unique<SharedCommunicator>(o);
}

}  // namespace talea
