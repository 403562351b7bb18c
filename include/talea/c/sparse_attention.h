/* What: sparse attention, the selection of its keys and the indexer's loss in the C interface.
 * Why: each operator has structs and functions of its own; what all share is in talea.h.
 * Never: included alone; talea.h includes it. */
#ifndef TALEA_C_SPARSE_ATTENTION_H
#define TALEA_C_SPARSE_ATTENTION_H

#include "../talea.h"

#ifdef __cplusplus
extern "C" {
#endif

/* B batch, S queries, S_kv keys, H heads, G key groups, K slots of a query, D columns of a row of
 * kv, of which the first value_dim are the value; Hi heads of di columns of the indexer. B may be
 * missing everywhere, G where it is 1. docs/sparse_attention.md has every shape and edge. */
enum { /* pass */
       TALEA_PASS_FORWARD = 0,
       TALEA_PASS_BACKWARD = 1
};
enum {                           /* index_space: what an index counts */
       TALEA_INDEX_ROWS = 0,     /* rows of the batch entry's kv, or of the whole with cu_seqlens */
       TALEA_INDEX_SEQUENCE = 1, /* from the start of the query's own sequence */
       TALEA_INDEX_SLOTS = 2     /* page * page_rows + offset */
};
enum { /* index_check: an index outside its space that is not -1 is foreign: absent, and counted */
       TALEA_INDEX_IGNORE = 0,
       TALEA_INDEX_REPORT = 1, /* talea_sparse_attention_require_clean() fails */
       TALEA_INDEX_CHECKED = 2 /* the call fails before anything is written */
};
enum { TALEA_KV_PLAIN = 0, TALEA_KV_FP8_SCALED = 1, TALEA_KV_FP8_656 = 2 };  /* kv_storage */
enum { TALEA_FP8_ANY = 0, TALEA_FP8_IN_KERNEL = 1 };                         /* fp8_path */
enum { TALEA_DKV_DETERMINISTIC = 0, TALEA_DKV_ATOMIC = 1 };                  /* dkv_sum */
enum { TALEA_OPERANDS_NATIVE = 0, TALEA_OPERANDS_SPLIT = 1 };                /* operands */
enum { TALEA_ACTIVATION_RELU = 0, TALEA_ACTIVATION_IDENTITY = 1 };           /* act */
enum { TALEA_LOSS_KEYS_SPARSE = 0, TALEA_LOSS_KEYS_DENSE = 1 };              /* keys */
enum { TALEA_LOSS_DENOMINATOR_VALID = 0, TALEA_LOSS_DENOMINATOR_GIVEN = 1 }; /* denominator */
enum { TALEA_LOSS_SCOPE_LOCAL = 0, TALEA_LOSS_SCOPE_GLOBAL = 1 };            /* of it */

typedef struct talea_sparse_attention_inputs {
  int64_t struct_bytes;
  talea_tensor q;        /* [B, S, H, D] F32, BF16, F16 (F64: lane reference), F8_E4M3 */
  talea_tensor q_scale;  /* F32, with F8_E4M3: scalar, [S] or [S, H], B in front where q has B */
  talea_tensor kv;       /* [B, S_kv, G, D]; paged: [pages, page_rows, G, D]; FP8_656: 656 bytes */
  talea_tensor kv_scale; /* F32: scalar, [S_kv] or [S_kv, ceil(D / 128)], B in front as of kv */
  talea_tensor indices;  /* [B, S, G, K] I32 or I64 */
  talea_tensor topk_length;  /* [B, S] or [B] I32 */
  talea_tensor sink;         /* [H] F32: a logit without a value */
  talea_tensor cu_seqlens_q; /* [n + 1] I32, both or neither: S and S_kv are then totals */
  talea_tensor cu_seqlens_k;
  talea_tensor q_positions; /* [B, S] I32 */
  talea_tensor block_table; /* [B, blocks] I32: pages of a sequence */
  talea_tensor kv_lengths;  /* [B] I32 */
  talea_tensor d_o;         /* backward: upstream of o, */
  talea_tensor d_lse;       /* and of lse; an absent one counts as 0 */
  talea_tensor o;           /* backward: of an earlier forward; without o and lse it runs again */
  talea_tensor o_residual;
  talea_tensor lse;
} talea_sparse_attention_inputs;

/* What is present is computed. Memory of outputs must not overlap anything else. */
typedef struct talea_sparse_attention_outputs {
  int64_t struct_bytes;
  talea_tensor o;          /* [B, S, H, value_dim] dtype of q (BF16 where q is F8_E4M3) or F32 */
  talea_tensor o_residual; /* as o, 16-bit: what rounding o lost */
  talea_tensor lse;        /* [B, S, H] F32, natural logarithm, without the sink */
  talea_tensor row_max;    /* [B, S, H] F32: the largest scaled logit */
  talea_tensor status;    /* [4] I64, added to: foreign indices, lowest flat slot of one, its value,
                           * NaN index scores. The caller resets it to {0, -1, 0, 0} */
  talea_tensor dq;        /* as q: its dtype or F32 */
  talea_tensor dkv;       /* as kv: its dtype or F32 */
  talea_tensor d_sink;    /* [H] F32 */
  int32_t accumulate_dkv; /* add into dkv (F32) instead of overwriting it */
  int32_t reserved;       /* 0 */
} talea_sparse_attention_outputs;

/* Start from talea_sparse_attention_options_init(): not all defaults are 0. */
typedef struct talea_sparse_attention_options {
  int64_t struct_bytes;
  int64_t value_dim;             /* required */
  double scale;                  /* of the logits; 0 stands for D^-1/2 */
  int64_t q_position_base;       /* position of query 0 where q_positions is absent */
  int32_t causal;                /* key position <= query position */
  int32_t index_space;           /* rows */
  int32_t index_check;           /* ignore */
  int32_t kv_storage;            /* plain */
  int32_t fp8_path;              /* any; in_kernel: a lane that needs a copy of kv declines */
  int32_t dkv_sum;               /* deterministic */
  int32_t operands;              /* native */
  int32_t threads;               /* of the cpu lanes; 0: as many as OpenMP offers */
  int64_t workspace_limit_bytes; /* 256 MiB */
  const char* lane; /* null or "auto": the best that accepts; a name: that or an error */
} talea_sparse_attention_options;

/* Null pointers: a world of one. heads: each rank holds some heads of q, o, dq, sink. sequence:
 * each holds some rows of q, o, dq, indices, and the whole kv or (gather_kv) its rows of it. */
typedef struct talea_sparse_attention_ranks {
  int64_t struct_bytes;
  const talea_communicator* heads;
  const talea_communicator* sequence;
  const talea_communicator* batch; /* index_loss: ranks that share a global denominator as well */
  int64_t head_begin;              /* global number of this rank's first head */
  int64_t row_begin;               /* with gather_kv: global row of this rank's first row of kv */
  int64_t total_heads;             /* over all ranks; 0: H. Needed where G > 1 and heads are cut */
  int64_t total_kv_rows;           /* with gather_kv: rows over all ranks */
  int32_t gather_kv;
  int32_t skip_handshake; /* 1: shapes, options and shards are not compared before the work */
} talea_sparse_attention_ranks;

/* One call. `inputs` and `outputs` are needed; null options are the defaults (value_dim must be
 * set), null ranks a world of one. */
typedef struct talea_sparse_attention_args {
  int64_t struct_bytes;
  int32_t abi_version; /* TALEA_ABI_VERSION */
  int32_t reserved;    /* 0 */
  const talea_sparse_attention_inputs* inputs;
  const talea_sparse_attention_outputs* outputs;
  const talea_sparse_attention_options* options;
  const talea_sparse_attention_ranks* ranks;
  void* workspace;         /* on the device of the tensors, any alignment */
  int64_t workspace_bytes; /* at least talea_sparse_attention_workspace_bytes() */
  void* stream;            /* cudaStream_t, or null */
} talea_sparse_attention_args;

/* The indexer: I[t, j] = key scale * sum over h of w[t, h] * act(index_q[t, h] . index_k[j]). */
typedef struct talea_sparse_attention_select_inputs {
  int64_t struct_bytes;
  talea_tensor index_q;       /* [B, S, Hi, di] F32, BF16, F16, F8_E4M3 */
  talea_tensor index_q_scale; /* [B, S, Hi] F32, > 0, with F8_E4M3 */
  talea_tensor index_k;       /* [B, S_kv, di] dtype of index_q */
  talea_tensor index_k_scale; /* [B, S_kv] F32, > 0 */
  talea_tensor index_weights; /* [B, S, Hi] F32 or BF16 */
  talea_tensor begin;         /* [B, S] I32: keys [begin, end) of a query, cut to [0, S_kv] */
  talea_tensor end;
  talea_tensor cu_seqlens_q; /* [n + 1] I32 */
  talea_tensor cu_seqlens_k;
  talea_tensor q_positions; /* [B, S] I32 */
} talea_sparse_attention_select_inputs;

typedef struct talea_sparse_attention_select_outputs {
  int64_t struct_bytes;
  talea_tensor indices;     /* [B, S, K] I32: ascending, then -1 */
  talea_tensor topk_length; /* [B, S] I32: how many were selected */
  talea_tensor scores;      /* [B, S, K] F32: of the selected, then -Inf */
  talea_tensor status;      /* [4] I64, as of attention */
} talea_sparse_attention_select_outputs;

typedef struct talea_sparse_attention_select_options {
  int64_t struct_bytes;
  int64_t top_k; /* 0: the last extent of indices */
  int64_t q_position_base;
  int64_t key_stride; /* 1; causal: a query at position t sees floor((t + 1) / key_stride) keys */
  int32_t act;        /* relu */
  int32_t causal;
  int32_t threads;
  int32_t reserved; /* 0 */
  int64_t workspace_limit_bytes;
  const char* lane;
} talea_sparse_attention_select_options;

typedef struct talea_sparse_attention_select_args {
  int64_t struct_bytes;
  int32_t abi_version;
  int32_t reserved;
  const talea_sparse_attention_select_inputs* inputs;
  const talea_sparse_attention_select_outputs* outputs;
  const talea_sparse_attention_select_options* options;
  const talea_sparse_attention_ranks* ranks;
  void* workspace;
  int64_t workspace_bytes;
  void* stream;
} talea_sparse_attention_select_args;

/* coeff / N * sum over t of row_weight * KL(attention's mean distribution || softmax of I). */
typedef struct talea_sparse_attention_index_loss_inputs {
  int64_t struct_bytes;
  talea_tensor index_q; /* the indexer, as of select */
  talea_tensor index_q_scale;
  talea_tensor index_k;
  talea_tensor index_k_scale;
  talea_tensor index_weights;
  talea_tensor q; /* the attention that teaches; constants */
  talea_tensor q_scale;
  talea_tensor kv;
  talea_tensor kv_scale;
  talea_tensor indices; /* keys sparse: [B, S, K] */
  talea_tensor topk_length;
  talea_tensor lse;        /* [B, S, H] of attention over the same keys; may be absent */
  talea_tensor row_weight; /* [B, S] F32; absent: 1 */
  talea_tensor begin;      /* keys dense: as of select */
  talea_tensor end;
  talea_tensor cu_seqlens_q;
  talea_tensor cu_seqlens_k;
  talea_tensor q_positions;
} talea_sparse_attention_index_loss_inputs;

typedef struct talea_sparse_attention_index_loss_outputs {
  int64_t struct_bytes;
  talea_tensor loss;           /* scalar, F32 or F64 */
  talea_tensor dindex_q;       /* as index_q: its dtype or F32 */
  talea_tensor dindex_k;       /* as index_k: its dtype or F32 */
  talea_tensor dindex_weights; /* as index_weights: its dtype or F32 */
  talea_tensor status;
  int32_t accumulate_dindex_k; /* add into dindex_k (F32) */
  int32_t reserved;            /* 0 */
} talea_sparse_attention_index_loss_outputs;

typedef struct talea_sparse_attention_index_loss_options {
  int64_t struct_bytes;
  double coeff;             /* 1 */
  double denominator_value; /* with DENOMINATOR_GIVEN: > 0 */
  double scale;             /* of the attention logits; 0 stands for D^-1/2 */
  int64_t q_position_base;
  int64_t key_stride;        /* 1 */
  int32_t keys;              /* sparse */
  int32_t denominator;       /* valid */
  int32_t denominator_scope; /* local */
  int32_t act;               /* relu */
  int32_t causal;
  int32_t index_space;
  int32_t index_check;
  int32_t kv_storage;
  int32_t dindex_k_sum; /* deterministic */
  int32_t threads;
  int64_t workspace_limit_bytes;
  const char* lane;
} talea_sparse_attention_index_loss_options;

typedef struct talea_sparse_attention_index_loss_args {
  int64_t struct_bytes;
  int32_t abi_version;
  int32_t reserved;
  const talea_sparse_attention_index_loss_inputs* inputs;
  const talea_sparse_attention_index_loss_outputs* outputs;
  const talea_sparse_attention_index_loss_options* options;
  const talea_sparse_attention_ranks* ranks;
  void* workspace;
  int64_t workspace_bytes;
  void* stream;
} talea_sparse_attention_index_loss_args;

/* What ran, how and at what cost, of any pass. Strings belong to the result; what a pass has not
 * is empty or 0. */
typedef struct talea_sparse_attention_facts {
  int64_t struct_bytes;
  const char* lane;
  const char* lane_kind;
  const char* scores_home; /* where a tile of scores lives between the product and the softmax */
  const char* kv_path;     /* how a row of kv becomes an operand */
  const char* operands;
  const char* delta_source;
  const char* accumulator_o;
  const char* accumulator_dq;
  const char* accumulator_dkv;
  const char* dkv_sum;
  const char* dkv_order;
  const char* lse_base;
  const char* selection_rule;
  const char* denominator_kind;
  const char* denominator_scope;
  int64_t workspace_bytes;
  int64_t slots_given; /* -1 here and below: the counts stay on the device */
  int64_t slots_valid;
  int64_t slots_absent;
  int64_t slots_foreign;
  int64_t first_foreign_slot; /* flat in [B, S, G, K]; -1: none */
  int64_t first_foreign_value;
  int64_t scores_tile_rows;
  int64_t scores_tile_keys;
  int64_t scores_tile_bytes;
  int64_t full_scores_bytes;    /* of [.., S, S_kv] scores: 0 but in lane unfused */
  int64_t gathered_kv_bytes;    /* of copies of selected rows, all threads together */
  int64_t dequantised_kv_bytes; /* of a dequantised copy of all of kv */
  int64_t decode_segments;
  int64_t nan_scores;
  double flops;
  double loss;        /* NaN where it lives in device memory */
  double denominator; /* N; NaN where it lives in device memory */
  int32_t pass;       /* 0 forward, 1 backward, 2 select, 3 index_loss */
  int32_t forward_repeated;
  int32_t declined_count;
  int32_t notes_count;
  const talea_lane_decline* declined;
  const char* const* notes;
} talea_sparse_attention_facts;

/* Write the defaults. struct_bytes: sizeof(*options). */
TALEA_API talea_status talea_sparse_attention_options_init(talea_sparse_attention_options* options,
                                                           int64_t struct_bytes);
TALEA_API talea_status talea_sparse_attention_select_options_init(
    talea_sparse_attention_select_options* options, int64_t struct_bytes);
TALEA_API talea_status talea_sparse_attention_index_loss_options_init(
    talea_sparse_attention_index_loss_options* options, int64_t struct_bytes);

/* What the lane that would run needs. The workspace of args is not looked at. */
TALEA_API talea_status talea_sparse_attention_workspace_bytes(
    const talea_sparse_attention_args* args, int32_t pass, int64_t* bytes);
TALEA_API talea_status talea_sparse_attention_select_workspace_bytes(
    const talea_sparse_attention_select_args* args, int64_t* bytes);
TALEA_API talea_status talea_sparse_attention_index_loss_workspace_bytes(
    const talea_sparse_attention_index_loss_args* args, int64_t* bytes);

/* Which lane would run, why the others decline, and what it costs; touches no data, and data
 * pointers may be null. Writes at most buffer_bytes with a closing 0, and the bytes the whole text
 * needs into *needed_bytes (may be null); a buffer too small is no error. */
TALEA_API talea_status talea_sparse_attention_explain(const talea_sparse_attention_args* args,
                                                      int32_t pass, int32_t format, char* buffer,
                                                      int64_t buffer_bytes, int64_t* needed_bytes);
TALEA_API talea_status talea_sparse_attention_select_explain(
    const talea_sparse_attention_select_args* args, int32_t format, char* buffer,
    int64_t buffer_bytes, int64_t* needed_bytes);
TALEA_API talea_status talea_sparse_attention_index_loss_explain(
    const talea_sparse_attention_index_loss_args* args, int32_t format, char* buffer,
    int64_t buffer_bytes, int64_t* needed_bytes);

/* The passes. result may be null; else *result is set on TALEA_OK, and null otherwise. */
TALEA_API talea_status talea_sparse_attention_forward(const talea_sparse_attention_args* args,
                                                      talea_result** result);
TALEA_API talea_status talea_sparse_attention_backward(const talea_sparse_attention_args* args,
                                                       talea_result** result);
TALEA_API talea_status talea_sparse_attention_select(const talea_sparse_attention_select_args* args,
                                                     talea_result** result);
TALEA_API talea_status talea_sparse_attention_index_loss(
    const talea_sparse_attention_index_loss_args* args, talea_result** result);

/* mask [B, S, S_kv] F32, additive: an element becomes 0 where a valid slot names its key; the
 * others stay. Of args: indices, topk_length, cu_seqlens_*, q_positions and the options; no
 * workspace. */
TALEA_API talea_status talea_sparse_attention_index_mask(const talea_sparse_attention_args* args,
                                                         const talea_tensor* mask);
/* Rows of 576 (F32, BF16, F16) to the 656 bytes of KV_FP8_656 (U8 or F8_E4M3). */
TALEA_API talea_status talea_sparse_attention_pack_rows(const talea_tensor* kv,
                                                        const talea_tensor* rows, void* stream);
/* Synchronises the stream of a device; TALEA_INVALID_DATA with count, first slot and value where
 * `status` counts a foreign index. */
TALEA_API talea_status talea_sparse_attention_require_clean(const talea_tensor* status,
                                                            void* stream);

/* The passes cut at their exchanges (talea_phases_next() in talea.h), of groups TALEA_GROUP_HEADS
 * and TALEA_GROUP_SEQUENCE, and TALEA_GROUP_BATCH of an index loss. Nothing runs yet. */
TALEA_API talea_status talea_sparse_attention_phases_begin(const talea_sparse_attention_args* args,
                                                           int32_t pass, talea_phases** phases);
TALEA_API talea_status talea_sparse_attention_select_phases_begin(
    const talea_sparse_attention_select_args* args, talea_phases** phases);
TALEA_API talea_status talea_sparse_attention_index_loss_phases_begin(
    const talea_sparse_attention_index_loss_args* args, talea_phases** phases);

/* Lane names, best first, parted by commas; a constant. */
TALEA_API const char* talea_sparse_attention_lanes(void);

/* Null for a null result, and for that of another operator. */
TALEA_API const talea_sparse_attention_facts* talea_sparse_attention_result_facts(
    const talea_result* result);

#ifdef __cplusplus
}
#endif

#endif
