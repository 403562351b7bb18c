// What: cuTensorMapEncodeTiled, refusing what the driver refuses.
// Why: see cudart.cpp; the map's bytes are emu::pack's.
#include <cuda.h>

#include <cstdio>
#include <cstring>

#include "ptx.hpp"

namespace {

int bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ:
      return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return 8;
    default:
      return 0;
  }
}

CUresult refuse(const char* why) {
  std::fprintf(stderr, "emu: cuTensorMapEncodeTiled refused: %s\n", why);
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

extern "C" CUresult emu_cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                               void* address, const cuuint64_t* size, const cuuint64_t* stride,
                                               const cuuint32_t* box, const cuuint32_t* step,
                                               CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  if (!map || reinterpret_cast<uintptr_t>(map) % 64) return refuse("the map is not aligned to 64 bytes");
  const int element = bytes_of(type);
  if (!element) return refuse("data type");
  if (rank < 1 || rank > 5) return refuse("rank");
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return refuse("interleave (the emulator knows none)");
  if (reinterpret_cast<uintptr_t>(address) % 16) return refuse("the address is not aligned to 16 bytes");
  int swizzle_bytes = 0;
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE:
      break;
    case CU_TENSOR_MAP_SWIZZLE_32B:
      swizzle_bytes = 32;
      break;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      swizzle_bytes = 64;
      break;
    case CU_TENSOR_MAP_SWIZZLE_128B:
      swizzle_bytes = 128;
      break;
    default:
      return refuse("swizzle");
  }
  emu::TensorMap m{};
  m.type = static_cast<uint8_t>(type), m.rank = static_cast<uint8_t>(rank);
  m.interleave = 0, m.swizzle = static_cast<uint8_t>(swizzle), m.oob_fill = static_cast<uint8_t>(fill);
  m.element_bytes = static_cast<uint8_t>(element);
  m.address = reinterpret_cast<uint64_t>(address);
  for (cuuint32_t i = 0; i < 5; ++i) m.size[i] = 1, m.box[i] = 1;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (size[i] == 0 || size[i] > (uint64_t{1} << 32)) return refuse("a size is 0 or beyond 2^32");
    if (box[i] == 0 || box[i] > 256) return refuse("a box extent is 0 or beyond 256");
    if (step[i] == 0 || step[i] > 8) return refuse("an element stride is 0 or beyond 8");
    if (step[i] != 1) return refuse("an element stride beyond 1 (the emulator knows none)");
    m.size[i] = size[i], m.box[i] = static_cast<uint16_t>(box[i]);
    if (i + 1 < rank) {
      if (stride[i] % 16) return refuse("a stride is no multiple of 16 bytes");
      if (stride[i] >= (uint64_t{1} << 40)) return refuse("a stride is beyond 2^40");
      m.stride[i] = stride[i];
    }
  }
  const uint64_t inner = uint64_t{box[0]} * static_cast<uint64_t>(element);
  if (inner % 16) return refuse("the box's inner bytes are no multiple of 16");
  if (swizzle_bytes && inner > static_cast<uint64_t>(swizzle_bytes))
    return refuse("the box's inner bytes exceed the swizzle");
  const bool is_float = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ||
                        (type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT32 && type <= CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ);
  if (fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA && !is_float) return refuse("NaN fill of integers");
  emu::pack(m, map);
  return CUDA_SUCCESS;
}
