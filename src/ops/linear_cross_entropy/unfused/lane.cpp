// What: lane unfused: full logits and full logit gradients in the input dtype, as eager code does
// it.
// Why: the intentional comparison: the yardstick of error and of speed, with honest receipts.
// Never: chosen unless named; never shares the formulas of the fused lanes (finish.hpp), so that a
// bug there cannot hide in the yardstick.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "core/arena.hpp"
#include "core/half.hpp"
#include "device/cpu/matrix_product.hpp"
#include "device/cpu/row_math.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/linear_cross_entropy/outputs.hpp"

namespace talea::lce {
namespace {

using talea::cpu::load_row;
using talea::cpu::MatrixProduct;
using talea::cpu::MatrixView;
using talea::cpu::store_row;

constexpr int64_t product_rows = 256;  // of a 16-bit product before it is rounded

int threads_of(const Problem& p, const DeviceFacts& device) {
  return std::max(1, p.options.threads > 0 ? p.options.threads : device.threads);
}

struct Buffers {
  char *z, *dz;  // [tokens, vocab] in the dtype of hidden
  float* x;      // hidden, widened; ignored and poisoned rows are zero, whatever they held
  float *product, *dx, *dw;  // fp32 sums of the products
  float *bias, *class_weight, *db;
  float* rows;  // three rows of the vocabulary a thread
  float* scratch;
  double* loss;

  Buffers(Arena& a, const Problem& p, int threads) {
    const int64_t n = p.tokens, d = p.hidden, v = p.vocab_local, cells = n * v;
    const bool half = is_16bit(p.hidden_dtype);
    z = a.take<char>(cells * size_of(p.hidden_dtype));
    dz = a.take<char>(p.backward() ? cells * size_of(p.hidden_dtype) : 0);
    x = a.take<float>(n * d);
    product = a.take<float>(half ? std::min(n, product_rows) * v : 0);
    dx = a.take<float>(p.wants_dx ? n * d : 0);
    dw = a.take<float>(p.wants_dw ? v * d : 0);
    bias = a.take<float>(p.has_bias ? v : 0);
    class_weight = a.take<float>(p.has_class_weight ? v : 0);
    db = a.take<float>(p.wants_db ? v : 0);
    rows = a.take<float>(3 * v * threads);
    scratch = a.take<float>(talea::cpu::matrix_product_scratch * threads);
    loss = a.take<double>(n);
  }
};

// One row in eager arithmetic: fp32 log-softmax, p - 1 by subtraction.
struct EagerRow {
  float lse = 0, logp = 0, loss = 0, entropy = 0;
  // Coefficients of the gradient: `rest` is what p gains by smoothing and z-loss. As spread - hard
  // it would have lost its digits: 2 zeta lse is small beside 1.
  float smooth = 0, hard = 0, soft = 0, spread = 0, rest = 0;
};

class Unfused {
 public:
  Unfused(const Call& c, int threads)
      : c_(c),
        p_(c.problem),
        threads_(threads),
        arena_(c.workspace),
        b_(arena_, c.problem, threads_),
        k_(candidates_kept(c.problem)) {}

  void run() {
    facts_ = examine(p_, c_.in);
    m_ = normaliser(p_, facts_, c_.batch);
    record(facts_, m_, c_.result);
    const Tensor& b = c_.in.bias;
    if (b) load_row(b.data, b.dtype, 0, b.stride[0], p_.vocab_local, b_.bias);
    const Tensor& w = c_.in.class_weight;
    if (w) load_row(w.data, w.dtype, 0, w.stride[0], p_.vocab_local, b_.class_weight);
    load_hidden();
    logits();
#pragma omp parallel for num_threads(threads_)
    for (int64_t t = 0; t < p_.tokens; ++t) row(t);
    double sum = 0;
    for (int64_t t = 0; t < p_.tokens; ++t) sum += b_.loss[t];
    write_scalars(p_, c_.out, facts_, m_, sum, count_hits());
    if (p_.backward()) gradients();
  }

 private:
  float rounded(float x) const {
    if (p_.hidden_dtype == DType::bf16) return bf16_to_float(float_to_bf16(x));
    if (p_.hidden_dtype == DType::f16) return f16_to_float(float_to_f16(x));
    return x;
  }
  float scale(int64_t t) const {
    return static_cast<float>(p_.options.logit_scale *
                              (c_.in.token_scale ? at(c_.in.token_scale, t) : 1.0));
  }
  float class_weight(int64_t v) const { return c_.in.class_weight ? b_.class_weight[v] : 1.0f; }
  float* row_buffer(int which) const {
    return b_.rows + (omp_get_thread_num() * 3 + which) * p_.vocab_local;
  }
  MatrixView view(const Tensor& t) const { return {t.data, t.dtype, t.stride[0], t.stride[1]}; }
  MatrixView cells(char* data) const { return {data, p_.hidden_dtype, p_.vocab_local, 1}; }
  void load(const char* from, int64_t t, float* to) const {
    load_row(from, p_.hidden_dtype, t * p_.vocab_local, 1, p_.vocab_local, to);
  }
  void store(const float* from, char* to, int64_t t) const {
    store_row(from, p_.vocab_local, to, p_.hidden_dtype, t * p_.vocab_local, 1);
  }
  bool is_valid(int64_t t) const { return row_kind(p_, c_.in, t) == RowKind::valid; }

  void multiply(const MatrixView& a, const MatrixView& b, int64_t m, int64_t n, int64_t k, float* c,
                int64_t c_stride) const {
    MatrixProduct p{a, b, c, c_stride};
    p.m = m;
    p.n = n;
    p.k = k;
    p.threads = threads_;
    p.scratch = b_.scratch;
    talea::cpu::matrix_product(p);
  }

  void load_hidden() {
    const Tensor& x = c_.in.hidden;
#pragma omp parallel for num_threads(threads_)
    for (int64_t t = 0; t < p_.tokens; ++t) {
      float* row = b_.x + t * p_.hidden;
      if (is_valid(t))
        load_row(x.data, x.dtype, t * x.stride[0], x.stride[1], p_.hidden, row);
      else
        std::fill_n(row, p_.hidden, 0.0f);
    }
  }
  MatrixView hidden(int64_t first) const {
    return {b_.x + first * p_.hidden, DType::f32, p_.hidden, 1};
  }

  void logits() {
    const int64_t v = p_.vocab_local, n = p_.tokens;
    const bool half = is_16bit(p_.hidden_dtype);
    const int64_t step = half ? product_rows : std::max<int64_t>(n, 1);
    for (int64_t first = 0; first < n; first += step) {
      const int64_t rows = std::min(step, n - first);
      float* to = half ? b_.product : reinterpret_cast<float*>(b_.z);
      multiply(hidden(first), view(c_.in.weight).transposed(), rows, v, p_.hidden, to, v);
#pragma omp parallel for num_threads(threads_)
      for (int64_t r = 0; r < rows; ++r) finish_logits(first + r, to + r * v);
    }
  }

  // Scale, bias and softcap as an eager graph applies them: one rounding each.
  void finish_logits(int64_t t, float* z) {
    const float s = scale(t), cap = static_cast<float>(p_.options.softcap);
    const int64_t n = p_.vocab_local;
    for (int64_t v = 0; v < n; ++v) z[v] = rounded(z[v]);
    if (s != 1)
      for (int64_t v = 0; v < n; ++v) z[v] = rounded(z[v] * s);
    if (c_.in.bias)
      for (int64_t v = 0; v < n; ++v) z[v] = rounded(z[v] + b_.bias[v]);
    if (cap > 0)
      for (int64_t v = 0; v < n; ++v) z[v] = rounded(cap * std::tanh(z[v] / cap));
    if (is_16bit(p_.hidden_dtype)) store(z, b_.z, t);
  }

  // q of a row over the vocabulary.
  void soft_row(int64_t t, float* q) const {
    const Tensor& probs = c_.in.soft_target_probs;
    if (p_.soft_targets == SoftTargets::dense) {
      load_row(probs.data, probs.dtype, t * probs.stride[0], probs.stride[1], p_.vocab_local, q);
      return;
    }
    std::fill_n(q, p_.vocab_local, 0.0f);
    for (int64_t j = 0; j < p_.soft_k; ++j)
      q[index_at(c_.in.soft_target_ids, t, j)] += static_cast<float>(at(probs, t, j));
  }

  void row(int64_t t) {
    const RowKind kind = row_kind(p_, c_.in, t);
    float* z = row_buffer(0);
    if (kind != RowKind::valid) {
      const RowReport blank = blank_row(kind);
      b_.loss[t] = blank.loss;
      write_row(p_, c_.out, t, blank);
      if (p_.backward()) {
        std::fill_n(z, p_.vocab_local, 0.0f);
        store(z, b_.dz, t);
      }
      return;
    }
    load(b_.z, t, z);
    EagerRow r;
    float* q = row_buffer(1);
    if (p_.soft_targets != SoftTargets::none) soft_row(t, q);
    forward(t, z, q, r);
    b_.loss[t] = r.loss;
    Candidate<double> best[max_top_k];
    clear_candidates(best, k_);
    for (int64_t v = 0; k_ > 0 && v < p_.vocab_local; ++v) offer(best, k_, {z[v], v});
    write_row(p_, c_.out, t, {r.loss, r.lse, r.logp, r.entropy, k_ > 0 ? best : nullptr});
    if (p_.backward()) backward(t, z, q, r);
  }

  void forward(int64_t t, const float* z, const float* q, EagerRow& r) const {
    const int64_t n = p_.vocab_local;
    const float max = talea::cpu::row_max(z, n);
    r.lse = max == -INFINITY ? NAN : max + std::log(talea::cpu::row_exp_sum(z, n, max));
    const auto eps = static_cast<float>(p_.options.label_smoothing);
    const auto zeta = static_cast<float>(p_.options.z_loss), vocab = static_cast<float>(n);
    float ce = 0;
    if (p_.has_targets) {
      const int64_t y = index_at(c_.in.targets, t);
      r.logp = z[y] - r.lse;
      r.hard = (1 - eps) * class_weight(y);
      r.spread = r.hard;
      ce = r.hard * -r.logp;
    } else if (p_.soft_targets != SoftTargets::none) {
      double sum = 0, mass = 0;
      for (int64_t v = 0; v < n; ++v) {
        const float weight = class_weight(v) * q[v];
        if (q[v] == 0 && p_.soft_targets == SoftTargets::sparse) continue;
        sum += weight * (r.lse - z[v]);
        mass += weight;
      }
      ce = (1 - eps) * static_cast<float>(sum);
      r.soft = 1 - eps;
      r.spread = (1 - eps) * static_cast<float>(mass);
    }
    if (eps > 0) {
      double sum = 0, mass = 0;
      for (int64_t v = 0; v < n; ++v) {
        sum += class_weight(v) * (r.lse - z[v]);
        mass += class_weight(v);
      }
      r.smooth = eps / vocab;
      ce += r.smooth * static_cast<float>(sum);
      r.rest = r.smooth * static_cast<float>(mass);
    }
    r.rest += 2 * zeta * r.lse;
    r.spread += r.rest;
    const float w = c_.in.token_weight ? static_cast<float>(at(c_.in.token_weight, t)) : 1.0f;
    r.loss = w * (ce + zeta * r.lse * r.lse);
    if (!p_.wants_entropy && !c_.in.upstream_entropy) return;
    float* p = row_buffer(2);
    talea::cpu::row_exp(z, n, r.lse, p);
    double entropy = 0;
    for (int64_t v = 0; v < n; ++v)
      if (p[v] != 0) entropy -= p[v] * (z[v] - r.lse);
    r.entropy = static_cast<float>(entropy);
  }

  // da of the row, rounded to the input dtype where it is stored.
  void backward(int64_t t, const float* z, const float* q, const EagerRow& r) {
    const int64_t n = p_.vocab_local;
    const bool any = p_.has_targets || p_.soft_targets != SoftTargets::none;
    const double w = c_.in.token_weight ? at(c_.in.token_weight, t) : 1.0;
    const auto g = static_cast<float>(any ? upstream_at(c_.in, t) * w * m_.inverse : 0.0);
    const float g_lse = c_.in.upstream_lse ? static_cast<float>(at(c_.in.upstream_lse, t)) : 0.0f;
    const float g_entropy =
        c_.in.upstream_entropy ? static_cast<float>(at(c_.in.upstream_entropy, t)) : 0.0f;
    const auto cap = static_cast<float>(p_.options.softcap);
    float* p = row_buffer(2);
    talea::cpu::row_exp(z, n, r.lse, p);
    const int64_t y = p_.has_targets ? index_at(c_.in.targets, t) : -1;
    const float all = g * r.spread + g_lse;
    const bool plain = g_entropy == 0 && r.smooth == 0 && r.soft == 0 && cap == 0;
    const float p_target = y >= 0 ? p[y] : 0;
    const float target = g * ((p_target - 1) * r.hard + p_target * r.rest) + g_lse * p_target;
    if (plain) {
      for (int64_t v = 0; v < n; ++v) p[v] *= all;
      if (y >= 0) p[y] = target;
      store(p, b_.dz, t);
      return;
    }
    for (int64_t v = 0; v < n; ++v) {
      float dz = v == y ? target : all * p[v];
      if (r.smooth != 0) dz -= g * r.smooth * class_weight(v);
      if (r.soft != 0 && q[v] != 0) dz -= g * r.soft * class_weight(v) * q[v];
      if (g_entropy != 0 && p[v] != 0) dz -= g_entropy * p[v] * (z[v] - r.lse + r.entropy);
      if (cap > 0) dz *= 1 - (z[v] / cap) * (z[v] / cap);
      p[v] = dz;
    }
    store(p, b_.dz, t);
  }

  int64_t count_hits() const {
    if (!p_.wants_accuracy) return 0;
    int64_t hits = 0;
#pragma omp parallel for reduction(+ : hits) num_threads(threads_)
    for (int64_t t = 0; t < p_.tokens; ++t) {
      if (!is_valid(t)) continue;
      float* z = row_buffer(0);
      load(b_.z, t, z);
      const float max = talea::cpu::row_max(z, p_.vocab_local);
      if (!std::isfinite(max)) continue;  // a NaN row has no best entry
      hits += std::find(z, z + p_.vocab_local, max) - z == index_at(c_.in.targets, t) ? 1 : 0;
    }
    return hits;
  }

  void gradients() {
    const int64_t n = p_.tokens, d = p_.hidden, v = p_.vocab_local;
    if (p_.wants_db) sum_db();
    if (p_.options.logit_scale != 1 || c_.in.token_scale) scale_hidden();
    const MatrixView dz = cells(b_.dz);
    if (p_.wants_dx) multiply(dz, view(c_.in.weight), n, d, v, b_.dx, d);
    if (p_.wants_dw) multiply(dz.transposed(), hidden(0), v, d, n, b_.dw, d);
    store_gradients();
  }

  void sum_db() {
    constexpr int64_t block = 1024;
#pragma omp parallel for num_threads(threads_)
    for (int64_t v0 = 0; v0 < p_.vocab_local; v0 += block) {
      const int64_t columns = std::min(block, p_.vocab_local - v0);
      float* row = row_buffer(0);
      std::fill_n(b_.db + v0, columns, 0.0f);
      for (int64_t t = 0; t < p_.tokens; ++t) {
        load_row(b_.dz, p_.hidden_dtype, t * p_.vocab_local + v0, 1, columns, row);
        for (int64_t i = 0; i < columns; ++i) b_.db[v0 + i] += row[i];
      }
    }
  }

  // dW = dz^T (s x) and dX = s (dz W): the scale meets fp32 numbers, so dz is rounded only once.
  void scale_hidden() {
#pragma omp parallel for num_threads(threads_)
    for (int64_t t = 0; t < p_.tokens; ++t) {
      float* row = b_.x + t * p_.hidden;
      const float s = scale(t);
      for (int64_t i = 0; i < p_.hidden; ++i) row[i] *= s;
    }
  }

  void store_gradients() {
    const Outputs& out = c_.out;
    const int64_t d = p_.hidden;
    for (int64_t t = 0; p_.wants_dx && t < p_.tokens; ++t) {
      const RowKind kind = row_kind(p_, c_.in, t);
      float* row = b_.dx + t * d;
      const float s = scale(t);
      for (int64_t i = 0; s != 1 && i < d; ++i) row[i] *= s;
      if (kind != RowKind::valid) std::fill_n(row, d, kind == RowKind::poisoned ? NAN : 0.0f);
      store_row(row, d, out.dx.data, out.dx.dtype, t * out.dx.stride[0], out.dx.stride[1]);
    }
    for (int64_t v = 0; p_.wants_dw && v < p_.vocab_stored; ++v) {
      const bool padding = v >= p_.vocab_local;
      const int64_t first = v * out.dw.stride[0];
      if (!padding && !out.accumulate_dw) {
        store_row(b_.dw + v * d, d, out.dw.data, out.dw.dtype, first, out.dw.stride[1]);
        continue;
      }
      if (padding && out.accumulate_dw) continue;
      for (int64_t i = 0; i < d; ++i)
        put(out.dw, v, i, padding ? 0.0 : at(out.dw, v, i) + double{b_.dw[v * d + i]});
    }
    for (int64_t v = 0; p_.wants_db && v < p_.vocab_stored; ++v) {
      const double value = v < p_.vocab_local ? b_.db[v] : 0.0;
      if (!out.accumulate_db)
        put(out.db, v, value);
      else if (v < p_.vocab_local)
        put(out.db, v, at(out.db, v) + value);
    }
  }

  const Call& c_;
  const Problem& p_;
  const int threads_;
  Arena arena_;
  Buffers b_;
  const int64_t k_;
  TargetFacts facts_;
  Normaliser m_;
};

std::optional<std::string> decline(const Problem& p, const DeviceFacts&) {
  if (p.device != DeviceKind::cpu)
    return "reads host memory only; the tensors are on a CUDA device";
  if (p.world > 1)
    return fmt::format("{} vocabulary ranks: the comparison lane runs in a world of one", p.world);
  if (p.hidden_dtype == DType::f64) return "fp64 hidden: this lane multiplies in fp32";
  return std::nullopt;
}

Planned plan(const Problem& p, const DeviceFacts& device) {
  const int threads = threads_of(p, device);
  Arena arena;
  Buffers layout(arena, p, threads);
  return planned(arena.bytes(), product_flops(p), threads);
}

void run(const Call& c, const Planned& plan) {
  Unfused(c, plan.as<int>()).run();
  const Problem& p = c.problem;
  Result& r = c.result;
  r.logits_home = std::string("full tensor in ") + name_of(p.hidden_dtype);
  r.logits_tile_rows = p.tokens;
  r.logits_tile_columns = p.vocab_local;
  r.logits_tile_bytes = p.tokens * p.vocab_local * size_of(p.hidden_dtype);
  r.full_logits_tensor = true;
  r.chunk_rows = p.tokens;
  r.chunks = 1;
  r.accumulator_softmax = "fp32 over logits in the input dtype";
  r.accumulator_dx = r.accumulator_dw = "fp32 over logit gradients in the input dtype";
  r.accumulator_loss = "fp64 in row order";
  r.upstream_handling = "applied to each row of the materialised gradient";
  r.merges = "none: each row is whole";
}

}  // namespace

Lane unfused_lane() {
  return {.name = "unfused",
          .kind = "unfused comparison",
          .reach = Reach::by_name,
          .by_name_why = "materialises the logits; only when asked for by name",
          .decline = decline,
          .plan = plan,
          .details =
              [](const Problem&, const Planned& plan) {
                return std::vector<std::string>{"logits = full tensor",
                                                fmt::format("threads = {}", plan.as<int>())};
              },
          .run = run};
}

}  // namespace talea::lce
