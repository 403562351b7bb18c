// What: the scan in phases, forward and backward, heads and tokens over ranks, against thread ranks.
// Why: a caller's own process group must give bit for bit what a communicator gives.
// Never: lets a rank run beside another.
#include "ops/mamba3/cuts.hpp"
#include "support/drive_phases.hpp"
#include "talea/ranks.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

using Bounds = std::vector<int64_t>;

Outcome one_rank(const Case& whole, const Bounds& bounds, bool tokens, Communicator& c) {
  const auto r = static_cast<size_t>(c.rank());
  How how;
  if (tokens) {
    how.ranks.sequence = &c;
    how.ranks.token_begin = bounds[r];
    return run("cpu", tokens_of(whole, bounds[r], bounds[r + 1]), how);
  }
  how.ranks.heads = &c;
  how.ranks.head_begin = bounds[r];
  how.ranks.total_heads = whole.size.H;
  how.ranks.total_groups = whole.size.G;
  return run("cpu", heads_of(whole, bounds[r], bounds[r + 1], 0, whole.size.G), how);
}

void expect_thread_ranks(const Case& whole, const Bounds& bounds, bool tokens) {
  const int ranks = static_cast<int>(bounds.size()) - 1;
  std::vector<Outcome> in_phases(bounds.size()), by_threads(bounds.size());
  testing::Calls calls;
  for (int r = 0; r < ranks; ++r) {
    PhaseGroup group{r, ranks};
    group.group = tokens ? ExchangeGroup::sequence : ExchangeGroup::heads;
    calls.push_back(std::make_unique<Phases>(
        std::vector<PhaseGroup>{group}, [&, r, tokens](std::span<Communicator* const> worlds) {
          in_phases[static_cast<size_t>(r)] = one_rank(whole, bounds, tokens, *worlds[0]);
        }));
  }
  EXPECT_GT(testing::drive(calls), 0);
  run_thread_ranks(ranks, 30, [&](Communicator& c) {
    by_threads[static_cast<size_t>(c.rank())] = one_rank(whole, bounds, tokens, c);
  });
  for (int r = 0; r < ranks; ++r)
    EXPECT_EQ(
        same_bits(in_phases[static_cast<size_t>(r)].out, by_threads[static_cast<size_t>(r)].out),
        "")
        << "rank " << r << " of " << ranks << (tokens ? ", tokens" : ", heads");
}

TEST(ScanPhases, EqualThreadRanksBitForBit) {
  Case c = usual(12);
  c.size.shared_angles = false;
  c.options.chunk = 4;
  c.options.threads = 1;
  for (const Bounds& bounds : {Bounds{0, 7, 12}, {0, 0, 5, 12}, {0, 1, 5, 6, 12}})
    expect_thread_ranks(c, bounds, true);
  for (const Bounds& bounds : {Bounds{0, 2, 4}, {0, 1, 4}, {0, 0, 3, 4}, {0, 1, 2, 3, 4}})
    expect_thread_ranks(c, bounds, false);
}

}  // namespace
}  // namespace talea::yardsticks::mamba3
