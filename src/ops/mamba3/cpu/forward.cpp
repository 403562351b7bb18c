// What: forward of one head: chunks in turn, the state in the thread's memory.
// Why: each chunk's rows are formed, used by every product that needs them, and dropped.
// Never: stores rotated rows or a state of every chunk.
#include <algorithm>
#include <cmath>

#include "algebra/scan_state.hpp"
#include "core/mutant.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/mamba3/cpu/turns.hpp"
#include "ops/mamba3/cpu/worker.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/mutants.hpp"

namespace talea::mamba3::cpu {

using talea::cpu::lanes;
using talea::cpu::store_row;

// h before the first token, with the token held over from before.
void Worker::start_state(float* state) {
  const States& s = c_.in.initial_states;
  std::fill_n(state, plan_.state(), 0.0f);
  if (mutant(ScanMutant::m3_23_initial_states_on_the_grid) && s_.begin % plan_.tokens != 0) return;
  if (s.ssm)
    for (int64_t p = 0; p < p_.head_dim; ++p)
      for (int64_t n = 0; n < p_.state_dim; ++n)
        state[in_panels(n, p, plan_.columns)] = static_cast<float>(get(s.ssm, s_.row, h_, p, n));
  if (!s.k || !s.v || mutant(Mutant::m3_22_initial_token_ignored)) return;
  const double trap = get(c_.in.trap, s_.batch, h_, s_.begin);
  const double b = get(c_.in.dt, s_.batch, h_, s_.begin) / (1 + std::exp(trap));
  for (int64_t p = 0; p < p_.head_dim; ++p)
    for (int64_t r = 0; r < p_.rank; ++r) {
      const double v = b * get(s.v, s_.row, h_, p) * get_or(1, c_.in.mimo_v, h_, r, p);
      for (int64_t n = 0; n < p_.state_dim; ++n)
        state[in_panels(n, p, plan_.columns)] += static_cast<float>(v * get(s.k, s_.row, r, h_, n));
    }
}

void Worker::scores() {
  const int64_t stride = up16(plan_.tokens + 1);
  transpose(m_.k, up16(rows_), plan_.columns, plan_.room, m_.kt);
  const Tensor& up = c_.in.d_out;  // of backward, which reads it next
  pairs(m_.q, m_.kt, plan_.columns, m_.scores,
        rows_ahead(up, up.stride[1], offset_of(up, s_.batch, s_.begin + first_, 0, h_)));
  decay_matrix(m_.high, m_.low, n_, stride, m_.decay);
  for (int64_t t = 0; mutant(ScanMutant::m3_19_masked_by_a_product) && t + 1 < n_; ++t)
    m_.decay[(t + 1) * stride] += 0 * std::exp(m_.high[t] - m_.high[t + 1]);
  MaskJob job;
  job.tokens = n_;
  job.rank = p_.rank;
  job.room = plan_.room;
  job.decay = m_.decay;
  job.decay_stride = stride;
  job.scale = m_.s;
  job.same = mutant(Mutant::m3_diagonal_with_s) ? m_.s : m_.gamma;
  job.diagonal = skip_;
  job.from = m_.scores;
  job.to = m_.seen;
  job.scratch = m_.scratch;
  mask(job);
}

// y = e^L (Q h) + seen V
void Worker::outputs(const float* state) {
  const Tensor& z = c_.in.z;
  whole(m_.q, state, plan_.columns, plan_.columns, plan_.values, m_.y,
        rows_ahead(z, z.stride[1], offset_of(z, s_.batch, s_.begin + first_, h_)));
  scale_rows(m_.y, rows_, plan_.values, m_.left_rows);
  lower(m_.seen, m_.v, plan_.values, m_.y);
}

void Worker::store_outputs() {
  const Inputs& in = c_.in;
  FinishJob job;
  job.tokens = n_;
  job.rank = p_.rank;
  job.columns = p_.head_dim;
  job.stride = plan_.values;
  job.norm = p_.options.head_norm;
  job.eps = static_cast<float>(p_.options.norm_eps);
  job.y = m_.y;
  if (in.z) {
    const Tensor& z = in.z;
    load_rows(z, s_.batch * z.stride[0] + (s_.begin + first_) * z.stride[1] + h_ * z.stride[2],
              z.stride[1], n_, z.stride[3], p_.head_dim, plan_.values, m_.z_raw);
    job.z = m_.z_raw;
  }
  job.weight = in.norm_weight ? m_.weight : nullptr;
  job.mimo_z = in.mimo_z ? m_.mimo_z : nullptr;
  job.mimo_out = in.mimo_out ? m_.mimo_out : nullptr;
  job.reduce = p_.reduce;
  const bool plain = !job.norm && !job.z && !job.mimo_out && (p_.rank == 1 || !p_.reduce);
  job.out = plain ? m_.y : m_.out;
  if (!plain) finish(job);
  for (int64_t i = 0; mutant(ScanMutant::m3_15_three_percent) && i < n_ * plan_.values; ++i)
    job.out[i] *= 1.03f;
  const Tensor& out = c_.out.out;
  const int64_t ranks = p_.reduce ? 1 : p_.rank;
  for (int64_t i = 0; i < n_ * ranks; ++i)
    store_row(job.out + i * plan_.values, p_.head_dim, out.data, out.dtype,
              offset_of(out, s_.batch, s_.begin + first_ + i / ranks, i % ranks, h_),
              out.stride[4]);
}

void Worker::final_states(const float* state) {
  const States& f = c_.out.final_states;
  const int64_t w = lanes();
  for (int64_t i = 0; i < p_.pairs; ++i) {
    const uint64_t turns = uint64_t{m_.high_turn[i]} << 32 | m_.low_turn[i];
    if (c_.final_turns) c_.final_turns[(s_.row * p_.heads + h_) * p_.pairs + i] = turns;
    const double lap = mutant(ScanMutant::m3_17_angle_without_bound) ? two_pi : 0;
    if (f.angle) set(f.angle, stored_radians(turns, true) + lap + m_.taint[i], s_.row, h_, i);
  }
  for (int64_t p = 0; f.ssm && p < p_.head_dim; ++p)
    for (int64_t n = 0; n < p_.state_dim; ++n)
      set(f.ssm, state[in_panels(n, p, plan_.columns)], s_.row, h_, p, n);
  if (mutant(Mutant::m3_12_step_beyond_the_head) && f.ssm)
    set(f.ssm, 0.0, s_.row, h_, p_.head_dim, int64_t{0});
  for (int64_t r = 0; f.k && r < p_.rank; ++r)
    for (int64_t n = 0; n < p_.state_dim; ++n)
      set(f.k, m_.k[n / w * plan_.room * w + (rows_ - p_.rank + r) * w + n % w], s_.row, r, h_, n);
  for (int64_t p = 0; f.v && p < p_.head_dim; ++p)
    set(f.v, m_.v_raw[(n_ - 1) * plan_.values + p],
        mutant(Mutant::m3_8_last_values_for_all) ? f.v.shape[0] - 1 : s_.row, h_, p);
}

void Worker::start(float* state, uint32_t* turns) {
  if (state) start_state(state);
  start_turns();
  keep_turns(turns);
}

// Where `saved` keeps the state before the chunk, or null.
void Worker::keep_state(int64_t chunk, const float* state, float* saved) const {
  if (!saved || chunk % plan_.segment() != 0) return;
  float* to = saved + chunk / plan_.segment() * p_.state_dim * p_.head_dim;
  for (int64_t n = 0; n < p_.state_dim; ++n)
    for (int64_t p = 0; p < p_.head_dim; ++p)
      to[n * p_.head_dim + p] = state[in_panels(n, p, plan_.columns)];
}

void Worker::unpack(const float* kept, float* state) const {
  std::fill_n(state, plan_.state(), 0.0f);
  for (int64_t n = 0; n < p_.state_dim; ++n)
    for (int64_t p = 0; p < p_.head_dim; ++p)
      state[in_panels(n, p, plan_.columns)] = kept[n * p_.head_dim + p];
}

// The loaded chunk's.
void Worker::finished_rows(const float* state) {
  query();
  scores();
  outputs(state);
  store_outputs();
}

void Worker::chunk_outputs(int64_t chunk, const uint32_t* turns, const float* state, float* saved) {
  keep_state(chunk, state, saved);
  load(chunk, turns);
  finished_rows(state);
  if (chunk + 1 == chunks()) final_states(state + plan_.state());
}

void Worker::forward(float* saved) {
  if (T_ == 0) return pass_through();
  const States& f = c_.out.final_states;
  const bool outputs_wanted = c_.out.out.present;
  const bool rows_wanted = outputs_wanted || saved || f.ssm || f.k || f.v;
  float* state = m_.state;
  if (rows_wanted) start_state(state);
  start_turns();
  for (int64_t chunk = 0; chunk < chunks(); ++chunk) {
    keep_state(chunk, state, saved);
    if (!rows_wanted) {
      tokens(chunk);
      turns(false);
      continue;
    }
    load(chunk, nullptr);
    if (outputs_wanted) finished_rows(state);
    if (chunk + 1 < chunks() || f.ssm) advance(state);
  }
  final_states(state);
}

void Worker::pass_through() {
  if (mutant(Mutant::m3_9_empty_sequence_unset)) return;
  const bool back = p_.backward();
  const States& from = back ? c_.in.d_final_states : c_.in.initial_states;
  const States& to = back ? c_.out.d.initial_states : c_.out.final_states;
  for (int64_t i = 0; i < p_.pairs; ++i) {
    const double angle = get_or(0, from.angle, s_.row, h_, i);
    const int64_t at = (s_.row * p_.heads + h_) * p_.pairs + i;
    uint64_t turns = to_turns(angle / two_pi);
    if (c_.angle_offset) turns += c_.angle_offset[at];
    if (c_.final_turns && !back) c_.final_turns[at] = turns;
    if (to.angle)
      set(to.angle, back ? angle : stored_radians(turns, true) + taint_of(angle), s_.row, h_, i);
  }
  for (int64_t p = 0; p < p_.head_dim; ++p) {
    for (int64_t n = 0; to.ssm && n < p_.state_dim; ++n)
      set(to.ssm, get_or(0, from.ssm, s_.row, h_, p, n), s_.row, h_, p, n);
    if (to.v) set(to.v, get_or(0, from.v, s_.row, h_, p), s_.row, h_, p);
  }
  for (int64_t r = 0; to.k && r < p_.rank; ++r)
    for (int64_t n = 0; n < p_.state_dim; ++n)
      set(to.k, get_or(0, from.k, s_.row, r, h_, n), s_.row, r, h_, n);
}

}  // namespace talea::mamba3::cpu
