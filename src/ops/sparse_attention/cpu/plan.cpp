// What: tiles, chunks and buffers of lane cpu.
// Why: forward takes nothing beside thread tiles; backward a chunk of weights, and fp32 sums only
//      where dkv is narrower.
// Never: reads a tensor.
#include "ops/sparse_attention/cpu/plan.hpp"

#include <algorithm>

#include "device/cpu/tile_product.hpp"

namespace talea::sparse_attention::cpu {
namespace {

constexpr int64_t tile_floats = 40 * 1024;         // of rows: with the scores within a second cache
constexpr int64_t chunk_bytes = int64_t{1} << 20;  // of weights, for each thread

int64_t heads_of_a_group(const Problem& p) {
  int64_t most = 0;
  for (int64_t g = 0; g < p.groups; ++g) {
    const HeadRange range = heads_of(p, g);
    most = std::max(most, range.last - range.first);
  }
  return most;
}

}  // namespace

int64_t padded_heads(int64_t heads) {
  constexpr int64_t lanes = talea::cpu::max_lanes;
  return (heads + lanes - 1) / lanes * lanes;
}

Plan make_plan(const Problem& p, const DeviceFacts& device) {
  Plan plan;
  const int64_t rows = std::max<int64_t>(p.batch * p.queries, 1);
  plan.threads = static_cast<int>(
      std::min<int64_t>(p.options.threads > 0 ? p.options.threads : device.threads, rows));
  plan.heads = heads_of_a_group(p);
  plan.padded = padded_heads(plan.heads);
  plan.tile = std::clamp<int64_t>(tile_floats / std::max<int64_t>(p.dim, 1) / 8 * 8, 16, 128);
  plan.in_place = p.options.kv_storage == KvStorage::plain && p.kv_dtype == DType::f32;
  plan.inner = is_paged(p) ? p.page_rows : p.keys_stored;
  plan.outer = is_paged(p) ? p.pages : p.batch;
  if (p.pass == Pass::backward) {
    plan.repeats_forward = !p.has_saved;
    plan.dkv_in_workspace = p.wants_dkv && p.dkv_dtype != DType::f32;
    plan.entries = is_paged(p) ? p.pages : 1;
    const int64_t query = p.groups * p.slots * (2 * plan.heads * 4 + 8) + p.heads * 8;
    plan.chunk = std::clamp<int64_t>(chunk_bytes * plan.threads / std::max<int64_t>(query, 1),
                                     plan.threads, 64 * plan.threads);
    plan.chunk = std::min(plan.chunk, rows);
  }
  Arena arena;
  plan.bytes = lay_out(p, plan, arena).bytes;
  return plan;
}

Layout lay_out(const Problem& p, const Plan& plan, Arena& arena) {
  Layout l;
  const bool backward = p.pass == Pass::backward;
  const bool needs_o = !backward || plan.repeats_forward;
  const bool narrow_dq = backward && p.wants_dq && p.dq_dtype != DType::f32;
  const int64_t widest = std::max(plan.in_place ? 0 : plan.tile * p.dim, 2 * plan.heads * p.dim);
  const int64_t heads = std::max<int64_t>(plan.padded, 1);
  l.threads = arena.take<ThreadBuffers>(plan.threads);
  for (int i = 0; i < plan.threads; ++i) {
    ThreadBuffers b;
    b.q = arena.take<float>(heads * p.dim);
    b.d_o = arena.take<float>(backward ? heads * p.value_dim : 0);
    b.rows = arena.take<float>(widest);
    b.scores = arena.take<float>(plan.tile * heads);
    b.d_scores = arena.take<float>(backward ? plan.tile * heads : 0);
    if (mutant(Mutant::sa26_buffers_alias)) b.d_scores = b.scores;
    b.o = arena.take<float>(needs_o || backward ? heads * p.value_dim : 0);
    b.dq = arena.take<float>(narrow_dq ? heads * p.dim : 0);
    b.heads = arena.take<float>(head_numbers * heads);
    const int64_t most = std::max({2 * plan.tile, 4 * heads, backward ? 2 * p.slots : 0});
    b.pointers = arena.take<const float*>(most + 4 * heads);
    b.targets = arena.take<float*>(most);
    if (l.threads) l.threads[i] = b;
  }
  if (backward) {
    const int64_t lists = plan.chunk * p.groups;
    l.chunk.weights = arena.take<float>(p.wants_dkv ? lists * p.slots * 2 * plan.heads : 0);
    l.chunk.rows = arena.take<int64_t>(p.wants_dkv ? lists * p.slots : 0);
    l.chunk.count = arena.take<int64_t>(lists);
    l.chunk.sink = arena.take<double>(plan.chunk * p.heads);
    l.chunk.bins = arena.take<int64_t>(row_bins);
    l.dkv =
        arena.take<float>(plan.dkv_in_workspace ? plan.entries * plan.inner * p.groups * p.dim : 0);
  }
  l.bytes = arena.bytes();
  return l;
}

}  // namespace talea::sparse_attention::cpu
