// What: one training step of an output projection through the C++ interface.
// Why: the smallest complete use of it: describe, workspace, call, and what the result says.
// Never: includes anything but the public headers.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "talea/linear_cross_entropy.hpp"

int main() {
  constexpr int64_t tokens = 6, hidden = 4, vocab = 10;
  std::vector<float> x(tokens * hidden), w(vocab * hidden), dx(x.size()), main_grad(w.size());
  std::vector<int64_t> y(tokens);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < w.size(); ++i) w[i] = std::cos(static_cast<float>(i));
  for (int64_t t = 0; t < tokens; ++t) y[static_cast<size_t>(t)] = 3 * t % vocab;
  float loss = 0;

  talea::LinearCrossEntropyInputs in;
  in.hidden = talea::make_tensor(x.data(), talea::DType::f32, {tokens, hidden});
  in.weight = talea::make_tensor(w.data(), talea::DType::f32, {vocab, hidden});
  in.targets = talea::make_tensor(y.data(), talea::DType::i64, {tokens});
  talea::LinearCrossEntropyOutputs out;
  out.loss = talea::make_tensor(&loss, talea::DType::f32, {});
  out.dx = talea::make_tensor(dx.data(), talea::DType::f32, {tokens, hidden});
  out.dw = talea::make_tensor(main_grad.data(), talea::DType::f32, {vocab, hidden});
  out.accumulate_dw = true;
  talea::LinearCrossEntropyOptions options;
  options.label_smoothing = 0.1;

  float before = 0;
  for (int step = 0; step < 2; ++step) {
    try {
      const auto problem = talea::describe(in, out, options);
      std::vector<std::byte> workspace(static_cast<size_t>(talea::workspace_bytes(problem)));
      const auto result = talea::linear_cross_entropy(
          in, out, options, {workspace.data(), static_cast<int64_t>(workspace.size())});
      std::printf("step %d: loss %.6f, lane %s\n", step, static_cast<double>(loss),
                  result.lane.c_str());
    } catch (const talea::Error& error) {
      std::printf("%s\n", error.what());
      return static_cast<int>(error.kind());
    }
    if (step == 0) before = loss;
    for (size_t i = 0; i < w.size(); ++i) {
      w[i] -= 0.5f * main_grad[i];
      main_grad[i] = 0;
    }
  }
  return loss < before ? 0 : 1;
}
