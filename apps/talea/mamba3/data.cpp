// What: see data.hpp.
// Why: see data.hpp.
// Never: see data.hpp.
#include "data.hpp"

#include <cmath>

#include "core/half.hpp"

namespace talea::cli::scan {
namespace {

uint64_t next(uint64_t& state) {
  state += 0x9e3779b97f4a7c15u;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

struct Maker {
  Drawn& to;
  uint64_t state;
  bool empty;
  DeviceKind device = DeviceKind::cpu;
  uintptr_t address = uintptr_t{1} << 40;  // where a tensor without memory would lie

  Tensor make(DType dtype, std::initializer_list<int64_t> shape) {
    if (empty) {
      const Tensor t = make_tensor(reinterpret_cast<void*>(address), dtype, shape, device);
      int64_t bytes = size_of(dtype);
      for (const int64_t n : shape)
        if (__builtin_mul_overflow(bytes, n, &bytes)) bytes = int64_t{1} << 58;
      address += (static_cast<uintptr_t>(bytes) | 63) + 1;
      return t;
    }
    to.owners.push_back(io::allocate_tensor(dtype, shape));
    return to.owners.back().view;
  }

  // Uniform of variance 1 times `deviation`, around `middle`.
  Tensor draw(DType dtype, std::initializer_list<int64_t> shape, double deviation = 1,
              double middle = 0) {
    const Tensor t = make(dtype, shape);
    if (empty) return t;
    for (int64_t i = 0; i < t.elements(); ++i) {
      const double uniform = static_cast<double>(next(state) >> 11) * 0x1p-53 - 0.5;
      store_element(t.data, t.dtype, i, middle + uniform * deviation * std::sqrt(12.0));
    }
    return t;
  }
};

// adt = -dt * A with dt around 0.05 and A around 1: what a model has at its start.
void draw_steps(Maker& m, mamba3::Inputs& in, std::initializer_list<int64_t> shape, DType wide) {
  in.dt = m.draw(wide, shape, 0.02, 0.05);
  in.adt = m.draw(wide, shape, 0.02, -0.05);
}

void draw_parameters(Maker& m, mamba3::Inputs& in, const SizeFlags& s, DType wide) {
  in.q_bias = m.draw(wide, {s.heads, s.rank, s.state_dim});
  in.k_bias = m.draw(wide, {s.heads, s.rank, s.state_dim});
  in.d = m.draw(wide, {s.heads});
  if (s.rank == 1) return;
  const double share = 1 / static_cast<double>(s.rank);
  in.mimo_v = m.draw(wide, {s.heads, s.rank, s.head_dim}, share);
  in.mimo_z = m.draw(wide, {s.heads, s.rank, s.head_dim});
  in.mimo_out = m.draw(wide, {s.heads, s.rank, s.head_dim}, share);
}

void make_gradients(Maker& m, const mamba3::Inputs& in, const SizeFlags& s, mamba3::Gradients& d) {
  const auto like = [&](const Tensor& t) {
    Tensor made;
    if (!t) return made;
    switch (t.rank) {
      case 1:
        return m.make(t.dtype, {t.shape[0]});
      case 3:
        return m.make(t.dtype, {t.shape[0], t.shape[1], t.shape[2]});
      case 4:
        return m.make(t.dtype, {t.shape[0], t.shape[1], t.shape[2], t.shape[3]});
      default:
        return m.make(t.dtype, {t.shape[0], t.shape[1], t.shape[2], t.shape[3], t.shape[4]});
    }
  };
  d.q = like(in.q);
  d.k = like(in.k);
  d.v = like(in.v);
  d.z = like(in.z);
  d.adt = like(in.adt);
  d.dt = like(in.dt);
  d.trap = like(in.trap);
  d.angles = like(in.angles);
  d.q_bias = like(in.q_bias);
  d.k_bias = like(in.k_bias);
  d.d = like(in.d);
  if (s.rank == 1) return;
  d.mimo_v = like(in.mimo_v);
  d.mimo_z = like(in.mimo_z);
  d.mimo_out = like(in.mimo_out);
}

void draw_step(Maker& m, Drawn& to, const SizeFlags& s, DType dtype, DType wide) {
  mamba3::Inputs& in = to.step.in;
  const int64_t pairs = s.state_dim / 4;
  in.q = m.draw(dtype, {s.batch, s.rank, s.groups, s.state_dim});
  in.k = m.draw(dtype, {s.batch, s.rank, s.groups, s.state_dim});
  in.v = m.draw(dtype, {s.batch, s.heads, s.head_dim});
  in.z = m.draw(dtype, {s.batch, s.heads, s.head_dim});
  draw_steps(m, in, {s.batch, s.heads}, wide);
  in.trap = m.draw(wide, {s.batch, s.heads});
  if (pairs > 0) in.angles = m.draw(wide, {s.batch, 1, pairs});
  draw_parameters(m, in, s, wide);
  to.step.state.angle = m.draw(wide, {s.batch, s.heads, pairs});
  to.step.state.ssm = m.draw(wide, {s.batch, s.heads, s.head_dim, s.state_dim});
  to.step.state.k = m.draw(wide, {s.batch, s.rank, s.heads, s.state_dim});
  to.step.state.v = m.draw(wide, {s.batch, s.heads, s.head_dim});
  to.step.out = m.make(dtype, {s.batch, s.heads, s.head_dim});
}

void draw_all(Maker& m, const SizeFlags& s, DType dtype) {
  Drawn& to = m.to;
  const DType wide = dtype == DType::f64 ? DType::f64 : DType::f32;
  mamba3::Inputs& in = to.in;
  const int64_t pairs = s.state_dim / 4;
  in.q = m.draw(dtype, {s.batch, s.tokens, s.rank, s.groups, s.state_dim});
  in.k = m.draw(dtype, {s.batch, s.tokens, s.rank, s.groups, s.state_dim});
  in.v = m.draw(dtype, {s.batch, s.tokens, s.heads, s.head_dim});
  in.z = m.draw(dtype, {s.batch, s.tokens, s.heads, s.head_dim});
  draw_steps(m, in, {s.batch, s.heads, s.tokens}, wide);
  in.trap = m.draw(wide, {s.batch, s.heads, s.tokens});
  if (pairs > 0) in.angles = m.draw(wide, {s.batch, s.tokens, 1, pairs});
  draw_parameters(m, in, s, wide);
  in.d_out = m.draw(dtype, {s.batch, s.tokens, s.heads, s.head_dim});
  to.out.out = m.make(dtype, {s.batch, s.tokens, s.heads, s.head_dim});
  make_gradients(m, in, s, to.d.d);
  draw_step(m, to, s, dtype, wide);
}

}  // namespace

Drawn draw(const SizeFlags& s, DType dtype, uint64_t seed) {
  Drawn to;
  Maker m{to, seed, false};
  draw_all(m, s, dtype);
  return to;
}

Drawn draw_empty(const SizeFlags& s, DType dtype, DeviceKind device) {
  Drawn to;
  Maker m{to, 0, true, device};
  draw_all(m, s, dtype);
  return to;
}

mamba3::Problem problem_of(const Drawn& drawn, mamba3::Pass pass, const mamba3::Options& options) {
  mamba3::Inputs in = drawn.in;
  if (pass == mamba3::Pass::step) return describe(drawn.step, options);
  if (pass == mamba3::Pass::forward) in.d_out = {};
  return describe(pass, in, pass == mamba3::Pass::forward ? drawn.out : drawn.d, options);
}

}  // namespace talea::cli::scan
