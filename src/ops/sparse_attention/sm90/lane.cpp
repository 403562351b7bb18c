// What: the table entry of lane sm90: one kernel for the forward pass; other passes have files.
// Why: on Hopper, rows are gathered into shared memory and multiplied there: no copy, no workspace.
// Never: declines in silence, allocates, or waits but under IndexCheck::checked.
#include "core/arena.hpp"
#include "ops/sparse_attention/foreign.hpp"
#include "ops/sparse_attention/sharded.hpp"
#include "ops/sparse_attention/sm90/backward_lane.hpp"
#include "ops/sparse_attention/sm90/config.hpp"
#include "ops/sparse_attention/sm90/index.hpp"

namespace talea::sparse_attention {
namespace {

// 16 bits, and every row on 16-byte words.
bool in_words(const View& v) {
  if (!v.present || !is_16bit(v.dtype) || reinterpret_cast<uintptr_t>(v.data) % 16 != 0)
    return false;
  return (v.stride[0] | v.stride[1] | v.stride[2]) % 8 == 0;
}

void launch(const sm90::Forward& f, const sm90::Config& c, bool f16, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(c.blocks);
  if (c.narrow)
    return (f16 ? sm90::launch_narrow_f16 : sm90::launch_narrow_bf16)(f, blocks, stream);
  if (c.few_heads)
    return (f16 ? sm90::launch_few_heads_f16 : sm90::launch_few_heads_bf16)(f, blocks, stream);
  if (c.segments == 1)
    return (f16 ? sm90::launch_f16 : sm90::launch_bf16)(f, c.half, blocks, stream);
  sm90::launch_unknown(f, stream);
  if (c.rows == sm90::Rows::packed)
    sm90::launch_packed_scores_bf16(f, blocks, stream);
  else
    (f16 ? sm90::launch_scores_f16 : sm90::launch_scores_bf16)(f, c.half, blocks, stream);
  (f16 ? sm90::launch_values_f16 : sm90::launch_values_bf16)(f, stream);
}

struct Sm90 {
  static std::optional<std::string> decline(const Problem& p, const DeviceFacts& d) {
    return sm90::decline(p, d);
  }
  static Planned plan(const Problem& p, const DeviceFacts& d) {
    if (p.pass == Pass::select) return sm90::plan_index(p, d);
    if (p.pass == Pass::backward) return sm90::plan_backward(p, d);
    const sm90::Config c = sm90::config(p, d);
    return planned(c.counts || c.segments > 1 ? sm90::bytes_of(c) : 0, 0, c);
  }
  static std::vector<std::string> details(const Problem& p, const Planned& planned) {
    if (p.pass == Pass::select) return sm90::index_details(planned.as<sm90::IndexConfig>());
    if (p.pass == Pass::backward)
      return sm90::backward_details(p, planned.as<sm90::BackwardConfig>());
    const auto& c = planned.as<sm90::Config>();
    const sm90::TilePlan tiles = sm90::tile_plan(p.dim, c.half);
    std::vector<std::string> lines = {fmt::format("tile = {} heads x {} keys, one query a block",
                                                  sm90::tile_heads, sm90::tile_keys),
                                      fmt::format("value columns = 2 x {}", c.half)};
    if (c.narrow) {
      const bool wide = sm90::narrow_wide(p.dim, p.value_dim);
      return {lines[0],
              fmt::format("value columns = {} x {}, a warpgroup a block", wide ? 2 : 1,
                          sm90::chunk_columns),
              fmt::format("shared memory = {} bytes: q of {} columns, two tiles of keys",
                          c.shared_bytes, sm90::narrow_columns(p.dim) * sm90::chunk_columns),
              fmt::format("blocks = {}, {} a multiprocessor", c.blocks, sm90::narrow_blocks(wide))};
    }
    if (c.few_heads)
      return {
          fmt::format("tile = {} keys x {} heads, keys as the rows of the products, one query a "
                      "block",
                      sm90::tile_keys, sm90::most_few_heads),
          lines[1],
          fmt::format("shared memory = {} bytes: q of {} columns, a ring of {} chunks of {} keys "
                      "x {} columns",
                      c.shared_bytes, tiles.columns * sm90::chunk_columns, sm90::ring_chunks,
                      sm90::tile_keys, sm90::chunk_columns),
          fmt::format("blocks = {}, persistent", c.blocks)};
    const bool few = c.segments > 1, packed = few && c.rows == sm90::Rows::packed;
    lines.push_back(fmt::format("shared memory = {} bytes: q of {} columns{}, {} of keys",
                                c.shared_bytes, tiles.columns * sm90::chunk_columns,
                                packed ? " and two tiles of heads" : "",
                                packed ? "a tile" : "two tiles"));
    lines.push_back(fmt::format("blocks = {}{}", c.blocks, few ? "" : ", persistent"));
    if (c.rows == sm90::Rows::shared)
      lines.emplace_back("cluster = 2 blocks, each dequantises half of the rows for both");
    if (few)
      lines.push_back(fmt::format(
          "three kernels: maxima marked as unknown, weights of {} tiles of a list side by side, {} "
          "slices of {} value columns, each summed in the order of one block",
          2 * c.segments, c.slices, 2 * sm90::slice_columns));
    return lines;
  }
  static void run(const Call& c, const Planned& planned);
};

void Sm90::run(const Call& c, const Planned& planned) {
  const Problem& p = c.problem;
  const Args& a = c.args;
  const device::DeviceGuard guard(p.device_index);
  const cudaStream_t stream = device::cuda_stream(c.stream);
  device::refuse_earlier_error(stream);
  if (p.pass == Pass::select) return sm90::run_index(c, planned.as<sm90::IndexConfig>());
  if (p.pass == Pass::backward) return sm90::run_backward(c, planned.as<sm90::BackwardConfig>());
  const auto& config = planned.as<sm90::Config>();
  Arena arena(c.workspace);
  sm90::Forward f;
  f.tables = cuda::tables_of(p, a);
  const sm90::Room room = sm90::lay_out(arena, config);
  f.counters = room.counters;
  f.stored = room.stored;
  f.segments = config.segments;
  f.q = a.q;
  f.kv = a.kv;
  f.sink = a.sink;
  f.o = a.o;
  f.o_residual = a.o_residual;
  f.lse = a.lse;
  f.row_max = a.row_max;
  f.scale = static_cast<float>(p.scale);
  f.dim = p.dim;
  f.value_dim = p.value_dim;
  f.heads = p.heads;
  f.head_begin = p.head_begin;
  f.group_heads = p.total_heads / p.groups;
  f.head_tiles = config.head_tiles;
  f.work = config.work;
  f.rows = config.rows;
  f.rows_from = static_cast<const char*>(p.keys > 0 ? a.kv.data : a.q.data);
  f.o_words = in_words(a.o);
  f.residual_words = in_words(a.o_residual);
  if (f.counters) cuda::begin_counting(c, f.tables, f.counters, stream);
  if (config.blocks > 0) launch(f, config, p.q_dtype == DType::f16, stream);
  if (a.status) cuda::write_status(f.counters, f.tables, a.status, stream);
  Result& r = c.result;
  r.scores_home = "registers of a warpgroup, fp32";
  r.scores_tile_rows = config.few_heads ? sm90::most_few_heads : sm90::tile_heads;
  r.scores_tile_keys = sm90::tile_keys;
  r.scores_tile_bytes = 4 * r.scores_tile_rows * r.scores_tile_keys;
  if (config.segments > 1) r.decode_segments = config.segments;
  r.kv_path = f.rows != sm90::Rows::plain
                  ? "selected rows dequantised in fp32 and rounded once, in shared memory, a "
                    "tile of keys at a time"
                  : "selected rows copied to shared memory, a tile of keys at a time";
  r.accumulator_o = "fp32";
}

}  // namespace

Lane sm90_lane() {
  return lane_of_ranks<Sm90>(
      {.name = "sm90", .kind = "native kernel", .runs_on = DeviceKind::cuda});
}

}  // namespace talea::sparse_attention
