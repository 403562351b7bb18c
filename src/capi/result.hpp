// What: the opaque result of the C interface and its JSON.
// Why: strings of the facts live as long as the caller keeps the handle.
// Never: refers to memory of the call.
#pragma once

#include <string>
#include <vector>

#include "talea/linear_cross_entropy.hpp"
#include "talea/talea.h"

struct talea_result {
  talea::LinearCrossEntropyResult result;
  talea_linear_cross_entropy_facts facts{};
  std::vector<talea_lane_decline> declined;
  std::vector<const char*> notes;
  std::string json;
};

namespace talea::capi {

talea_result* make_result(LinearCrossEntropyResult result);
std::string explain_json(const LaneChoice& choice);
std::string explain_text(const LaneChoice& choice);

}  // namespace talea::capi
