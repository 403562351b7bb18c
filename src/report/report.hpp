// What: receipts -> one offline HTML page; two receipts -> what differs.
// Why: figures are read by people; a verdict that got worse must be found by a machine.
// Never: reads or writes a file, and never trusts a string of a receipt.
#pragma once

#include <string>
#include <vector>

#include "core/receipt.hpp"

namespace talea::report {

struct NamedReceipt {
  std::string file;  // as the caller named it
  Receipt receipt;
};

// A page of its own: styles and pictures inside, no script, no network.
std::string render_html(const std::vector<NamedReceipt>& receipts);

struct Difference {
  std::string field;  // a JSON pointer, e.g. /bench/runs/0/ratio
  std::string a, b;   // "absent" where there is none
};

struct Comparison {
  std::vector<Difference> differences;  // times, dates and host facts included
  std::vector<std::string> worse;       // why the verdict got worse; empty: it did not
};

// b against a. Worse: the verdict, a gate, case, mutant, sentinel or bug that passed in a and does
// not in b, or is gone. Figures that differ without changing a verdict are differences only.
Comparison compare(const Receipt& a, const Receipt& b);

}  // namespace talea::report
