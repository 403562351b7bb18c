// What: the fields that the ranks of a call must share, and the shards they hold.
// Why: a disagreement is an error that names the field, not a hang or a wrong number.
// Never: continues after a disagreement.
#include "ops/sparse_attention/handshake.hpp"

#include <algorithm>

#include "ops/sparse_attention/fields.hpp"

namespace talea::sparse_attention {
namespace {

constexpr auto bad = ErrorKind::invalid_data;
using Fields = std::vector<AgreedField>;

template <class Value>
void add(Fields& f, const char* name, const Value& value) {
  f.push_back({name, text_of(value)});
}

Fields shared_fields(const Problem& p, const std::string& lane) {
  Fields f;
  add(f, "pass", p.pass);
  add(f, "lane", lane);
  add(f, "gather_kv", p.gather_kv);
  add(f, "batch", p.batch);
  add(f, "keys", p.keys);
  add(f, "groups", p.groups);
  add(f, "dim", p.dim);
  add(f, "value_dim", p.value_dim);
  add(f, "scale", p.scale);
  for_each_field(option_fields, [&](const auto& field) {
    if (field.agreed) add(f, field.name, p.options.*field.member);
  });
  add(f, "q dtype", p.q_dtype);
  add(f, "kv dtype", p.kv_dtype);
  add(f, "sink", p.has_sink);
  add(f, "d_lse", p.has_d_lse);
  add(f, "o and lse", p.has_saved);
  add(f, "output dkv", p.wants_dkv);
  add(f, "output d_sink", p.wants_d_sink);
  if (p.pass == Pass::forward || p.pass == Pass::backward) return f;
  add(f, "index heads", p.index_heads);
  add(f, "index dim", p.index_dim);
  add(f, "index dtype", p.index_q_dtype);
  add(f, "act", p.act);
  add(f, "key_stride", p.key_stride);
  add(f, "keys of the loss", p.loss_keys);
  add(f, "coeff", p.coeff);
  add(f, "denominator", p.denominator);
  add(f, "denominator_value", p.denominator_value);
  add(f, "denominator_scope", p.denominator_scope);
  add(f, "output dindex_k", p.wants_dindex_k);
  return f;
}

Fields head_fields(const CheckedCall& c, const std::string& lane) {
  const Problem& p = c.problem;
  Fields f = shared_fields(p, lane);
  add(f, "queries", p.queries);
  add(f, "slots", p.slots);
  add(f, "q_position_base", p.options.q_position_base);
  for (const NamedTensor& list : c.replicated) f.push_back({list.name, content_of(*list.tensor)});
  return f;
}

Fields sequence_fields(const Problem& p, const std::string& lane) {
  Fields f = shared_fields(p, lane);
  add(f, "heads", p.heads);
  add(f, "head_begin", p.head_begin);
  return f;
}

// Of index losses that are divided by what all of them count.
Fields batch_fields(const Problem& p) {
  Fields f;
  add(f, "pass", p.pass);
  add(f, "denominator", p.denominator);
  add(f, "denominator_value", p.denominator_value);
  add(f, "denominator_scope", p.denominator_scope);
  return f;
}

struct Shard {
  int64_t begin = 0, count = 0;
  int64_t position = 0, queries = 0;  // of the causal rule, where no q_positions say it
};

// Positions that count from a base: of one sequence, whose queries no two ranks have.
Shard sequence_shard(const Problem& p) {
  const bool from_a_base = p.options.causal && !p.has_positions && p.sequences == 0;
  return {p.row_begin, p.keys_stored, p.options.q_position_base, from_a_base ? p.queries : 0};
}

void check_positions(const std::vector<Shard>& all) {
  for (size_t r = 0; r < all.size(); ++r)
    for (size_t before = 0; before < r; ++before) {
      const Shard &a = all[before], &b = all[r];
      const bool apart = a.position + a.queries <= b.position ||
                         b.position + b.queries <= a.position || a.queries == 0 || b.queries == 0;
      require(
          apart, bad,
          "q_position_base = {} on rank {}: its queries [{}, {}) overlap those of rank {}, [{}, "
          "{}); under causal the ranks of a sequence say where theirs are, there or by "
          "q_positions",
          b.position, r, b.position, b.position + b.queries, before, a.position,
          a.position + a.queries);
    }
}

// `what` of the first rank of a shard at fault; total: 0 where only the ranks know it.
void check_cover(const char* what, const char* things, const std::vector<Shard>& all,
                 int64_t total) {
  std::vector<std::pair<int64_t, size_t>> order;
  for (size_t r = 0; r < all.size(); ++r)
    if (all[r].count > 0) order.push_back({all[r].begin, r});
  std::sort(order.begin(), order.end());
  int64_t covered = 0;
  for (const auto& [begin, r] : order) {
    require(begin >= covered, bad, "{} = {} on rank {}: its {} overlap those before {}", what,
            begin, r, things, covered);
    require(begin == covered, bad, "{} = {} on rank {}: {} [{}, {}) belong to no rank", what, begin,
            r, things, covered, begin);
    covered = begin + all[r].count;
  }
  require(total == 0 || covered == total, bad, "{}: {} [{}, {}) belong to no rank", what, things,
          covered, total);
}

}  // namespace

Meetings meetings_of(const Ranks& ranks) {
  if (!ranks.handshake) return {};
  const bool on_host = ranks.batch && ranks.batch->device() == DeviceKind::cpu;
  return {{{ranks.heads, sizeof(Shard)},
           {ranks.sequence, sizeof(Shard)},
           {on_host ? ranks.batch : nullptr, sizeof(int64_t)}}};
}

void shake_hands(const CheckedCall& c, const std::string& lane, Meetings& meetings,
                 Result& result) {
  const Problem& p = c.problem;
  auto& [heads, sequence, batch] = meetings;
  if (heads.with_others()) {
    const auto all = agree(head_fields(c, lane), Shard{p.head_begin, p.heads, 0, 0}, heads);
    if (!all)
      result.notes.push_back(not_compared(heads));
    else if (p.pass != Pass::select)
      check_cover("head_begin", "heads", *all, p.groups > 1 ? p.total_heads : 0);
  }
  if (sequence.with_others()) {
    const auto all = agree(sequence_fields(p, lane), sequence_shard(p), sequence);
    if (!all) {
      result.notes.push_back(not_compared(sequence));
    } else {
      if (p.gather_kv) check_cover("row_begin", "rows of kv", *all, p.keys);
      check_positions(*all);
    }
  }
  const int64_t nothing = 0;
  if (batch.with_others() && !agree(batch_fields(p), nothing, batch))
    result.notes.push_back(not_compared(batch));
}

}  // namespace talea::sparse_attention
