// What: a communicator that hands every collective to a caller's callbacks.
// Why: an engine with its own process group (torch.distributed, Megatron) does the communication.
// Never: interprets a buffer.
#include <utility>

#include "core/fail.hpp"
#include "talea/ranks.hpp"

namespace talea {
namespace {

class CallbackCommunicator final : public Communicator {
 public:
  explicit CallbackCommunicator(const CommunicatorCallbacks& c) : c_(c), engine_(c.engine) {}
  ~CallbackCommunicator() override {
    if (c_.close) c_.close(c_.user);
  }
  CallbackCommunicator(const CallbackCommunicator&) = delete;
  CallbackCommunicator& operator=(const CallbackCommunicator&) = delete;

  const char* engine() const override { return engine_.c_str(); }
  int rank() const override { return c_.rank; }
  int size() const override { return c_.size; }
  DeviceKind device() const override { return c_.device; }
  void all_gather(const void* send, void* recv, int64_t bytes, Stream stream) override {
    check(c_.all_gather(c_.user, send, recv, bytes, stream), "all_gather");
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) override {
    check(c_.all_reduce_sum(c_.user, buffer, count, static_cast<int32_t>(dtype), stream),
          "all_reduce_sum");
  }
  void reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                          Stream stream) override {
    check(c_.reduce_scatter_sum(c_.user, send, recv, count, static_cast<int32_t>(dtype), stream),
          "reduce_scatter_sum");
  }

 private:
  void check(int32_t status, const char* what) const {
    if (status == 0) return;
    const char* why = c_.error_text ? c_.error_text(c_.user) : nullptr;
    fail(ErrorKind::runtime, "{} of rank {} over {}: {}", what, c_.rank, engine_,
         why ? why : fmt::format("status {}", status));
  }

  CommunicatorCallbacks c_;
  std::string engine_;
};

}  // namespace

std::unique_ptr<Communicator> make_callback_communicator(const CommunicatorCallbacks& c) {
  require(c.size >= 1 && c.rank >= 0 && c.rank < c.size, ErrorKind::usage,
          "rank = {}: must lie in [0, size {})", c.rank, c.size);
  require(c.all_gather && c.all_reduce_sum && c.reduce_scatter_sum, ErrorKind::usage,
          "callbacks: all_gather, all_reduce_sum and reduce_scatter_sum are all needed");
  return std::make_unique<CallbackCommunicator>(c);
}

}  // namespace talea
