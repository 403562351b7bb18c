/* What: the C interface of Talea, for any language: here what every operator shares; each operator
 * has a header of its own in talea/c, which this one includes.
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
/* Rises when a struct or a function of these headers changes its meaning or layout. It is also the
 * number of the shared library (libtalea.so.3) and of its symbols' version (TALEA_3). */
#define TALEA_ABI_VERSION 3
/* Rises when an operator of these headers computes something else for the same call: a formula, an
 * edge case, a default. What that may be and how it is said before: docs/compatibility.md. */
#define TALEA_CONTRACT_VERSION 1

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
       TALEA_I64 = 5,
       TALEA_F8_E4M3 = 6, /* OCP FP8: 4 bits of exponent, 3 of mantissa, no infinity */
       TALEA_U8 = 7
};
enum { TALEA_CPU = 0, TALEA_CUDA = 1 }; /* device */

#define TALEA_MAX_RANK 5
/* A view of the caller's memory. Strides count elements; 0 (expanded) and negative strides are
 * legal for inputs. All zero (present = 0): the tensor is not given. */
typedef struct talea_tensor {
  void* data; /* inputs are never written through */
  int32_t dtype;
  int32_t rank; /* 0 (a scalar) to TALEA_MAX_RANK */
  int64_t shape[TALEA_MAX_RANK];
  int64_t stride[TALEA_MAX_RANK];
  int32_t device;
  int32_t device_index;
  int32_t present;
  int32_t reserved; /* 0 */
} talea_tensor;

/* The ranks that share a call, by callbacks: the caller's own MPI, NCCL or torch.distributed.
 * All are collective. A callback returns 0, or any other number for a failure, which ends the call
 * with TALEA_RUNTIME. `stream` is the args' stream. Buffers live on `device`. For an operator's
 * ..._phases_begin() the callbacks are null: there the caller does each exchange between calls. */
typedef struct talea_communicator {
  int64_t struct_bytes;
  const char* engine; /* for the receipt, e.g. "torch.distributed gloo"; may be null */
  int32_t rank;
  int32_t size;
  int32_t device;
  /* With phases, on a device: multiprocessors that an exchange takes which is begun beside a
   * product. The product then leaves as many free, and the TALEA_EXCHANGE_BEGUN_... come. 0: none
   * is begun. With callbacks 0. */
  int32_t multiprocessors_beside;
  void* user; /* handed to every callback */
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

typedef struct talea_lane_decline {
  const char* lane;
  const char* reason;
} talea_lane_decline;

/* Opaque; free with talea_result_free(). */
typedef struct talea_result talea_result;

enum { TALEA_LOG_ERROR = 0, TALEA_LOG_INFO = 1, TALEA_LOG_DEBUG = 2 };
/* Called on the thread of the call; must not call talea_set_log_callback(). */
typedef void (*talea_log_callback)(int32_t level, const char* text, void* user);

TALEA_API const char* talea_version(void);
/* The source the library was built from: a commit, with "-dirty" where files differed from it;
 * "unknown" outside a checkout. */
TALEA_API const char* talea_build_revision(void);
/* TALEA_ABI_VERSION of the library; compare with the header's before the first call. */
TALEA_API int32_t talea_abi_version(void);
/* TALEA_INVALID_DATA, once, if a call on a device has since found something wrong; no
 * synchronisation, so that what still runs is not seen. */
TALEA_API talea_status talea_require_clean(void);
/* Not 0 while talea_require_clean() has something to report; null: nothing can have been. */
TALEA_API const volatile int32_t* talea_fault_flag(void);
/* The text of this thread's last failure; "" when there was none. Valid until its next call. */
TALEA_API const char* talea_last_error(void);
/* Null turns the log off. One callback a process. */
TALEA_API void talea_set_log_callback(talea_log_callback callback, void* user);

enum { TALEA_TEXT = 0, TALEA_JSON = 1 };
/* An operator cut at its exchanges between ranks, for callers whose group (torch.distributed,
 * Megatron's tp_group) is a loop of their own and not a callback:
 *   talea_linear_cross_entropy_phases_begin(&args, &phases);
 *   while (talea_phases_next(phases, &exchange) == TALEA_OK && exchange.kind) do_it(&exchange);
 *   talea_phases_finish(phases, &result);   talea_phases_free(phases);
 * Every rank meets the same exchanges in the same order. args->ranks names rank, size and device of
 * each group without callbacks. What args points to must live until the end. */
enum {                          /* kind of an exchange */
       TALEA_EXCHANGE_NONE = 0, /* the call has ended */
       TALEA_EXCHANGE_ALL_GATHER = 1,
       TALEA_EXCHANGE_ALL_REDUCE_SUM = 2,
       TALEA_EXCHANGE_REDUCE_SCATTER_SUM = 3,
       /* The same, to be begun behind what `stream` holds; what is queued there later need not
        * wait, until the group's JOIN, behind which `stream` waits for all that was begun. */
       TALEA_EXCHANGE_BEGUN_ALL_GATHER = 4,
       TALEA_EXCHANGE_BEGUN_ALL_REDUCE_SUM = 5,
       TALEA_EXCHANGE_BEGUN_REDUCE_SCATTER_SUM = 6,
       TALEA_EXCHANGE_JOIN = 7
};
enum { /* group of an exchange; each operator says which of them it has */
       TALEA_GROUP_VOCAB = 0,
       TALEA_GROUP_BATCH = 1,
       TALEA_GROUP_HEADS = 2,
       TALEA_GROUP_SEQUENCE = 3
};

/* As the callbacks of talea_communicator. */
typedef struct talea_exchange {
  int64_t struct_bytes;
  int32_t kind;
  int32_t group;    /* TALEA_GROUP_... */
  int32_t device;   /* of the buffers: TALEA_CPU for the handshake, also of a call on a device */
  int32_t dtype;    /* of the sums; an all_gather moves bytes */
  const void* send; /* all_gather: `bytes`; reduce_scatter: size blocks of `bytes`; or recv */
  void* recv;       /* all_gather: size blocks of `bytes`, in rank order; otherwise `bytes` */
  int64_t count;    /* elements of `bytes` */
  int64_t bytes;
  void* stream; /* on a device: queue the work here; it need not have run on return */
} talea_exchange;

typedef struct talea_phases talea_phases;

/* Runs to the next exchange, taking the last one as done; exchange->struct_bytes must be set. After
 * an error, and after TALEA_EXCHANGE_NONE, the call has ended. */
TALEA_API talea_status talea_phases_next(talea_phases* phases, talea_exchange* exchange);
/* The result of a call that has ended well; TALEA_USAGE before. */
TALEA_API talea_status talea_phases_finish(talea_phases* phases, talea_result** result);
/* Gives up a call that has not ended: its outputs are unfinished. Null is no error. */
TALEA_API void talea_phases_free(talea_phases* phases);

/* What ran, how and at what cost, of any operator, as one JSON object, 0-terminated; belongs to the
 * result. Null for a null result. */
TALEA_API const char* talea_result_json(const talea_result* result);
TALEA_API void talea_result_free(talea_result* result);

#ifdef __cplusplus
}
#endif

#include "c/linear_cross_entropy.h"
#include "c/mamba3.h"
#include "c/sparse_attention.h"

#endif
