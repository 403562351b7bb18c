// What: which shapes, dtypes and combinations of tensors the scan takes.
// Why: section 1.1 of the definition, one line a tensor, apart from how the problem is derived.
// Never: dereferences a tensor.
#include "ops/mamba3/rules.hpp"

#include "core/fail.hpp"
#include "core/mutant.hpp"
#include "core/views.hpp"
#include "ops/mamba3/fields.hpp"
#include "ops/mamba3/mutants.hpp"

namespace talea::mamba3 {
namespace {

constexpr auto usage = ErrorKind::usage;
constexpr auto data_error = ErrorKind::invalid_data;

// One of several shapes: the first fits where a rank axis may be left out.
void check_either(const char* name, const Tensor& t, std::initializer_list<int64_t> full,
                  std::initializer_list<int64_t> without, bool may_leave_out) {
  if (t && may_leave_out && t.rank == static_cast<int>(without.size()))
    check_shape(name, t, without);
  else
    check_shape(name, t, full);
}

// What the caller calls the states that a call starts from.
const StateNames& initial_names_of(const Problem& p) {
  return p.pass == Pass::step ? step_state_names : initial_names;
}

void check_state_shapes(const Problem& p, const StateNames& names, const States& s, int64_t rows) {
  check_shape(names.names[0], s.angle, {rows, p.heads, p.pairs});
  check_shape(names.names[1], s.ssm, {rows, p.heads, p.head_dim, p.state_dim});
  check_either(names.names[2], s.k, {rows, p.rank, p.heads, p.state_dim},
               {rows, p.heads, p.state_dim}, p.rank == 1);
  check_shape(names.names[3], s.v, {rows, p.heads, p.head_dim});
}

void check_state_dtypes(const Problem& p, const StateNames& names, const States& s, DType plain) {
  check_dtype(names.names[0], s.angle, {plain});
  check_dtype(names.names[1], s.ssm, {plain});
  check_dtype(names.names[2], s.k, {plain, p.dtype});
  check_dtype(names.names[3], s.v, {plain, p.dtype});
}

// A gradient has the dtype of its tensor, or the plain one.
void check_gradient_dtypes(const Inputs& in, const Gradients& d, DType plain) {
  for (const auto& field : gradient_fields) {
    const char* of = field.name + 2;  // "d_q" -> "q"
    for (const auto& input : input_fields)
      if (std::string_view(input.name) == of && d.*field.member)
        check_dtype(field.name, d.*field.member, {(in.*input.member).dtype, plain});
  }
}

void check_parameter_sums(const Gradients& d) {
  if (!d.accumulate_parameters) return;
  for (const auto& [name, t] :
       {std::pair{"d_q_bias", &d.q_bias}, std::pair{"d_k_bias", &d.k_bias}, std::pair{"d_d", &d.d},
        std::pair{"d_mimo_v", &d.mimo_v}, std::pair{"d_mimo_z", &d.mimo_z},
        std::pair{"d_mimo_out", &d.mimo_out}, std::pair{"d_norm_weight", &d.norm_weight}})
    require(!*t || !is_16bit(t->dtype), data_error,
            "{}: accumulate_parameters needs an fp32 buffer, not {}", name, name_of(t->dtype));
}

}  // namespace

void check_presence(const Problem& p, const Inputs& in, const Outputs& out) {
  require(!in.mimo_z || in.z, usage, "mimo_z: needs z");
  require(!in.norm_weight || p.options.head_norm, usage, "norm_weight: needs head_norm");
  if (p.backward()) {
    require(!out.out, usage, "out: is an output of forward, not of backward");
    require(!out.saved, usage, "saved: is an output of forward; backward reads it as an input");
    for_states(out.final_states, final_names, [](const char* name, const Tensor& t) {
      require(!t, usage, "{}: is an output of forward, not of backward", name);
    });
  } else {
    require(!in.d_out, usage, "d_out: is an input of backward");
    require(!in.saved, usage, "saved: is an input of backward, an output of forward");
    for_states(in.d_final_states, d_final_names, [](const char* name, const Tensor& t) {
      require(!t, usage, "{}: is an input of backward", name);
    });
    for_gradients(out.d, [](const char* name, const Tensor& t) {
      require(!t, usage, "{}: is an output of backward", name);
    });
  }
  for (const auto& field : gradient_fields)
    for (const auto& input : input_fields)
      if (std::string_view(input.name) == field.name + 2)
        require(!(out.d.*field.member) || in.*input.member, usage, "{}: there is no {}", field.name,
                input.name);
  for (int i = 0; i < 4; ++i) {
    const auto member = state_members[i];
    require(!(out.d.initial_states.*member) || in.initial_states.*member, usage,
            "{}: there is no {}", d_initial_names.names[i], initial_names.names[i]);
  }
}

void check_dtypes(const Problem& p, const Inputs& in, const Outputs& out) {
  using enum DType;
  check_dtype("q", in.q, {f32, bf16, f16, f64});
  const DType own = in.q.dtype, plain = own == f64 ? f64 : f32;
  check_dtype("k", in.k, {own});
  if (!mutant(ScanMutant::m3_32_any_dtype)) check_dtype("v", in.v, {own});
  check_dtype("z", in.z, {own});
  for (const auto& [name, t] : {std::pair{"adt", &in.adt}, std::pair{"dt", &in.dt}})
    require(
        !*t || t->dtype == plain || mutant(Mutant::m3_5_steps_in_16_bits), data_error,
        "{}: dtype {}: decays and steps are {} (a module cast to 16 bits has lost their digits)",
        name, name_of(t->dtype), name_of(plain));
  for (const auto& [name, t] : {std::pair{"trap", &in.trap}, std::pair{"angles", &in.angles}}) {
    if (own == f64)
      check_dtype(name, *t, {f64});
    else
      check_dtype(name, *t, {f32, bf16, f16});
  }
  for (const auto& [name, t] :
       {std::pair{"q_bias", &in.q_bias}, std::pair{"k_bias", &in.k_bias}, std::pair{"d", &in.d},
        std::pair{"mimo_v", &in.mimo_v}, std::pair{"mimo_z", &in.mimo_z},
        std::pair{"mimo_out", &in.mimo_out}, std::pair{"norm_weight", &in.norm_weight}})
    check_dtype(name, *t, {plain, own});
  check_dtype("cu_seqlens", in.cu_seqlens, {i32});
  check_dtype("status", out.status, {i64});
  check_dtype("saved", in.saved, {u8});
  check_dtype("saved", out.saved, {u8});
  check_dtype("out", out.out, {own, plain});
  check_dtype("d_out", in.d_out, {own, plain});
  check_state_dtypes(p, initial_names_of(p), in.initial_states, plain);
  check_state_dtypes(p, final_names, out.final_states, plain);
  check_state_dtypes(p, d_final_names, in.d_final_states, plain);
  check_state_dtypes(p, d_initial_names, out.d.initial_states, plain);
  check_gradient_dtypes(in, out.d, plain);
  check_parameter_sums(out.d);
}

void check_shapes(const Problem& p, const Inputs& in, const Outputs& out) {
  const int64_t B = p.batch, S = p.tokens, R = p.rank, G = p.groups, N = p.state_dim;
  const int64_t H = p.heads, P = p.head_dim, A = p.pairs;
  const auto rows = [&](const char* name, const Tensor& t) {
    if (p.rank_axis)
      check_shape(name, t, {B, S, R, G, N});
    else
      check_shape(name, t, {B, S, G, N});
  };
  const auto finished = [&](const char* name, const Tensor& t) {
    if (p.reduce)
      check_shape(name, t, {B, S, H, P});
    else
      check_shape(name, t, {B, S, R, H, P});
  };
  const auto bias = [&](const char* name, const Tensor& t) {
    check_either(name, t, {H, R, N}, {H, N}, R == 1);
  };
  rows("q", in.q), rows("k", in.k), rows("d_q", out.d.q), rows("d_k", out.d.k);
  check_shape("v", in.v, {B, S, H, P}), check_shape("d_v", out.d.v, {B, S, H, P});
  check_shape("z", in.z, {B, S, H, P}), check_shape("d_z", out.d.z, {B, S, H, P});
  check_shape("adt", in.adt, {B, H, S}), check_shape("d_adt", out.d.adt, {B, H, S});
  check_shape("dt", in.dt, {B, H, S}), check_shape("d_dt", out.d.dt, {B, H, S});
  check_shape("trap", in.trap, {B, H, S}), check_shape("d_trap", out.d.trap, {B, H, S});
  check_shape("angles", in.angles, {B, S, p.shared_angles ? 1 : H, A});
  check_shape("d_angles", out.d.angles, {B, S, p.sum_angles ? 1 : H, A});
  bias("q_bias", in.q_bias), bias("k_bias", in.k_bias);
  bias("d_q_bias", out.d.q_bias), bias("d_k_bias", out.d.k_bias);
  check_shape("d", in.d, {H}), check_shape("d_d", out.d.d, {H});
  for (const auto& [name, t] :
       {std::pair{"mimo_v", &in.mimo_v}, std::pair{"mimo_z", &in.mimo_z},
        std::pair{"mimo_out", &in.mimo_out}, std::pair{"d_mimo_v", &out.d.mimo_v},
        std::pair{"d_mimo_z", &out.d.mimo_z}, std::pair{"d_mimo_out", &out.d.mimo_out}})
    check_shape(name, *t, {H, R, P});
  check_shape("norm_weight", in.norm_weight, {H, P});
  check_shape("d_norm_weight", out.d.norm_weight, {H, P});
  finished("out", out.out), finished("d_out", in.d_out);
  check_shape("status", out.status, {4});
  const int64_t n = p.pass == Pass::step ? p.state_rows : p.sequences;
  check_state_shapes(p, initial_names_of(p), in.initial_states, n);
  check_state_shapes(p, final_names, out.final_states, n);
  check_state_shapes(p, d_final_names, in.d_final_states, n);
  check_state_shapes(p, d_initial_names, out.d.initial_states, n);
}

}  // namespace talea::mamba3
