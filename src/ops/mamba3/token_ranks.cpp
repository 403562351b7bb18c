// What: one rank's piece of sequences that are cut along their tokens.
// Why: a piece acts on the state as h -> a h + T: pieces merge in rank order, from one exchange.
// Never: waits for another rank's scan; each replays the chain up to its own place.
#include "ops/mamba3/token_ranks.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/fail.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/fields.hpp"

namespace talea::mamba3 {
namespace {

DType plain_of(const Problem& p) { return p.dtype == DType::f64 ? DType::f64 : DType::f32; }
bool on_host(const Problem& p) { return p.device == DeviceKind::cpu; }

int64_t summary_elements(const Problem& p) {
  return p.sequences * p.heads * (p.head_dim * p.state_dim + p.rank * p.state_dim + p.head_dim);
}
int64_t state_elements(const Problem& p) {
  return p.sequences * p.heads * p.head_dim * p.state_dim;
}

Tensor plain_view(const Problem& p, char* data, std::initializer_list<int64_t> shape) {
  return make_tensor(data, plain_of(p), shape, p.device, p.device_index);
}

// ssm, k and v of `summary_elements` numbers.
States states_at(const Problem& p, char* data) {
  const int64_t n = p.sequences, H = p.heads, size = size_of(plain_of(p));
  const auto behind = [&](const Tensor& t) { return data ? data += t.elements() * size : nullptr; };
  States s;
  s.ssm = plain_view(p, data, {n, H, p.head_dim, p.state_dim});
  s.k = plain_view(p, behind(s.ssm), {n, p.rank, H, p.state_dim});
  s.v = plain_view(p, behind(s.k), {n, H, p.head_dim});
  return s;
}

// Sums of a host, in order.
struct InOrder {
  template <class F>
  double operator()(int64_t count, F f) const {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += f(i);
    return sum;
  }
};

class Piece {
 public:
  Piece(const PieceLane& lane, const Call& call, Arena& arena)
      : lane_(lane),
        c_(call),
        p_(call.problem),
        ranks_(*call.ranks.sequence),
        saved_(p_.backward() ? c_.in.saved : c_.out.saved),
        m_(arena, p_),
        own_(p_, m_.measures),
        problems_(p_) {
    if (saved_) {
      const int64_t lanes_own = lane_.plan.whole.kept_bytes;
      m_.told = PieceTold(p_, static_cast<char*>(saved_.data) + PieceTold::behind(lanes_own));
      saved_.shape[0] = lanes_own;
    }
    // What is left is the lane's.
    const int64_t used = arena.used();
    rest_ = {static_cast<char*>(call.workspace.data) + used, call.workspace.bytes - used};
  }

  void run() {
    const auto [tokens, known] = whole();
    if (on_host(p_))
      measure(tokens, known);
    else
      measure_on_device(on_device(), m_, tokens, known);
    if (!known)
      exchange("turns, decays and tokens of the pieces", m_.measures, m_.told.measures,
               Measures::words(p_) * 8);
    turns_before();
    if (!known) exchange_summaries();
    const Pieces x = pieces();
    const PieceStates initial = views_of(states_at(p_, m_.initial));
    const PieceStates final_states = views_of(c_.out.final_states);
    if (on_host(p_))
      states(x, initial, final_states);
    else
      states_on_device(on_device(), x, initial, final_states);
    if (p_.backward()) {
      exchange_feedback();
      const PieceStates last = views_of(last_states()), d = views_of(c_.out.d.initial_states);
      if (on_host(p_))
        gradients(x, last, d);
      else
        gradients_on_device(on_device(), x, last, d);
    }
    scan();
  }

 private:
  PieceCall on_device() const { return {p_, c_.in, c_.out, c_.stream}; }

  // All pieces, which must lie one behind another; whether every rank has kept what forward told
  // it.
  struct Whole {
    int64_t tokens = 0;
    bool known = true;
  };
  Whole whole() const {
    struct Share {
      int64_t begin, tokens, knows;
    };
    const Share own = {p_.token_begin, p_.tokens, p_.backward() && saved_};
    std::vector<Share> all(static_cast<size_t>(ranks_.size()));
    bool told = ranks_.host_gather(&own, all.data(), sizeof own);
    if (!told && on_host(p_)) {  // what gathers tensors of the host gathers these as well
      ranks_.all_gather(&own, all.data(), sizeof own, nullptr);
      told = true;
    }
    require(told, ErrorKind::usage,
            "tokens over ranks: ranks over {} cannot tell each other which tokens they hold",
            ranks_.engine());
    Whole whole;
    for (size_t r = 0; r < all.size(); ++r) {
      require(all[r].begin == whole.tokens, ErrorKind::invalid_data,
              "token_begin = {} on rank {}: the tokens before it end at {}", all[r].begin, r,
              whole.tokens);
      whole.tokens += all[r].tokens;
      whole.known = whole.known && all[r].knows;
    }
    return whole;
  }

  void measure(int64_t tokens, bool known) {
    int64_t before = 0;
    for (int64_t i = 0; p_.packed && i <= p_.sequences; ++i) {
      const int64_t value = index_at(c_.in.cu_seqlens, i);
      require(value >= before && value <= tokens, ErrorKind::invalid_data,
              "cu_seqlens: entry {} = {}: must lie in [{}, {}]", i, value, before, tokens);
      before = value;
      m_.cu[i] = static_cast<int32_t>(std::clamp<int64_t>(value - p_.token_begin, 0, p_.tokens));
    }
    if (known) return;
    for (int64_t n = 0; n < p_.sequences; ++n) {
      own_.lengths[n] = p_.packed ? m_.cu[n + 1] - m_.cu[n] : p_.tokens;
      for (int64_t h = 0; h < p_.heads; ++h) measure(n, h);
    }
    Inputs in = inputs();
    in.initial_states = {};
    Result ignored;
    std::fill_n(own_.turns, p_.sequences * p_.heads * p_.pairs, uint64_t{0});
    call({problems_.turns, lane_.plan.turns, ignored}, in, {}, nullptr, own_.turns);
  }

  // What is left behind the piece of a head, and b of its first token.
  void measure(int64_t n, int64_t h) {
    double* const to = own_.decays + (n * p_.heads + h) * 2;
    const int64_t batch = p_.packed ? 0 : n, first = p_.packed ? m_.cu[n] : 0;
    double sum = 0;
    to[1] = 0;
    for (int64_t t = first; t < first + own_.lengths[n]; ++t) {
      const double adt = get(c_.in.adt, batch, h, t);
      sum += adt <= reset_below ? -INFINITY : adt;
    }
    to[0] = std::exp(sum);
    if (own_.lengths[n] > 0)
      to[1] = get(c_.in.dt, batch, h, first) / (1 + std::exp(get(c_.in.trap, batch, h, first)));
  }

  void turns_before() {
    if (!on_host(p_)) return turns_before_on_device(on_device(), m_);
    const int64_t count = p_.sequences * p_.heads * p_.pairs;
    std::fill_n(m_.before, count, uint64_t{0});
    if (mutant(ScanMutant::m3_turns_of_other_ranks)) return;
    for (int64_t r = 0; r < p_.sequence_rank; ++r) {
      const uint64_t* const of = of_rank(r).turns;
      for (int64_t i = 0; i < count; ++i) m_.before[i] += of[i];
    }
  }

  Measures of_rank(int64_t r) const {
    return Measures(p_, m_.told.measures + r * Measures::words(p_) * 8);
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

  void exchange(const char* name, const char* own, char* all, int64_t bytes) {
    if (bytes > 0) ranks_.all_gather(own, all, bytes, c_.stream);
    c_.result.exchanges.push_back({name, "all_gather", bytes});
  }

  void exchange_summaries() {
    Inputs in = inputs();
    in.initial_states = {};
    in.initial_states.angle = c_.in.initial_states.angle;
    Outputs out;
    out.final_states = states_at(p_, m_.own);
    Result ignored;
    call({problems_.summary, lane_.plan.summary, ignored}, in, out, m_.before);
    exchange("states, last keys and values of the pieces", m_.own, m_.told.summaries,
             summary_elements(p_) * size_of(plain_of(p_)));
  }

  void exchange_feedback() {
    Inputs in = inputs();
    in.d_out = c_.in.d_out;
    in.initial_states = before_piece();
    Outputs out;
    out.d.initial_states.ssm =
        plain_view(p_, m_.own, {p_.sequences, p_.heads, p_.head_dim, p_.state_dim});
    Result ignored;
    call({problems_.feedback, lane_.plan.feedback, ignored}, in, out, m_.before);
    exchange("gradients of the states before the pieces", m_.own, m_.feedbacks,
             state_elements(p_) * size_of(plain_of(p_)));
  }

  Pieces pieces() const {
    Pieces x;
    x.world = ranks_.size();
    x.sequences = p_.sequences, x.heads = p_.heads;
    x.columns = p_.state_dim, x.values = p_.head_dim, x.rows = p_.rank, x.pairs = p_.pairs;
    x.halves = p_.rotary_pairs == RotaryPairs::halves;
    const Measures first = of_rank(0);
    x.lengths = first.lengths, x.decays = first.decays, x.turns = first.turns;
    x.words = Measures::words(p_);
    x.own = views_of(states_at(p_, m_.told.summaries));
    x.own_apart = summary_elements(p_);
    x.feedback =
        view_of(plain_view(p_, m_.feedbacks, {p_.sequences, p_.heads, p_.head_dim, p_.state_dim}));
    x.feedback_apart = state_elements(p_);
    x.mimo_v = view_of(c_.in.mimo_v);
    x.initial = views_of(c_.in.initial_states);
    x.d_final = views_of(c_.in.d_final_states);
    return x;
  }

  void states(const Pieces& x, const PieceStates& initial, const PieceStates& last) {
    for (int64_t n = 0; n < p_.sequences; ++n)
      for (int64_t h = 0; h < p_.heads; ++h) {
        put_states(x, n, h, p_.sequence_rank, initial);
        put_states(x, n, h, x.world, last);
        for (int64_t i = 0; last.angle.data && i < p_.pairs; ++i) {
          const double begin =
              element_or(0, x.initial.angle, at(x.initial.angle, n, h, i)) / two_pi;
          uint64_t turns = to_turns(begin);
          for (int64_t r = 0; r < x.world; ++r)
            turns += x.turns[r * x.words + (n * p_.heads + h) * p_.pairs + i];
          put_element(last.angle, at(last.angle, n, h, i),
                      stored_radians(turns, last.angle.dtype == DType::f32) + taint_of(begin));
        }
      }
  }

  // What rank r's piece finds of one head.
  void put_states(const Pieces& x, int64_t n, int64_t h, int64_t r, const PieceStates& to) {
    const Chain chain(x, n, h);
    const int64_t last = chain.nearest_before(r);
    for (int64_t p = 0; p < p_.head_dim; ++p) {
      for (int64_t i = 0; to.ssm.data && i < p_.state_dim; ++i)
        put_element(to.ssm, at(to.ssm, n, h, p, i), chain.before(r, p, i));
      if (to.v.data) put_element(to.v, at(to.v, n, h, p), chain.value(last, p));
    }
    for (int64_t q = 0; to.k.data && q < p_.rank; ++q)
      for (int64_t i = 0; i < p_.state_dim; ++i)
        put_element(to.k, at(to.k, n, q, h, i), chain.key(last, q, i));
  }

  void gradients(const Pieces& x, const PieceStates& last, const PieceStates& initial) {
    for (int64_t n = 0; n < p_.sequences; ++n)
      for (int64_t h = 0; h < p_.heads; ++h) {
        put_gradients(x, n, h, p_.sequence_rank, last);
        put_gradients(x, n, h, -1, initial);
      }
  }

  // What rank r's piece is handed of one head.
  void put_gradients(const Pieces& x, int64_t n, int64_t h, int64_t r, const PieceStates& to) {
    const Chain chain(x, n, h);
    const InOrder sum;
    for (int64_t p = 0; p < p_.head_dim; ++p) {
      for (int64_t i = 0; to.ssm.data && i < p_.state_dim; ++i)
        put_element(to.ssm, at(to.ssm, n, h, p, i), chain.gradient(r, p, i));
      if (to.v.data) put_element(to.v, at(to.v, n, h, p), chain.value_gradient(r, p, sum));
    }
    for (int64_t q = 0; to.k.data && q < p_.rank; ++q)
      for (int64_t i = 0; i < p_.state_dim; ++i)
        put_element(to.k, at(to.k, n, q, h, i), chain.key_gradient(r, q, i, sum));
    for (int64_t i = 0; to.angle.data && i < p_.pairs; ++i)
      put_element(to.angle, at(to.angle, n, h, i), chain.angle_gradient(r, i, sum));
  }

  States before_piece() const {
    States s = states_at(p_, m_.initial);
    s.angle = c_.in.initial_states.angle;
    return s;
  }
  States last_states() const {
    States s = states_at(p_, m_.own);
    s.angle = plain_view(p_, m_.last_angle, {p_.sequences, p_.heads, p_.pairs});
    return s;
  }

  // The piece itself, between what the chain says of both its ends.
  void scan() {
    Inputs in = inputs();
    in.initial_states = before_piece();
    Outputs out = c_.out;
    (p_.backward() ? in.saved : out.saved) = saved_;
    out.final_states = {};
    out.d.initial_states = {};
    if (!on_host(p_)) out.status = {};
    if (p_.backward()) {
      in.d_out = c_.in.d_out;
      in.d_final_states = last_states();
    }
    call({problems_.whole, lane_.plan.whole, c_.result}, in, out, m_.before);
  }

  const PieceLane& lane_;
  const Call& c_;
  const Problem& p_;
  Communicator& ranks_;
  Tensor saved_;  // the lane's own part
  PieceMemory m_;
  Measures own_;
  PieceProblems problems_;
  Workspace rest_;
};

}  // namespace

PieceView view_of(const Tensor& t) {
  PieceView v;
  if (!t) return v;
  v.data = t.data;
  v.dtype = t.dtype;
  for (int i = 0; i < std::min(t.rank, 4); ++i) v.stride[i] = t.stride[i];
  return v;
}
PieceStates views_of(const States& s) {
  return {view_of(s.angle), view_of(s.ssm), view_of(s.k), view_of(s.v)};
}

PieceProblems::PieceProblems(const Problem& p) : turns(p) {
  turns.sequence_world = 1;
  turns.pass = Pass::forward;
  // Entries of cu_seqlens on a device are read once, of the whole sequences.
  if (p.device != DeviceKind::cpu) turns.options.sequence_check = SequenceCheck::clamp;
  turns.in.d_out = turns.in.saved = {};
  turns.in.d_final_states = {};
  turns.in.initial_states = {};
  turns.out = {};
  turns.sum_angles = false;
  summary = turns;
  summary.in.initial_states.angle = p.in.initial_states.angle;
  const States states = states_at(p, nullptr);
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
  whole.options.sequence_check = turns.options.sequence_check;
  whole.in.initial_states = feedback.in.initial_states;
  whole.out.final_states = {};
  whole.out.d.initial_states = {};
  if (p.backward()) {
    whole.in.d_final_states = states;
    whole.in.d_final_states.angle = plain_view(p, nullptr, {p.sequences, p.heads, p.pairs});
  }
}

Measures::Measures(const Problem& p, char* data)
    : lengths(reinterpret_cast<int64_t*>(data)),
      decays(reinterpret_cast<double*>(lengths + p.sequences)),
      turns(reinterpret_cast<uint64_t*>(decays + 2 * p.sequences * p.heads)) {}

PieceTold::PieceTold(const Problem& p, char* data)
    : measures(data), summaries(data + behind(p.sequence_world * Measures::words(p) * 8)) {}

int64_t PieceTold::bytes(const Problem& p) {
  return behind(p.sequence_world * Measures::words(p) * 8) +
         p.sequence_world * summary_elements(p) * size_of(plain_of(p));
}

PieceMemory::PieceMemory(Arena& arena, const Problem& p) {
  const int64_t world = p.sequence_world, heads = p.sequences * p.heads;
  const int64_t size = size_of(plain_of(p)), bytes = summary_elements(p) * size;
  cu = arena.take<int32_t>(p.sequences + 1);
  status = arena.take<int64_t>(4);
  measures = arena.take<char>(Measures::words(p) * 8);
  if (!p.in.saved && !p.out.saved)
    if (char* const data = arena.take<char>(PieceTold::bytes(p))) told = PieceTold(p, data);
  before = arena.take<uint64_t>(heads * p.pairs);
  own = arena.take<char>(bytes);
  initial = arena.take<char>(bytes);
  feedbacks = arena.take<char>(p.backward() ? world * state_elements(p) * size : 0);
  last_angle = arena.take<char>(p.backward() ? heads * p.pairs * size : 0);
}

void run_piece(const PieceLane& lane, const Call& call, Arena& arena) {
  Piece(lane, call, arena).run();
}

}  // namespace talea::mamba3
