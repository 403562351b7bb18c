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

#include "core/fail.hpp"
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
  decltype(&ncclCommDestroy) destroy;
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
  find(library, "ncclCommDestroy", t.destroy);
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

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(const NcclOptions& o) : o_(o), nccl_(load(o.library)) {
    cuda(cudaSetDevice(o.device_index), "cudaSetDevice");
    owned_ = o.comm == nullptr;
    comm_ = static_cast<ncclComm_t>(o.comm);
    if (owned_) start();
    watchdog_ = std::thread([this] { watch(); });
  }

  ~NcclCommunicator() override {
    ending_ = true;
    watchdog_.join();
    for (const Pending& p : pending_) cudaEventDestroy(p.event);
    if (!owned_ || failed_) return;
    nccl_.destroy(comm_);
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  const char* engine() const override { return "nccl"; }
  int rank() const override { return o_.rank; }
  int size() const override { return o_.size; }
  DeviceKind device() const override { return DeviceKind::cuda; }

  void all_gather(const void* send, void* recv, int64_t bytes, Stream stream) override {
    queue("all_gather", stream, [&](cudaStream_t s) {
      return nccl_.all_gather(send, recv, static_cast<size_t>(bytes), ncclInt8, comm_, s);
    });
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) override {
    queue("all_reduce_sum", stream, [&](cudaStream_t s) {
      return nccl_.all_reduce(buffer, buffer, static_cast<size_t>(count), type_of(dtype), ncclSum,
                              comm_, s);
    });
  }
  void reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                          Stream stream) override {
    queue("reduce_scatter_sum", stream, [&](cudaStream_t s) {
      return nccl_.reduce_scatter(send, recv, static_cast<size_t>(count), type_of(dtype), ncclSum,
                                  comm_, s);
    });
  }
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
    if (failed_) lost("wait");
  }

 private:
  struct Pending {
    cudaEvent_t event;
    Clock::time_point deadline;
  };

  // Non-blocking, so that a rank that never comes cannot hold this one for ever.
  void start() {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclUniqueId id;
    require(o_.unique_id.size() == sizeof id, ErrorKind::usage,
            "unique_id: {} bytes given, NCCL needs {}", o_.unique_id.size(), sizeof id);
    std::memcpy(&id, o_.unique_id.data(), sizeof id);
    check(nccl_.init(&comm_, o_.size, id, o_.rank, &config), "ncclCommInitRankConfig");
    settle("ncclCommInitRankConfig");
  }

  // Waits while NCCL works on a call of its non-blocking communicator.
  void settle(const char* what) {
    const auto deadline = Clock::now() + std::chrono::duration<double>(o_.timeout_s);
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
      check(nccl_.async_error(comm_, &state), what);
      if (state == ncclInProgress && Clock::now() > deadline) {
        give_up();
        lost(what);
      }
      if (state == ncclInProgress) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    check(state, what);
  }

  void check(ncclResult_t result, const char* what) const {
    require(result == ncclSuccess || result == ncclInProgress, ErrorKind::runtime, "nccl: {}: {}",
            what, nccl_.text(result));
  }

  // The watchdog and the caller may both find the failure; one of them aborts.
  void give_up() {
    const std::lock_guard lock(abort_mutex_);
    if (failed_) return;
    failed_ = true;
    if (owned_) nccl_.comm_abort(comm_);
  }

  // NCCL does not say which rank is missing. The host channel does: it is missing there, too.
  [[noreturn]] void lost(const char* what) {
    if (o_.host) {
      const int64_t here = 1;
      std::vector<int64_t> all(static_cast<size_t>(o_.size));
      o_.host->all_gather(&here, all.data(), sizeof here, nullptr);
    }
    fail(ErrorKind::runtime,
         "nccl: {}: a rank of the world of {} did not arrive within {} s (rank {} was waiting)",
         what, o_.size, o_.timeout_s, o_.rank);
  }

  template <typename Call>
  void queue(const char* what, Stream stream, Call call) {
    if (failed_) lost(what);
    const auto s = static_cast<cudaStream_t>(stream);
    check(call(s), what);
    if (owned_) settle(what);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cuda(cudaStreamIsCapturing(s, &capture), "cudaStreamIsCapturing");
    if (capture != cudaStreamCaptureStatusNone) return;  // nothing runs yet
    Pending p{};
    cuda(cudaEventCreateWithFlags(&p.event, cudaEventDisableTiming), "cudaEventCreate");
    cuda(cudaEventRecord(p.event, s), "cudaEventRecord");
    p.deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                    std::chrono::duration<double>(o_.timeout_s));
    const std::lock_guard lock(mutex_);
    pending_.push_back(p);
  }

  void watch() {
    cudaSetDevice(o_.device_index);
    while (!ending_ && !failed_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const std::lock_guard lock(mutex_);
      while (!pending_.empty() && cudaEventQuery(pending_.front().event) != cudaErrorNotReady) {
        cudaEventDestroy(pending_.front().event);
        pending_.pop_front();
        // The time of earlier work on the stream is not the next collective's.
        if (!pending_.empty())
          pending_.front().deadline =
              std::max(pending_.front().deadline,
                       Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                          std::chrono::duration<double>(o_.timeout_s)));
      }
      ncclResult_t state = ncclSuccess;
      const bool bad = nccl_.async_error(comm_, &state) != ncclSuccess ||
                       (state != ncclSuccess && state != ncclInProgress);
      const bool late = !pending_.empty() && Clock::now() > pending_.front().deadline;
      if (bad || late) give_up();
    }
  }

  NcclOptions o_;
  Table nccl_;
  ncclComm_t comm_ = nullptr;
  bool owned_ = true;
  std::atomic<bool> failed_{false}, ending_{false};
  std::mutex mutex_, abort_mutex_;
  std::deque<Pending> pending_;
  std::thread watchdog_;
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
  require(options.timeout_s > 0, ErrorKind::usage, "timeout = {} s: must be > 0",
          options.timeout_s);
  require(options.rank >= 0 && options.rank < options.size, ErrorKind::usage,
          "rank = {}: must lie in [0, {})", options.rank, options.size);
  return std::make_unique<NcclCommunicator>(options);
}

}  // namespace talea
