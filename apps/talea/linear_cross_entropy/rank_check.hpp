// What: one batch spread over ranks, with a local and with a global denominator, against the whole.
// Why: the classic trap: 8 ranks x 1024 tokens with local means against one mean over 8192 tokens.
// Never: has a tolerance; `talea check` judges the factors.
#pragma once

#include <cstdint>

namespace talea::cli {

struct BatchScopes {
  int64_t tokens_each = 0;
  double local_factor = 0;         // summed dW of local means over dW of the whole batch; 0: none
  double global_factor = 0;        // the same with DenominatorScope::global
  bool note_names_factor = false;  // the call with local means says by how much it is larger
};
BatchScopes compare_batch_scopes(int ranks, uint64_t seed);

}  // namespace talea::cli
