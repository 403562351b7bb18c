// What: the words of the scan's enums, as options and receipts write them.
// Why: C, the tool, Python and receipts spell them alike.
// Never: holds a rule.
#pragma once

#include "core/fields.hpp"
#include "talea/mamba3.hpp"

namespace talea {

template <>
struct Words<mamba3::Pass> {
  static constexpr const char* list[] = {"forward", "backward", "step"};
};
template <>
struct Words<mamba3::RotaryPairs> {
  static constexpr const char* list[] = {"automatic", "interleaved", "halves"};
};
template <>
struct Words<mamba3::SequenceCheck> {
  static constexpr const char* list[] = {"automatic", "checked", "clamp"};
};
template <>
struct Words<mamba3::Schedule> {
  static constexpr const char* list[] = {"automatic", "sequential", "parallel"};
};

}  // namespace talea
