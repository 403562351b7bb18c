// What: CUDA status checks, the guard of the current device and of a capture, earlier errors.
// Why: an error names the call that met it, and an older one is not blamed on this call.
// Never: synchronises or resets a device.
#pragma once

#include <cuda_runtime_api.h>

#include "talea/communicator.hpp"

namespace talea::device {

void check(cudaError_t status, const char* what);

// The launch just made.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

// Makes `index` current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Lets this thread make calls that a capture in global mode would forbid (loading a library,
// creating a handle); they do not touch the captured stream.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

bool capturing(cudaStream_t stream);

// Throws where an error from before this call is pending on the device or its context.
void refuse_earlier_error(cudaStream_t stream);

}  // namespace talea::device
