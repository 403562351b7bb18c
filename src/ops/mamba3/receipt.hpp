// What: what a receipt says of one call of the scan, and the result as text.
// Why: the tool's receipts and the C interface's JSON name the same facts in the same words.
// Never: reads a tensor's data or writes a file.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/receipt.hpp"
#include "talea/mamba3.hpp"

namespace talea::mamba3 {

// One piece of a call over ranks, or the whole.
struct PieceFact {
  int rank = 0;
  int64_t head_begin = 0, head_end = 0, token_begin = 0, token_end = 0;
};

// Only problem and result must be set.
struct CallFacts : CallMeasures {
  Problem problem;
  Result result;
  std::string layout = "bsrgn";   // order of the axes of q in the caller's file
  std::vector<PieceFact> pieces;  // empty: a world of one
  std::string collective = "none";
  std::optional<double> ratio_to_plain_product;
};

// As the schema's definition "mamba3_call" lists it.
nlohmann::json call_json(const CallFacts& facts);

// What ran, in one line of JSON.
std::string result_text(const Result& result);

}  // namespace talea::mamba3
