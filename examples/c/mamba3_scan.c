/* What: a Mamba-3 scan from C: a prompt forward, its gradients, and generation that goes on by
 * steps.
 * Why: shows every call of the scan: defaults, workspace, states handed over, slots, facts, errors.
 * Never: a model; the numbers are drawn.
 *
 * cc -std=c11 mamba3_scan.c $(pkg-config --cflags --libs talea) -lm -o mamba3_scan
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <talea/talea.h>

enum { TOKENS = 21, PROMPT = 20, HEADS = 4, GROUPS = 2, N = 8, P = 4, PAIRS = 4 };

/* A contiguous row-major view. */
static talea_tensor view(float* data, int32_t rank, const int64_t* shape) {
  talea_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
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
#define VIEW(data, ...)                                                     \
  view(data, (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), \
       (int64_t[]){__VA_ARGS__})

static void draw(float* to, int count, float scale, float middle) {
  for (int i = 0; i < count; ++i) to[i] = middle + scale * ((float)rand() / (float)RAND_MAX - 0.5f);
}

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, talea_last_error());
  return 1;
}

static float q[TOKENS * GROUPS * N], k[TOKENS * GROUPS * N], v[TOKENS * HEADS * P];
static float adt[HEADS * TOKENS], dt[HEADS * TOKENS], trap[HEADS * TOKENS];
static float angles[TOKENS * PAIRS];
static float out[TOKENS * HEADS * P], prompt_out[PROMPT * HEADS * P], next_out[HEADS * P];
static float angle[HEADS * PAIRS], ssm[HEADS * P * N], k_state[HEADS * N], v_state[HEADS * P];
static float d_out[TOKENS * HEADS * P], d_dt[HEADS * TOKENS];

/* The first `tokens` tokens; adt, dt and trap lie [H, S] whatever is read of them. */
static talea_mamba3_inputs inputs_of(int64_t tokens) {
  talea_mamba3_inputs in;
  memset(&in, 0, sizeof in);
  in.struct_bytes = sizeof in;
  in.q = VIEW(q, 1, tokens, GROUPS, N);
  in.k = VIEW(k, 1, tokens, GROUPS, N);
  in.v = VIEW(v, 1, tokens, HEADS, P);
  in.adt = VIEW(adt, 1, HEADS, tokens);
  in.dt = VIEW(dt, 1, HEADS, tokens);
  in.trap = VIEW(trap, 1, HEADS, tokens);
  in.adt.stride[1] = in.dt.stride[1] = in.trap.stride[1] = TOKENS;
  in.angles = VIEW(angles, 1, tokens, 1, PAIRS); /* shared by the heads */
  return in;
}

/* Runs `pass` with a workspace of the size it asks for. */
static int run(talea_mamba3_args* args, int32_t pass, talea_result** result) {
  int64_t bytes = 0;
  if (talea_mamba3_workspace_bytes(args, pass, &bytes) != TALEA_OK) return failed("workspace");
  args->workspace = malloc((size_t)bytes + 1);
  args->workspace_bytes = bytes;
  const talea_status status = pass == TALEA_MAMBA3_FORWARD    ? talea_mamba3_forward(args, result)
                              : pass == TALEA_MAMBA3_BACKWARD ? talea_mamba3_backward(args, result)
                                                              : talea_mamba3_step(args, result);
  free(args->workspace);
  return status == TALEA_OK ? 0 : failed("call");
}

int main(void) {
  if (talea_abi_version() != TALEA_ABI_VERSION) {
    fprintf(stderr, "header and library differ: %d, %d\n", TALEA_ABI_VERSION, talea_abi_version());
    return 1;
  }
  srand(5);
  draw(q, TOKENS * GROUPS * N, 2, 0), draw(k, TOKENS * GROUPS * N, 2, 0);
  draw(v, TOKENS * HEADS * P, 2, 0), draw(trap, HEADS * TOKENS, 2, 0);
  draw(dt, HEADS * TOKENS, 0.1f, 0.1f), draw(adt, HEADS * TOKENS, 0.1f, -0.1f);
  draw(angles, TOKENS * PAIRS, 2, 0), draw(d_out, TOKENS * HEADS * P, 2, 0);

  talea_mamba3_options options;
  if (talea_mamba3_options_init(&options, sizeof options) != TALEA_OK) return failed("options");
  talea_mamba3_inputs in = inputs_of(TOKENS);
  talea_mamba3_outputs made;
  memset(&made, 0, sizeof made);
  made.struct_bytes = sizeof made;
  made.out = VIEW(out, 1, TOKENS, HEADS, P);
  talea_mamba3_args args = {.struct_bytes = sizeof args,
                            .abi_version = TALEA_ABI_VERSION,
                            .inputs = &in,
                            .outputs = &made,
                            .options = &options};
  talea_result* result = NULL;
  if (run(&args, TALEA_MAMBA3_FORWARD, &result)) return 1;
  const talea_mamba3_facts* facts = talea_mamba3_result_facts(result);
  printf("forward on lane %s, chunk of %lld tokens, %lld workspace bytes\n", facts->lane,
         (long long)facts->chunk_tokens, (long long)facts->workspace_bytes);
  talea_result_free(result);

  /* A prompt that leaves its states, and one more token by a step on them. */
  in = inputs_of(PROMPT);
  made.out = VIEW(prompt_out, 1, PROMPT, HEADS, P);
  made.final_states.angle = VIEW(angle, 1, HEADS, PAIRS);
  made.final_states.ssm = VIEW(ssm, 1, HEADS, P, N);
  made.final_states.k = VIEW(k_state, 1, HEADS, N);
  made.final_states.v = VIEW(v_state, 1, HEADS, P);
  if (run(&args, TALEA_MAMBA3_FORWARD, NULL)) return 1;
  talea_mamba3_step_tensors step;
  memset(&step, 0, sizeof step);
  step.struct_bytes = sizeof step;
  step.out = VIEW(next_out, 1, HEADS, P);
  step.state = made.final_states;
  memset(&in, 0, sizeof in);
  in.struct_bytes = sizeof in;
  in.q = VIEW(q + PROMPT * GROUPS * N, 1, GROUPS, N);
  in.k = VIEW(k + PROMPT * GROUPS * N, 1, GROUPS, N);
  in.v = VIEW(v + PROMPT * HEADS * P, 1, HEADS, P);
  in.adt = VIEW(adt + PROMPT, 1, HEADS);
  in.dt = VIEW(dt + PROMPT, 1, HEADS);
  in.trap = VIEW(trap + PROMPT, 1, HEADS);
  in.adt.stride[1] = in.dt.stride[1] = in.trap.stride[1] = TOKENS;
  in.angles = VIEW(angles + PROMPT * PAIRS, 1, 1, PAIRS);
  args.step = &step;
  if (run(&args, TALEA_MAMBA3_STEP, NULL)) return 1;
  float largest = 0;
  for (int i = 0; i < HEADS * P; ++i)
    largest = fmaxf(largest, fabsf(next_out[i] - out[PROMPT * HEADS * P + i]));
  printf("the step is the scan's last token within %.1e\n", (double)largest);
  if (!(largest < 1e-5f)) return 1;

  /* The gradient of the steps' lengths alone: what is present is computed. */
  in = inputs_of(TOKENS);
  in.d_out = VIEW(d_out, 1, TOKENS, HEADS, P);
  memset(&made, 0, sizeof made);
  made.struct_bytes = sizeof made;
  made.d.dt = VIEW(d_dt, 1, HEADS, TOKENS);
  if (run(&args, TALEA_MAMBA3_BACKWARD, NULL)) return 1;
  double norm = 0;
  for (int i = 0; i < HEADS * TOKENS; ++i) norm += (double)d_dt[i] * d_dt[i];
  printf("|d_dt| = %.6f\n", sqrt(norm));

  /* An error names the tensor and what is supported. */
  in.dt.dtype = TALEA_BF16;
  int64_t bytes;
  if (talea_mamba3_workspace_bytes(&args, TALEA_MAMBA3_BACKWARD, &bytes) != TALEA_INVALID_DATA)
    return 1;
  printf("refused: %s\n", talea_last_error());
  return norm > 0 ? 0 : 1;
}
