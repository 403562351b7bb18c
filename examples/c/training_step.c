/* What: a C trainer's output layer: hidden states in, loss and both gradients out, plain SGD.
 * Why: shows every step of the C interface: defaults, workspace, call, facts, errors.
 * Never: a program to train a real model with.
 *
 * cc -std=c11 training_step.c $(pkg-config --cflags --libs talea) -lm -o training_step
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <talea/talea.h>

enum { TOKENS = 96, HIDDEN = 24, VOCAB = 257, STEPS = 40 };

/* A contiguous row-major view of rank 0, 1 or 2. */
static talea_tensor view(void* data, int32_t dtype, int32_t rank, int64_t rows, int64_t columns) {
  talea_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.dtype = dtype;
  t.rank = rank;
  t.device = TALEA_CPU;
  t.present = 1;
  if (rank >= 1) t.shape[0] = rows;
  if (rank >= 2) t.shape[1] = columns;
  if (rank == 1) t.stride[0] = 1;
  if (rank == 2) {
    t.stride[0] = columns;
    t.stride[1] = 1;
  }
  return t;
}

static float uniform(void) { return (float)rand() / (float)RAND_MAX - 0.5f; }

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, talea_last_error());
  return 1;
}

int main(void) {
  static float hidden[TOKENS * HIDDEN], weight[VOCAB * HIDDEN];
  static float dx[TOKENS * HIDDEN], dw[VOCAB * HIDDEN];
  static int64_t targets[TOKENS];
  float loss = 0, first_loss = 0;

  if (talea_abi_version() != TALEA_ABI_VERSION) {
    fprintf(stderr, "header and library differ: %d, %d\n", TALEA_ABI_VERSION, talea_abi_version());
    return 1;
  }
  srand(7);
  for (int i = 0; i < TOKENS * HIDDEN; ++i) hidden[i] = uniform();
  for (int i = 0; i < VOCAB * HIDDEN; ++i) weight[i] = uniform();
  for (int i = 0; i < TOKENS; ++i) targets[i] = i % 5 == 0 ? -100 : (i * 31) % VOCAB;

  talea_linear_cross_entropy_inputs inputs;
  memset(&inputs, 0, sizeof inputs);
  inputs.struct_bytes = sizeof inputs;
  inputs.hidden = view(hidden, TALEA_F32, 2, TOKENS, HIDDEN);
  inputs.weight = view(weight, TALEA_F32, 2, VOCAB, HIDDEN);
  inputs.targets = view(targets, TALEA_I64, 1, TOKENS, 0);

  talea_linear_cross_entropy_outputs outputs;
  memset(&outputs, 0, sizeof outputs);
  outputs.struct_bytes = sizeof outputs;
  outputs.loss = view(&loss, TALEA_F32, 0, 0, 0);
  outputs.dx = view(dx, TALEA_F32, 2, TOKENS, HIDDEN);
  outputs.dw = view(dw, TALEA_F32, 2, VOCAB, HIDDEN);

  talea_linear_cross_entropy_options options;
  if (talea_linear_cross_entropy_options_init(&options, sizeof options)) return failed("options");
  options.label_smoothing = 0.05;

  talea_linear_cross_entropy_args args;
  memset(&args, 0, sizeof args);
  args.struct_bytes = sizeof args;
  args.abi_version = TALEA_ABI_VERSION;
  args.inputs = &inputs;
  args.outputs = &outputs;
  args.options = &options;
  if (talea_linear_cross_entropy_workspace_bytes(&args, &args.workspace_bytes))
    return failed("workspace");
  args.workspace = malloc((size_t)args.workspace_bytes);

  for (int step = 0; step < STEPS; ++step) {
    talea_result* result = NULL;
    if (talea_linear_cross_entropy(&args, &result)) return failed("linear_cross_entropy");
    const talea_linear_cross_entropy_facts* facts = talea_linear_cross_entropy_result_facts(result);
    if (step == 0) {
      first_loss = loss;
      printf("lane %s, %lld bytes of workspace, %lld of %d tokens count\n", facts->lane,
             (long long)facts->workspace_bytes, (long long)facts->valid_tokens, TOKENS);
    }
    if (step % 10 == 0) printf("step %2d  loss %.6f\n", step, loss);
    talea_result_free(result);
    for (int i = 0; i < VOCAB * HIDDEN; ++i) weight[i] -= 20.0f * dw[i];
    for (int i = 0; i < TOKENS * HIDDEN; ++i) hidden[i] -= 20.0f * dx[i];
  }
  printf("step %2d  loss %.6f\n", STEPS, loss);
  free(args.workspace);
  if (!(loss < 0.5f * first_loss)) {
    fprintf(stderr, "the loss did not fall: %g, then %g\n", first_loss, loss);
    return 1;
  }
  return 0;
}
