// What: a file that appears under its name complete or not at all.
// Why: a crash or a full disk must leave the old file or none, for tensors and receipts alike.
// Never: renames over a device, and never leaves its temporary behind when it is destroyed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace talea::io {

// Writes to a temporary beside `path`; commit() syncs and renames it. Symbolic links are followed.
// An existing path that is not a regular file (/dev/null, a pipe) is written directly. Throws
// Error(runtime) naming path and system error.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, int64_t bytes);
  void write(std::string_view text) { write(text.data(), static_cast<int64_t>(text.size())); }
  void commit();

 private:
  [[noreturn]] void fail_io(const char* action) const;

  std::string path_;       // as the caller named it
  std::string target_;     // with links resolved
  std::string temporary_;  // empty: writing directly
  int descriptor_ = -1;
  bool sync_ = true;
};

// The whole text in one call.
void write_file_atomically(const std::string& path, std::string_view text);

}  // namespace talea::io
