// What: lane cpu: chunks in cache, threads over sequences and heads.
// Why: the product lane on a host: exact, bounded, and bitwise the same for any number of threads.
// Never: holds gradients of rows by head beyond one chunk, or allocates.
#include <omp.h>

#include <algorithm>

#include "core/fail.hpp"
#include "core/mutant.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/mamba3/cpu/worker.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/host_outputs.hpp"
#include "ops/mamba3/ranks.hpp"

namespace talea::mamba3 {
namespace cpu {
namespace {

using talea::cpu::store_row;

class Run {
 public:
  Run(const Call& c, const Plan& plan)
      : c_(c),
        p_(c.problem),
        plan_(plan),
        arena_(c.workspace),
        m_(arena_, c.problem, plan_, c.in.saved.present) {}

  void all() {
    read_sequences(c_, m_.ends);
    clear_padding(c_, m_.ends);
    if (p_.backward())
      backward();
    else
      forward();
    record();
  }

 private:
  int64_t sequences() const { return p_.pass == Pass::step ? p_.batch : p_.sequences; }
  // Where the checkpoints of a sequence's heads begin, in states.
  int64_t kept_before(int64_t sequence) const {
    int64_t sum = 0;
    for (int64_t n = 0; n < sequence; ++n) sum += kept(n);
    return sum;
  }
  int64_t kept(int64_t n) const {
    const int64_t chunk = plan_.tokens * plan_.segment;
    return (sequence_of(p_, m_.ends, n).tokens() + chunk - 1) / chunk;
  }
  float* saved_of(const Tensor& t, int64_t before, int64_t n, int64_t h) const {
    if (!t) return nullptr;
    return static_cast<float*>(t.data) +
           (before * p_.heads + h * kept(n)) * p_.state_dim * p_.head_dim;
  }
  Worker worker() { return {c_, plan_, m_.threads[omp_get_thread_num()]}; }

  void forward() {
    const int64_t H = p_.heads;
    int64_t before = 0, counted = 0;
    // A thread's iterations ascend: `before` only grows. Plain dynamic does not promise it.
#pragma omp parallel for schedule(monotonic                                                \
                                  : dynamic) num_threads(static_cast <int>(plan_.threads)) \
    firstprivate(before, counted)
    for (int64_t i = 0; i < sequences() * H; ++i) {
      const int64_t n = i / H;
      if (c_.out.saved)
        for (; counted < n; ++counted) before += kept(counted);
      const Sequence s = sequence_of(p_, m_.ends, n);
      if (s.row < 0) continue;
      Worker w = worker();
      w.begin(s, i % H);
      w.forward(saved_of(c_.out.saved, before, n, i % H));
    }
  }

  template <typename F>
  void each_head(int64_t first, int64_t last, F f) {
    const int64_t H = p_.heads;
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(plan_.threads))
    for (int64_t i = first * H; i < last * H; ++i) {
      Worker w = worker();
      w.begin(sequence_of(p_, m_.ends, i / H), i % H);
      f(w, m_.heads[i - first * H], i / H, i % H);
    }
  }

  void backward() {
    std::fill_n(m_.parameters, p_.heads * parameter_count(p_), 0.0);
    for (int64_t first = 0; first < p_.sequences; first += plan_.wave)
      wave(first, std::min(first + plan_.wave, p_.sequences));
    store_parameters(c_, m_.parameters);
  }

  int64_t chunks_of(int64_t n) const {
    return (sequence_of(p_, m_.ends, n).tokens() + plan_.tokens - 1) / plan_.tokens;
  }

  void wave(int64_t first, int64_t last) {
    const Tensor& saved = c_.in.saved;
    const int64_t before = saved ? kept_before(first) : 0;
    const auto from = [&](int64_t n, int64_t h) -> const float* {
      int64_t own = before;
      for (int64_t i = first; saved && i < n; ++i) own += kept(i);
      return saved_of(saved, own, n, h);
    };
    each_head(first, last, [&](Worker& w, HeadMemory& u, int64_t n, int64_t h) {
      w.checkpoints(u, from(n, h));
      w.start_gradients(u);
    });
    int64_t longest = 0;
    for (int64_t n = first; n < last; ++n) longest = std::max(longest, chunks_of(n));
    // Chunks are counted from each sequence's end: all end together.
    for (int64_t chunk = longest; chunk-- > 0;) {
      each_head(first, last, [&](Worker& w, HeadMemory& u, int64_t n, int64_t h) {
        if (chunk >= w.chunks()) return;
        if (chunk + 1 == w.chunks() || (chunk + 1) % plan_.segment == 0)
          w.segment_states(u, chunk / plan_.segment, from(n, h));
        w.chunk_gradients(u, chunk);
      });
      sums(first, last, chunk);
    }
    each_head(first, last, [&](Worker& w, HeadMemory& u, int64_t, int64_t) { w.end_gradients(u); });
    for (int64_t n = first; n < last; ++n)
      for (int64_t h = 0; h < p_.heads; ++h)
        add_parameters(m_.heads[(n - first) * p_.heads + h], h);
  }

  // Rows of all heads of the wave at this chunk: the sums over the heads of each group.
  void sums(int64_t first, int64_t last, int64_t chunk) {
    const int64_t C = plan_.tokens;
#pragma omp parallel for schedule(dynamic, 4) num_threads(static_cast <int>(plan_.threads))
    for (int64_t i = 0; i < (last - first) * C; ++i) {
      const Sequence s = sequence_of(p_, m_.ends, first + i / C);
      const int64_t token = chunk * C + i % C;
      if (token < s.tokens()) token_sums(s, m_.heads + i / C * p_.heads, token, i % C);
    }
  }

  void token_sums(const Sequence& s, const HeadMemory* heads, int64_t token, int64_t t) {
    ThreadMemory& m = m_.threads[omp_get_thread_num()];
    const int64_t N = plan_.columns, R = p_.rank;
    for (int64_t g = 0; g < p_.groups; ++g)
      for (const bool key : {false, true}) {
        const Tensor& to = key ? c_.out.d.k : c_.out.d.q;
        if (!to) continue;
        int64_t count = 0;
        for (int64_t h = 0; h < p_.heads; ++h)
          if (p_.group_of(h) == g)
            m.pointers[count++] = (key ? heads[h].dk : heads[h].dq) + t * R * N;
        sum_rows(m.pointers, count, R * N, m.sum);
        for (int64_t r = 0; r < R; ++r)
          store_row(m.sum + r * N, p_.state_dim, to.data, to.dtype,
                    offset_of(to, s.batch, s.begin + token, r, g), to.stride[4]);
      }
    if (!p_.sum_angles || p_.pairs == 0) return;
    for (int64_t h = 0; h < p_.heads; ++h) m.pointers[h] = heads[h].dangle + t * plan_.pairs;
    sum_rows(m.pointers, mutant(Mutant::m3_shared_angles_not_summed) ? 1 : p_.heads, plan_.pairs,
             m.sum);
    const Tensor& to = c_.out.d.angles;
    store_row(m.sum, p_.pairs, to.data, to.dtype, offset_of(to, s.batch, s.begin + token),
              to.stride[3]);
  }

  // From the padded sums of one head of one sequence, in the order of the sequences.
  void add_parameters(const HeadMemory& u, int64_t h) {
    const int64_t N = p_.state_dim, P = p_.head_dim, R = p_.rank;
    double* to = m_.parameters + h * parameter_count(p_);
    const bool shared =
        mutant(Mutant::m3_2_bias_after_group_sum) && h > 0 && p_.group_of(h) == p_.group_of(h - 1);
    const double* from = shared ? (&u - 1)->parameters : u.parameters;
    for (int64_t r = 0; r < 2 * R; ++r, from += plan_.columns)
      for (int64_t n = 0; n < N; ++n) *to++ += from[n];
    for (int64_t r = 0; r < 3 * R + 1; ++r, from += plan_.values)
      for (int64_t p = 0; p < P; ++p) *to++ += from[p];
    *to += *from;
  }

  void record();

  const Call& c_;
  const Problem& p_;
  const Plan& plan_;
  Arena arena_;
  Memory m_;
};

void Run::record() {
  Result& r = c_.result;
  r.schedule = Schedule::sequential;
  r.chunk_tokens = plan_.tokens;
  r.chunk_rows = plan_.rows;
  r.threads = static_cast<int>(plan_.threads);
  r.segment_chunks = plan_.segment;
  r.state_home = "workspace of the thread, through its cache";
  r.state_dtype = "fp32";
  r.accumulator_angle = "64-bit integers of 2^-64 turn, fp32 increments";
  r.accumulator_decay = "fp64 within a chunk, used as two fp32";
  r.accumulator_state = r.accumulator_state_gradient = r.accumulator_rows = "fp32";
  r.accumulator_parameters = "fp32 within a chunk, fp64 across chunks and sequences";
  r.accumulator_groups = "fp32 in the order of the heads, biases before";
  r.products = products_of(p_, plan_);
  if (p_.backward()) {
    r.shared_product = "dO V^T once, used by dq, dk, d_dt, d_trap, d_d";
    r.notes.push_back(c_.in.saved ? "states from `saved`" : "states computed anew");
  }
  if (p_.options.schedule == Schedule::parallel)
    r.notes.push_back(
        "schedule = parallel: this lane takes a head's chunks in turn; bits are alike");
  r.notes.push_back(std::string("vectors: ") + talea::cpu::isa_name());
}

}  // namespace
}  // namespace cpu

namespace {

std::optional<std::string> decline(const Problem& p, const DeviceFacts&) {
  if (p.device != DeviceKind::cpu)
    return "reads host memory only; the tensors are on a CUDA device";
  if (p.dtype == DType::f64) return "fp64 q: this lane multiplies in fp32";
  return std::nullopt;
}

Planned plan(const Problem& p, const DeviceFacts& device) {
  const cpu::Plan made = cpu::make_plan(p, device);
  double flops = 0;
  for (const ProductFact& f : cpu::products_of(p, made)) flops += f.flops;
  Planned all = planned(cpu::workspace_of(p, made), flops, made);
  all.kept_bytes = cpu::saved_of(p, made);
  return all;
}

void run(const Call& c, const Planned& planned) { cpu::Run(c, planned.as<cpu::Plan>()).all(); }

std::vector<std::string> details(const Problem&, const Planned& planned) {
  const auto& made = alone<cpu::Plan>(planned);
  return {std::string("isa = ") + talea::cpu::isa_name(), fmt::format("threads = {}", made.threads),
          fmt::format("chunk = {} tokens, {} rows", made.tokens, made.rows),
          fmt::format("segment = {} chunks", made.segment),
          fmt::format("wave = {} sequences", made.wave)};
}

}  // namespace

Lane cpu_lane() {
  return over_ranks<plan, run>(
      {.name = "cpu", .kind = "native kernel", .decline = decline, .details = details});
}

}  // namespace talea::mamba3
