// What: how a call of a CUDA lane begins to count foreign indices.
// Why: under IndexCheck::checked it ends there, before anything is written, in every lane alike.
// Never: waits for the device otherwise.
#pragma once

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/contract.hpp"
#include "ops/sparse_attention/foreign.cuh"

namespace talea::sparse_attention::cuda {

// Counters at zero. Under IndexCheck::checked: throws where an index is foreign.
inline void begin_counting(const Call& call, const Tables& tables, Counters* counters,
                           cudaStream_t stream) {
  reset(counters, stream);
  if (call.problem.options.index_check != IndexCheck::checked || !call.args.indices) return;
  require(
      !device::capturing(stream), ErrorKind::usage,
      "index_check = checked: needs a synchronisation, impossible while the stream is captured");
  const Foreign found = find_foreign(tables, call.problem.batch, counters, stream);
  require(found.count == 0, ErrorKind::invalid_data,
          "indices: {} at batch {}, query {}, slot {} lies outside its space ({} such)",
          found.value, found.batch, found.query, found.group * tables.slots + found.slot,
          found.count);
}

}  // namespace talea::sparse_attention::cuda
