/* What: the linear cross-entropy operator of the C interface.
 * Why: each operator has structs and functions of its own; what all share is in talea.h.
 * Never: included alone; talea.h includes it. */
#ifndef TALEA_C_LINEAR_CROSS_ENTROPY_H
#define TALEA_C_LINEAR_CROSS_ENTROPY_H

#include "../talea.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TALEA_REDUCTION_NONE = 0, TALEA_REDUCTION_SUM = 1, TALEA_REDUCTION_MEAN = 2 };
enum { TALEA_DENOMINATOR_VALID = 0, TALEA_DENOMINATOR_WEIGHTED = 1, TALEA_DENOMINATOR_GIVEN = 2 };
enum { TALEA_SCOPE_LOCAL = 0, TALEA_SCOPE_GLOBAL = 1 };
enum { TALEA_ON_EMPTY_NAN = 0, TALEA_ON_EMPTY_ZERO = 1 };
enum {
  TALEA_TARGETS_AUTOMATIC = 0, /* checked on the host, poison on a device */
  TALEA_TARGETS_CHECKED = 1,   /* an error naming row and value */
  TALEA_TARGETS_POISON = 2     /* that row becomes NaN and takes no part in dw */
};

/* Of workspace_limit_bytes: the smallest room whose plan is within 3 % of the fastest, at most half
 * of what 16-bit logits and their gradient would take and an eighth of what is free. */
#define TALEA_WORKSPACE_AUTO (-1)

typedef struct talea_linear_cross_entropy_inputs {
  int64_t struct_bytes;
  talea_tensor hidden;            /* [tokens, hidden] F32, BF16, F16 (F64: lane reference) */
  talea_tensor weight;            /* [vocab_stored, hidden] dtype of hidden, or F32 */
  talea_tensor bias;              /* [vocab_stored] F32 or dtype of weight */
  talea_tensor targets;           /* [tokens] I32 or I64, global vocabulary ids */
  talea_tensor class_weight;      /* [vocab] F32 */
  talea_tensor token_weight;      /* [tokens] F32 */
  talea_tensor token_scale;       /* [tokens] F32: logit scale per token */
  talea_tensor soft_target_ids;   /* [tokens, k] I32 or I64 */
  talea_tensor soft_target_probs; /* [tokens, k] F32 with ids, or dense [tokens, vocab] */
  talea_tensor upstream;         /* gradient of the loss: scalar, or [tokens] with reduction none */
  talea_tensor upstream_lse;     /* [tokens] gradient of the lse output */
  talea_tensor upstream_entropy; /* [tokens] gradient of the entropy output */
  /* [tokens] the outputs lse and target_logprob of an earlier call on the same inputs and options,
   * both or neither: a lane that can forms the gradients without a second pass over the rows. */
  talea_tensor saved_lse;
  talea_tensor saved_target_logprob;
} talea_linear_cross_entropy_inputs;

/* What is present is computed. Memory of outputs must not overlap anything else. */
typedef struct talea_linear_cross_entropy_outputs {
  int64_t struct_bytes;
  talea_tensor loss;           /* scalar, or [tokens] with reduction none; F32 or F64 */
  talea_tensor lse;            /* [tokens] F32 or F64, as all per-token outputs */
  talea_tensor target_logprob; /* [tokens] */
  talea_tensor entropy;        /* [tokens] */
  talea_tensor argmax;         /* [tokens] I64; ties to the lowest id */
  talea_tensor accuracy;       /* scalar */
  talea_tensor topk_values;    /* [tokens, k] logits, k <= 32 */
  talea_tensor topk_ids;       /* [tokens, k] I64 */
  talea_tensor topk_logprobs;  /* [tokens, k] */
  talea_tensor dx;             /* [tokens, hidden] */
  talea_tensor dw;             /* [vocab_stored, hidden] */
  /* What a 16-bit dx and dw have no room for; with them they are the gradients once
   * talea_linear_cross_entropy_late() has run. */
  talea_tensor dx_rest;  /* U8 [tokens, hidden / 64, rounded up], beside a BF16 dx */
  talea_tensor dw_rest;  /* I32 [..._rest_bytes() / 4] */
  talea_tensor db;       /* [vocab_stored] */
  int32_t accumulate_dw; /* add into dw (an F32 main gradient) instead of overwriting it */
  int32_t accumulate_db;
  /* 1: the gradients wait for talea_linear_cross_entropy_late(): what they take beyond the dtype of
   * hidden and weight (an F32 dx of BF16 hidden, dw_rest) counts against the workspace limit. */
  int32_t late_factor;
  int32_t reserved; /* 0 */
} talea_linear_cross_entropy_outputs;

/* Start from talea_linear_cross_entropy_options_init(): not all defaults are 0. */
typedef struct talea_linear_cross_entropy_options {
  int64_t struct_bytes;
  int32_t reduction;             /* mean */
  int32_t denominator;           /* valid */
  double denominator_value;      /* with DENOMINATOR_GIVEN: > 0 */
  int32_t denominator_scope;     /* local */
  int32_t on_empty;              /* nan */
  int32_t target_check;          /* automatic */
  int32_t threads;               /* of the cpu lanes; 0: as many as OpenMP offers */
  int64_t ignore_index;          /* -100 */
  int64_t vocab;                 /* logical vocabulary over all ranks; 0: every row of the weight */
  double label_smoothing;        /* [0, 1) */
  double z_loss;                 /* zeta of zeta * lse^2 */
  double softcap;                /* k of k * tanh(a / k); 0: off */
  double logit_scale;            /* 1 */
  int64_t workspace_limit_bytes; /* TALEA_WORKSPACE_AUTO, or bytes that are kept */
  /* dtype in which a 16-bit dw is summed over chunks: F32 (0), or its own, where memory is
   * scarcest: each chunk rounds once more. */
  int32_t dw_sum;
  int32_t reserved; /* 0 */
  const char* lane; /* null or "auto": the best that accepts; a name: that or an error */
} talea_linear_cross_entropy_options;

/* Null pointers: a world of one. */
typedef struct talea_linear_cross_entropy_ranks {
  int64_t struct_bytes;
  const talea_communicator* vocab; /* ranks that share the vocabulary */
  const talea_communicator* batch; /* ranks that share the batch, for SCOPE_GLOBAL */
  int64_t vocab_begin;             /* global id of this rank's first weight row */
  int32_t sequence_parallel;       /* hidden and dx hold this rank's tokens / size rows only */
  /* 1: shapes, options and shards are not compared before the work; 0: they are, over the host. */
  int32_t skip_handshake;
  /* dtype in which the ranks' shares of dx travel and are summed: F32 (0), or BF16, which halves
   * the bytes and rounds each share before the sum (lane sm90, replicated hidden). */
  int32_t dx_sum;
  int32_t reserved; /* 0 */
} talea_linear_cross_entropy_ranks;

/* One call. `inputs` and `outputs` are needed; null options are the defaults, null ranks a world of
 * one. */
typedef struct talea_linear_cross_entropy_args {
  int64_t struct_bytes;
  int32_t abi_version; /* TALEA_ABI_VERSION */
  int32_t reserved;    /* 0 */
  const talea_linear_cross_entropy_inputs* inputs;
  const talea_linear_cross_entropy_outputs* outputs;
  const talea_linear_cross_entropy_options* options;
  const talea_linear_cross_entropy_ranks* ranks;
  void* workspace;         /* on the device of the tensors, any alignment */
  int64_t workspace_bytes; /* at least what ..._workspace_bytes() says */
  void* stream;            /* cudaStream_t, or null */
} talea_linear_cross_entropy_args;

/* What ran, how and at what cost: the library's half of a receipt. Strings belong to the result. */
typedef struct talea_linear_cross_entropy_facts {
  int64_t struct_bytes;
  const char* lane;
  const char* lane_kind;
  const char* logits_home; /* where a logit tile lives between the product and the loss */
  const char* accumulator_softmax;
  const char* accumulator_dx;
  const char* accumulator_dw;
  const char* accumulator_loss;
  const char* upstream_handling;
  const char* merges;
  int64_t logits_tile_rows;
  int64_t logits_tile_columns;
  int64_t logits_tile_bytes;
  int64_t chunk_rows;
  int64_t chunks;
  int64_t workspace_bytes;
  double flops;
  double products;      /* flops in products of [tokens, hidden] and the weight */
  int64_t valid_tokens; /* -1 here and below: the count lives on the device and was not read */
  int64_t ignored_tokens;
  int64_t out_of_range_tokens;
  int64_t targets_in_partition;
  double denominator; /* NaN where it lives on the device */
  int32_t full_logits_tensor;
  int32_t declined_count;
  const talea_lane_decline* declined;
  const char* const* notes;
  int32_t notes_count;
  int32_t reserved;
} talea_linear_cross_entropy_facts;

/* Writes the defaults. struct_bytes: sizeof(talea_linear_cross_entropy_options). */
TALEA_API talea_status talea_linear_cross_entropy_options_init(
    talea_linear_cross_entropy_options* options, int64_t struct_bytes);

/* What the lane that would run needs. The workspace of args is not looked at. */
TALEA_API talea_status talea_linear_cross_entropy_workspace_bytes(
    const talea_linear_cross_entropy_args* args, int64_t* bytes);

/* What outputs.dw_rest (present, of any length) should hold; 0: none is kept. */
TALEA_API talea_status
talea_linear_cross_entropy_rest_bytes(const talea_linear_cross_entropy_args* args, int64_t* bytes);

/* After a call with late_factor: the gradients times a factor, each rounded once. */
typedef struct talea_linear_cross_entropy_late_args {
  int64_t struct_bytes;
  talea_tensor factor;   /* scalar, or [tokens] where dx alone is to be scaled; F32 or F64 */
  talea_tensor expected; /* scalar: dx and dw are final if the factor is this; nothing is scaled */
  talea_tensor dx;       /* made of dx_sum, or scaled in place */
  talea_tensor dw;       /* with dw_rest, made of dw_sum, or scaled in place */
  talea_tensor dx_sum;   /* F32 [tokens, hidden] */
  talea_tensor dw_sum;   /* F32 [vocab_stored, hidden] */
  talea_tensor dx_rest;  /* of the call that formed dx */
  talea_tensor dw_rest;  /* of the call that formed dw */
  void* stream;
} talea_linear_cross_entropy_late_args;
/* A factor that differs from `expected` fills dx with NaN and raises the fault that
 * talea_require_clean() reports; on a device without a synchronisation. */
TALEA_API talea_status
talea_linear_cross_entropy_late(const talea_linear_cross_entropy_late_args* args);

/* The operator. result may be null; else *result is set on TALEA_OK, and null otherwise. */
TALEA_API talea_status talea_linear_cross_entropy(const talea_linear_cross_entropy_args* args,
                                                  talea_result** result);

/* A call that is made again with other addresses: checked and planned once. */
typedef struct talea_linear_cross_entropy_prepared talea_linear_cross_entropy_prepared;
/* `args` are copied, and hold no ranks; addresses may be null, workspace_bytes counts. */
TALEA_API talea_status talea_linear_cross_entropy_prepare(
    const talea_linear_cross_entropy_args* args, talea_linear_cross_entropy_prepared** prepared);

/* Where the tensors of one call lie. */
typedef struct talea_linear_cross_entropy_places {
  int64_t struct_bytes;
  void* workspace; /* workspace_bytes of the prepared args */
  void* stream;
  int64_t count;  /* of the addresses */
  void* data[28]; /* of the tensors present: inputs, then outputs, in the order of their structs */
} talea_linear_cross_entropy_places;
/* What talea_linear_cross_entropy() does, without a result. Several threads may share `prepared`.
 */
TALEA_API talea_status
talea_linear_cross_entropy_again(const talea_linear_cross_entropy_prepared* prepared,
                                 const talea_linear_cross_entropy_places* places);
TALEA_API void talea_linear_cross_entropy_prepared_free(
    talea_linear_cross_entropy_prepared* prepared);

/* Lane names, best first, parted by commas; a constant. */
TALEA_API const char* talea_linear_cross_entropy_lanes(void);

/* Which lane would run, why the others decline, and what it costs; touches no data, and data
 * pointers may be null. Writes at most buffer_bytes with a closing 0, and the bytes the whole text
 * needs into *needed_bytes (may be null); a buffer too small is no error. */
TALEA_API talea_status
talea_linear_cross_entropy_explain(const talea_linear_cross_entropy_args* args, int32_t format,
                                   char* buffer, int64_t buffer_bytes, int64_t* needed_bytes);

/* Nothing runs yet; every error of the arguments is said by the first talea_phases_next(). */
TALEA_API talea_status talea_linear_cross_entropy_phases_begin(
    const talea_linear_cross_entropy_args* args, talea_phases** phases);
/* Null for a null result, and for one of another operator. */
TALEA_API const talea_linear_cross_entropy_facts* talea_linear_cross_entropy_result_facts(
    const talea_result* result);

#ifdef __cplusplus
}
#endif

#endif
