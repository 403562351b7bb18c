// What: the scan with any shapes, strides, dtypes, options, cu_seqlens, slots and pieces of
// outputs.
// Why: what a caller can say ends in an Error, or in a call that stays within its tensors.
// Never: gives a tensor a byte more than its view reaches: the address sanitizer is the judge.
#include <cstdlib>

#include "bent_tensors.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/fields.hpp"

namespace {

using namespace talea;
using fuzz::Input;
namespace m3 = talea::mamba3;

// Entries that mostly rise within [low, high], some just beyond, some anything.
void fill_entries(Input& in, const Tensor& t, int64_t low, int64_t high, bool rising) {
  if (!in.may_run() || t.rank != 1 || t.stride[0] != 1 || t.dtype != DType::i32) return;
  int64_t before = low;
  for (int64_t i = 0; i < t.elements(); ++i) {
    const int64_t value =
        in.rarely() ? in.of(INT32_MIN, INT32_MAX) : in.of(before, high + (in.rarely() ? 1 : 0));
    static_cast<int32_t*>(t.data)[i] = static_cast<int32_t>(value);
    if (rising) before = std::max(before, std::min(value, high));
  }
}

struct Sizes {
  int64_t b, s, h, g, n, p, r, a, sequences;
  bool rank_axis;
  DType own, plain;
};

m3::States states(Input& in, const Sizes& z, int64_t rows) {
  m3::States s;
  if (in.maybe()) s.angle = in.tensor(z.plain, {rows, z.h, z.a});
  if (in.maybe()) s.ssm = in.tensor(z.plain, {rows, z.h, z.p, z.n});
  if (in.maybe()) s.k = in.tensor(z.plain, {rows, z.r, z.h, z.n});
  if (in.maybe()) s.v = in.tensor(z.plain, {rows, z.h, z.p});
  return s;
}

Tensor rows(Input& in, const Sizes& z) {
  return z.rank_axis ? in.tensor(z.own, {z.b, z.s, z.r, z.g, z.n})
                     : in.tensor(z.own, {z.b, z.s, z.g, z.n});
}

m3::Inputs inputs(Input& in, const Sizes& z) {
  m3::Inputs x;
  x.q = rows(in, z), x.k = rows(in, z);
  x.v = in.tensor(z.own, {z.b, z.s, z.h, z.p});
  for (Tensor* t : {&x.adt, &x.dt, &x.trap}) *t = in.tensor(z.plain, {z.b, z.h, z.s});
  if (in.maybe()) x.angles = in.tensor(z.own, {z.b, z.s, in.maybe() ? z.h : 1, z.a});
  if (in.maybe()) x.z = in.tensor(z.own, {z.b, z.s, z.h, z.p});
  for (Tensor* t : {&x.q_bias, &x.k_bias})
    if (in.maybe()) *t = in.tensor(z.own, {z.h, z.r, z.n});
  if (in.maybe()) x.d = in.tensor(z.plain, {z.h});
  for (Tensor* t : {&x.mimo_v, &x.mimo_z, &x.mimo_out})
    if (in.maybe()) *t = in.tensor(z.plain, {z.h, z.r, z.p});
  return x;
}

// Of any input that is there, now and then bent.
Tensor twin(Input& in, const Tensor& t) {
  if (!t || !in.maybe() || t.rank < 1 || t.rank > 5) return {};
  const auto& s = t.shape;
  for (int i = 0; i < t.rank; ++i)
    if (s[i] < 0 || s[i] > 1 << 12) return {};  // make_tensor multiplies them
  switch (t.rank) {
    case 1:
      return in.tensor(t.dtype, {s[0]});
    case 2:
      return in.tensor(t.dtype, {s[0], s[1]});
    case 3:
      return in.tensor(t.dtype, {s[0], s[1], s[2]});
    case 4:
      return in.tensor(t.dtype, {s[0], s[1], s[2], s[3]});
    default:
      return in.tensor(t.dtype, {s[0], s[1], s[2], s[3], s[4]});
  }
}

void run(Input& in, const m3::Problem& p, const m3::Inputs& x, const m3::Outputs& out,
         const Tensor& slots) {
  const DeviceFacts device;
  const m3::Lane lane = in.maybe() ? m3::cpu_lane() : m3::reference_lane();
  if (!in.may_run() || lane.decline(p, device)) return;
  const Planned plan = lane.plan(p, device);
  if (plan.workspace_bytes < 0) std::abort();
  if (plan.workspace_bytes > fuzz::Room::most) return;
  const fuzz::Room room(plan.workspace_bytes);
  const m3::FullAxes full = m3::full_axes(p, x, out);
  m3::Result result;
  lane.run({p, device, full.in, full.out, slots, room.get(), {}, nullptr, result}, plan);
  if (result.padding_tokens < 0 || result.padding_tokens > std::max<int64_t>(p.tokens, 0))
    std::abort();
}

void scan(Input& in, const Sizes& z, const m3::Options& o) {
  m3::Inputs x = inputs(in, z);
  const bool back = in.maybe();
  if (in.maybe()) {
    x.cu_seqlens = in.tensor(DType::i32, {z.sequences + 1});
    fill_entries(in, x.cu_seqlens, 0, z.s, true);
  }
  const int64_t n = x.cu_seqlens ? z.sequences : z.b;
  x.initial_states = states(in, z, n);
  m3::Outputs out;
  const bool whole = z.r > 1 && !x.mimo_out;
  const auto finished = [&] {
    return whole ? in.tensor(z.own, {z.b, z.s, z.r, z.h, z.p})
                 : in.tensor(z.own, {z.b, z.s, z.h, z.p});
  };
  if (in.maybe()) out.status = in.tensor(DType::i64, {4});
  if (back) {
    x.d_out = finished();
    x.d_final_states = states(in, z, n);
    for (const auto& d : m3::gradient_fields)
      for (const auto& field : m3::input_fields)
        if (std::string_view(field.name) == d.name + 2) out.d.*d.member = twin(in, x.*field.member);
    for (const auto member : m3::state_members)
      out.d.initial_states.*member = twin(in, x.initial_states.*member);
    out.d.accumulate_parameters = in.rarely();
  } else {
    out.out = finished();
    out.final_states = states(in, z, n);
  }
  run(in, m3::describe(back ? m3::Pass::backward : m3::Pass::forward, x, out, o), x, out, {});
}

void step(Input& in, Sizes z, const m3::Options& o) {
  z.s = 1;
  m3::StepArguments a;
  const auto less = [&](Tensor t, int axis) {
    if (!t || t.rank <= axis) return t;
    if (t.shape[axis] != 1) in.must_not_run();  // the memory is that of the bent shape
    for (int i = axis; i + 1 < t.rank; ++i)
      t.shape[i] = t.shape[i + 1], t.stride[i] = t.stride[i + 1];
    --t.rank;
    return t;
  };
  a.in = inputs(in, z);
  for (Tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.z, &a.in.angles}) *t = less(*t, 1);
  for (Tensor* t : {&a.in.adt, &a.in.dt, &a.in.trap}) *t = less(*t, 2);
  const int64_t cache = z.b + in.of(0, 2);
  a.state = states(in, z, cache);
  a.out = z.r > 1 && !a.in.mimo_out ? in.tensor(z.own, {z.b, z.r, z.h, z.p})
                                    : in.tensor(z.own, {z.b, z.h, z.p});
  if (in.maybe()) {
    a.slots = in.tensor(DType::i32, {z.b});
    fill_entries(in, a.slots, -1, cache - 1, false);
  }
  const m3::Problem p = m3::describe(a, o);
  run(in, p, m3::step_inputs(a), m3::step_outputs(a), a.slots);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  Sizes z{in.of(0, 2), in.of(0, 5), in.of(0, 4), in.of(0, 3), in.of(1, 5), in.of(1, 4),
          in.of(1, 3), in.of(0, 2), in.of(0, 4), in.maybe(),  DType::f32,  DType::f32};
  const DType types[] = {DType::f32, DType::bf16, DType::f16, DType::f64};
  z.own = types[in.of(0, 3)];
  z.plain = z.own == DType::f64 ? DType::f64 : DType::f32;
  z.rank_axis = z.rank_axis || z.r > 1;
  m3::Options o;
  o.rotary_pairs = in.option(static_cast<m3::RotaryPairs>(last_value<m3::RotaryPairs>()));
  o.sequence_check = in.option(static_cast<m3::SequenceCheck>(last_value<m3::SequenceCheck>()));
  o.schedule = in.option(static_cast<m3::Schedule>(last_value<m3::Schedule>()));
  o.head_norm = in.maybe();
  if (in.rarely()) o.norm_eps = in.rarely() ? NAN : -1;
  if (in.rarely()) o.chunk = in.of(-1, 9);
  if (in.rarely()) o.threads = static_cast<int>(in.of(-1, 5000));
  try {
    in.of(0, 3) == 0 ? step(in, z, o) : scan(in, z, o);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::runtime) std::abort();
  }
  return 0;
}
