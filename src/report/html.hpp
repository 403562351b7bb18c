// What: escaping and the few HTML pieces that every section of the report uses.
// Why: a receipt is untrusted input; text reaches the page through escape() and nowhere else.
// Never: knows what a receipt holds.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace talea::report {

// Safe in element content and in quoted attributes; control bytes become U+FFFD.
std::string escape(std::string_view text);

// Any JSON value as escaped inline text; numbers short, arrays in brackets.
std::string inline_text(const nlohmann::json& value);

// A JSON value as nested tables of two columns: field, value.
std::string fact_table(const nlohmann::json& object);

// A table; the cells are HTML already. `numeric[i]` aligns column i to the right.
struct Table {
  std::string caption;
  std::vector<std::string> head;
  std::vector<bool> numeric;
  std::vector<std::vector<std::string>> rows;
};
std::string table(const Table& content);

std::string badge(bool passed, std::string_view text);

// "1.234e-07", "12.5", "NaN": four significant digits.
std::string short_number(double value);
std::string human_bytes(double bytes);

// A number, whatever it is spelled as; NaN when the value is absent or something else.
double number_or_nan(const nlohmann::json& object, const char* field);
// A string member, or what stands for "absent".
std::string text_or(const nlohmann::json& object, const char* field, const char* absent = "");

}  // namespace talea::report
