// What: the device lanes and the calls beside the passes where the build has no CUDA.
// Why: "not built" is a reason like any other, and device tensors get an answer.
// Never: runs; a build with CUDA leaves this file out.
#include "ops/sparse_attention/beside.hpp"
#include "ops/sparse_attention/rows_moved.hpp"

namespace talea::sparse_attention {
namespace {

[[noreturn]] void no_cuda(const char* name) {
  fail(ErrorKind::unavailable, "{}: device tensors: this build has no CUDA lanes", name);
}

Lane absent(const char* name) {
  Lane lane = absent_lane<Operator>(name, DeviceKind::cuda);
  lane.decline = [](const Problem&, const DeviceFacts&) -> std::optional<std::string> {
    return "not built: this library holds no CUDA code";
  };
  return lane;
}

}  // namespace

Lane sm90_lane() { return absent("sm90"); }
Lane cuda_lane() { return absent("cuda"); }

void index_mask_on_device(const Problem&, const Args&, const View&, Stream) { no_cuda("mask"); }
void pack_rows_on_device(const Tensor&, const Tensor&, Stream) { no_cuda("kv"); }
void copy_on_device(const RowsMoved&, const RowBlock&) { no_cuda("ranks"); }
void clear_on_device(const RowsMoved&, char*, int64_t) { no_cuda("ranks"); }
void put_on_device(const RowsMoved&, const View&, const View&, const std::array<int64_t, 4>&,
                   bool) {
  no_cuda("ranks");
}
std::array<int64_t, 4> read_status(const View&, int, Stream) { no_cuda("status"); }

}  // namespace talea::sparse_attention
