// What: describes a matrix to TMA, which copies boxes of it.
// Why: every map is encoded, and every refusal explained, in one place.
// Never: links the driver library: its entry point is asked from the runtime, so one binary starts
// anywhere.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace talea::sm90 {

enum class Element { bf16, f16, f32 };

// The driver's function; throws Error(unavailable) where it has none.
using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);
TensorMapEncoder tensor_map_encoder();

// A row-major [rows, columns] matrix, copied in boxes of box_rows x 128 bytes with 128-byte
// swizzle. Throws Error(runtime) where the driver refuses.
CUtensorMap tensor_map(const void* data, Element element, int64_t rows, int64_t columns,
                       int64_t row_stride, int box_rows);

}  // namespace talea::sm90
