// What: the scale of an FP8 tile kept as an exponent, or taken through bf16.
// Why: a reader that cuts the scale is exact for powers of two and off by up to a factor of 2.
// Never: rounds a scale.
#include <cmath>
#include <cstring>

#include "core/half.hpp"
#include "repro/support/sparse.hpp"

namespace talea::repro {
namespace {

constexpr int64_t rows = 64, dim = 128;

struct Fp8Rows {
  std::vector<uint8_t> bytes;
  std::vector<float> scale;  // one a row
};

// amax / 448, as most writers in the field store it.
Fp8Rows quantised(const SparseData& d) {
  Fp8Rows q;
  for (int64_t j = 0; j < rows; ++j) {
    float largest = 0;
    for (int64_t c = 0; c < dim; ++c)
      largest = std::max(largest, std::abs(d.kv[static_cast<size_t>(j * dim + c)]));
    q.scale.push_back(largest / 448);
    for (int64_t c = 0; c < dim; ++c)
      q.bytes.push_back(float_to_e4m3(d.kv[static_cast<size_t>(j * dim + c)] / q.scale.back()));
  }
  return q;
}

std::vector<double> dequantised(const Fp8Rows& q, const std::function<float(float)>& read) {
  std::vector<double> v;
  for (size_t i = 0; i < q.bytes.size(); ++i)
    v.push_back(static_cast<double>(e4m3_to_float(q.bytes[i]) * read(q.scale[i / dim])));
  return v;
}

// Attention over the rows with the scales as `read` takes them; the plain tensors give the lists.
std::vector<double> attended(const SparseData& d, const Fp8Rows& q,
                             const std::function<float(float)>& read, const char* lane) {
  SparseData copy = d;
  const std::vector<double> kv = dequantised(q, read);
  copy.kv.assign(kv.begin(), kv.end());
  return attend(copy, lane).o;
}

// The storage itself, by the operator.
std::vector<double> by_storage(const SparseData& d, const Fp8Rows& q) {
  std::vector<float> o(static_cast<size_t>(d.queries * d.heads * d.value_dim));
  sa::Inputs in;
  in.q = make_tensor(d.q.data(), DType::f32, {d.queries, d.heads, dim});
  in.kv = make_tensor(q.bytes.data(), DType::f8_e4m3, {rows, dim});
  in.kv_scale = make_tensor(q.scale.data(), DType::f32, {rows});
  in.indices = make_tensor(d.indices.data(), DType::i32, {d.queries, d.slots});
  sa::Outputs out;
  out.o = make_tensor(o.data(), DType::f32, {d.queries, d.heads, d.value_dim});
  sa::Options options = d.options;
  options.kv_storage = sa::KvStorage::fp8_scaled;
  const int64_t bytes = sa::workspace_bytes(sa::describe(sa::Pass::forward, in, out, options));
  std::vector<char> workspace(static_cast<size_t>(bytes));
  sa::forward(in, out, options, {workspace.data(), bytes});
  return {o.begin(), o.end()};
}

float as_is(float scale) { return scale; }
float exponent_only(float scale) { return std::exp2(std::floor(std::log2(scale))); }

void run_all(Report& r) {
  SparseData d = make_sparse(16, rows, 4, dim, 64, 16, 71);
  d.d_o.clear();
  const Fp8Rows q = quantised(d);
  const std::vector<double> values = dequantised(q, as_is);
  const std::vector<double> truth = attended(d, q, as_is, "reference");
  r.broken("dequantised values, scale kept as an exponent",
           relative_l2(dequantised(q, exponent_only), values), 0.1);
  r.broken("dequantised values, scale through bf16",
           relative_l2(dequantised(q, round_to_bf16), values), 5e-4);
  const std::vector<double> bad = attended(d, q, exponent_only, "auto");
  r.broken("o, scale kept as an exponent", relative_l2(bad, truth), 0.05);
  r.ours("o with any positive scale", relative_l2(r.fix_disabled() ? bad : by_storage(d, q), truth),
         1e-5);
}

}  // namespace

extern const Reproducer scale_formats{"scale_formats", "SA18 SA20",
                                      "an FP8 scale cut to its exponent, or to bf16", run_all};

}  // namespace talea::repro
