// What: the products of one chunk as values: sizes, tiles, and how dX's rows are cut among tiles.
// Why: which tile fills the multiprocessors is arithmetic, and tested without a GPU.
// Never: multiplies.
#pragma once

#include <vector>

#include "ops/linear_cross_entropy/cuda/plan.hpp"

namespace talea::lce::cuda {

// The three products over `rows` rows and `columns` of the vocabulary.
device::Product logits_product(const Problem& p, const Plan& plan, int64_t rows, int64_t columns);
device::Product dx_product(const Problem& p, const Plan& plan, int64_t rows, int64_t columns,
                           device::Product::Tiles tiles);
device::Product dw_product(const Problem& p, const Plan& plan, int64_t rows, int64_t columns,
                           int64_t dw_stride);

// dX has few tiles, [rows, hidden], and long ones: what they leave of a wave over the
// multiprocessors is lost. So its rows are cut among tiles of different sizes.
struct DxPart {
  int64_t rows = 0;
  device::Product::Tiles tiles = device::Product::Tiles::library;
};
struct DxCut {
  std::vector<DxPart> parts;
  double waves = 0;  // time, in waves of tiles of 128 x 256
};
DxCut dx_cut(int64_t rows, int64_t hidden, int multiprocessors);

// Rows of a chunk up to `most` that multiply all tokens in the least time: whole waves for dX
// against fewer readings and writings of dW's fp32 sum.
int64_t balanced_rows(const Problem& p, const Plan& plan, int64_t most);

}  // namespace talea::lce::cuda
