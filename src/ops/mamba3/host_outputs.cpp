// What: outputs that host lanes write alike: zeros of padding, gradients of the parameters.
// Why: padding is never read and its outputs are exact zeros, on every lane.
// Never: computes; what is written was summed by the lane.
#include "ops/mamba3/host_outputs.hpp"

#include "ops/mamba3/element.hpp"
#include "ops/mamba3/mutants.hpp"

namespace talea::mamba3 {
namespace {

// Zeros in tokens [first, last) of one batch entry; `axis` is that of the tokens, behind the batch.
void clear(const Tensor& t, int axis, int64_t batch, int64_t first, int64_t last) {
  if (!t) return;
  Tensor part = t;
  part.data = static_cast<char*>(t.data) +
              (batch * t.stride[0] + first * t.stride[axis]) * size_of(t.dtype);
  part.shape[0] = 1;
  part.shape[axis] = last - first;
  if (part.elements() == 0) return;
  std::array<int64_t, max_rank> at{};
  for (bool more = true; more;) {
    int64_t offset = 0;
    for (int i = 0; i < part.rank; ++i) offset += at[i] * part.stride[i];
    store_element(part.data, part.dtype, offset, 0.0);
    int i = part.rank - 1;
    for (; i >= 0 && ++at[i] == part.shape[i]; --i) at[i] = 0;
    more = i >= 0;
  }
}

void clear_tokens(const Call& c, int64_t batch, int64_t first, int64_t last) {
  if (first >= last) return;
  const Gradients& d = c.out.d;
  for (const Tensor* t : {&c.out.out, &d.q, &d.k, &d.v, &d.z, &d.angles})
    clear(*t, 1, batch, first, last);
  for (const Tensor* t : {&d.adt, &d.dt, &d.trap}) clear(*t, 2, batch, first, last);
}

}  // namespace

void clear_padding(const Call& c, const int64_t* ends) {
  const Problem& p = c.problem;
  if (mutant(ScanMutant::m3_padding_not_cleared) && p.backward()) return;
  if (p.pass == Pass::step) {
    for (int64_t b = 0; b < p.batch; ++b)
      if (ends[b] < 0) clear_tokens(c, b, 0, 1);
  } else if (p.packed) {
    clear_tokens(c, 0, 0, ends[0]);
    clear_tokens(c, 0, ends[p.sequences], p.tokens);
  }
}

void store_parameters(const Call& c, const double* sums) {
  const Problem& p = c.problem;
  const Gradients& d = c.out.d;
  const int64_t RN = p.rank * p.state_dim, RP = p.rank * p.head_dim;
  const bool add = d.accumulate_parameters;
  for (int64_t h = 0; h < p.heads; ++h) {
    const double* s = sums + h * parameter_count(p);
    for (int64_t i = 0; i < RN; ++i) {
      const int64_t r = i / p.state_dim, n = i % p.state_dim;
      if (d.q_bias) add_or_set(add, d.q_bias, s[i], h, r, n);
      if (d.k_bias) add_or_set(add, d.k_bias, s[RN + i], h, r, n);
    }
    s += 2 * RN;
    for (int64_t i = 0; i < RP; ++i) {
      const int64_t r = i / p.head_dim, n = i % p.head_dim;
      if (d.mimo_v) add_or_set(add, d.mimo_v, s[i], h, r, n);
      if (d.mimo_z) add_or_set(add, d.mimo_z, s[RP + i], h, r, n);
      if (d.mimo_out) add_or_set(add, d.mimo_out, s[2 * RP + i], h, r, n);
    }
    s += 3 * RP;
    for (int64_t i = 0; d.norm_weight && i < p.head_dim; ++i)
      add_or_set(add, d.norm_weight, s[i], h, i);
    if (d.d) add_or_set(add, d.d, s[p.head_dim], h);
  }
}

}  // namespace talea::mamba3
