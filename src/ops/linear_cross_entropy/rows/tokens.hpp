// What: the caller's per-token tensors as the kernels of the device lanes get them, and the facts
// of a batch.
// Why: both lanes read the same inputs, fill the same facts and write the same outputs.
// Never: holds what a lane lays out for its own products.
#pragma once

#include <cuda_runtime_api.h>

#include "device/common/view.cuh"
#include "ops/linear_cross_entropy/rows/rule.hpp"

namespace talea::lce {

using device::View;

// What decides whether a token counts.
struct TokenRule {
  IdRule ids;
  Columns shard;  // of this rank
  double logit_scale = 1;
  View targets, token_scale;
  View soft_ids;       // of sparse soft targets
  int64_t soft_k = 0;  // ids a row; 0: there are none
};

// What a token brings to its loss and its gradient, beside its logits.
struct TokenTerms {
  View token_weight, upstream, upstream_lse, upstream_entropy;
  bool soft = false, has_targets = true;
};

// What the caller sees of a token; loss: with Reduction::none alone.
struct TokenOutputs {
  View loss, lse, logprob, entropy, argmax, topk_values, topk_ids, topk_logprobs;
  int64_t top_k = 0;
};

// What tokens add up to: of a thread, a block, the batch.
struct TokenSums {
  int64_t valid = 0, ignored = 0, out_of_range = 0, in_partition = 0;
  int64_t first_bad = INT64_MAX, first_bad_scale = INT64_MAX;  // tokens
  double counted = 0, weighted = 0;  // class weights of the targets; the same by token weights
};

// What the targets and the weights say about the batch. The first four words are the ones that a
// caller may read.
struct BatchFacts {
  static constexpr int64_t kNone = INT64_MAX;
  int64_t valid, ignored, out_of_range, in_partition;
  int64_t first_bad, first_bad_value;         // token of the first foreign target; that target
  int64_t first_bad_scale, first_bad_weight;  // token, class; or kNone
  double valid_weight, weighted, present;     // summed over the batch ranks where they share M
  double class_weight_sum, class_weight_max;  // over the whole vocabulary
  double denominator, inverse;                // M of the mean
  int in_use;                                 // rows that are valid, as products count them
  int empty;                                  // no row counts, in the denominator's scope
};

// facts.cu
// Sums the class weights; one out of contract poisons the whole call: nothing of it may look right.
void sum_class_weights(const View& weights, int64_t vocab, BatchFacts* facts, cudaStream_t stream);
// M and its inverse from the sums. `terms`, where given: what finish_row takes, complete.
struct FactsEnd {
  MeanRule mean;
  LossTerms<double> loss;
  BatchFacts* facts = nullptr;
  LossTerms<double>* terms = nullptr;
};
void end_facts(const FactsEnd& p, cudaStream_t stream);
// A vector of any dtype and stride into fp32.
void convert_vector(const View& from, int64_t first, int64_t count, float* to, cudaStream_t stream);

// blank.cu
// Everything that an ignored or poisoned token shows: zeros, or NaN; ids are -1.
struct BlankParams {
  int64_t tokens = 0;
  TokenRule rule;
  const RowKind* kinds = nullptr;  // null: the rule is asked
  TokenOutputs out;
  double* row_loss = nullptr;  // per token, where the lane sums them so
  int8_t* hit = nullptr;
  View dx;
  int64_t hidden = 0;
  bool poison_dx = true;
  // Of a dx in codes, dense: what is written here is plain bf16, which this byte says.
  uint8_t* dx_exponents = nullptr;
  int64_t dx_blocks = 0;
  uint8_t plain = 0;
};
void blank_tokens(const BlankParams& p, cudaStream_t stream);

}  // namespace talea::lce
