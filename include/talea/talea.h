/* What: the C interface of Talea: the linear cross-entropy operator for any language.
 * Why: one stable boundary of plain structs; the Python package and C trainers use nothing else.
 * Never: lets a C++ exception or type through, allocates tensor memory, prints or exits.
 *
 * C11, and C++17 from the same text. Every function that can fail returns a talea_status; the text
 * of the last failure of the calling thread is talea_last_error(). Every struct starts with
 * struct_bytes = sizeof(the struct): the library refuses a struct of another layout.
 */
#ifndef TALEA_TALEA_H
#define TALEA_TALEA_H

#include <stdint.h>

#define TALEA_VERSION "0.1.0"
/* Rises when a struct or a function of this header changes its meaning or layout. */
#define TALEA_ABI_VERSION 2

#if defined(TALEA_BUILDING)
#define TALEA_API __attribute__((visibility("default")))
#else
#define TALEA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t talea_status;
enum {
  TALEA_OK = 0,
  TALEA_CHECK_FAILED = 1, /* a parity or regression check failed */
  TALEA_USAGE = 2,        /* an option or argument that no data could make right */
  TALEA_UNAVAILABLE = 3,  /* this machine or build lacks something, named in the text */
  TALEA_RUNTIME = 4,      /* memory, CUDA, NCCL, MPI, input/output, or a callback that failed */
  TALEA_INVALID_DATA = 5  /* a tensor, shape, dtype or target that breaks the contract */
};

enum { /* dtype */
       TALEA_F32 = 0,
       TALEA_BF16 = 1,
       TALEA_F16 = 2,
       TALEA_F64 = 3,
       TALEA_I32 = 4,
       TALEA_I64 = 5
};
enum { TALEA_CPU = 0, TALEA_CUDA = 1 }; /* device */
enum { TALEA_REDUCTION_NONE = 0, TALEA_REDUCTION_SUM = 1, TALEA_REDUCTION_MEAN = 2 };
enum { TALEA_DENOMINATOR_VALID = 0, TALEA_DENOMINATOR_WEIGHTED = 1, TALEA_DENOMINATOR_GIVEN = 2 };
enum { TALEA_SCOPE_LOCAL = 0, TALEA_SCOPE_GLOBAL = 1 };
enum { TALEA_ON_EMPTY_NAN = 0, TALEA_ON_EMPTY_ZERO = 1 };
enum {
  TALEA_TARGETS_AUTOMATIC = 0, /* checked on the host, poison on a device */
  TALEA_TARGETS_CHECKED = 1,   /* an error naming row and value */
  TALEA_TARGETS_POISON = 2     /* that row becomes NaN and takes no part in dw */
};

/* A view of the caller's memory. Strides count elements; 0 (expanded) and negative strides are
 * legal for inputs. All zero (present = 0): the tensor is not given. */
typedef struct talea_tensor {
  void* data; /* inputs are never written through */
  int32_t dtype;
  int32_t rank; /* 0 (a scalar) to 4 */
  int64_t shape[4];
  int64_t stride[4];
  int32_t device;
  int32_t device_index;
  int32_t present;
  int32_t reserved; /* 0 */
} talea_tensor;

/* The ranks that share a call, by callbacks: the caller's own MPI, NCCL or torch.distributed.
 * All are collective. A callback returns 0, or any other number for a failure, which ends the call
 * with TALEA_RUNTIME. `stream` is the args' stream. Buffers live on `device`. For
 * talea_phases_begin() the callbacks are null: there the caller does each exchange between calls.
 */
typedef struct talea_communicator {
  int64_t struct_bytes;
  const char* engine; /* for the receipt, e.g. "torch.distributed gloo"; may be null */
  int32_t rank;
  int32_t size;
  int32_t device;
  int32_t reserved; /* 0 */
  void* user;       /* handed to every callback */
  /* `bytes` bytes (> 0) of every rank, in rank order, into recv (size * bytes); may be in place. */
  int32_t (*all_gather)(void* user, const void* send, void* recv, int64_t bytes, void* stream);
  /* In place; dtype F32, F64 or I64 (BF16 also on a device). */
  int32_t (*all_reduce_sum)(void* user, void* buffer, int64_t count, int32_t dtype, void* stream);
  /* send holds size * count elements; this rank receives the sum of block `rank`. */
  int32_t (*reduce_scatter_sum)(void* user, const void* send, void* recv, int64_t count,
                                int32_t dtype, void* stream);
  /* Why the last callback failed; may be null, as may be the callback. */
  const char* (*error_text)(void* user);
} talea_communicator;

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
  talea_tensor db;             /* [vocab_stored] */
  int32_t accumulate_dw;       /* add into dw (an F32 main gradient) instead of overwriting it */
  int32_t accumulate_db;
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
  int64_t workspace_limit_bytes; /* 256 MiB */
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
  int64_t workspace_bytes; /* at least talea_workspace_bytes() */
  void* stream;            /* cudaStream_t, or null */
} talea_linear_cross_entropy_args;

typedef struct talea_lane_decline {
  const char* lane;
  const char* reason;
} talea_lane_decline;

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

/* Opaque; free with talea_result_free(). */
typedef struct talea_result talea_result;

enum { TALEA_LOG_ERROR = 0, TALEA_LOG_INFO = 1, TALEA_LOG_DEBUG = 2 };
/* Called on the thread of the call; must not call talea_set_log_callback(). */
typedef void (*talea_log_callback)(int32_t level, const char* text, void* user);

TALEA_API const char* talea_version(void);
/* TALEA_ABI_VERSION of the library; compare with the header's before the first call. */
TALEA_API int32_t talea_abi_version(void);
/* The text of this thread's last failure; "" when there was none. Valid until its next call. */
TALEA_API const char* talea_last_error(void);
/* Null turns the log off. One callback a process. */
TALEA_API void talea_set_log_callback(talea_log_callback callback, void* user);

/* Writes the defaults. struct_bytes: sizeof(talea_linear_cross_entropy_options). */
TALEA_API talea_status talea_linear_cross_entropy_options_init(
    talea_linear_cross_entropy_options* options, int64_t struct_bytes);

/* What the lane that would run needs. The workspace of args is not looked at. */
TALEA_API talea_status talea_workspace_bytes(const talea_linear_cross_entropy_args* args,
                                             int64_t* bytes);

/* The operator. result may be null; else *result is set on TALEA_OK, and null otherwise. */
TALEA_API talea_status talea_linear_cross_entropy(const talea_linear_cross_entropy_args* args,
                                                  talea_result** result);

enum { TALEA_TEXT = 0, TALEA_JSON = 1 };
/* Which lane would run, why the others decline, and what it costs; touches no data, and data
 * pointers may be null. Writes at most buffer_bytes with a closing 0, and the bytes the whole text
 * needs into *needed_bytes (may be null); a buffer too small is no error. */
TALEA_API talea_status talea_explain(const talea_linear_cross_entropy_args* args, int32_t format,
                                     char* buffer, int64_t buffer_bytes, int64_t* needed_bytes);

/* The operator cut at its exchanges between ranks, for callers whose group (torch.distributed,
 * Megatron's tp_group) is a loop of their own and not a callback:
 *   talea_phases_begin(&args, &phases);
 *   while (talea_phases_next(phases, &exchange) == TALEA_OK && exchange.kind) do_it(&exchange);
 *   talea_phases_finish(phases, &result);   talea_phases_free(phases);
 * Every rank meets the same exchanges in the same order. args->ranks names rank, size and device of
 * `vocab` (and `batch`) without callbacks. What args points to must live until the end. */
enum {                          /* kind of an exchange */
       TALEA_EXCHANGE_NONE = 0, /* the call has ended */
       TALEA_EXCHANGE_ALL_GATHER = 1,
       TALEA_EXCHANGE_ALL_REDUCE_SUM = 2,
       TALEA_EXCHANGE_REDUCE_SCATTER_SUM = 3
};
enum { TALEA_GROUP_VOCAB = 0, TALEA_GROUP_BATCH = 1 };

/* As the callbacks of talea_communicator. */
typedef struct talea_exchange {
  int64_t struct_bytes;
  int32_t kind;
  int32_t group;    /* TALEA_GROUP_VOCAB or TALEA_GROUP_BATCH */
  int32_t device;   /* of the buffers: TALEA_CPU for the handshake, also of a call on a device */
  int32_t dtype;    /* of the sums; an all_gather moves bytes */
  const void* send; /* all_gather: `bytes`; reduce_scatter: size blocks of `bytes`; or recv */
  void* recv;       /* all_gather: size blocks of `bytes`, in rank order; otherwise `bytes` */
  int64_t count;    /* elements of `bytes` */
  int64_t bytes;
  void* stream; /* on a device: queue the work here; it need not have run on return */
} talea_exchange;

typedef struct talea_phases talea_phases;

/* Nothing runs yet; every error of the arguments is said by the first talea_phases_next(). */
TALEA_API talea_status talea_phases_begin(const talea_linear_cross_entropy_args* args,
                                          talea_phases** phases);
/* Runs to the next exchange, taking the last one as done; exchange->struct_bytes must be set. After
 * an error, and after TALEA_EXCHANGE_NONE, the call has ended. */
TALEA_API talea_status talea_phases_next(talea_phases* phases, talea_exchange* exchange);
/* The result of a call that has ended well; TALEA_USAGE before. */
TALEA_API talea_status talea_phases_finish(talea_phases* phases, talea_result** result);
/* Gives up a call that has not ended: its outputs are unfinished. Null is no error. */
TALEA_API void talea_phases_free(talea_phases* phases);

/* Lane names, best first, parted by commas; a constant. */
TALEA_API const char* talea_linear_cross_entropy_lanes(void);

/* Null for a null result. */
TALEA_API const talea_linear_cross_entropy_facts* talea_result_facts(const talea_result* result);
/* The same facts as one JSON object, 0-terminated; belongs to the result. Null for a null result.
 */
TALEA_API const char* talea_result_json(const talea_result* result);
TALEA_API void talea_result_free(talea_result* result);

#ifdef __cplusplus
}
#endif

#endif
