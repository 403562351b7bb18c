// What: attention over a list of selected keys, the selection of those keys, and the indexer's
// loss.
// Why: neither [heads, queries, keys] scores nor a gathered copy of the keys exist in memory.
// Never: falls back to another lane in silence, clamps an index, or counts a slot that is not
// valid.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "talea/call.hpp"
#include "talea/communicator.hpp"
#include "talea/error.hpp"
#include "talea/tensor.hpp"

namespace talea::sparse_attention {

// B batch, S queries, S_kv keys, H heads, G key groups (head h uses group h / (H / G)), K slots of
// a query, D columns of a row of kv, of which the first d_v are the value; Hi heads of di columns
// of the indexer. A slot is valid or absent; an absent one is never read and has weight exactly 0.

enum class Pass : int32_t { forward = 0, backward = 1, select = 2, index_loss = 3 };
// What an index counts. rows: rows of the batch entry's kv, or of the whole tensor with cu_seqlens.
// sequence: from the start of the query's own sequence; the only one with a block table. slots:
// page * page_rows + offset.
enum class IndexSpace : int32_t { rows = 0, sequence = 1, slots = 2 };
// An index outside its space that is not -1 is foreign: absent, and counted. ignore: no more than
// that. report: require_clean(status) throws. checked: Error before anything is written; on a
// device after one synchronisation.
enum class IndexCheck : int32_t { ignore = 0, report = 1, checked = 2 };
// plain: D elements of q's dtype. fp8_scaled: D e4m3 and fp32 kv_scale. fp8_656: 512 e4m3, four
// fp32 scales, 64 bf16 in 656 bytes; D = 576, d_v = 512, forward only.
enum class KvStorage : int32_t { plain = 0, fp8_scaled = 1, fp8_656 = 2 };
// in_kernel: a lane that needs a dequantised copy of kv declines.
enum class Fp8Path : int32_t { any = 0, in_kernel = 1 };
// Of dkv and dindex_k. atomic: in order of arrival; host lanes decline it.
enum class DkvSum : int32_t { deterministic = 0, atomic = 1 };
// How P and dS enter 16-bit products: rounded once, or as the sum of two 16-bit numbers.
enum class Operands : int32_t { native = 0, split = 1 };
// Of the index scores, between the product and the weight.
enum class Activation : int32_t { relu = 0, identity = 1 };
// Over which keys the index loss runs: those of `indices`, or all within the bounds.
enum class LossKeys : int32_t { sparse = 0, dense = 1 };
// N of the index loss: rows with a key and row_weight != 0, or denominator_value.
enum class LossDenominator : int32_t { valid = 0, given = 1 };
enum class LossScope : int32_t { local = 0, global = 1 };

struct Options {
  int64_t value_dim = 0;        // d_v: required
  double scale = 0;             // of the logits; finite, may be negative; 0 stands for D^-1/2
  bool causal = false;          // key position <= query position
  int64_t q_position_base = 0;  // position of query 0 of its sequence, where q_positions is absent
  IndexSpace index_space{};
  IndexCheck index_check{};
  KvStorage kv_storage{};
  Fp8Path fp8_path{};
  DkvSum dkv_sum{};
  Operands operands{};
  int64_t workspace_limit_bytes = int64_t{256} << 20;
  int threads = 0;            // cpu lanes; 0: as many as OpenMP offers
  std::string lane = "auto";  // or a lane's name: a named lane that declines is an error
};

// An absent Tensor is an option not used. B may be missing everywhere, G where it is 1. Outer
// strides are free, 0 included; the last stride of q, kv, d_o, o is 1.
struct Inputs {
  Tensor q;              // [B, S, H, D] fp32, bf16, fp16; fp64: lane reference; e4m3 with q_scale
  Tensor q_scale;        // fp32: scalar, [S] or [S, H], B in front where q has B
  Tensor kv;             // [B, S_kv, G, D]; paged: [pages, page_rows, G, D]; fp8_656: 656 bytes
  Tensor kv_scale;       // fp32: scalar, [S_kv] or [S_kv, ceil(D / 128)], B in front where kv has B
  Tensor indices;        // [B, S, G, K] int32 or int64
  Tensor topk_length;    // [B, S], or [B] (one extent: [S] where q has no B) int32
  Tensor sink;           // [H] fp32: a logit without a value
  Tensor cu_seqlens_q;   // [n + 1] int32, with cu_seqlens_k: B is 1, S and S_kv are totals
  Tensor cu_seqlens_k;   // [n + 1] int32
  Tensor q_positions;    // [B, S] int32: position of a query within its sequence, for causal
  Tensor block_table;    // [B, blocks] int32: pages of a sequence
  Tensor kv_lengths;     // [B] int32: keys of a sequence of a paged kv
  Tensor d_o, d_lse;     // backward: upstream of o and (optional) of lse
  Tensor o, o_residual;  // backward: of an earlier forward; absent o and lse: forward runs again
  Tensor lse;
};

// An absent Tensor is not computed. A row without a valid slot: o 0, lse +Inf, row_max -Inf.
struct Outputs {
  Tensor o;           // [B, S, H, d_v] dtype of q (bf16 where q is e4m3) or fp32
  Tensor o_residual;  // as o, 16-bit: round(o_exact - round(o_exact))
  Tensor lse;         // [B, S, H] fp32, natural logarithm, without the sink
  Tensor row_max;     // [B, S, H] fp32: the largest scaled logit
  Tensor status;      // [4] int64, added to: foreign indices, lowest flat slot of one (-1: none),
                      // its value, NaN index scores. The caller resets it to {0, -1, 0, 0}
  Tensor dq;          // as q: its dtype or fp32
  Tensor dkv;         // as kv: its dtype or fp32
  Tensor d_sink;      // [H] fp32
  bool accumulate_dkv = false;  // add into dkv (fp32) instead of overwriting it
};

// With whom the call is shared. heads: each rank holds some heads of q, o, dq, sink. sequence: each
// holds some rows of q, o, dq, indices, and the whole kv, or with gather_kv its own rows of it.
struct Ranks {
  Communicator* heads = nullptr;     // null: the world of one
  Communicator* sequence = nullptr;  // null: the world of one
  int64_t head_begin = 0;            // global number of this rank's first head
  int64_t row_begin = 0;             // with gather_kv: global row of this rank's first row of kv
  bool gather_kv = false;            // kv, dkv (index_k, dindex_k) hold this rank's rows only
  bool handshake = true;             // compare shapes, options and shards before any work
  int64_t total_heads = 0;           // over all ranks; 0: H. Needed where G > 1 and heads are cut
  int64_t total_kv_rows = 0;         // with gather_kv: rows over all ranks
  Communicator* batch = nullptr;     // index_loss: ranks that share a global denominator as well
};

// The indexer: I[t, j] = key scale * sum_h w[t, h] * act(index_q[t, h] . index_k[j]).
struct SelectInputs {
  Tensor index_q;        // [B, S, Hi, di] fp32, bf16, fp16; e4m3 with index_q_scale
  Tensor index_q_scale;  // [B, S, Hi] fp32, > 0
  Tensor index_k;        // [B, S_kv, di] dtype of index_q
  Tensor index_k_scale;  // [B, S_kv] fp32, > 0
  Tensor index_weights;  // [B, S, Hi] fp32 or bf16
  Tensor begin, end;     // [B, S] int32: keys [begin, end) of a query, cut to [0, S_kv]
  Tensor cu_seqlens_q, cu_seqlens_k;  // [n + 1] int32
  Tensor q_positions;                 // [B, S] int32
};

struct SelectOutputs {
  Tensor indices;      // [B, S, K] int32: ascending, then -1
  Tensor topk_length;  // [B, S] int32: how many were selected
  Tensor scores;       // [B, S, K] fp32: of the selected, then -Inf
  Tensor status;       // as Outputs::status
};

struct SelectOptions {
  int64_t top_k = 0;  // K; 0: the last extent of indices
  Activation act{};
  bool causal = false;
  int64_t q_position_base = 0;
  int64_t key_stride =
      1;  // under causal a query at position t sees floor((t + 1) / key_stride) keys
  int64_t workspace_limit_bytes = int64_t{256} << 20;
  int threads = 0;
  std::string lane = "auto";
};

// L = coeff / N * sum_t row_weight_t * KL(t || softmax(I)) over the keys of LossKeys; the teacher t
// is the mean over heads of the attention's probabilities, without the sink, normalised.
struct IndexLossInputs {
  Tensor index_q, index_q_scale, index_k, index_k_scale, index_weights;  // as SelectInputs
  Tensor q, q_scale, kv, kv_scale;                                       // as Inputs
  Tensor indices, topk_length;  // LossKeys::sparse: as Inputs, G = 1
  Tensor lse;                   // [B, S, H]: of attention over the same keys, optional
  Tensor row_weight;            // [B, S] fp32; absent: 1
  Tensor begin, end;            // LossKeys::dense: as SelectInputs
  Tensor cu_seqlens_q, cu_seqlens_k, q_positions;
};

struct IndexLossOutputs {
  Tensor loss;                       // scalar, fp32 or fp64
  Tensor dindex_q;                   // as index_q: its dtype or fp32
  Tensor dindex_k;                   // as index_k: its dtype or fp32
  Tensor dindex_weights;             // as index_weights: its dtype or fp32
  Tensor status;                     // as Outputs::status
  bool accumulate_dindex_k = false;  // add into dindex_k (fp32)
};

struct IndexLossOptions {
  LossKeys keys{};
  double coeff = 1;
  LossDenominator denominator{};
  double denominator_value = 0;  // with LossDenominator::given: > 0
  LossScope denominator_scope{};
  Activation act{};
  double scale = 0;  // of the attention logits; 0 stands for D^-1/2
  bool causal = false;
  int64_t q_position_base = 0;
  int64_t key_stride = 1;    // LossKeys::dense, as SelectOptions
  IndexSpace index_space{};  // rows or sequence
  IndexCheck index_check{};
  KvStorage kv_storage{};
  DkvSum dindex_k_sum{};
  int64_t workspace_limit_bytes = int64_t{256} << 20;
  int threads = 0;
  std::string lane = "auto";
};

// The strides of a tensor as a problem tells them, of the extents [B, S, H or G, D] (0: missing).
struct Strides {
  int64_t batch = 0, row = 0, head = 0;
};

// A problem as a value: what a lane decides on, without any pointer. One struct for all passes;
// what a pass has not, stays 0.
struct Problem {
  Pass pass{};
  int64_t batch = 1, queries = 0, keys = 0;  // keys: of all ranks; paged: blocks * page_rows
  int64_t heads = 0, groups = 1, dim = 0, value_dim = 0, slots = 0;
  double scale = 0;                         // as applied
  int64_t total_heads = 0, head_begin = 0;  // of the ranks that cut heads
  int64_t keys_stored = 0, row_begin = 0;   // rows of kv of this rank; the first's global number
  int heads_world = 1, heads_rank = 0, sequence_world = 1, sequence_rank = 0, batch_world = 1;
  bool gather_kv = false;
  DeviceKind device = DeviceKind::cpu;
  int device_index = 0;
  DType q_dtype = DType::f32, kv_dtype = DType::f32, o_dtype = DType::f32, dq_dtype = DType::f32;
  DType dkv_dtype = DType::f32, d_o_dtype = DType::f32, index_dtype = DType::i32;
  Strides q_stride, kv_stride;  // select: of index_q, index_k
  Strides o_stride, d_o_stride, dq_stride, dkv_stride;
  int64_t alignment_bytes = 16;  // largest power of two (<= 256) dividing the matrices' addresses
  int64_t pages = 0, page_rows = 0, blocks = 0;  // paged kv; pages: also IndexSpace::slots
  int64_t sequences = 0;                         // thd: n
  int64_t q_scale_rank = 0, kv_scale_rank = 0;   // 0: scalar, 1: a row, 2: a row and head or tile
  bool has_q_scale = false, has_kv_scale = false, has_topk_length = false, has_sink = false;
  bool has_block_table = false, has_positions = false, has_d_o = false, has_d_lse = false,
       has_saved = false, has_o_residual = false;
  bool wants_o = false, wants_o_residual = false, wants_lse = false, wants_row_max = false;
  bool wants_status = false, wants_dq = false, wants_dkv = false, wants_d_sink = false;
  bool accumulate_dkv = false;
  Options options;  // of the attention; index_loss: those it shares

  // The indexer: select and index_loss.
  int64_t index_heads = 0, index_dim = 0;
  DType index_q_dtype = DType::f32, index_weights_dtype = DType::f32;
  DType dindex_q_dtype = DType::f32, dindex_k_dtype = DType::f32, dindex_weights_dtype = DType::f32;
  Activation act{};
  int64_t key_stride = 1;
  bool has_begin = false, has_end = false, wants_scores = false, wants_indices = false;
  bool wants_topk_length = false, wants_loss = false, wants_dindex_q = false;
  bool wants_dindex_k = false, wants_dindex_weights = false, has_row_weight = false;
  LossKeys loss_keys{};
  double coeff = 1, denominator_value = 0;
  LossDenominator denominator{};
  LossScope denominator_scope{};
};

// What ran, how, and at what cost: the library's half of a receipt.
struct Result {
  Pass pass{};
  std::string lane, lane_kind;
  std::vector<LaneDecline> declined;
  int64_t workspace_bytes = 0;  // declared by the formula and given by the caller
  double flops = 0;             // of the products, over all slots
  // Slots of the call; -1: the counts stay on the device.
  int64_t slots_given = -1, slots_valid = -1, slots_absent = -1, slots_foreign = -1;
  int64_t first_foreign_slot = -1, first_foreign_value = 0;  // flat in [B, S, G, K]; -1: none
  std::string scores_home;  // where a tile of scores lives between the product and the softmax
  int64_t scores_tile_rows = 0, scores_tile_keys = 0, scores_tile_bytes = 0;
  int64_t full_scores_bytes = 0;     // of [.., S, S_kv] scores: 0 but in lane unfused
  int64_t gathered_kv_bytes = 0;     // of copies of selected rows, all threads together
  int64_t dequantised_kv_bytes = 0;  // of a dequantised copy of all of kv
  std::string kv_path;               // how a row of kv becomes an operand
  std::string operands;              // native or split, and what it means in this lane
  std::string delta_source;          // backward
  std::string accumulator_o, accumulator_dq, accumulator_dkv;
  std::string dkv_sum, dkv_order;
  bool forward_repeated = false;  // backward without o and lse
  std::string lse_base = "e";
  int64_t decode_segments = 1;
  std::string selection_rule;
  int64_t nan_scores = -1;
  double loss = 0;         // NaN where it lives in device memory
  double denominator = 0;  // N; NaN where it lives in device memory
  std::string denominator_kind, denominator_scope;
  std::vector<std::string> exchanges;  // between ranks, in order
  std::vector<std::string> notes;
};

// Derives the problem from the arguments and checks all that needs no data. Throws Error.
Problem describe(Pass pass, const Inputs& inputs, const Outputs& outputs, const Options& options,
                 const Ranks& ranks = {});
Problem describe(const SelectInputs& inputs, const SelectOutputs& outputs,
                 const SelectOptions& options, const Ranks& ranks = {});
Problem describe(const IndexLossInputs& inputs, const IndexLossOutputs& outputs,
                 const IndexLossOptions& options, const Ranks& ranks = {});

// What the lane that would run needs; exact, and what the call verifies. Throws as the call would.
int64_t workspace_bytes(const Problem& problem);

// Which lane would take the problem and why the others decline; touches no data.
LaneChoice explain(const Problem& problem);

// Names of the lanes, best first.
std::vector<std::string> lanes();

// With device tensors all work is queued on `stream`, without allocation, and without
// synchronisation but for IndexCheck::checked.
Result forward(const Inputs& inputs, const Outputs& outputs, const Options& options,
               Workspace workspace, const Ranks& ranks = {}, Stream stream = nullptr);
// Any subset of dq, dkv, d_sink; needs d_o, d_lse or both (an absent one counts as 0).
Result backward(const Inputs& inputs, const Outputs& outputs, const Options& options,
                Workspace workspace, const Ranks& ranks = {}, Stream stream = nullptr);
// The min(K, end - begin) keys of the largest score; ties to the lower index, -Inf never, NaN
// first.
Result select(const SelectInputs& inputs, const SelectOutputs& outputs,
              const SelectOptions& options, Workspace workspace, const Ranks& ranks = {},
              Stream stream = nullptr);
// The loss and its gradients in one call; the attention's q and kv are constants.
Result index_loss(const IndexLossInputs& inputs, const IndexLossOutputs& outputs,
                  const IndexLossOptions& options, Workspace workspace, const Ranks& ranks = {},
                  Stream stream = nullptr);

// mask [B, S, S_kv] (B may be missing) fp32, additive: element (s, j) becomes 0 where a valid slot
// of query s names key j; the others stay. Reads indices, topk_length, cu_seqlens, q_positions of
// the inputs; G is 1, q and kv may be absent.
void index_mask(const Inputs& inputs, const Tensor& mask, const Options& options,
                Stream stream = nullptr);

// Rows of 576 (fp32, bf16, fp16) to the 656 bytes of KvStorage::fp8_656 (u8 or e4m3).
void pack_rows(const Tensor& kv, const Tensor& rows, Stream stream = nullptr);

// Synchronises the stream of a device; throws Error(invalid_data) with count, first slot and value
// where `status` counts a foreign index.
void require_clean(const Tensor& status, Stream stream = nullptr);

}  // namespace talea::sparse_attention
