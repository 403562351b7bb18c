// The decisions of lane sm90: whether it takes a problem, its chunk, its schedule, its workspace.
// Exists so that they are pure functions of (problem, device facts), tested without a GPU.
// Never touches a device.
#pragma once
#include <optional>
#include <string>

#include "ops/linear_cross_entropy/lane.hpp"
#include "ops/linear_cross_entropy/sm90/dx_tile.hpp"
#include "ops/linear_cross_entropy/sm90/rows.hpp"

namespace talea::lce {
struct BatchFacts;
}

namespace talea {
template <typename T>
struct Candidate;
}

namespace talea::lce::sm90 {

struct Config {
  int64_t chunk_rows = 0, chunks = 0;
  int64_t state_rows = 0;  // rows whose states are formed at once: sums per tile need less room
  // Gradients by slices of the vocabulary, every row at once: 0, or the words of a slice. Chosen
  // where 16-bit dW needs it, or where an earlier call's lse makes it cheap.
  int64_t slice_words = 0;
  bool from_saved = false;  // by slices: the row states come from the caller's saved outputs
  bool x_in_dx = false;     // by slices: the compacted rows lie in the caller's dX until its end
  int64_t exp_stride = 0;   // 16-bit elements of a row of the buffer; 0: there is none
  // The buffer holds the logits in fp32, then da: fp16, soft targets, what needs every logit once
  // the row is known. Otherwise it holds exp(z - shift), and the products see factors of rows.
  bool wide = false;
  // Small weights: da is kept in two 16-bit terms, since in a gradient of few terms one rounding
  // shows. Large ones: one.
  bool two_terms = false;
  // The buffer's exp(z - shift) becomes da in place before the products: the gradient of the
  // entropy, and a softcap together with smoothing or with the best words.
  bool transform = false;
  bool online = false;  // few tokens, loss only: sums relative to each tile's own maximum
  bool full = false;    // the logits epilogue that also leaves sums and maxima per tile
  bool f16 = false;
  int64_t kept = 0;            // candidates of a row for argmax and top-k
  bool gather_tokens = false;  // sequence parallel: the rows of all ranks are gathered first
  bool exchange_dx = false;    // dX of a chunk is summed over the ranks,
  bool bf16_sum = false;       // in bf16; otherwise in fp32
  int64_t tile_columns = 0;    // words of a tile of the logits product
  int64_t tiles = 0;           // vocabulary tiles of it
  int blocks = 0;              // of every persistent product
  // Where both gradients are wanted, dW starts on the multiprocessors that dX leaves free.
  int dx_blocks = 0;
  DxTile dx_tile = DxTile::square;      // tall only where dX is formed alone
  int dw_early = 0, dw_head_start = 0;  // pairs that start first, tiles they take beforehand
  // The logits of the next chunk run beside dW, too: dW has what dX leaves for the whole chunk, and
  // the logits take what dX had. The pairs that start there take so many tiles ahead of the rest.
  bool logits_ahead = false;
  int logits_head_start = 0;
  // dX over ranks: rows that are summed at once, all of the chunk's or half of them. Halves where
  // their products, on fewer blocks, take no more waves of tiles than the whole.
  int64_t dx_part_rows = 0;
  int dx_part_blocks = 0;
  bool general = false;    // the logits epilogue with bias, softcap, per-token scale, entropy
  bool smoothing = false;  // by sums of the weight: without softcap, not in the wide path
  bool rank_one = false;   // smoothing's share of dX and dW too: the buffer holds exp(z - shift)
  // How a 16-bit dW comes to be; none of them: it is fp32, and the products add to it.
  bool direct_dw = false;  // a product covers every row: it leaves it rounded
  bool round_dw = false;   // it accumulates in the workspace and is rounded once at the end
  bool split_dw = false;   // it accumulates in place, with so many more bits beside it
  int rest_bits = 0;
  double ms = 0;  // predicted, of one H200: to compare plans
  int64_t sort_bytes = 0;
};

std::optional<std::string> decline(const Problem& p, const DeviceFacts& device);
// Where lane cuda was measured to be faster (receipts/h200/training_fp16.json).
std::optional<std::string> yields(const Problem& p);
Config config(const Problem& p, const DeviceFacts& device);
// What outputs.dw_rest takes under the plan; 0: it keeps none within the limit.
int64_t rest_bytes(const Problem& p, const Config& c);
bool keeps_dx_rest(const Problem& p);

// The workspace, in the order in which it is laid out.
struct Buffers {
  int *token_target = nullptr, *tickets = nullptr;
  int *dx_read = nullptr, *dw_read = nullptr;  // counts of the tiles read of the buffer
  float *token_scale = nullptr, *token_shift = nullptr;
  RowBuffers rows;
  float *row_class_weight = nullptr, *row_class_sum = nullptr, *row_smooth = nullptr;
  float *bias = nullptr, *class_weight = nullptr;  // fp32, local columns
  float* db_factor = nullptr;
  double *row_loss = nullptr, *row_lse = nullptr, *db = nullptr;
  int8_t* hit = nullptr;
  int* least_exponent = nullptr;
  float* undo = nullptr;
  RowState<double>*own_states = nullptr, *all_states = nullptr;
  Candidate<float>*own_best = nullptr, *all_best = nullptr;
  RowFactors* factors = nullptr;
  float *sparse_logits = nullptr, *target_slope = nullptr, *dx_part = nullptr, *dx_all = nullptr;
  uint16_t* x_all = nullptr;
  BatchFacts* facts = nullptr;
  uint64_t *keys = nullptr, *sorted = nullptr;
  char* sort_scratch = nullptr;
  float *weight_sum = nullptr, *weight_parts = nullptr, *smooth_row = nullptr,
        *smooth_parts = nullptr;
  double* bias_sum = nullptr;
  uint16_t *x = nullptr, *exp = nullptr;
  float* logits = nullptr;  // wide: where exp lies
  float *tile_sums = nullptr, *tile_shifted = nullptr, *tile_classes = nullptr;
  float *tile_peaks = nullptr, *dw = nullptr;
  char* rest = nullptr;  // of a dW that is split, where the caller keeps none
};

}  // namespace talea::lce::sm90
