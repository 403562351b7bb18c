// What: the passes of lane reference.
// Why: attention and the indexer each have a file of their own.
// Never: included by another lane.
#pragma once

#include "ops/sparse_attention/rows.hpp"

namespace talea::sparse_attention::reference {

void forward(const Call& c);
void backward(const Call& c);
void select(const Call& c);
void index_loss(const Call& c);

}  // namespace talea::sparse_attention::reference
