// What: plain same-dtype eager arithmetic: materialised logits, then cross-entropy, then products.
// Why: the second yardstick; a lane must not be further from the truth than this.
// Never: includes anything of src/: a bug planted there must not widen the yardstick.
#pragma once

#include "yardsticks/linear_cross_entropy/oracle.hpp"

namespace talea::testing {

// Products accumulate in fp32 (fp64 for fp64 inputs); 16-bit problems round the logits and their
// gradient to the input's dtype, as a framework does between operators. Sums run upwards, or
// downwards with `backwards`: both are plain, and an element may be right by luck in one of them.
Answer eager(const Case& c, bool backwards);

}  // namespace talea::testing
