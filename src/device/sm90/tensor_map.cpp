// What: describes a matrix to TMA, which copies boxes of it.
// Why: every map is encoded, and every refusal explained, in one place.
// Never: links the driver library: its entry point is asked from the runtime.
#include "device/sm90/tensor_map.hpp"

#include "core/fail.hpp"

namespace talea::sm90 {
namespace {

TensorMapEncoder find_encoder() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                              12000, cudaEnableDefault, &found);
  require(status == cudaSuccess && found == cudaDriverEntryPointSuccess, ErrorKind::unavailable,
          "the CUDA driver has no cuTensorMapEncodeTiled: {}", cudaGetErrorString(status));
  return reinterpret_cast<TensorMapEncoder>(entry);
}

}  // namespace

TensorMapEncoder tensor_map_encoder() {
  static const TensorMapEncoder encoder = find_encoder();
  return encoder;
}

CUtensorMap tensor_map(const void* data, Element element, int64_t rows, int64_t columns,
                       int64_t row_stride, int box_rows) {
  const int64_t size = element == Element::f32 ? 4 : 2;
  const CUtensorMapDataType type = element == Element::bf16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : element == Element::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  CUtensorMap map{};
  const cuuint64_t extent[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(row_stride * size)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / size),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t step[2] = {1, 1};
  const CUresult status =
      tensor_map_encoder()(&map, type, 2, const_cast<void*>(data), extent, stride, box, step,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(status == CUDA_SUCCESS, ErrorKind::runtime,
          "tensor map of [{}, {}] with row stride {} at {}: driver error {}", rows, columns,
          row_stride, data, static_cast<int>(status));
  return map;
}

}  // namespace talea::sm90
