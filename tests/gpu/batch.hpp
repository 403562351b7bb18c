// What: a problem in device memory, its call, and its outputs as bytes.
// Why: the tests of manners compare outputs bit by bit and say nothing about their values.
// Never: shared between threads.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstddef>
#include <string>
#include <vector>

#include "core/device_session.hpp"
#include "talea/linear_cross_entropy.hpp"

namespace talea::gpu {

// Of the emulator: how often a test repeats what a GPU repeats many times (EMU_REPEATS).
inline int emulated_repeats(int many) {
  const char* text = std::getenv("EMU_REPEATS");
  return std::min(many, text ? std::atoi(text) : 3);
}

struct BatchSpec {
  int64_t tokens = 300, hidden = 96, vocab = 2500;
  DType dtype = DType::bf16;
  int64_t workspace_limit_bytes = int64_t{4} << 20;
  int64_t top_k = 3;
  bool everything = true;  // all per-token outputs, dX and dW; otherwise loss alone
  bool weight_gradient = true;
  bool gradients_alone = false;  // the loss, dX and dW
  uint64_t seed = 1;
  int device = 0;
};

// A lane that declines the batch throws, and the case fails.
class Batch {
 public:
  Batch(const BatchSpec& spec, const std::string& lane);

  // Queues the call on the session's stream, or on another.
  LinearCrossEntropyResult run();
  LinearCrossEntropyResult run(Stream stream);
  // Waits, then all outputs one after the other.
  std::vector<std::byte> outputs();
  std::vector<std::byte> bytes_of(const Tensor& t);
  void poison_outputs();

  DeviceSession& session() { return *session_; }
  LinearCrossEntropyInputs in;
  LinearCrossEntropyOutputs out;
  LinearCrossEntropyOptions options;
  Workspace workspace;

 private:
  Tensor make(DType dtype, std::initializer_list<int64_t> shape);
  void want(const BatchSpec& spec);
  std::vector<Tensor> all_outputs() const;
  std::unique_ptr<DeviceSession> session_;
  int device_;
};

// The CUDA lanes of this build, and the dtypes each has to take: lane cuda all, sm90 those of 16
// bits.
std::vector<std::string> lanes();
bool must_accept(const std::string& lane, DType dtype);

// Allocations and frees that went through the runtime so far.
int64_t counted_allocations();

}  // namespace talea::gpu
