// What: worlds that are legal and odd, and every way in which ranks can disagree before any work.
// Why: tensor-parallel jobs pad, starve and mix their ranks; each must be right or named, never
// late.
// Never: measures time beyond the bound that the contract gives.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <limits>
#include <thread>

#include "dist/host_collectives.hpp"
#include "yardsticks/linear_cross_entropy/ranks.hpp"

namespace talea::testing {
namespace {

constexpr double timeout_s = 20;

class OddWorlds : public ::testing::TestWithParam<const char*> {};

TEST_P(OddWorlds, MoreRanksThanWords) {
  for (const int64_t vocab : {1, 2, 5}) {
    Case whole = plain_case({.tokens = 24, .hidden = 6, .vocab = vocab, .seed = 9, .bias = true});
    want_everything(whole, std::min<int64_t>(vocab, 3));
    whole.options.label_smoothing = 0.1;
    for (const std::string& name : layout_names)
      for (const bool sequence : {false, true})
        EXPECT_EQ("", run_world(whole, layout(name, vocab, 8), sequence, GetParam()))
            << vocab << " words, layout " << name << ", sequence parallel " << sequence;
  }
}

// Even shards of a vocabulary padded far, as Megatron stores it: some begin behind the last word.
TEST_P(OddWorlds, ShardsThatBeginBehindTheVocabulary) {
  Case whole = plain_case({.tokens = 24, .hidden = 6, .vocab = 37, .seed = 4, .bias = true});
  want_everything(whole, 5);
  Layout shards;
  for (int64_t begin = 0; begin < 56; begin += 7) {
    const int64_t logical = std::min<int64_t>(7, std::max<int64_t>(0, 37 - begin));
    shards.push_back({begin, logical, 7 - logical});
  }
  for (const bool sequence : {false, true})
    EXPECT_EQ("", run_world(whole, shards, sequence, GetParam())) << sequence;
}

TEST_P(OddWorlds, NoTokens) {
  Case whole = plain_case({.tokens = 0, .hidden = 6, .vocab = 13, .seed = 4});
  for (const bool sequence : {false, true})
    EXPECT_EQ("", run_world(whole, layout("even", 13, 3), sequence, GetParam())) << sequence;
}

INSTANTIATE_TEST_SUITE_P(Host, OddWorlds, ::testing::Values("reference", "cpu"));

TEST(Threads, ManyRanksShareLittleMemory) {
  for (const int ranks : {2, 16, 17, 64, 1024}) {
    const int64_t block = HostCommunicator::block_bytes(ranks);
    EXPECT_EQ(block % 64, 0);
    EXPECT_GE(block, 64);
    EXPECT_LE(2 * block * ranks * ranks, int64_t{128} << 20) << ranks;
  }
  // Of the most elements that are left when every rank has summed its slice, too.
  for (const size_t count : {299, 599, 5000}) {
    const std::vector<int64_t> sums(count, 300 * 301 / 2);
    std::vector<int64_t> gathered(count * 300);
    for (size_t i = 0; i < gathered.size(); ++i) gathered[i] = static_cast<int64_t>(i / count) + 1;
    run_thread_ranks(300, timeout_s, [&](Communicator& c) {
      std::vector<int64_t> sum(count, c.rank() + 1), all(gathered.size());
      c.all_gather(sum.data(), all.data(), static_cast<int64_t>(count) * 8, nullptr);
      c.all_reduce_sum(sum.data(), static_cast<int64_t>(count), DType::i64, nullptr);
      ASSERT_TRUE(sum == sums) << c.rank();
      ASSERT_TRUE(all == gathered) << c.rank();
    });
  }
}

TEST(Threads, ATimeoutMayBeForEver) {
  run_thread_ranks(3, std::numeric_limits<double>::infinity(), [](Communicator& c) {
    if (c.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    double value = 1;
    c.all_reduce_sum(&value, 1, DType::f64, nullptr);
    EXPECT_EQ(value, 3);
  });
}

// What each rank of four says when rank 2 calls with `bent` and the others with `plain`.
struct Call {
  Case part;
  std::string lane;
  LinearCrossEntropyRanks ranks;
};

std::vector<std::string> disagree(const Case& plain, const std::function<void(Case&)>& bend,
                                  const std::function<void(Call&)>& bend_call) {
  const Layout shards = layout("even", plain.vocab(), 4);
  std::vector<std::string> said(4, "no error");
  run_thread_ranks(4, timeout_s, [&](Communicator& c) {
    Case whole = plain;
    if (c.rank() == 2 && bend) bend(whole);
    Call call{shard_case(whole, shards[c.rank()], false, c.rank(), 4), "cpu", {}};
    call.ranks.vocab = &c;
    call.ranks.vocab_begin = shards[c.rank()].begin;
    if (c.rank() == 2 && bend_call) bend_call(call);
    try {
      run_rank(call.part, call.lane, call.ranks);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::invalid_data) << e.what();
      said[c.rank()] = e.what();
    }
  });
  return said;
}

Array floats(int64_t count, double value) {
  Array a(DType::f32, {count});
  for (int64_t i = 0; i < count; ++i) a.set(i, 0, value + 0.25 * static_cast<double>(i));
  return a;
}

Case everything() {
  Case c = plain_case({.tokens = 24, .hidden = 6, .vocab = 29, .seed = 5, .bias = true});
  c.in.token_weight = floats(24, 1);
  c.in.class_weight = floats(29, 1);
  c.in.token_scale = floats(24, 1);
  c.in.upstream_lse = floats(24, 1);
  c.in.upstream_entropy = floats(24, 1);
  c.in.upstream = floats(24, 1);
  c.options.reduction = Reduction::none;
  want_everything(c, 3);
  return c;
}

TEST(Handshake, NamesEveryField) {
  using Bend = std::function<void(Case&)>;
  const std::pair<const char*, Bend> fields[] = {
      {"reduction: the ranks disagree: none on rank 0, sum on rank 2",
       [](Case& c) {
         c.options.reduction = Reduction::sum;
         c.in.upstream = Array();
         c.out.loss = Array(DType::f32, {});
       }},
      {"denominator: the ranks disagree: valid on rank 0, weighted on rank 2",
       [](Case& c) { c.options.denominator = Denominator::weighted; }},
      {"denominator_scope: the ranks disagree: local on rank 0, global on rank 2",
       [](Case& c) { c.options.denominator_scope = DenominatorScope::global; }},
      {"on_empty: the ranks disagree: nan on rank 0, zero on rank 2",
       [](Case& c) { c.options.on_empty = OnEmpty::zero; }},
      {"target_check: the ranks disagree: automatic on rank 0, poison on rank 2",
       [](Case& c) { c.options.target_check = TargetCheck::poison; }},
      {"ignore_index: ", [](Case& c) { c.options.ignore_index = 3; }},
      {"label_smoothing: ", [](Case& c) { c.options.label_smoothing = 0.1; }},
      {"z_loss: ", [](Case& c) { c.options.z_loss = 0.1; }},
      {"softcap: ", [](Case& c) { c.options.softcap = 9; }},
      {"logit_scale: ", [](Case& c) { c.options.logit_scale = 2; }},
      {"bias: the ranks disagree: true on rank 0, false on rank 2",
       [](Case& c) { c.in.bias = c.out.db = Array(); }},
      {"token_scale: ", [](Case& c) { c.in.token_scale = Array(); }},
      {"token_scale: ", [](Case& c) { c.in.token_scale.set(7, 0, 5); }},
      {"token_weight: ", [](Case& c) { c.in.token_weight = Array(); }},
      {"token_weight: ", [](Case& c) { c.in.token_weight.set(7, 0, 5); }},
      {"class_weight: ", [](Case& c) { c.in.class_weight = Array(); }},
      {"class_weight: ", [](Case& c) { c.in.class_weight.set(7, 0, 5); }},
      {"targets: ", [](Case& c) { c.in.targets.set_integer(3, 0, 28); }},
      {"upstream: ", [](Case& c) { c.in.upstream = Array(); }},
      {"upstream_lse: ", [](Case& c) { c.in.upstream_lse = Array(); }},
      {"upstream_entropy: ", [](Case& c) { c.in.upstream_entropy = Array(); }},
      {"top-k: the ranks disagree: 3 on rank 0, 0 on rank 2",
       [](Case& c) { c.out.topk_values = c.out.topk_ids = c.out.topk_logprobs = Array(); }},
      {"output argmax or accuracy: ", [](Case& c) { c.out.argmax = c.out.accuracy = Array(); }},
      {"output dx: ", [](Case& c) { c.out.dx = Array(); }},
  };
  for (const auto& [field, bend] : fields)
    for (const std::string& said : disagree(everything(), bend, {}))
      EXPECT_EQ(said.rfind(field, 0), 0u) << "wanted: " << field << "\ngot: " << said;
}

TEST(Handshake, NamesTheLaneAndTheWayOfTheTokens) {
  const Case plain = plain_case({.tokens = 24, .hidden = 6, .vocab = 29, .seed = 5});
  for (const std::string& s : disagree(plain, {}, [](Call& c) { c.lane = "reference"; }))
    EXPECT_EQ(s, "lane: the ranks disagree: cpu on rank 0, reference on rank 2");
  const auto sequence = disagree(plain, {}, [&](Call& c) {
    c.part = shard_case(plain, layout("even", 29, 4)[2], true, 2, 4);
    c.ranks.sequence_parallel = true;
  });
  for (const std::string& s : sequence)
    EXPECT_EQ(s, "sequence_parallel: the ranks disagree: false on rank 0, true on rank 2");
}

TEST(Handshake, NamesSoftTargetsThatDiffer) {
  Case plain = plain_case({.tokens = 24, .hidden = 6, .vocab = 29, .seed = 5});
  plain.in.targets = Array();
  plain.in.soft_target_ids = Array(DType::i64, {24, 2});
  plain.in.soft_target_probs = Array(DType::f32, {24, 2});
  for (int64_t t = 0; t < 24; ++t)
    for (int64_t k = 0; k < 2; ++k) {
      plain.in.soft_target_ids.set_integer(t, k, t + k);
      plain.in.soft_target_probs.set(t, k, 0.5);
    }
  plain.out = {};
  plain.out.loss = Array(DType::f32, {});
  for (const std::string& s :
       disagree(plain, [](Case& c) { c.in.soft_target_ids.set_integer(4, 1, 28); }, {}))
    EXPECT_EQ(s.rfind("soft_target_ids: the ranks disagree", 0), 0u) << s;
}

// A rank whose own call is wrong never comes to the exchange: it says why, the others say who.
TEST(ThreadFaults, ARankThatThrowsBeforeTheCallIsNamed) {
  const Case plain = plain_case({.tokens = 24, .hidden = 6, .vocab = 29, .seed = 5});
  const Layout shards = layout("even", 29, 4);
  for (int culprit = 0; culprit < 4; ++culprit) {
    auto all = make_thread_communicators(4, timeout_s);
    std::vector<std::string> said(4);
    std::vector<std::thread> threads;
    for (int r = 0; r < 4; ++r)
      threads.emplace_back([&, r] {
        const std::unique_ptr<Communicator> own = std::move(all[r]);
        Case part = shard_case(plain, shards[r], false, r, 4);
        if (r == culprit) part.options.label_smoothing = 2;
        LinearCrossEntropyRanks ranks;
        ranks.vocab = own.get();
        ranks.vocab_begin = shards[r].begin;
        try {
          run_rank(part, "cpu", ranks);
        } catch (const Error& e) {
          said[r] = e.what();
        }
      });
    for (std::thread& t : threads) t.join();
    const std::string lost = "rank " + std::to_string(culprit) + ": left the world";
    for (int r = 0; r < 4; ++r)
      EXPECT_EQ(said[r].rfind(r == culprit ? "label_smoothing = 2" : lost, 0), 0u) << said[r];
  }
}

}  // namespace
}  // namespace talea::testing
