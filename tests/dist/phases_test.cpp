// What: the operator in phases, all ranks driven by one loop on one thread, against thread ranks.
// Why: a caller's own process group must give bit for bit what a communicator gives.
// Never: lets a rank run beside another: the loop is the only one that moves bytes.
#include "talea/phases.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "support/expect_error.hpp"
#include "yardsticks/linear_cross_entropy/compare.hpp"
#include "yardsticks/linear_cross_entropy/ranks.hpp"

namespace talea::testing {
namespace {

template <typename T>
void sum_into(void* to, const std::vector<const char*>& from, int64_t count) {
  std::vector<T> sum(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    sum[i] = reinterpret_cast<const T*>(from[0])[i];
    for (size_t r = 1; r < from.size(); ++r) sum[i] += reinterpret_cast<const T*>(from[r])[i];
  }
  std::memcpy(to, sum.data(), sum.size() * sizeof(T));
}

// What a process group does, for all its ranks at once. Sums run in rank order.
void perform(const std::vector<const Exchange*>& all) {
  const int ranks = static_cast<int>(all.size());
  const Exchange& e = *all[0];
  ASSERT_GT(e.bytes, 0);
  const auto bytes = static_cast<size_t>(e.bytes);
  for (const Exchange* other : all) {
    ASSERT_EQ(other->kind, e.kind);
    ASSERT_EQ(other->bytes, e.bytes);
    ASSERT_EQ(other->group, e.group);
  }
  std::vector<std::vector<char>> sent;
  for (const Exchange* from : all) {
    const size_t blocks = e.kind == ExchangeKind::reduce_scatter_sum ? ranks : 1;
    const char* data = static_cast<const char*>(from->send);
    sent.emplace_back(data, data + blocks * bytes);
  }
  for (int to = 0; to < ranks; ++to) {
    if (e.kind == ExchangeKind::all_gather) {
      for (int r = 0; r < ranks; ++r)
        std::memcpy(static_cast<char*>(all[to]->recv) + r * bytes, sent[r].data(), bytes);
      continue;
    }
    std::vector<const char*> parts;
    const size_t block = e.kind == ExchangeKind::reduce_scatter_sum ? to : 0;
    for (const auto& s : sent) parts.push_back(s.data() + block * bytes);
    if (e.dtype == DType::f64)
      sum_into<double>(all[to]->recv, parts, e.count);
    else if (e.dtype == DType::f32)
      sum_into<float>(all[to]->recv, parts, e.count);
    else
      FAIL() << "a sum of " << name_of(e.dtype);
  }
}

using Calls = std::vector<std::unique_ptr<Phases>>;

// The exchanges of a world driven to its end.
int64_t drive(Calls& calls) {
  for (int64_t exchanges = 0;; ++exchanges) {
    std::vector<const Exchange*> all;
    for (auto& call : calls) all.push_back(call->next());
    if (!all[0]) {
      for (const Exchange* e : all) EXPECT_EQ(e, nullptr);
      return exchanges;
    }
    perform(all);
  }
}

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
