// What: the fields that the ranks of a call must share, and the shards they hold.
// Why: what may differ between ranks and what may not is this operator's to say.
// Never: continues after a disagreement.
#include "ops/linear_cross_entropy/handshake.hpp"

#include <algorithm>
#include <numeric>

#include "core/fail.hpp"
#include "ops/linear_cross_entropy/fields.hpp"

namespace talea::lce {
namespace {

constexpr auto bad = ErrorKind::invalid_data;

void add_options(std::vector<AgreedField>& list, const Options& o) {
  for_each_field(option_fields, [&](const auto& f) {
    if (f.agreed) list.push_back({f.name, text_of(o.*f.member)});
  });
}

std::vector<AgreedField> vocabulary_fields(const Problem& p, const Inputs& in,
                                           const std::string& lane) {
  std::vector<AgreedField> f;
  auto add = [&](const char* name, auto value) { f.push_back({name, fmt::format("{}", value)}); };
  add("tokens", p.tokens);
  add("hidden", p.hidden);
  add("vocab", p.vocab);
  add("sequence_parallel", p.sequence_parallel);
  add("dx_sum", name_of(p.dx_sum));
  add("hidden dtype", name_of(p.hidden_dtype));
  add("weight dtype", name_of(p.weight_dtype));
  add("lane", lane);
  add_options(f, p.options);
  add("target_check", word(p.options.target_check));
  add("soft targets", static_cast<int>(p.soft_targets));
  add("soft target k", p.soft_k);
  add("top-k", p.top_k);
  add("bias", p.has_bias);
  add("upstream", p.has_upstream);
  add("upstream_lse", p.has_upstream_lse);
  add("upstream_entropy", p.has_upstream_entropy);
  add("saved_lse", p.has_saved);
  add("output argmax or accuracy", p.wants_argmax || p.wants_accuracy);
  add("output dx", p.wants_dx);
  add("backward", p.backward());
  add("dx dtype", name_of(p.dx_dtype));
  if (p.device == DeviceKind::cuda) {  // device lanes cut the tokens into chunks by these
    add("workspace_limit_bytes", p.options.workspace_limit_bytes);
    add("output dw", p.wants_dw);
    add("dw dtype", name_of(p.dw_dtype));
    add("accumulate_dw", p.accumulate_dw);
    add("dw_sum", name_of(p.options.dw_sum));
    add("late_factor", p.late_factor);
    add("output db", p.wants_db);
    add("accumulate_db", p.accumulate_db);
  }
  // Upstream gradients and distributions are results of the caller's, whose last bits may differ.
  for (const auto& [name, tensor] :
       {std::pair("targets", &in.targets), std::pair("token_weight", &in.token_weight),
        std::pair("class_weight", &in.class_weight), std::pair("token_scale", &in.token_scale),
        std::pair("soft_target_ids", &in.soft_target_ids)})
    f.push_back({name, content_of(*tensor)});
  return f;
}

std::vector<AgreedField> batch_fields(const Problem& p) {
  std::vector<AgreedField> f = {{"vocab", fmt::format("{}", p.vocab)},
                                {"hidden", fmt::format("{}", p.hidden)}};
  add_options(f, p.options);
  return f;
}

struct Shard {
  int64_t begin, local, stored;
};

void check_shards(const Problem& p, const std::vector<Shard>& all) {
  std::vector<std::pair<int64_t, int>> order;
  for (size_t r = 0; r < all.size(); ++r)
    if (all[r].local > 0) order.push_back({all[r].begin, static_cast<int>(r)});
  std::sort(order.begin(), order.end());
  int64_t covered = 0;
  int last = -1;
  for (const auto& [begin, r] : order) {
    require(begin >= covered, bad,
            "vocab_begin = {} on rank {}: its rows overlap those of rank {}, which end at {}",
            begin, r, last, covered);
    require(begin == covered, bad,
            "vocab_begin = {} on rank {}: vocabulary rows [{}, {}) belong to no rank", begin, r,
            covered, begin);
    covered = begin + all[r].local;
    last = r;
  }
  require(covered == p.vocab, bad, "vocab = {}: vocabulary rows [{}, {}) belong to no rank",
          p.vocab, covered, p.vocab);
}

}  // namespace

std::array<Meeting, 2> meetings_of(const Ranks& ranks) {
  if (!ranks.handshake) return {};
  return {{{ranks.vocab, sizeof(Shard)}, {ranks.batch, sizeof(int64_t)}}};
}

void shake_hands(const Problem& p, const Inputs& in, const std::string& lane, Meeting& c,
                 Result& result) {
  if (!c.with_others()) return;
  const Shard own = {p.vocab_begin, p.vocab_local, p.vocab_stored};
  const auto all = agree(vocabulary_fields(p, in, lane), own, c);
  if (!all) {
    result.notes.push_back(not_compared(c));
    return;
  }
  check_shards(p, *all);
  for (const Shard& s : *all) result.shards.push_back({s.begin, s.begin + s.local, s.stored});
}

void shake_batch_hands(const Problem& p, const Inputs& in, Meeting& c, Result& result) {
  if (!c.with_others()) return;
  int64_t own = 0;
  for (int64_t t = 0; p.device == DeviceKind::cpu && t < p.tokens; ++t)
    own += row_kind(p, in, t) == RowKind::valid;
  const auto all = agree(batch_fields(p), own, c);
  if (!all) return result.notes.push_back(not_compared(c));
  const int64_t global = std::accumulate(all->begin(), all->end(), int64_t{0});
  if (p.options.reduction == Reduction::mean && p.options.denominator != Denominator::given &&
      p.options.denominator_scope == DenominatorScope::local && own > 0)
    result.notes.push_back(fmt::format(
        "denominator scope local: {} valid tokens here, {} over the {} ranks of the batch: "
        "gradients are a factor {:.6g} larger than with the global mean",
        own, global, c.ranks->size(), static_cast<double>(global) / static_cast<double>(own)));
}

}  // namespace talea::lce
