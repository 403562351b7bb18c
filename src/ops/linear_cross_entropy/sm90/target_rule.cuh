// Which row is valid, ignored or poisoned, on the device.
// Exists so that compaction, blanks and the shift product agree on it.
// Never reads more of a row than its targets and its scale.
#pragma once
#include <climits>

#include "ops/linear_cross_entropy/sm90/device_vector.cuh"

namespace talea::lce {

enum class TokenKind { valid, ignored, poisoned };

__device__ __forceinline__ TokenKind kind_of_target(const TargetRule& r, int64_t t) {
  const auto inside = [&](int64_t id) { return id >= 0 && id < r.vocab; };
  if (r.targets.data) {
    const int64_t y = read_index(r.targets, t);
    return y == r.ignore_index ? TokenKind::ignored
           : inside(y)         ? TokenKind::valid
                               : TokenKind::poisoned;
  }
  if (r.soft_k == 0) return TokenKind::valid;
  bool all_ignored = true, all_inside = true;
  for (int64_t j = 0; j < r.soft_k; ++j) {
    const int64_t id = r.soft_ids.load_index(t, j);
    all_ignored = all_ignored && id == r.ignore_index;
    all_inside = all_inside && inside(id);
  }
  return all_ignored ? TokenKind::ignored : all_inside ? TokenKind::valid : TokenKind::poisoned;
}

__device__ __forceinline__ bool scale_is_bad(const TargetRule& r, int64_t t) {
  const double scale = read(r.token_scale, t, 1);
  return scale == 0 || !isfinite(scale);
}

__device__ __forceinline__ bool target_is_fine(const TargetRule& r, int64_t t) {
  return kind_of_target(r, t) == TokenKind::valid;
}

__device__ __forceinline__ TokenKind kind_of(const TargetRule& r, int64_t t) {
  const TokenKind kind = kind_of_target(r, t);
  return kind == TokenKind::valid && scale_is_bad(r, t) ? TokenKind::poisoned : kind;
}

}  // namespace talea::lce
