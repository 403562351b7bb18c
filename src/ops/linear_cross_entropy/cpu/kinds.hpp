// What: the two kinds of products of lane cpu: fp32 numbers, and pairs of bf16.
// Why: the phases are written once; what differs is how operands lie and how they are packed.
// Never: decides which kind runs; the plan does.
#pragma once

#include "device/cpu/pair_product.hpp"
#include "ops/linear_cross_entropy/cpu/plan.hpp"

namespace talea::lce::cpu {

// What the phases use of the device's bricks.
using talea::cpu::add_row;
using talea::cpu::Ahead;
using talea::cpu::LeftForm;
using talea::cpu::load_row;
using talea::cpu::max_lanes;
using talea::cpu::multiply;
using talea::cpu::store_row;

struct WideKind {  // any dtype, widened to fp32
  using Product = talea::cpu::TileProduct;
  using Number = float;
  static constexpr bool rounds = false;  // gradient factors
  static constexpr int64_t dx_step = dx_depth;
  static int64_t depth(int64_t k) { return k; }
  static int64_t depth_of_block(int64_t) { return depth_block; }
  static float* xt(const Buffers& b) { return b.xt; }
  static float* xs(const Buffers& b) { return b.xs; }
  static Number number(float x) { return x; }
  // Place of element (k, lane) in a panel of a right operand.
  static int64_t place(int64_t k, int64_t lane, int64_t lanes) { return k * lanes + lane; }
  static void load_row(const Tensor& w, int64_t first, int64_t n, Number* to) {
    talea::cpu::load_row(w.data, w.dtype, first, w.stride[1], n, to);
  }
  static void load(const talea::cpu::RowBlock& block, Number* to, int64_t panel) {
    talea::cpu::load_panels(block, to, panel);
  }
};

struct PairKind {  // bf16 hidden and weight; gradients rounded to bf16 where eager code rounds them
  using Product = talea::cpu::PairProduct;
  using Number = uint16_t;
  static constexpr bool rounds = true;
  static constexpr int64_t dx_step = dx_pair_depth;
  static_assert(dx_step == tile_columns);
  static int64_t depth(int64_t k) { return k + k % 2; }
  // Equal parts: three panels of a right operand stay in the first cache.
  static int64_t depth_of_block(int64_t k) {
    return k == 0 ? 2 : depth(blocks(k, blocks(k, pair_depth_block)));
  }
  static uint16_t* xt(const Buffers& b) { return b.xt_pairs; }
  static uint16_t* xs(const Buffers& b) { return b.xs_pairs; }
  static Number number(float x) {  // exact: it was widened from bf16
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return static_cast<Number>(bits >> 16);
  }
  static int64_t place(int64_t k, int64_t lane, int64_t lanes) {
    return (k - k % 2) * lanes + lane * 2 + k % 2;
  }
  static void load_row(const Tensor& w, int64_t first, int64_t n, Number* to) {
    const auto* from = static_cast<const Number*>(w.data) + first;
    for (int64_t k = 0; k < n; ++k) to[k] = from[k * w.stride[1]];
    if (n % 2 == 1) to[n] = 0;
  }
  static void load(const talea::cpu::RowBlock& block, Number* to, int64_t panel) {
    talea::cpu::load_pairs(block, to, panel);
  }
};

}  // namespace talea::lce::cpu
