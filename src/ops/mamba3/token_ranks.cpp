// What: one rank's piece of sequences that are cut along their tokens.
// Why: a piece acts on the state as h -> a h + T: pieces merge in rank order, from one exchange.
// Never: waits for another rank's scan; each replays the chain up to its own place.
#include "ops/mamba3/token_ranks.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "algebra/scan_state.hpp"
#include "core/fail.hpp"
#include "core/mutant.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/fields.hpp"

namespace talea::mamba3 {
namespace {

DType plain_of(const Problem& p) { return p.dtype == DType::f64 ? DType::f64 : DType::f32; }

int64_t summary_elements(const Problem& p) {
  return p.sequences * p.heads * (p.head_dim * p.state_dim + p.rank * p.state_dim + p.head_dim);
}

Tensor some_view(const Problem& p, std::initializer_list<int64_t> shape) {
  return make_tensor(nullptr, plain_of(p), shape);
}

// ssm, k and v of `summary_elements` numbers.
States states_at(const Problem& p, char* data) {
  const int64_t n = p.sequences, H = p.heads, size = size_of(plain_of(p));
  States s;
  s.ssm = make_tensor(data, plain_of(p), {n, H, p.head_dim, p.state_dim});
  data += s.ssm.elements() * size;
  s.k = make_tensor(data, plain_of(p), {n, p.rank, H, p.state_dim});
  data += s.k.elements() * size;
  s.v = make_tensor(data, plain_of(p), {n, H, p.head_dim});
  return s;
}

// Rank r's of a gathered tensor.
Tensor of_rank(Tensor t, int64_t rank, int64_t bytes) {
  t.data = static_cast<char*>(t.data) + rank * bytes;
  return t;
}

class Piece {
 public:
  Piece(const PieceLane& lane, const Call& call, Arena& arena)
      : lane_(lane),
        c_(call),
        p_(call.problem),
        ranks_(*call.ranks.sequence),
        m_(arena, p_),
        problems_(p_) {
    // What is left is the lane's.
    const int64_t used = arena.used();
    rest_ = {static_cast<char*>(call.workspace.data) + used, call.workspace.bytes - used};
  }

  void run() {
    layout();
    exchange_turns();
    exchange_summaries();
    for (int64_t n = 0; n < p_.sequences; ++n)
      for (int64_t h = 0; h < p_.heads; ++h) before_piece(n, h);
    if (p_.backward()) {
      exchange_feedback();
      for (int64_t n = 0; n < p_.sequences; ++n)
        for (int64_t h = 0; h < p_.heads; ++h) behind_piece(n, h);
    }
    whole();
  }

 private:
  int64_t length(int64_t rank, int64_t n) const { return m_.lengths[rank * p_.sequences + n]; }
  double decay_of(int64_t rank, int64_t n, int64_t h, int which) const {
    return m_.all_decays[((rank * p_.sequences + n) * p_.heads + h) * 2 + which];
  }
  double project(int64_t h, int64_t r, int64_t p) const { return get_or(1, c_.in.mimo_v, h, r, p); }

  void layout() {
    const int64_t own[2] = {p_.token_begin, p_.tokens};
    int64_t covered = 0;
    std::vector<int64_t> all(static_cast<size_t>(2 * ranks_.size()));
    ranks_.all_gather(own, all.data(), sizeof own, nullptr);
    for (int r = 0; r < ranks_.size(); ++r) {
      m_.begins[r] = all[static_cast<size_t>(2 * r)];
      require(m_.begins[r] == covered, ErrorKind::invalid_data,
              "token_begin = {} on rank {}: the tokens before it end at {}", m_.begins[r], r,
              covered);
      covered += all[static_cast<size_t>(2 * r) + 1];
    }
    m_.begins[ranks_.size()] = covered;
    int64_t before = 0;
    for (int64_t i = 0; p_.packed && i <= p_.sequences; ++i) {
      const int64_t value = index_at(c_.in.cu_seqlens, i);
      require(value >= before && value <= covered, ErrorKind::invalid_data,
              "cu_seqlens: entry {} = {}: must lie in [{}, {}]", i, value, before, covered);
      before = value;
      m_.cu[i] = static_cast<int32_t>(std::clamp<int64_t>(value - p_.token_begin, 0, p_.tokens));
    }
    for (int64_t r = 0; r < ranks_.size(); ++r)
      for (int64_t n = 0; n < p_.sequences; ++n) {
        const int64_t first = p_.packed ? index_at(c_.in.cu_seqlens, n) : 0;
        const int64_t last = p_.packed ? index_at(c_.in.cu_seqlens, n + 1) : covered;
        m_.lengths[r * p_.sequences + n] =
            std::max<int64_t>(0, std::min(last, m_.begins[r + 1]) - std::max(first, m_.begins[r]));
      }
  }

  Inputs inputs() const {
    Inputs in = c_.in;
    if (p_.packed) in.cu_seqlens.data = m_.cu, in.cu_seqlens.stride[0] = 1;
    in.saved = {};
    in.d_out = {};
    in.d_final_states = {};
    return in;
  }

  // One of the problems, with the lane's decision on it.
  struct One {
    const Problem& problem;
    const Planned& plan;
    Result& result;
  };
  void call(const One& one, const Inputs& in, const Outputs& out, const uint64_t* before,
            uint64_t* turns = nullptr) {
    lane_.run({one.problem, c_.device, in, out, c_.slots, rest_, c_.ranks, c_.stream, one.result,
               before, turns},
              one.plan);
  }

  void said(const char* name, int64_t bytes) {
    c_.result.exchanges.push_back({name, "all_gather", bytes});
  }

  void exchange_turns() {
    const int64_t count = p_.sequences * p_.heads * p_.pairs;
    Inputs in = inputs();
    in.initial_states = {};
    Result ignored;
    std::fill_n(m_.turns, count, uint64_t{0});
    call({problems_.turns, lane_.plan.turns, ignored}, in, {}, nullptr, m_.turns);
    ranks_.all_gather(m_.turns, m_.all_turns, count * 8, nullptr);
    said("turns of the pieces", count * 8);
    std::fill_n(m_.before, count, uint64_t{0});
    for (int64_t r = 0; r < p_.sequence_rank; ++r)
      for (int64_t i = 0; i < count; ++i) m_.before[i] += m_.all_turns[r * count + i];
  }

  // Sum of adt and b of the first token, of each head of each piece.
  void decays() {
    for (int64_t n = 0; n < p_.sequences; ++n)
      for (int64_t h = 0; h < p_.heads; ++h) {
        double* to = m_.decay + (n * p_.heads + h) * 2;
        const int64_t batch = p_.packed ? 0 : n, first = p_.packed ? m_.cu[n] : 0;
        to[0] = to[1] = 0;
        for (int64_t t = first; t < first + length(p_.sequence_rank, n); ++t) {
          const double adt = get(c_.in.adt, batch, h, t);
          to[0] += adt <= reset_below ? -INFINITY : adt;
        }
        if (length(p_.sequence_rank, n) > 0)
          to[1] = get(c_.in.dt, batch, h, first) / (1 + std::exp(get(c_.in.trap, batch, h, first)));
      }
  }

  void exchange_summaries() {
    const int64_t bytes = summary_elements(p_) * size_of(plain_of(p_));
    Inputs in = inputs();
    in.initial_states = {};
    in.initial_states.angle = c_.in.initial_states.angle;
    Outputs out;
    out.final_states = states_at(p_, m_.summary);
    Result ignored;
    call({problems_.summary, lane_.plan.summary, ignored}, in, out, m_.before);
    decays();
    ranks_.all_gather(m_.summary, m_.summaries, bytes, nullptr);
    const int64_t small = p_.sequences * p_.heads * 2 * 8;
    ranks_.all_gather(m_.decay, m_.all_decays, small, nullptr);
    said("states, last keys and values, decays of the pieces", bytes + small);
  }

  // What the global initial states are for this head.
  void start(int64_t n, int64_t h) {
    const States& s = c_.in.initial_states;
    for (int64_t p = 0; p < p_.head_dim; ++p) {
      for (int64_t i = 0; i < p_.state_dim; ++i)
        m_.h[p * p_.state_dim + i] = get_or(0, s.ssm, n, h, p, i);
      m_.v[p] = get_or(0, s.v, n, h, p);
    }
    for (int64_t r = 0; r < p_.rank; ++r)
      for (int64_t i = 0; i < p_.state_dim; ++i)
        m_.k[r * p_.state_dim + i] = get_or(0, s.k, n, r, h, i);
  }

  // m_.h + b sum over r of v_r k_r^T: what the first token of a piece finds.
  void hold(double b, int64_t h) {
    for (int64_t p = 0; p < p_.head_dim; ++p)
      for (int64_t r = 0; r < p_.rank; ++r) {
        const double left = b * m_.v[p] * project(h, r, p);
        for (int64_t i = 0; i < p_.state_dim; ++i)
          m_.h[p * p_.state_dim + i] += left * m_.k[r * p_.state_dim + i];
      }
  }

  // From the states before rank r's piece to those behind it.
  void pass(int64_t r, int64_t n, int64_t h) {
    const int64_t bytes = summary_elements(p_) * size_of(plain_of(p_));
    const States own = states_at(p_, m_.summaries + r * bytes);
    hold(decay_of(r, n, h, 1), h);
    const double a = std::exp(decay_of(r, n, h, 0));
    for (int64_t p = 0; p < p_.head_dim; ++p) {
      for (int64_t i = 0; i < p_.state_dim; ++i) {
        double& x = m_.h[p * p_.state_dim + i];
        const double own_state = get(own.ssm, n, h, p, i);
        x = mutant(Mutant::m3_merge_out_of_order) ? x + a * own_state : joined(x, a, own_state);
      }
      m_.v[p] = get(own.v, n, h, p);
    }
    for (int64_t q = 0; q < p_.rank; ++q)
      for (int64_t i = 0; i < p_.state_dim; ++i)
        m_.k[q * p_.state_dim + i] = get(own.k, n, q, h, i);
  }

  void write(const States& to, int64_t n, int64_t h) {
    for (int64_t p = 0; p < p_.head_dim; ++p) {
      for (int64_t i = 0; to.ssm && i < p_.state_dim; ++i)
        set(to.ssm, m_.h[p * p_.state_dim + i], n, h, p, i);
      if (to.v) set(to.v, m_.v[p], n, h, p);
    }
    for (int64_t r = 0; to.k && r < p_.rank; ++r)
      for (int64_t i = 0; i < p_.state_dim; ++i) set(to.k, m_.k[r * p_.state_dim + i], n, r, h, i);
  }

  void before_piece(int64_t n, int64_t h) {
    start(n, h);
    for (int64_t r = 0; r < ranks_.size(); ++r) {
      if (r == p_.sequence_rank) write(states_at(p_, m_.initial), n, h);
      if (length(r, n) > 0) pass(r, n, h);
    }
    const States& f = c_.out.final_states;
    write(f, n, h);
    for (int64_t i = 0; f.angle && i < p_.pairs; ++i) {
      const int64_t at = (n * p_.heads + h) * p_.pairs + i;
      const double begin = get_or(0, c_.in.initial_states.angle, n, h, i) / two_pi;
      uint64_t turns = to_turns(begin);
      for (int64_t r = 0; r < ranks_.size(); ++r)
        turns += m_.all_turns[r * p_.sequences * p_.heads * p_.pairs + at];
      set(f.angle, stored_radians(turns, f.angle.dtype == DType::f32) + taint_of(begin), n, h, i);
    }
  }

  void exchange_feedback() {
    const int64_t count = p_.sequences * p_.heads * p_.head_dim * p_.state_dim;
    const int64_t bytes = count * size_of(plain_of(p_));
    Inputs in = inputs();
    in.d_out = c_.in.d_out;
    in.initial_states = states_at(p_, m_.initial);
    in.initial_states.angle = c_.in.initial_states.angle;
    Outputs out;
    out.d.initial_states.ssm =
        make_tensor(m_.feedback, plain_of(p_), {p_.sequences, p_.heads, p_.head_dim, p_.state_dim});
    Result ignored;
    call({problems_.feedback, lane_.plan.feedback, ignored}, in, out, m_.before);
    ranks_.all_gather(m_.feedback, m_.feedbacks, bytes, nullptr);
    said("gradients of the states before the pieces", bytes);
  }

  std::pair<int64_t, int64_t> columns_of(int64_t i) const {
    if (p_.rotary_pairs == RotaryPairs::halves) return {i, i + p_.state_dim / 2};
    return {2 * i, 2 * i + 1};
  }

  double torque(const double* x, const double* g, int64_t rows, int64_t pair) const {
    const auto [a, b] = columns_of(pair);
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r, x += p_.state_dim, g += p_.state_dim)
      sum += x[a] * g[b] - x[b] * g[a];
    return sum;
  }

  // States before rank r's piece, with what its first token finds in m_.h.
  void found(int64_t r, int64_t n, int64_t h) {
    start(n, h);
    for (int64_t other = 0; other < r; ++other)
      if (length(other, n) > 0) pass(other, n, h);
    hold(decay_of(r, n, h, 1), h);
  }

  // The gradients behind this rank's piece, and those of the initial states.
  void behind_piece(int64_t n, int64_t h) {
    const States& d = c_.in.d_final_states;
    const int64_t N = p_.state_dim, P = p_.head_dim, count = p_.sequences * p_.heads * P * N;
    States to = states_at(p_, m_.last);
    to.angle = make_tensor(m_.last_angle, plain_of(p_), {p_.sequences, p_.heads, p_.pairs});
    // All that lies behind the sequence turns it like this (section 2.2).
    start(n, h);
    for (int64_t r = 0; r < ranks_.size(); ++r)
      if (length(r, n) > 0) pass(r, n, h);
    std::vector<double> dk(static_cast<size_t>(p_.rank * N)), dv(static_cast<size_t>(P));
    for (int64_t p = 0; p < P; ++p) {
      for (int64_t i = 0; i < N; ++i) m_.e[p * N + i] = get_or(0, d.ssm, n, h, p, i);
      dv[static_cast<size_t>(p)] = get_or(0, d.v, n, h, p);
    }
    for (int64_t r = 0; r < p_.rank; ++r)
      for (int64_t i = 0; i < N; ++i)
        dk[static_cast<size_t>(r * N + i)] = get_or(0, d.k, n, r, h, i);
    std::vector<double> angle(static_cast<size_t>(p_.pairs)), base(angle);
    for (int64_t i = 0; i < p_.pairs; ++i) {
      angle[static_cast<size_t>(i)] = get_or(0, d.angle, n, h, i);
      base[static_cast<size_t>(i)] = angle[static_cast<size_t>(i)] + torque(m_.h, m_.e, P, i) +
                                     torque(m_.k, dk.data(), p_.rank, i);
    }
    const auto store = [&](const States& s) {
      for (int64_t p = 0; p < P; ++p) {
        for (int64_t i = 0; s.ssm && i < N; ++i) set(s.ssm, m_.e[p * N + i], n, h, p, i);
        if (s.v) set(s.v, dv[static_cast<size_t>(p)], n, h, p);
      }
      for (int64_t r = 0; s.k && r < p_.rank; ++r)
        for (int64_t i = 0; i < N; ++i) set(s.k, dk[static_cast<size_t>(r * N + i)], n, r, h, i);
      for (int64_t i = 0; s.angle && i < p_.pairs; ++i)
        set(s.angle, angle[static_cast<size_t>(i)], n, h, i);
    };
    for (int64_t r = ranks_.size() - 1; r >= 0; --r) {
      if (r == p_.sequence_rank) store(to);
      if (length(r, n) == 0) continue;
      found(r, n, h);
      const double a = std::exp(decay_of(r, n, h, 0)), b = decay_of(r, n, h, 1);
      Tensor own = make_tensor(m_.feedbacks, plain_of(p_), {p_.sequences, p_.heads, P, N});
      own = of_rank(own, r, count * size_of(plain_of(p_)));
      for (int64_t p = 0; p < P; ++p)
        for (int64_t i = 0; i < N; ++i) {
          double& e = m_.e[p * N + i];
          e = joined(e, a, get(own, n, h, p, i));
        }
      for (int64_t i = 0; i < p_.pairs; ++i)
        angle[static_cast<size_t>(i)] = base[static_cast<size_t>(i)] - torque(m_.h, m_.e, P, i);
      std::fill(dk.begin(), dk.end(), 0.0);
      std::fill(dv.begin(), dv.end(), 0.0);
      for (int64_t p = 0; p < P; ++p)
        for (int64_t q = 0; q < p_.rank; ++q) {
          const double project_v = b * project(h, q, p);
          double sum = 0;
          for (int64_t i = 0; i < N; ++i) {
            sum += m_.e[p * N + i] * m_.k[q * N + i];
            dk[static_cast<size_t>(q * N + i)] += project_v * m_.v[p] * m_.e[p * N + i];
          }
          dv[static_cast<size_t>(p)] += project_v * sum;
        }
    }
    store(c_.out.d.initial_states);
  }

  // The piece itself, between what the chain says of both its ends.
  void whole() {
    Inputs in = inputs();
    in.initial_states = states_at(p_, m_.initial);
    in.initial_states.angle = c_.in.initial_states.angle;
    in.saved = c_.in.saved;
    Outputs out = c_.out;
    out.final_states = {};
    out.d.initial_states = {};
    if (p_.backward()) {
      in.d_out = c_.in.d_out;
      in.d_final_states = states_at(p_, m_.last);
      in.d_final_states.angle =
          make_tensor(m_.last_angle, plain_of(p_), {p_.sequences, p_.heads, p_.pairs});
    }
    call({problems_.whole, lane_.plan.whole, c_.result}, in, out, m_.before);
  }

  const PieceLane& lane_;
  const Call& c_;
  const Problem& p_;
  Communicator& ranks_;
  PieceMemory m_;
  PieceProblems problems_;
  Workspace rest_;
};

}  // namespace

PieceProblems::PieceProblems(const Problem& p) : turns(p) {
  turns.sequence_world = 1;
  turns.pass = Pass::forward;
  turns.in.d_out = turns.in.saved = {};
  turns.in.d_final_states = {};
  turns.in.initial_states = {};
  turns.out = {};
  turns.sum_angles = false;
  summary = turns;
  summary.in.initial_states.angle = p.in.initial_states.angle;
  const int64_t n = p.sequences, H = p.heads;
  States states;
  states.ssm = some_view(p, {n, H, p.head_dim, p.state_dim});
  states.k = some_view(p, {n, p.rank, H, p.state_dim});
  states.v = some_view(p, {n, H, p.head_dim});
  summary.out.final_states = states;
  feedback = summary;
  feedback.pass = Pass::backward;
  feedback.in.initial_states = states;
  feedback.in.initial_states.angle = p.in.initial_states.angle;
  feedback.in.d_out = p.in.d_out;
  feedback.out = {};
  feedback.out.d.initial_states.ssm = states.ssm;
  whole = p;
  whole.sequence_world = 1;
  whole.in.initial_states = feedback.in.initial_states;
  whole.out.final_states = {};
  whole.out.d.initial_states = {};
  if (p.backward()) {
    whole.in.d_final_states = states;
    whole.in.d_final_states.angle = some_view(p, {n, H, p.pairs});
  }
}

PieceMemory::PieceMemory(Arena& arena, const Problem& p) {
  const int64_t world = p.sequence_world, n = p.sequences, heads = n * p.heads;
  const int64_t size = size_of(plain_of(p)), bytes = summary_elements(p) * size;
  const int64_t states = heads * p.head_dim * p.state_dim * size;
  const int64_t one = p.head_dim * p.state_dim;
  begins = arena.take<int64_t>(world + 1);
  lengths = arena.take<int64_t>(world * n);
  cu = arena.take<int32_t>(n + 1);
  turns = arena.take<uint64_t>(heads * p.pairs);
  all_turns = arena.take<uint64_t>(world * heads * p.pairs);
  before = arena.take<uint64_t>(heads * p.pairs);
  decay = arena.take<double>(heads * 2);
  all_decays = arena.take<double>(world * heads * 2);
  summary = arena.take<char>(bytes);
  summaries = arena.take<char>(world * bytes);
  initial = arena.take<char>(bytes);
  feedback = arena.take<char>(p.backward() ? states : 0);
  feedbacks = arena.take<char>(p.backward() ? world * states : 0);
  last = arena.take<char>(p.backward() ? bytes : 0);
  last_angle = arena.take<char>(p.backward() ? heads * p.pairs * size : 0);
  h = arena.take<double>(one), e = arena.take<double>(one);
  k = arena.take<double>(p.rank * p.state_dim), v = arena.take<double>(p.head_dim);
  turn = arena.take<double>(p.pairs);
}

void run_piece(const PieceLane& lane, const Call& call, Arena& arena) {
  Piece(lane, call, arena).run();
}

}  // namespace talea::mamba3
