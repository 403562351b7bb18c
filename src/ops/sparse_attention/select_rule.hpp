// What: the order in which the keys of a query are selected.
// Why: ties, NaN, -0 and -Inf are decided once, for scores of any width.
// Never: knows where a score comes from.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace talea::sparse_attention {

template <typename T>
struct Scored {
  T score = 0;
  int64_t key = 0;
};

// a is selected before b: NaN first, then the larger score, then the lower key. -0 equals +0.
template <typename T>
bool before(const Scored<T>& a, const Scored<T>& b) {
  const bool an = std::isnan(a.score), bn = std::isnan(b.score);
  if (an != bn) return an;
  if (!an && a.score != b.score) return a.score > b.score;
  return a.key < b.key;
}

// Keeps the min(k, candidates) that come first, ascending by key; -Inf is no candidate. Returns the
// number of NaN scores seen.
template <typename Scores>
int64_t select_top(Scores& list, int64_t k) {
  using Entry = std::remove_cvref_t<decltype(list[0])>;
  int64_t nan_scores = 0;
  for (const Entry& s : list) nan_scores += std::isnan(s.score);
  const auto none =
      std::remove_if(list.begin(), list.end(), [](const Entry& s) { return s.score == -INFINITY; });
  list.resize(static_cast<size_t>(none - list.begin()));
  if (static_cast<int64_t>(list.size()) > k) {
    std::nth_element(list.begin(), list.begin() + k, list.end(),
                     [](const Entry& a, const Entry& b) { return before(a, b); });
    list.resize(static_cast<size_t>(k));
  }
  std::sort(list.begin(), list.end(), [](const Entry& a, const Entry& b) { return a.key < b.key; });
  return nan_scores;
}

}  // namespace talea::sparse_attention
