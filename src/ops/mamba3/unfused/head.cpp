// What: forward of one head in the chunk form, every intermediate stored in the input's dtype.
// Why: what eager tensor code computes: the yardstick of accuracy, and a comparison by name.
// Never: an anchor, an exact sum, or a product kept in registers.
#include "ops/mamba3/unfused/head.hpp"

#include <algorithm>
#include <cmath>

#include "algebra/scan_state.hpp"
#include "device/cpu/matrix_product.hpp"
#include "ops/mamba3/element.hpp"

namespace talea::mamba3::unfused {

float Matrix::at(int64_t i, int64_t j) const {
  return static_cast<float>(load_element(data, dtype, i * columns + j));
}
void Matrix::set(int64_t i, int64_t j, float value) const {
  store_element(data, dtype, i * columns + j, value);
}
Matrix Matrix::slice(int64_t first, int64_t count) const {
  return {static_cast<char*>(data) + first * columns * size_of(dtype), dtype, count, columns};
}

Memory::Memory(Arena& arena, const Problem& p) {
  const int64_t S = p.tokens, rows = S * p.rank, N = p.state_dim, P = p.head_dim, A = p.pairs;
  chunk = std::min(chunk_of(p), std::max<int64_t>(S, 1));
  const int64_t m = chunk * p.rank, chunks = (S + chunk - 1) / chunk, wide = std::max(N, P);
  const auto matrix = [&](DType dtype, int64_t r, int64_t c) {
    return Matrix{arena.take<char>(r * c * size_of(dtype)), dtype, r, c};
  };
  const auto some = [&](int64_t n) { return arena.take<float>(n); };
  ends = arena.take<int64_t>(std::max(p.sequences, p.batch) + 1);
  cosine = matrix(p.dtype, S, A), sine = matrix(p.dtype, S, A);
  q = matrix(p.dtype, rows, N), k = matrix(p.dtype, rows, N);
  v = matrix(p.dtype, rows, P), y = matrix(p.dtype, rows, P), dy = matrix(p.dtype, rows, P);
  dq = matrix(p.dtype, rows, N), dk = matrix(p.dtype, rows, N), dv = matrix(p.dtype, rows, P);
  states = matrix(p.dtype, (chunks + 1) * P, N);
  state = matrix(DType::f32, P, N), gradient = matrix(DType::f32, P, N);
  copy = matrix(p.dtype, P, N);
  scores = matrix(p.dtype, m, m), decay = matrix(p.dtype, m, m), weighted = matrix(p.dtype, m, m);
  products = matrix(p.dtype, m, m);
  pairs = matrix(p.dtype, m, wide), shaped = matrix(p.dtype, m, wide);
  L = some(S), alpha = some(S), gamma = some(S), b = some(S + 1), lambda = some(S), dt = some(S);
  tanh = some(S * A);
  ddecay = arena.take<double>(S), dgamma = arena.take<double>(S), db = arena.take<double>(S + 1);
  turn = arena.take<double>(S * A);
  result = some(std::max({m * m, m * wide, P * N}));
  scratch = some(talea::cpu::matrix_product_scratch);
  sum_q = some(rows * N), sum_k = some(rows * N), sum_angle = some(S * A);
  parameters = arena.take<double>(p.heads * parameter_count(p));
}

Head::Head(const Call& call, Memory& memory, const Sequence& sequence, int64_t head)
    : c_(call),
      p_(call.problem),
      m_(memory),
      s_(sequence),
      h_(head),
      g_(call.problem.group_of(head)),
      T_(sequence.tokens()),
      R_(p_.rank),
      N_(p_.state_dim),
      P_(p_.head_dim),
      A_(p_.pairs),
      parameter_(memory.parameters + head * parameter_count(p_)) {}

std::pair<int64_t, int64_t> Head::columns_of(int64_t i) const {
  if (p_.rotary_pairs == RotaryPairs::halves) return {i, i + N_ / 2};
  return {2 * i, 2 * i + 1};
}

// to = old * to + op(a) op(b), rounded to the dtype of `to`.
void Head::product(const Matrix& a, bool ta, const Matrix& b, bool tb, const Matrix& to,
                   float old) {
  talea::cpu::MatrixProduct t;
  t.a = {a.data, a.dtype, a.columns, 1};
  t.b = {b.data, b.dtype, b.columns, 1};
  if (ta) t.a = t.a.transposed();
  if (tb) t.b = t.b.transposed();
  t.m = to.rows, t.n = to.columns, t.k = ta ? a.rows : a.columns;
  t.c = m_.result;
  t.c_stride = to.columns;
  t.scratch = m_.scratch;
  talea::cpu::matrix_product(t);
  for (int64_t i = 0; i < to.rows; ++i)
    for (int64_t j = 0; j < to.columns; ++j)
      to.set(i, j, m_.result[i * to.columns + j] + (old == 0 ? 0 : old * to.at(i, j)));
}

void Head::tokens() {
  const Inputs& in = c_.in;
  for (int64_t t = 0; t < T_; ++t) {
    const int64_t at = s_.begin + t;
    const auto trap = static_cast<float>(get(in.trap, s_.batch, h_, at));
    const auto adt = static_cast<float>(get(in.adt, s_.batch, h_, at));
    m_.dt[t] = static_cast<float>(get(in.dt, s_.batch, h_, at));
    m_.lambda[t] = 1 / (1 + std::exp(-trap));
    m_.gamma[t] = m_.lambda[t] * m_.dt[t];
    m_.b[t] = (1 - m_.lambda[t]) * m_.dt[t];
    m_.alpha[t] = adt <= static_cast<float>(reset_below) ? static_cast<float>(reset_below) : adt;
  }
  m_.b[T_] = 0;
  for (int64_t i = 0; i < A_; ++i) {
    float angle = static_cast<float>(get_or(0, in.initial_states.angle, s_.row, h_, i));
    if (c_.angle_offset)
      angle += static_cast<float>(radians_of(c_.angle_offset[(s_.row * p_.heads + h_) * A_ + i]));
    for (int64_t t = 0; t < T_; ++t) {
      const auto rate = static_cast<float>(get_or(0, in.angles, s_.batch, s_.begin + t, h_, i));
      m_.tanh[t * A_ + i] = std::tanh(rate);
      angle += static_cast<float>(two_pi / 2) * m_.tanh[t * A_ + i] * m_.dt[t];
      angle = std::remainder(angle, static_cast<float>(two_pi));
      m_.cosine.set(t, i, std::cos(angle));
      m_.sine.set(t, i, std::sin(angle));
      m_.turn[t * A_ + i] = angle;  // the last one is the final angle
    }
  }
}

void Head::rotate(float* row, int64_t t, float direction) const {
  for (int64_t i = 0; i < A_; ++i) {
    const auto [a, b] = columns_of(i);
    const float u = row[a], w = row[b], c = m_.cosine.at(t, i), s = direction * m_.sine.at(t, i);
    row[a] = u * c - w * s;
    row[b] = u * s + w * c;
  }
}

void Head::rows() {
  const Inputs& in = c_.in;
  const auto one = [&](const Tensor& from, const Tensor& bias, const Matrix& to, int64_t t,
                       int64_t r) {
    float* row = m_.result;
    for (int64_t n = 0; n < N_; ++n)
      row[n] = static_cast<float>(get(from, s_.batch, s_.begin + t, r, g_, n) +
                                  get_or(0, bias, h_, r, n));
    rotate(row, t, 1);
    for (int64_t n = 0; n < N_; ++n) to.set(t * R_ + r, n, row[n]);
  };
  for (int64_t t = 0; t < T_; ++t)
    for (int64_t r = 0; r < R_; ++r) {
      one(in.q, in.q_bias, m_.q, t, r);
      one(in.k, in.k_bias, m_.k, t, r);
      for (int64_t p = 0; p < P_; ++p)
        m_.v.set(t * R_ + r, p,
                 static_cast<float>(get(in.v, s_.batch, s_.begin + t, h_, p) *
                                    get_or(1, in.mimo_v, h_, r, p)));
    }
}

void Head::start() {
  const States& s = c_.in.initial_states;
  for (int64_t p = 0; p < P_; ++p)
    for (int64_t n = 0; n < N_; ++n) {
      float held = 0;
      for (int64_t r = 0; r < R_; ++r)
        held +=
            static_cast<float>(get_or(0, s.v, s_.row, h_, p) * get_or(1, c_.in.mimo_v, h_, r, p) *
                               get_or(0, s.k, s_.row, r, h_, n));
      m_.state.set(p, n, static_cast<float>(get_or(0, s.ssm, s_.row, h_, p, n)) + m_.b[0] * held);
    }
}

float Head::scale(int64_t t) const { return m_.gamma[t] + m_.b[t + 1]; }
float Head::left(const Chunk& c, int64_t i) const { return std::exp(m_.L[c.first + i / R_]); }
float Head::right(const Chunk& c, int64_t j) const {
  return std::exp(m_.L[c.first + c.tokens - 1] - m_.L[c.first + j / R_]);
}

void Head::weights(const Chunk& c) {
  float sum = 0;
  for (int64_t t = 0; t < c.tokens; ++t) m_.L[c.first + t] = sum += m_.alpha[c.first + t];
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t j = 0; j < c.rows; ++j) {
      const int64_t ti = c.first + i / R_, tj = c.first + j / R_;
      const float value = ti > tj    ? scale(tj) * std::exp(m_.L[ti] - m_.L[tj])
                          : ti == tj ? m_.gamma[ti]
                                     : 0;
      m_.decay.set(i, j, value);
    }
}

void Head::forward(const Chunk& c, int64_t number) {
  const int64_t row = c.first * R_;
  const Matrix q = m_.q.slice(row, c.rows), k = m_.k.slice(row, c.rows);
  const Matrix v = m_.v.slice(row, c.rows), y = m_.y.slice(row, c.rows);
  const auto square = [&](const Matrix& x) { return Matrix{x.data, x.dtype, c.rows, c.rows}; };
  const Matrix scores = square(m_.scores), weighted = square(m_.weighted);
  m_.decay.columns = c.rows;
  weights(c);
  const Matrix held = m_.states.slice(number * P_, P_);
  for (int64_t i = 0; i < P_ * N_; ++i) held.set(0, i, static_cast<const float*>(m_.state.data)[i]);
  product(q, false, k, true, scores, 0);
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t j = 0; j < c.rows; ++j)
      weighted.set(i, j, j / R_ > i / R_ ? 0 : scores.at(i, j) * m_.decay.at(i, j));
  product(q, false, held, true, y, 0);
  const Matrix inner = {m_.pairs.data, p_.dtype, c.rows, P_};
  product(weighted, false, v, false, inner, 0);
  const auto skip = static_cast<float>(get_or(0, c_.in.d, h_));
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t p = 0; p < P_; ++p)
      y.set(i, p, left(c, i) * y.at(i, p) + inner.at(i, p) + skip * v.at(i, p));
  const Matrix scaled = {m_.shaped.data, p_.dtype, c.rows, P_};
  for (int64_t j = 0; j < c.rows; ++j)
    for (int64_t p = 0; p < P_; ++p)
      scaled.set(j, p, right(c, j) * scale(c.first + j / R_) * v.at(j, p));
  product(scaled, true, k, false, m_.state, std::exp(m_.L[c.first + c.tokens - 1]));
}

void Head::finish(int64_t t) {
  const Inputs& in = c_.in;
  float* sum = m_.result;
  std::fill_n(sum, P_, 0.0f);
  const Matrix row = {m_.pairs.data, p_.dtype, 1, P_};
  for (int64_t r = 0; r < R_; ++r) {
    float squares = 0;
    for (int64_t p = 0; p < P_; ++p) squares += m_.y.at(t * R_ + r, p) * m_.y.at(t * R_ + r, p);
    const float rstd =
        1 / std::sqrt(squares / static_cast<float>(P_) + static_cast<float>(p_.options.norm_eps));
    for (int64_t p = 0; p < P_; ++p) {
      row.set(0, p, m_.y.at(t * R_ + r, p));
      if (p_.options.head_norm)
        row.set(0, p, row.at(0, p) * rstd * static_cast<float>(get_or(1, in.norm_weight, h_, p)));
      if (in.z) {
        const auto u = static_cast<float>(get(in.z, s_.batch, s_.begin + t, h_, p) *
                                          get_or(1, in.mimo_z, h_, r, p));
        row.set(0, p, row.at(0, p) * u / (1 + std::exp(-u)));
      }
      const float o = row.at(0, p) * static_cast<float>(get_or(1, in.mimo_out, h_, r, p));
      if (p_.reduce)
        sum[p] += o;
      else
        set(c_.out.out, o, s_.batch, s_.begin + t, r, h_, p);
    }
  }
  for (int64_t p = 0; p_.reduce && p < P_; ++p)
    set(c_.out.out, sum[p], s_.batch, s_.begin + t, 0, h_, p);
}

void Head::final_states() {
  const States& f = c_.out.final_states;
  for (int64_t i = 0; i < A_; ++i) {
    const double angle = m_.turn[(T_ - 1) * A_ + i];
    if (c_.final_turns)
      c_.final_turns[(s_.row * p_.heads + h_) * A_ + i] = to_turns(angle / two_pi);
    if (!f.angle) continue;
    set(f.angle, angle < 0 ? angle + two_pi : angle, s_.row, h_, i);
  }
  for (int64_t p = 0; p < P_; ++p) {
    for (int64_t n = 0; f.ssm && n < N_; ++n) set(f.ssm, m_.state.at(p, n), s_.row, h_, p, n);
    if (f.v) set(f.v, get(c_.in.v, s_.batch, s_.end - 1, h_, p), s_.row, h_, p);
  }
  for (int64_t r = 0; f.k && r < R_; ++r)
    for (int64_t n = 0; n < N_; ++n) set(f.k, m_.k.at((T_ - 1) * R_ + r, n), s_.row, r, h_, n);
}

void Head::pass_through() {
  const bool back = p_.backward();
  const States& from = back ? c_.in.d_final_states : c_.in.initial_states;
  const States& to = back ? c_.out.d.initial_states : c_.out.final_states;
  for (int64_t i = 0; i < A_; ++i) {
    double angle = get_or(0, from.angle, s_.row, h_, i);
    const int64_t at = (s_.row * p_.heads + h_) * A_ + i;
    const uint64_t turns = to_turns(angle / two_pi) + (c_.angle_offset ? c_.angle_offset[at] : 0);
    if (c_.final_turns && !back) c_.final_turns[at] = turns;
    if (!back) angle = stored_radians(turns, true) + taint_of(angle);
    if (to.angle) set(to.angle, angle, s_.row, h_, i);
  }
  for (int64_t p = 0; p < P_; ++p) {
    for (int64_t n = 0; to.ssm && n < N_; ++n)
      set(to.ssm, get_or(0, from.ssm, s_.row, h_, p, n), s_.row, h_, p, n);
    if (to.v) set(to.v, get_or(0, from.v, s_.row, h_, p), s_.row, h_, p);
  }
  for (int64_t r = 0; to.k && r < R_; ++r)
    for (int64_t n = 0; n < N_; ++n)
      set(to.k, get_or(0, from.k, s_.row, r, h_, n), s_.row, r, h_, n);
}

void Head::run() {
  if (T_ == 0) return pass_through();
  tokens();
  rows();
  start();
  const int64_t chunks = (T_ + m_.chunk - 1) / m_.chunk;
  const auto chunk = [&](int64_t i) {
    const int64_t first = i * m_.chunk, count = std::min(m_.chunk, T_ - first);
    return Chunk{first, count, count * R_};
  };
  for (int64_t i = 0; i < chunks; ++i) forward(chunk(i), i);
  if (!p_.backward()) {
    for (int64_t t = 0; c_.out.out && t < T_; ++t) finish(t);
    return final_states();
  }
  const Matrix last = m_.states.slice(chunks * P_, P_);
  for (int64_t i = 0; i < P_ * N_; ++i) last.set(0, i, static_cast<const float*>(m_.state.data)[i]);
  for (int64_t t = 0; t < T_; ++t) finish_adjoint(t);
  for (int64_t p = 0; p < P_; ++p)
    for (int64_t n = 0; n < N_; ++n)
      m_.gradient.set(p, n,
                      static_cast<float>(get_or(0, c_.in.d_final_states.ssm, s_.row, h_, p, n)));
  for (int64_t i = chunks; i-- > 0;) backward(chunk(i), i);
  token_gradients();
  initial_gradients();
}

}  // namespace talea::mamba3::unfused
