// What: reads text files whole.
// Why: parity corpora are megabytes, and shuffled windows need all of them.
// Never: follows a directory; the command line expands what the user named.
#include "train/corpus.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "core/fail.hpp"
#include "train/random.hpp"

namespace talea::train {

uint64_t hash_bytes(const void* data, int64_t bytes, uint64_t seed) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t h = mix(seed ^ static_cast<uint64_t>(bytes));
  for (; bytes >= 8; bytes -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    h = mix(h ^ word);
  }
  uint64_t tail = 0;
  std::memcpy(&tail, p, static_cast<size_t>(bytes));
  return mix(h ^ tail);
}

Corpus read_corpus(const std::vector<std::string>& files) {
  Corpus corpus;
  for (const std::string& name : files) {
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(name.c_str(), "rb"), &std::fclose);
    require(file != nullptr, ErrorKind::invalid_data, "text file {}: {}", name,
            std::strerror(errno));
    const size_t before = corpus.bytes.size();
    char buffer[1 << 16];
    size_t got;
    while ((got = std::fread(buffer, 1, sizeof buffer, file.get())) > 0)
      corpus.bytes.insert(corpus.bytes.end(), buffer, buffer + got);
    require(!std::ferror(file.get()), ErrorKind::invalid_data, "text file {}: {}", name,
            std::strerror(errno));
    require(corpus.bytes.size() > before, ErrorKind::invalid_data, "text file {}: is empty", name);
  }
  corpus.hash = fmt::format(
      "{:016x}", hash_bytes(corpus.bytes.data(), static_cast<int64_t>(corpus.bytes.size())));
  return corpus;
}

}  // namespace talea::train
