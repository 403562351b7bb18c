// What: ranks as GPUs over NCCL, its own communicator or the caller's, opened at run time.
// Why: the operator's exchanges stay on the device and on the caller's stream.
// Never: hangs on a lost rank (a watchdog aborts the communicator); never uses NVLink multicast.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "core/fail.hpp"
#include "dist/serial_calls.hpp"
#include "talea/ranks.hpp"

namespace talea {
namespace {

using Clock = std::chrono::steady_clock;

// Versions of nccl.h differ in what they declare; these few have been stable since 2.14.
struct Table {
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRankConfig) init;
  decltype(&ncclCommGetAsyncError) async_error;
  decltype(&ncclCommAbort) comm_abort;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclGetErrorString) text;
};

template <typename F>
void find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  require(function, ErrorKind::unavailable, "nccl: this library has no {}", name);
}

Table load(const std::string& name) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  require(library, ErrorKind::unavailable, "nccl: {}", library ? "" : dlerror());
  Table t{};
  find(library, "ncclGetUniqueId", t.get_unique_id);
  find(library, "ncclCommInitRankConfig", t.init);
  find(library, "ncclCommGetAsyncError", t.async_error);
  find(library, "ncclCommAbort", t.comm_abort);
  find(library, "ncclAllGather", t.all_gather);
  find(library, "ncclAllReduce", t.all_reduce);
  find(library, "ncclReduceScatter", t.reduce_scatter);
  find(library, "ncclGetErrorString", t.text);
  return t;
}

void cuda(cudaError_t status, const char* what) {
  require(status == cudaSuccess, ErrorKind::runtime, "nccl: {}: {}", what,
          cudaGetErrorString(status));
}

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ncclFloat32;
    case DType::f64:
      return ncclFloat64;
    case DType::i64:
      return ncclInt64;
    case DType::bf16:
      return ncclBfloat16;
    default:
      fail(ErrorKind::usage, "dtype = {}: NCCL ranks sum fp32, fp64, int64 and bf16",
           name_of(dtype));
  }
}

constexpr auto grace = std::chrono::milliseconds(500);
constexpr int multiprocessors_by_default = 8;

Clock::duration of_seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

// Events without timing, used again and again: creating one costs more than recording it.
class Events {
 public:
  ~Events() {
    for (cudaEvent_t e : free_) cudaEventDestroy(e);
  }
  cudaEvent_t record(cudaStream_t stream) {
    cudaEvent_t e = nullptr;
    if (free_.empty()) {
      cuda(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "cudaEventCreate");
    } else {
      e = free_.back();
      free_.pop_back();
    }
    cuda(cudaEventRecord(e, stream), "cudaEventRecord");
    return e;
  }
  void give_back(cudaEvent_t e) { free_.push_back(e); }

 private:
  std::vector<cudaEvent_t> free_;
};

class NcclCommunicator final : public Communicator {
 public:
  // The time of the start runs from `begin`: opening the library is part of it.
  NcclCommunicator(const NcclOptions& o, Clock::time_point begin)
      : o_(o),
        nccl_(load(o.library)),
        timeout_(of_seconds(o.timeout_s)),
        beside_count_(o.multiprocessors_beside >= 0 ? o.multiprocessors_beside
                      : o.comm                      ? 0
                                                    : multiprocessors_by_default) {
    cuda(cudaSetDevice(o.device_index), "cudaSetDevice");
    int least = 0, greatest = 0;
    cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    // Above the products: a sum that runs beside one must get its few multiprocessors.
    cuda(cudaStreamCreateWithPriority(&beside_, cudaStreamNonBlocking, greatest),
         "cudaStreamCreateWithPriority");
    for (cudaEvent_t* e : {&fork_, &done_})
      cuda(cudaEventCreateWithFlags(e, cudaEventDisableTiming), "cudaEventCreate");
    owned_ = o.comm == nullptr;
    comm_ = static_cast<ncclComm_t>(o.comm);
    watchdog_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
    if (owned_) start(begin + timeout_);
    started_ = true;
  }

  // Waits for what is queued, then aborts: destroying would wait for the other ranks, lost or not.
  ~NcclCommunicator() override {
    while (!failed_ && busy()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    watchdog_.request_stop();
    watchdog_.join();
    for (const Pending& p : pending_)
      for (cudaEvent_t e : {p.begun, p.ended}) cudaEventDestroy(e);
    for (cudaEvent_t e : {fork_, done_}) cudaEventDestroy(e);
    if (owned_ && !failed_) nccl_.comm_abort(comm_);
    cudaStreamDestroy(beside_);
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  const char* engine() const override { return "nccl"; }
  int rank() const override { return o_.rank; }
  int size() const override { return o_.size; }
  DeviceKind device() const override { return DeviceKind::cuda; }
  int multiprocessors_beside() const override { return beside_count_; }
  void set_timeout(double seconds) override {
    const std::lock_guard lock(mutex_);
    timeout_ = of_seconds(seconds);
  }

  void all_gather(const void* send, void* recv, int64_t bytes, Stream stream) override {
    gather(send, recv, bytes, static_cast<cudaStream_t>(stream));
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) override {
    reduce(buffer, count, dtype, static_cast<cudaStream_t>(stream));
  }
  void reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                          Stream stream) override {
    scatter(send, recv, count, dtype, static_cast<cudaStream_t>(stream));
  }
  void begin_all_gather(const void* send, void* recv, int64_t bytes, Stream stream) override {
    fork(stream);
    gather(send, recv, bytes, beside_);
  }
  void begin_all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) override {
    fork(stream);
    reduce(buffer, count, dtype, beside_);
  }
  void begin_reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                                Stream stream) override {
    fork(stream);
    scatter(send, recv, count, dtype, beside_);
  }
  void join(Stream stream) override {
    cuda(cudaEventRecord(done_, beside_), "cudaEventRecord");
    cuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), done_, 0), "cudaStreamWaitEvent");
  }
  Stream stream_beside() override { return beside_; }
  bool host_gather(const void* send, void* recv, int64_t bytes) override {
    if (!o_.host) return false;
    o_.host->all_gather(send, recv, bytes, nullptr);
    return true;
  }

  void wait(Stream stream) override {
    while (!failed_) {
      const cudaError_t status = cudaStreamQuery(static_cast<cudaStream_t>(stream));
      if (status == cudaSuccess) break;
      if (status != cudaErrorNotReady) cuda(status, "cudaStreamQuery");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    // A rank that aborts lets go of the others' kernels: they may end, with nonsense. It says so
    // before it aborts.
    if (host_gave_up()) abandon();
    if (failed_) lost("wait");
  }

 private:
  // A collective on its stream. Its time runs from `begun`: what lies before is not its own.
  struct Pending {
    cudaEvent_t begun, ended;
    Clock::time_point deadline = Clock::time_point::max();
  };

  // Non-blocking, so that a rank that never comes cannot hold this one for ever.
  void start(Clock::time_point deadline) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (beside_count_ > 0) {
      config.maxCTAs = beside_count_;
      // The products' blocks come in pairs, too: whichever kernel starts first, what it leaves free
      // suits the other. Larger clusters may find no room beside a product until it has ended.
      config.cgaClusterSize = 2;
    }
    ncclUniqueId id;
    require(o_.unique_id.size() == sizeof id, ErrorKind::usage,
            "unique_id: {} bytes given, NCCL needs {}", o_.unique_id.size(), sizeof id);
    std::memcpy(&id, o_.unique_id.data(), sizeof id);
    const char* what = "ncclCommInitRankConfig";
    check(guarded([&] { return nccl_.init(&comm_, o_.size, id, o_.rank, &config); }), what);
    settle(what, deadline);
  }

  // Waits while NCCL works on a call of its non-blocking communicator.
  void settle(const char* what, Clock::time_point deadline) {
    for (int64_t polls = 0;; ++polls) {
      ncclResult_t state = ncclSuccess;
      check(guarded([&] { return nccl_.async_error(comm_, &state); }), what);
      if (failed_) lost(what);
      if (state != ncclInProgress) return check(state, what);
      if (Clock::now() > deadline || host_gave_up()) {
        abandon();
        lost(what);
      }
      if (polls > 100) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  // Even asking for the state of a non-blocking communicator ends a job of its: the watchdog and
  // the caller must never be inside NCCL together. Nothing is called once the communicator is lost.
  template <typename Call>
  ncclResult_t guarded(Call call) {
    return calls_.run(ncclSuccess, [&] { return failed_ ? ncclSuccess : call(); });
  }

  void check(ncclResult_t result, const char* what) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    abandon();
    lost(what, nccl_.text(result));
  }

  bool host_gave_up() const { return o_.host && o_.host->given_up(); }

  // The watchdog or the caller found the failure. The watchdog aborts: NCCL may take its time for
  // that, while the caller asks who is missing.
  void abandon() {
    if (o_.host) o_.host->give_up();  // before the others' kernels may end with nonsense
    failed_ = true;
  }

  void abort_lost() {
    if (!owned_) return;
    // Without a channel for it, the others have this long to find the failure themselves.
    if (!host_gave_up()) std::this_thread::sleep_for(grace);
    calls_.end([&] { nccl_.comm_abort(comm_); });
  }

  // NCCL does not say which rank is missing. The host channel does: it is missing there, too.
  [[noreturn]] void lost(const char* what, const char* why = "a rank did not arrive in time") {
    if (o_.host) {
      o_.host->set_timeout(1);  // the others come here as soon as they notice, too
      const int64_t here = 1;
      std::vector<int64_t> all(static_cast<size_t>(o_.size));
      o_.host->all_gather(&here, all.data(), sizeof here, nullptr);
    }
    fail(ErrorKind::runtime, "nccl: {}: {} (world of {}, timeout {} s, rank {} was waiting)", what,
         why, o_.size, std::chrono::duration<double>(timeout_).count(), o_.rank);
  }

  void gather(const void* send, void* recv, int64_t bytes, cudaStream_t stream) {
    queue("all_gather", stream, [&](cudaStream_t s) {
      return nccl_.all_gather(send, recv, static_cast<size_t>(bytes), ncclInt8, comm_, s);
    });
  }
  void reduce(void* buffer, int64_t count, DType dtype, cudaStream_t stream) {
    queue("all_reduce_sum", stream, [&](cudaStream_t s) {
      return nccl_.all_reduce(buffer, buffer, static_cast<size_t>(count), type_of(dtype), ncclSum,
                              comm_, s);
    });
  }
  void scatter(const void* send, void* recv, int64_t count, DType dtype, cudaStream_t stream) {
    queue("reduce_scatter_sum", stream, [&](cudaStream_t s) {
      return nccl_.reduce_scatter(send, recv, static_cast<size_t>(count), type_of(dtype), ncclSum,
                                  comm_, s);
    });
  }
  // What lies on the caller's stream comes before what this communicator's stream does next.
  void fork(Stream stream) {
    cuda(cudaEventRecord(fork_, static_cast<cudaStream_t>(stream)), "cudaEventRecord");
    cuda(cudaStreamWaitEvent(beside_, fork_, 0), "cudaStreamWaitEvent");
  }

  template <typename Call>
  void queue(const char* what, cudaStream_t stream, Call call) {
    if (host_gave_up()) abandon();
    if (failed_) lost(what);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    const bool watched = capture == cudaStreamCaptureStatusNone;  // else nothing runs yet
    Pending p{};
    if (watched) {
      const std::lock_guard lock(mutex_);
      p.begun = events_.record(stream);
    }
    const auto deadline = Clock::now() + timeout_;
    check(guarded([&] { return call(stream); }), what);
    if (owned_) settle(what, deadline);
    if (failed_) lost(what);
    if (!watched) return;
    const std::lock_guard lock(mutex_);
    p.ended = events_.record(stream);
    pending_.push_back(p);
  }

  void watch(const std::stop_token& stop) {
    cudaSetDevice(o_.device_index);
    auto mode = cudaStreamCaptureModeRelaxed;  // its queries touch no stream that is captured
    cudaThreadExchangeStreamCaptureMode(&mode);
    while (!failed_ && !stop.stop_requested()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      if (late() || broken() || host_gave_up()) abandon();
    }
    if (failed_) abort_lost();
  }

  // While a call is inside there is nothing to ask; one on a caller's communicator may block. Until
  // the start has ended, the caller looks itself.
  bool broken() {
    return started_ && calls_.try_run(false, [&] {
      ncclResult_t state = ncclSuccess;
      return nccl_.async_error(comm_, &state) != ncclSuccess ||
             (state != ncclSuccess && state != ncclInProgress);
    });
  }

  bool busy() {
    const std::lock_guard lock(mutex_);
    return !pending_.empty();
  }

  bool late() {
    const std::lock_guard lock(mutex_);
    std::erase_if(pending_, [&](const Pending& p) {
      if (cudaEventQuery(p.ended) == cudaErrorNotReady) return false;
      for (cudaEvent_t e : {p.begun, p.ended}) events_.give_back(e);
      return true;
    });
    for (Pending& p : pending_) {
      if (p.deadline == Clock::time_point::max() && cudaEventQuery(p.begun) != cudaErrorNotReady)
        p.deadline = Clock::now() + timeout_;
      if (Clock::now() > p.deadline) return true;
    }
    return false;
  }

  NcclOptions o_;
  Table nccl_;
  Clock::duration timeout_;
  ncclComm_t comm_ = nullptr;
  bool owned_ = true;
  const int beside_count_;  // multiprocessors
  cudaStream_t beside_ = nullptr;
  cudaEvent_t fork_ = nullptr, done_ = nullptr;
  std::atomic<bool> failed_{false}, started_{false};
  std::mutex mutex_;
  SerialCalls calls_;
  Events events_;
  std::deque<Pending> pending_;
  std::jthread watchdog_;  // ends first
};

}  // namespace

std::string nccl_unique_id(const std::string& library) {
  const Table nccl = load(library);
  ncclUniqueId id;
  const ncclResult_t result = nccl.get_unique_id(&id);
  require(result == ncclSuccess, ErrorKind::runtime, "nccl: ncclGetUniqueId: {}",
          nccl.text(result));
  return std::string(reinterpret_cast<const char*>(&id), sizeof id);
}

std::unique_ptr<Communicator> make_nccl_communicator(const NcclOptions& options) {
  const auto begin = Clock::now();
  require(options.timeout_s > 0, ErrorKind::usage, "timeout = {} s: must be > 0",
          options.timeout_s);
  require(options.rank >= 0 && options.rank < options.size, ErrorKind::usage,
          "rank = {}: must lie in [0, {})", options.rank, options.size);
  const int beside = options.multiprocessors_beside;
  require(beside >= -1 && (beside == -1 || beside % 2 == 0), ErrorKind::usage,
          "multiprocessors_beside = {}: even, or -1 for the default", beside);
  return std::make_unique<NcclCommunicator>(options, begin);
}

}  // namespace talea
