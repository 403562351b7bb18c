// What: which rows of the vocabulary and of the sequence a rank holds, and rows of 3-d hidden
// views.
// Why: shards and orders are decided once, for the command line, the tests and callers alike.
// Never: moves data.
#include <algorithm>
#include <cmath>

#include "core/fail.hpp"
#include "talea/ranks.hpp"

namespace talea {

int64_t even_shard_begin(int64_t total, int ranks, int rank) {
  const int64_t each = (total + ranks - 1) / ranks;
  return std::min(total, each * rank);
}

Tensor rows_of(const Tensor& hidden) {
  require(hidden.rank == 3, ErrorKind::invalid_data,
          "hidden: {} dimensions; [S, B, D] or [B, S, D] is needed", hidden.rank);
  const int64_t outer = hidden.shape[0], inner = hidden.shape[1];
  const bool merges = outer <= 1 || inner <= 1 || hidden.stride[0] == inner * hidden.stride[1];
  require(
      merges, ErrorKind::invalid_data,
      "hidden: strides {} and {} of its outer dimensions do not merge (extent {}); copy it to a "
      "contiguous tensor",
      hidden.stride[0], hidden.stride[1], inner);
  Tensor rows = hidden;
  rows.rank = 2;
  rows.shape = {outer * inner, hidden.shape[2]};
  rows.stride = {inner > 1 ? hidden.stride[1] : hidden.stride[0], hidden.stride[2]};
  return rows;
}

std::vector<int64_t> sequence_parallel_order(HiddenLayout layout, int64_t sequence, int64_t batch,
                                             int ranks) {
  require(ranks >= 1 && sequence % ranks == 0, ErrorKind::usage,
          "sequence = {}: does not divide among {} ranks; pad it and give the padding ignore_index",
          sequence, ranks);
  const int64_t each = sequence / ranks;
  std::vector<int64_t> order;
  order.reserve(static_cast<size_t>(sequence * batch));
  for (int r = 0; r < ranks; ++r) {
    if (layout == HiddenLayout::sequence_first) {
      for (int64_t i = 0; i < each * batch; ++i) order.push_back(r * each * batch + i);
      continue;
    }
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t s = 0; s < each; ++s) order.push_back(b * sequence + r * each + s);
  }
  return order;
}

double common_factor(const float* ours, const float* truth, int64_t count, double tolerance) {
  double cross = 0, square = 0, own = 0;
  for (int64_t i = 0; i < count; ++i) {
    cross += static_cast<double>(ours[i]) * truth[i];
    square += static_cast<double>(truth[i]) * truth[i];
    own += static_cast<double>(ours[i]) * ours[i];
  }
  if (!(square > 0) || !(own > 0)) return 0;
  const double factor = cross / square;
  // |ours - factor truth|^2 = own - factor cross
  const double rest = std::max(0.0, own - factor * cross);
  return std::sqrt(rest / own) <= tolerance ? factor : 0;
}

}  // namespace talea
