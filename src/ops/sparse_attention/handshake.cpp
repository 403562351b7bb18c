// What: a hash of every field that ranks must share, and the exchange that names a difference.
// Why: one small exchange a call is the price; the text travels only when the hashes differ.
// Never: continues after a disagreement.
#include "ops/sparse_attention/handshake.hpp"

#include <algorithm>
#include <cstring>

namespace talea::sparse_attention {
namespace {

constexpr auto bad = ErrorKind::invalid_data;

struct Named {
  const char* name;
  std::string value;
};

uint64_t hash(uint64_t h, const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 0x100000001b3u;
  return h;
}
constexpr uint64_t hash_seed = 0xcbf29ce484222325u;

// What a replicated host list holds; absent and device tensors have no hash.
std::string content(const Problem& p, const View& v, int64_t heads, int64_t columns) {
  if (!v) return "absent";
  if (p.device != DeviceKind::cpu) return "present";
  uint64_t h = hash_seed;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t s = 0; s < p.queries; ++s)
      for (int64_t g = 0; g < heads; ++g)
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t value = v.integer(b, s, g, c);
          h = hash(h, &value, sizeof value);
        }
  return fmt::format("content hash {:016x}", h);
}

std::vector<Named> shared_fields(const Problem& p, const std::string& lane) {
  std::vector<Named> f;
  const auto add = [&](const char* name, auto value) {
    f.push_back({name, fmt::format("{}", value)});
  };
  const Options& o = p.options;
  add("pass", static_cast<int>(p.pass));
  add("lane", lane);
  add("batch", p.batch);
  add("keys", p.keys);
  add("groups", p.groups);
  add("dim", p.dim);
  add("value_dim", p.value_dim);
  add("scale", p.scale);
  add("causal", o.causal);
  add("index_space", static_cast<int>(o.index_space));
  add("index_check", static_cast<int>(o.index_check));
  add("kv_storage", static_cast<int>(o.kv_storage));
  add("dkv_sum", static_cast<int>(o.dkv_sum));
  add("operands", static_cast<int>(o.operands));
  add("q dtype", name_of(p.q_dtype));
  add("kv dtype", name_of(p.kv_dtype));
  add("sink", p.has_sink);
  add("d_lse", p.has_d_lse);
  add("o and lse", p.has_saved);
  add("output dkv", p.wants_dkv);
  add("output d_sink", p.wants_d_sink);
  add("gather_kv", p.gather_kv);
  if (p.pass == Pass::forward || p.pass == Pass::backward) return f;
  add("index heads", p.index_heads);
  add("index dim", p.index_dim);
  add("index dtype", name_of(p.index_q_dtype));
  add("act", static_cast<int>(p.act));
  add("key_stride", p.key_stride);
  add("keys of the loss", static_cast<int>(p.loss_keys));
  add("coeff", p.coeff);
  add("denominator", static_cast<int>(p.denominator));
  add("denominator_scope", static_cast<int>(p.denominator_scope));
  add("output dindex_k", p.wants_dindex_k);
  return f;
}

std::vector<Named> head_fields(const Problem& p, const Args& a, const std::string& lane) {
  std::vector<Named> f = shared_fields(p, lane);
  const int64_t groups = p.pass == Pass::index_loss ? 1 : p.groups;
  f.push_back({"queries", fmt::format("{}", p.queries)});
  f.push_back({"slots", fmt::format("{}", p.slots)});
  f.push_back({"q_position_base", fmt::format("{}", p.options.q_position_base)});
  f.push_back({"indices", content(p, a.indices, groups, p.slots)});
  f.push_back({"topk_length", content(p, a.topk_length, 1, 1)});
  f.push_back({"q_positions", content(p, a.q_positions, 1, 1)});
  return f;
}

std::vector<Named> sequence_fields(const Problem& p, const std::string& lane) {
  std::vector<Named> f = shared_fields(p, lane);
  f.push_back({"heads", fmt::format("{}", p.heads)});
  f.push_back({"head_begin", fmt::format("{}", p.head_begin)});
  return f;
}

template <typename T>
std::vector<T> gather(Communicator& c, const T& own) {
  std::vector<T> all(static_cast<size_t>(c.size()));
  require(c.host_gather(&own, all.data(), sizeof(T)), ErrorKind::runtime,
          "{} of rank {}: its host channel failed", c.engine(), c.rank());
  return all;
}

void name_difference(const std::vector<Named>& fields, Communicator& c) {
  struct Text {
    char value[64];
  };
  for (const Named& field : fields) {
    Text own{};
    std::strncpy(own.value, field.value.c_str(), sizeof own.value - 1);
    const std::vector<Text> all = gather(c, own);
    for (size_t r = 1; r < all.size(); ++r)
      require(std::strcmp(all[r].value, all[0].value) == 0, bad,
              "{}: the ranks disagree: {} on rank 0, {} on rank {}", field.name, all[0].value,
              all[r].value, r);
  }
}

struct Shard {
  uint64_t fields = 0;
  int64_t begin = 0, count = 0;
};

std::vector<Shard> agree(const std::vector<Named>& fields, Shard own, Communicator& c) {
  own.fields = hash_seed;
  for (const Named& f : fields) own.fields = hash(own.fields, f.value.c_str(), f.value.size() + 1);
  const std::vector<Shard> all = gather(c, own);
  for (const Shard& s : all)
    if (s.fields != all[0].fields) {
      name_difference(fields, c);
      fail(bad, "the ranks' settings differ in no field that can be shown");
    }
  return all;
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

void shake_hands(const Problem& p, const Args& a, const std::string& lane, Communicator& heads,
                 Communicator& sequence) {
  if (heads.size() > 1) {
    const auto all = agree(head_fields(p, a, lane), {0, p.head_begin, p.heads}, heads);
    if (p.pass != Pass::select)
      check_cover("head_begin", "heads", all, p.groups > 1 ? p.total_heads : 0);
  }
  if (sequence.size() > 1) {
    const auto all = agree(sequence_fields(p, lane), {0, p.row_begin, p.keys_stored}, sequence);
    if (p.gather_kv) check_cover("row_begin", "rows of kv", all, p.keys);
  }
}

}  // namespace talea::sparse_attention
