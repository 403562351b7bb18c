// What: launches a product: tensor maps, shared memory, persistent grid.
// Why: each product's file holds only its shape and its epilogue.
// Never: waits for the device.
#pragma once
#include "device/common/cuda_check.hpp"
#include "device/sm90/gemm.cuh"
#include "device/sm90/tensor_map.hpp"

namespace talea::sm90 {

struct Operand {
  const void* data = nullptr;
  int64_t rows = 0, columns = 0, stride = 0;  // as it lies in memory
};

// `overlap`: may start once the kernel before it in the stream lets later kernels start.
template <class S, Epilogue<S> E>
void launch_gemm(const Operand& a, const Operand& b, const Extents& extents,
                 const typename E::Params& params, int blocks, bool overlap, cudaStream_t stream) {
  constexpr Element kElement = S::kF16 ? Element::f16 : Element::bf16;
  const CUtensorMap map_a = tensor_map(a.data, kElement, a.rows, a.columns, a.stride, S::kBoxRowsA);
  const CUtensorMap map_b = tensor_map(b.data, kElement, b.rows, b.columns, b.stride, S::kBoxRowsB);
  auto* kernel = gemm_kernel<S, E>;
  device::check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes),
      "shared memory of a product");
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  device::check(cudaLaunchKernelEx(&config, kernel, map_a, map_b, extents, params),
                "launch of a product");
}

}  // namespace talea::sm90
