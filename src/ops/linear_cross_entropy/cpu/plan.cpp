// What: the choice of chunk size and the workspace layout of lane cpu.
// Why: the chunk follows from the caller's limit, not the other way round.
// Never: touches data.
#include "ops/linear_cross_entropy/cpu/plan.hpp"

#include <algorithm>

#include "core/mutant.hpp"
#include "device/cpu/pair_product.hpp"

namespace talea::lce::cpu {

using talea::cpu::max_lanes;

Scratch::Scratch(float* slice, const Problem& p, const Plan& plan) : floats(0) {
  auto take = [&](int64_t n) {
    float* begin = slice ? slice + floats : nullptr;  // counting: there is no slice
    floats += round_up(n, max_lanes);
    return begin;
  };
  const int64_t tile = std::min(tile_columns, std::max<int64_t>(plan.columns_stored, max_lanes));
  const int64_t depth = std::min(std::max(depth_block, pair_depth_block / 2), plan.hidden_padded);
  const int64_t weights = weight_in_place(p, plan.native_bf16) ? 0 : tile * depth;
  const int64_t dx_weights =  // pairs are half as long
      std::max(dx_depth, dx_pair_depth / 2) * std::min(dx_columns, plan.hidden_padded);
  const int64_t dw_tile =
      plan.dw_in_workspace || dw_in_place(p) ? 0 : tile * std::min(dw_columns, plan.hidden_padded);
  pack = take(std::max({weights, p.wants_dx ? dx_weights : 0, p.wants_dw ? dw_tile : 0}));
  row = take(std::max(plan.hidden_padded, tile));
  bias = take(tile);
  class_weight = take(tile);
  soft = take(p.soft_targets == SoftTargets::dense ? tile * max_lanes : 0);
  capped = take(p.options.softcap > 0 ? tile * max_lanes : 0);
  db_lanes = take(p.wants_db ? tile * max_lanes : 0);
}

Buffers::Buffers(Arena& a, const Problem& p, const Plan& plan) {
  const int64_t n = p.tokens, r = plan.chunk_rows, k = candidates_kept(p);
  const bool sequence = p.sequence_parallel && p.world > 1;
  const int64_t own_rows = sequence ? n / p.world : 0;
  active = a.take<int64_t>(n);
  z = a.take<float>(std::max(r * plan.window_columns, max_lanes));  // products of no columns, too
  const int64_t by_rows = r * (p.hidden + p.hidden % 2), by_columns = r * plan.hidden_padded;
  xt = a.take<float>(plan.native_bf16 ? 0 : r * p.hidden);
  xs = a.take<float>(p.wants_dw && !plan.native_bf16 ? by_columns : 0);
  xt_pairs = a.take<uint16_t>(plan.native_bf16 ? by_rows : 0);
  xs_pairs = a.take<uint16_t>(p.wants_dw && plan.native_bf16 ? by_columns : 0);
  rest = a.take<uint32_t>(
      plan.native_bf16 && p.backward() ? plan.window_tiles * r * talea::cpu::Remainders::most : 0);
  dx = a.take<float>(p.wants_dx ? r * plan.hidden_padded : 0);
  dw = a.take<float>(plan.dw_in_workspace ? plan.columns * p.hidden : 0);
  db = a.take<float>(p.wants_db ? plan.columns : 0);
  RowFactors& rf = factors;
  for (float** f : {&rf.max, &rf.prob, &rf.prob_low, &rf.target, &rf.smooth, &rf.smooth_low,
                    &rf.soft, &rf.entropy_weight, &rf.entropy_offset, &rf.scale, &rf.large})
    *f = a.take<float>(r);
  factors.all = a.take<RowResult<double>>(r);
  factors.sum = a.take<double>(r);
  factors.local_target = a.take<int64_t>(r);
  const bool dense = p.soft_targets == SoftTargets::dense;
  const int64_t cells = plan.window_tiles * r;
  partials.max = a.take<float>(cells);
  partials.others = a.take<float>(cells);
  partials.shifted = a.take<float>(cells);
  partials.class_sum = a.take<float>(p.options.label_smoothing > 0 ? cells : 0);
  partials.soft_sum = a.take<float>(dense ? cells : 0);
  partials.soft_mass = a.take<float>(dense ? cells : 0);
  states = a.take<RowState<double>>(r);
  all_states = a.take<RowState<double>>(p.world > 1 ? r * p.world : 0);
  loss = a.take<double>(r);
  best_found = a.take<Best>(r * k);
  best = a.take<Candidate<double>>(r * k);
  all_best = a.take<Candidate<double>>(p.world > 1 ? r * k * p.world : 0);
  soft_order = a.take<int32_t>(r * p.soft_k);
  soft_offsets = a.take<int64_t>(p.soft_k > 0 ? plan.tiles + 1 : 0);
  soft_logits = a.take<float>(r * p.soft_k);
  gathered = a.take<char>(own_rows * p.world * p.hidden * size_of(p.hidden_dtype));
  dx_all = a.take<float>(p.wants_dx ? own_rows * p.world * p.hidden : 0);
  dx_own = a.take<float>(p.wants_dx ? own_rows * p.hidden : 0);
  scratch_floats = Scratch(nullptr, p, plan).floats;
  scratch = a.take<float>(scratch_floats * plan.threads);
}

namespace {

bool sums_dw_over_chunks(const Problem& p, int64_t rows) {
  return p.wants_dw && is_16bit(p.dw_dtype) &&
         (p.world > 1 || rows < round_up(p.tokens, max_lanes));
}

int64_t bytes_with(const Problem& p, Plan plan, int64_t rows) {
  plan.chunk_rows = rows;
  plan.dw_in_workspace = sums_dw_over_chunks(p, rows);
  Arena arena;
  Buffers layout(arena, p, plan);
  return arena.bytes();
}

// Rows of a chunk so that everything but the scratch fits `room`. Threads play no part in it: the
// chunks of dW's sum must not depend on them.
int64_t rows_within(const Problem& p, Plan plan, int64_t room) {
  plan.threads = 0;
  const int64_t all = std::max(max_lanes, round_up(p.tokens, max_lanes));
  if (p.world == 1 && is_16bit(p.dw_dtype) && p.wants_dw && bytes_with(p, plan, all) <= room)
    return all;  // one chunk: dW is rounded straight from its sums
  const int64_t most = std::min(all, most_chunk_rows);
  int64_t low = 1, high = most / max_lanes;  // the most units that fit
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (bytes_with(p, plan, middle * max_lanes) <= room)
      low = middle;
    else
      high = middle - 1;
  }
  return low * max_lanes;
}

// One chunk of all rows, logits a window at a time: as many tiles as fit, or none.
int64_t window_within(const Problem& p, Plan& plan, int64_t room) {
  const int64_t rows = std::max(max_lanes, round_up(p.tokens, max_lanes));
  const int64_t tile_bytes = rows * tile_columns * static_cast<int64_t>(sizeof(float));
  plan.recompute = true;
  plan.window_tiles = std::max<int64_t>(4 * plan.threads, gradient_bytes / tile_bytes);
  plan.window_tiles = std::min(plan.window_tiles, plan.tiles);
  plan.threads = 0;
  for (; plan.window_tiles > 0; --plan.window_tiles) {
    plan.window_columns = std::min(plan.window_tiles * tile_columns, plan.columns_stored);
    if (bytes_with(p, plan, rows) <= room) break;
  }
  return plan.window_tiles > 0 ? rows : 0;
}

// Logits multiplied twice may stand in for a running sum of dW in fp32.
bool may_recompute(const Problem& p, const Plan& plan) {
  return sums_dw_over_chunks(p, plan.chunk_rows) && p.world == 1 && p.soft_k == 0;
}

Plan sized(const Problem& p, Plan plan) {
  plan.dw_in_workspace = sums_dw_over_chunks(p, plan.chunk_rows);
  plan.bytes = bytes_with(p, plan, plan.chunk_rows);
  return plan;
}

// The least memory in which the problem can be solved, however slow: one thread, and the fewest
// rows with all their logits or all rows with the fewest logits.
Plan smallest(const Problem& p, Plan plan) {
  plan.threads = 1;
  plan.chunk_rows = max_lanes;
  Plan window = plan;
  plan = sized(p, plan);
  if (!may_recompute(p, plan)) return plan;
  window.recompute = true;
  window.window_tiles = std::min<int64_t>(1, plan.tiles);
  window.window_columns = std::min(tile_columns, plan.columns_stored);
  window.chunk_rows = std::max(max_lanes, round_up(p.tokens, max_lanes));
  window = sized(p, window);
  return window.bytes < plan.bytes ? window : plan;
}

}  // namespace

Plan make_plan(const Problem& p, const DeviceFacts& device) {
  Plan plan;
  plan.columns = mutant(Mutant::b7_padding_in_softmax) ? p.vocab_stored : p.vocab_local;
  plan.columns_stored = round_up(plan.columns, max_lanes);
  plan.tiles = blocks(plan.columns, tile_columns);
  plan.hidden_padded = std::max(max_lanes, round_up(p.hidden, max_lanes));
  // Equal rows of the weight cancel in dX, down to roundings of the factors, which are equal too.
  plan.native_bf16 = p.hidden_dtype == DType::bf16 && p.weight_dtype == DType::bf16 &&
                     p.weight_row_stride != 0 && plan.columns >= native_columns &&
                     talea::cpu::native_bf16();
  const int64_t limit = std::max<int64_t>(0, p.options.workspace_limit_bytes - kept_beside(p));
  // A small part of the limit is the threads' scratch: a tight limit is met with fewer threads.
  const int64_t slice = Scratch(nullptr, p, plan).floats * static_cast<int64_t>(sizeof(float));
  const int64_t reserve = std::max(slice, limit / 48) + Arena::alignment;
  // Left to us, small calls do not wake more threads than they have work for.
  const double flops = 2.0 * static_cast<double>(p.tokens) * static_cast<double>(p.hidden) *
                       static_cast<double>(plan.columns);
  const int64_t wanted =
      p.options.threads > 0
          ? p.options.threads
          : static_cast<int64_t>(std::min<double>(device.threads, 1 + flops / flops_per_thread));
  plan.threads = static_cast<int>(std::clamp<int64_t>(wanted, 1, reserve / slice));
  plan.window_tiles = plan.tiles;
  plan.window_columns = plan.columns_stored;
  plan.chunk_rows = rows_within(p, plan, limit - reserve);
  const Plan whole_rows = plan;
  if (plan.chunk_rows < fewest_chunk_rows && may_recompute(p, plan)) {
    Plan other = plan;
    if (const int64_t rows = window_within(p, other, limit - reserve); rows > 0) {
      other.threads = plan.threads;
      other.chunk_rows = rows;
      plan = other;
    }
  }
  plan = sized(p, plan);
  while (plan.bytes > limit && plan.threads > 1) {  // a part of a slice may be missing
    --plan.threads;
    plan = sized(p, plan);
  }
  if (plan.bytes > limit) plan = smallest(p, whole_rows);
  return plan;
}

}  // namespace talea::lce::cpu
