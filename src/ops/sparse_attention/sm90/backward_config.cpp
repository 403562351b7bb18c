// What: how lane sm90 cuts a backward call: chunks of queries, blocks, memory; and what it declines.
// Why: a pure function of the problem and the device, tested without one.
// Never: reads a tensor.
#include "ops/sparse_attention/sm90/backward_config.hpp"

#include <algorithm>
#include <cmath>

#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention::sm90 {
namespace {

using Reason = std::optional<std::string>;

// Turns of the device's blocks a chunk: more share out the sort and the launches of a chunk, and
// take memory.
constexpr int64_t most_turns = 8;
constexpr float most_exponent = 8, least_exponent = -14;  // fp16 holds P and dS beside them
constexpr int64_t most_rows = int64_t{1} << 31, most_slots = int64_t{1} << 30;

int64_t heads_in(const Problem& p, int64_t group) {
  const HeadRange range = heads_of(p, group);
  return range.last - range.first;
}

int64_t inner_rows_of(const Problem& p) { return is_paged(p) ? p.page_rows : p.keys_stored; }
int64_t outer_rows_of(const Problem& p) { return is_paged(p) ? p.pages : p.batch; }

Reason decline_words(const char* name, const Strides& s, DType dtype) {
  for (const int64_t stride : {s.batch, s.row, s.head})
    if (stride * size_of(dtype) % 16 != 0)
      return fmt::format("{}: stride {} of {}: rows must lie on multiples of 16 bytes", name,
                         stride, name_of(dtype));
  return std::nullopt;
}

int64_t bytes_of(const Problem& p, const BackwardConfig& c) {
  Arena arena;
  lay_out_backward(arena, p, c);
  return arena.bytes();
}

}  // namespace

Reason decline_backward(const Problem& p) {
  if (!p.has_saved) return "backward without o and lse: this lane does not run forward again";
  if (p.options.kv_storage != KvStorage::plain)
    return "backward: this version reads plain rows alone";
  if (p.has_d_o && p.d_o_dtype != p.q_dtype)
    return fmt::format("d_o of {} beside q of {}: products take both in one type",
                       name_of(p.d_o_dtype), name_of(p.q_dtype));
  if (p.has_d_o)
    if (auto reason = decline_words("d_o", p.d_o_stride, p.d_o_dtype)) return reason;
  if (!p.wants_dkv) return std::nullopt;
  if (p.dkv_dtype == DType::f32)
    if (auto reason = decline_words("dkv", p.dkv_stride, p.dkv_dtype)) return reason;
  if (outer_rows_of(p) * inner_rows_of(p) * p.groups >= most_rows)
    return fmt::format("{} rows of kv: slots are sorted by 31 bits",
                       outer_rows_of(p) * inner_rows_of(p) * p.groups);
  for (int64_t g = 1; g < p.groups; ++g)
    if (heads_in(p, g) != heads_in(p, 0)) return "groups with unlike numbers of heads on a rank";
  return std::nullopt;
}

BackwardBuffers lay_out_backward(Arena& arena, const Problem& p, const BackwardConfig& c) {
  BackwardBuffers b;
  if (c.counts) b.counters = arena.take<cuda::Counters>(1);
  b.delta = arena.take<float>(p.batch * p.queries * p.heads);
  if (p.wants_d_sink) b.sink_share = arena.take<float>(p.batch * p.queries * p.heads);
  if (!p.wants_dkv) return b;
  if (c.converts_dkv) b.dkv = arena.take<float>(c.rows * p.dim);
  if (c.adds) return b;
  const int64_t slots = c.chunk_lists * p.slots;
  b.weights = arena.take<char>(c.chunk_lists * c.head_tiles * c.key_tiles * weights_bytes);
  b.contributions = arena.take<float>(slots * c.sums.sums * p.dim);
  b.sorted.keys = arena.take<uint32_t>(slots);
  b.sorted.sorted_keys = arena.take<uint32_t>(slots);
  b.sorted.slots = arena.take<uint32_t>(slots);
  b.sorted.sorted_slots = arena.take<uint32_t>(slots);
  b.sorted.starts = arena.take<uint32_t>(c.rows + 1);
  b.sorted.scratch_bytes = c.sort_bytes;
  b.sorted.scratch = arena.take<char>(c.sort_bytes);
  return b;
}

BackwardConfig backward_config(const Problem& p, const DeviceFacts& d,
                               int64_t (*sort_bytes)(int64_t slots, int64_t rows)) {
  BackwardConfig c;
  const int64_t most = p.groups > 0 ? heads_in(p, 0) : 0;
  c.head_tiles = std::max<int64_t>((most + tile_heads - 1) / tile_heads, 1);
  c.key_tiles = (p.slots + tile_keys - 1) / tile_keys;
  c.lists = p.batch * p.queries * p.groups;
  c.inner_rows = std::max<int64_t>(inner_rows_of(p), 1);
  c.rows = outer_rows_of(p) * inner_rows_of(p) * p.groups;
  c.sm_count = std::max(d.sm_count, 1);
  c.sums = sum_plan(p.dim, c.head_tiles);
  c.counts = p.wants_status || p.options.index_check == IndexCheck::checked;
  c.contributes = p.wants_dkv && p.options.dkv_sum == DkvSum::deterministic;
  c.converts_dkv = p.wants_dkv && p.dkv_dtype != DType::f32;
  c.adds = p.wants_dkv && !c.contributes;
  const double scale = std::abs(p.scale);
  if (p.q_dtype == DType::f16)
    c.exponent =
        std::clamp(static_cast<float>(std::round(std::log2(scale))), least_exponent, most_exponent);
  // Whole turns of the device's blocks where the limit lets them.
  const int64_t turn = std::max<int64_t>(c.sm_count / c.head_tiles, 1);
  const int64_t slots = std::max<int64_t>(p.slots, 1);
  if (!c.contributes) {
    c.chunk_lists = std::max<int64_t>(c.lists, 1);
    return c;
  }
  const int64_t least = 1;
  int64_t high = std::max(least, std::min({c.lists, most_turns * turn, most_slots / slots}));
  const auto fits = [&](int64_t lists) {
    c.chunk_lists = lists;
    c.sort_bytes = c.rows > 0 ? sort_bytes(lists * p.slots, c.rows) : 0;
    return bytes_of(p, c) <= p.options.workspace_limit_bytes;
  };
  int64_t low = least;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (fits(middle))
      low = middle;
    else
      high = middle - 1;
  }
  if (low > turn && low < c.lists) low = low / turn * turn;
  fits(low);
  return c;
}

}  // namespace talea::sparse_attention::sm90
