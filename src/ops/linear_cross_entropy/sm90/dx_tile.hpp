// What: the shapes of a tile of dX of a pair of blocks.
// Why: the plan, its cost and the product name the same ones.
// Never: chooses; cost.cpp does.
#pragma once
#include <cstdint>

namespace talea::lce::sm90 {

// rows x columns: 256 x 256, or 384 x 128. The tall one is a quarter smaller: where nothing runs
// beside dX, the plan takes whichever leaves fewer multiprocessors idle.
enum class DxTile { square, tall };

constexpr int64_t dx_tile_rows(DxTile t) { return t == DxTile::tall ? 384 : 256; }
constexpr int64_t dx_tile_columns(DxTile t) { return t == DxTile::tall ? 128 : 256; }

}  // namespace talea::lce::sm90
