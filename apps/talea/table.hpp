// What: aligned tables, a verdict line and figures with units, on stdout.
// Why: results are read by people first; the same few shapes in every subcommand.
// Never: colours a pipe, or anything under NO_COLOR.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace talea::cli {

class Table {
 public:
  // A heading that starts with '>' is a column of numbers, aligned to the right.
  explicit Table(std::vector<std::string> headings);
  void row(std::vector<std::string> cells);
  void print() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<bool> right_;
};

// Two columns: name and value.
class Facts {
 public:
  void add(std::string name, std::string value);
  void print() const;

 private:
  std::vector<std::pair<std::string, std::string>> rows_;
};

// An array of objects as JSON: one document, or an object a line.
void print_list(const nlohmann::json& list, bool lines);

void heading(const std::string& text);
// The last line: what came of it, in green or red on a terminal.
void verdict(bool good, const std::string& text);

std::string human_bytes(int64_t bytes);  // "189.5 KiB"
std::string human_ms(double ms);         // "12.3 ms"
std::string human_count(double n);       // "1.26 T"
std::string grouped(int64_t n);          // "128 256"

}  // namespace talea::cli
