// What: how many queries a chunk of lane cuda holds, and where its pieces lie in the workspace.
// Why: the formula of the workspace is this layout run without memory; the limit decides the chunk.
// Never: reads a tensor.
#include "ops/sparse_attention/cuda/plan.hpp"

#include <algorithm>

#include "device/common/cublaslt.hpp"
#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int64_t most_queries = 1024, most_key_columns = 4096;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <typename T>
T* take(Arena& arena, int64_t count, DType dtype) {
  return reinterpret_cast<T*>(arena.take<char>(count * size_of(dtype)));
}

// Weights of 16 bits have a second number for what rounding left.
bool rests(const Problem& p, const ChunkPlan& plan) {
  return p.options.operands == Operands::split && plan.operands != DType::f32;
}

void lay_out_backward(Arena& arena, const Problem& p, const ChunkPlan& plan, Buffers& b) {
  const int64_t n = plan.queries, slots = n * plan.padded, rows = n * plan.heads;
  const DType type = plan.operands;
  b.d_o = take<void>(arena, rows * p.value_dim, type);
  b.d_weights = arena.take<float>(rows * plan.padded);
  b.slopes = take<void>(arena, rows * plan.padded, type);
  if (rests(p, plan)) b.slopes_lo = take<void>(arena, rows * plan.padded, type);
  if (p.d_o_dtype == DType::f32 && type != DType::f32)
    b.d_o_lo = take<void>(arena, rows * p.value_dim, type);
  if (p.wants_d_sink) {
    b.d_sink_shares = arena.take<float>(rows);
    b.d_sink = arena.take<double>(p.heads);
  }
  if (!p.wants_dkv) return;
  b.contributions = arena.take<float>(slots * p.dim);
  const int64_t all = outer_rows(p) * inner_rows(p);
  if (plan.converts_dkv) b.dkv = arena.take<float>(all * p.groups * p.dim);
  if (p.options.dkv_sum == DkvSum::atomic) return;
  b.sort.keys = arena.take<uint64_t>(slots);
  b.sort.sorted_keys = arena.take<uint64_t>(slots);
  b.sort.slots = arena.take<uint32_t>(slots);
  b.sort.sorted_slots = arena.take<uint32_t>(slots);
  b.sort.scratch_bytes = sort_bytes(slots, all);
  b.sort.scratch = arena.take<char>(b.sort.scratch_bytes);
}

void lay_out_select(Arena& arena, const Problem& p, const ChunkPlan& plan, Buffers& b) {
  const int64_t n = plan.queries;
  b.index_q = take<void>(arena, n * p.index_heads * p.index_dim, plan.operands);
  b.index_k = take<void>(arena, p.keys_stored * p.index_dim, plan.operands);
  b.products = arena.take<float>(n * p.index_heads * plan.key_columns);
  b.index_scores = arena.take<float>(n * p.keys_stored);
}

}  // namespace

int64_t inner_rows(const Problem& p) { return is_paged(p) ? p.page_rows : p.keys_stored; }
int64_t outer_rows(const Problem& p) { return is_paged(p) ? p.pages : p.batch; }

Buffers lay_out(Arena& arena, const Problem& p, const ChunkPlan& plan) {
  Buffers b;
  b.counters = arena.take<Counters>(1);
  b.product = arena.take<char>(device::product_workspace_bytes);
  if (p.pass == Pass::select) {
    lay_out_select(arena, p, plan, b);
    return b;
  }
  const int64_t n = plan.queries, slots = n * plan.padded, rows = n * plan.heads;
  b.rows = arena.take<int64_t>(slots);
  b.keys = take<void>(arena, slots * p.dim, plan.operands);
  b.q = take<void>(arena, rows * p.dim, plan.operands);
  b.scores = arena.take<float>(rows * plan.padded);
  b.weights = take<void>(arena, rows * plan.padded, plan.operands);
  if (rests(p, plan)) b.weights_lo = take<void>(arena, rows * plan.padded, plan.operands);
  b.values = arena.take<float>(rows * (p.pass == Pass::backward ? p.dim : p.value_dim));
  if (p.pass == Pass::backward) lay_out_backward(arena, p, plan, b);
  return b;
}

int64_t bytes_of(const Problem& p, const ChunkPlan& plan) {
  Arena arena;
  lay_out(arena, p, plan);
  return arena.bytes();
}

ChunkPlan plan_chunks(const Problem& p) {
  ChunkPlan plan;
  const DType own = p.pass == Pass::select ? p.index_q_dtype : p.q_dtype;
  plan.operands = own == DType::f8_e4m3 ? DType::bf16 : own;
  plan.padded = std::max<int64_t>(round_up(p.slots, 8), 8);
  for (int64_t g = 0; g < p.groups; ++g) {
    const HeadRange range = heads_of(p, g);
    plan.heads = std::max(plan.heads, range.last - range.first);
  }
  plan.key_columns = std::clamp<int64_t>(p.keys_stored, 1, most_key_columns);
  plan.converts_dkv = p.wants_dkv && p.dkv_dtype != DType::f32;
  const int64_t limit = p.options.workspace_limit_bytes;
  plan.queries = 1;
  int64_t low = 1, high = std::clamp<int64_t>(p.queries, 1, most_queries);
  while (low < high) {
    plan.queries = (low + high + 1) / 2;
    if (bytes_of(p, plan) <= limit)
      low = plan.queries;
    else
      high = plan.queries - 1;
  }
  plan.queries = low;
  return plan;
}

}  // namespace talea::sparse_attention::cuda
