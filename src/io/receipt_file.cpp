// What: atomic writing and bounded reading of receipts.
// Why: the same file rules as for tensors.
// Never: reads a file larger than any honest receipt.
#include "io/receipt_file.hpp"

#include "io/atomic_file.hpp"
#include "io/source.hpp"

namespace talea::io {

constexpr int64_t receipt_limit_bytes = int64_t{64} << 20;

void write_receipt(const std::string& path, const Receipt& receipt) {
  write_file_atomically(path, receipt.text());
}

Receipt read_receipt(const std::string& path) {
  return Receipt::parse(path, read_text_file(path, receipt_limit_bytes));
}

}  // namespace talea::io
