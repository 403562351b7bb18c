// What: the embedded schema and its validator.
// Why: the schema library costs seconds of compilation; it is paid in this file only.
// Never: accepts what it does not understand.
#define VALIJSON_USE_EXCEPTIONS 1
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wrestrict"  // GCC bug 105651, in the headers below
#endif
#include <algorithm>
#include <nlohmann/json.hpp>
#include <valijson/adapters/nlohmann_json_adapter.hpp>
#include <valijson/schema.hpp>
#include <valijson/schema_parser.hpp>
#include <valijson/validation_results.hpp>
#include <valijson/validator.hpp>

#include "core/receipt.hpp"

namespace talea {
namespace {

constexpr const char* schema_text =
#include "receipt_schema.inc"
    ;

struct ParsedSchema {
  nlohmann::json document = nlohmann::json::parse(schema_text);
  valijson::Schema schema;

  ParsedSchema() {
    valijson::adapters::NlohmannJsonAdapter adapter(document);
    valijson::SchemaParser(valijson::SchemaParser::kDraft7).populateSchema(adapter, schema);
  }
};

}  // namespace

std::vector<std::string> schema_violations(const nlohmann::json& document) {
  static const ParsedSchema parsed;
  valijson::Validator validator(valijson::Validator::kStrongTypes);
  valijson::ValidationResults results;
  valijson::adapters::NlohmannJsonAdapter adapter(document);
  if (validator.validate(parsed.schema, adapter, &results)) return {};
  // One wrong member also fails every object around it: the innermost places say what is wrong.
  struct Violation {
    size_t depth;
    std::string text;
  };
  std::vector<Violation> found;
  valijson::ValidationResults::Error error;
  while (results.popError(error)) {
    std::string text;
    for (const std::string& part : error.context) text += part == "<root>" ? "$" : part;
    text.append(": ").append(error.description);
    found.push_back({error.context.size(), text});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Violation& a, const Violation& b) { return a.depth > b.depth; });
  std::vector<std::string> texts;
  for (Violation& v : found) texts.push_back(std::move(v.text));
  if (texts.empty()) texts.push_back("$: breaks the schema");
  return texts;
}

}  // namespace talea
