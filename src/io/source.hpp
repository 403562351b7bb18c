// What: bounded random reads from a file or from bytes in memory.
// Why: a parser asks for bytes by offset and can never read, or allocate, past what there is.
// Never: interprets the bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace talea::io {

class Source {
 public:
  // Error(invalid_data) if it cannot be opened or is not a regular file.
  static Source open(const std::string& path);
  // The bytes must outlive the source. `name` stands for the file in messages.
  static Source memory(std::string name, std::string_view bytes);

  const std::string& name() const { return name_; }
  int64_t size() const { return size_; }
  // Error(invalid_data) naming `field` when the file ends before offset + bytes.
  void read(int64_t offset, void* into, int64_t bytes, const char* field) const;
  std::string read_text(int64_t offset, int64_t bytes, const char* field) const;

 private:
  std::string name_;
  int64_t size_ = 0;
  std::shared_ptr<const int> descriptor_;  // closed with the last copy; null: memory
  std::string_view bytes_;
};

// A whole text file of at most `limit_bytes`.
std::string read_text_file(const std::string& path, int64_t limit_bytes);

}  // namespace talea::io
