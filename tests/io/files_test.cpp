// What: atomic writes, bounded reads, sizes and hashes.
// Why: a full disk leaves the old file or none; a pipe or directory is refused, not waited for.
// Never: fills a real disk: the limit on file size stands in for it.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "core/half.hpp"
#include "io/atomic_file.hpp"
#include "io/npy.hpp"
#include "io/sha256.hpp"
#include "support/expect_error.hpp"
#include "support/temp_dir.hpp"

namespace talea::io {
namespace {

using testing::expect_error;
using testing::slurp;
using testing::spill;
using testing::TempDir;

// Writes beyond `bytes` fail with EFBIG while this lives, as they would on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &old_); }

 private:
  rlimit old_{};
};

TEST(AtomicFile, ReplacesAndKeepsTheMode) {
  const TempDir dir;
  const std::string path = dir.file("a");
  write_file_atomically(path, "old");
  ::chmod(path.c_str(), 0640);
  write_file_atomically(path, "new");
  EXPECT_EQ(slurp(path), "new");
  struct stat facts {};
  ASSERT_EQ(::stat(path.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 07777, 0640u);
  EXPECT_EQ(dir.entries(), 1u);
}

TEST(AtomicFile, WithoutCommitNothingChanges) {
  const TempDir dir;
  const std::string path = dir.file("a");
  write_file_atomically(path, "old");
  {
    AtomicFile file(path);
    file.write("half of the n");
  }
  EXPECT_EQ(slurp(path), "old");
  EXPECT_EQ(dir.entries(), 1u);
}

TEST(AtomicFile, AFailedWriteKeepsTheOldFileAndLeavesNoTemporary) {
  const TempDir dir;
  const std::string path = dir.file("a.npy");
  spill(path, "old");
  const HostTensor big = allocate_tensor(DType::f32, {100000});
  {
    const FileSizeLimit limit(4096);
    expect_error(ErrorKind::runtime, {"a.npy", "write failed"}, [&] { write_npy(path, big.view); });
    expect_error(ErrorKind::runtime, {"b.npy", "write failed"},
                 [&] { write_npy(dir.file("b.npy"), big.view); });
  }
  EXPECT_EQ(slurp(path), "old");
  EXPECT_EQ(dir.entries(), 1u);
}

TEST(AtomicFile, DevicesAreWrittenNotReplaced) {
  write_file_atomically("/dev/null", "gone");
  expect_error(ErrorKind::runtime, {"/dev/full", "No space left"},
               [] { write_file_atomically("/dev/full", "text"); });
  struct stat facts {};
  ASSERT_EQ(::stat("/dev/full", &facts), 0);
  EXPECT_TRUE(S_ISCHR(facts.st_mode));
  ASSERT_EQ(::stat("/dev/null", &facts), 0);
  EXPECT_TRUE(S_ISCHR(facts.st_mode));
}

TEST(AtomicFile, FollowsALinkAndRefusesADirectory) {
  const TempDir dir;
  spill(dir.file("real"), "old");
  std::filesystem::create_symlink("real", dir.file("link"));
  write_file_atomically(dir.file("link"), "new");
  EXPECT_EQ(slurp(dir.file("real")), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(dir.file("link")));
  expect_error(ErrorKind::runtime, {dir.path().c_str(), "directory"},
               [&] { write_file_atomically(dir.path().string(), "x"); });
  expect_error(ErrorKind::runtime, {"missing/x"},
               [&] { write_file_atomically(dir.file("missing/x"), "x"); });
}

TEST(Source, RefusesWhatIsNoRegularFile) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo(dir.file("pipe.npy").c_str(), 0600), 0);
  expect_error(ErrorKind::invalid_data, {"pipe.npy", "regular"},
               [&] { read_npy(dir.file("pipe.npy")); });
  expect_error(ErrorKind::invalid_data, {"regular"}, [&] { read_npy(dir.path().string()); });
  expect_error(ErrorKind::invalid_data, {"none.npy", "No such file"},
               [&] { read_npy(dir.file("none.npy")); });
  spill(dir.file("big.txt"), std::string(100, 'x'));
  expect_error(ErrorKind::invalid_data, {"big.txt", "100"},
               [&] { read_text_file(dir.file("big.txt"), 99); });
  EXPECT_EQ(read_text_file(dir.file("big.txt"), 100).size(), 100u);
}

TEST(HostTensor, SizesAreCheckedBeforeMemoryIsTaken) {
  EXPECT_EQ(checked_bytes(DType::f32, std::vector<int64_t>{2, 3}), 24);
  EXPECT_EQ(checked_bytes(DType::f32, std::vector<int64_t>{}), 4);
  EXPECT_EQ(checked_bytes(DType::f32, std::vector<int64_t>{2, -3}), -1);
  EXPECT_EQ(checked_bytes(DType::f64, std::vector<int64_t>{int64_t{1} << 60}), -1);
  EXPECT_EQ(checked_bytes(DType::f32, std::vector<int64_t>{int64_t{1} << 40, 0, int64_t{1} << 40}),
            -1);
  expect_error(ErrorKind::invalid_data, {"[1, 2, 3, 4, 5, 6]"}, [] {
    allocate_tensor(DType::f32, {1, 2, 3, 4, 5, 6});
  });
}

TEST(Sha256, KnownAnswers) {
  EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  for (size_t split = 0; split < 130; ++split) {
    const std::string text(130, 'q');
    Sha256 hash;
    hash.add(text.data(), static_cast<int64_t>(split));
    hash.add(text.data() + split, static_cast<int64_t>(text.size() - split));
    EXPECT_EQ(hash.hex(), sha256_hex(text));
  }
}

}  // namespace
}  // namespace talea::io
