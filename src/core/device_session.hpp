// What: a device as the tools use it: memory, a stream, timing by events, clocks, plain products.
// Why: the command line and the benches need a device without including a CUDA header.
// Never: used by a lane; lanes allocate nothing and time nothing.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "talea/communicator.hpp"
#include "talea/tensor.hpp"

namespace talea {

// What the driver says of the chip at this moment; -1 or empty where it does not say.
struct DeviceClocks {
  int sm_mhz = -1, memory_mhz = -1, temperature_c = -1;
  double power_watts = -1, power_limit_watts = -1;
  std::string throttle_reasons;  // comma-separated; "none"
  std::string driver;
};

class DeviceSession {
 public:
  // Null where this build or machine has no such device; `why` says which.
  static std::unique_ptr<DeviceSession> open(int device_index, std::string& why);
  virtual ~DeviceSession() = default;

  virtual Stream stream() = 0;
  // 256-byte aligned; freed with the session.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void free_all() = 0;
  virtual void upload(void* to, const void* from, int64_t bytes) = 0;
  virtual void download(void* to, const void* from, int64_t bytes) = 0;
  virtual void fill_bytes(void* to, int value, int64_t bytes) = 0;
  // Normal numbers of this deviation, the same for the same seed; dtype fp32, bf16 or fp16.
  virtual void fill_normal(const Tensor& t, uint64_t seed, double deviation) = 0;
  // Uniform int64 ids in [0, bound).
  virtual void fill_ids(const Tensor& t, uint64_t seed, int64_t bound) = 0;
  virtual void synchronise() = 0;
  // What `work` queues on stream(), between two events, in milliseconds. Waits for it.
  virtual double time_ms(const std::function<void()>& work) = 0;
  // A point on stream(), by number from 0 on; and the time between two of them, which it waits for.
  virtual int mark() = 0;
  virtual double between_ms(int first, int last) = 0;
  // Within the device, on stream().
  virtual void queue_copy(void* to, const void* from, int64_t bytes) = 0;
  virtual int64_t free_bytes() = 0;
  virtual DeviceClocks clocks() = 0;
  virtual std::string name() = 0;
  virtual std::string runtime() = 0;  // versions of the CUDA runtime and of cuBLASLt
};

// The three products of a problem as a plain library would run them, whole: logits (16-bit or fp32
// as the inputs), dX and dW in the inputs' dtype. The limit that every lane is measured against.
struct PlainProducts {
  Tensor hidden, weight;  // [N, D], [V, D], dense
  Tensor logits;          // [N, V] of the same dtype: product 1 writes it, 2 and 3 read it;
                          // rows may be padded, so that no limit pays for an odd vocabulary
  Tensor dx, dw;          // [N, D], [V, D]
  void* workspace = nullptr;
};
int64_t plain_products_workspace_bytes();
void queue_plain_logits(const PlainProducts& p, Stream stream);
void queue_plain_dx(const PlainProducts& p, Stream stream);
void queue_plain_dw(const PlainProducts& p, Stream stream);

}  // namespace talea
