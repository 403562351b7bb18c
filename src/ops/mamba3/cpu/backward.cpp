// What: backward of one head: states from checkpoints, then a chunk at a time from the end.
// Why: dO V^T is formed once a chunk and feeds every gradient that has it; decays and angles need
//      no product of their own, and are anchored at each chunk's end.
// Never: divides by a decay, or stores a gradient of a row beyond its chunk.
#include <algorithm>
#include <cmath>

#include "algebra/scan_state.hpp"
#include "core/mutant.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/mamba3/cpu/turns.hpp"
#include "ops/mamba3/cpu/worker.hpp"
#include "ops/mamba3/element.hpp"

namespace talea::mamba3::cpu {

using talea::cpu::lanes;
using talea::cpu::store_row;

void Worker::start_back(HeadMemory& u) {
  std::fill_n(u.parameters, plan_.parameters() + 1, 0.0);
  u.pending = {};
  start_gradients(u);
}

void Worker::checkpoints(HeadMemory& u, const float* from) {
  if (T_ == 0) return;
  start_turns();
  float* state = m_.state;
  if (!from) start_state(state);
  for (int64_t chunk = 0; chunk < chunks(); ++chunk) {
    const int64_t segment = chunk / plan_.segment();
    if (chunk % plan_.segment() == 0) {
      keep_turns(u.turns[0] + segment * 3 * plan_.pairs);
      if (!from) std::copy_n(state, plan_.state(), u.states[0] + segment * plan_.state());
      if (segment == (chunks() - 1) / plan_.segment()) break;
    }
    if (from) {
      tokens(chunk);
      turns(false);
    } else {
      load(chunk, nullptr);
      advance(state);
    }
  }
}

void Worker::block_states(HeadMemory& u, int level, int64_t chunk, const float* from) {
  const int64_t above = plan_.stride[level - 1], own = plan_.stride[level];
  const int64_t end = std::min(chunk + above, chunks()), turns = 3 * plan_.pairs;
  const int64_t place = level == 1 ? chunk / above : chunk % plan_.stride[level - 2] / above;
  float* to = u.states[level];
  uint32_t* turns_to = u.turns[level];
  take_turns(u.turns[level - 1] + place * turns);
  float* state = m_.state;
  if (level == 1 && from)
    unpack(from + place * p_.state_dim * p_.head_dim, state);
  else
    std::copy_n(u.states[level - 1] + place * plan_.state(), plan_.state(), state);
  for (; chunk < end; ++chunk) {
    if (chunk % own == 0) {
      keep_turns(turns_to);
      std::copy_n(state, plan_.state(), to);
      turns_to += turns, to += plan_.state();
      if (own > 1 && chunk + own >= end) return;
    }
    load(chunk, nullptr);
    advance(state);
  }
  std::copy_n(state, plan_.state(), to);
}

// The gradient of the last state, of its key and angle.
void Worker::start_gradients(HeadMemory& u) {
  const States& d = c_.in.d_final_states;
  std::fill_n(u.gradient, plan_.state(), 0.0f);
  for (int64_t p = 0; d.ssm && p < p_.head_dim; ++p)
    for (int64_t n = 0; n < p_.state_dim; ++n)
      u.gradient[in_panels(n, p, plan_.columns)] = static_cast<float>(get(d.ssm, s_.row, h_, p, n));
}

// dy of the chunk's rows, in panels, from d_out; y anew where the finish needs it.
void Worker::upstream(const float* state) {
  const Inputs& in = c_.in;
  const int64_t P = plan_.values, ranks = p_.reduce ? 1 : p_.rank;
  if (!in.d_out) {
    std::fill_n(m_.o, plan_.room * P, 0.0f);
    std::fill_n(m_.dz, n_ * P, 0.0f);
    return;
  }
  const Tensor& up = in.d_out;
  for (int64_t r = 0; r < ranks; ++r)
    load_rows(up, offset_of(up, s_.batch, s_.begin + first_, r, h_), up.stride[1], n_, up.stride[4],
              p_.head_dim, P, m_.out + r * P, ranks);
  if (!in.z && !plan_.needs_y) {
    const float* factor = in.mimo_out ? m_.mimo_out : nullptr;
    if (p_.reduce) return spread_rows(m_.out, n_, p_.rank, P, plan_.room, factor, m_.o);
    return panels_of(m_.out, rows_, P, plan_.room, m_.o);
  }
  if (plan_.needs_y) outputs(state);
  FinishJob job;
  job.tokens = n_;
  job.rank = p_.rank;
  job.columns = p_.head_dim;
  job.stride = P;
  job.norm = p_.options.head_norm;
  job.eps = static_cast<float>(p_.options.norm_eps);
  job.y = plan_.needs_y ? m_.y : nullptr;
  if (in.z) {
    const Tensor& z = in.z;
    load_rows(z, offset_of(z, s_.batch, s_.begin + first_, h_), z.stride[1], n_, z.stride[3],
              p_.head_dim, P, m_.z_raw);
    job.z = m_.z_raw;
    job.d_z = m_.dz;
  }
  job.weight = in.norm_weight ? m_.weight : nullptr;
  job.mimo_z = in.mimo_z ? m_.mimo_z : nullptr;
  job.mimo_out = in.mimo_out ? m_.mimo_out : nullptr;
  job.reduce = p_.reduce;
  job.d_out = m_.out;
  job.dy = m_.dy;
  float* sums = m_.parameters + 2 * p_.rank * plan_.columns + p_.rank * P;
  job.d_mimo_z = sums;
  job.d_mimo_out = sums + p_.rank * P;
  job.d_weight = sums + 2 * p_.rank * P;
  finish_adjoint(job);
  panels_of(m_.dy, rows_, P, plan_.room, m_.o);
}

}  // namespace talea::mamba3::cpu
