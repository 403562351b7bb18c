// What: data, truth, our call and the bookkeeping of sentinels.
// Why: reproducers stay short and cannot print what they did not measure.
// Never: holds a broken pattern.
#include "repro/support/repro.hpp"

#include <cmath>
#include <random>

#include "core/half.hpp"
#include "repro/support/on_device.hpp"

namespace talea::repro {

namespace {

DeviceSession* session = nullptr;

LinearCrossEntropyResult on_host(const LinearCrossEntropyInputs& in,
                                 const LinearCrossEntropyOutputs& out,
                                 const LinearCrossEntropyOptions& options) {
  const auto problem = describe(in, out, options);
  std::vector<char> workspace(static_cast<size_t>(workspace_bytes(problem)));
  return linear_cross_entropy(in, out, options,
                              {workspace.data(), static_cast<int64_t>(workspace.size())});
}

// The same call on copies in device memory.
LinearCrossEntropyResult on_device(LinearCrossEntropyInputs in, LinearCrossEntropyOutputs out,
                                   LinearCrossEntropyOptions options) {
  if (options.target_check == TargetCheck::automatic) options.target_check = TargetCheck::checked;
  OnDevice there;
  for (Tensor* t : {&in.hidden, &in.weight, &in.targets, &in.bias, &in.class_weight,
                    &in.token_weight, &in.upstream})
    there.take(*t, false);
  for (Tensor* t : {&out.loss, &out.lse, &out.dx, &out.dw}) there.take(*t, true);
  const Workspace workspace = there.workspace(workspace_bytes(describe(in, out, options)));
  auto result = linear_cross_entropy(in, out, options, workspace, {}, there.stream());
  there.finish();
  return result;
}

}  // namespace

void run_on(DeviceSession* device) { session = device; }

DeviceSession* device_in_use() { return session; }

int64_t limit_for(int64_t bytes) { return bytes + (session ? int64_t{4} << 20 : 0); }

Data make_data(int64_t tokens, int64_t hidden, int64_t vocab, uint64_t seed, double spread,
               int64_t padding) {
  Data d;
  d.tokens = tokens;
  d.hidden = hidden;
  d.vocab = vocab;
  d.stored = vocab + padding;
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal;
  d.x.resize(static_cast<size_t>(tokens * hidden));
  d.w.resize(static_cast<size_t>(d.stored * hidden));
  d.y.resize(static_cast<size_t>(tokens));
  for (float& v : d.x) v = normal(engine);
  const float scale = static_cast<float>(spread / std::sqrt(static_cast<double>(hidden)));
  for (float& v : d.w) v = scale * normal(engine);
  std::uniform_int_distribution<int64_t> id(0, vocab - 1);
  for (int64_t& v : d.y) v = id(engine);
  return d;
}

Answer run(const Data& data, const std::string& lane) {
  const int64_t n = data.tokens, d = data.hidden;
  const bool none = data.options.reduction == Reduction::none;
  Answer a;
  a.losses.resize(static_cast<size_t>(none ? n : 1));
  a.lse.resize(static_cast<size_t>(n));
  a.dx.resize(data.x.size());
  a.dw.resize(data.w.size());
  LinearCrossEntropyInputs in;
  in.hidden = make_tensor(data.x.data(), DType::f32, {n, d});
  in.weight = make_tensor(data.w.data(), DType::f32, {data.stored, d});
  in.targets = make_tensor(data.y.data(), DType::i64, {n});
  if (!data.bias.empty()) in.bias = make_tensor(data.bias.data(), DType::f32, {data.stored});
  if (!data.class_weight.empty())
    in.class_weight = make_tensor(data.class_weight.data(), DType::f32, {data.vocab});
  if (!data.token_weight.empty())
    in.token_weight = make_tensor(data.token_weight.data(), DType::f32, {n});
  if (!data.upstream.empty())
    in.upstream = none ? make_tensor(data.upstream.data(), DType::f32, {n})
                       : make_tensor(data.upstream.data(), DType::f32, {});
  LinearCrossEntropyOutputs out;
  out.loss = none ? make_tensor(a.losses.data(), DType::f64, {n})
                  : make_tensor(a.losses.data(), DType::f64, {});
  out.lse = make_tensor(a.lse.data(), DType::f64, {n});
  out.dx = make_tensor(a.dx.data(), DType::f64, {n, d});
  out.dw = make_tensor(a.dw.data(), DType::f64, {data.stored, d});
  // The product lanes write gradients in fp32; the truth stays in fp64.
  std::vector<float> dx32, dw32;
  if (lane != "reference") {
    dx32.resize(a.dx.size());
    dw32.resize(a.dw.size());
    out.dx = make_tensor(dx32.data(), DType::f32, {n, d});
    out.dw = make_tensor(dw32.data(), DType::f32, {data.stored, d});
  }
  LinearCrossEntropyOptions options = data.options;
  options.lane = lane;
  options.vocab = data.vocab;
  const auto result =
      session && lane == "auto" ? on_device(in, out, options) : on_host(in, out, options);
  if (lane != "reference") {
    a.dx.assign(dx32.begin(), dx32.end());
    a.dw.assign(dw32.begin(), dw32.end());
  }
  a.loss = a.losses[0];
  a.lane = result.lane;
  a.workspace_bytes = result.workspace_bytes;
  a.full_logits = result.full_logits_tensor;
  return a;
}

std::vector<float> logits_of(const Data& data) {
  std::vector<float> z(static_cast<size_t>(data.tokens * data.stored));
  for (int64_t t = 0; t < data.tokens; ++t)
    for (int64_t v = 0; v < data.stored; ++v) {
      float dot = 0;
      for (int64_t i = 0; i < data.hidden; ++i)
        dot += data.x[t * data.hidden + i] * data.w[v * data.hidden + i];
      z[t * data.stored + v] = dot + (data.bias.empty() ? 0.f : data.bias[v]);
    }
  return z;
}

float round_to_bf16(float value) { return bf16_to_float(float_to_bf16(value)); }

double relative_l2(const std::vector<double>& a, const std::vector<double>& b) {
  double gap = 0, size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    gap += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return size > 0 ? std::sqrt(gap / size) : std::sqrt(gap);
}

double relative(double a, double b) { return std::abs(a - b) / (b == 0 ? 1.0 : std::abs(b)); }

void Report::broken(std::string what, double error, double bound) {
  const bool shown = !(error <= bound);
  if (!shown) ++missed_;
  findings_.push_back({shown ? "BUG_REPRODUCED" : "", std::move(what), error, bound});
}

void Report::ours(std::string what, double error, double bound) {
  const bool held = error <= bound;  // false for NaN
  if (!held) ++missed_;
  findings_.push_back({held ? "FIX_VALIDATED" : "", std::move(what), error, bound});
}

void Report::memory(std::string what, double ours_bytes, double other_bytes, double share) {
  const double ratio = ours_bytes / other_bytes;
  // A child cannot use the device, and beside a driver its peak is not its own.
  if (session) return figure(what + ": host memory, not judged beside a device", ratio);
  const bool saved = other_bytes > 0 && ours_bytes >= 0 && ratio <= share;
  if (!saved) ++missed_;
  findings_.push_back({saved ? "MEMORY_SAVE_VERIFIED" : "", std::move(what), ratio, share});
}

void Report::figure(std::string what, double value) {
  findings_.push_back({"figure", std::move(what), value, 0});
}

bool Report::complete() const {
  bool any = false;
  for (const Finding& f : findings_) any = any || f.sentinel == "FIX_VALIDATED";
  return missed_ == 0 && any;
}

}  // namespace talea::repro
