// What: the sizes of a problem of sparse attention as flags, and its passes on whole tensors.
// Why: explain, bench and check describe the same problem with the same words.
// Never: computes.
#pragma once

#include "../context.hpp"
#include "shares.hpp"

namespace talea::cli {

struct SparseSizes {
  int64_t tokens = 512, keys = 4096, heads = 16, dim = 576, value_dim = 512, top_k = 512;
  int64_t index_heads = 16, index_dim = 64;
  std::string pass = "forward", dtype = "fp32", workspace_limit = "256MiB";

  void add(CLI::App& sub);
  // A note of sizes that the pass has not.
  void note_unread_sizes(const Context& context, const CLI::App& sub) const;
};

// The tensors of one pass with their shapes; `place` gives each its memory.
struct SparseTensors {
  WholeAttention attention;
  WholeSelect select;
  WholeIndexLoss loss;
  sa::Pass pass{};

  sa::Problem problem() const;
  sa::Result run(Workspace space) const;
};
using Place = std::function<Tensor(DType, std::initializer_list<int64_t>)>;
SparseTensors tensors_of(const SparseSizes& sizes, const std::string& lane, const Place& place);

}  // namespace talea::cli
