// What: one call of linear cross-entropy, and its result alone, in JSON.
// Why: the long list of what a receipt must name lives apart from the envelope.
// Never: included outside core/receipt*.cpp.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "core/receipt.hpp"

namespace talea {

nlohmann::json to_json(const CallFacts& facts);
nlohmann::json to_json(const LinearCrossEntropyResult& result);

}  // namespace talea
