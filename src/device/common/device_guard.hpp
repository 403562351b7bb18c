// Makes a device current for a scope.
// Exists so that a call works on its tensors' device and leaves the caller's choice as it was.
// Never creates a context on another device.
#pragma once
#include "device/common/check.hpp"

namespace talea {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cuda_check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) cuda_check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace talea
