// What: ranks that meet in a mapped file, here as threads of one process; lost ranks by name.
// Why: GPU processes without MPI shake hands there, and learn there who is missing.
// Never: waits for a rank longer than its timeout.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

#include "support/temp_dir.hpp"
#include "yardsticks/linear_cross_entropy/ranks.hpp"

namespace talea::testing {
namespace {

using Body = std::function<void(Communicator&)>;

// What each rank of a world throws; empty: nothing. A rank of `absent` does not come.
std::vector<std::string> run_world(int ranks, double timeout_s, int absent, const Body& body) {
  const TempDir folder;
  const std::string file = folder.file("world");
  std::vector<std::string> said(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    if (r != absent)
      threads.emplace_back([&, r] {
        try {
          const auto c = make_shared_communicator({r, ranks, file, timeout_s});
          body(*c);
        } catch (const Error& e) {
          said[r] = e.what();
        }
      });
  for (std::thread& t : threads) t.join();
  return said;
}

TEST(SharedRanks, EqualTheWorldOfOne) {
  for (const size_t which : {size_t{0}, size_t{3}, size_t{7}}) {
    const auto [name, whole] = rank_matrix()[which];
    const CaseOutputs single = run_single(whole, "cpu");
    for (int ranks : {1, 2, 4}) {
      const auto said = run_world(ranks, 20, -1, [&, &whole = whole](Communicator& c) {
        const Layout shards = layout("ragged", whole.vocab(), ranks);
        EXPECT_EQ("", check_rank(whole, single, shards, false, "cpu", c));
      });
      for (const std::string& s : said) EXPECT_EQ(s, "");
    }
  }
}

TEST(SharedRanks, SumsOfEverySize) {
  for (int64_t count : {0, 1, 3, 100000})
    for (const std::string& said : run_world(3, 20, -1, [&](Communicator& c) {
           std::vector<int64_t> sum(static_cast<size_t>(count), c.rank() + 1);
           c.all_reduce_sum(sum.data(), count, DType::i64, nullptr);
           for (int64_t v : sum) ASSERT_EQ(v, 6);
         }))
      EXPECT_EQ(said, "");
}

TEST(SharedRanks, ARankThatNeverComesOrLeavesIsNamed) {
  for (int run = 0; run < 20; ++run) {
    const int culprit = run % 3;
    const bool leaves = run % 2;
    const auto said = run_world(3, leaves ? 20 : 0.1, leaves ? -1 : culprit, [&](Communicator& c) {
      if (c.rank() == culprit) return;
      double value = 1;
      c.all_reduce_sum(&value, 1, DType::f64, nullptr);
    });
    for (int r = 0; r < 3; ++r)
      if (r != culprit) {
        EXPECT_EQ(said[r].rfind("rank " + std::to_string(culprit) + ": " +
                                    (leaves ? "left the world" : "did not arrive"),
                                0),
                  0u)
            << said[r];
      }
  }
}

// A process that is gone is noticed at once, not at the timeout.
TEST(SharedRanks, AProcessThatDiedIsNamedAtOnce) {
  const TempDir folder;
  const std::string file = folder.file("world");
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto c = make_shared_communicator({1, 2, file, 20});
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  const auto c = make_shared_communicator({0, 2, file, 20});
  const auto begin = std::chrono::steady_clock::now();
  try {
    double value = 1;
    c->all_reduce_sum(&value, 1, DType::f64, nullptr);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).rfind("rank 1: left the world of 2 processes", 0), 0u)
        << e.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

}  // namespace
}  // namespace talea::testing
