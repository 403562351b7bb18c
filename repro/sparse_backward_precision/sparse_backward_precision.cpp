// What: dkv accumulated in 16 bits beside fp32 accumulation, over growing contexts; and what the
//       rounding of P, dS and o costs at one length.
// Why: a key that every query selects sums as many terms as there are queries.
// Never: accumulates our dkv in fewer than 32 bits.
#include <fmt/format.h>

#include <cmath>

#include "repro/support/sparse.hpp"

namespace talea::repro {
namespace {

// Every query selects key 0, and three others.
SparseData one_key_for_all(int64_t queries) {
  SparseData d = make_sparse(queries, 256, 1, 16, 16, 4, 101, DType::bf16);
  d.gradients = DType::f32;
  for (int64_t s = 0; s < queries; ++s) {
    auto* row = &d.indices[static_cast<size_t>(s * 4)];
    for (int64_t k = 0; k < 4; ++k)
      row[k] = static_cast<int32_t>(k == 0 ? 0 : 1 + (3 * s + k) % 255);
  }
  return d;
}

std::vector<double> key_zero(const std::vector<double>& dkv, int64_t dim) {
  return {dkv.begin(), dkv.begin() + dim};
}

// The rows of contributions of each query to key 0, added up in bf16.
std::vector<double> in_sixteen_bits(const SparseData& d) {
  std::vector<double> sum(static_cast<size_t>(d.dim), 0);
  for (int64_t s = 0; s < d.queries; ++s) {
    const float* q = &d.q[static_cast<size_t>(s * d.dim)];
    const float* g = &d.d_o[static_cast<size_t>(s * d.dim)];
    const float scale = 1.f / std::sqrt(static_cast<float>(d.dim));
    float logit[4], dp[4], l = 0, delta = 0;
    for (int64_t k = 0; k < 4; ++k) {
      const auto j = static_cast<size_t>(d.indices[static_cast<size_t>(s * 4 + k)] * d.dim);
      float dot = 0, dv = 0;
      for (int64_t c = 0; c < d.dim; ++c) {
        dot += q[c] * d.kv[j + static_cast<size_t>(c)];
        dv += g[c] * d.kv[j + static_cast<size_t>(c)];
      }
      logit[k] = std::exp(dot * scale);
      dp[k] = dv;
      l += logit[k];
    }
    for (int64_t k = 0; k < 4; ++k) delta += logit[k] / l * dp[k];
    const float p = logit[0] / l, ds = p * (dp[0] - delta);
    for (int64_t c = 0; c < d.dim; ++c) {
      double& at = sum[static_cast<size_t>(c)];
      at =
          static_cast<double>(round_to_bf16(static_cast<float>(at) + scale * ds * q[c] + p * g[c]));
    }
  }
  return sum;
}

void over_lengths(Report& r) {
  for (const int64_t queries : {256, 1024, 4096, 16384, 65536}) {
    const SparseData d = one_key_for_all(queries);
    const std::vector<double> truth = key_zero(attend(d, "reference").dkv, d.dim);
    const double bad = relative_l2(in_sixteen_bits(d), truth);
    if (queries >= 4096)
      r.broken(fmt::format("dkv of a key of {} queries, added up in bf16", queries), bad, 1e-2);
    else
      r.figure(fmt::format("dkv of a key of {} queries, added up in bf16", queries), bad);
    const double good =
        r.fix_disabled() ? bad : relative_l2(key_zero(attend(d, "auto").dkv, d.dim), truth);
    r.ours(fmt::format("dkv of a key of {} queries", queries), good, 5e-3);
  }
}

// Section 4's rows at one length: what is rounded, and what that leaves.
void over_operands(Report& r) {
  for (const bool peaked : {false, true}) {
    SparseData d = make_sparse(96, 256, 8, 64, 32, 64, 103, DType::bf16);
    if (peaked)
      for (float& v : d.q) v *= 4;  // a power of two: bf16 still holds it
    d.sink.assign(8, 1.f);
    d.gradients = DType::f32;
    const SparseAnswer truth = attend(d, "reference");
    const char* shape = peaked ? "peaked" : "flat";
    for (const bool split : {false, true})
      for (const bool residual : {false, true}) {
        d.options.operands = split ? sa::Operands::split : sa::Operands::native;
        d.residual = residual;
        const SparseAnswer have = attend(d, "auto");
        const std::string name = fmt::format("{}, {}{}", shape, split ? "split" : "native",
                                             residual ? ", o_residual" : "");
        const double dkv = relative_l2(have.dkv, truth.dkv);
        const double sink = relative_l2(have.d_sink, truth.d_sink);
        if (split && residual) {
          r.ours("dkv, " + name, r.fix_disabled() ? 1 : dkv, 2e-5);
          r.ours("d_sink, " + name, r.fix_disabled() ? 1 : sink, 2e-5);
        } else {
          r.figure("dkv, " + name, dkv);
          r.figure("d_sink, " + name, sink);
        }
      }
  }
}

void run_all(Report& r) {
  over_lengths(r);
  over_operands(r);
}

}  // namespace

extern const Reproducer sparse_backward_precision{
    "sparse_backward_precision", "SA24 SA25",
    "dkv added up in 16 bits drifts with the context; P, dS and o rounded do not", run_all};

}  // namespace talea::repro
