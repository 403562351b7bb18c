// What: the checks of strict_json.hpp on top of the library's event parser.
// Why: events let us stop at the first bad key instead of building the document first.
// Never: recurses: nesting costs a vector, not the stack.
#include "core/strict_json.hpp"

#include <vector>

#include "core/fail.hpp"

namespace talea {
namespace {

using json = nlohmann::json;

class StrictBuilder : public nlohmann::json_sax<json> {
 public:
  StrictBuilder(const std::string& file, int max_depth) : file_(file), max_depth_(max_depth) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }

  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& value) override {
    json& object = *stack_.back();
    require(!object.contains(value), ErrorKind::invalid_data, "{}: key {} appears twice", file_,
            quote(value));
    slot_ = &object[value];
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    fail(ErrorKind::invalid_data, "{}: not valid JSON at byte {}: {}", file_, position,
         quote(error.what()));
  }

  json take() { return std::move(root_); }

 private:
  json* place(json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (stack_.back()->is_array()) {
      stack_.back()->push_back(std::move(value));
      return &stack_.back()->back();
    }
    *slot_ = std::move(value);
    return slot_;
  }

  bool put(json value) {
    place(std::move(value));
    return true;
  }

  bool open(json value) {
    require(static_cast<int>(stack_.size()) < max_depth_, ErrorKind::invalid_data,
            "{}: nested deeper than {} levels", file_, max_depth_);
    stack_.push_back(place(std::move(value)));
    return true;
  }

  bool close() {
    stack_.pop_back();
    return true;
  }

  const std::string& file_;
  const int max_depth_;
  json root_;
  json* slot_ = nullptr;
  std::vector<json*> stack_;  // stays valid: only the innermost container grows
};

}  // namespace

std::string quote(std::string_view text) {
  constexpr size_t limit = 200;
  std::string safe = "'";
  for (const char c : text.substr(0, limit)) safe += c < ' ' || c > '~' ? '?' : c;
  return safe.append(text.size() > limit ? "...'" : "'");
}

nlohmann::json parse_strict_json(const std::string& file, std::string_view text, int max_depth) {
  // The library's scanner takes a zero byte for the end of its input.
  const size_t zero = text.find('\0');
  require(zero == std::string_view::npos, ErrorKind::invalid_data,
          "{}: not valid JSON at byte {}: zero byte", file, zero);
  StrictBuilder builder(file, max_depth);
  json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

}  // namespace talea
