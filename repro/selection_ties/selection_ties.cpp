// What: selections by bins that overflow, by a first pass in fp16, by race, and with slots left 0.
// Why: each gives other keys than the scores say, and some give others every run.
// Never: decides a tie by the order of arrival.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/half.hpp"
#include "repro/support/sparse.hpp"

namespace talea::repro {
namespace {

std::vector<float> scores_of(const IndexData& d) {
  std::vector<float> s;
  for (int64_t t = 0; t < d.queries; ++t)
    for (int64_t j = 0; j < d.keys; ++j) s.push_back(index_score(d, t, j));
  return s;
}

// One head, weight 1, one column that is not 0 of the eight that device lanes ask for: the scores
// are the keys' first columns.
IndexData scored(const std::vector<float>& scores, int64_t slots) {
  IndexData d;
  d.queries = d.heads = 1;
  d.dim = 8;
  d.keys = static_cast<int64_t>(scores.size());
  d.slots = slots;
  d.q = {1, 0, 0, 0, 0, 0, 0, 0};
  for (const float s : scores) {
    d.k.push_back(s);
    d.k.insert(d.k.end(), 7, 0.0f);
  }
  d.weights = {1};
  return d;
}

// The rule: the largest, ties to the lower index, ascending, then -1.
std::vector<int32_t> rule(const IndexData& d, int64_t bound) {
  const std::vector<float> s = scores_of(d);
  std::vector<int32_t> order(static_cast<size_t>(bound));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return s[static_cast<size_t>(a)] > s[static_cast<size_t>(b)];
  });
  order.resize(static_cast<size_t>(std::min(d.slots, bound)));
  std::sort(order.begin(), order.end());
  order.resize(static_cast<size_t>(d.slots), -1);
  return order;
}

// Candidates of the border bin go into a buffer of 64; what does not fit is dropped, slots stay 0.
std::vector<int32_t> bins(const IndexData& d, bool fp16_first, bool backwards) {
  const std::vector<float> s = scores_of(d);
  const auto bin = [&](size_t j) { return fp16_first ? f16_to_float(float_to_f16(s[j])) : s[j]; };
  std::vector<int32_t> order(s.size());
  std::iota(order.begin(), order.end(), 0);
  if (backwards) std::reverse(order.begin(), order.end());  // another order of arrival
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return bin(static_cast<size_t>(a)) > bin(static_cast<size_t>(b));
  });
  const float border = bin(static_cast<size_t>(order[static_cast<size_t>(d.slots - 1)]));
  std::vector<int32_t> chosen(static_cast<size_t>(d.slots), 0);
  size_t at = 0, in_border = 0;
  for (const int32_t j : order) {
    if (at == chosen.size()) break;
    if (bin(static_cast<size_t>(j)) == border && ++in_border > 64) break;  // the buffer is full
    chosen[at++] = j;
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

double wrong(const std::vector<int32_t>& have, const std::vector<int32_t>& want) {
  double n = 0;
  for (size_t i = 0; i < want.size(); ++i) n += have[i] != want[i] ? 1 : 0;
  return n;
}

std::vector<float> distinct(int64_t n) {
  std::vector<float> s;
  for (int64_t j = 0; j < n; ++j) s.push_back(1 + static_cast<float>((j * 37) % n) / n);
  return s;
}

void run_all(Report& r) {
  const IndexData equal = scored(std::vector<float>(4000, 2.5f), 256);
  std::vector<float> beyond = distinct(1000);
  for (float& s : beyond) s *= 1e6f;  // above 65504, the largest fp16
  const IndexData large = scored(beyond, 100);
  IndexData few = scored(distinct(50), 64);
  const auto ours = [&](const IndexData& d, const std::vector<int32_t>& broken) {
    return r.fix_disabled() ? broken : select_keys(d, "auto").indices;
  };
  r.broken("slots that differ, 4000 equal scores and a buffer of 64 candidates",
           wrong(bins(equal, false, false), rule(equal, 4000)), 0);
  r.broken("slots that differ between two orders of arrival",
           wrong(bins(equal, false, true), bins(equal, false, false)), 0);
  r.broken("slots that differ, scores beyond fp16 binned in fp16",
           wrong(bins(large, true, false), rule(large, 1000)), 0);
  std::vector<int32_t> zeros(64, 0);
  for (int32_t j = 0; j < 50; ++j) zeros[static_cast<size_t>(j)] = j;
  r.broken("slots that name key 0 again, 50 keys for 64 slots", wrong(zeros, rule(few, 50)), 0);
  r.ours("slots that differ from the rule, 4000 equal scores",
         wrong(ours(equal, bins(equal, false, false)), rule(equal, 4000)), 0);
  r.ours("slots that differ from the rule, scores beyond fp16",
         wrong(ours(large, bins(large, true, false)), rule(large, 1000)), 0);
  r.ours("slots that differ from the rule, fewer keys than slots",
         wrong(ours(few, zeros), rule(few, 50)), 0);
}

}  // namespace

extern const Reproducer selection_ties{
    "selection_ties", "SA14 SA15 SA16 SA17",
    "selections that overflow, race, bin in fp16 or leave slots at key 0", run_all};

}  // namespace talea::repro
