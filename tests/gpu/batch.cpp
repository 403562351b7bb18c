// What: a problem in device memory, its call, and its outputs as bytes.
// Why: see batch.hpp.
// Never: judges.
#include "gpu/batch.hpp"

#include "yardsticks/linear_cross_entropy/limit.hpp"

namespace talea::gpu {

Tensor Batch::make(DType dtype, std::initializer_list<int64_t> shape) {
  Tensor t = make_tensor(nullptr, dtype, shape, DeviceKind::cuda, device_);
  t.data = session_->allocate(t.elements() * size_of(dtype));
  return t;
}

Batch::Batch(const BatchSpec& s, const std::string& lane) : device_(s.device) {
  std::string why;
  session_ = DeviceSession::open(s.device, why);
  if (!session_) throw Error(ErrorKind::unavailable, why);
  in.hidden = make(s.dtype, {s.tokens, s.hidden});
  in.weight = make(s.dtype, {s.vocab, s.hidden});
  in.targets = make(DType::i64, {s.tokens});
  session_->fill_normal(in.hidden, s.seed, 1.0);
  session_->fill_normal(in.weight, s.seed + 1, 0.2);
  session_->fill_ids(in.targets, s.seed + 2, s.vocab);
  options.lane = lane;
  options.workspace_limit_bytes = s.workspace_limit_bytes;
  want(s);
  options = testing::with_kept_limit(in, out, options);
  const LaneChoice choice = explain(describe(in, out, options));
  if (choice.lane != lane)
    throw Error(ErrorKind::unavailable,
                "lane " + lane + " must accept this batch, but: " + choice.declined.at(0).reason);
  workspace.bytes = workspace_bytes(describe(in, out, options));
  workspace.data = session_->allocate(workspace.bytes);
  poison_outputs();
  session_->synchronise();
}

void Batch::want(const BatchSpec& s) {
  out.loss = make(DType::f32, {});
  if (!s.everything) return;
  if (s.gradients_alone) {
    out.dx = make(s.dtype, {s.tokens, s.hidden}), out.dw = make(DType::f32, {s.vocab, s.hidden});
    return;
  }
  for (Tensor* t : {&out.lse, &out.target_logprob, &out.entropy}) *t = make(DType::f32, {s.tokens});
  out.dx = make(s.dtype, {s.tokens, s.hidden});
  if (s.weight_gradient) out.dw = make(DType::f32, {s.vocab, s.hidden});
  out.argmax = make(DType::i64, {s.tokens});
  out.accuracy = make(DType::f32, {});
  if (s.top_k == 0) return;
  out.topk_values = make(DType::f32, {s.tokens, s.top_k});
  out.topk_ids = make(DType::i64, {s.tokens, s.top_k});
}

LinearCrossEntropyResult Batch::run() { return run(session_->stream()); }

LinearCrossEntropyResult Batch::run(Stream stream) {
  return linear_cross_entropy(in, out, options, workspace, {}, stream);
}

std::vector<Tensor> Batch::all_outputs() const {
  std::vector<Tensor> present;
  for (const Tensor* t : {&out.loss, &out.lse, &out.target_logprob, &out.entropy, &out.argmax,
                          &out.accuracy, &out.dx, &out.dw, &out.topk_values, &out.topk_ids})
    if (*t) present.push_back(*t);
  return present;
}

void Batch::poison_outputs() {
  for (const Tensor& t : all_outputs())
    session_->fill_bytes(t.data, 0xff, t.elements() * size_of(t.dtype));
}

std::vector<std::byte> Batch::bytes_of(const Tensor& t) {
  std::vector<std::byte> bytes(static_cast<size_t>(t.elements() * size_of(t.dtype)));
  session_->download(bytes.data(), t.data, static_cast<int64_t>(bytes.size()));
  return bytes;
}

std::vector<std::byte> Batch::outputs() {
  std::vector<std::byte> all;
  for (const Tensor& t : all_outputs()) {
    const std::vector<std::byte> bytes = bytes_of(t);
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

std::vector<std::string> lanes() { return {"cuda", "sm90"}; }

bool must_accept(const std::string& lane, DType dtype) { return lane == "cuda" || is_16bit(dtype); }

}  // namespace talea::gpu
