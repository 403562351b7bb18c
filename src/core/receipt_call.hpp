// What: one call of linear cross-entropy in JSON.
// Why: the long list of what a receipt must name lives apart from the envelope.
// Never: included outside core/receipt*.cpp.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "core/receipt.hpp"

namespace talea {

nlohmann::json to_json(const CallFacts& facts);

}  // namespace talea
