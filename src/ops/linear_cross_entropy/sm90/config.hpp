// The decisions of lane sm90: whether it takes a problem, its chunk, its schedule, its workspace.
// Exists so that they are pure functions of (problem, device facts), tested without a GPU.
// Never touches a device.
#pragma once
#include <optional>
#include <string>

#include "ops/linear_cross_entropy/lane.hpp"
#include "ops/linear_cross_entropy/sm90/rows.hpp"

namespace talea::lce {
struct BatchFacts;
}

namespace talea::lce::sm90 {

struct Config {
  int64_t chunk_rows = 0, chunks = 0;
  int64_t exp_stride = 0;  // elements of a row of E; 0: E is not stored
  int64_t tiles = 0;       // vocabulary tiles of the logits product
  int blocks = 0;          // of every persistent product
  // Where both gradients are wanted, dW starts on the multiprocessors that dX leaves free.
  int dx_blocks = 0;
  int dw_early = 0, dw_head_start = 0;  // pairs that start first, tiles they take beforehand
  bool general = false;  // the logits epilogue with bias, softcap, per-token scale, entropy
  bool smoothing = false;
  bool direct_dw = false;  // one chunk holds every row: bf16 dW leaves the product rounded
  bool round_dw = false;   // dW accumulates in the workspace and is rounded once at the end
  int64_t sort_bytes = 0;
};

std::optional<std::string> decline(const Problem& p, const DeviceFacts& device);
Config config(const Problem& p, const DeviceFacts& device);

// The workspace, in the order in which it is laid out.
struct Buffers {
  int *token_target = nullptr, *tickets = nullptr;
  float *token_scale = nullptr, *token_shift = nullptr;
  RowBuffers rows;
  float *row_class_weight = nullptr, *row_class_sum = nullptr, *row_smooth = nullptr;
  double* row_loss = nullptr;
  BatchFacts* facts = nullptr;
  uint64_t *keys = nullptr, *sorted = nullptr;
  char* sort_scratch = nullptr;
  float *weight_sum = nullptr, *weight_parts = nullptr, *smooth_row = nullptr,
        *smooth_parts = nullptr;
  double* bias_sum = nullptr;
  uint16_t *x = nullptr, *exp = nullptr;
  float *tile_sums = nullptr, *tile_shifted = nullptr, *dw = nullptr;
};

}  // namespace talea::lce::sm90
