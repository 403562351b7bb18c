// What: see on_device.hpp.
// Why: see on_device.hpp.
// Never: see on_device.hpp.
#include "repro/support/on_device.hpp"

namespace talea::repro {

OnDevice::OnDevice() : session_(*device_in_use()) { session_.free_all(); }

void OnDevice::take(Tensor& tensor, bool written) {
  if (!tensor) return;
  const int64_t bytes = tensor.elements() * size_of(tensor.dtype);
  void* device = session_.allocate(bytes);
  session_.upload(device, tensor.data, bytes);
  if (written) back_.push_back({tensor.data, device, bytes});
  tensor.data = device;
  tensor.device = DeviceKind::cuda;
}

Workspace OnDevice::workspace(int64_t bytes) { return {session_.allocate(bytes), bytes}; }

Stream OnDevice::stream() { return session_.stream(); }

void OnDevice::finish() {
  session_.synchronise();
  for (const Copy& c : back_) session_.download(c.host, c.device, c.bytes);
}

}  // namespace talea::repro
