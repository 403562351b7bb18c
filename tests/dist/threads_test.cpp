// What: the operator over ranks as threads, against the world of one, and bad worlds of threads.
// Why: vocabulary and sequence parallelism must be exact in every option, and never hang.
// Never: measures time beyond the bound that the contract gives.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <thread>

#include "yardsticks/linear_cross_entropy/compare.hpp"
#include "yardsticks/linear_cross_entropy/ranks.hpp"

namespace talea::testing {
namespace {

constexpr double timeout_s = 20;
constexpr int worlds[] = {1, 2, 3, 4, 8};

class RankLanes : public ::testing::TestWithParam<const char*> {};

TEST_P(RankLanes, OptionMatrixEqualsTheWorldOfOne) {
  for (const auto& [name, whole] : rank_matrix())
    for (int ranks : worlds)
      for (bool sequence_parallel : {false, true})
        EXPECT_EQ("", run_world(whole, layout("even", whole.vocab(), ranks), sequence_parallel,
                                GetParam()))
            << name << ", " << ranks << " ranks, sequence parallel " << sequence_parallel;
}

TEST_P(RankLanes, EveryLayoutEqualsTheWorldOfOne) {
  const auto matrix = rank_matrix();
  for (const size_t which : {size_t{0}, size_t{3}, size_t{7}, size_t{10}})
    for (const std::string& name : layout_names)
      for (int ranks : worlds)
        EXPECT_EQ("",
                  run_world(matrix[which].second, layout(name, matrix[which].second.vocab(), ranks),
                            false, GetParam()))
            << matrix[which].first << ", layout " << name << ", " << ranks << " ranks";
}

TEST_P(RankLanes, TargetsOnTheEdgesOfEveryShardAndAllOnOneRank) {
  const Case plain = plain_case({.tokens = 24, .hidden = 6, .vocab = 29, .seed = 5});
  for (int ranks : worlds) {
    const Layout shards = layout("ragged", 29, ranks);
    Case edges = plain, one = plain;
    for (int64_t t = 0; t < 24; ++t) {
      const Shard& s = shards[(t / 2) % ranks];
      const int64_t last = std::max<int64_t>(s.logical - 1, 0);
      edges.in.targets.set_integer(t, 0, std::min<int64_t>(s.begin + (t % 2 ? last : 0), 28));
      one.in.targets.set_integer(t, 0, 28 - t % 3);
    }
    EXPECT_EQ("", run_world(edges, shards, false, GetParam())) << ranks << " ranks, edges";
    EXPECT_EQ("", run_world(one, shards, false, GetParam())) << ranks << " ranks, all on one";
  }
}

TEST_P(RankLanes, RunsRepeatBitForBit) {
  const Case whole = rank_matrix()[3].second;
  const Layout shards = layout("ragged", whole.vocab(), 4);
  std::vector<CaseOutputs> runs[2];
  for (auto& run : runs) {
    run.resize(4);
    run_thread_ranks(4, timeout_s, [&](Communicator& c) {
      // Arrival differs from run to run.
      std::this_thread::sleep_for(
          std::chrono::milliseconds((&run == runs ? c.rank() : 3 - c.rank())));
      LinearCrossEntropyRanks ranks;
      ranks.vocab = &c;
      ranks.vocab_begin = shards[c.rank()].begin;
      run[c.rank()] =
          run_rank(shard_case(whole, shards[c.rank()], false, c.rank(), 4), GetParam(), ranks).out;
    });
  }
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ("", same_bits(runs[0][r], runs[1][r]));
    // The sum of dX is the same on every rank, too.
    EXPECT_EQ("", same_bits("dx", runs[0][0].dx, runs[0][r].dx));
  }
}

INSTANTIATE_TEST_SUITE_P(Host, RankLanes, ::testing::Values("reference", "cpu"));

TEST(Threads, SumsRunInRankOrder) {
  // 1e8 + 1 - 1e8 in fp32 is 0 from the left and 1 in any other order of these four.
  const float own[] = {1e8f, 1.0f, -1e8f, 0.0f};
  std::vector<std::vector<float>> sums(4, std::vector<float>(70003));
  run_thread_ranks(4, timeout_s, [&](Communicator& c) {
    std::fill(sums[c.rank()].begin(), sums[c.rank()].end(), own[c.rank()]);
    c.all_reduce_sum(sums[c.rank()].data(), 70003, DType::f32, nullptr);
  });
  for (const auto& sum : sums)
    for (float value : sum) ASSERT_EQ(value, 0.0f);
}

TEST(Threads, CollectivesOfEverySize) {
  for (int ranks : worlds)
    for (int64_t count : {0, 1, 3, 8, 1000, 100000})
      run_thread_ranks(ranks, timeout_s, [&](Communicator& c) {
        std::vector<int64_t> sum(static_cast<size_t>(count)), gathered(sum.size() * ranks),
            scattered(sum.size());
        for (int64_t i = 0; i < count; ++i) sum[i] = i * (c.rank() + 1);
        c.all_gather(sum.data(), gathered.data(), count * 8, nullptr);
        c.reduce_scatter_sum(gathered.data(), scattered.data(), count, DType::i64, nullptr);
        c.all_reduce_sum(sum.data(), count, DType::i64, nullptr);
        for (int64_t i = 0; i < count; ++i) {
          ASSERT_EQ(sum[i], i * ranks * (ranks + 1) / 2);
          ASSERT_EQ(scattered[i], i * (c.rank() + 1) * ranks);
          for (int r = 0; r < ranks; ++r) ASSERT_EQ(gathered[r * count + i], i * (r + 1));
        }
      });
}

std::string message_of(const std::function<void()>& call, ErrorKind kind) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    return e.what();
  }
  return "no error";
}

// One bad rank of four in twenty runs: every other rank names it, none later than the timeout + 2
// s.
void expect_named(const std::function<void(std::unique_ptr<Communicator>&)>& bad, double limit_s) {
  for (int run = 0; run < 20; ++run) {
    auto all = make_thread_communicators(4, limit_s);
    const int culprit = run % 4;
    std::vector<std::string> said(4);
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (int r = 0; r < 4; ++r)
      threads.emplace_back([&, r] {
        if (r == culprit) return bad(all[r]);
        double value[3] = {1, 2, 3};
        said[r] = message_of(
            [&] {
              for (int i = 0; i < 3; ++i) all[r]->all_reduce_sum(value, 3, DType::f64, nullptr);
            },
            ErrorKind::runtime);
      });
    for (std::thread& t : threads) t.join();
    const double took =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_LT(took, limit_s + 2);
    for (int r = 0; r < 4; ++r)
      if (r != culprit) {
        EXPECT_EQ(said[r].rfind("rank " + std::to_string(culprit) + ":", 0), 0u) << said[r];
      }
  }
}

TEST(ThreadFaults, ARankThatDiesIsNamed) {
  expect_named(
      [](std::unique_ptr<Communicator>& own) {
        double value = 0;
        own->all_reduce_sum(&value, 0, DType::f64, nullptr);
        own.reset();
      },
      30);
}

TEST(ThreadFaults, ARankThatStopsOrNeverComesIsNamed) {
  expect_named([](std::unique_ptr<Communicator>&) {}, 0.1);
}

TEST(ThreadFaults, TheFirstErrorIsTheOneReported) {
  const std::string said = message_of(
      [] {
        run_thread_ranks(4, timeout_s, [](Communicator& c) {
          if (c.rank() == 2) throw Error(ErrorKind::invalid_data, "targets[3] = 77");
          double value = 1;
          c.all_reduce_sum(&value, 1, DType::f64, nullptr);
        });
      },
      ErrorKind::invalid_data);
  EXPECT_EQ(said, "targets[3] = 77");
}

struct Bend {
  const char* field;
  std::function<void(Case&)> bend;
};

TEST(Handshake, NamesTheFieldThatDiffers) {
  const Bend bends[] = {{"tokens: the ranks disagree: 24 on rank 0, 23 on rank 2",
                         [](Case& c) {
                           c = plain_case({.tokens = 23, .hidden = 6, .vocab = 29, .seed = 5});
                           c.options.vocab = 29;
                         }},
                        {"label_smoothing: the ranks disagree: 0 on rank 0, 0.1 on rank 2",
                         [](Case& c) { c.options.label_smoothing = 0.1; }},
                        {"ignore_index: the ranks disagree: -100 on rank 0, 0 on rank 2",
                         [](Case& c) { c.options.ignore_index = 0; }},
                        {"softcap: the ranks disagree: 0 on rank 0, 30 on rank 2",
                         [](Case& c) { c.options.softcap = 30; }},
                        {"output dx: the ranks disagree: true on rank 0, false on rank 2",
                         [](Case& c) { c.out.dx = Array(); }},
                        {"targets: the ranks disagree: ", [](Case& c) {
                           c.in.targets.set_integer(3, 0, (c.in.targets.integer(3) + 1) % 29);
                         }}};
  const Case plain = plain_case({.tokens = 24, .hidden = 6, .vocab = 29, .seed = 5});
  const Layout shards = layout("even", 29, 4);
  for (int run = 0; run < 24; ++run) {
    const Bend& b = bends[run % std::size(bends)];
    std::vector<std::string> said(4);
    run_thread_ranks(4, timeout_s, [&](Communicator& c) {
      Case whole = plain;
      if (c.rank() == 2) b.bend(whole);
      LinearCrossEntropyRanks ranks;
      ranks.vocab = &c;
      ranks.vocab_begin = shards[c.rank()].begin;
      said[c.rank()] = message_of(
          [&] { run_rank(shard_case(whole, shards[c.rank()], false, c.rank(), 4), "cpu", ranks); },
          ErrorKind::invalid_data);
    });
    for (const std::string& s : said) EXPECT_EQ(s.rfind(b.field, 0), 0u) << s;
  }
}

TEST(DxSum, LanesThatSumInFp32SayThatTheyCannotInBf16) {
  const Case plain = plain_case({.tokens = 8, .hidden = 6, .vocab = 29, .seed = 5});
  const Layout shards = layout("even", 29, 2);
  for (const std::string lane : {"cpu", "reference"})
    run_thread_ranks(2, timeout_s, [&](Communicator& c) {
      LinearCrossEntropyRanks ranks;
      ranks.vocab = &c;
      ranks.vocab_begin = shards[c.rank()].begin;
      const Case part = shard_case(plain, shards[c.rank()], false, c.rank(), 2);
      ranks.dx_sum = DType::bf16;
      const std::string said =
          message_of([&] { run_rank(part, lane, ranks); }, ErrorKind::unavailable);
      EXPECT_NE(said.find("dx_sum = bf16: this lane sums the ranks' shares in fp32"),
                std::string::npos)
          << said;
      ranks.dx_sum = DType::f16;
      EXPECT_EQ(message_of([&] { run_rank(part, lane, ranks); }, ErrorKind::usage),
                "dx_sum = fp16: fp32 or bf16");
    });
  LinearCrossEntropyRanks alone;  // nothing is summed
  alone.dx_sum = DType::bf16;
  EXPECT_GT(run_rank(plain, "cpu", alone).result.workspace_bytes, 0);
}

TEST(Handshake, NamesRowsOfTheVocabularyThatNobodyOrTwoOwn) {
  const Case plain = plain_case({.tokens = 8, .hidden = 6, .vocab = 29, .seed = 5});
  const auto said = [&](Layout shards) {
    return message_of(
        [&] {
          run_thread_ranks(static_cast<int>(shards.size()), timeout_s, [&](Communicator& c) {
            LinearCrossEntropyRanks ranks;
            ranks.vocab = &c;
            ranks.vocab_begin = shards[c.rank()].begin;
            run_rank(shard_case(plain, shards[c.rank()], false, c.rank(), c.size()), "cpu", ranks);
          });
        },
        ErrorKind::invalid_data);
  };
  EXPECT_EQ(said({{0, 10, 0}, {12, 17, 0}}),
            "vocab_begin = 12 on rank 1: vocabulary rows [10, 12) belong to no rank");
  EXPECT_EQ(said({{0, 12, 0}, {10, 19, 0}}),
            "vocab_begin = 10 on rank 1: its rows overlap those of rank 0, which end at 12");
  EXPECT_EQ(said({{0, 10, 0}, {10, 15, 0}}),
            "vocab = 29: vocabulary rows [25, 29) belong to no rank");
}

TEST(Denominator, LocalMeanOverEightRanksIsOffByTheFactorEight) {
  // 8 ranks of 1024 tokens against one batch of 8192.
  const Case whole = plain_case({.tokens = 8192, .hidden = 4, .vocab = 11, .seed = 3});
  const CaseOutputs single = run_single(whole, "cpu");
  for (const auto scope : {DenominatorScope::local, DenominatorScope::global}) {
    std::vector<float> dw(8 * 44);
    std::vector<std::string> notes(8);
    run_thread_ranks(8, timeout_s, [&](Communicator& c) {
      Case part = whole;
      part.options.denominator_scope = scope;
      const auto cut = [&](Array& a) {
        Array own(a.dtype(), {1024, a.shape().size() > 1 ? a.shape()[1] : 1});
        if (a.shape().size() == 1) own = Array(a.dtype(), {1024});
        for (int64_t i = 0; i < 1024; ++i)
          for (int64_t j = 0; j < (a.shape().size() > 1 ? a.shape()[1] : 1); ++j)
            if (is_floating(a.dtype()))
              own.set(i, j, a.get(c.rank() * 1024 + i, j));
            else
              own.set_integer(i, j, a.integer(c.rank() * 1024 + i, j));
        a = own;
      };
      cut(part.in.hidden);
      cut(part.in.targets);
      part.out = {};
      part.out.dw = whole.out.dw;
      LinearCrossEntropyRanks ranks;
      ranks.batch = &c;
      const RankRun run = run_rank(part, "cpu", ranks);
      for (const std::string& n : run.result.notes) notes[c.rank()] += n;
      std::vector<float> own(44);
      for (int64_t i = 0; i < 44; ++i) own[i] = static_cast<float>(run.out.dw.get(i / 4, i % 4));
      c.all_reduce_sum(own.data(), 44, DType::f32, nullptr);
      std::copy(own.begin(), own.end(), dw.begin() + c.rank() * 44);
    });
    std::vector<float> truth(44);
    for (int64_t i = 0; i < 44; ++i) truth[i] = static_cast<float>(single.dw.get(i / 4, i % 4));
    const double factor = common_factor(dw.data(), truth.data(), 44);
    EXPECT_NEAR(factor, scope == DenominatorScope::local ? 8 : 1, 1e-4);
    if (scope == DenominatorScope::local)
      EXPECT_NE(
          notes[5].find("1024 valid tokens here, 8192 over the 8 ranks of the batch: gradients "
                        "are a factor 8 larger"),
          std::string::npos)
          << notes[5];
    else
      EXPECT_EQ(notes[5].find("denominator"), std::string::npos) << notes[5];
  }
}

}  // namespace
}  // namespace talea::testing
