// What: see sparse.hpp.
// Why: see sparse.hpp.
// Never: holds a broken pattern.
#include "repro/support/sparse.hpp"

#include <algorithm>
#include <cmath>
#include <random>

#include "core/half.hpp"
#include "ops/sparse_attention/fields.hpp"
#include "repro/support/on_device.hpp"

namespace talea::repro {
namespace {

// Memory of one tensor in a dtype, filled from floats and read as doubles.
struct Buffer {
  std::vector<char> bytes;
  DType dtype = DType::f32;
  int64_t count = 0;

  Buffer(DType kind, int64_t n)
      : bytes(static_cast<size_t>(n * size_of(kind))), dtype(kind), count(n) {}
  Buffer(DType kind, const std::vector<float>& values)
      : Buffer(kind, static_cast<int64_t>(values.size())) {
    for (int64_t i = 0; i < count; ++i)
      store_element(bytes.data(), dtype, i, static_cast<double>(values[static_cast<size_t>(i)]));
  }
  std::vector<double> values() const {
    std::vector<double> v(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i)
      v[static_cast<size_t>(i)] = load_element(bytes.data(), dtype, i);
    return v;
  }
};

void normal(std::vector<float>& to, int64_t n, std::mt19937_64& engine, DType dtype) {
  std::normal_distribution<float> draw;
  Buffer one(dtype, 1);
  to.resize(static_cast<size_t>(n));
  for (float& v : to) {
    store_element(one.bytes.data(), dtype, 0, static_cast<double>(draw(engine)));
    v = static_cast<float>(load_element(one.bytes.data(), dtype, 0));
  }
}

// A pass on copies in device memory.
template <typename Call>
sa::Result on_device(sa::Pass pass, sa::Inputs in, sa::Outputs out, const sa::Options& options,
                     const Call& call) {
  OnDevice there;
  for (const auto& f : sa::input_fields) there.take(in.*f.member, false);
  for (const auto& f : sa::output_fields) there.take(out.*f.member, true);
  const int64_t bytes = sa::workspace_bytes(sa::describe(pass, in, out, options));
  sa::Result r = call(in, out, options, there.workspace(bytes), {}, there.stream());
  there.finish();
  return r;
}

sa::Result run_pass(sa::Pass pass, const sa::Inputs& in, const sa::Outputs& out,
                    const sa::Options& options) {
  const auto call = pass == sa::Pass::forward ? sa::forward : sa::backward;
  if (device_in_use() && options.lane == "auto") return on_device(pass, in, out, options, call);
  const int64_t bytes = sa::workspace_bytes(sa::describe(pass, in, out, options));
  std::vector<char> workspace(static_cast<size_t>(bytes));
  return call(in, out, options, {workspace.data(), bytes}, {}, nullptr);
}

}  // namespace

SparseData make_sparse(int64_t queries, int64_t keys, int64_t heads, int64_t dim, int64_t value_dim,
                       int64_t slots, uint64_t seed, DType dtype) {
  SparseData d;
  d.queries = queries, d.keys = keys, d.heads = heads;
  d.dim = dim, d.value_dim = value_dim, d.slots = slots;
  d.dtype = d.gradients = dtype;
  std::mt19937_64 engine(seed);
  normal(d.q, queries * heads * dim, engine, dtype);
  normal(d.kv, keys * dim, engine, dtype);
  normal(d.d_o, queries * heads * value_dim, engine, dtype);
  d.indices.assign(static_cast<size_t>(queries * slots), -1);
  // A stride that is prime to nothing in particular visits keys without repeating one.
  for (int64_t s = 0; s < queries; ++s) {
    auto* row = &d.indices[static_cast<size_t>(s * slots)];
    const int64_t take = std::min(slots, keys),
                  step = std::max<int64_t>(keys / std::max<int64_t>(take, 1), 1);
    for (int64_t i = 0; i < take; ++i) row[i] = static_cast<int32_t>((i * step + s) % keys);
    std::sort(row, row + take);
  }
  d.options.value_dim = value_dim;
  return d;
}

SparseAnswer attend(const SparseData& d, const std::string& lane) {
  const bool truth = lane == "reference";
  const DType kind = truth ? DType::f64 : d.dtype, grad = truth ? DType::f64 : d.gradients;
  const int64_t n = d.queries, h = d.heads;
  const Buffer q(kind, d.q), kv(kind, d.kv), d_o(kind, d.d_o);
  Buffer o(kind, n * h * d.value_dim), residual(kind, d.residual && !truth ? o.count : 0);
  Buffer lse(DType::f32, n * h), row_max(DType::f32, n * h);
  Buffer dq(grad, q.count), dkv(grad, kv.count);
  Buffer d_sink(DType::f32, static_cast<int64_t>(d.sink.size()));
  SparseAnswer a;
  sa::Inputs in;
  in.q = make_tensor(q.bytes.data(), kind, {n, h, d.dim});
  in.kv = make_tensor(kv.bytes.data(), kind, {d.keys, d.dim});
  in.indices = make_tensor(d.indices.data(), DType::i32, {n, d.slots});
  if (!d.topk_length.empty()) in.topk_length = make_tensor(d.topk_length.data(), DType::i32, {n});
  if (!d.sink.empty()) in.sink = make_tensor(d.sink.data(), DType::f32, {h});
  sa::Outputs out;
  out.o = make_tensor(o.bytes.data(), kind, {n, h, d.value_dim});
  out.lse = make_tensor(lse.bytes.data(), DType::f32, {n, h});
  out.row_max = make_tensor(row_max.bytes.data(), DType::f32, {n, h});
  out.status = make_tensor(a.status, DType::i64, {4});
  if (residual.count)
    out.o_residual = make_tensor(residual.bytes.data(), kind, {n, h, d.value_dim});
  sa::Options options = d.options;
  options.lane = lane;
  a.forward = run_pass(sa::Pass::forward, in, out, options);
  a.o = o.values(), a.lse = lse.values(), a.row_max = row_max.values();
  if (d.d_o.empty()) return a;
  in.d_o = make_tensor(d_o.bytes.data(), kind, {n, h, d.value_dim});
  if (!d.d_lse.empty()) in.d_lse = make_tensor(d.d_lse.data(), DType::f32, {n, h});
  // The truth recomputes its own, since lse is stored in fp32.
  if (!truth) in.o = out.o, in.lse = out.lse, in.o_residual = out.o_residual;
  sa::Outputs back;
  back.dq = make_tensor(dq.bytes.data(), grad, {n, h, d.dim});
  back.dkv = make_tensor(dkv.bytes.data(), grad, {d.keys, d.dim});
  if (!d.sink.empty()) back.d_sink = make_tensor(d_sink.bytes.data(), DType::f32, {h});
  a.backward = run_pass(sa::Pass::backward, in, back, options);
  a.dq = dq.values(), a.dkv = dkv.values(), a.d_sink = d_sink.values();
  return a;
}

SparseAnswer plain_attention(const SparseData& d) {
  SparseAnswer a;
  a.o.assign(static_cast<size_t>(d.queries * d.heads * d.value_dim), 0);
  a.lse.assign(static_cast<size_t>(d.queries * d.heads), 0);
  const float scale = 1.f / std::sqrt(static_cast<float>(d.dim));
  std::vector<float> logits(static_cast<size_t>(d.slots));
  for (int64_t s = 0; s < d.queries; ++s)
    for (int64_t h = 0; h < d.heads; ++h) {
      const int64_t row = s * d.heads + h;
      float top = -INFINITY, sum = 0;
      for (int64_t k = 0; k < d.slots; ++k) {
        const int32_t j = d.indices[static_cast<size_t>(s * d.slots + k)];
        float dot = -INFINITY;
        if (j >= 0) {
          dot = 0;
          for (int64_t c = 0; c < d.dim; ++c)
            dot += d.q[static_cast<size_t>(row * d.dim + c)] *
                   d.kv[static_cast<size_t>(j * d.dim + c)];
          dot *= scale;
        }
        logits[static_cast<size_t>(k)] = dot;
        top = std::max(top, dot);
      }
      for (float& x : logits) sum += x = std::exp(x - top);  // NaN where nothing is valid
      a.lse[static_cast<size_t>(row)] = top + std::log(sum);
      for (int64_t k = 0; k < d.slots; ++k) {
        const int64_t j = std::max(0, d.indices[static_cast<size_t>(s * d.slots + k)]);
        for (int64_t c = 0; c < d.value_dim; ++c)
          a.o[static_cast<size_t>(row * d.value_dim + c)] +=
              logits[static_cast<size_t>(k)] / sum * d.kv[static_cast<size_t>(j * d.dim + c)];
      }
    }
  return a;
}

Selected select_keys(const IndexData& d, const std::string& lane) {
  Selected s;
  s.indices.resize(static_cast<size_t>(d.queries * d.slots));
  s.length.resize(static_cast<size_t>(d.queries));
  s.scores.resize(s.indices.size());
  sa::SelectInputs in;
  in.index_q = make_tensor(d.q.data(), DType::f32, {d.queries, d.heads, d.dim});
  in.index_k = make_tensor(d.k.data(), DType::f32, {d.keys, d.dim});
  in.index_weights = make_tensor(d.weights.data(), DType::f32, {d.queries, d.heads});
  if (!d.end.empty()) in.end = make_tensor(d.end.data(), DType::i32, {d.queries});
  sa::SelectOutputs out;
  out.indices = make_tensor(s.indices.data(), DType::i32, {d.queries, d.slots});
  out.topk_length = make_tensor(s.length.data(), DType::i32, {d.queries});
  out.scores = make_tensor(s.scores.data(), DType::f32, {d.queries, d.slots});
  sa::SelectOptions options;
  options.lane = lane;
  options.threads = 1;  // also called in a forked child, which has no thread pool
  if (device_in_use() && lane == "auto") {
    OnDevice there;
    for (const auto& f : sa::select_input_fields) there.take(in.*f.member, false);
    for (const auto& f : sa::select_output_fields) there.take(out.*f.member, true);
    const int64_t bytes = sa::workspace_bytes(sa::describe(in, out, options));
    s.result = sa::select(in, out, options, there.workspace(bytes), {}, there.stream());
    there.finish();
    return s;
  }
  const int64_t bytes = sa::workspace_bytes(sa::describe(in, out, options));
  std::vector<char> workspace(static_cast<size_t>(bytes));
  s.result = sa::select(in, out, options, {workspace.data(), bytes});
  return s;
}

float index_score(const IndexData& d, int64_t query, int64_t key) {
  float sum = 0;
  for (int64_t h = 0; h < d.heads; ++h) {
    float dot = 0;
    for (int64_t c = 0; c < d.dim; ++c)
      dot += d.q[static_cast<size_t>((query * d.heads + h) * d.dim + c)] *
             d.k[static_cast<size_t>(key * d.dim + c)];
    sum += d.weights[static_cast<size_t>(query * d.heads + h)] * std::max(dot, 0.f);
  }
  return sum;
}

}  // namespace talea::repro
