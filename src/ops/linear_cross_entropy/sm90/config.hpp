// What: the decisions of lane sm90: whether it takes a problem, its chunk, its schedule, its
// workspace.
// Why: they are pure functions of (problem, device facts), tested without a GPU.
// Never: touches a device.
#pragma once
#include <optional>
#include <string>

#include "ops/linear_cross_entropy/lane.hpp"
#include "ops/linear_cross_entropy/sm90/dx_tile.hpp"
#include "ops/linear_cross_entropy/sm90/rows.hpp"
#include "ops/linear_cross_entropy/sm90/split.hpp"

namespace talea::lce {
struct BatchFacts;
}

namespace talea {
template <typename T>
struct Candidate;
}

namespace talea::lce::sm90 {

// What lies in the buffer of a chunk between the products.
enum class Path {
  folded,       // exp(z - shift) in 16 bits; the products see factors of rows
  transformed,  // the same, which a pass turns into da in place: the gradient of the entropy, and a
                // softcap together with smoothing or with the best words
  wide          // the logits in fp32, then da: fp16, soft targets, what needs every logit once the
                // row is known
};
// What is cut, and in which order the pieces are gone through.
enum class Schedule {
  chunks,        // of rows
  chunks_ahead,  // the logits of the next chunk run beside dW, too: dW has what dX leaves for the
                 // whole chunk, and the logits take what dX had
  slices,        // of the vocabulary, every row at once, after a pass for the row states: where
                 // 16-bit dW needs it
  slices_saved   // the same, where the row states come from the caller's saved outputs
};
// How dW comes to be.
enum class DwOutput {
  in_place,   // fp32, and the products add to it; or there is none
  direct,     // 16 bits: one product covers every row and leaves it rounded
  workspace,  // 16 bits: summed in fp32 in the workspace, rounded once at the end
  split       // 16 bits: summed in place, with rest_bits more beside it, or an exponent for 128
};
// Where the logits' sum that smoothing needs comes from.
enum class Smoothing {
  per_logit,  // each logit's epilogue or pass, or there is none
  by_sums,    // one sum of the weight: without softcap, not in the wide path
  rank_one    // its share of dX and dW too: the buffer holds exp(z - shift)
};

struct Config {
  Path path = Path::folded;
  Schedule schedule = Schedule::chunks;
  DwOutput dw = DwOutput::in_place;
  Smoothing smoothing = Smoothing::per_logit;
  int rest_bits = 0;
  int64_t chunk_rows = 0, chunks = 0;
  int64_t state_rows = 0;   // rows whose states are formed at once: sums per tile need less room
  int64_t slice_words = 0;  // columns of a slice of the vocabulary
  // The compacted rows lie in the caller's dX: by slices, all of them until its end; by chunks, in
  // its last rows, which are not yet written.
  bool x_in_dx = false;
  bool sums_in_dx = false;  // by chunks: the sums per tile lie in rows of dX not yet written
  int64_t exp_stride = 0;   // 16-bit elements of a row of the buffer; 0: there is none
  // Small weights, wide: da is kept in two 16-bit terms, since in a gradient of few terms one
  // rounding shows. Large ones: one.
  bool two_terms = false;
  bool online = false;   // few tokens, loss only: sums relative to each tile's own maximum
  bool general = false;  // the logits epilogue with bias, softcap, per-token scale, entropy
  bool full = false;     // the one that also leaves sums and maxima per tile
  bool f16 = false;
  int64_t kept = 0;            // candidates of a row for argmax and top-k
  bool gather_tokens = false;  // sequence parallel: the rows of all ranks are gathered first
  bool exchange_dx = false;    // dX of a chunk is summed over the ranks,
  bool bf16_sum = false;       // in bf16; otherwise in fp32
  int64_t tile_columns = 0;    // of a tile of the logits product
  int64_t tiles = 0;           // vocabulary tiles of it
  int blocks = 0;              // of every persistent product
  // Where both gradients are wanted, dW starts on the multiprocessors that dX leaves free.
  int dx_blocks = 0;
  DxTile dx_tile = DxTile::square;      // tall only where dX is formed alone
  int dw_early = 0, dw_head_start = 0;  // pairs that start first, tiles they take beforehand
  int logits_head_start = 0;            // the same of logits that run ahead
  // dX over ranks: rows that are summed at once, all of the chunk's or half of them. Halves where
  // their products, on fewer blocks, take no more waves of tiles than the whole.
  int64_t dx_part_rows = 0;
  int dx_part_blocks = 0;
  double memory = 1;  // the device's memory beside an H200's
  double ms = 0;      // predicted, of one such chip: to compare plans
  int64_t sort_bytes = 0;

  bool is_wide() const { return path == Path::wide; }
  bool is_transformed() const { return path == Path::transformed; }
  bool runs_ahead() const { return schedule == Schedule::chunks_ahead; }
  bool by_slices() const { return schedule == Schedule::slices || from_saved(); }
  bool sums_in_codes() const { return dw == DwOutput::split && rest_bits == Rest::kExponents; }
  bool from_saved() const { return schedule == Schedule::slices_saved; }
  bool x_ends_dx() const { return x_in_dx && !by_slices(); }
  bool borrows_dx() const { return x_in_dx || sums_in_dx; }
  bool sums_weight() const { return smoothing != Smoothing::per_logit; }
  bool rank_one() const { return smoothing == Smoothing::rank_one; }
};

std::optional<std::string> decline(const Problem& p, const DeviceFacts& device);
// Where lane cuda was measured to be faster (receipts/h200/training_fp16.json).
std::optional<std::string> yields(const Problem& p);
Config config(const Problem& p, const DeviceFacts& device);
// What outputs.dw_rest takes under the plan; 0: it keeps none within the limit, or none that is
// worth its time.
int64_t rest_bytes(const Problem& p, const DeviceFacts& device, const Config& c);
bool keeps_dx_rest(const Problem& p);

// The workspace; layout.hpp says which of it a plan asks for. N tokens, D hidden, V this rank's
// vocabulary, R rows of a chunk, S rows whose states are formed at once, T tiles.
struct Buffers {
  // Of the call.
  BatchFacts* facts = nullptr;                 // first: a caller may read its counts
  int* tickets = nullptr;                      // [2]
  int *dx_read = nullptr, *dw_read = nullptr;  // counts of the tiles read of the buffer

  // Of tokens and, where they are compacted, of the rows in use.
  int* token_target = nullptr;                                                         // [N]
  float *token_scale = nullptr, *token_shift = nullptr;                                // [N]
  RowBuffers rows;                                                                     // [N]
  float *row_class_weight = nullptr, *row_class_sum = nullptr, *row_smooth = nullptr;  // [N]
  double* row_loss = nullptr;                                                          // [N]
  int8_t* hit = nullptr;                                                               // [N]
  uint64_t *keys = nullptr, *sorted = nullptr;                                         // [N]
  char* sort_scratch = nullptr;  // [sort_bytes]

  // Of the vocabulary.
  float *bias = nullptr, *class_weight = nullptr;      // [V], fp32
  double* db = nullptr;                                // [V]
  double* bias_sum = nullptr;                          // [2]
  float *weight_sum = nullptr, *smooth_row = nullptr;  // [D]
  float* weight_parts = nullptr;                       // [kSumParts, D]

  // Of a chunk.
  uint16_t* x = nullptr;          // [R, D], 16 bits; two of them where the logits run ahead
  uint16_t* exp = nullptr;        // [R, exp_stride], 16 bits
  float* logits = nullptr;        // wide: where exp lies
  RowFactors* factors = nullptr;  // [R]
  float* db_factor = nullptr;     // [R]
  double* row_lse = nullptr;      // [R]
  int* least_exponent = nullptr;  // fp16
  float* undo = nullptr;
  float* target_slope = nullptr;   // [R]
  float* sparse_logits = nullptr;  // [R, soft_k]

  // Of tiles.
  float *tile_sums = nullptr, *tile_shifted = nullptr;   // [T, S]; the sums may lie in dX
  float *tile_classes = nullptr, *tile_peaks = nullptr;  // [T, S]

  // Of ranks.
  RowState<double>*own_states = nullptr, *all_states = nullptr;  // [R], [world, R]
  Candidate<float>*own_best = nullptr, *all_best = nullptr;      // [R, kept], [world, R, kept]
  uint16_t* x_all = nullptr;                                     // [N, D]
  float* dx_all = nullptr;  // [N, D], and behind it this rank's [N / world, D]

  // Of gradients.
  float* dx_part = nullptr;  // [R, D]: a rank's share, or the sum over slices
  float* dw = nullptr;       // [V, D]
  char* rest = nullptr;      // of a dW that is split, where the caller keeps none
};

}  // namespace talea::lce::sm90
