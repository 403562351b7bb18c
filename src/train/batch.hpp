// What: one micro-step's tokens and targets.
// Why: streams make them, the model and the loss read them; nobody else decides what is ignored.
// Never: holds anything that depends on the model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace talea::train {

inline constexpr int64_t ignore_index = -100;

struct Batch {
  int64_t sequences = 0;
  int64_t seq_len = 0;
  std::vector<int32_t> inputs;   // [tokens]
  std::vector<int64_t> targets;  // [tokens]; empty with soft targets
  int64_t soft_k = 0;            // sparse soft targets: ids and probabilities [tokens, soft_k]
  std::vector<int64_t> soft_ids;
  std::vector<float> soft_probs;

  int64_t tokens() const { return sequences * seq_len; }
  int64_t valid() const {
    if (soft_k > 0) return tokens();
    return tokens() - std::count(targets.begin(), targets.end(), ignore_index);
  }
};

}  // namespace talea::train
