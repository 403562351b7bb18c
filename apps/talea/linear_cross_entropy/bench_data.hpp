// What: the tensors of a device bench, and the plain products over the same ones.
// Why: every lane and the limit it is held against see the same data and the same memory.
// Never: includes a CUDA header; the device session knows the runtime.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "bench_device.hpp"
#include "core/device_session.hpp"
#include "core/receipt.hpp"

namespace talea::cli {

class Data {
 public:
  Data(DeviceSession& session, const DeviceBench& b)
      : session_(session), b_(b), wanted_(parse_outputs(b.outputs)) {
    const int64_t n = b.shape.tokens, d = b.shape.hidden, v = b.shape.vocab;
    const DType dtype = parse_dtype(b.dtype);
    in.hidden = normal(dtype, {n, d}, 1, 1);
    in.weight = normal(dtype, {v, d}, 2, b.spread / std::sqrt(static_cast<double>(d)));
    in.targets = make(DType::i64, {n});
    fill_targets();
    plain_in.hidden = in.hidden, plain_in.weight = in.weight, plain_in.targets = in.targets;
    if (b.also_plain && b.ignored > 0) {
      plain_in.targets = make(DType::i64, {n});
      session.fill_ids(plain_in.targets, 16 * b.seed, v);
    }
    if (given("bias")) in.bias = normal(DType::f32, {v}, 3, 0.5);
    if (given("token_weight")) in.token_weight = normal(DType::f32, {n}, 4, 1);
    if (given("upstream")) in.upstream = normal(DType::f32, {n}, 5, 1);
    plain_.hidden = in.hidden;
    plain_.weight = in.weight;
    const int64_t stride = (v + 63) / 64 * 64;
    plain_.logits = make(dtype, {n, stride});
    plain_.logits.shape[1] = v;
    if (backward()) {
      plain_.dx = make(dtype, {n, d});
      plain_.dw = make(dtype, {v, d});
    }
    plain_.workspace = session.allocate(plain_products_workspace_bytes());
    if (wanted_.dx) dx_ = make(dtype, {n, d});
    if (wanted_.dw) dw_ = make(b.dw == "weight" ? dtype : DType::f32, {v, d});
    if (wanted_.dw) session.fill_bytes(dw_.data, 0, dw_.elements() * size_of(dw_.dtype));
  }

  bool backward() const { return wanted_.dx || wanted_.dw; }
  LinearCrossEntropyInputs in, plain_in;  // plain_in: no vectors, every token counts

  // Subjects share the gradients' memory and have per-token outputs of their own.
  LinearCrossEntropyOutputs outputs() {
    LinearCrossEntropyOutputs o;
    const int64_t n = b_.shape.tokens;
    const bool none = b_.options.values.reduction == Reduction::none;
    if (wanted_.loss) o.loss = none ? make(DType::f32, {n}) : make(DType::f32, {});
    if (wanted_.lse) o.lse = make(DType::f32, {n});
    if (wanted_.target_logprob) o.target_logprob = make(DType::f32, {n});
    if (wanted_.entropy) o.entropy = make(DType::f32, {n});
    if (wanted_.argmax) o.argmax = make(DType::i64, {n});
    if (wanted_.accuracy) o.accuracy = make(DType::f32, {});
    if (wanted_.top_k > 0) {
      o.topk_values = make(DType::f32, {n, wanted_.top_k});
      o.topk_ids = make(DType::i64, {n, wanted_.top_k});
    }
    return with_gradients(o);
  }
  LinearCrossEntropyOutputs plain_outputs() {
    LinearCrossEntropyOutputs o;
    o.loss = make(DType::f32, {});
    return with_gradients(o);
  }

  Tensor per_token() { return make(DType::f32, {b_.shape.tokens}); }

  // One of `calls` calls queued back to back.
  double call_ms(int calls, const std::function<void()>& call) {
    const double all = session_.time_ms([&] {
      for (int i = 0; i < calls; ++i) call();
    });
    return all / calls;
  }

  // The products of what the subjects compute: all three, or the logits alone.
  double plain_ms(int calls) {
    return call_ms(calls, [&] {
      queue_plain_logits(plain_, session_.stream());
      if (!backward()) return;
      queue_plain_dx(plain_, session_.stream());
      queue_plain_dw(plain_, session_.stream());
    });
  }

  // Bytes read and written per second by a copy of the weight within the device.
  double copy_bytes_per_second() {
    const int64_t bytes = in.weight.elements() * size_of(in.weight.dtype);
    void* to = session_.allocate(bytes);
    const auto copy = [&] { session_.queue_copy(to, in.weight.data, bytes); };
    call_ms(1, copy);
    const int calls = calls_per_sample(call_ms(1, copy));
    std::vector<double> ms;
    for (int i = 0; i < 9; ++i) ms.push_back(call_ms(calls, copy));
    return 2e3 * static_cast<double>(bytes) / time_stats(ms).median_ms;
  }

 private:
  LinearCrossEntropyOutputs with_gradients(LinearCrossEntropyOutputs o) const {
    o.dx = dx_;
    o.dw = dw_;
    o.accumulate_dw = wanted_.dw && b_.dw == "main_grad";
    return o;
  }
  bool given(const char* name) const {
    return std::find(b_.inputs.begin(), b_.inputs.end(), name) != b_.inputs.end();
  }
  Tensor make(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = make_tensor(nullptr, dtype, shape, DeviceKind::cuda);
    t.data = session_.allocate(t.elements() * size_of(dtype));
    return t;
  }
  Tensor normal(DType dtype, std::initializer_list<int64_t> shape, uint64_t number, double width) {
    const Tensor t = make(dtype, shape);
    session_.fill_normal(t, 16 * b_.seed + number, width);
    return t;
  }
  void fill_targets() {
    const int64_t n = b_.shape.tokens;
    session_.fill_ids(in.targets, 16 * b_.seed, b_.shape.vocab);
    if (b_.ignored <= 0) return;
    std::vector<int64_t> ids(static_cast<size_t>(n));
    session_.download(ids.data(), in.targets.data, n * 8);
    // A fixed share, spread evenly over the batch.
    for (int64_t t = 0; t < n; ++t)
      if (std::fmod(static_cast<double>(t) * 0.6180339887498949, 1.0) < b_.ignored)
        ids[static_cast<size_t>(t)] = b_.options.values.ignore_index;
    session_.upload(in.targets.data, ids.data(), n * 8);
  }

  DeviceSession& session_;
  const DeviceBench& b_;
  Wanted wanted_;
  PlainProducts plain_;
  Tensor dx_, dw_;
};

}  // namespace talea::cli
