// What: JSON text from strangers -> a document, with the checks a lenient parser leaves out.
// Why: receipts and safetensors headers are untrusted; duplicate keys, deep nesting and trailing
//      bytes must be errors, not a choice of the parser.
// Never: included by a widely used header; it pulls in the JSON library.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace talea {

// Error(invalid_data) naming `file` and the place: syntax, invalid UTF-8, duplicate keys, numbers
// that no double holds, nesting deeper than max_depth.
nlohmann::json parse_strict_json(const std::string& file, std::string_view text, int max_depth);

// A string of unknown origin, made safe and short for a message.
std::string quote(std::string_view text);

}  // namespace talea
