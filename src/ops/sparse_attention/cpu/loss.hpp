// What: the index loss of lane cpu.
// Why: its buffers are counted by the code that lays them out.
// Never: included by another lane.
#pragma once

#include "core/arena.hpp"
#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention::cpu {

int64_t loss_bytes(const Problem& p, int threads);
void index_loss(const Call& c, int threads);

}  // namespace talea::sparse_attention::cpu
