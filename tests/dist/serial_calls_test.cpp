// What: threads that share one library through SerialCalls never meet inside, nor after the end.
// Why: an NCCL communicator that two threads asked for its state at once was freed twice.
// Never: needs a GPU.
#include "dist/serial_calls.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace talea {
namespace {

// As NCCL: knows when two are inside, or one after the end.
struct Fragile {
  std::atomic<int> inside{0}, calls{0}, wrong{0};
  std::atomic<bool> gone{false};
  int call() {
    if (gone || inside.fetch_add(1) > 0) ++wrong;
    ++calls;
    std::this_thread::yield();
    --inside;
    return 1;
  }
};

TEST(SerialCalls, OneThreadAtATimeAndNoneAfterTheEnd) {
  Fragile library;
  SerialCalls calls;
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      while (!over) {
        if (t == 0)
          calls.try_run(0, [&] { return library.call(); });
        else
          calls.run(0, [&] { return library.call(); });
      }
    });
  while (library.calls < 20000) std::this_thread::yield();
  calls.end([&] {
    library.call();
    library.gone = true;
  });
  const int at_end = library.calls;
  EXPECT_EQ(calls.run(7, [&] { return library.call(); }), 7);
  EXPECT_EQ(calls.try_run(8, [&] { return library.call(); }), 8);
  calls.end([&] { library.call(); });
  over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(library.calls, at_end);
  EXPECT_EQ(library.wrong, 0);
}

TEST(SerialCalls, TryRunLeavesWhileAnotherIsInside) {
  SerialCalls calls;
  std::atomic<bool> inside{false}, leave{false};
  std::thread slow([&] {
    calls.run(0, [&] {
      inside = true;
      while (!leave) std::this_thread::yield();
      return 1;
    });
  });
  while (!inside) std::this_thread::yield();
  EXPECT_EQ(calls.try_run(5, [] { return 1; }), 5);
  leave = true;
  slow.join();
  EXPECT_EQ(calls.try_run(5, [] { return 1; }), 1);
}

}  // namespace
}  // namespace talea
