// What: allocation of outputs, and the measured call.
// Why: see call.hpp.
// Never: allocates between the watch's start and end but the workspace itself.
#include "call.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "memory.hpp"

namespace talea::cli {
namespace {

struct Builder {
  HostOutputs& out;

  void add(const char* name, Tensor& view, DType dtype, std::initializer_list<int64_t> shape) {
    out.owners.push_back(io::allocate_tensor(dtype, shape));
    view = out.owners.back().view;
    out.named.push_back({name, view});
  }
};

}  // namespace

HostOutputs allocate_outputs(const Wanted& w, const LinearCrossEntropyInputs& in,
                             const LinearCrossEntropyOptions& options) {
  HostOutputs out;
  Builder b{out};
  auto& v = out.views;
  const int64_t n = in.hidden.shape[0], d = in.hidden.shape[1], rows = in.weight.shape[0];
  const DType wide = in.hidden.dtype == DType::f64 ? DType::f64 : DType::f32;
  if (w.loss && options.reduction == Reduction::none) b.add("loss", v.loss, wide, {n});
  if (w.loss && options.reduction != Reduction::none) b.add("loss", v.loss, wide, {});
  if (w.lse) b.add("lse", v.lse, wide, {n});
  if (w.target_logprob) b.add("target_logprob", v.target_logprob, wide, {n});
  if (w.entropy) b.add("entropy", v.entropy, wide, {n});
  if (w.argmax) b.add("argmax", v.argmax, DType::i64, {n});
  if (w.accuracy) b.add("accuracy", v.accuracy, wide, {});
  if (w.top_k > 0) {
    b.add("topk_values", v.topk_values, wide, {n, w.top_k});
    b.add("topk_ids", v.topk_ids, DType::i64, {n, w.top_k});
    b.add("topk_logprobs", v.topk_logprobs, wide, {n, w.top_k});
  }
  if (w.dx) b.add("dx", v.dx, in.hidden.dtype, {n, d});
  if (w.dw) b.add("dw", v.dw, w.main_grad ? DType::f32 : in.weight.dtype, {rows, d});
  if (w.dw && w.main_grad) {
    std::memcpy(v.dw.data, w.main_grad.data, static_cast<size_t>(rows * d) * sizeof(float));
    v.accumulate_dw = true;
  }
  if (w.db) b.add("db", v.db, in.bias ? in.bias.dtype : in.weight.dtype, {rows});
  return out;
}

bool MeasuredCall::full_logits_excluded() const {
  const double smallest =
      2.0 * static_cast<double>(problem.tokens) * static_cast<double>(logits_columns);
  return peak_extra_bytes >= 0 && static_cast<double>(peak_extra_bytes) < smallest;
}

MeasuredCall measured_call(const LinearCrossEntropyInputs& in, const LinearCrossEntropyOutputs& out,
                           const LinearCrossEntropyOptions& options) {
  MeasuredCall call;
  call.problem = describe(in, out, options);
  call.logits_columns = call.problem.vocab_local;
  const int64_t bytes = workspace_bytes(call.problem);
  const MemoryWatch watch;
  const io::HostTensor workspace = io::allocate_tensor(DType::i32, {(bytes + 3) / 4});
  const auto begin = std::chrono::steady_clock::now();
  call.result = linear_cross_entropy(in, out, options, {workspace.view.data, (bytes + 3) / 4 * 4});
  const auto end = std::chrono::steady_clock::now();
  call.peak_extra_bytes = watch.peak_extra_bytes();
  call.ms = std::chrono::duration<double, std::milli>(end - begin).count();
  return call;
}

MeasuredCall measured_call(const lce::ShardedCall& whole, const ShardWorld& world) {
  if (world.size() == 1) return measured_call(whole.in, whole.out, whole.options);
  MeasuredCall call;
  const MemoryWatch watch;
  lce::ShardedResult done = world.call(whole);
  call.peak_extra_bytes = watch.peak_extra_bytes();
  call.problem = done.problem;
  call.logits_columns = world.processes() ? done.problem.vocab_local : done.problem.vocab;
  call.result = std::move(done.result);
  call.ranks = std::move(done.ranks);
  for (const lce::ShardFigures& r : call.ranks) call.ms = std::max(call.ms, r.ms);
  return call;
}

}  // namespace talea::cli
