// What: the drawing of tables and the spelling of figures.
// Why: see table.hpp.
// Never: cuts a cell: what a receipt names must be readable in full.
#include "table.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

namespace talea::cli {
namespace {

bool colour() {
  static const bool on = ::isatty(STDOUT_FILENO) && !std::getenv("NO_COLOR");
  return on;
}

void put(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stdout); }

std::string dressed(const char* code, const std::string& text) {
  return colour() ? fmt::format("\033[{}m{}\033[0m", code, text) : text;
}

}  // namespace

Table::Table(std::vector<std::string> headings) {
  for (std::string& h : headings) {
    right_.push_back(!h.empty() && h[0] == '>');
    if (right_.back()) h.erase(0, 1);
  }
  rows_.push_back(std::move(headings));
}

void Table::row(std::vector<std::string> cells) {
  cells.resize(right_.size());
  rows_.push_back(std::move(cells));
}

void Table::print() const {
  std::vector<size_t> width(right_.size(), 0);
  for (const auto& row : rows_)
    for (size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
  for (size_t r = 0; r < rows_.size(); ++r) {
    std::string line = " ";
    for (size_t c = 0; c < width.size(); ++c) {
      const std::string pad(width[c] - rows_[r][c].size(), ' ');
      line += ' ';
      line += right_[c] ? pad + rows_[r][c] : rows_[r][c] + pad;
      line += ' ';
    }
    line.erase(line.find_last_not_of(' ') + 1);
    put((r == 0 ? dressed("1", line) : line) + "\n");
  }
}

void Facts::add(std::string name, std::string value) {
  rows_.emplace_back(std::move(name), std::move(value));
}

void Facts::print() const {
  size_t width = 0;
  for (const auto& [name, value] : rows_) width = std::max(width, name.size());
  for (const auto& [name, value] : rows_)
    put(fmt::format("  {}{}  {}\n", dressed("2", name), std::string(width - name.size(), ' '),
                    value));
}

void heading(const std::string& text) { put(dressed("1", text) + "\n"); }

void verdict(bool good, const std::string& text) {
  put(dressed(good ? "1;32" : "1;31", text) + "\n");
}

std::string human_bytes(int64_t bytes) {
  if (bytes < 0) return "not measured";
  if (bytes < 1024) return fmt::format("{} B", bytes);
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1000 && unit + 1 < std::size(units)) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, value < 10 ? 2 : value < 100 ? 1 : 0, units[unit]);
}

void print_list(const nlohmann::json& list, bool lines) {
  if (!lines) return fmt::print("{}\n", list.dump());
  for (const nlohmann::json& one : list) fmt::print("{}\n", one.dump());
}

std::string human_ms(double ms) {
  if (ms >= 10000) return fmt::format("{:.2f} s", ms / 1000);
  return fmt::format("{:.{}f} ms", ms, ms < 1 ? 3 : ms < 100 ? 2 : 1);
}

std::string human_count(double n) {
  const char* const units[] = {"", " k", " M", " G", " T", " P"};
  size_t unit = 0;
  while (n >= 1000 && unit + 1 < std::size(units)) {
    n /= 1000;
    ++unit;
  }
  return fmt::format("{:.4g}{}", n, units[unit]);
}

std::string grouped(int64_t n) {
  std::string digits = std::to_string(n);
  const int64_t first = n < 0 ? 1 : 0;
  for (int64_t at = static_cast<int64_t>(digits.size()) - 3; at > first; at -= 3)
    digits.insert(digits.begin() + at, ' ');
  return digits;
}

}  // namespace talea::cli
