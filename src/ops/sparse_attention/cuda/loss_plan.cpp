// What: how many queries a chunk of lane cuda's index loss holds, and where its pieces lie.
// Why: the formula of the workspace is this layout run without memory; the limit decides the chunk.
// Never: reads a tensor, or lets the chunk change a result.
#include "ops/sparse_attention/cuda/loss_plan.hpp"

#include <algorithm>

#include "device/common/cublaslt.hpp"
#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int64_t most_queries = 1024;

template <typename T>
T* take(Arena& arena, int64_t count, DType dtype) {
  return reinterpret_cast<T*>(arena.take<char>(count * size_of(dtype)));
}

// Ranks that cut heads sum the teacher of a chunk: its length may not depend on a rank's share.
int64_t most_heads(const Problem& p) { return p.heads_world > 1 ? p.total_heads : p.heads; }

void lay_out_dk(Arena& arena, const Problem& p, const LossPlan& plan, LossBuffers& b) {
  const int64_t slots = plan.queries * plan.padded, all = p.batch * p.keys_stored;
  if (plan.converts_dk) b.dk = arena.take<float>(all * p.index_dim);
  if (plan.dense) return;
  b.contributions = arena.take<float>(slots * p.index_dim);
  if (p.options.dkv_sum == DkvSum::atomic) return;
  b.sort.keys = arena.take<uint64_t>(slots);
  b.sort.sorted_keys = arena.take<uint64_t>(slots);
  b.sort.slots = arena.take<uint32_t>(slots);
  b.sort.sorted_slots = arena.take<uint32_t>(slots);
  b.sort.scratch_bytes = sort_bytes(slots, all);
  b.sort.scratch = arena.take<char>(b.sort.scratch_bytes);
}

}  // namespace

LossBuffers lay_out(Arena& arena, const Problem& p, const LossPlan& plan) {
  LossBuffers b;
  const int64_t n = plan.queries, slots = n * plan.padded, lists = plan.dense ? plan.padded : slots;
  const int64_t heads = n * most_heads(p), index_heads = n * p.index_heads;
  b.counters = arena.take<Counters>(1);
  b.product = arena.take<char>(device::product_workspace_bytes);
  b.sums = arena.take<LossSums>(1);
  b.losses = arena.take<double>(n);
  b.rows = arena.take<int64_t>(slots);
  b.keys = take<void>(arena, lists * p.dim, plan.attention);
  b.index_keys = take<void>(arena, lists * p.index_dim, plan.index);
  b.q = take<void>(arena, heads * p.dim, plan.attention);
  b.index_q = take<void>(arena, index_heads * plan.copies * p.index_dim, plan.index);
  b.logits = arena.take<float>(heads * plan.padded);
  b.head_sums = arena.take<HeadSum>(heads);
  b.teacher = arena.take<float>(slots);
  b.z = arena.take<float>(index_heads * plan.padded);
  b.scores = arena.take<float>(slots);
  b.dz = take<void>(arena, index_heads * plan.copies * plan.padded, plan.index);
  if (p.wants_dindex_q) b.dq = arena.take<float>(index_heads * plan.copies * p.index_dim);
  if (p.wants_dindex_k) lay_out_dk(arena, p, plan, b);
  return b;
}

int64_t bytes_of(const Problem& p, const LossPlan& plan) {
  Arena arena;
  lay_out(arena, p, plan);
  return arena.bytes();
}

std::optional<std::string> decline_loss(const Problem& p) {
  if (p.index_q_dtype == DType::f64) return "fp64: lane reference computes it, on the host";
  if (p.index_dim % 8 != 0) return fmt::format("index_dim = {}: not a multiple of 8", p.index_dim);
  if (p.wants_dindex_k && p.dindex_k_dtype == DType::f64)
    return "dindex_k of fp64: this lane sums it in fp32";
  if (p.loss_keys == LossKeys::dense && p.options.dkv_sum == DkvSum::atomic)
    return "dindex_k_sum = atomic: sums of a dense loss run in the order of queries";
  return std::nullopt;
}

LossPlan plan_loss(const Problem& p) {
  LossPlan plan;
  plan.dense = p.loss_keys == LossKeys::dense;
  const int64_t slots = plan.dense ? p.keys_stored : p.slots;
  plan.padded = std::max<int64_t>((slots + 7) / 8 * 8, 8);
  plan.attention = p.q_dtype == DType::f8_e4m3 ? DType::bf16 : p.q_dtype;
  // fp16 has not the range of a gradient that is divided by the number of rows.
  const bool narrow = p.index_q_dtype == DType::bf16 || p.index_q_dtype == DType::f8_e4m3;
  plan.index = narrow ? DType::bf16 : DType::f32;
  plan.copies = narrow ? 2 : 1;
  plan.converts_dk = p.wants_dindex_k && p.dindex_k_dtype != DType::f32;
  int64_t low = 1, high = std::clamp<int64_t>(p.queries, 1, most_queries);
  while (low < high) {
    plan.queries = (low + high + 1) / 2;
    if (bytes_of(p, plan) <= p.options.workspace_limit_bytes)
      low = plan.queries;
    else
      high = plan.queries - 1;
  }
  plan.queries = low;
  return plan;
}

}  // namespace talea::sparse_attention::cuda
