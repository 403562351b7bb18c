// What: the flags of the operator's options, outputs and shapes, and what they say.
// Why: loss, explain and bench spell them alike.
// Never: checks what the library checks; it names argument and value itself.
#pragma once

#include <optional>

#include "context.hpp"
#include "talea/linear_cross_entropy.hpp"

namespace talea::cli {

struct OptionFlags {
  std::string reduction = "mean", denominator = "valid", denominator_scope = "local";
  std::string on_empty = "nan", target_check = "automatic", lane = "auto";
  std::string workspace_limit = "256MiB";
  int64_t ignore_index = -100;
  std::optional<int64_t> vocab;  // not given: every row of the weight
  double label_smoothing = 0, z_loss = 0, logit_scale = 1;
  std::string softcap;  // empty: off; 0 is an error, as the contract has it
  int threads = 0;

  // with_vocab: --vocab is the logical vocabulary (bench and explain have it as a shape).
  void add(CLI::App& sub, bool with_vocab);
  LinearCrossEntropyOptions options() const;
};

// "loss,lse,topk:5,dx" as a value. Error(usage) naming an unknown output.
struct Wanted {
  bool loss = false, lse = false, target_logprob = false, entropy = false, argmax = false;
  bool accuracy = false, dx = false, dw = false, db = false;
  int64_t top_k = 0;
  Tensor main_grad;  // where present, dW is added to a copy of it
};
Wanted parse_outputs(const std::string& text);

DType parse_dtype(const std::string& text);  // fp32, bf16, fp16, fp64

// A problem without data, for explain and bench.
struct ShapeFlags {
  int64_t tokens = 1024, hidden = 768, vocab = 32000;
  void add(CLI::App& sub);
};

}  // namespace talea::cli
