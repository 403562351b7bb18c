// What: the elementwise passes over one panel of one vocabulary tile: softmax state, gradient,
// top-k.
// Why: rows are vector lanes, so no row can see its neighbours and no reduction crosses lanes.
// Never: multiplies matrices, allocates or spawns threads.
#pragma once

#include <cstdint>

namespace talea::lce::cpu {

// One panel of a tile: lanes() rows side by side, `columns` vocabulary entries, element (v, row) at
// z[v * lanes() + row]. Arrays per row hold lanes() numbers, arrays per column `columns`.
struct TilePanel {
  float* z = nullptr;
  int64_t columns = 0;
  const int32_t* target = nullptr;      // per row: column of its target in this tile, or -1
  const float* scale = nullptr;         // per row
  const float* bias = nullptr;          // per column, or null
  const float* class_weight = nullptr;  // per column, or null for 1
  const float* soft = nullptr;          // dense soft targets laid out like z, or null
  float softcap = 0;                    // k; then z keeps the logits before the cap
};

// In: plain products. Out: z holds the logits (before the softcap), the partial states of the tile
// are written.
struct ForwardPass {
  bool plain = false;  // scale 1, no bias, no softcap: z already holds the logits
  bool wants_shifted = false, wants_class_sum = false;
  float* capped = nullptr;  // room for a tile panel, with a softcap
  // Per row; null: not wanted.
  float *max = nullptr, *others = nullptr, *shifted = nullptr;
  float *class_sum = nullptr, *soft_sum = nullptr, *soft_mass = nullptr;
};
void forward_pass(const TilePanel& t, const ForwardPass& f);
// The logits alone, bit for bit.
void logits_pass(const TilePanel& t, const ForwardPass& f);

// In: logits. Out: scale * da, the left operand of both gradient products.
struct GradientPass {
  bool wants_smooth = false, wants_entropy = false;
  // Per row; prob is per exp(z - max). The low parts are what rounding to fp32 took away: errors
  // shared by a whole row would add up in sums that cancel.
  const float *max, *prob, *prob_low, *target, *smooth, *smooth_low, *soft;
  // -entropy_weight * exp(z - max) * (z - max - entropy_offset)
  const float *entropy_weight, *entropy_offset;
  float* db_lanes = nullptr;  // adds da, laid out like z; or null
};
void gradient_pass(const TilePanel& t, const GradientPass& g);

// The k best of each row of a panel over `columns` logits; ids are columns. Slots that no number
// filled keep value -inf and id INT64_MAX. best: lanes() lists of k. softcap as in TilePanel.
struct Best {
  float value;
  int64_t id;
};
void top_k(const float* z, int64_t columns, float softcap, int64_t k, Best* best);

// One logit through the softcap, bit for bit as the passes do it, and the cap's derivative there.
struct Capped {
  float z, derivative;
};
Capped capped(float a, float softcap);

}  // namespace talea::lce::cpu
