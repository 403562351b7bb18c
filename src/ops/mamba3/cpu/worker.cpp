// What: reading a chunk of one head: steps, decays, turned rows; products over its rows.
// Why: forward, the states of backward and its gradients share how a chunk is read.
// Never: reads a row that belongs to no token of the chunk.
#include "ops/mamba3/cpu/worker.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "algebra/scan_state.hpp"
#include "core/mutant.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/mamba3/cpu/turns.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/mutants.hpp"

namespace talea::mamba3::cpu {

using talea::cpu::lanes;
using talea::cpu::LeftForm;
using talea::cpu::load_row;
using talea::cpu::multiply;
using talea::cpu::TileProduct;

void Worker::load_rows(const Tensor& t, int64_t first, int64_t stride_rows, int64_t rows,
                       int64_t stride, int64_t n, int64_t padded, float* to, int64_t ranks) {
  if (mutant(ScanMutant::m3_26_rows_as_if_dense) && rows > 1 && stride == 1 && t.rank == 5)
    stride_rows = t.shape[2] * t.shape[3] * t.shape[4];
  for (int64_t i = 0; i < rows; ++i, to += ranks * padded) {
    if (mutant(ScanMutant::m3_27_offset_32_bit))
      first = static_cast<int32_t>(first), stride_rows = static_cast<int32_t>(stride_rows);
    load_row(t.data, t.dtype, first + i * stride_rows, stride, n, to);
    std::fill(to + n, to + padded, 0.0f);
  }
}

// [H, n], or [H, R, n]: this head's.
void Worker::load_parameter(const Tensor& t, int64_t n, int64_t padded, float* to) {
  if (!t) return;
  if (t.rank == 2)
    load_rows(t, h_ * t.stride[0], 0, 1, t.stride[1], n, padded, to);
  else
    load_rows(t, h_ * t.stride[0], t.stride[1], p_.rank, t.stride[2], n, padded, to);
}

void Worker::begin(const Sequence& sequence, int64_t head) {
  s_ = sequence;
  h_ = head;
  g_ = p_.group_of(head);
  if (mutant(ScanMutant::m3_14_groups_as_heads_in_a_step) && p_.pass == Pass::step)
    g_ = head % std::max<int64_t>(p_.groups, 1);
  if (mutant(Mutant::m3_1_groups_as_heads)) g_ = head % std::max<int64_t>(p_.groups, 1);
  if (mutant(ScanMutant::m3_21_rows_behind_the_end) && s_.end < p_.tokens && !p_.backward())
    ++s_.end;
  T_ = s_.tokens();
  const Inputs& in = c_.in;
  const int64_t N = p_.state_dim, P = p_.head_dim;
  load_parameter(in.q_bias, N, plan_.columns, m_.q_bias);
  load_parameter(in.k_bias, N, plan_.columns, m_.k_bias);
  load_parameter(in.mimo_v, P, plan_.values, m_.mimo_v);
  load_parameter(in.mimo_z, P, plan_.values, m_.mimo_z);
  load_parameter(in.mimo_out, P, plan_.values, m_.mimo_out);
  load_parameter(in.norm_weight, P, plan_.values, m_.weight);
  skip_ = static_cast<float>(get_or(0, in.d, h_));
  halves_ = rotation().halves;
}

// Steps and decays of the chunk's tokens, and of the one behind them.
void Worker::tokens(int64_t chunk) {
  first_ = chunk * plan_.tokens;
  n_ = std::min(plan_.tokens, T_ - first_);
  if (mutant(ScanMutant::m3_24_grid_over_the_pack)) {
    const int64_t into = s_.begin % plan_.tokens;  // the last of its chunks is lost, too
    first_ = std::max<int64_t>(0, first_ - into);
    n_ = std::min((chunk + 1) * plan_.tokens - into, T_) - first_;
  }
  rows_ = n_ * p_.rank;
  const int64_t behind = mutant(Mutant::m3_b_of_the_next_sequence) ? p_.tokens - s_.end : 0;
  const int64_t more = std::min(n_ + 1, T_ - first_ + behind), room = up16(plan_.tokens + 1);
  const auto row = [&](const Tensor& t, int64_t count, float* to) {
    std::fill_n(to, room, 0.0f);
    load_row(t.data, t.dtype,
             s_.batch * t.stride[0] + h_ * t.stride[1] + (s_.begin + first_) * t.stride[2],
             t.stride[2], count, to);
  };
  row(c_.in.dt, more, m_.dt);
  row(c_.in.trap, more, m_.some);
  row(c_.in.adt, n_, m_.adt);
  for (int64_t t = 0; mutant(Mutant::m3_20_decay_clamped) && t < n_; ++t)
    m_.adt[t] = std::min(m_.adt[t], 0.0f);
  exp_row(m_.some, room, m_.other);
  for (int64_t t = 0; t < room; ++t) m_.some[t] = -m_.some[t];
  exp_row(m_.some, room, m_.lambda);
  double sum = 0;
  for (int64_t t = 0; t < room; ++t) {
    m_.lambda[t] = 1 / (1 + m_.lambda[t]);
    m_.other[t] = 1 / (1 + m_.other[t]);
    if (mutant(Mutant::m3_b_and_gamma_exchanged)) std::swap(m_.lambda[t], m_.other[t]);
    const bool rounded = mutant(ScanMutant::m3_18_dt_rounded_forward_only);
    const float dt = rounded ? std::nearbyint(m_.dt[t] * 256) / 256 : m_.dt[t];
    m_.gamma[t] = m_.lambda[t] * dt;
    m_.b[t] = t < more ? m_.other[t] * dt : 0;
    if (t < n_) sum += m_.adt[t] <= static_cast<float>(reset_below) ? reset_below : m_.adt[t];
    m_.high[t] = static_cast<float>(sum);
    m_.low[t] = std::isfinite(m_.high[t]) ? static_cast<float>(sum - m_.high[t]) : 0;
  }
  const double last = sum;
  for (int64_t t = 0; t < room; ++t) {
    m_.s[t] = t < n_ ? m_.gamma[t] + m_.b[t + 1] : 0;
    m_.left[t] = m_.high[t] + m_.low[t];
    m_.some[t] = static_cast<float>(last - m_.high[t]) - m_.low[t];
  }
  exp_row(m_.left, room, m_.left);
  exp_row(m_.some, room, m_.right);
  for (int64_t t = 0; mutant(ScanMutant::m3_divided_by_its_decay) && t < n_; ++t)
    m_.right[t] = m_.left[n_ - 1] / m_.left[t];
  for (int64_t i = 0; i < rows_; ++i) {
    const int64_t t = i / p_.rank;
    m_.left_rows[i] = m_.left[t];
    m_.right_rows[i] = m_.right[t];
    m_.key_rows[i] = m_.right[t] * m_.s[t];
  }
}

Rotation Worker::rotation() const {
  return {m_.cosine, m_.sine, plan_.turned, p_.state_dim,
          p_.rotary_pairs == RotaryPairs::halves && p_.state_dim % 2 == 0};
}

// `first`: the element of the chunk's first token.
talea::cpu::Ahead Worker::rows_ahead(const Tensor& t, int64_t stride, int64_t first) const {
  if (!t) return {};
  const int64_t size = size_of(t.dtype);
  const int64_t step = n_ > 1 ? stride * size : 0;  // the stride of one row may be anything
  return {static_cast<const char*>(t.data) + first * size, n_, p_.head_dim * size, step};
}

void Worker::turns(bool columns) {
  for (int64_t i = 0; mutant(Mutant::m3_16_angle_in_16_bits) && i < plan_.pairs; ++i)
    m_.high_turn[i] &= 0xff000000u;
  TurnJob job;
  job.tokens = n_;
  job.pairs = p_.pairs;
  job.padded = plan_.pairs;
  job.dt = m_.dt;
  job.at = {m_.high_turn, m_.low_turn, m_.taint};
  if (c_.in.angles && p_.pairs > 0) {
    const Tensor& a = c_.in.angles;
    load_rows(a, s_.batch * a.stride[0] + (s_.begin + first_) * a.stride[1] + h_ * a.stride[2],
              a.stride[1], n_, a.stride[3], p_.pairs, plan_.pairs, m_.rates);
    job.rates = m_.rates;
    job.tanh = m_.tanh;
    job.slope = m_.slope;
  }
  if (columns) {
    job.cosine = m_.cosine;
    job.sine = m_.sine;
    job.stride = plan_.turned;
    job.columns = p_.state_dim;
    job.halves = halves_;
    const Tensor& v = c_.in.v;
    job.ahead = rows_ahead(v, v.stride[1], offset_of(v, s_.batch, s_.begin + first_, h_));
  } else if (!job.rates) {
    return;
  }
  turn(job);
}

void Worker::start_turns() {
  if (mutant(Mutant::m3_7_angle_not_reset) && s_.begin > 0) return;
  std::fill_n(m_.high_turn, plan_.pairs, 0u);
  std::fill_n(m_.low_turn, plan_.pairs, 0u);
  std::fill_n(m_.taint, plan_.pairs, 0.0f);
  for (int64_t i = 0; i < p_.pairs; ++i) {
    const double start = get_or(0, c_.in.initial_states.angle, s_.row, h_, i) / two_pi;
    uint64_t turns = to_turns(start);
    if (c_.angle_offset) turns += c_.angle_offset[(s_.row * p_.heads + h_) * p_.pairs + i];
    m_.high_turn[i] = static_cast<uint32_t>(turns >> 32);
    m_.low_turn[i] = static_cast<uint32_t>(turns);
    m_.taint[i] = static_cast<float>(taint_of(start));
  }
}

void Worker::keep_turns(uint32_t* to) const {
  const auto bytes = static_cast<size_t>(plan_.pairs) * sizeof(uint32_t);
  if (bytes == 0) return;
  std::memcpy(to, m_.high_turn, bytes);
  std::memcpy(to + plan_.pairs, m_.low_turn, bytes);
  std::memcpy(to + 2 * plan_.pairs, m_.taint, bytes);
}

void Worker::take_turns(const uint32_t* from) {
  const auto bytes = static_cast<size_t>(plan_.pairs) * sizeof(uint32_t);
  if (bytes == 0) return;
  std::memcpy(m_.high_turn, from, bytes);
  std::memcpy(m_.low_turn, from + plan_.pairs, bytes);
  std::memcpy(m_.taint, from + 2 * plan_.pairs, bytes);
}

void Worker::query() {
  const Tensor& q = c_.in.q;
  for (int64_t r = 0; r < p_.rank; ++r)
    load_rows(q,
              s_.batch * q.stride[0] + (s_.begin + first_) * q.stride[1] + r * q.stride[2] +
                  g_ * q.stride[3],
              q.stride[1], n_, q.stride[4], p_.state_dim, plan_.columns, m_.raw + r * plan_.columns,
              p_.rank);
  rotate_rows({rotation(), n_, p_.rank, plan_.columns, plan_.room, m_.raw,
               c_.in.q_bias ? m_.q_bias : nullptr, m_.q, m_.scratch});
}

void Worker::key_and_value() {
  const Tensor &k = c_.in.k, &v = c_.in.v;
  for (int64_t r = 0; r < p_.rank; ++r)
    load_rows(k,
              s_.batch * k.stride[0] + (s_.begin + first_) * k.stride[1] + r * k.stride[2] +
                  g_ * k.stride[3],
              k.stride[1], n_, k.stride[4], p_.state_dim, plan_.columns, m_.raw + r * plan_.columns,
              p_.rank);
  rotate_rows({rotation(), n_, p_.rank, plan_.columns, plan_.room, m_.raw,
               c_.in.k_bias ? m_.k_bias : nullptr, m_.k, m_.scratch});
  load_rows(v, s_.batch * v.stride[0] + (s_.begin + first_) * v.stride[1] + h_ * v.stride[2],
            v.stride[1], n_, v.stride[3], p_.head_dim, plan_.values, m_.v_raw);
  spread_rows(m_.v_raw, n_, p_.rank, plan_.values, plan_.room, c_.in.mimo_v ? m_.mimo_v : nullptr,
              m_.v);
}

// to [rows, columns] = a [rows, depth] b; rows of `to` side by side.
void Worker::whole(const float* a, const float* b, int64_t depth, int64_t b_rows, int64_t columns,
                   float* to, const talea::cpu::Ahead& ahead) {
  TileProduct t;
  t.ahead = ahead;
  t.form = LeftForm::panel;
  t.a = a;
  t.a_stride = plan_.room * lanes();
  t.b = b;
  t.b_panel = b_rows * lanes();
  t.c = to;
  t.c_row = columns;
  t.c_panel = lanes();
  t.rows = rows_;
  t.panels = columns / lanes();
  t.depth = depth;
  multiply(t);
}

// to += a b where row i of a ends with its token; a [rows, rows], b [rows, columns].
void Worker::lower(const float* a, const float* b, int64_t columns, float* to) {
  const int64_t R = p_.rank;
  for (int64_t i = 0; i < rows_; i += 16) {
    const int64_t last = std::min(i + 15, rows_ - 1);
    TileProduct t;
    t.form = LeftForm::panel;
    t.a = a + i * lanes();
    t.a_stride = plan_.room * lanes();
    t.b = b;
    t.b_panel = plan_.room * lanes();
    t.c = to + i * columns;
    t.c_row = columns;
    t.c_panel = lanes();
    t.rows = last - i + 1;
    t.panels = columns / lanes();
    t.depth = std::min((last / R + 1) * R, rows_);
    t.accumulate = true;
    multiply(t);
  }
}

// to += a^T b where column j of a begins with its token. A key sums over all later rows of its
// chunk: in parts of 16, so that no chain of roundings is longer.
void Worker::upper(const float* a, const float* b, int64_t columns, float* to) {
  for (int64_t j = 0; j < rows_; j += 16) {
    TileProduct t;
    t.form = LeftForm::panel_transposed;
    t.a_stride = plan_.room * lanes();
    t.b_panel = plan_.room * lanes();
    t.c = to + j * columns;
    t.c_row = columns;
    t.c_panel = lanes();
    t.rows = 16;
    t.panels = columns / lanes();
    t.accumulate = true;
    for (int64_t from = j / p_.rank * p_.rank; from < rows_; from += t.depth) {
      t.a = a + j * plan_.room + from * lanes();
      t.b = b + from * lanes();
      t.depth = std::min<int64_t>(16, rows_ - from);
      multiply(t);
    }
  }
}

// Scores of the pairs that see each other: to [rows, rows] in panels = a b.
void Worker::pairs(const float* a, const float* b, int64_t depth, float* to,
                   const talea::cpu::Ahead& ahead) {
  const int64_t R = p_.rank, b_rows = up16(depth);
  for (int64_t i = 0; i < rows_; i += 16) {
    const int64_t last = std::min(i + 15, rows_ - 1);
    TileProduct t;
    t.form = LeftForm::panel;
    t.a = a + i * lanes();
    t.a_stride = plan_.room * lanes();
    t.b = b;
    t.b_panel = b_rows * lanes();
    t.c = to + i * lanes();
    t.c_row = lanes();
    t.c_panel = plan_.room * lanes();
    t.rows = 16;
    t.panels = (std::min((last / R + 1) * R, rows_) + lanes() - 1) / lanes();
    t.depth = depth;
    // Each product fetches its share of the rows.
    const int64_t from = ahead.rows * i / rows_, end = ahead.rows * (last + 1) / rows_;
    t.ahead = ahead;
    t.ahead.first = static_cast<const char*>(ahead.first) + from * ahead.stride_bytes;
    t.ahead.rows = end - from;
    multiply(t);
  }
}

// state [N, P] in panels = a^T b over the rows of the chunk; a [rows, N], b [rows, P].
void Worker::into_state(const float* a, const float* b, float* state) {
  TileProduct t;
  t.form = LeftForm::panel_transposed;
  t.a = a;
  t.a_stride = plan_.room * lanes();
  t.b = b;
  t.b_panel = plan_.room * lanes();
  t.c = state;
  t.c_row = lanes();
  t.c_panel = plan_.columns * lanes();
  t.rows = plan_.columns;
  t.panels = plan_.values / lanes();
  t.depth = rows_;
  multiply(t);
}

float Worker::summary(float* own) {
  scale_panels(m_.v, rows_, plan_.values, plan_.room, m_.key_rows, m_.scaled);
  into_state(m_.k, m_.scaled, own);
  return m_.left[n_ - 1];
}

void Worker::advance(float* state) {
  const float decay = summary(m_.joined);
  join(state, decay, m_.joined, plan_.state(), state);
}

void Worker::load(int64_t chunk, const uint32_t* turns) {
  if (turns) take_turns(turns);
  tokens(chunk);
  this->turns(true);
  key_and_value();
}

void Worker::turn_sum(int64_t chunk, uint32_t* to) {
  std::fill_n(m_.high_turn, plan_.pairs, 0u);
  std::fill_n(m_.low_turn, plan_.pairs, 0u);
  std::fill_n(m_.taint, plan_.pairs, 0.0f);
  tokens(chunk);
  turns(false);
  keep_turns(to);
}

float Worker::chunk_summary(int64_t chunk, const uint32_t* turns, float* own) {
  load(chunk, turns);
  return summary(own);
}

}  // namespace talea::mamba3::cpu
