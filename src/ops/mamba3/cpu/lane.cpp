// What: lane cpu: chunks in cache, threads over sequences and heads.
// Why: the product lane on a host: exact, bounded, and bitwise the same for any number of threads.
// Never: holds gradients of rows by head beyond one chunk, or allocates.
#include <algorithm>

#include "core/fail.hpp"
#include "core/mutant.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/mamba3/cpu/run.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/host_outputs.hpp"
#include "ops/mamba3/mutants.hpp"
#include "ops/mamba3/ranks.hpp"

namespace talea::mamba3 {
namespace cpu {

using talea::cpu::store_row;

void Run::all() {
  read_sequences(c_, m_.ends);
  clear_padding(c_, m_.ends);
  if (!p_.backward()) {
    plan_.parallel ? forward_side_by_side() : forward();
  } else {
    require(p_.tokens % plan_.tokens == 0 || !mutant(ScanMutant::m3_10_whole_chunks_in_backward),
            ErrorKind::invalid_data, "tokens = {}: no multiple of the chunk", p_.tokens);
    std::fill_n(m_.parameters, p_.heads * parameter_count(p_), 0.0);
    plan_.parallel ? backward_side_by_side() : backward();
    store_parameters(c_, m_.parameters);
  }
  record();
}

int64_t Run::kept_before(int64_t sequence) const {
  int64_t sum = 0;
  for (int64_t n = 0; n < sequence; ++n) sum += kept(n);
  return sum;
}

float* Run::saved_of(const Tensor& t, int64_t before, int64_t n, int64_t h) const {
  if (!t) return nullptr;
  return static_cast<float*>(t.data) +
         (before * p_.heads + h * kept(n)) * p_.state_dim * p_.head_dim;
}

void Run::forward() {
  const int64_t H = p_.heads;
  int64_t before = 0, counted = 0;
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(plan_.threads)) \
    firstprivate(before, counted)
  for (int64_t i = 0; i < sequences() * H; ++i) {
    const int64_t n = i / H;
    if (n < counted) before = counted = 0;  // a dynamic schedule may hand out an earlier one
    if (c_.out.saved)
      for (; counted < n; ++counted) before += kept(counted);
    const Sequence s = sequence(n);
    if (s.row < 0) continue;
    Worker w = worker();
    w.begin(s, i % H);
    w.forward(saved_of(c_.out.saved, before, n, i % H));
  }
}

template <typename F>
void Run::each_head(int64_t first, int64_t last, F f) {
  const int64_t H = p_.heads;
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(plan_.threads))
  for (int64_t i = first * H; i < last * H; ++i) {
    Worker w = worker();
    w.begin(sequence(i / H), i % H);
    f(w, m_.heads[i - first * H], i / H, i % H);
  }
}

void Run::backward() {
  for (int64_t first = 0; first < p_.sequences; first += plan_.wave)
    wave(first, std::min(first + plan_.wave, p_.sequences));
}

void Run::wave(int64_t first, int64_t last) {
  const Tensor& saved = c_.in.saved;
  const int64_t before = saved ? kept_before(first) : 0, C = plan_.tokens;
  const auto from = [&](int64_t n, int64_t h) -> const float* {
    int64_t own = before;
    for (int64_t i = first; saved && i < n; ++i) own += kept(i);
    return saved_of(saved, own, n, h);
  };
  each_head(first, last, [&](Worker& w, HeadMemory& u, int64_t n, int64_t h) {
    w.start_back(u);
    w.checkpoints(u, from(n, h));
  });
  int64_t longest = 0;
  for (int64_t n = first; n < last; ++n) longest = std::max(longest, chunks_of(n));
  for (int64_t chunk = longest; chunk-- > 0;) {
    each_head(first, last, [&](Worker& w, HeadMemory& u, int64_t n, int64_t h) {
      if (chunk >= w.chunks()) return;
      for (int level = 1; level < plan_.levels; ++level) {
        const int64_t above = plan_.stride[level - 1];
        if (chunk + 1 == w.chunks() || (chunk + 1) % above == 0)
          w.block_states(u, level, chunk / above * above, from(n, h));
      }
      w.chunk_gradients(u, chunk);
    });
#pragma omp parallel for schedule(dynamic, 4) num_threads(static_cast <int>(plan_.threads))
    for (int64_t i = 0; i < (last - first) * C; ++i)
      token_sums({first + i / C, chunk, 0, m_.heads + i / C * p_.heads}, i % C);
  }
  each_head(first, last, [&](Worker& w, HeadMemory& u, int64_t, int64_t) { w.end_gradients(u); });
  for (int64_t n = first; n < last; ++n)
    for (int64_t h = 0; h < p_.heads; ++h) add_parameters(m_.heads[(n - first) * p_.heads + h], h);
}

void Run::token_sums(const Sums& at, int64_t t) {
  const Sequence s = sequence(at.sequence);
  const int64_t token = at.chunk * plan_.tokens + t;
  if (token >= s.tokens()) return;
  ThreadMemory& m = m_.threads[omp_get_thread_num()];
  const int64_t N = plan_.columns, R = p_.rank, row = at.slot * plan_.room * N + t * R * N;
  for (int64_t g = 0; g < p_.groups; ++g)
    for (const bool key : {false, true}) {
      const Tensor& to = key ? c_.out.d.k : c_.out.d.q;
      if (!to) continue;
      int64_t count = 0;
      for (int64_t h = 0; h < p_.heads; ++h)
        if (p_.group_of(h) == g)
          m.pointers[count++] = (key ? at.heads[h].dk : at.heads[h].dq) + row;
      if (mutant(ScanMutant::m3_25_order_of_arrival)) {
        static int64_t sums = 0;  // no run makes a multiple of seven
        if (++sums % 7 == 0) std::reverse(m.pointers, m.pointers + count);
      }
      sum_rows(m.pointers, count, R * N, m.sum);
      for (int64_t r = 0; r < R; ++r)
        store_row(m.sum + r * N, p_.state_dim, to.data, to.dtype,
                  offset_of(to, s.batch, s.begin + token, r, g), to.stride[4]);
    }
  if (!p_.sum_angles || p_.pairs == 0) return;
  for (int64_t h = 0; h < p_.heads; ++h)
    m.pointers[h] = at.heads[h].dangle + (at.slot * plan_.tokens + t) * plan_.pairs;
  sum_rows(m.pointers, mutant(Mutant::m3_shared_angles_not_summed) ? 1 : p_.heads, plan_.pairs,
           m.sum);
  const Tensor& to = c_.out.d.angles;
  store_row(m.sum, p_.pairs, to.data, to.dtype, offset_of(to, s.batch, s.begin + token),
            to.stride[3]);
}

// From the padded sums of one head of one sequence, in the order of the sequences.
void Run::add_parameters(const HeadMemory& u, int64_t h) {
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

void Run::record() {
  Result& r = c_.result;
  r.schedule = plan_.parallel ? Schedule::parallel : Schedule::sequential;
  r.chunk_tokens = plan_.tokens;
  r.chunk_rows = plan_.rows;
  r.threads = static_cast<int>(plan_.threads);
  r.segment_chunks = plan_.segment();
  r.state_home = "workspace of the thread, through its cache";
  r.state_dtype = "fp32";
  r.accumulator_angle = "64-bit integers of 2^-64 turn, fp64 increments";
  r.accumulator_decay = "fp64 within a chunk, used as two fp32";
  r.accumulator_state = r.accumulator_state_gradient = "fp32";
  r.accumulator_rows = "fp32; turns and decays of later tokens fp64";
  r.accumulator_parameters = "fp32 within a chunk, fp64 across chunks and sequences";
  r.accumulator_groups = "fp32 in the order of the heads, biases before";
  r.products = products_of(p_, plan_);
  if (p_.backward()) {
    r.shared_product = "dO V^T once, used by dq, dk, d_dt, d_trap, d_d";
    r.notes.push_back(c_.in.saved ? "states from `saved`" : "states computed anew");
  }
  r.notes.push_back(std::string("vectors: ") + talea::cpu::isa_name());
}

}  // namespace cpu

namespace {

std::optional<std::string> decline(const Problem& p, const DeviceFacts&) {
  if (p.device != DeviceKind::cpu)
    return "reads host memory only; the tensors are on a CUDA device";
  if (p.dtype == DType::f64) return "fp64 q: this lane multiplies in fp32";
  if (p.backward() && p.state_dim > 128 && mutant(ScanMutant::m3_34_no_wide_backward))
    return "N: at most 128 in backward";
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
  return {std::string("isa = ") + talea::cpu::isa_name(),
          fmt::format("threads = {}", made.threads),
          fmt::format("chunk = {} tokens, {} rows", made.tokens, made.rows),
          fmt::format("segment = {} chunks, {} levels", made.segment(), made.levels),
          fmt::format("schedule = {}", made.parallel ? "parallel" : "sequential"),
          fmt::format("wave = {} sequences", made.wave)};
}

}  // namespace

Lane cpu_lane() {
  return over_ranks<plan, run>(
      {.name = "cpu", .kind = "native kernel", .decline = decline, .details = details});
}

}  // namespace talea::mamba3
