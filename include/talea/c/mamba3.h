/* What: the C interface of the Mamba-3 scan: forward, backward and the one-token step.
 * Why: one header an operator; talea/talea.h includes it and holds what operators share.
 * Never: included alone; talea.h includes it.
 *
 * Shapes by B batch, S tokens, H heads, G groups of q and k (G divides H), N columns of q and k, P
 * columns of v, R rank, A rotated pairs, n sequences (B, or those of cu_seqlens). What is computed:
 * docs/mamba3.md.
 */
#ifndef TALEA_C_MAMBA3_H
#define TALEA_C_MAMBA3_H

#include "../talea.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { /* pass */
       TALEA_MAMBA3_FORWARD = 0,
       TALEA_MAMBA3_BACKWARD = 1,
       TALEA_MAMBA3_STEP = 2
};
enum {                                   /* rotary_pairs */
       TALEA_MAMBA3_PAIRS_AUTOMATIC = 0, /* interleaved without a rank axis, halves with one */
       TALEA_MAMBA3_PAIRS_INTERLEAVED = 1,
       TALEA_MAMBA3_PAIRS_HALVES = 2
};
enum {                                       /* sequence_check */
       TALEA_MAMBA3_SEQUENCES_AUTOMATIC = 0, /* checked on the host, clamp on a device */
       TALEA_MAMBA3_SEQUENCES_CHECKED = 1,   /* an error naming entry and value */
       TALEA_MAMBA3_SEQUENCES_CLAMP = 2      /* into [the entry before, S], counted */
};
enum { /* schedule */
       TALEA_MAMBA3_SCHEDULE_AUTOMATIC = 0,
       TALEA_MAMBA3_SCHEDULE_SEQUENTIAL = 1, /* chunks in turn */
       TALEA_MAMBA3_SCHEDULE_PARALLEL = 2    /* summaries of chunks, state pass, outputs */
};

typedef struct talea_mamba3_states {
  talea_tensor angle; /* [n, H, A] F32 */
  talea_tensor ssm;   /* [n, H, P, N] F32 */
  talea_tensor k;     /* [n, R, H, N], R = 1 also [n, H, N]; F32 or dtype of q: biased, rotated */
  talea_tensor v;     /* [n, H, P] F32 or dtype of q, not projected */
} talea_mamba3_states;

/* What is not present is neutral: zeros (biases, d, angles, states), ones (mimo_*, norm_weight). */
typedef struct talea_mamba3_inputs {
  int64_t struct_bytes;
  talea_tensor q;           /* [B, S, R, G, N], R = 1 also [B, S, G, N]; F32, BF16, F16 */
  talea_tensor k;           /* as q */
  talea_tensor v;           /* [B, S, H, P] dtype of q */
  talea_tensor z;           /* as v: the gate */
  talea_tensor adt;         /* [B, H, S] F32: log of a step's decay */
  talea_tensor dt;          /* [B, H, S] F32: its length */
  talea_tensor trap;        /* [B, H, S]: logit of lambda */
  talea_tensor angles;      /* [B, S, H, A], or [B, S, 1, A] shared by the heads: a rate */
  talea_tensor q_bias;      /* [H, R, N], R = 1 also [H, N]; F32 or dtype of q, as all below */
  talea_tensor k_bias;      /* as q_bias */
  talea_tensor d;           /* [H] */
  talea_tensor mimo_v;      /* [H, R, P] */
  talea_tensor mimo_z;      /* [H, R, P]; needs z */
  talea_tensor mimo_out;    /* [H, R, P]; without it R > 1 gives out [B, S, R, H, P] */
  talea_tensor norm_weight; /* [H, P]; needs head_norm */
  talea_tensor cu_seqlens;  /* [n + 1] I32: packed, B = 1 */
  talea_mamba3_states initial_states; /* each alone is legal */
  talea_tensor d_out;                 /* backward: gradient of out; absent: zeros */
  talea_tensor saved;                 /* backward: of a forward on the same inputs */
  talea_mamba3_states d_final_states; /* backward: gradients of the final states */
} talea_mamba3_inputs;

/* Gradients, each as the input it is of: its dtype, or F32. */
typedef struct talea_mamba3_gradients {
  talea_tensor q;
  talea_tensor k;
  talea_tensor v;
  talea_tensor z;
  talea_tensor adt;
  talea_tensor dt;
  talea_tensor trap;
  talea_tensor angles;
  talea_tensor q_bias;
  talea_tensor k_bias;
  talea_tensor d;
  talea_tensor mimo_v;
  talea_tensor mimo_z;
  talea_tensor mimo_out;
  talea_tensor norm_weight;
  talea_mamba3_states initial_states;
  /* Biases, d, mimo_* and norm_weight are added to their (F32) buffers. */
  int32_t accumulate_parameters;
  int32_t reserved; /* 0 */
} talea_mamba3_gradients;

/* What is present is computed. Memory of outputs must not overlap anything else. */
typedef struct talea_mamba3_outputs {
  int64_t struct_bytes;
  talea_tensor out;    /* [B, S, H, P], or [B, S, R, H, P]; dtype of q, or F32 */
  talea_tensor saved;  /* [talea_mamba3_saved_bytes] U8: what backward restarts from */
  talea_tensor status; /* [4] I64: bad entries of cu_seqlens, first place, its value, bad slots */
  talea_mamba3_states final_states;
  talea_mamba3_gradients d;
} talea_mamba3_outputs;

/* One token an entry: `inputs` of the args without the axis S; `state` is updated in place. Not
 * named talea_mamba3_step: that is the function. */
typedef struct talea_mamba3_step_tensors {
  int64_t struct_bytes;
  talea_tensor slots;  /* [B] I32: rows of the states; -1 skips; absent: 0, 1, 2, .. */
  talea_tensor out;    /* [B, H, P], or [B, R, H, P] */
  talea_tensor status; /* [4] I64, as of the outputs */
  talea_mamba3_states state;
} talea_mamba3_step_tensors;

/* Start from talea_mamba3_options_init(): not all defaults are 0. */
typedef struct talea_mamba3_options {
  int64_t struct_bytes;
  int32_t rotary_pairs;          /* automatic */
  int32_t sequence_check;        /* automatic */
  int32_t schedule;              /* automatic */
  int32_t head_norm;             /* 0: no norm over P before the gate */
  double norm_eps;               /* 1e-5 */
  int64_t chunk;                 /* tokens; 0: the lane's */
  int64_t workspace_limit_bytes; /* 256 MiB */
  int32_t threads;               /* of the host lanes; 0: as many as OpenMP offers */
  int32_t reserved;              /* 0 */
  const char* lane; /* null or "auto": the best that accepts; a name: that or an error */
} talea_mamba3_options;

/* Null pointers: a world of one. */
typedef struct talea_mamba3_ranks {
  int64_t struct_bytes;
  const talea_communicator* heads;    /* ranks that share the heads */
  const talea_communicator* sequence; /* ranks that share the tokens, in order */
  int64_t head_begin;                 /* global index of this rank's first head */
  int64_t total_heads;                /* of all ranks; 0: no other rank reads this one's groups */
  int64_t total_groups; /* of all ranks: q and k hold all of them, or the rank's own */
  int64_t token_begin;  /* global index of this rank's first token */
  /* 1: shapes, options and pieces are not compared before the work; 0: they are, over the host. */
  int32_t skip_handshake;
  /* 1: angles [B, S, 1, A] are those of all ranks' heads, and d_angles their sum; to be said only
   * where no rank holds more than one head. */
  int32_t shared_angles;
} talea_mamba3_ranks;

/* One call. `inputs` is needed; `outputs` by forward and backward, `step` by the step; null options
 * are the defaults, null ranks a world of one. */
typedef struct talea_mamba3_args {
  int64_t struct_bytes;
  int32_t abi_version; /* TALEA_ABI_VERSION */
  int32_t reserved;    /* 0 */
  const talea_mamba3_inputs* inputs;
  const talea_mamba3_outputs* outputs;
  const talea_mamba3_step_tensors* step;
  const talea_mamba3_options* options;
  const talea_mamba3_ranks* ranks;
  void* workspace;         /* on the device of the tensors, any alignment */
  int64_t workspace_bytes; /* at least talea_mamba3_workspace_bytes() */
  void* stream;            /* cudaStream_t, or null */
} talea_mamba3_args;

/* How often a product is formed for a chunk and head, and its flops over the call. */
typedef struct talea_mamba3_product {
  const char* name;
  double per_chunk;
  double flops;
} talea_mamba3_product;

typedef struct talea_mamba3_exchange {
  const char* name;
  const char* collective;
  int64_t bytes; /* that this rank sends */
} talea_mamba3_exchange;

/* What ran, how and at what cost: the library's half of a receipt. Strings belong to the result. */
typedef struct talea_mamba3_facts {
  int64_t struct_bytes;
  const char* lane;
  const char* lane_kind;
  const char* memory_order; /* of q, slowest axis first */
  const char* state_home;   /* where h lives between chunks */
  const char* state_dtype;
  const char* accumulator_angle;
  const char* accumulator_decay;
  const char* accumulator_state;
  const char* accumulator_state_gradient;
  const char* accumulator_rows; /* of dq, dk, dv */
  const char* accumulator_parameters;
  const char* accumulator_groups; /* of d_q, d_k over the heads of a group */
  const char* shared_product;     /* backward: what dO V^T, formed once, serves */
  int32_t pass;
  int32_t rotary_pairs; /* never automatic */
  int32_t schedule;
  int32_t threads;
  int64_t chunk_tokens; /* 0: the lane has no chunks */
  int64_t chunk_rows;
  int64_t per_head_bytes;  /* of whole per-head row tensors that existed */
  int64_t quadratic_bytes; /* of whole [S, S] tensors that existed */
  int64_t segment_chunks;  /* between two checkpoints */
  int64_t saved_bytes;
  int64_t workspace_bytes;
  double flops;
  int64_t padding_tokens; /* -1 here and below: the count lives on the device and was not read */
  int64_t bad_entries;
  int64_t bad_slots;
  int32_t states_from_saved;
  int32_t declined_count;
  int32_t products_count;
  int32_t exchanges_count;
  int32_t notes_count;
  int32_t reserved;
  const talea_lane_decline* declined;
  const talea_mamba3_product* products;
  const talea_mamba3_exchange* exchanges;
  const char* const* notes;
} talea_mamba3_facts;

/* Writes the defaults. struct_bytes: sizeof(talea_mamba3_options). */
TALEA_API talea_status talea_mamba3_options_init(talea_mamba3_options* options,
                                                 int64_t struct_bytes);

/* What the lane that would run needs for `pass`. The workspace of args is not looked at. */
TALEA_API talea_status talea_mamba3_workspace_bytes(const talea_mamba3_args* args, int32_t pass,
                                                    int64_t* bytes);
/* The size of `saved` that forward writes and backward reads. */
TALEA_API talea_status talea_mamba3_saved_bytes(const talea_mamba3_args* args, int64_t* bytes);

/* Which lane would run `pass`, why the others decline, and what it costs; touches no data, and data
 * pointers may be null. Writes at most buffer_bytes with a closing 0, and the bytes the whole text
 * needs into *needed_bytes (may be null); a buffer too small is no error. */
TALEA_API talea_status talea_mamba3_explain(const talea_mamba3_args* args, int32_t pass,
                                            int32_t format, char* buffer, int64_t buffer_bytes,
                                            int64_t* needed_bytes);

/* The operator. result may be null; else *result is set on TALEA_OK, and null otherwise. */
TALEA_API talea_status talea_mamba3_forward(const talea_mamba3_args* args, talea_result** result);
TALEA_API talea_status talea_mamba3_backward(const talea_mamba3_args* args, talea_result** result);
TALEA_API talea_status talea_mamba3_step(const talea_mamba3_args* args, talea_result** result);

/* Forward or backward cut at its exchanges, of the groups TALEA_GROUP_HEADS and
 * TALEA_GROUP_SEQUENCE. Nothing runs yet; every error of the arguments is said by the first
 * talea_phases_next(). */
TALEA_API talea_status talea_mamba3_phases_begin(const talea_mamba3_args* args, int32_t pass,
                                                 talea_phases** phases);

/* Null for a null result, and for one of another operator. */
TALEA_API const talea_mamba3_facts* talea_mamba3_result_facts(const talea_result* result);

/* Lane names, best first, parted by commas; a constant. */
TALEA_API const char* talea_mamba3_lanes(void);

#ifdef __cplusplus
}
#endif

#endif
