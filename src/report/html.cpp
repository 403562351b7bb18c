// What: the pieces of html.hpp.
// Why: one escape function, so that one test can prove it.
// Never: emits a script, a link outside the page or an event handler.
#include "report/html.hpp"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "core/receipt.hpp"

namespace talea::report {

using json = nlohmann::json;

std::string escape(std::string_view text) {
  std::string safe;
  safe.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      case '\'':
        safe += "&#39;";
        break;
      default: {
        const bool control = static_cast<unsigned char>(c) < ' ' && c != '\n' && c != '\t';
        if (control || c == '\x7f') {
          safe += "\xef\xbf\xbd";
        } else {
          safe += c;
        }
      }
    }
  }
  return safe;
}

std::string short_number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  if (value == 0) return "0";
  const double magnitude = std::fabs(value);
  if (value == std::floor(value) && magnitude < 1e15) return fmt::format("{:.0f}", value);
  if (magnitude >= 1e-3 && magnitude < 1e6) return fmt::format("{:.4g}", value);
  const std::string text = fmt::format("{:.3e}", value);
  const size_t exponent = text.find('e');
  size_t keep = text.find_last_not_of('0', exponent - 1);
  if (text[keep] == '.') --keep;
  return text.substr(0, keep + 1) + text.substr(exponent);
}

std::string human_bytes(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (std::fabs(bytes) >= 1024 && unit < 4) bytes /= 1024, ++unit;
  return short_number(std::round(bytes * 100) / 100) + " " + units[unit];
}

std::string inline_text(const json& value) {
  if (value.is_null()) return "<span class=\"quiet\">not known</span>";
  if (value.is_string()) return escape(value.get_ref<const std::string&>());
  if (value.is_number_float()) return short_number(value.get<double>());
  if (!value.is_structured()) return escape(value.dump());
  if (value.empty()) return "<span class=\"quiet\">none</span>";
  std::string text;
  for (const auto& item : value.items()) {
    if (!text.empty()) text += ", ";
    if (value.is_object()) text += escape(item.key()) + " ";
    text += inline_text(item.value());
  }
  return text;
}

std::string fact_table(const json& object) {
  std::string rows;
  for (const auto& item : object.items()) {
    const json& value = item.value();
    bool nested = value.is_object() && !value.empty();
    if (value.is_array())
      for (const json& child : value) nested = nested || child.is_structured();
    rows += "<tr><th scope=\"row\">" + escape(object.is_array() ? "" : item.key()) + "</th><td>" +
            (nested ? fact_table(value) : inline_text(value)) + "</td></tr>\n";
  }
  return "<table class=\"facts\"><tbody>\n" + rows + "</tbody></table>\n";
}

std::string table(const Table& content) {
  const auto align = [&](size_t column) {
    return column < content.numeric.size() && content.numeric[column] ? " class=\"num\"" : "";
  };
  std::string html = "<div class=\"scroll\"><table>\n";
  if (!content.caption.empty()) html += "<caption>" + escape(content.caption) + "</caption>\n";
  html += "<thead><tr>";
  for (size_t i = 0; i < content.head.size(); ++i)
    html += fmt::format("<th scope=\"col\"{}>{}</th>", align(i), escape(content.head[i]));
  html += "</tr></thead>\n<tbody>\n";
  for (const auto& row : content.rows) {
    html += "<tr>";
    for (size_t i = 0; i < row.size(); ++i)
      html += i == 0 ? fmt::format("<th scope=\"row\"{}>{}</th>", align(i), row[i])
                     : fmt::format("<td{}>{}</td>", align(i), row[i]);
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

std::string badge(bool passed, std::string_view text) {
  return fmt::format("<span class=\"badge {}\">{} {}</span>", passed ? "good" : "bad",
                     passed ? "&#10003;" : "&#10007;", escape(text));
}

double number_or_nan(const json& object, const char* field) {
  const auto found = object.find(field);
  const bool known = found != object.end() &&
                     (found->is_number() || *found == "Infinity" || *found == "-Infinity");
  return known ? number_of(*found) : std::numeric_limits<double>::quiet_NaN();
}

std::string text_or(const json& object, const char* field, const char* absent) {
  const auto found = object.find(field);
  return found != object.end() && found->is_string() ? found->get<std::string>() : absent;
}

}  // namespace talea::report
