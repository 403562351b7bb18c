// What: the flags of the operator's options, outputs and shapes, and what they say.
// Why: loss, explain and bench spell them alike.
// Never: checks what the library checks; it names argument and value itself.
#pragma once

#include <optional>

#include "context.hpp"
#include "talea/linear_cross_entropy.hpp"

namespace talea::cli {

struct OptionFlags {
  LinearCrossEntropyOptions values;
  // As they are written: a word or a number, a size with its unit, and a number that must not be 0.
  std::string denominator = "valid", workspace_limit = "auto", softcap;
  std::optional<int64_t> vocab;  // not given: every row of the weight

  // A flag an option, from the operator's list of fields. with_vocab: --vocab is the logical
  // vocabulary (bench and explain have it as a shape).
  void add(CLI::App& sub, bool with_vocab);
  LinearCrossEntropyOptions options() const;
};

struct Wanted;
// A note of what a call with these outputs and this reduction does not read; Error(usage) for how a
// gradient is summed that is not asked for.
void check_unread_options(const Context& context, const CLI::App& sub, const Wanted& wanted,
                          Reduction reduction);

// "loss,lse,topk:5,dx" as a value. Error(usage) naming an unknown output.
struct Wanted {
  bool loss = false, lse = false, target_logprob = false, entropy = false, argmax = false;
  bool accuracy = false, dx = false, dw = false, db = false;
  int64_t top_k = 0;
  Tensor main_grad;  // where present, dW is added to a copy of it
};
Wanted parse_outputs(const std::string& text);

// A problem without data, for explain and bench.
struct ShapeFlags {
  int64_t tokens = 1024, hidden = 768, vocab = 32000;
  void add(CLI::App& sub);
};

}  // namespace talea::cli
