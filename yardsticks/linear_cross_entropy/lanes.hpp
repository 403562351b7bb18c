// What: what this suite asks of each lane: where its tensors lie, what it may decline, by which
// rule.
// Why: a lane that is added to the table is held to everything, unless a line here says less.
// Never: asks less of a lane than its page says it takes.
#pragma once

#include <string>
#include <vector>

#include "yardsticks/linear_cross_entropy/compare.hpp"
#include "yardsticks/place.hpp"

namespace talea::testing {

// Lanes of this build: the table without what was not built.
std::vector<std::string> lanes_here();

// Lane auto's first choice among those of the host.
std::string host_lane();

// Where the tensors of a lane lie; null with the reason where the machine cannot hold them.
Place* place_of(const std::string& lane, std::string& why);
bool is_device_lane(const std::string& lane);

// The intentional comparison: eager arithmetic in code of its own.
bool is_yardstick_lane(const std::string& lane);
// Plain loops, slow on purpose.
bool is_reference_lane(const std::string& lane);
// By what the call said that it did.
Standing standing_of(const std::string& lane, const LinearCrossEntropyResult& result);

// Multiplies 16-bit rows of whole 16-byte pieces only.
bool needs_16bit_rows(const std::string& lane);

// The case as the lane can take it. For one that needs 16-bit rows, hidden and weight of an fp32
// case are rounded to bf16, the four matrices are laid out densely and the hidden columns filled up
// with zeros, which changes no result. Else, and elsewhere, as it is.
Case fitted(const std::string& lane, const Case& c);

// Why this lane may decline this case; nothing: it has to accept.
bool may_decline(const std::string& lane, const Case& c);

}  // namespace talea::testing
