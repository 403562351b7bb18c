// What: facts of a problem that both its refusals and its plan in lane sm90 ask for.
// Why: one formula for each.
// Never: part of what other files of the lane see: config.hpp is.
#pragma once

#include <algorithm>

#include "ops/mamba3/rows/plan.hpp"

namespace talea::mamba3::sm90 {

constexpr int64_t rows = 64, columns = 128, values = 64;  // of a unit's tiles

inline bool any_of(const States& s) { return s.angle || s.ssm || s.k || s.v; }

// Whether a pass is handed states or hands them on, or gradients of them.
inline bool hands(const Problem& p) {
  if (!p.backward()) return any_of(p.in.initial_states) || any_of(p.out.final_states);
  return any_of(p.in.initial_states) || any_of(p.in.d_final_states) ||
         any_of(p.out.d.initial_states);
}

// Units of a head.
inline int64_t units_of(const Problem& p) {
  return std::max<int64_t>(p.state_dim / columns, 1) * (p.head_dim / values);
}

}  // namespace talea::mamba3::sm90
