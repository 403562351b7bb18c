// What: a hash of every field that ranks must share, and the exchange that names a difference.
// Why: one small exchange a call is the price; the text travels only when the hashes differ.
// Never: continues after a disagreement.
#include "ops/linear_cross_entropy/handshake.hpp"

#include <algorithm>
#include <cstring>

#include "core/fail.hpp"
#include "core/half.hpp"

namespace talea::lce {
namespace {

constexpr auto bad = ErrorKind::invalid_data;

struct Field {
  const char* name;
  std::string value;
};

uint64_t hash(uint64_t h, const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 0x100000001b3u;
  return h;
}
constexpr uint64_t hash_seed = 0xcbf29ce484222325u;

// What a replicated host tensor holds; absent and device tensors have no hash.
std::string content(const Tensor& t) {
  if (!t) return "absent";
  if (t.device != DeviceKind::cpu) return "present";
  uint64_t h = hash_seed;
  const int64_t rows = t.rank > 0 ? t.shape[0] : 1, columns = t.rank > 1 ? t.shape[1] : 1;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      const double value =
          is_floating(t.dtype) ? at(t, i, j) : static_cast<double>(index_at(t, i, j));
      h = hash(h, &value, sizeof value);
    }
  return fmt::format("content hash {:016x}", h);
}

// As the options are written.
const char* word(Reduction r) {
  return r == Reduction::mean ? "mean" : r == Reduction::sum ? "sum" : "none";
}
const char* word(Denominator d) {
  return d == Denominator::valid ? "valid" : d == Denominator::weighted ? "weighted" : "given";
}
const char* word(DenominatorScope s) { return s == DenominatorScope::local ? "local" : "global"; }
const char* word(OnEmpty e) { return e == OnEmpty::nan ? "nan" : "zero"; }
const char* word(TargetCheck c) {
  return c == TargetCheck::automatic ? "automatic"
         : c == TargetCheck::checked ? "checked"
                                     : "poison";
}

void add_options(std::vector<Field>& f, const Options& o) {
  auto add = [&](const char* name, auto value) { f.push_back({name, fmt::format("{}", value)}); };
  add("reduction", word(o.reduction));
  add("denominator", word(o.denominator));
  add("denominator_value", o.denominator_value);
  add("denominator_scope", word(o.denominator_scope));
  add("on_empty", word(o.on_empty));
  add("ignore_index", o.ignore_index);
  add("label_smoothing", o.label_smoothing);
  add("z_loss", o.z_loss);
  add("softcap", o.softcap);
  add("logit_scale", o.logit_scale);
}

std::vector<Field> vocabulary_fields(const Problem& p, const Inputs& in, const std::string& lane) {
  std::vector<Field> f;
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
    add("output db", p.wants_db);
  }
  // Upstream gradients and distributions are results of the caller's, whose last bits may differ.
  for (const auto& [name, tensor] :
       {std::pair("targets", &in.targets), std::pair("token_weight", &in.token_weight),
        std::pair("class_weight", &in.class_weight), std::pair("token_scale", &in.token_scale),
        std::pair("soft_target_ids", &in.soft_target_ids)})
    f.push_back({name, content(*tensor)});
  return f;
}

std::vector<Field> batch_fields(const Problem& p) {
  std::vector<Field> f = {{"vocab", fmt::format("{}", p.vocab)},
                          {"hidden", fmt::format("{}", p.hidden)}};
  add_options(f, p.options);
  return f;
}

template <typename T>
std::vector<T> gather(Communicator& c, const T& own) {
  std::vector<T> all(static_cast<size_t>(c.size()));
  require(c.host_gather(&own, all.data(), sizeof(T)), ErrorKind::runtime,
          "{} of rank {}: its host channel failed", c.engine(), c.rank());
  return all;
}

// Every rank sends its fields as text; the first that differs from rank 0's is named on all ranks.
void name_difference(const std::vector<Field>& fields, Communicator& c) {
  struct Text {
    char value[64];
  };
  for (const Field& field : fields) {
    Text own{};
    std::strncpy(own.value, field.value.c_str(), sizeof own.value - 1);
    const std::vector<Text> all = gather(c, own);
    for (int r = 1; r < c.size(); ++r)
      require(std::strcmp(all[r].value, all[0].value) == 0, bad,
              "{}: the ranks disagree: {} on rank 0, {} on rank {}", field.name, all[0].value,
              all[r].value, r);
  }
}

struct Hello {
  uint64_t fields;
  int64_t begin, local, stored;
};

void agree(const std::vector<Field>& fields, uint64_t own, Communicator& c, bool same) {
  if (same) return;
  name_difference(fields, c);
  fail(bad, "the ranks' settings differ (hash {:016x} on rank {}) in no field that can be shown",
       own, c.rank());
}

uint64_t hash_of(const std::vector<Field>& fields) {
  uint64_t h = hash_seed;
  for (const Field& f : fields) h = hash(h, f.value.c_str(), f.value.size() + 1);
  return h;
}

void check_shards(const Problem& p, const std::vector<Hello>& all) {
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

void shake_hands(const Problem& p, const Inputs& in, const std::string& lane, Communicator& c,
                 Result& result) {
  if (c.size() == 1) return;
  const std::vector<Field> fields = vocabulary_fields(p, in, lane);
  const Hello own = {hash_of(fields), p.vocab_begin, p.vocab_local, p.vocab_stored};
  std::vector<Hello> all(static_cast<size_t>(c.size()));
  if (!c.host_gather(&own, all.data(), sizeof own)) {
    result.notes.push_back(fmt::format(
        "handshake: not run; communicator {} has no channel for host memory", c.engine()));
    return;
  }
  bool same = true;
  for (const Hello& h : all) same = same && h.fields == all[0].fields;
  agree(fields, own.fields, c, same);
  check_shards(p, all);
  for (int r = 0; r < c.size(); ++r)
    result.shards.push_back({all[r].begin, all[r].begin + all[r].local, all[r].stored});
}

void shake_batch_hands(const Problem& p, const Inputs& in, Communicator& c, Result& result) {
  if (c.size() == 1) return;
  struct BatchHello {
    uint64_t fields;
    int64_t valid;
  };
  const std::vector<Field> fields = batch_fields(p);
  BatchHello own = {hash_of(fields), 0};
  for (int64_t t = 0; p.device == DeviceKind::cpu && t < p.tokens; ++t)
    own.valid += row_kind(p, in, t) == RowKind::valid;
  std::vector<BatchHello> all(static_cast<size_t>(c.size()));
  if (!c.host_gather(&own, all.data(), sizeof own)) return;
  bool same = true;
  int64_t global = 0;
  for (const BatchHello& h : all) {
    same = same && h.fields == all[0].fields;
    global += h.valid;
  }
  agree(fields, own.fields, c, same);
  if (p.options.reduction == Reduction::mean && p.options.denominator != Denominator::given &&
      p.options.denominator_scope == DenominatorScope::local && own.valid > 0)
    result.notes.push_back(fmt::format(
        "denominator scope local: {} valid tokens here, {} over the {} ranks of the batch: "
        "gradients are a factor {:.6g} larger than with the global mean",
        own.valid, global, c.size(), static_cast<double>(global) / static_cast<double>(own.valid)));
}

}  // namespace talea::lce
