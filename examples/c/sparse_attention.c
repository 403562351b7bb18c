/* What: sparse attention from C: select keys, attend, and go backward.
 * Why: shows every step a C trainer needs: args, workspace, status, result.
 * Never: needs more than talea.h and libtalea.
 *
 *   cc -std=c11 sparse_attention.c -ltalea -lm
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <talea/talea.h>

enum { S = 4, KEYS = 16, H = 2, D = 32, DV = 16, K = 8, HI = 2, DI = 8 };

static talea_tensor dense(void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
  talea_tensor t = {0};
  t.data = data;
  t.dtype = dtype;
  t.rank = rank;
  t.present = 1;
  int64_t stride = 1;
  for (int32_t i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  return t;
}

static void check(talea_status status, const char* what) {
  if (status == TALEA_OK) return;
  fprintf(stderr, "%s: %s\n", what, talea_last_error());
  exit(status);
}

static void fill(float* to, int n, double phase) {
  for (int i = 0; i < n; ++i) to[i] = (float)sin(0.7 * i + phase);
}

static void* memory(int64_t bytes) {
  void* p = malloc((size_t)(bytes > 0 ? bytes : 1));
  if (!p) exit(4);
  return p;
}

/* The keys of the largest index score of each query. */
static void select_keys(int32_t* indices, int32_t* length) {
  static float index_q[S * HI * DI], index_k[KEYS * DI], weights[S * HI];
  fill(index_q, S * HI * DI, 0.1);
  fill(index_k, KEYS * DI, 0.2);
  fill(weights, S * HI, 1.0);
  talea_sparse_attention_select_inputs in = {.struct_bytes = sizeof in};
  in.index_q = dense(index_q, TALEA_F32, 3, (int64_t[]){S, HI, DI});
  in.index_k = dense(index_k, TALEA_F32, 2, (int64_t[]){KEYS, DI});
  in.index_weights = dense(weights, TALEA_F32, 2, (int64_t[]){S, HI});
  talea_sparse_attention_select_outputs out = {.struct_bytes = sizeof out};
  out.indices = dense(indices, TALEA_I32, 2, (int64_t[]){S, K});
  out.topk_length = dense(length, TALEA_I32, 1, (int64_t[]){S});
  talea_sparse_attention_select_options options;
  check(talea_sparse_attention_select_options_init(&options, sizeof options), "options");
  options.top_k = K;
  talea_sparse_attention_select_args args = {.struct_bytes = sizeof args};
  args.abi_version = TALEA_ABI_VERSION;
  args.inputs = &in;
  args.outputs = &out;
  args.options = &options;
  check(talea_sparse_attention_select_workspace_bytes(&args, &args.workspace_bytes), "workspace");
  args.workspace = memory(args.workspace_bytes);
  check(talea_sparse_attention_select(&args, NULL), "select");
  free(args.workspace);
}

static void run(talea_sparse_attention_args* args, int32_t pass) {
  talea_result* result = NULL;
  check(talea_sparse_attention_workspace_bytes(args, pass, &args->workspace_bytes), "workspace");
  args->workspace = memory(args->workspace_bytes);
  check(pass == TALEA_PASS_FORWARD ? talea_sparse_attention_forward(args, &result)
                                   : talea_sparse_attention_backward(args, &result),
        "pass");
  const talea_sparse_attention_facts* facts = talea_sparse_attention_result_facts(result);
  printf("pass %d: lane %s, %lld of %lld slots valid\n", pass, facts->lane,
         (long long)facts->slots_valid, (long long)facts->slots_given);
  talea_result_free(result);
  free(args->workspace);
}

int main(void) {
  static float q[S * H * D], kv[KEYS * D], sink[H] = {0.5f, -1.f}, d_o[S * H * DV];
  static float o[S * H * DV], lse[S * H], dq[S * H * D], dkv[KEYS * D], d_sink[H];
  static int32_t indices[S * K], length[S];
  fill(q, S * H * D, 0.3);
  fill(kv, KEYS * D, 0.4);
  fill(d_o, S * H * DV, 0.5);
  select_keys(indices, length);

  talea_sparse_attention_inputs in = {.struct_bytes = sizeof in};
  in.q = dense(q, TALEA_F32, 3, (int64_t[]){S, H, D});
  in.kv = dense(kv, TALEA_F32, 2, (int64_t[]){KEYS, D});
  in.indices = dense(indices, TALEA_I32, 2, (int64_t[]){S, K});
  in.topk_length = dense(length, TALEA_I32, 1, (int64_t[]){S});
  in.sink = dense(sink, TALEA_F32, 1, (int64_t[]){H});
  talea_sparse_attention_outputs out = {.struct_bytes = sizeof out};
  out.o = dense(o, TALEA_F32, 3, (int64_t[]){S, H, DV});
  out.lse = dense(lse, TALEA_F32, 2, (int64_t[]){S, H});
  talea_sparse_attention_options options;
  check(talea_sparse_attention_options_init(&options, sizeof options), "options");
  options.value_dim = DV;
  talea_sparse_attention_args args = {.struct_bytes = sizeof args};
  args.abi_version = TALEA_ABI_VERSION;
  args.inputs = &in;
  args.outputs = &out;
  args.options = &options;
  run(&args, TALEA_PASS_FORWARD);

  /* The first query's first head, by hand. */
  double top = sink[0], logit[K], sum = 0, want = 0;
  for (int k = 0; k < length[0]; ++k) {
    logit[k] = 0;
    for (int c = 0; c < D; ++c) logit[k] += (double)q[c] * kv[indices[k] * D + c];
    logit[k] /= sqrt((double)D);
    top = fmax(top, logit[k]);
  }
  for (int k = 0; k < length[0]; ++k) sum += exp(logit[k] - top);
  sum += exp(sink[0] - top);
  for (int k = 0; k < length[0]; ++k) want += exp(logit[k] - top) / sum * kv[indices[k] * D];
  printf("o[0] = %.9g, by hand %.9g\n", o[0], want);
  if (!(fabs(o[0] - want) < 1e-5)) return 1;

  /* Backward with what forward left: no forward runs again. */
  in.d_o = dense(d_o, TALEA_F32, 3, (int64_t[]){S, H, DV});
  in.o = out.o;
  in.lse = out.lse;
  out = (talea_sparse_attention_outputs){.struct_bytes = sizeof out};
  out.dq = dense(dq, TALEA_F32, 3, (int64_t[]){S, H, D});
  out.dkv = dense(dkv, TALEA_F32, 2, (int64_t[]){KEYS, D});
  out.d_sink = dense(d_sink, TALEA_F32, 1, (int64_t[]){H});
  run(&args, TALEA_PASS_BACKWARD);

  /* A step against the gradient of the sink changes the sum of o * d_o by that much. */
  printf("d_sink = %.6g %.6g\n", d_sink[0], d_sink[1]);
  return isfinite(d_sink[0]) && isfinite(dq[0]) && isfinite(dkv[0]) ? 0 : 1;
}
