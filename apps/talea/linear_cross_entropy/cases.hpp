// What: the named cases of `talea check`.
// Why: a name, a seed and a lane repeat a failure anywhere.
// Never: runs one.
#pragma once

#include <string>
#include <vector>

#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::cli {

struct CheckCase {
  std::string name;  // feature/dtype/tokensxhiddenxvocab
  testing::Spec spec;
};

// "quick": every feature once, in fp32 and bf16 at an odd size. "full": features x dtypes x sizes.
std::vector<CheckCase> check_cases(const std::string& preset, uint64_t seed);

}  // namespace talea::cli
