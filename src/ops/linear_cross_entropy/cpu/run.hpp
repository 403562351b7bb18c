// What: one call of lane cpu in progress: its plan, buffers and the chunk at work.
// Why: the phases of a chunk (rows.cpp, products.cpp, dx.cpp) share one small state.
// Never: outlives the call.
#pragma once

#include "ops/linear_cross_entropy/cpu/kinds.hpp"

namespace talea::lce::cpu {

// Rows of hidden, wherever they lie.
struct HiddenRows {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t row_stride = 0, col_stride = 1;
};

struct Chunk {
  int64_t first = 0;   // index into Buffers::active
  int64_t rows = 0;    // valid rows
  int64_t padded = 0;  // to 16
  bool is_first = true;
};

// What one task of a step of dX adds to.
struct DxBlock {
  int64_t row, rows, column, columns;
};

// A few columns of a tile of dW, and where they are summed.
struct DwBlock {
  int64_t tile, column, columns;
  float* c = nullptr;
  int64_t c_row = 0;
  bool to_the_edge = false;  // c ends with the columns, not with a panel
  bool add = false;
  talea::cpu::Ahead ahead = {};
};

class Run {
 public:
  Run(const Call& call, const Plan& plan);
  void all();

 private:
  // lane.cpp
  void begin();
  void blank(int64_t t, RowKind kind);
  void gather_hidden();
  void chunk();
  void finish_outputs();
  void finish_dx();
  void record_facts();

  // products.cpp, dx.cpp: phases over tiles
  void pack_hidden();
  template <class Kind>
  void pack_panel(int64_t panel, float* row);
  void logits();
  void logits_tile(int64_t tile, int64_t panel, int64_t panels, float* scratch);
  void logits_again(int64_t tile, const struct Scratch& s);
  bool plain_logits() const;  // products are logits
  template <class Kind>
  void logits_product(int64_t tile, int64_t panel, int64_t panels, const struct Scratch& s);
  void backward();
  void gradients(int64_t first, int64_t end);
  void gradient_tile(int64_t tile, float* scratch);
  void dw_tile(int64_t tile, float* scratch);
  template <class Kind>
  void dw_product(const DwBlock& block);
  void dw_tile_through_scratch(int64_t tile, float* scratch);
  void dx(int64_t begin, int64_t end);
  template <class Kind>
  void dx_block(const DxBlock& block, int64_t begin, int64_t end, float* scratch);
  talea::cpu::Ahead logits_ahead(int64_t tile, int64_t share, int64_t shares) const;
  talea::cpu::Ahead weight_ahead(int64_t v0, int64_t rows, int64_t column, int64_t columns) const;
  TilePanel tile_panel(int64_t tile, int64_t panel, int32_t* target) const;
  void load_tile(int64_t tile, const struct Scratch& s) const;
  void load_soft(int64_t tile, int64_t panel, const struct Scratch& s) const;
  void save_listed(int64_t tile);
  void correct_listed(int64_t tile, float* db_lanes);

  // rows.cpp: phases over rows
  void row_terms();
  void reduce_rows();
  void reduce_row(int64_t r);
  void rank_rows();
  void exchange();
  void finish_rows();
  double finish_row_of_chunk(int64_t r);
  void sort_sparse();
  void store_dx();

  int64_t token(int64_t r) const { return b_.active[chunk_.first + r]; }
  float* logit(int64_t r, int64_t v) const {
    return b_.z + r / lanes_ * panel_floats() + (v - window_ * tile_columns) * lanes_ + r % lanes_;
  }
  uint32_t* rest(int64_t tile, int64_t r) const {
    return b_.rest + ((tile - window_) * plan_.chunk_rows + r) * talea::cpu::Remainders::most;
  }
  // f(column in the tile, remainder) for each of row r.
  template <class F>
  void for_rest(int64_t tile, int64_t r, F f) const {
    using talea::cpu::Remainders;
    const uint32_t* list = rest(tile, r);
    for (int64_t i = 0; i < Remainders::most && list[i] != 0; ++i)
      f(Remainders::column(list[i]), Remainders::value(list[i]));
  }
  // A panel of logits, one row of lanes after the other, for the products.
  int64_t panel_floats() const { return plan_.window_columns * lanes_; }
  int64_t window_end() const { return std::min(window_ + plan_.window_tiles, plan_.tiles); }
  int64_t tile_size(int64_t tile) const {
    return std::min(tile_columns, plan_.columns - tile * tile_columns);
  }
  float* slice(int thread) const { return b_.scratch + thread * b_.scratch_floats; }
  float class_weight(int64_t v) const;  // of this rank's column v

  const Call& c_;
  const Problem& p_;
  const Plan& plan_;
  Arena arena_;
  Buffers b_;
  const int64_t lanes_, k_;
  bool dw_direct_ = false;  // products add straight into the caller's fp32 rows
  float* dw_ = nullptr;
  int64_t dw_stride_ = 0;
  HiddenRows x_;
  TargetFacts facts_;
  Normaliser m_;
  LossTerms<double> terms_;
  Chunk chunk_;
  int64_t window_ = 0;  // its first tile
  int64_t active_ = 0, chunk_rows_ = 0, chunks_ = 0;
  double loss_sum_ = 0;
  int64_t hits_ = 0;
};

}  // namespace talea::lce::cpu
