// What: the lanes of a GPU, and what ranks do of device tensors, where the build has no CUDA.
// Why: "not built" is a reason like any other, and device tensors get an answer.
// Never: runs; a build with CUDA leaves this file out.
#include "ops/mamba3/rows_moved.hpp"
#include "ops/mamba3/token_ranks.hpp"

namespace talea::mamba3 {
namespace {

[[noreturn]] void no_cuda() {
  fail(ErrorKind::unavailable, "ranks: device tensors: this build has no CUDA lanes");
}

}  // namespace

Lane sm90_lane() { return absent_lane<Operator>("sm90", DeviceKind::cuda); }
Lane cuda_lane() { return absent_lane<Operator>("cuda", DeviceKind::cuda); }

void clear_on_device(const RowsMoved&, char*, int64_t) { no_cuda(); }
void put_on_device(const RowsMoved&, const RowsOfTokens&, const RowsOfTokens&, const RowShape&,
                   int64_t, int64_t) {
  no_cuda();
}
void measure_on_device(const PieceCall&, const PieceMemory&, int64_t, bool) { no_cuda(); }
void turns_before_on_device(const PieceCall&, const PieceMemory&) { no_cuda(); }
void states_on_device(const PieceCall&, const Pieces&, const PieceStates&, const PieceStates&) {
  no_cuda();
}
void gradients_on_device(const PieceCall&, const Pieces&, const PieceStates&, const PieceStates&) {
  no_cuda();
}

}  // namespace talea::mamba3
