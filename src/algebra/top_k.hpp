// What: the k best (logit, id) pairs of a row, in falling order, ties to the lowest id.
// Why: top-k and argmax merge across tiles, chunks and ranks like the row state does.
// Never: orders NaN; a row with a NaN logit has no best (the caller writes -1).
#pragma once

#include <cstdint>

#include "algebra/row_state.hpp"
#include "core/mutant.hpp"

namespace talea {

template <typename T>
struct Candidate {
  T value;
  int64_t id;
};

template <typename T>
TALEA_HOST_DEVICE inline bool better(const Candidate<T>& a, const Candidate<T>& b) {
  const bool first = mutant(Mutant::topk_tie_highest) ? a.id > b.id : a.id < b.id;
  return a.value > b.value || (a.value == b.value && first);
}

template <typename T>
TALEA_HOST_DEVICE inline void clear_candidates(Candidate<T>* best, int64_t k) {
  for (int64_t i = 0; i < k; ++i) best[i] = {static_cast<T>(-INFINITY), INT64_MAX};
}

// Inserts into a list kept in falling order.
template <typename T>
TALEA_HOST_DEVICE inline void offer(Candidate<T>* best, int64_t k, const Candidate<T>& c) {
  if (k == 0 || !better(c, best[k - 1])) return;
  int64_t i = k - 1;
  for (; i > 0 && better(c, best[i - 1]); --i) best[i] = best[i - 1];
  best[i] = c;
}

}  // namespace talea
