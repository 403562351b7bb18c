// What: the output projection of a language model and its cross-entropy, forward and backward.
// Why: the [tokens, vocabulary] logits never exist in memory, and every option is exact.
// Never: falls back to another lane in silence; what ran and what declined is in the result.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "talea/call.hpp"
#include "talea/communicator.hpp"
#include "talea/error.hpp"
#include "talea/lanes.hpp"
#include "talea/tensor.hpp"

namespace talea {

enum class Reduction : int32_t { none = 0, sum = 1, mean = 2 };
// The divisor M of reduction mean. valid: sum of class weights of the targets over valid rows
// (PyTorch; a count without class weights). weighted: the same times the token weight. given: a
// number of the caller's.
enum class Denominator : int32_t { valid = 0, weighted = 1, given = 2 };
enum class DenominatorScope : int32_t { local = 0, global = 1 };
enum class OnEmpty : int32_t { nan = 0, zero = 1 };
// Targets outside [0, vocab) that are not ignore_index. checked: Error naming row and value before
// any work (device targets: after one synchronisation). poison: that row becomes NaN, takes no part
// in dW and db, and is counted in the result. automatic: checked on the host, poison on a device.
enum class TargetCheck : int32_t { automatic = 0, checked = 1, poison = 2 };

inline constexpr int max_top_k = 32;
inline constexpr int64_t workspace_auto = -1;

struct LinearCrossEntropyOptions {
  Reduction reduction = Reduction::mean;
  Denominator denominator = Denominator::valid;
  double denominator_value = 0;  // with Denominator::given: > 0
  DenominatorScope denominator_scope = DenominatorScope::local;
  OnEmpty on_empty = OnEmpty::nan;
  TargetCheck target_check = TargetCheck::automatic;
  int64_t ignore_index = -100;
  int64_t vocab = 0;           // logical vocabulary over all ranks; 0: every row of the weight
  double label_smoothing = 0;  // [0, 1)
  double z_loss = 0;           // zeta of zeta * lse^2, >= 0
  double softcap = 0;          // k of k * tanh(a / k); 0: off
  double logit_scale = 1;      // finite, not 0; multiplies a per-token scale when both are given
  // Of the workspace and of what a late factor keeps (outputs.late_factor). Auto: the smallest room
  // whose plan is within 3 % of the fastest, at most half of what 16-bit logits and their gradient
  // would take and an eighth of what is free on the device; if no plan keeps that, a little more.
  int64_t workspace_limit_bytes = workspace_auto;
  // In which a 16-bit dw is summed over chunks: fp32 (or the 12 to 16 digits of its own that lane
  // sm90 keeps beside it), or dw's own dtype, where memory is scarcest: each chunk rounds once
  // more.
  DType dw_sum = DType::f32;
  int threads = 0;            // cpu lanes; 0: as many as OpenMP offers
  std::string lane = "auto";  // or a lane's name: a named lane that declines is an error

  bool operator==(const LinearCrossEntropyOptions&) const = default;
};

// Which rows of the vocabulary this rank holds, and with whom it shares the call.
struct LinearCrossEntropyRanks {
  Communicator* vocab = nullptr;   // null: the world of one
  Communicator* batch = nullptr;   // ranks that share the batch: DenominatorScope::global sums here
  int64_t vocab_begin = 0;         // global id of this rank's first weight row
  bool sequence_parallel = false;  // hidden and dx hold this rank's tokens / size rows only
  // In which the ranks' shares of dX travel and are summed. bf16 halves the bytes and rounds each
  // share before the sum; lane sm90, replicated hidden.
  DType dx_sum = DType::f32;
  // Compare shapes, options and shards before any work. On a device this waits for the host once a
  // call: turn it off inside stream capture, after one call that was compared.
  bool handshake = true;
};

// Inputs; every absent Tensor is an option not used. Shapes: docs/contract.md, section 1.
struct LinearCrossEntropyInputs {
  Tensor hidden;             // [tokens, hidden]
  Tensor weight;             // [vocab_stored, hidden]
  Tensor bias;               // [vocab_stored]
  Tensor targets;            // [tokens] int32 or int64, global ids
  Tensor class_weight;       // [vocab] fp32, over the whole logical vocabulary on every rank
  Tensor token_weight;       // [tokens] fp32
  Tensor token_scale;        // [tokens] fp32: logit scale per token
  Tensor soft_target_ids;    // [tokens, k] int32 or int64 (sparse soft targets)
  Tensor soft_target_probs;  // [tokens, k] with ids, or dense [tokens, vocab]
  Tensor upstream;           // gradient of the loss: scalar, or [tokens] with Reduction::none
  Tensor upstream_lse;       // [tokens] gradient of the lse output
  Tensor upstream_entropy;   // [tokens] gradient of the entropy output
  // The outputs lse and target_logprob of an earlier call on the same inputs and options, both or
  // neither. A lane that can forms the gradients from them without a second pass over the rows.
  Tensor saved_lse, saved_target_logprob;  // [tokens]
};

// Outputs; an absent Tensor is not computed. Ignored rows: loss, lse, target_logprob, entropy 0,
// argmax and top-k ids -1, top-k values 0.
struct LinearCrossEntropyOutputs {
  Tensor loss;                 // scalar (rank 0), or [tokens] with Reduction::none; fp32 or fp64
  Tensor lse;                  // [tokens] fp32 or fp64, as all per-token outputs
  Tensor target_logprob;       // [tokens]
  Tensor entropy;              // [tokens]
  Tensor argmax;               // [tokens] int64; ties to the lowest id; -1 for a NaN row
  Tensor accuracy;             // scalar: share of valid rows whose argmax is the target
  Tensor topk_values;          // [tokens, k] logits in falling order, ties to the lowest id
  Tensor topk_ids;             // [tokens, k] int64
  Tensor topk_logprobs;        // [tokens, k]
  Tensor dx;                   // [tokens, hidden] dtype of hidden, fp32 or fp64
  Tensor dw;                   // [vocab_stored, hidden] dtype of weight, or fp32
  Tensor db;                   // [vocab_stored] dtype of bias, or fp32
  bool accumulate_dw = false;  // add into dw (fp32 main_grad) instead of overwriting it
  bool accumulate_db = false;
  // What a 16-bit dw has no room for, so that a late factor can multiply it as if it had not been
  // rounded: i32, [rest_bytes() / 4], of the lane's own layout. With it dw is the gradient once
  // linear_cross_entropy_late() has run. Absent: nothing is kept.
  Tensor dw_rest = {};
  // The gradients wait for a factor that is known only later: what they take beyond their dtype
  // when returned (an fp32 dx or dw of a 16-bit input, dw_rest) counts against the workspace limit.
  bool late_factor = false;
  // The same of a bf16 dx: u8 [tokens, hidden / 64, rounded up]. Where the lane keeps none, an
  // error: fp32 dx serves.
  Tensor dx_rest = {};
};

enum class SoftTargets : int32_t { none = 0, dense = 1, sparse = 2 };

// The problem as a value: what a lane decides on, without any pointer.
struct LinearCrossEntropyProblem {
  int64_t tokens = 0;  // rows of the call (all ranks' rows under sequence_parallel)
  int64_t hidden = 0;
  int64_t vocab = 0;         // logical vocabulary over all ranks
  int64_t vocab_stored = 0;  // weight rows of this rank, padding included
  int64_t vocab_begin = 0;   // global id of this rank's first row
  int64_t vocab_local = 0;   // logical rows of this rank
  int rank = 0;
  int world = 1;
  bool sequence_parallel = false;
  DType dx_sum = DType::f32;  // of the ranks' shares of dX
  DeviceKind device = DeviceKind::cpu;
  int device_index = 0;
  DType hidden_dtype = DType::f32;
  DType weight_dtype = DType::f32;
  DType bias_dtype = DType::f32;
  DType dx_dtype = DType::f32;
  DType dw_dtype = DType::f32;
  int64_t hidden_row_stride = 0, hidden_col_stride = 1;
  int64_t weight_row_stride = 0, weight_col_stride = 1;
  int64_t dx_row_stride = 0, dx_col_stride = 1;
  int64_t dw_row_stride = 0, dw_col_stride = 1;
  int64_t bias_stride = 1;
  int64_t alignment_bytes = 16;  // largest power of two (<= 256) dividing all matrix addresses
  SoftTargets soft_targets = SoftTargets::none;
  int64_t soft_k = 0;
  int64_t top_k = 0;
  bool has_targets = false, has_bias = false, has_class_weight = false, has_token_weight = false;
  bool has_token_scale = false, has_upstream = false, has_upstream_lse = false;
  bool has_upstream_entropy = false;
  bool has_saved = false;  // lse and target_logprob of an earlier call
  bool wants_loss = false, wants_lse = false, wants_logprob = false, wants_entropy = false;
  bool wants_argmax = false, wants_accuracy = false, wants_dx = false, wants_dw = false;
  bool wants_db = false, accumulate_dw = false, accumulate_db = false;
  bool late_factor = false, wants_rest = false, wants_dx_rest = false;
  int64_t rest_bytes = 0;  // given for dw_rest; 0: yet to be asked for
  LinearCrossEntropyOptions options;

  bool operator==(const LinearCrossEntropyProblem&) const = default;
  bool backward() const { return wants_dx || wants_dw || wants_db; }
};

// What one vocabulary rank holds.
struct VocabShard {
  int64_t begin = 0, end = 0;  // logical rows [begin, end)
  int64_t stored = 0;          // rows of its weight, padding included
};

// What ran, how, and at what cost: the library's half of a receipt.
struct LinearCrossEntropyResult {
  std::string lane;
  std::string
      lane_kind;  // "native kernel", "library composition", "reference", "unfused comparison"
  std::vector<LaneDecline> declined;
  std::string logits_home;  // where a logit tile lives between the product and the loss
  int64_t logits_tile_rows = 0, logits_tile_columns = 0, logits_tile_bytes = 0;
  bool full_logits_tensor = false;
  int64_t chunk_rows = 0, chunks = 0;
  int64_t workspace_bytes = 0;  // declared by the formula and given by the caller
  double flops = 0;             // of the matrix products that were run
  double products = 0;          // the same in products of [tokens, hidden] and the weight
  std::string accumulator_softmax, accumulator_dx, accumulator_dw, accumulator_loss;
  std::string upstream_handling;  // how the upstream gradient was applied
  std::string merges;             // where max and sum were merged, and by what collective
  // -1: the count lives in device memory and was not read (no synchronisation).
  int64_t valid_tokens = -1, ignored_tokens = -1, out_of_range_tokens = -1;
  int64_t targets_in_partition = -1;
  double denominator = 0;          // NaN where it lives in device memory
  std::vector<VocabShard> shards;  // of every vocabulary rank, where a handshake told them
  std::vector<std::string> notes;
};

// Derives the problem from the arguments and checks all of section 3 that needs no data. Throws.
LinearCrossEntropyProblem describe(const LinearCrossEntropyInputs& inputs,
                                   const LinearCrossEntropyOutputs& outputs,
                                   const LinearCrossEntropyOptions& options,
                                   const LinearCrossEntropyRanks& ranks = {});

// What the lane that would run needs; exact, and what the call verifies. Throws as the call would.
int64_t workspace_bytes(const LinearCrossEntropyProblem& problem);

// What outputs.dw_rest (present, of any length) should hold; 0: the lane or the limit keeps none.
int64_t rest_bytes(const LinearCrossEntropyProblem& problem);

// Which lane would take the problem and why the others decline; touches no data.
LaneChoice explain(const LinearCrossEntropyProblem& problem);

// Names of the lanes, best first; and the table itself.
std::vector<std::string> linear_cross_entropy_lanes();
std::vector<LaneInfo> linear_cross_entropy_lane_table();

// One call: forward, and backward where dx, dw or db is requested. An absent upstream counts as 1.
// A second backward on one forward is a second call with the new upstream. With device tensors all
// work is queued on `stream`, without allocation or synchronisation.
LinearCrossEntropyResult linear_cross_entropy(const LinearCrossEntropyInputs& inputs,
                                              const LinearCrossEntropyOutputs& outputs,
                                              const LinearCrossEntropyOptions& options,
                                              Workspace workspace,
                                              const LinearCrossEntropyRanks& ranks = {},
                                              Stream stream = nullptr);

// What comes after a call made with late_factor: the gradients times a factor, each rounded once.
struct LinearCrossEntropyLate {
  Tensor factor;    // scalar, or [tokens] where dx alone is to be scaled; fp32 or fp64
  Tensor expected;  // scalar: the gradients are final if the factor is this, and nothing is scaled
  Tensor dx, dw;    // in the dtype returned; scaled in place where no sum is given
  Tensor dx_sum;    // fp32 [tokens, hidden], of which dx is made
  Tensor dw_sum;    // fp32 [vocab_stored, hidden], of which dw is made
  Tensor dx_rest, dw_rest;  // of the call that formed dx and dw
};
// With `expected`: a factor that differs poisons dx with NaN and raises the fault that
// require_clean() reports; on a device without a synchronisation.
void linear_cross_entropy_late(const LinearCrossEntropyLate& late, Stream stream = nullptr);

// Throws what a call on a device found wrong after it had returned, once; needs no synchronisation,
// so that what still runs is not seen.
void require_clean();
// Not 0 while there is something to report; null: nothing can have been.
const volatile int32_t* fault_flag();

}  // namespace talea
