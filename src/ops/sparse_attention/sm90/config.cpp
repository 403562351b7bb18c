// What: how lane sm90 cuts a forward call: tiles, shared memory, blocks; and what it declines.
// Why: a pure function of the problem and the device, tested without one.
// Never: reads a tensor.
#include "ops/sparse_attention/sm90/config.hpp"

#include <algorithm>

#include "ops/sparse_attention/contract.hpp"
#include "ops/sparse_attention/sm90/backward_config.hpp"
#include "ops/sparse_attention/sm90/index_config.hpp"

namespace talea::sparse_attention::sm90 {
namespace {

using Reason = std::optional<std::string>;

// Weights come first where blocks that have a list each would fill no more than an eighth of the
// device, of packed rows a fifth, and a list is long enough to be worth three kernels.
constexpr int64_t most_share = 8, most_packed_share = 5, least_segments = 4;
constexpr int64_t most_narrow_grid = int64_t{1} << 30;  // a block a work; numbers of slots, too

Reason decline_shape(const Problem& p) {
  if (p.dim % 16 != 0 || p.value_dim % 16 != 0)
    return fmt::format("dim = {}, value_dim = {}: not multiples of 16", p.dim, p.value_dim);
  if (p.dim > most_columns)
    return fmt::format("dim = {}: more than {}; its tiles need {} bytes of shared memory", p.dim,
                       most_columns, shared_bytes(p.dim, 256));
  if (p.value_dim > most_value_columns)
    return fmt::format("value_dim = {}: more than {}", p.value_dim, most_value_columns);
  return std::nullopt;
}

// Rows are copied in pieces of 16 bytes.
Reason decline_rows(const char* name, const Strides& s, DType dtype) {
  for (const int64_t stride : {s.batch, s.row, s.head})
    if (stride * size_of(dtype) % 16 != 0)
      return fmt::format("{}: stride {} of {}: rows must lie on multiples of 16 bytes", name,
                         stride, name_of(dtype));
  return std::nullopt;
}

// Rows of kv within 2^32 times 16 bytes of its first, and their numbers below 2^31.
bool near_rows(const Problem& p) {
  const int64_t outer = p.pages > 0 ? p.pages : p.batch;
  const int64_t inner = p.pages > 0 ? p.page_rows : p.keys;
  const Strides& s = p.kv_stride;
  if (s.batch < 0 || s.row < 0 || s.head < 0) return false;
  const double bytes = 2.0 * (static_cast<double>(s.batch) * static_cast<double>(outer) +
                              static_cast<double>(s.row) * static_cast<double>(inner) +
                              static_cast<double>(s.head) * static_cast<double>(p.groups));
  return bytes < 0x1p36 && p.keys < int64_t{1} << 31;
}

}  // namespace

Reason decline(const Problem& p, const DeviceFacts& d) {
  if (p.device != DeviceKind::cuda) return "host tensors: this lane reads device memory";
  if (d.cuda_devices == 0) return d.cuda_problem.empty() ? "no CUDA device" : d.cuda_problem;
  if (d.sm != 90) return fmt::format("sm_{}: needs sm_90", d.sm);
  if (p.pass == Pass::select) return decline_index(p);
  if (p.pass != Pass::forward && p.pass != Pass::backward)
    return "this version has kernels of forward, backward and selection alone";
  const bool packed = p.options.kv_storage == KvStorage::fp8_656;
  if (p.options.kv_storage == KvStorage::fp8_scaled)
    return "kv_storage = fp8_scaled: this version reads plain rows and those of fp8_656";
  if (packed && p.q_dtype != DType::bf16)
    return fmt::format("q of {}: rows of fp8_656 are multiplied in bf16", name_of(p.q_dtype));
  if (p.q_dtype != DType::bf16 && p.q_dtype != DType::f16)
    return fmt::format("q of {}: tensor cores multiply bf16 or fp16 here", name_of(p.q_dtype));
  if (p.options.operands == Operands::split)
    return "operands = split: this version feeds the weights as one number";
  if (auto reason = decline_shape(p)) return reason;
  if (p.alignment_bytes < 16)
    return fmt::format("tensors on multiples of {} bytes: 16 are needed", p.alignment_bytes);
  if (auto reason = decline_rows("q", p.q_stride, p.q_dtype)) return reason;
  if (auto reason = decline_rows("kv", p.kv_stride, packed ? DType::u8 : p.kv_dtype)) return reason;
  return p.pass == Pass::backward ? decline_backward(p) : std::nullopt;
}

Room lay_out(Arena& arena, const Config& c) {
  Room room;
  if (c.counts) room.counters = arena.take<cuda::Counters>(1);
  if (c.segments == 1) return room;
  Stored& s = room.stored;
  s.tiles = 2 * c.segments;
  s.slices = c.slices;
  s.half = c.half;
  s.writers =
      static_cast<int>(c.rows == Rows::packed ? 4 * ((c.head_tiles + 1) / 2) : 2 * c.head_tiles);
  s.written = arena.take<int>(c.lists);
  s.most = arena.take<float>(c.lists * c.head_tiles * s.tiles * tile_heads);
  s.weighed = arena.take<char>(c.lists * c.head_tiles * c.segments * weighed_bytes);
  s.values = arena.take<char>(c.lists * s.tiles * s.slices * slice_bytes);
  return room;
}

int64_t bytes_of(const Config& c) {
  Arena arena;
  lay_out(arena, c);
  return arena.bytes();
}

Config config(const Problem& p, const DeviceFacts& d) {
  Config c;
  c.half = p.value_dim <= 128 ? 64 : p.value_dim <= 256 ? 128 : 256;
  int64_t most_heads = 1;  // without heads, too, indices are counted
  for (int64_t g = 0; g < p.groups; ++g) {
    const HeadRange range = heads_of(p, g);
    most_heads = std::max(most_heads, range.last - range.first);
  }
  c.head_tiles = (most_heads + tile_heads - 1) / tile_heads;
  c.lists = p.batch * p.queries * p.groups;
  c.work = c.lists * c.head_tiles;
  c.shared_bytes = shared_bytes(p.dim, c.half);
  c.counts = p.wants_status || p.options.index_check == IndexCheck::checked;
  const bool pairs = p.groups == 1 && c.head_tiles % 2 == 0;  // of blocks that share a list
  if (p.options.kv_storage == KvStorage::fp8_656) c.rows = pairs ? Rows::shared : Rows::packed;
  // The sums have the same order either way: the limit and the number of queries may decide.
  Config few = c;
  few.segments = (p.slots + 2 * tile_keys - 1) / (2 * tile_keys);
  few.slices = static_cast<int>((std::min<int64_t>(p.value_dim, c.half) + slice_columns - 1) /
                                slice_columns);
  few.slices = (few.slices + slice_cluster - 1) / slice_cluster * slice_cluster;
  few.work = c.work * few.segments;
  few.blocks = few.work;
  if (c.rows != Rows::plain) {
    few.rows = Rows::packed;
    few.shared_bytes = packed_scores_bytes;
    few.blocks = c.lists * 2 * few.segments * ((c.head_tiles + 1) / 2);
  }
  const int64_t share = c.rows == Rows::plain ? most_share : most_packed_share;
  if (p.groups == 1 && p.heads > 0 && c.work > 0 && c.work * share <= d.sm_count &&
      few.segments >= least_segments && bytes_of(few) <= p.options.workspace_limit_bytes)
    return few;
  c.narrow = c.rows == Rows::plain && c.work <= most_narrow_grid && p.slots <= most_narrow_grid &&
             p.value_dim <= most_narrow_value_columns &&
             narrow_columns(p.dim) <= most_narrow_columns && near_rows(p);
  if (c.narrow) {
    c.shared_bytes =
        narrow_shared_bytes(p.dim, p.value_dim, std::min(p.heads, p.total_heads / p.groups));
    c.blocks = c.work;
    return c;
  }
  c.few_heads = c.rows == Rows::plain && c.half == 256 && most_heads <= most_few_heads;
  if (c.few_heads) c.shared_bytes = ring_shared_bytes();
  const int64_t together = c.rows == Rows::shared ? 2 : 1;
  c.blocks = std::min<int64_t>(c.work, std::max<int64_t>(d.sm_count / together, 1) * together);
  return c;
}

}  // namespace talea::sparse_attention::sm90
