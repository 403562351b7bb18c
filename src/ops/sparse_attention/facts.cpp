// What: counts the slots of host index lists, checks the data a host can read, counts products.
// Why: foreign indices are counted by one rule, and checked before anything is written.
// Never: reads a key, or a slot at or behind topk_length.
#include <cmath>

#include "ops/sparse_attention/contract.hpp"
#include "ops/sparse_attention/mutants.hpp"

namespace talea::sparse_attention {
namespace {

constexpr auto bad = ErrorKind::invalid_data;

int64_t groups_of_lists(const Problem& p) { return p.pass == Pass::index_loss ? 1 : p.groups; }

void check_cu(const char* name, const View& cu, int64_t n, int64_t rows) {
  int64_t before = 0;
  for (int64_t i = 0; i <= n; ++i) {
    const int64_t at = cu.integer(i);
    require(at >= before, bad, "{}: entry {} = {}: runs backwards from {}", name, i, at, before);
    require(at <= rows, bad, "{}: entry {} = {}: beyond the {} rows", name, i, at, rows);
    before = at;
  }
}

bool is_scale(double x) { return std::isfinite(x) && x > 0; }

struct Place {
  int64_t outer = 0, row = 0;
  const char* part = "tile";
  int64_t number = 0;
};

void check_scale(const char* name, double x, const Place& at) {
  require(is_scale(x), bad, "{}: {} at row {}, {} {} of entry {}: must be finite and > 0", name, x,
          at.row, at.part, at.number, at.outer);
}

// The scales that one stored row of kv is multiplied by.
int64_t scales_of_a_row(const Problem& p) {
  if (p.options.kv_storage == KvStorage::fp8_656) return packed_value_dim / scale_tile;
  return p.kv_scale_rank == 2 ? (p.dim + scale_tile - 1) / scale_tile : 1;
}

double scale_of(const Problem& p, const Args& a, const KeyRow& row, int64_t g, int64_t tile) {
  if (p.options.kv_storage != KvStorage::fp8_656) return a.kv_scale.get(row.outer, row.inner, tile);
  float scale;
  std::memcpy(&scale,
              a.kv.address(a.kv.at(row.outer, row.inner, g)) + packed_scales +
                  tile * static_cast<int64_t>(sizeof scale),
              sizeof scale);
  return static_cast<double>(scale);
}

bool are_scales(const Problem& p, const Args& a, const KeyRow& row, int64_t g) {
  for (int64_t t = 0; t < scales_of_a_row(p); ++t)
    if (!is_scale(scale_of(p, a, row, g, t))) return false;
  return true;
}

void check_row(const Problem& p, const Args& a, const KeyRow& row, int64_t g) {
  const char* const name = p.options.kv_storage == KvStorage::fp8_656 ? "kv" : "kv_scale";
  for (int64_t t = 0; t < scales_of_a_row(p); ++t)
    check_scale(name, scale_of(p, a, row, g, t), {row.outer, row.inner, "tile", t});
}

// Rows that no slot names (unused pages of a cache) are not read, whatever they hold; where rows
// lie on several ranks, or there are no lists, all that are here count.
bool lists_say_what_is_read(const Problem& p, const Args& a) { return a.indices && !p.gather_kv; }

bool has_scales(const Problem& p, const Args& a) {
  return a.kv && p.options.kv_storage != KvStorage::plain;
}
bool has_one_scale(const Problem& p, const Args& a) { return a.kv_scale && p.kv_scale_rank == 0; }

// What a slot names: its row of kv, and the key of the indexer.
void check_slot(const Problem& p, const Args& a, const KeyRow& row, int64_t g) {
  if (has_scales(p, a)) check_row(p, a, row, g);
  if (a.index_k_scale)
    check_scale("index_k_scale", a.index_k_scale.get(row.outer, row.inner),
                {row.outer, row.inner, "tile", 0});
}
bool is_sound(const Problem& p, const Args& a, const KeyRow& row, int64_t g) {
  return (!has_scales(p, a) || are_scales(p, a, row, g)) &&
         (!a.index_k_scale || is_scale(a.index_k_scale.get(row.outer, row.inner)));
}

void check_kv_scales(const Problem& p, const Args& a) {
  const bool one = has_one_scale(p, a);
  if (!has_scales(p, a) || (lists_say_what_is_read(p, a) && !one)) return;
  const int64_t outer = one ? 1 : is_paged(p) ? p.pages : p.batch;
  const int64_t rows = one ? 1 : is_paged(p) ? p.page_rows : p.keys_stored;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t g = 0; g < (a.kv_scale ? 1 : p.groups); ++g)
        check_row(p, a, {SlotKind::valid, o, r}, g);
}

// Of the keys in the bounds of any query.
void check_key_scales(const Problem& p, const Args& a, int64_t b) {
  if (lists_say_what_is_read(p, a)) return;
  for (int64_t j = 0; j < p.keys_stored; ++j) {
    if (is_scale(a.index_k_scale.get(b, j))) continue;
    bool read = p.gather_kv;
    for (int64_t s = 0; !read && s < p.queries; ++s) {
      const Bounds in = index_bounds(p, a, b, s);
      read = in.begin <= j && j < in.end;
    }
    if (read) check_scale("index_k_scale", a.index_k_scale.get(b, j), {b, j, "tile", 0});
  }
}

void check_scales(const Problem& p, const Args& a) {
  check_kv_scales(p, a);
  if (a.q_scale)
    for (int64_t b = 0; b < (p.q_scale_rank ? p.batch : 1); ++b)
      for (int64_t s = 0; s < (p.q_scale_rank ? p.queries : 1); ++s)
        for (int64_t h = 0; h < (p.q_scale_rank == 2 ? p.heads : 1); ++h)
          check_scale("q_scale", a.q_scale.get(b, s, h), {b, s, "head", h});
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t s = 0; a.index_q_scale && s < p.queries; ++s)
      for (int64_t h = 0; h < p.index_heads; ++h)
        check_scale("index_q_scale", a.index_q_scale.get(b, s, h), {b, s, "head", h});
    if (a.index_k_scale) check_key_scales(p, a, b);
  }
}

}  // namespace

HeadRange heads_of(const Problem& p, int64_t group) {
  const int64_t each = p.total_heads / p.groups;
  const int64_t first = std::max(group * each - p.head_begin, int64_t{0});
  const int64_t last = std::min((group + 1) * each - p.head_begin, p.heads);
  return {first, std::max(first, last)};
}

double product_flops(const Problem& p) {
  const auto d = [](int64_t n) { return static_cast<double>(n); };
  const double rows = d(p.batch) * d(p.queries);
  const double pairs = 2 * rows * d(p.slots) * d(p.heads);
  const double index = 2 * rows * d(p.index_heads) * d(p.index_dim);
  switch (p.pass) {
    case Pass::forward:
      return pairs * d(p.dim + p.value_dim);
    case Pass::backward:
      return pairs * d(3 * p.dim + 2 * p.value_dim + (p.has_saved ? 0 : p.dim + p.value_dim));
    case Pass::select:
      return index * d(p.keys);
    case Pass::index_loss: {
      const double keys = d(p.loss_keys == LossKeys::dense ? p.keys : p.slots);
      return index * keys * 3 + 2 * rows * keys * d(p.heads) * d(p.dim);
    }
  }
  return 0;
}

double log_add(double lse, double sink) {
  const double most = lse > sink || std::isnan(lse) ? lse : sink;
  if (std::isinf(most) || std::isnan(lse) || std::isnan(sink))
    return std::isnan(lse) || std::isnan(sink) ? NAN : most;
  return most + std::log1p(std::exp((lse > sink ? sink : lse) - most));
}

LogSum log_sum(double max, double sum, double sink) {
  if (std::isnan(sum) || std::isnan(sink)) return {NAN, 0};
  const double base = max > sink ? max : sink;
  if (std::isinf(base)) return {base, 0};
  return {base, std::log(sum * std::exp(max - base) + std::exp(sink - base))};
}

void check_data(const Problem& p, const Args& a) {
  if (p.sequences > 0) {
    check_cu("cu_seqlens_q", a.cu_seqlens_q, p.sequences, p.queries);
    check_cu("cu_seqlens_k", a.cu_seqlens_k, p.sequences, p.keys);
  }
  check_scales(p, a);
}

SlotFacts examine(const Problem& p, const Args& a) {
  SlotFacts facts;
  if (!a.indices) return facts;
  const KeyRule rule = key_rule(p);
  const int64_t groups = groups_of_lists(p);
  facts.given = p.batch * p.queries * groups * p.slots;
  int64_t valid = 0, foreign = 0, first = INT64_MAX, unsound = INT64_MAX;
  const int64_t rows = p.batch * p.queries;
  const bool scaled = lists_say_what_is_read(p, a) &&
                      ((has_scales(p, a) && !has_one_scale(p, a)) || a.index_k_scale);
#pragma omp parallel for reduction(+ : valid, foreign) reduction(min : first, unsound) \
    schedule(static) if (facts.given > 100000)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t b = row / p.queries, s = row % p.queries;
    const QueryRule query = query_rule(p, a, b, s);
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t k = 0; k < query.slots; ++k) {
        const KeyRow key = find_key(rule, query, k, a.indices.integer(b, s, g, k));
        const int64_t slot = (row * groups + g) * p.slots + k;
        valid += key.kind == SlotKind::valid;
        if (scaled && key.kind == SlotKind::valid && !is_sound(p, a, key, g))
          unsound = std::min(unsound, slot);
        if (key.kind != SlotKind::foreign) continue;
        ++foreign;
        first = std::min(first, slot);
      }
  }
  if (unsound < INT64_MAX) {
    const int64_t k = unsound % p.slots, g = unsound / p.slots % groups;
    const int64_t row = unsound / p.slots / groups, b = row / p.queries, s = row % p.queries;
    check_slot(p, a, find_key(rule, query_rule(p, a, b, s), k, a.indices.integer(b, s, g, k)), g);
  }
  facts.valid = valid;
  facts.foreign = foreign;
  if (foreign > 0) {
    facts.first_slot = first;
    const int64_t k = first % p.slots, g = first / p.slots % groups, row = first / p.slots / groups;
    facts.first_value = a.indices.integer(row / p.queries, row % p.queries, g, k);
  }
  return facts;
}

std::string refused_indices(const Problem& p, const SlotFacts& facts) {
  if (p.options.index_check != IndexCheck::checked || facts.foreign == 0) return "";
  const int64_t each = groups_of_lists(p) * p.slots, row = facts.first_slot / each;
  return fmt::format("indices: {} at batch {}, query {}, slot {} lies outside its space ({} such)",
                     facts.first_value, row / p.queries, row % p.queries, facts.first_slot % each,
                     facts.foreign);
}

void add_to_status(const View& status, const SlotFacts& facts, int64_t nan_scores) {
  if (!status) return;
  const auto at = [&](int64_t i) -> int64_t& {
    return static_cast<int64_t*>(status.data)[i * status.stride[0]];
  };
  // The caller's numbers, whatever they are: a sum beyond 64 bits wraps, as on a device.
  const auto add = [&](int64_t i, int64_t more) {
    at(i) = static_cast<int64_t>(static_cast<uint64_t>(at(i)) + static_cast<uint64_t>(more));
  };
  add(0, facts.foreign);
  if (facts.first_slot >= 0 && (at(1) < 0 || facts.first_slot < at(1))) {
    at(1) = facts.first_slot;
    at(2) = facts.first_value;
  }
  add(3, nan_scores);
}

}  // namespace talea::sparse_attention
