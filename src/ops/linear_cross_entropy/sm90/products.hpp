// What: the three products of the lane as host functions, with the shapes they are built for.
// Why: the lane's plan is plain C++ and each product compiles in a file of its own.
// Never: chooses: chunk, grid and options come from the plan.
#pragma once
#include <cuda_runtime.h>

#include "ops/linear_cross_entropy/sm90/dx_tile.hpp"
#include "ops/linear_cross_entropy/sm90/rows.hpp"
#include "ops/linear_cross_entropy/sm90/split.hpp"

namespace talea::lce::sm90 {

struct Matrix {
  void* data = nullptr;
  int64_t rows = 0, columns = 0, stride = 0;
};

// A buffer's matrix may be a sum of terms, `offset` elements apart in its rows.
struct Terms {
  int count = 1, offset = 0;
};

struct Launch {
  cudaStream_t stream = nullptr;
  int blocks = 0;  // persistent, even
};

// Rows of the launch: [begin, begin + capacity) of those in use.
struct ChunkRows {
  int begin = 0, capacity = 0;
  const int* in_use = nullptr;
};

inline constexpr int kLogitsTile = 192;
// The logits product of few tokens takes so many rows at once. Up to that many, its tiles may be
// wider: a last wave of few tiles is the slower the fewer they are.
inline constexpr int kFewRows = 128, kWideLogitsTile = 256;

// What the logits product leaves.
enum class LogitsMode {
  shift,  // only the row maximum of the first vocabulary tile, which becomes the row's shift
  store,  // partial sums, and exp(z - shift) into the buffer
  ahead,  // the same beside the gradient products of the chunk before, whose buffer it overwrites
  sums,   // partial sums alone: nothing of the size of the logits is written
  online  // the same relative to each tile's own maximum: no shift has to be known
};

struct LogitsCall {
  Matrix x, weight, exp;  // exp: [rows, vocab] bf16, unused unless stored
  bool x_at_end = false;  // the rows in use are x's last ones
  ChunkRows chunk;
  RowBuffers rows;
  float* tile_sums = nullptr;
  float* tile_shifted = nullptr;
  float *tile_classes = nullptr, *tile_peaks = nullptr;  // of a full epilogue, where wanted
  const float* class_weight = nullptr;
  bool full = false;
  TilePlaces places;
  LogitRule rule;
  bool general = false;  // bias, softcap, per-token scale, entropy or a scale <= 0
  LogitsMode mode = LogitsMode::store;
  int64_t tile_columns = kLogitsTile;  // online, up to kFewRows: or kWideLogitsTile
  // ahead: what runs beside it. Pairs of blocks that dX leaves to it, the
  // tiles they are ahead of those that dW leaves, a zeroed counter.
  Readers readers;
  int early = 0, head_start = 0;
  int* tickets = nullptr;
  bool repair = false;
  bool overlaps = true;  // launched ahead of the end of the kernel before it
};
void logits_product(const LogitsCall& call, const Launch& launch);

struct WideLogitsCall {
  Matrix x, weight, logits;  // logits: [rows, vocab] fp32
  ChunkRows chunk;
  bool f16 = false;
};
void wide_logits_product(const WideLogitsCall& call, const Launch& launch);

struct DxCall {
  DxTile tile = DxTile::square;
  Matrix exp, weight, dx;
  Terms terms;
  bool f16 = false;      // the operands' dtype
  bool f32_out = false;  // dx in fp32; otherwise the operands' dtype
  bool scatters = true;  // rows go to rows.index; otherwise dense
  ChunkRows chunk;
  RowBuffers rows;
  const float* smooth_row = nullptr;
  const float* smooth_factor = nullptr;
  bool overlaps = false;         // launched ahead of the end of the kernel before it
  int* read = nullptr;           // counts its tiles, or null
  uint8_t* exponents = nullptr;  // of a bf16 dx in codes, [tokens, blocks], or null
};
void dx_product(const DxCall& call, const Launch& launch);

// G of one slice of the vocabulary, for every row: what is left of da once the target's element is
// taken out, rounded to 16 bits.
struct SliceLogitsCall {
  Matrix x, weight, gradient;  // weight, gradient: of the slice
  ChunkRows chunk;
  RowBuffers rows;
  const RowFactors* factors = nullptr;
  const float* class_weight = nullptr;  // of the slice, or null for ones
  LogitRule rule;                       // bias of the slice
  int first_word = 0;
  bool general = false;  // bias, softcap, per-token scale, smoothing, entropy or a scale <= 0
};
void slice_logits_product(const SliceLogitsCall& call, const Launch& launch);

// sum += G W over the words of one slice, fp32 [rows, hidden].
struct SliceDxCall {
  DxTile tile = DxTile::tall;  // or square
  Matrix gradient, weight, sum;
  ChunkRows chunk;
  bool add = true;  // false: the first slice overwrites
};
void slice_dx_product(const SliceDxCall& call, const Launch& launch);

struct DwCall {
  Matrix exp, x, dw;  // x: the chunk's rows times f
  Terms terms;
  ChunkRows chunk;
  bool f16 = false;             // the operands' dtype
  const float* undo = nullptr;  // multiplies the product, or null
  bool add = true;
  bool beside_dx = false;  // may start while the launch before it still runs
  // In a full chunk: pairs of blocks that dX leaves free, tiles they are ahead. dX's own pairs say
  // the same of a chunk with fewer rows in use.
  int early = 0, head_start = 0, dx_pairs = 0;
  int* tickets = nullptr;  // zeroed
  // dw is 16-bit and this call holds every row: the targets' share is added before the rounding.
  bool rounds = false;
  // Counts its tiles by Readers::kWords words, for logits that follow beside it; or null.
  int* read = nullptr;
  int first_word = 0;  // of dw's rows
  const uint64_t* sorted = nullptr;
  RowBuffers rows;
  Matrix hidden;  // the original rows
  const float* smooth_row = nullptr;
  const float* class_weight = nullptr;
  Rest rest;         // of a dw of two numbers
  bool ends = true;  // no chunk follows: it is left rounded
};
void dw_product(const DwCall& call, const Launch& launch);
void split_dw_product(const DwCall& call, const Launch& launch);

}  // namespace talea::lce::sm90
