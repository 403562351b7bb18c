// What: what sequences a call has, read back from the device where its options ask for it.
// Why: the device lanes' one synchronisation is the same.
// Never: runs unasked.
#include "core/fail.hpp"
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/rows/machine.hpp"

namespace talea::mamba3::cuda {

void check_sequences(const Call& c, const Launch& at, DeviceMachine& machine) {
  if (c.problem.options.sequence_check != SequenceCheck::checked) return;
  if (!c.in.cu_seqlens && !c.slots) return;
  refuse_capture(at.stream);
  const Plan none;
  Sequences from = sequences_of(c, at.buffers);
  from.status.data = at.buffers.status;
  from.status.stride[0] = 1;
  from.pack = {};  // of another size
  machine.read_sequences(sizes_of(c.problem, none), from);
  check_counts(at.buffers.status, at.stream);
}

void refuse_capture(cudaStream_t stream) {
  require(!device::capturing(stream), ErrorKind::usage,
          "sequence_check = checked: needs a synchronisation, impossible while the stream is "
          "captured");
}

void check_counts(const int64_t* counts, cudaStream_t stream) {
  int64_t status[4];
  device::check(cudaMemcpyAsync(status, counts, sizeof status, cudaMemcpyDeviceToHost, stream),
                "reading the counts of sequences");
  device::check(cudaStreamSynchronize(stream), "sequence_check = checked");
  require_clean(status);
}

}  // namespace talea::mamba3::cuda
