// What: the operator in phases, all ranks driven by one loop on one thread, against thread ranks.
// Why: a caller's own process group must give bit for bit what a communicator gives.
// Never: lets a rank run beside another: the loop is the only one that moves bytes.
#include "talea/phases.hpp"

#include <gtest/gtest.h>

#include "support/drive_phases.hpp"
#include "support/expect_error.hpp"
#include "yardsticks/linear_cross_entropy/compare.hpp"
#include "yardsticks/linear_cross_entropy/ranks.hpp"

namespace talea::testing {
namespace {

struct World {
  std::vector<CaseOutputs> out;
  Calls calls;

  World(const Case& whole, const Layout& shards, bool sequence, const std::string& lane) {
    const int ranks = static_cast<int>(shards.size());
    out.resize(shards.size());
    for (int r = 0; r < ranks; ++r)
      calls.push_back(std::make_unique<Phases>(
          PhaseGroup{r, ranks}, PhaseGroup{},
          [=, this, &whole](Communicator& vocab, Communicator&) {
            LinearCrossEntropyRanks own;
            own.vocab = &vocab;
            own.vocab_begin = shards[r].begin;
            own.sequence_parallel = sequence;
            out[r] = run_rank(shard_case(whole, shards[r], sequence, r, ranks), lane, own).out;
          }));
  }
};

std::vector<CaseOutputs> by_threads(const Case& whole, const Layout& shards, bool sequence,
                                    const std::string& lane) {
  std::vector<CaseOutputs> out(shards.size());
  run_thread_ranks(static_cast<int>(shards.size()), 20, [&](Communicator& c) {
    LinearCrossEntropyRanks own;
    own.vocab = &c;
    own.vocab_begin = shards[c.rank()].begin;
    own.sequence_parallel = sequence;
    out[c.rank()] =
        run_rank(shard_case(whole, shards[c.rank()], sequence, c.rank(), c.size()), lane, own).out;
  });
  return out;
}

TEST(Phases, EqualThreadRanksBitForBit) {
  for (const auto& [name, whole] : rank_matrix())
    for (const char* lane : {"cpu", "reference"})
      for (int ranks : {2, 3, 4})
        for (bool sequence : {false, true}) {
          const Layout shards = layout("ragged", whole.vocab(), ranks);
          World world(whole, shards, sequence, lane);
          EXPECT_GT(drive(world.calls), 0);
          const auto threads = by_threads(whole, shards, sequence, lane);
          for (int r = 0; r < ranks; ++r)
            EXPECT_EQ("", same_bits(world.out[r], threads[r]))
                << name << ", " << lane << ", rank " << r << " of " << ranks << ", sequence "
                << sequence;
        }
}

// What begins is asked for as begun only where the group said what it takes beside a product.
TEST(Phases, BegunExchangesComeWhereTheGroupSaysWhatTheyTake) {
  using enum ExchangeKind;
  float a[2] = {}, b[4] = {};
  for (const int beside : {0, 4}) {
    PhaseGroup group{0, 2};
    group.multiprocessors_beside = beside;
    Phases call(group, {}, [&](Communicator& c, Communicator&) {
      EXPECT_EQ(c.multiprocessors_beside(), beside);
      c.join(nullptr);
      c.begin_all_gather(a, b, sizeof a, nullptr);
      c.begin_all_reduce_sum(a, 2, DType::f32, nullptr);
      c.all_reduce_sum(a, 1, DType::f32, nullptr);
      c.begin_reduce_scatter_sum(b, a, 2, DType::f32, nullptr);
      c.join(nullptr);
      c.join(nullptr);
    });
    std::vector<ExchangeKind> met;
    while (const Exchange* e = call.next()) met.push_back(e->kind);
    const std::vector<ExchangeKind> at_once = {all_gather, all_reduce_sum, all_reduce_sum,
                                               reduce_scatter_sum};
    const std::vector<ExchangeKind> begun = {begun_all_gather, begun_all_reduce_sum, all_reduce_sum,
                                             begun_reduce_scatter_sum, join};
    EXPECT_EQ(met, beside ? begun : at_once);
  }
}

TEST(Phases, AWorldOfOneHasNoExchange) {
  const Case whole = rank_matrix()[3].second;
  World world(whole, layout("even", whole.vocab(), 1), false, "cpu");
  EXPECT_EQ(drive(world.calls), 0);
  EXPECT_EQ("", same_bits(world.out[0], run_single(whole, "cpu")));
}

TEST(Phases, AnErrorComesOutOfNextAndTheOthersAreGivenUp) {
  const Case whole = rank_matrix()[0].second;
  Case bad = whole;
  bad.in.targets.set_integer(5, 0, 999);
  LinearCrossEntropyRanks ranks;
  Phases call({0, 2}, {}, [&](Communicator& vocab, Communicator&) {
    ranks.vocab = &vocab;
    ranks.handshake = false;
    run_rank(shard_case(bad, {0, 20, 0}, false, 0, 2), "reference", ranks);
  });
  expect_error(ErrorKind::invalid_data, {"targets[5] = 999"}, [&] { call.next(); });
  EXPECT_EQ(call.next(), nullptr);  // it has ended

  // Two ranks stand at their first exchange and are destroyed there.
  World world(whole, layout("even", whole.vocab(), 2), false, "cpu");
  for (auto& c : world.calls) EXPECT_NE(c->next(), nullptr);
}

TEST(Phases, TheHandshakeNamesTheFieldThatDiffers) {
  const Case whole = rank_matrix()[0].second;
  const Layout shards = layout("even", whole.vocab(), 2);
  Calls calls;
  for (int r = 0; r < 2; ++r)
    calls.push_back(std::make_unique<Phases>(
        PhaseGroup{r, 2}, PhaseGroup{}, [&, r](Communicator& vocab, Communicator&) {
          Case own = whole;
          if (r == 1) own.options.softcap = 30;
          LinearCrossEntropyRanks ranks;
          ranks.vocab = &vocab;
          ranks.vocab_begin = shards[r].begin;
          run_rank(shard_case(own, shards[r], false, r, 2), "cpu", ranks);
        }));
  expect_error(ErrorKind::invalid_data, {"softcap: the ranks disagree: 0 on rank 0, 30 on rank 1"},
               [&] { drive(calls); });
}

}  // namespace
}  // namespace talea::testing
