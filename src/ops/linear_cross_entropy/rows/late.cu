// What: a late factor on a device: rows or whole gradients scaled, or compared with what was said.
// Why: forward forms the gradients; what backward brings is known only on the device.
// Never: reads the factor on the host.
#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "device/common/view.cuh"
#include "ops/linear_cross_entropy/late.hpp"

namespace talea::lce {
namespace {

using device::View;

// Element-wise: from, times the factor of its row, to `to`; in place, a factor of 1 costs a launch.
__global__ void __launch_bounds__(256)
    scale_kernel(View factor, View from, View to, int64_t rows, int64_t columns, bool by_row) {
  if (from.data == to.data && !by_row && static_cast<float>(factor.load(0)) == 1.f) return;
  const bool fast = from.dtype == DType::f32 && to.dtype == DType::bf16 && from.stride1 == 1 &&
                    to.stride1 == 1 && columns % 8 == 0 && from.stride0 % 4 == 0 &&
                    to.stride0 % 8 == 0 && reinterpret_cast<uintptr_t>(from.data) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(to.data) % 16 == 0;
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
    const double f = factor.load(by_row ? i : 0);
    const auto scaled = [&](float x) { return x == 0.f ? 0.f : static_cast<float>(x * f); };
    const auto* row = static_cast<const float*>(from.data) + i * from.stride0;
    for (int64_t j = int64_t{8} * threadIdx.x; j < columns; j += int64_t{8} * blockDim.x) {
      if (!fast) {
        for (int64_t k = j; k < min(j + 8, columns); ++k) {
          const double x = from.load(i, k);
          to.store(i, k, x == 0 ? 0 : x * f);
        }
        continue;
      }
      const float4 a = *reinterpret_cast<const float4*>(row + j);
      const float4 b = *reinterpret_cast<const float4*>(row + j + 4);
      __nv_bfloat162 out[4] = {__floats2bfloat162_rn(scaled(a.x), scaled(a.y)),
                               __floats2bfloat162_rn(scaled(a.z), scaled(a.w)),
                               __floats2bfloat162_rn(scaled(b.x), scaled(b.y)),
                               __floats2bfloat162_rn(scaled(b.z), scaled(b.w))};
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to.data) + i * to.stride0 + j) =
          *reinterpret_cast<const uint4*>(out);
    }
  }
}

__global__ void __launch_bounds__(256) compare_kernel(View factor, View expected, View dx,
                                                      int64_t rows, int64_t columns, Fault* fault) {
  const auto got = static_cast<float>(factor.load(0)), said = static_cast<float>(expected.load(0));
  if (got == said) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    fault->expected = said, fault->got = got;
    __threadfence_system();
    fault->raised = 1;
  }
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x)
    for (int64_t j = threadIdx.x; j < columns; j += blockDim.x)
      dx.store(i, j, static_cast<double>(NAN));
}

void scale(const Tensor& factor, const Tensor& from, const Tensor& to, cudaStream_t stream) {
  const int64_t rows = to.shape[0], columns = to.shape[1];
  if (rows == 0 || columns == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(rows, 8192));
  scale_kernel<<<blocks, 256, 0, stream>>>(View(factor), View(from), View(to), rows, columns,
                                           factor.rank == 1);
  device::check_launch("late factor");
}

Fault* shared_fault = nullptr;

Fault* fault_of_devices() {
  static const bool made = [] {
    void* memory = nullptr;
    device::check(
        cudaHostAlloc(&memory, sizeof(Fault), cudaHostAllocMapped | cudaHostAllocPortable),
        "memory of the fault flag");
    shared_fault = new (memory) Fault;
    return true;
  }();
  return made ? shared_fault : nullptr;
}

}  // namespace

Fault* known_fault() { return shared_fault; }

void late_on_device(const LinearCrossEntropyLate& l, Stream on) {
  const device::DeviceGuard guard(l.factor.device_index);
  const cudaStream_t stream = device::cuda_stream(on);
  if (l.expected) {
    const int64_t rows = l.dx ? l.dx.shape[0] : 0, columns = l.dx ? l.dx.shape[1] : 0;
    const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(rows, 1, 1024));
    compare_kernel<<<blocks, 256, 0, stream>>>(View(l.factor), View(l.expected), View(l.dx), rows,
                                               columns, fault_of_devices());
    return device::check_launch("expected factor");
  }
  if (l.dx_rest || l.dw_rest) multiply_with_rests(l, on);
  if (l.dx && !l.dx_rest) scale(l.factor, l.dx_sum ? l.dx_sum : l.dx, l.dx, stream);
  if (l.dw && !l.dw_rest) scale(l.factor, l.dw_sum ? l.dw_sum : l.dw, l.dw, stream);
}

}  // namespace talea::lce
