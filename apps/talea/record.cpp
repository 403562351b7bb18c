// What: `bench --runs-from`, `check --results-from`: what another program measured, as a receipt.
// Why: one program writes receipts and holds them to the schema; scripts of bench/ call PyTorch.
// Never: measures, or changes a figure.
#include "record.hpp"

#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "core/strict_json.hpp"
#include "io/receipt_file.hpp"
#include "io/source.hpp"

namespace talea::cli {
namespace {

using json = nlohmann::json;
constexpr int64_t most_bytes = int64_t{16} << 20;
constexpr int most_depth = 16;

const json& field(const std::string& file, const json& document, const char* name,
                  json::value_t type) {
  const auto found = document.is_object() ? document.find(name) : document.end();
  require(found != document.end() && found->type() == type, ErrorKind::invalid_data,
          "{}: {}: missing, or of another type", file, name);
  return *found;
}

std::string text_of(const std::string& file, const char* name, const json& value) {
  require(value.is_string(), ErrorKind::invalid_data, "{}: {}: holds no text", file, name);
  return value.get<std::string>();
}

// Optional: the device that was used, where it is not one of this machine's.
void take_device(const std::string& file, const json& from, Provenance& provenance) {
  const auto found = from.find("device");
  if (found == from.end()) return;
  const auto text = [&](const char* name) {
    return field(file, *found, name, json::value_t::string).get<std::string>();
  };
  provenance.device = {text("name"), text("driver"), text("runtime"), text("clocks"),
                       text("throttle_reasons")};
}

// Passed where every case says so; there must be one.
bool all_passed(const std::string& file, const json& check) {
  const json& cases = field(file, check, "cases", json::value_t::array);
  require(!cases.empty(), ErrorKind::invalid_data, "{}: cases: there are none", file);
  bool passed = true;
  for (const json& one : cases)
    passed &= field(file, one, "passed", json::value_t::boolean).get<bool>();
  return passed;
}

}  // namespace

void record(Context& context, ReceiptKind kind, const std::string& file,
            const std::string& receipt_file) {
  require(!receipt_file.empty(), ErrorKind::usage, "{}: results of another program need --receipt",
          file);
  const json from = parse_strict_json(file, io::read_text_file(file, most_bytes), most_depth);
  Provenance provenance = provenance_of(context);
  provenance.argv.clear();  // of the program that measured
  for (const json& word : field(file, from, "argv", json::value_t::array))
    provenance.argv.push_back(text_of(file, "argv", word));
  provenance.start_time = field(file, from, "start_time", json::value_t::string);
  for (const auto& [name, version] : field(file, from, "libraries", json::value_t::object).items())
    provenance.libraries.emplace_back(name, text_of(file, "libraries", version));
  take_device(file, from, provenance);
  Receipt receipt(kind, provenance);
  receipt.title(field(file, from, "title", json::value_t::string));
  for (const json& note : field(file, from, "notes", json::value_t::array))
    receipt.note(text_of(file, "notes", note));
  const char* name = kind == ReceiptKind::check ? "check" : "bench";
  const json& section = field(file, from, name, json::value_t::object);
  receipt.section(name, section).verdict(Verdict::not_checked);
  if (kind == ReceiptKind::check) {
    const bool passed = all_passed(file, section);
    receipt.verdict(passed ? Verdict::passed : Verdict::failed);
    context.exit_code = passed ? 0 : static_cast<int>(ErrorKind::check_failed);
  }
  io::write_receipt(receipt_file, receipt);
  if (context.json) fmt::print("{}\n", receipt.text());
}

}  // namespace talea::cli
