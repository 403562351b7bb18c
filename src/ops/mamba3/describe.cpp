// What: derives the problem from the arguments and checks everything that needs no data.
// Why: errors come early, before any work, and name argument and value.
// Never: dereferences a tensor.
#include <algorithm>
#include <bit>
#include <cmath>

#include "core/fail.hpp"
#include "core/views.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/fields.hpp"
#include "ops/mamba3/mutants.hpp"
#include "ops/mamba3/rules.hpp"

namespace talea::mamba3 {
namespace {

constexpr auto usage = ErrorKind::usage;
constexpr auto data_error = ErrorKind::invalid_data;
constexpr int most_threads = 4096;  // an OpenMP runtime that cannot start one ends the process

void check_options(const Options& o) {
  const auto eps = static_cast<float>(o.norm_eps);
  require(eps > 0 && std::isfinite(eps), usage,
          "norm_eps = {}: must be finite and > 0, within fp32", o.norm_eps);
  require(o.chunk >= 0, usage, "chunk = {} tokens: must be >= 0 (0: the lane's)", o.chunk);
  require(o.workspace_limit_bytes >= 0, usage, "workspace_limit = {} bytes: must be >= 0",
          o.workspace_limit_bytes);
  require(o.threads >= 0 && o.threads <= most_threads, usage, "threads = {}: must lie in [0, {}]",
          o.threads, most_threads);
  for_each_field(option_fields, [&](const auto& f) {
    using Value = std::decay_t<decltype(o.*f.member)>;
    if constexpr (std::is_enum_v<Value>) {
      const auto value = static_cast<int32_t>(o.*f.member);
      require(value >= 0 && value <= last_value<Value>(), usage, "{} = {}: no such value (0 to {})",
              f.name, value, last_value<Value>());
    }
  });
}

void need(const char* name, const Tensor& t, int low, int high, const char* shape) {
  require(t && t.rank >= low && t.rank <= high, data_error, "{}: needed, with shape {}{}", name,
          shape, but_given(t));
}

void fill_sizes(Problem& p, const Inputs& in) {
  need("q", in.q, 4, 5, "[B, S, R, G, N] or [B, S, G, N]");
  need("k", in.k, in.q.rank, in.q.rank, "of q");
  need("v", in.v, 4, 4, "[B, S, H, P]");
  need("adt", in.adt, 3, 3, "[B, H, S]");
  need("dt", in.dt, 3, 3, "[B, H, S]");
  need("trap", in.trap, 3, 3, "[B, H, S]");
  require(in.q.shape[1] != 1 || !mutant(ScanMutant::m3_11_one_token_refused), data_error,
          "q: S = 1");
  p.rank_axis = in.q.rank == 5;
  p.batch = in.q.shape[0];
  p.tokens = in.q.shape[1];
  p.rank = p.rank_axis ? in.q.shape[2] : 1;
  p.groups = in.q.shape[in.q.rank - 2];
  p.state_dim = in.q.shape[in.q.rank - 1];
  p.heads = in.v.shape[2];
  p.head_dim = in.v.shape[3];
  require(p.rank >= 1, data_error, "q: rank R = {} in shape {}: must be >= 1", p.rank,
          shape_of(in.q));
  require(p.state_dim >= 1, data_error, "q: N = {} in shape {}: must be >= 1", p.state_dim,
          shape_of(in.q));
  require(p.head_dim >= 1, data_error, "v: P = {} in shape {}: must be >= 1", p.head_dim,
          shape_of(in.v));
  if (in.angles) {
    need("angles", in.angles, 4, 4, "[B, S, H, A] or [B, S, 1, A]");
    p.pairs = in.angles.shape[3];
    p.shared_angles = in.angles.shape[2] == 1 && p.heads != 1;
  } else if (in.initial_states.angle) {
    need("initial_angle", in.initial_states.angle, 3, 3, "[n, H, A]");
    p.pairs = in.initial_states.angle.shape[2];
  }
  p.reduce = p.rank == 1 || in.mimo_out;
  p.packed = in.cu_seqlens.present;
  p.sequences = p.batch;
  if (!p.packed) return;
  need("cu_seqlens", in.cu_seqlens, 1, 1, "[n + 1]");
  require(in.cu_seqlens.shape[0] >= 1, data_error, "cu_seqlens: shape {}: at least one entry",
          shape_of(in.cu_seqlens));
  require(p.batch == 1, data_error, "cu_seqlens: packed sequences need B = 1, not {}", p.batch);
  p.sequences = in.cu_seqlens.shape[0] - 1;
}

void fill_pairs(Problem& p) {
  p.rotary_pairs = p.options.rotary_pairs;
  if (p.rotary_pairs == RotaryPairs::automatic)
    p.rotary_pairs = p.rank_axis ? RotaryPairs::halves : RotaryPairs::interleaved;
  require(p.pairs <= p.state_dim / 2, data_error,
          "angles: A = {} pairs; N = {} columns hold at most {}", p.pairs, p.state_dim,
          p.state_dim / 2);
  require(p.rotary_pairs != RotaryPairs::halves || p.state_dim % 2 == 0 || p.pairs == 0, data_error,
          "rotary_pairs = halves: needs an even N, not {}", p.state_dim);
}

void fill_groups(Problem& p, const Ranks& ranks) {
  p.heads_world = ranks.heads ? ranks.heads->size() : 1;
  p.heads_rank = ranks.heads ? ranks.heads->rank() : 0;
  p.sequence_world = ranks.sequence ? ranks.sequence->size() : 1;
  p.sequence_rank = ranks.sequence ? ranks.sequence->rank() : 0;
  p.handshake = ranks.handshake;
  p.head_begin = ranks.head_begin;
  p.token_begin = ranks.token_begin;
  require(p.head_begin >= 0, usage, "head_begin = {}: must be >= 0", p.head_begin);
  require(p.token_begin >= 0, usage, "token_begin = {}: must be >= 0", p.token_begin);
  require(ranks.total_heads >= 0 && ranks.total_groups >= 0 &&
              (ranks.total_heads > 0) == (ranks.total_groups > 0),
          usage, "total_heads = {}, total_groups = {}: give both or neither", ranks.total_heads,
          ranks.total_groups);
  p.total_heads = ranks.total_heads;
  p.total_groups = ranks.total_groups;
  if (p.total_heads == 0) {
    require(p.groups > 0 || p.heads == 0, data_error, "q: G = 0 groups for H = {} heads", p.heads);
    require(p.heads % std::max<int64_t>(p.groups, 1) == 0, data_error,
            "q: G = {} groups do not divide H = {} heads", p.groups, p.heads);
    p.heads_per_group = std::max<int64_t>(1, p.heads / std::max<int64_t>(p.groups, 1));
    return;
  }
  require(p.total_heads % p.total_groups == 0, data_error,
          "total_groups = {}: they do not divide total_heads = {}", p.total_groups, p.total_heads);
  require(p.head_begin + p.heads <= p.total_heads, data_error,
          "head_begin = {}: heads [{}, {}) of total_heads = {}", p.head_begin, p.head_begin,
          p.head_begin + p.heads, p.total_heads);
  p.heads_per_group = p.total_heads / p.total_groups;
  int64_t first = p.groups == p.total_groups ? 0 : p.head_begin / p.heads_per_group;
  if (p.heads == 0) first = std::min(first, std::max<int64_t>(p.total_groups - p.groups, 0));
  require(first + p.groups <= p.total_groups, data_error,
          "q: G = {} groups from group {} on; total_groups = {}", p.groups, first, p.total_groups);
  p.head_offset = p.head_begin - first * p.heads_per_group;
  const int64_t needed = p.heads == 0 ? 0 : (p.head_offset + p.heads - 1) / p.heads_per_group + 1;
  require(p.groups >= needed, data_error,
          "q: G = {} groups; heads [{}, {}) of this rank read {} from group {} on", p.groups,
          p.head_begin, p.head_begin + p.heads, needed, first);
}

void fill_rest(Problem& p, const Inputs& in, const Outputs& out, bool shared_angles) {
  p.dtype = in.q.dtype;
  p.device = in.q.device;
  p.device_index = in.q.device_index;
  uint64_t bits = 256;
  for (const Tensor* t :
       {&in.q, &in.k, &in.v, &in.z, &in.d_out, &out.out, &out.d.q, &out.d.k, &out.d.v, &out.d.z})
    if (*t) bits |= reinterpret_cast<uintptr_t>(t->data);
  p.alignment_bytes = int64_t{1} << std::countr_zero(bits);
  const auto without_address = [](const char*, Tensor& t) { t.data = nullptr; };
  p.sum_angles = out.d.angles && out.d.angles.rank == 4 && out.d.angles.shape[2] == 1 &&
                 (p.heads != 1 || shared_angles);
  p.in = in;
  p.out = out;
  for_inputs(p.in, without_address);
  for_outputs(p.out, without_address);
}

Problem checked(Problem p, const Inputs& in, const Outputs& out, const Ranks& ranks) {
  check_options(p.options);
  const auto inputs = tensors_of(in), outputs = tensors_of(out);
  check_views(inputs);
  check_views(outputs);
  fill_sizes(p, in);
  fill_pairs(p);
  fill_groups(p, ranks);
  fill_rest(p, in, out, ranks.shared_angles);
  require(!ranks.shared_angles || !in.angles || in.angles.shape[2] == 1, data_error,
          "angles: shape {}; shared_angles says that all heads share [B, S, 1, A]",
          shape_of(in.angles));
  check_presence(p, in, out);
  check_dtypes(p, in, out);
  check_shapes(p, in, out);
  check_devices({"q", &in.q}, inputs);
  check_devices({"q", &in.q}, outputs);
  return p;
}

// An axis of one token behind the batch.
Tensor with_token_axis(Tensor t, int at) {
  if (!t || t.rank >= max_rank) return t;
  for (int i = t.rank; i > at; --i) t.shape[i] = t.shape[i - 1], t.stride[i] = t.stride[i - 1];
  t.shape[at] = t.stride[at] = 1;
  ++t.rank;
  return t;
}

// The states are outputs of a step, too.
void check_step_memory(const StepArguments& a) {
  std::vector<NamedTensor> inputs = tensors_of(a.in);
  std::vector<NamedTensor> outputs = {{"out", &a.out}, {"status", &a.status}};
  for_states(a.state, step_state_names, [&](const char* name, const Tensor& t) {
    outputs.push_back({name, &t});
  });
  const NamedTensor slots = {"slots", &a.slots};
  check_views({&slots, 1});
  check_devices({"q", &a.in.q}, {&slots, 1});
  inputs.push_back(slots);
  check_overlap(inputs, outputs);
}

void check_step_arguments(const StepArguments& a) {
  const auto absent = [](const char* name, const Tensor& t) {
    require(!t, usage, "{}: is no argument of a step", name);
  };
  absent("cu_seqlens", a.in.cu_seqlens);
  absent("d_out", a.in.d_out);
  absent("saved", a.in.saved);
  for_states(a.in.initial_states, initial_names, absent);
  for_states(a.in.d_final_states, d_final_names, absent);
  require(a.state.ssm && a.state.ssm.rank == 4, data_error,
          "state_ssm: needed, with shape [rows, H, P, N]");
  require(a.state.k.present && a.state.v.present, data_error, "state_k, state_v: needed in a step");
  for (const auto& [name, t, rank] :
       {std::tuple{"q", &a.in.q, 4}, std::tuple{"k", &a.in.k, 4}, std::tuple{"v", &a.in.v, 3},
        std::tuple{"z", &a.in.z, 3}, std::tuple{"adt", &a.in.adt, 2}, std::tuple{"dt", &a.in.dt, 2},
        std::tuple{"trap", &a.in.trap, 2}, std::tuple{"angles", &a.in.angles, 3}})
    require(t->rank <= rank || mutant(ScanMutant::m3_13_step_of_any_shape), data_error,
            "{}: shape {}: a step takes one token, without the axis S", name, shape_of(*t));
}

}  // namespace

Inputs step_inputs(const StepArguments& a) {
  Inputs in = a.in;
  for (Tensor* t : {&in.q, &in.k, &in.v, &in.z, &in.angles}) *t = with_token_axis(*t, 1);
  for (Tensor* t : {&in.adt, &in.dt, &in.trap}) *t = with_token_axis(*t, 2);
  in.initial_states = a.state;
  return in;
}

Outputs step_outputs(const StepArguments& a) {
  Outputs out;
  out.out = with_token_axis(a.out, 1);
  out.status = a.status;
  out.final_states = a.state;
  return out;
}

Problem describe(Pass pass, const Inputs& in, const Outputs& out, const Options& options,
                 const Ranks& ranks) {
  require(pass == Pass::forward || pass == Pass::backward, usage,
          "pass = {}: forward or backward here; a step has arguments of its own",
          static_cast<int>(pass));
  Problem p;
  p.pass = pass;
  p.options = options;
  p = checked(std::move(p), in, out, ranks);
  check_overlap(tensors_of(in), tensors_of(out));
  return p;
}

Problem describe(const StepArguments& a, const Options& options) {
  check_step_arguments(a);
  Problem p;
  p.pass = Pass::step;
  p.options = options;
  p.slots = a.slots;
  p.slots.data = nullptr;
  p.state_rows = a.state.ssm.shape[0];
  p = checked(std::move(p), step_inputs(a), step_outputs(a), {});
  require(a.state.angle || !a.in.angles || p.pairs == 0, data_error,
          "state_angle: needed where there are angles");
  p.state = p.out.final_states;
  check_step_memory(a);
  if (a.slots) {
    check_shape("slots", a.slots, {p.batch});
    check_dtype("slots", a.slots, {DType::i32});
  } else {
    require(p.state_rows >= p.batch, data_error,
            "state_ssm: {} rows for B = {} entries without slots", p.state_rows, p.batch);
  }
  return p;
}

}  // namespace talea::mamba3
