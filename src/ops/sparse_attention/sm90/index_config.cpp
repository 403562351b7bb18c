// What: how lane sm90 cuts a selection: heads of a product, chunks of queries, units of keys; and
// what it declines.
// Why: a chunk is whole waves of blocks where the limit allows; few queries share out their keys.
// Never: lets a cut change a score: each is formed by one block, from all of a launch's heads.
#include "ops/sparse_attention/sm90/index_config.hpp"

#include <algorithm>

#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention::sm90 {
namespace {

constexpr int64_t least_unit_keys = 1024, units_a_processor = 4;

int64_t over(int64_t n, int64_t by) { return (n + by - 1) / by; }

std::optional<std::string> decline_rows(const char* name, const Strides& s) {
  for (const int64_t stride : {s.batch, s.row, s.head})
    if (stride % 8 != 0)
      return fmt::format("{}: stride {}: rows must lie on multiples of 8 elements", name, stride);
  return std::nullopt;
}

}  // namespace

IndexRoom lay_out(Arena& arena, const IndexConfig& c) {
  IndexRoom room;
  room.counters = arena.take<cuda::Counters>(1);
  room.scores = arena.take<float>(c.rows * c.stride);
  if (c.packed > 0) room.keys = arena.take<char>(c.packed);
  return room;
}

int64_t bytes_of(const IndexConfig& c) {
  Arena arena;
  lay_out(arena, c);
  return arena.bytes();
}

std::optional<std::string> decline_index(const Problem& p) {
  const DType type = p.index_q_dtype;
  if (type != DType::bf16 && type != DType::f16 && type != DType::f8_e4m3)
    return fmt::format("index_q of {}: tensor cores multiply bf16 or fp16 here", name_of(type));
  if (p.index_dim < 8 || p.index_dim % 8 != 0 || p.index_dim > most_index_columns)
    return fmt::format("index_dim = {}: no multiple of 8 from 8 to {}", p.index_dim,
                       most_index_columns);
  if (p.alignment_bytes < 16)
    return fmt::format("tensors on multiples of {} bytes: 16 are needed", p.alignment_bytes);
  if (auto reason = decline_rows("index_q", p.q_stride)) return reason;
  if (p.keys_stored > 1 && p.kv_stride.row < p.index_dim)
    return fmt::format("index_k: stride {}: rows lie in each other", p.kv_stride.row);
  return decline_rows("index_k", p.kv_stride);
}

IndexConfig index_config(const Problem& p, const DeviceFacts& d) {
  IndexConfig c;
  c.heads = p.index_heads <= 16 ? 16 : p.index_heads <= 32 ? 32 : most_index_heads;
  c.stride = over(std::max<int64_t>(p.keys_stored, 1), 32) * 32;
  const bool e4m3 = p.index_q_dtype == DType::f8_e4m3;
  if (e4m3 && ((p.keys_stored > 1 ? p.kv_stride.row : p.index_dim) % 16 != 0 ||
               (p.batch > 1 && p.kv_stride.batch % 16 != 0))) {
    c.pitch = over(p.index_dim, 16) * 16;
    c.packed = p.keys_stored * c.pitch;
  }
  const int64_t block = queries_of(c.heads), processors = std::max(d.sm_count, 1);
  const int64_t limit = p.options.workspace_limit_bytes, row_bytes = 4 * c.stride;
  c.rows = std::clamp<int64_t>((limit - bytes_of(c)) / row_bytes, 1,
                               std::max<int64_t>(over(p.queries, block) * block, 1));
  for (const int64_t whole : {block, block * processors})
    if (c.rows > whole) c.rows -= c.rows % whole;
  while (c.rows > 1 && bytes_of(c) > limit) --c.rows;
  c.rows = std::min(c.rows, std::max<int64_t>(p.queries, 1));
  const int64_t cuts = over(units_a_processor * processors, over(c.rows, block));
  c.unit_keys =
      std::max(over(over(std::max<int64_t>(p.keys_stored, 1), cuts), index_keys) * index_keys,
               least_unit_keys);
  return c;
}

}  // namespace talea::sparse_attention::sm90
