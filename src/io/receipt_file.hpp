// What: receipts to and from files.
// Why: a receipt exists only after its work has completed, whole, under its name.
// Never: writes one that the schema rejects.
#pragma once

#include <string>

#include "core/receipt.hpp"

namespace talea::io {

void write_receipt(const std::string& path, const Receipt& receipt);
Receipt read_receipt(const std::string& path);

}  // namespace talea::io
