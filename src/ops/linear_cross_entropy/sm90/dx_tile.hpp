// What: the shapes of a tile of dX of a pair of blocks.
// Why: the plan, its cost and the product name the same ones.
// Never: chooses; cost.cpp does.
#pragma once
#include <cstdint>

namespace talea::lce::sm90 {

// rows x columns: 256 x 256, 384 x 128 or 256 x 128. A tile of dX is as long as the vocabulary: of
// few rows or few columns there are few, and smaller ones leave fewer multiprocessors idle. The
// tall one only where nothing runs beside dX.
enum class DxTile { square, tall, narrow };

constexpr int64_t dx_tile_rows(DxTile t) { return t == DxTile::tall ? 384 : 256; }
constexpr int64_t dx_tile_columns(DxTile t) { return t == DxTile::square ? 256 : 128; }

}  // namespace talea::lce::sm90
