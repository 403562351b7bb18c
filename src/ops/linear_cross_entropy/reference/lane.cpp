// What: the contract in plain fp64 loops: the oracle every other lane is measured against.
// Why: correctness needs one place that is obviously right; speed is not its business.
// Never: rounds an intermediate below fp64.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/arena.hpp"
#include "core/half.hpp"
#include "ops/linear_cross_entropy/outputs.hpp"

namespace talea::lce {
namespace {

constexpr int64_t chunk_rows = 32;

// Everything in fp64; the layout is also the workspace formula.
struct Buffers {
  double *x, *w, *dx, *dw, *db, *z, *p;  // z: softcapped logits of a chunk; p: slopes, then da
  double* q;                             // soft targets of a row
  RowState<double>*states, *all_states;
  Candidate<double>*best, *all_best;

  Buffers(Arena& a, const Problem& p_) {
    const int64_t n = p_.tokens, d = p_.hidden, v = p_.vocab_local, k = candidates_kept(p_);
    x = a.take<double>(n * d);
    w = a.take<double>(v * d);
    dx = a.take<double>(p_.wants_dx ? n * d : 0);
    dw = a.take<double>(p_.wants_dw ? v * d : 0);
    db = a.take<double>(p_.wants_db ? v : 0);
    z = a.take<double>(chunk_rows * v);
    p = a.take<double>(p_.backward() ? chunk_rows * v : 0);
    q = a.take<double>(p_.soft_targets != SoftTargets::none ? v : 0);
    states = a.take<RowState<double>>(chunk_rows);
    all_states = a.take<RowState<double>>(chunk_rows * p_.world);
    best = a.take<Candidate<double>>(chunk_rows * k);
    all_best = a.take<Candidate<double>>(chunk_rows * k * p_.world);
  }
};

class Reference {
 public:
  explicit Reference(const Call& c)
      : c_(c), p_(c.problem), arena_(c.workspace), b_(arena_, c.problem), k_(candidates_kept(p_)) {}

  void run() {
    const TargetFacts facts = examine(p_, c_.in);
    const Normaliser m = normaliser(p_, facts, c_.batch);
    record(facts, m, c_.result);
    terms_ = {p_.options.label_smoothing, p_.options.z_loss, static_cast<double>(p_.vocab),
              facts.class_weight_sum, m.inverse};
    load();
    for (int64_t begin = 0; begin < p_.tokens; begin += chunk_rows)
      chunk(begin, std::min(begin + chunk_rows, p_.tokens));
    write_scalars(p_, c_.out, facts, m, loss_sum_, hits_);
    store();
  }

 private:
  void load() {
    const int64_t d = p_.hidden, rows = c_.in.hidden.shape[0];
    const int64_t first = p_.sequence_parallel ? rows * p_.rank : 0;
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t i = 0; i < d; ++i) b_.x[(first + t) * d + i] = at(c_.in.hidden, t, i);
    if (p_.sequence_parallel && p_.world > 1)
      c_.vocab.all_gather(b_.x + first * d, b_.x, rows * d * 8, nullptr);
#pragma omp parallel for if (p_.vocab_local * p_.hidden > 65536)
    for (int64_t v = 0; v < p_.vocab_local; ++v)
      for (int64_t i = 0; i < d; ++i) b_.w[v * d + i] = at(c_.in.weight, v, i);
    if (p_.wants_dx) std::fill_n(b_.dx, p_.tokens * d, 0.0);
    if (p_.wants_dw) std::fill_n(b_.dw, p_.vocab_local * d, 0.0);
    if (p_.wants_db) std::fill_n(b_.db, p_.vocab_local, 0.0);
  }

  double scale(int64_t t) const {
    return p_.options.logit_scale * (c_.in.token_scale ? at(c_.in.token_scale, t) : 1.0);
  }
  double class_weight(int64_t v) const {
    return c_.in.class_weight ? at(c_.in.class_weight, p_.vocab_begin + v) : 1.0;
  }

  // The soft targets of row t over the local vocabulary.
  const double* soft_row(int64_t t) const {
    double* q = b_.q;
    std::fill_n(q, p_.vocab_local, 0.0);
    if (p_.soft_targets == SoftTargets::dense)
      for (int64_t v = 0; v < p_.vocab_local; ++v)
        q[v] = at(c_.in.soft_target_probs, t, p_.vocab_begin + v);
    for (int64_t j = 0; j < p_.soft_k; ++j) {
      const int64_t v = index_at(c_.in.soft_target_ids, t, j) - p_.vocab_begin;
      if (v >= 0 && v < p_.vocab_local) q[v] += at(c_.in.soft_target_probs, t, j);
    }
    return q;
  }

  // Also the softcap's derivative, 1 - tanh^2 without its cancellation, into `slope`.
  void logits(int64_t t, double* z, double* slope) const {
    const double* x = b_.x + t * p_.hidden;
    const double s = scale(t), cap = p_.options.softcap;
#pragma omp parallel for if (p_.vocab_local * p_.hidden > 65536)
    for (int64_t v = 0; v < p_.vocab_local; ++v) {
      const double* w = b_.w + v * p_.hidden;
      double dot = 0;
      for (int64_t i = 0; i < p_.hidden; ++i) dot += x[i] * w[i];
      const double a = s * dot + (c_.in.bias ? at(c_.in.bias, v) : 0.0);
      z[v] = cap > 0 ? cap * std::tanh(a / cap) : a;
      if (slope) slope[v] = cap > 0 ? 1 / std::cosh(a / cap) / std::cosh(a / cap) : 1.0;
    }
  }

  RowState<double> reduce(int64_t t, const double* z, Candidate<double>* best) const {
    const int64_t y = p_.has_targets ? index_at(c_.in.targets, t) - p_.vocab_begin : -1;
    const bool soft = p_.soft_targets != SoftTargets::none;
    RowState<double> s;
    for (int64_t v = 0; v < p_.vocab_local; ++v)
      if (z[v] > s.max || std::isnan(z[v])) s.max = z[v];
    const double* q = soft ? soft_row(t) : nullptr;
    for (int64_t v = 0; v < p_.vocab_local; ++v) {
      offer(best, k_, {z[v], p_.vocab_begin + v});
      if (p_.options.label_smoothing > 0) s.class_sum += class_weight(v) * z[v];
      // A sparse row says nothing of the ids it does not list.
      if (soft && (p_.soft_targets == SoftTargets::dense || q[v] != 0)) {
        s.soft_sum += class_weight(v) * q[v] * z[v];
        s.soft_mass += class_weight(v) * q[v];
      }
      if (v == y) {
        s.target = z[v];
        s.has_target = 1;
      } else if (s.max != -INFINITY) {
        const double e = std::exp(z[v] - s.max);
        s.others += e;
        if (e != 0) s.shifted += e * (z[v] - s.max);
      }
    }
    return s;
  }

  void chunk(int64_t begin, int64_t end) {
    const int64_t v = p_.vocab_local;
    for (int64_t r = 0; r < end - begin; ++r) {
      b_.states[r] = {};
      clear_candidates(b_.best + r * k_, k_);
      if (row_kind(p_, c_.in, begin + r) != RowKind::valid) continue;
      logits(begin + r, b_.z + r * v, p_.backward() ? b_.p + r * v : nullptr);
      b_.states[r] = reduce(begin + r, b_.z + r * v, b_.best + r * k_);
    }
    exchange(end - begin);
    for (int64_t r = 0; r < end - begin; ++r) finish(begin + r, r);
    if (p_.wants_dx && p_.world > 1 && !p_.sequence_parallel)
      c_.vocab.all_reduce_sum(b_.dx + begin * p_.hidden, (end - begin) * p_.hidden, DType::f64,
                              nullptr);
  }

  void exchange(int64_t rows) {
    if (p_.world == 1) return;
    c_.vocab.all_gather(b_.states, b_.all_states, chunk_rows * sizeof(RowState<double>), nullptr);
    c_.vocab.all_gather(b_.best, b_.all_best, chunk_rows * k_ * sizeof(Candidate<double>), nullptr);
    for (int64_t r = 0; r < rows; ++r) {
      b_.states[r] = b_.all_states[r];
      clear_candidates(b_.best + r * k_, k_);
      for (int w = 0; w < p_.world; ++w) {
        if (w > 0) b_.states[r] = merge(b_.states[r], b_.all_states[w * chunk_rows + r]);
        for (int64_t j = 0; j < k_; ++j)
          offer(b_.best + r * k_, k_, b_.all_best[(w * chunk_rows + r) * k_ + j]);
      }
    }
  }

  void finish(int64_t t, int64_t r) {
    const RowKind kind = row_kind(p_, c_.in, t);
    if (kind != RowKind::valid) {
      const RowReport blank = blank_row(kind);
      write_row(p_, c_.out, t, blank);
      loss_sum_ += blank.loss;
      if (p_.wants_dx && kind == RowKind::poisoned)
        std::fill_n(b_.dx + t * p_.hidden, p_.hidden, p_.rank == 0 ? NAN : 0.0);
      return;
    }
    const RowSummary<double> row = summarise(b_.states[r]);
    RowTerms<double> own;
    own.soft = p_.soft_targets != SoftTargets::none;
    if (p_.has_targets && c_.in.class_weight)
      own.class_weight = at(c_.in.class_weight, index_at(c_.in.targets, t));
    if (c_.in.token_weight) own.token_weight = at(c_.in.token_weight, t);
    own.upstream = upstream_at(c_.in, t);
    if (c_.in.upstream_lse) own.upstream_lse = at(c_.in.upstream_lse, t);
    if (c_.in.upstream_entropy) own.upstream_entropy = at(c_.in.upstream_entropy, t);
    if (!p_.has_targets && !own.soft) own.upstream = 0;  // no loss, so no gradient of it
    const RowResult<double> result = finish_row(b_.states[r], row, terms_, own);
    loss_sum_ += result.loss;
    const Candidate<double>* best = b_.best + r * k_;
    const bool ranked = k_ > 0 && !std::isnan(row.lse);  // a NaN row has no best
    if (ranked && p_.has_targets && best[0].id == index_at(c_.in.targets, t)) ++hits_;
    write_row(p_, c_.out, t,
              {result.loss, row.lse, row.logp_target, row.entropy, k_ ? best : nullptr});
    if (p_.backward()) gradient(t, r, row, result);
  }

  void gradient(int64_t t, int64_t r, const RowSummary<double>& row, const RowResult<double>& g) {
    const int64_t v_count = p_.vocab_local, d = p_.hidden;
    const double* z = b_.z + r * v_count;
    double* da = b_.p + r * v_count;
    const double s = scale(t), max = b_.states[r].max;
    const int64_t y = p_.has_targets ? index_at(c_.in.targets, t) - p_.vocab_begin : -1;
    const double* q = p_.soft_targets != SoftTargets::none ? soft_row(t) : nullptr;
    for (int64_t v = 0; v < v_count; ++v) {
      const double p = std::exp(z[v] - max) / row.sum;
      double dz = v == y ? g.target : g.prob * p;
      if (g.smooth != 0) dz -= g.smooth * class_weight(v);
      if (q) dz -= g.soft * class_weight(v) * q[v];
      if (g.entropy_up != 0 && p != 0) dz -= g.entropy_up * p * (z[v] - max - row.mean_distance);
      da[v] *= dz;
    }
    const double* x = b_.x + t * d;
    if (p_.wants_dx)
      for (int64_t v = 0; v < v_count; ++v)
        for (int64_t i = 0; i < d; ++i) b_.dx[t * d + i] += s * da[v] * b_.w[v * d + i];
    if (p_.wants_db)
      for (int64_t v = 0; v < v_count; ++v) b_.db[v] += da[v];
    if (!p_.wants_dw) return;
#pragma omp parallel for if (p_.vocab_local * p_.hidden > 65536)
    for (int64_t v = 0; v < v_count; ++v)
      for (int64_t i = 0; i < d; ++i) b_.dw[v * d + i] += s * da[v] * x[i];
  }

  void store() {
    const int64_t d = p_.hidden;
    if (p_.wants_dx) {
      const int64_t rows = c_.out.dx.shape[0];
      const double* dx = b_.dx;
      if (p_.sequence_parallel && p_.world > 1) {
        // x is no longer needed: it takes this rank's share.
        c_.vocab.reduce_scatter_sum(b_.dx, b_.x, rows * d, DType::f64, nullptr);
        dx = b_.x;
      }
      for (int64_t t = 0; t < rows; ++t)
        for (int64_t i = 0; i < d; ++i) put(c_.out.dx, t, i, dx[t * d + i]);
    }
    for (int64_t v = 0; p_.wants_dw && v < p_.vocab_stored; ++v)
      for (int64_t i = 0; i < d; ++i) {
        const double value = v < p_.vocab_local ? b_.dw[v * d + i] : 0.0;
        if (!c_.out.accumulate_dw)
          put(c_.out.dw, v, i, value);
        else if (v < p_.vocab_local)
          put(c_.out.dw, v, i, at(c_.out.dw, v, i) + value);
      }
    for (int64_t v = 0; p_.wants_db && v < p_.vocab_stored; ++v) {
      const double value = v < p_.vocab_local ? b_.db[v] : 0.0;
      if (!c_.out.accumulate_db)
        put(c_.out.db, v, value);
      else if (v < p_.vocab_local)
        put(c_.out.db, v, at(c_.out.db, v) + value);
    }
  }

  const Call& c_;
  const Problem& p_;
  Arena arena_;
  Buffers b_;
  int64_t k_;
  LossTerms<double> terms_;
  double loss_sum_ = 0;
  int64_t hits_ = 0;
};

std::optional<std::string> decline(const Problem& p, const DeviceFacts&) {
  if (p.device != DeviceKind::cpu)
    return "reads host memory only; the tensors are on a CUDA device";
  if (sums_dx_in_bf16(p)) return "dx_sum = bf16: this lane sums the ranks' shares in fp32";
  return std::nullopt;
}

Planned plan(const Problem& p, const DeviceFacts&) {
  Arena arena;
  Buffers layout(arena, p);
  return {.workspace_bytes = arena.bytes(), .flops = product_flops(p)};
}

void run(const Call& c, const Planned&) {
  Reference(c).run();
  Result& r = c.result;
  r.logits_home = "fp64 rows of a chunk in the workspace";
  r.logits_tile_rows = chunk_rows;
  r.logits_tile_columns = c.problem.vocab_local;
  r.logits_tile_bytes = chunk_rows * c.problem.vocab_local * 8;
  r.full_logits_tensor = c.problem.world == 1 && c.problem.tokens <= chunk_rows;
  r.chunk_rows = chunk_rows;
  r.chunks = (c.problem.tokens + chunk_rows - 1) / chunk_rows;
  r.accumulator_softmax = r.accumulator_dx = r.accumulator_dw = r.accumulator_loss = "fp64";
  r.upstream_handling = "applied to each row where it is formed";
  r.merges = c.problem.world == 1
                 ? "none: each row is whole"
                 : std::string("ranks (all_gather of row states, ") + c.vocab.engine() + ")";
}

}  // namespace

Lane reference_lane() {
  return {.name = "reference",
          .kind = "reference",
          .decline = decline,
          .plan = plan,
          .details =
              [](const Problem&, const Planned&) {
                return std::vector<std::string>{"arithmetic = fp64 loops", "chunk_rows = 32"};
              },
          .run = run};
}

}  // namespace talea::lce
