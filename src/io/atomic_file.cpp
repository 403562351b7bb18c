// What: AtomicFile over the POSIX calls.
// Why: one place knows the order write, fsync, rename, fsync of the directory.
// Never: swallows a failed write or sync.
#include "io/atomic_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "core/fail.hpp"

namespace talea::io {
namespace {

std::string directory_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string resolve_links(const std::string& path) {
  char resolved[PATH_MAX];
  return ::realpath(path.c_str(), resolved) ? resolved : path;
}

}  // namespace

void AtomicFile::fail_io(const char* action) const {
  const int number = errno;
  fail(ErrorKind::runtime, "{}: {}: {}", path_, action, std::strerror(number));
}

AtomicFile::AtomicFile(const std::string& path) : path_(path), target_(path) {
  struct stat facts {};
  const bool exists = ::stat(path.c_str(), &facts) == 0;
  if (exists && S_ISDIR(facts.st_mode)) {
    errno = EISDIR;
    fail_io("cannot write");
  }
  if (exists && !S_ISREG(facts.st_mode)) {
    sync_ = false;
    descriptor_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (descriptor_ < 0) fail_io("cannot write");
    return;
  }
  if (exists) target_ = resolve_links(path);
  static std::atomic<unsigned> counter{0};
  for (int attempt = 0; attempt < 100; ++attempt) {
    temporary_ = fmt::format("{}.tmp-{}-{}", target_, ::getpid(), counter++);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0 || errno != EEXIST) break;
  }
  if (descriptor_ < 0) {
    temporary_.clear();
    fail_io("cannot create a temporary beside it");
  }
  if (exists && ::fchmod(descriptor_, facts.st_mode & 07777) != 0) {
    // Keeping the old mode is a courtesy; a file system without modes is no reason to fail.
    errno = 0;
  }
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, int64_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto part = static_cast<size_t>(std::min<int64_t>(bytes, int64_t{1} << 30));
    const ssize_t done = ::write(descriptor_, next, part);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail_io("write failed");
    next += done;
    bytes -= done;
  }
}

void AtomicFile::commit() {
  if (sync_ && ::fsync(descriptor_) != 0) fail_io("fsync failed");
  const int closing = descriptor_;
  descriptor_ = -1;
  if (::close(closing) != 0) fail_io("close failed");
  if (temporary_.empty()) return;
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail_io("rename failed");
  temporary_.clear();
  // The new name itself must survive a crash. Some file systems cannot sync a directory; the file
  // is complete under its name either way.
  const int directory = ::open(directory_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return;
  const bool synced = ::fsync(directory) == 0 || errno == EINVAL || errno == EROFS;
  ::close(directory);
  if (!synced) fail_io("fsync of the directory failed");
}

void write_file_atomically(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace talea::io
