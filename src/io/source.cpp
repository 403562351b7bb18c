// What: Source over pread and over memory.
// Why: plain reads instead of mmap: a file that shrinks under us is an error, not a SIGBUS.
// Never: retries a short read past the end of the file.
#include "io/source.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/fail.hpp"

namespace talea::io {

Source Source::open(const std::string& path) {
  // O_NONBLOCK: opening a pipe nobody writes to must not hang before we can refuse it.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0)
    fail(ErrorKind::invalid_data, "{}: cannot open: {}", path, std::strerror(errno));
  Source source;
  source.name_ = path;
  source.descriptor_ = std::shared_ptr<const int>(new int(descriptor), [](const int* d) {
    ::close(*d);
    delete d;
  });
  struct stat facts {};
  require(::fstat(descriptor, &facts) == 0, ErrorKind::runtime, "{}: cannot stat: {}", path,
          std::strerror(errno));
  require(S_ISREG(facts.st_mode), ErrorKind::invalid_data, "{}: not a regular file", path);
  source.size_ = facts.st_size;
  return source;
}

Source Source::memory(std::string name, std::string_view bytes) {
  Source source;
  source.name_ = std::move(name);
  source.size_ = static_cast<int64_t>(bytes.size());
  source.bytes_ = bytes;
  return source;
}

void Source::read(int64_t offset, void* into, int64_t bytes, const char* field) const {
  require(offset >= 0 && bytes >= 0 && offset <= size_ && bytes <= size_ - offset,
          ErrorKind::invalid_data, "{}: {}: truncated: {} bytes needed at offset {}, file has {}",
          name_, field, bytes, offset, size_);
  if (!descriptor_) {
    if (bytes > 0) std::memcpy(into, bytes_.data() + offset, static_cast<size_t>(bytes));
    return;
  }
  char* next = static_cast<char*>(into);
  while (bytes > 0) {
    const auto part = static_cast<size_t>(std::min<int64_t>(bytes, int64_t{1} << 30));
    const ssize_t got = ::pread(*descriptor_, next, part, offset);
    if (got < 0 && errno == EINTR) continue;
    require(got >= 0, ErrorKind::runtime, "{}: {}: read failed: {}", name_, field,
            std::strerror(errno));
    require(got > 0, ErrorKind::invalid_data, "{}: {}: the file shrank while it was read", name_,
            field);
    next += got;
    offset += got;
    bytes -= got;
  }
}

std::string Source::read_text(int64_t offset, int64_t bytes, const char* field) const {
  require(offset >= 0 && bytes >= 0 && offset <= size_ && bytes <= size_ - offset,
          ErrorKind::invalid_data, "{}: {}: truncated: {} bytes needed at offset {}, file has {}",
          name_, field, bytes, offset, size_);
  std::string text(static_cast<size_t>(bytes), '\0');
  read(offset, text.data(), bytes, field);
  return text;
}

std::string read_text_file(const std::string& path, int64_t limit_bytes) {
  const Source source = Source::open(path);
  require(source.size() <= limit_bytes, ErrorKind::invalid_data,
          "{}: {} bytes: larger than the {} bytes this kind of file may have", path, source.size(),
          limit_bytes);
  return source.read_text(0, source.size(), "text");
}

}  // namespace talea::io
