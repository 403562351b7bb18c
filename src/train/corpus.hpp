// What: text files as one array of bytes, the vocabulary of a byte-level model.
// Why: every file is data; no tokenizer stands between the user's text and the run.
// Never: interprets an encoding.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace talea::train {

struct Corpus {
  std::vector<uint8_t> bytes;
  std::string hash;  // of the bytes, 16 hex digits; names the data in receipts and checkpoints
};

// Files are joined in the order given. Throws Error(invalid_data) naming a file that cannot be read
// or is empty.
Corpus read_corpus(const std::vector<std::string>& files);

uint64_t hash_bytes(const void* data, int64_t bytes, uint64_t seed = 0);

}  // namespace talea::train
