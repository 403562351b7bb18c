// What: the tensors of a call, copied to the device in use; what the call wrote, copied back.
// Why: each operator's reproducers run their path on a device in the same way.
// Never: used without a device in use.
#pragma once

#include <vector>

#include "repro/support/repro.hpp"
#include "talea/call.hpp"
#include "talea/tensor.hpp"

namespace talea::repro {

class OnDevice {
 public:
  OnDevice();  // what an earlier call had on the device is freed

  // Makes the tensor, where there is one, a copy on the device.
  void take(Tensor& tensor, bool written);
  Workspace workspace(int64_t bytes);
  Stream stream();
  // Waits for the call, and copies back what it wrote.
  void finish();

 private:
  struct Copy {
    void *host, *device;
    int64_t bytes;
  };
  DeviceSession& session_;
  std::vector<Copy> back_;
};

}  // namespace talea::repro
