// What: the pieces of a workspace.
// Why: a piece of no bytes once had the address of the next one, and what was written there by
// mistake was another's.
// Never: measures time.
#include "core/arena.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace talea {
namespace {

TEST(Arena, NothingHasNoAddress) {
  std::vector<char> memory(4096);
  Arena arena(Workspace{memory.data() + 1, static_cast<int64_t>(memory.size()) - 1});
  const auto* first = arena.take<double>(3);
  EXPECT_EQ(arena.take<int8_t>(0), nullptr);
  const auto* second = arena.take<float>(5);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % Arena::alignment, 0u);
  EXPECT_EQ(reinterpret_cast<const char*>(second) - reinterpret_cast<const char*>(first),
            Arena::alignment);
}

TEST(Arena, CountsWhatItWouldHandOut) {
  Arena counting;
  EXPECT_EQ(counting.take<double>(3), nullptr);
  EXPECT_EQ(counting.take<double>(0), nullptr);
  counting.take<float>(65);
  EXPECT_EQ(counting.bytes(), (1 + 2 + 1) * Arena::alignment);  // the last: an unaligned address
  std::vector<char> memory(static_cast<size_t>(counting.bytes()) - 1);
  Arena short_of_one(Workspace{memory.data(), static_cast<int64_t>(memory.size())});
  short_of_one.take<double>(3);
  short_of_one.take<float>(65);
  EXPECT_THROW(short_of_one.take<char>(257), Error);
}

}  // namespace
}  // namespace talea
