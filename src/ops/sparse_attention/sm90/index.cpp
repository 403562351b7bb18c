// What: the selection of lane sm90: scores of a chunk of queries, then its best keys.
// Why: scores of all queries at once would be gigabytes; those of a chunk fit the limit.
// Never: allocates or synchronises.
#include "ops/sparse_attention/sm90/index.hpp"

#include <algorithm>
#include <cmath>

#include "device/common/cuda_check.hpp"
#include "device/sm90/tensor_map.hpp"
#include "ops/sparse_attention/contract.hpp"
#include "ops/sparse_attention/select_rows.hpp"

namespace talea::sparse_attention::sm90 {
namespace {

namespace hopper = talea::sm90;

struct Selection {
  const Call& c;
  const Problem& p = c.problem;
  const Args& a = c.args;
  const IndexConfig& config;
  const IndexRoom room;
  const cudaStream_t stream = device::cuda_stream(c.stream);
  IndexScores f = {};
  cuda::Selected to = {};

  CUtensorMap keys_of(int64_t b) const {
    const void* from = a.index_k.address(b * a.index_k.stride[0]);
    // Of a single row the stride is none.
    int64_t pitch = p.keys_stored > 1 ? a.index_k.stride[1] : p.index_dim;
    if (room.keys) {
      pitch = config.pitch;
      pack_index_keys(a.index_k, b, p.keys_stored, p.index_dim, pitch, room.keys, stream);
      from = room.keys;
    }
    const auto map_of = [&](hopper::Element element, int64_t each) {
      return hopper::tensor_map(from, element, p.keys_stored, p.index_dim / each, pitch / each,
                                index_keys);
    };
    if (p.index_q_dtype == DType::f8_e4m3) return map_of(hopper::Element::f16, 2);  // in pairs
    return map_of(p.index_q_dtype == DType::f16 ? hopper::Element::f16 : hopper::Element::bf16, 1);
  }
  void prepare() {
    cuda::IndexTables& t = f.tables;
    t.base = cuda::tables_of(p, a);
    t.causal = p.options.causal;
    t.key_stride = p.key_stride;
    t.begin = a.begin;
    t.end = a.end;
    t.weights = a.index_weights;
    t.q_scale = a.index_q_scale;
    t.k_scale = a.index_k_scale;
    f.q = a.index_q;
    f.scores = room.scores;
    f.stride = config.stride;
    f.keys = p.keys_stored;
    f.dim = p.index_dim;
    f.chunks = index_chunks(p.index_dim, p.index_q_dtype == DType::f8_e4m3);
    f.unit_keys = config.unit_keys;
    f.floor = p.act == Activation::relu ? 0.0f : -INFINITY;
    to.tables = t;
    to.stride = config.stride;
    to.top_k = p.slots;
    to.indices = a.selected;
    to.length = a.selected_length;
    to.scores = a.selected_scores;
  }
  // Heads a launch's worth at a time, in their order. Of no head every score is 0.
  void score(const CUtensorMap& keys) {
    if (p.index_heads == 0)
      return device::check(
          cudaMemsetAsync(f.scores, 0, static_cast<size_t>(4 * f.n * f.stride), stream),
          "sparse_attention: scores of no head");
    const int64_t units = (p.keys_stored + f.unit_keys - 1) / f.unit_keys;
    const int64_t block = queries_of(config.heads);
    f.query_blocks = (f.n + block - 1) / block;
    for (f.head = 0; f.head < p.index_heads; f.head += config.heads) {
      f.heads = static_cast<int>(std::min<int64_t>(p.index_heads - f.head, config.heads));
      f.adds = f.head > 0;
      f.last = f.head + config.heads >= p.index_heads;
      (p.index_q_dtype == DType::bf16  ? launch_index_bf16
       : p.index_q_dtype == DType::f16 ? launch_index_f16
                                       : launch_index_e4m3)(f, config.heads, units, keys, stream);
    }
  }
  // Of a query of the chunk, where the host knows it: of the causal rule alone.
  int64_t most_keys() const {
    if (!p.options.causal || p.has_positions || p.sequences > 0) return p.keys_stored;
    return (p.options.q_position_base + f.s + f.n) / p.key_stride;
  }
  void run() {
    prepare();
    cuda::reset(room.counters, stream);
    for (f.b = 0; f.b < p.batch; ++f.b) {
      CUtensorMap keys{};
      if (p.keys_stored > 0 && p.queries > 0) keys = keys_of(f.b);
      for (f.s = 0; f.s < p.queries; f.s += config.rows) {
        f.n = std::min(config.rows, p.queries - f.s);
        if (p.keys_stored > 0) score(keys);
        to.b = f.b;
        to.s = f.s;
        to.n = f.n;
        to.most_keys = most_keys();
        cuda::select_top(to, room.scores, room.counters, stream);
      }
    }
    if (a.status) cuda::write_status(room.counters, to.tables.base, a.status, stream);
  }
};

}  // namespace

Planned plan_index(const Problem& p, const DeviceFacts& d) {
  const IndexConfig config = index_config(p, d);
  return planned(bytes_of(config), 0, config);
}

std::vector<std::string> index_details(const IndexConfig& c) {
  std::vector<std::string> lines = {
      fmt::format("tile = {} keys x {} queries of {} heads", index_keys, index_rows / c.heads,
                  c.heads),
      fmt::format("chunk_queries = {}", c.rows),
      fmt::format("unit = {} queries x {} keys a block", queries_of(c.heads), c.unit_keys)};
  if (c.packed > 0) lines.push_back(fmt::format("keys copied to rows of {} bytes", c.pitch));
  return lines;
}

void run_index(const Call& c, const IndexConfig& config) {
  Arena arena(c.workspace);
  Selection{.c = c, .config = config, .room = lay_out(arena, config)}.run();
  Result& r = c.result;
  r.scores_home = "chunk of queries in the workspace, fp32";
  r.scores_tile_rows = config.rows;
  r.scores_tile_keys = config.stride;
  r.scores_tile_bytes = 4 * config.rows * config.stride;
}

}  // namespace talea::sparse_attention::sm90
