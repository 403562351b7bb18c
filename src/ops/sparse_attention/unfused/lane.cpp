// What: dense scores [B, H, S, S_kv] under the multiplicity mask: what a framework would do.
// Why: the intentional comparison, in memory and in time, for the lanes that never form them.
// Never: chosen by itself; only by name.
#include <algorithm>
#include <cmath>

#include "core/arena.hpp"
#include "device/cpu/matrix_product.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/sparse_attention/sharded.hpp"

namespace talea::sparse_attention {
namespace {

using talea::cpu::matrix_product;
using talea::cpu::MatrixView;

int threads_of(const Problem& p, const DeviceFacts& device) {
  return p.options.threads > 0 ? p.options.threads : device.threads;
}

struct Buffers {
  float *scores, *mask, *other, *rows, *scratch, *dkv, *o, *dq;
  double* d_sink;

  Buffers(const Problem& p, int threads, Arena& arena) {
    const int64_t pairs = p.queries * p.keys;
    const bool backward = p.pass == Pass::backward;
    scores = arena.take<float>(p.batch * p.heads * pairs);
    mask = arena.take<float>(p.batch * p.groups * pairs);
    other = arena.take<float>(backward ? pairs : 0);  // dP, then dS
    rows = arena.take<float>(p.keys * p.dim);
    scratch = arena.take<float>(threads * talea::cpu::matrix_product_scratch);
    dkv = arena.take<float>(p.wants_dkv ? p.batch * p.keys * p.groups * p.dim : 0);
    o = arena.take<float>(p.value_dim);
    dq = arena.take<float>(backward ? p.dim : 0);
    d_sink = arena.take<double>(backward ? p.heads : 0);
  }
};

struct Unfused {
  static std::optional<std::string> decline(const Problem& p, const DeviceFacts&);
  static Planned plan(const Problem& p, const DeviceFacts& device);
  static std::vector<std::string> details(const Problem& p, const Planned&);
  static void run(const Call& c, const Planned&);
};

std::optional<std::string> Unfused::decline(const Problem& p, const DeviceFacts&) {
  if (p.device != DeviceKind::cpu) return "device tensors: this lane reads host memory";
  if (p.pass == Pass::select || p.pass == Pass::index_loss)
    return "select and index_loss: no dense form in this lane";
  if (p.q_dtype == DType::f64) return "fp64: lane reference only";
  if (p.options.kv_storage != KvStorage::plain) return "kv_storage: plain rows only";
  if (is_paged(p)) return "paged kv: dense scores have one column a row of kv";
  if (p.options.dkv_sum == DkvSum::atomic)
    return "dkv_sum = atomic: host lanes sum in a fixed order only";
  return std::nullopt;
}

Planned Unfused::plan(const Problem& p, const DeviceFacts& device) {
  Arena arena;
  Buffers(p, threads_of(p, device), arena);
  return {.workspace_bytes = arena.bytes()};
}

std::vector<std::string> Unfused::details(const Problem& p, const Planned&) {
  return {fmt::format("scores = {} bytes", 4 * p.batch * p.heads * p.queries * p.keys)};
}

class Dense {
 public:
  explicit Dense(const Call& c)
      : p_(c.problem),
        a_(c.args),
        threads_(threads_of(p_, c.device)),
        arena_(c.workspace),
        w_(p_, threads_, arena_) {}

  void run() {
    count_slots();
    if (w_.dkv) std::fill_n(w_.dkv, p_.batch * p_.keys * p_.groups * p_.dim, 0.0f);
    if (w_.d_sink) std::fill_n(w_.d_sink, p_.heads, 0.0);
    for (int64_t b = 0; b < p_.batch; ++b)
      for (int64_t g = 0; g < p_.groups; ++g) {
        widen(b, g);
        const HeadRange heads = heads_of(p_, g);
        for (int64_t h = heads.first; h < heads.last; ++h) head(b, g, h);
      }
    if (a_.dkv) write_dkv();
    for (int64_t h = 0; a_.d_sink && h < p_.heads; ++h) a_.d_sink.put(w_.d_sink[h], h);
  }

 private:
  float* scores(int64_t b, int64_t h) const {
    return w_.scores + (b * p_.heads + h) * p_.queries * p_.keys;
  }
  const float* mask(int64_t b, int64_t g) const {
    return w_.mask + (b * p_.groups + g) * p_.queries * p_.keys;
  }

  // ln(number of valid slots that name a key), -Inf for none.
  void count_slots() {
    const KeyRule rule = key_rule(p_);
    std::fill_n(w_.mask, p_.batch * p_.groups * p_.queries * p_.keys, 0.0f);
    for (int64_t b = 0; b < p_.batch; ++b)
      for (int64_t s = 0; s < p_.queries; ++s) {
        const QueryRule query = query_rule(p_, a_, b, s);
        for (int64_t g = 0; g < p_.groups; ++g)
          for (int64_t k = 0; k < query.slots; ++k) {
            const KeyRow row = find_key(rule, query, k, a_.indices.integer(b, s, g, k));
            if (row.kind == SlotKind::valid)
              w_.mask[((b * p_.groups + g) * p_.queries + s) * p_.keys + row.inner] += 1;
          }
      }
    for (int64_t i = 0; i < p_.batch * p_.groups * p_.queries * p_.keys; ++i)
      w_.mask[i] = std::log(w_.mask[i]);
  }

  void widen(int64_t b, int64_t g) {
    for (int64_t j = 0; j < p_.keys; ++j)
      talea::cpu::load_row(a_.kv.data, a_.kv.dtype, a_.kv.at(b, j, g), 1, p_.dim,
                           w_.rows + j * p_.dim);
  }

  // [queries, keys] = x [queries, columns] rows^T.
  void against_keys(const View& x, int64_t b, int64_t h, int64_t columns, float* to) {
    talea::cpu::MatrixProduct t;
    t.a = {x.address(x.at(b, 0, h)), x.dtype, x.stride[1], 1};
    t.b = MatrixView{w_.rows, DType::f32, p_.dim, 1}.transposed();
    t.c = to;
    t.c_stride = p_.keys;
    t.m = p_.queries, t.n = p_.keys, t.k = columns;
    t.threads = threads_;
    t.scratch = w_.scratch;
    matrix_product(t);
  }

  void head(int64_t b, int64_t g, int64_t h) {
    if (p_.queries == 0) return;
    if (p_.keys > 0) against_keys(a_.q, b, h, p_.dim, scores(b, h));
    if (w_.other && a_.d_o && p_.keys > 0) against_keys(a_.d_o, b, h, p_.value_dim, w_.other);
    if (w_.other && !a_.d_o) std::fill_n(w_.other, p_.queries * p_.keys, 0.0f);
    for (int64_t s = 0; s < p_.queries; ++s) {
      const float* m = mask(b, g) + s * p_.keys;
      float* row = scores(b, h) + s * p_.keys;
      const Softmax f = softmax(m, row, h);
      if (p_.pass == Pass::forward)
        write(b, s, h, f);
      else
        gradient(b, g, s, h, m, row, f);
    }
  }

  struct Softmax {
    double max = -INFINITY, lse = INFINITY, sink = -INFINITY, sum = 0;
    LogSum all, whole;  // lse; with the sink
    bool empty = true;
  };

  // row: products in, scaled scores out; the row's o into w_.o.
  Softmax softmax(const float* m, float* row, int64_t h) {
    Softmax f;
    f.sink = a_.sink ? a_.sink.get(h) : -INFINITY;
    std::fill_n(w_.o, p_.value_dim, 0.0f);
    const auto scale = static_cast<float>(p_.scale);
    for (int64_t j = 0; j < p_.keys; ++j) {
      if (m[j] == -INFINITY) continue;
      f.empty = false;
      row[j] *= scale;
      const auto s = static_cast<double>(row[j]);
      f.max = s > f.max || std::isnan(s) ? s : f.max;
    }
    if (f.empty) return f;
    if (f.max == -INFINITY && f.sink > -INFINITY) {
      f.lse = -INFINITY;
      f.all = {-INFINITY, 0};
      f.whole = {f.sink, 0};
      return f;
    }
    for (int64_t j = 0; j < p_.keys; ++j)
      if (m[j] > -INFINITY)
        f.sum += std::exp(static_cast<double>(row[j]) - f.max + static_cast<double>(m[j]));
    f.lse = std::isnan(f.sum) ? NAN : f.max + std::log(f.sum);
    f.all = log_sum(f.max, f.sum, -INFINITY);
    f.whole = log_sum(f.max, f.sum, f.sink);
    for (int64_t j = 0; j < p_.keys; ++j)
      if (m[j] > -INFINITY) add(weight(row[j], m[j], f.whole), w_.rows + j * p_.dim, w_.o);
    return f;
  }

  static float weight(float s, float m, const LogSum& whole) {
    const double distance = static_cast<double>(s) - whole.base;
    return static_cast<float>(std::exp(distance + static_cast<double>(m) - whole.rest));
  }
  void add(float x, const float* row, float* to) const {
    for (int64_t c = 0; c < p_.value_dim; ++c) to[c] += x * row[c];
  }

  void write(int64_t b, int64_t s, int64_t h, const Softmax& f) {
    for (int64_t c = 0; c < p_.value_dim; ++c) {
      const auto o = static_cast<double>(w_.o[c]);
      if (a_.o) a_.o.put(o, b, s, h, c);
      if (a_.o_residual) a_.o_residual.put(o - a_.o.get(b, s, h, c), b, s, h, c);
    }
    if (a_.lse) a_.lse.put(f.lse, b, s, h);
    if (a_.row_max) a_.row_max.put(f.max, b, s, h);
  }

  void gradient(int64_t b, int64_t g, int64_t s, int64_t h, const float* m, const float* row,
                const Softmax& own) {
    Softmax f = own;
    double delta = 0;
    for (int64_t c = 0; c < p_.value_dim; ++c) {
      double o = static_cast<double>(w_.o[c]);
      if (a_.saved_o) o = a_.saved_o.get(b, s, h, c);
      if (a_.saved_o_residual) o += a_.saved_o_residual.get(b, s, h, c);
      if (a_.d_o) delta += o * a_.d_o.get(b, s, h, c);
    }
    if (a_.saved_lse) {
      f.lse = a_.saved_lse.get(b, s, h);
      if (!is_own(f.lse, f.max, f.sum)) {
        f.all = {f.lse, 0};
        f.whole = {log_add(f.lse, f.sink), 0};
      }
    }
    std::fill_n(w_.dq, p_.dim, 0.0f);
    const float* dp = w_.other + s * p_.keys;
    const double d_lse = a_.d_lse ? a_.d_lse.get(b, s, h) : 0;
    for (int64_t j = 0; j < p_.keys; ++j) {
      if (m[j] == -INFINITY) continue;
      const float p = weight(row[j], m[j], f.whole);
      double ds = static_cast<double>(p) * (static_cast<double>(dp[j]) - delta);
      if (a_.d_lse) ds += static_cast<double>(weight(row[j], m[j], f.all)) * d_lse;
      const auto scaled = static_cast<float>(p_.scale * ds);
      const float* k = w_.rows + j * p_.dim;
      for (int64_t c = 0; c < p_.dim; ++c) w_.dq[c] += scaled * k[c];
      if (w_.dkv) add_key(b, g, s, h, j, scaled, p);
    }
    for (int64_t c = 0; a_.dq && c < p_.dim; ++c)
      a_.dq.put(static_cast<double>(w_.dq[c]), b, s, h, c);
    if (f.empty || f.sink == -INFINITY) return;
    w_.d_sink[h] -= (f.sink == INFINITY ? 1 : f.whole.share(f.sink)) * delta;
  }

  void add_key(int64_t b, int64_t g, int64_t s, int64_t h, int64_t j, float ds, float p) {
    float* to = w_.dkv + ((b * p_.keys + j) * p_.groups + g) * p_.dim;
    for (int64_t c = 0; c < p_.dim; ++c) to[c] += ds * static_cast<float>(a_.q.get(b, s, h, c));
    for (int64_t c = 0; a_.d_o && c < p_.value_dim; ++c)
      to[c] += p * static_cast<float>(a_.d_o.get(b, s, h, c));
  }

  void write_dkv() {
    for (int64_t b = 0; b < p_.batch; ++b)
      for (int64_t j = 0; j < p_.keys; ++j)
        for (int64_t g = 0; g < p_.groups; ++g)
          for (int64_t c = 0; c < p_.dim; ++c) {
            const auto sum =
                static_cast<double>(w_.dkv[((b * p_.keys + j) * p_.groups + g) * p_.dim + c]);
            a_.dkv.put(a_.accumulate_dkv ? a_.dkv.get(b, j, g, c) + sum : sum, b, j, g, c);
          }
  }

  const Problem& p_;
  const Args& a_;
  int threads_;
  Arena arena_;
  Buffers w_;
};

void Unfused::run(const Call& c, const Planned&) {
  const Problem& p = c.problem;
  Result& r = c.result;
  r.scores_home = "dense scores in the workspace";
  r.scores_tile_rows = p.queries;
  r.scores_tile_keys = p.keys;
  r.full_scores_bytes = r.scores_tile_bytes = 4 * p.batch * p.heads * p.queries * p.keys;
  r.kv_path = "every row of a batch entry widened to fp32";
  r.operands = "fp32";
  r.accumulator_o = r.accumulator_dq = r.accumulator_dkv = "fp32";
  r.delta_source = p.has_saved ? "saved o" : "o of the repeated forward, fp32";
  r.dkv_order = "head, query, key";
  Dense(c).run();
}

}  // namespace

Lane unfused_lane() {
  return lane_of_ranks<Unfused>(
      {.name = "unfused",
       .kind = "unfused comparison",
       .reach = Reach::by_name,
       .by_name_why = "materialises the scores; only when asked for by name"});
}

}  // namespace talea::sparse_attention
