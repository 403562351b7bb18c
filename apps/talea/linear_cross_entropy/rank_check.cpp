// What: see rank_check.hpp.
// Why: see rank_check.hpp.
// Never: spreads the vocabulary: here every rank has all of it.
#include "rank_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "yardsticks/linear_cross_entropy/lanes.hpp"
#include "yardsticks/linear_cross_entropy/ranks.hpp"

namespace talea::cli {
namespace {

constexpr int64_t tokens_each = 1024, hidden = 4, vocab = 11;

struct Sum {
  std::vector<float> dw;
  std::string notes;
};

Sum over_ranks(const testing::Case& whole, int ranks, DenominatorScope scope) {
  std::vector<Sum> all(static_cast<size_t>(ranks));
  run_thread_ranks(ranks, default_rank_timeout_s, [&](Communicator& c) {
    testing::Case part = whole;
    part.options.denominator_scope = scope;
    part.in.hidden = testing::Array(DType::f32, {tokens_each, hidden});
    part.in.targets = testing::Array(whole.in.targets.dtype(), {tokens_each});
    part.out = {};
    part.out.dw = whole.out.dw;
    for (int64_t t = 0; t < tokens_each; ++t) {
      const int64_t from = c.rank() * tokens_each + t;
      part.in.targets.set_integer(t, 0, whole.in.targets.integer(from));
      for (int64_t i = 0; i < hidden; ++i) part.in.hidden.set(t, i, whole.in.hidden.get(from, i));
    }
    LinearCrossEntropyRanks batch;
    batch.batch = &c;
    const testing::RankRun run = testing::run_rank(part, testing::host_lane(), batch);
    Sum& own = all[static_cast<size_t>(c.rank())];
    for (const std::string& note : run.result.notes) own.notes += note;
    for (int64_t i = 0; i < vocab * hidden; ++i)
      own.dw.push_back(static_cast<float>(run.out.dw.get(i / hidden, i % hidden)));
    c.all_reduce_sum(own.dw.data(), vocab * hidden, DType::f32, nullptr);
  });
  return all.back();
}

}  // namespace

BatchScopes compare_batch_scopes(int ranks, uint64_t seed) {
  const testing::Case whole = testing::plain_case(
      {.tokens = ranks * tokens_each, .hidden = hidden, .vocab = vocab, .seed = seed});
  const testing::CaseOutputs single = testing::run_single(whole, testing::host_lane());
  std::vector<float> truth;
  for (int64_t i = 0; i < vocab * hidden; ++i)
    truth.push_back(static_cast<float>(single.dw.get(i / hidden, i % hidden)));
  const Sum local = over_ranks(whole, ranks, DenominatorScope::local);
  const Sum global = over_ranks(whole, ranks, DenominatorScope::global);
  BatchScopes found;
  found.tokens_each = tokens_each;
  found.local_factor = common_factor(local.dw.data(), truth.data(), vocab * hidden);
  found.global_factor = common_factor(global.dw.data(), truth.data(), vocab * hidden);
  found.note_names_factor =
      local.notes.find(fmt::format("a factor {} larger", ranks)) != std::string::npos;
  return found;
}

}  // namespace talea::cli
