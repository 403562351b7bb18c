// What: how lane sm90 cuts a backward call: chunks of queries, blocks, memory; and what it declines.
// Why: a pure function of the problem and the device, tested without one.
// Never: reads a tensor.
#pragma once

#include <optional>
#include <string>

#include "core/arena.hpp"
#include "core/device_facts.hpp"
#include "ops/sparse_attention/sm90/backward_rows.hpp"

namespace talea::sparse_attention::sm90 {

struct BackwardConfig {
  int64_t head_tiles = 1;   // of a group, 64 heads each
  int64_t key_tiles = 0;    // of a list, 64 slots each
  int64_t lists = 0;        // queries x groups
  int64_t chunk_lists = 1;  // whose P, dS and contributions lie in the workspace at a time
  int64_t inner_rows = 1,
          rows = 0;        // rows of dkv: of a page or batch entry; outer * inner * groups
  int64_t sort_bytes = 0;  // of a chunk, as the library asks
  int sm_count = 1;
  SumPlan sums;
  bool counts = false;        // foreign indices
  bool contributes = false;   // dkv in a fixed order: slots leave rows of their own
  bool converts_dkv = false;  // dkv is summed in fp32 in the workspace
  bool adds = false;          // dkv is added by the kernel that forms dq: no chunks, no P and dS
  float exponent = 0;         // of the power of two next to |scale|
};

struct BackwardBuffers {
  cuda::Counters* counters = nullptr;
  float* delta = nullptr;          // [batch, queries, heads]
  float* sink_share = nullptr;     // alike
  float* dkv = nullptr;            // [outer, inner, groups, dim]
  char* weights = nullptr;         // of a chunk
  float* contributions = nullptr;  // of a chunk
  Sorted sorted;
};

std::optional<std::string> decline_backward(const Problem& p);
// sort_bytes: what a sort of so many slots among so many rows asks for.
BackwardConfig backward_config(const Problem& p, const DeviceFacts& d,
                               int64_t (*sort_bytes)(int64_t slots, int64_t rows));
BackwardBuffers lay_out_backward(Arena& arena, const Problem& p, const BackwardConfig& c);

}  // namespace talea::sparse_attention::sm90
