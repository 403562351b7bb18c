// What: CUDA status checks, the guard of the current device and of a capture, earlier errors.
// Why: an error names the call that met it, and an older one is not blamed on this call.
// Never: synchronises or resets a device.
#include "device/common/cuda_check.hpp"

#include "core/fail.hpp"

namespace talea::device {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  fail(ErrorKind::runtime, "{}: CUDA error {} ({})", what, cudaGetErrorName(status),
       cudaGetErrorString(status));
}

DeviceGuard::DeviceGuard(int index) {
  check(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ == index) return;
  check(cudaSetDevice(index), "cudaSetDevice");
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) cudaSetDevice(before_);
}

RelaxedCapture::RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
RelaxedCapture::~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void refuse_earlier_error(cudaStream_t stream) {
  cudaError_t earlier = cudaGetLastError();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (earlier == cudaSuccess) earlier = cudaStreamIsCapturing(stream, &status);
  if (earlier == cudaSuccess && status == cudaStreamCaptureStatusNone) {
    const RelaxedCapture relaxed;  // another stream of this process may be capturing
    earlier = cudaStreamQuery(stream);
    if (earlier == cudaErrorNotReady) earlier = cudaSuccess;
    cudaGetLastError();
  }
  if (earlier == cudaSuccess) return;
  fail(ErrorKind::runtime,
       "an earlier CUDA error, pending before this call and not caused by it: {} ({})",
       cudaGetErrorName(earlier), cudaGetErrorString(earlier));
}

}  // namespace talea::device
