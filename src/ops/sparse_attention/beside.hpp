// What: the calls beside the passes, for device tensors: index mask, packed rows, a status.
// Why: pack.cpp checks the arguments for host and device; only the work differs.
// Never: includes a CUDA header; without CUDA each says so.
#pragma once

#include <array>

#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention {

// Where a valid slot names key j, element (s, j) of `mask` becomes 0.
void index_mask_on_device(const Problem& p, const Args& a, const View& mask, Stream stream);
// n rows; strides of the outer extents are those of the tensors.
void pack_rows_on_device(const Tensor& kv, const Tensor& rows, Stream stream);
// Waits for the stream.
std::array<int64_t, 4> read_status(const View& status, int device_index, Stream stream);

}  // namespace talea::sparse_attention
