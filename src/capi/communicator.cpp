// What: a Communicator whose engine is the caller's function table; it is not called without bytes.
// Why: Python (torch.distributed) and C trainers bring the ranks they already have.
// Never: communicates by itself.
#include "capi/tensor.hpp"
#include "core/fail.hpp"

namespace talea::capi {
namespace {

class CallbackCommunicator final : public Communicator {
 public:
  CallbackCommunicator(const char* name, const talea_communicator& c)
      : name_(name),
        engine_(c.engine       ? c.engine
                : c.all_gather ? "callbacks"
                               : "phases"),
        c_(c) {}

  const char* engine() const override { return engine_.c_str(); }
  int rank() const override { return c_.rank; }
  int size() const override { return c_.size; }
  DeviceKind device() const override { return static_cast<DeviceKind>(c_.device); }
  int multiprocessors_beside() const override { return c_.multiprocessors_beside; }

  void all_gather(const void* send, void* recv, int64_t bytes, Stream stream) override {
    if (bytes > 0) check("all_gather", c_.all_gather(c_.user, send, recv, bytes, stream));
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) override {
    if (count == 0) return;
    check("all_reduce_sum",
          c_.all_reduce_sum(c_.user, buffer, count, static_cast<int32_t>(dtype), stream));
  }
  void reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                          Stream stream) override {
    if (count == 0) return;
    check("reduce_scatter_sum",
          c_.reduce_scatter_sum(c_.user, send, recv, count, static_cast<int32_t>(dtype), stream));
  }

 private:
  void check(const char* call, int32_t status) const {
    if (status == 0) return;
    const char* why = c_.error_text ? c_.error_text(c_.user) : nullptr;
    fail(ErrorKind::runtime, "{}: {} of engine {} returned {} on rank {} of {}{}{}", name_, call,
         engine_, status, c_.rank, c_.size, why ? ": " : "", why ? why : "");
  }

  std::string name_, engine_;
  talea_communicator c_;
};

}  // namespace

std::unique_ptr<Communicator> make_communicator(const char* name, const talea_communicator* c,
                                                Callbacks callbacks) {
  constexpr auto usage = ErrorKind::usage;
  require(c->struct_bytes == static_cast<int64_t>(sizeof(*c)), usage,
          "{}: struct_bytes = {} where this library (ABI version {}) has {}", name, c->struct_bytes,
          TALEA_ABI_VERSION, sizeof(*c));
  require(c->size >= 1, usage, "{}: size = {}: must be >= 1", name, c->size);
  require(c->rank >= 0 && c->rank < c->size, usage, "{}: rank = {}: must lie in [0, {})", name,
          c->rank, c->size);
  require(c->device == TALEA_CPU || c->device == TALEA_CUDA, usage,
          "{}: device = {}: must be 0 (cpu) or 1 (cuda)", name, c->device);
  require(c->multiprocessors_beside >= 0, usage, "{}: multiprocessors_beside = {}: must be >= 0",
          name, c->multiprocessors_beside);
  const bool none = !c->all_gather && !c->all_reduce_sum && !c->reduce_scatter_sum;
  if (none && callbacks == Callbacks::optional)
    return std::make_unique<CallbackCommunicator>(name, *c);
  require(c->multiprocessors_beside == 0, usage,
          "{}: multiprocessors_beside = {}: callbacks begin nothing; must be 0", name,
          c->multiprocessors_beside);
  require(c->all_gather, usage, "{}: all_gather: null function", name);
  require(c->all_reduce_sum, usage, "{}: all_reduce_sum: null function", name);
  require(c->reduce_scatter_sum, usage, "{}: reduce_scatter_sum: null function", name);
  return std::make_unique<CallbackCommunicator>(name, *c);
}

}  // namespace talea::capi
