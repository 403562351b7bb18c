// What: the ranks that share one call, as an argument of the operator.
// Why: vocabulary and sequence parallelism use the same code as a world of one.
// Never: names the engine (threads, MPI, NCCL) behind it.
#pragma once

#include <cstdint>
#include <memory>

#include "talea/tensor.hpp"

namespace talea {

// A caller's stream (cudaStream_t) or null; host communicators ignore it.
using Stream = void*;

// All calls are collective: every rank makes the same calls in the same order with the same sizes.
// A rank that does not arrive makes the others throw Error(runtime) naming it, within the timeout.
// Buffers live where device() says. Results do not depend on arrival order.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual const char* engine() const = 0;  // "self", "threads", "mpi", "nccl", ...
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual DeviceKind device() const { return DeviceKind::cpu; }

  // `bytes` bytes of every rank, in rank order, into recv (size() * bytes).
  virtual void all_gather(const void* send, void* recv, int64_t bytes, Stream stream) = 0;
  // In place; dtype f32, f64 or i64 (bf16 also on device communicators); summed in rank order.
  virtual void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) = 0;
  // send holds size() * count elements; this rank receives the sum of block rank().
  virtual void reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                                  Stream stream) = 0;
  // As the three above, but what is queued on `stream` afterwards may run beside them until
  // join(stream); the buffers are the communicator's until then. Without a stream of its own a
  // communicator exchanges at once.
  virtual void begin_all_gather(const void* send, void* recv, int64_t bytes, Stream stream) {
    all_gather(send, recv, bytes, stream);
  }
  virtual void begin_all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) {
    all_reduce_sum(buffer, count, dtype, stream);
  }
  virtual void begin_reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                                        Stream stream) {
    reduce_scatter_sum(send, recv, count, dtype, stream);
  }
  virtual void join(Stream) {}
  // The stream on which what was begun runs: what is queued there follows them, and join()
  // waits for it as well. Null: there is none, or the caller's own.
  virtual Stream stream_beside() { return nullptr; }
  // Multiprocessors that a sum begun beside other work takes: a product that is to run beside it
  // leaves as many free, since neither yields to the other. 0: sums are not to be begun beside
  // products.
  virtual int multiprocessors_beside() const { return 0; }
  // A small all_gather of host memory that has completed on return, for the handshake. False: this
  // communicator has no such channel.
  virtual bool host_gather(const void* send, void* recv, int64_t bytes) {
    if (device() != DeviceKind::cpu) return false;
    all_gather(send, recv, bytes, nullptr);
    return true;
  }
  // Returns when what was queued on the stream is complete; throws where a rank was lost. A host
  // communicator has nothing queued.
  virtual void wait(Stream) {}
  // Tells all ranks, without waiting for them, that this world is lost; and whether a rank has said
  // so. Engines that cannot say so: false.
  virtual bool give_up() { return false; }
  virtual bool given_up() { return false; }
  // How long the other ranks are waited for from now on. Engines without a clock ignore it.
  virtual void set_timeout(double) {}
};

// The world of one rank; stateless and shared.
Communicator& self_communicator();

}  // namespace talea
