// What: the passes of lane cuda as a sequence of launches.
// Why: what is queued when does not depend on who runs it: a device, or a host in a test.
// Never: allocates, synchronises, or looks at a tensor.
#include "ops/mamba3/rows/run.hpp"

#include <algorithm>

#include "ops/mamba3/contract.hpp"

namespace talea::mamba3::cuda {
namespace {

View view_of(const Tensor& t) {
  View v;
  if (!t) return v;
  v.data = t.data;
  v.dtype = t.dtype;
  for (int i = 0; i < t.rank; ++i) v.stride[i] = t.stride[i];
  return v;
}

// Whether every row has two neighbours in one aligned load.
bool is_even(const Tensor& t) {
  if (t.shape[4] % 4 != 0 || t.stride[4] != 1) return false;
  for (int i = 0; i < 4; ++i)
    if (t.shape[i] > 1 && t.stride[i] % 2 != 0) return false;
  return reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(2 * size_of(t.dtype)) == 0;
}

StateViews views_of(const States& s) {
  return {view_of(s.angle), view_of(s.ssm), view_of(s.k), view_of(s.v)};
}

GradientViews views_of(const Gradients& d) {
  GradientViews v;
  v.q = view_of(d.q), v.k = view_of(d.k), v.v = view_of(d.v), v.z = view_of(d.z);
  v.adt = view_of(d.adt), v.dt = view_of(d.dt), v.trap = view_of(d.trap);
  v.angles = view_of(d.angles), v.q_bias = view_of(d.q_bias), v.k_bias = view_of(d.k_bias);
  v.d = view_of(d.d), v.mimo_v = view_of(d.mimo_v), v.mimo_z = view_of(d.mimo_z);
  v.mimo_out = view_of(d.mimo_out), v.norm_weight = view_of(d.norm_weight);
  v.initial = views_of(d.initial_states);
  return v;
}

void backward(Machine& machine, const Args& args, const Plan& plan) {
  const Sizes& s = args.size;
  machine.clear_totals(args);
  // A pack in rounds is one sequence of all their chunks.
  const int64_t sequences = plan.rounds > 0 ? 1 : s.sequences, wave = plan.wave;
  for (int64_t waves = wave > 0 ? (sequences + wave - 1) / wave : 0; waves-- > 0;) {
    Wave w;
    w.first = waves * wave;
    w.last = std::min(w.first + wave, sequences);
    w.segments = plan.rounds > 0 ? plan.rounds : plan.segments;
    machine.begin_units(args, w);
    for (w.segment = w.segments; w.segment-- > 0;) {
      machine.segment_states(args, w);
      const int64_t slices = (s.segment + plan.slice - 1) / plan.slice;
      for (int64_t slice = slices; slice-- > 0;) {
        w.slice = slice * plan.slice;
        w.slice_chunks = plan.slice;
        if (plan.rounds == 0 && w.segment * s.segment + w.slice >= plan.chunks) continue;
        machine.slice_back(args, w);
        machine.sum_rows(args, w);
      }
    }
    machine.add_parameters(args, w);
  }
  machine.store_parameters(args);
}

}  // namespace

Args args_of(const Call& c, const Plan& plan, const Buffers& buffers) {
  const Inputs& in = c.in;
  Args a;
  a.size = sizes_of(c.problem, plan);
  a.size.accumulate = c.out.d.accumulate_parameters;
  a.q = view_of(in.q), a.k = view_of(in.k), a.v = view_of(in.v), a.z = view_of(in.z);
  a.adt = view_of(in.adt), a.dt = view_of(in.dt), a.trap = view_of(in.trap);
  a.angles = view_of(in.angles), a.q_bias = view_of(in.q_bias), a.k_bias = view_of(in.k_bias);
  a.d = view_of(in.d), a.mimo_v = view_of(in.mimo_v), a.mimo_z = view_of(in.mimo_z);
  a.mimo_out = view_of(in.mimo_out), a.norm_weight = view_of(in.norm_weight);
  a.d_out = view_of(in.d_out), a.out = view_of(c.out.out);
  a.initial = views_of(in.initial_states);
  a.last = views_of(c.problem.backward() ? in.d_final_states : c.out.final_states);
  a.grad = views_of(c.out.d);
  const Tensor& saved = c.problem.backward() ? in.saved : c.out.saved;
  a.size.even_rows = is_even(in.q) && is_even(in.k);
  a.saved = saved && plan.uses_saved ? static_cast<float*>(saved.data) : nullptr;
  a.ends = buffers.ends;
  a.kept = buffers.kept;
  a.pack = buffers.pack;
  a.turns_before = c.angle_offset;
  return a;
}

Sequences sequences_of(const Call& c, const Buffers& buffers) {
  Sequences q;
  q.cu_seqlens = view_of(c.in.cu_seqlens);
  q.slots = view_of(c.slots);
  q.status = view_of(c.out.status);
  q.ends = buffers.ends;
  q.kept = buffers.kept;
  q.pack = buffers.pack;
  return q;
}

void run_pass(Machine& machine, const Call& c, const Plan& plan, const Buffers& buffers) {
  const Args args = args_of(c, plan, buffers);
  const Sequences from = sequences_of(c, buffers);
  const bool step = args.size.step;
  if (step || args.size.packed || from.status.data) machine.read_sequences(args.size, from);
  if (args.size.packed || (step && from.slots.data)) machine.clear_padding(args);
  if (c.problem.backward()) return backward(machine, args, plan);
  machine.forward(args);
}

}  // namespace talea::mamba3::cuda
