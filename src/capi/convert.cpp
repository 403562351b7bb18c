// What: the checks and copies from C structs to C++ values.
// Why: a caller built against another header, or a zeroed struct, gets an error, never a crash.
// Never: guesses a missing field.
#include "capi/convert.hpp"

#include "core/fail.hpp"

namespace talea::capi {
namespace {

constexpr auto usage = ErrorKind::usage;

template <typename Struct>
void check_size(const char* name, const Struct* s) {
  require(s->struct_bytes == static_cast<int64_t>(sizeof(Struct)), usage,
          "{}: struct_bytes = {} where this library (ABI version {}) has {}", name, s->struct_bytes,
          TALEA_ABI_VERSION, sizeof(Struct));
}

template <typename Enum>
Enum checked_enum(const char* name, int32_t value, int32_t last) {
  require(value >= 0 && value <= last, usage, "{} = {}: must lie in [0, {}]", name, value, last);
  return static_cast<Enum>(value);
}

Tensor tensor(const char* name, const talea_tensor& from, uintptr_t* next_address) {
  Tensor t;
  if (!from.present) return t;
  t.dtype = checked_enum<DType>(fmt::format("{}: dtype", name).c_str(), from.dtype, TALEA_U8);
  t.device =
      checked_enum<DeviceKind>(fmt::format("{}: device", name).c_str(), from.device, TALEA_CUDA);
  require(from.rank >= 0 && from.rank <= max_rank, usage, "{}: rank = {}: must lie in [0, {}]",
          name, from.rank, max_rank);
  require(from.reserved == 0, usage, "{}: reserved = {}: must be 0", name, from.reserved);
  for (int i = 0; i < from.rank; ++i) {
    t.shape[i] = from.shape[i];
    t.stride[i] = from.stride[i];
  }
  t.rank = from.rank;
  t.device_index = from.device_index;
  t.present = true;
  t.data = from.data;
  if (next_address && !t.data) {
    t.data = reinterpret_cast<void*>(*next_address);
    *next_address += uintptr_t{1} << 40;
  }
  return t;
}

void copy_inputs(const talea_linear_cross_entropy_inputs* from, LinearCrossEntropyInputs& to,
                 uintptr_t* next) {
  require(from, usage, "inputs: null pointer");
  check_size("inputs", from);
  to.hidden = tensor("hidden", from->hidden, next);
  to.weight = tensor("weight", from->weight, next);
  to.bias = tensor("bias", from->bias, next);
  to.targets = tensor("targets", from->targets, next);
  to.class_weight = tensor("class_weight", from->class_weight, next);
  to.token_weight = tensor("token_weight", from->token_weight, next);
  to.token_scale = tensor("token_scale", from->token_scale, next);
  to.soft_target_ids = tensor("soft_target_ids", from->soft_target_ids, next);
  to.soft_target_probs = tensor("soft_target_probs", from->soft_target_probs, next);
  to.upstream = tensor("upstream", from->upstream, next);
  to.upstream_lse = tensor("upstream_lse", from->upstream_lse, next);
  to.upstream_entropy = tensor("upstream_entropy", from->upstream_entropy, next);
  to.saved_lse = tensor("saved_lse", from->saved_lse, next);
  to.saved_target_logprob = tensor("saved_target_logprob", from->saved_target_logprob, next);
}

void copy_outputs(const talea_linear_cross_entropy_outputs* from, LinearCrossEntropyOutputs& to,
                  uintptr_t* next) {
  require(from, usage, "outputs: null pointer");
  check_size("outputs", from);
  to.loss = tensor("loss", from->loss, next);
  to.lse = tensor("lse", from->lse, next);
  to.target_logprob = tensor("target_logprob", from->target_logprob, next);
  to.entropy = tensor("entropy", from->entropy, next);
  to.argmax = tensor("argmax", from->argmax, next);
  to.accuracy = tensor("accuracy", from->accuracy, next);
  to.topk_values = tensor("topk_values", from->topk_values, next);
  to.topk_ids = tensor("topk_ids", from->topk_ids, next);
  to.topk_logprobs = tensor("topk_logprobs", from->topk_logprobs, next);
  to.dx = tensor("dx", from->dx, next);
  to.dw = tensor("dw", from->dw, next);
  to.db = tensor("db", from->db, next);
  to.accumulate_dw = from->accumulate_dw != 0;
  to.accumulate_db = from->accumulate_db != 0;
}

void copy_options(const talea_linear_cross_entropy_options* from, LinearCrossEntropyOptions& to) {
  if (!from) return;
  check_size("options", from);
  to.reduction = checked_enum<Reduction>("reduction", from->reduction, TALEA_REDUCTION_MEAN);
  to.denominator =
      checked_enum<Denominator>("denominator", from->denominator, TALEA_DENOMINATOR_GIVEN);
  to.denominator_value = from->denominator_value;
  to.denominator_scope = checked_enum<DenominatorScope>(
      "denominator_scope", from->denominator_scope, TALEA_SCOPE_GLOBAL);
  to.on_empty = checked_enum<OnEmpty>("on_empty", from->on_empty, TALEA_ON_EMPTY_ZERO);
  to.target_check =
      checked_enum<TargetCheck>("target_check", from->target_check, TALEA_TARGETS_POISON);
  to.threads = from->threads;
  to.ignore_index = from->ignore_index;
  to.vocab = from->vocab;
  to.label_smoothing = from->label_smoothing;
  to.z_loss = from->z_loss;
  to.softcap = from->softcap;
  to.logit_scale = from->logit_scale;
  to.workspace_limit_bytes = from->workspace_limit_bytes;
  if (from->lane) to.lane = from->lane;
}

void copy_ranks(const talea_linear_cross_entropy_ranks* from, Purpose purpose, Arguments& to) {
  if (!from) return;
  check_size("ranks", from);
  const auto callbacks = purpose == Purpose::call ? Callbacks::needed : Callbacks::optional;
  if (from->vocab) to.vocab = make_communicator("ranks.vocab", from->vocab, callbacks);
  if (from->batch) to.batch = make_communicator("ranks.batch", from->batch, callbacks);
  to.ranks.vocab = to.vocab.get();
  to.ranks.batch = to.batch.get();
  to.ranks.vocab_begin = from->vocab_begin;
  to.ranks.sequence_parallel = from->sequence_parallel != 0;
  to.ranks.handshake = from->skip_handshake == 0;
  to.ranks.dx_sum = checked_enum<DType>("ranks.dx_sum", from->dx_sum, TALEA_U8);
  require(from->reserved == 0, usage, "ranks: reserved = {}: must be 0", from->reserved);
}

}  // namespace

Arguments convert(const talea_linear_cross_entropy_args* args, Purpose purpose) {
  require(args, usage, "args: null pointer");
  check_size("args", args);
  require(args->abi_version == TALEA_ABI_VERSION, usage,
          "args: abi_version = {} where this library has {}", args->abi_version, TALEA_ABI_VERSION);
  require(args->reserved == 0, usage, "args: reserved = {}: must be 0", args->reserved);
  uintptr_t address = uintptr_t{1} << 40;
  uintptr_t* next = purpose == Purpose::question ? &address : nullptr;
  Arguments to;
  copy_inputs(args->inputs, to.inputs, next);
  copy_outputs(args->outputs, to.outputs, next);
  copy_options(args->options, to.options);
  copy_ranks(args->ranks, purpose, to);
  to.workspace = {args->workspace, args->workspace_bytes};
  to.stream = args->stream;
  return to;
}

void write_defaults(talea_linear_cross_entropy_options* to, int64_t struct_bytes) {
  require(to, usage, "options: null pointer");
  require(struct_bytes == static_cast<int64_t>(sizeof(*to)), usage,
          "options: struct_bytes = {} where this library (ABI version {}) has {}", struct_bytes,
          TALEA_ABI_VERSION, sizeof(*to));
  const LinearCrossEntropyOptions from;
  *to = {};
  to->struct_bytes = struct_bytes;
  to->reduction = static_cast<int32_t>(from.reduction);
  to->denominator = static_cast<int32_t>(from.denominator);
  to->denominator_scope = static_cast<int32_t>(from.denominator_scope);
  to->on_empty = static_cast<int32_t>(from.on_empty);
  to->target_check = static_cast<int32_t>(from.target_check);
  to->ignore_index = from.ignore_index;
  to->logit_scale = from.logit_scale;
  to->workspace_limit_bytes = from.workspace_limit_bytes;
}

}  // namespace talea::capi
