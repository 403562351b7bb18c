// What: how lane cuda cuts a problem: rows of a chunk, buffers, columns of a product. Pure.
// Why: explain, the workspace formula and the run read the same value, tested without a GPU.
// Never: touches a device.
#include "ops/linear_cross_entropy/cuda/plan.hpp"

#include <algorithm>

#include "ops/linear_cross_entropy/cuda/products.hpp"
#include "ops/linear_cross_entropy/forced.hpp"
#include "ops/linear_cross_entropy/memory_speed.hpp"
#include "ops/linear_cross_entropy/outputs.hpp"

namespace talea::lce::cuda {
namespace {

constexpr int64_t small_weight = int64_t{1} << 22;  // elements

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int64_t bytes_with(const Problem& p, const Plan& plan, int64_t rows) {
  Arena arena;
  Buffers layout(arena, p, plan, rows);
  return arena.bytes();
}

// Of the limit, what the workspace may take.
int64_t room(const Problem& p) { return p.options.workspace_limit_bytes - kept_beside(p); }

int64_t fitting_rows(const Problem& p, const Plan& plan) {
  const int64_t g = plan.granule_rows, most = std::max(g, round_up(p.tokens, g));
  const int64_t base = bytes_with(p, plan, 0), probe = 112 * g;
  const int64_t each = std::max<int64_t>(1, (bytes_with(p, plan, probe) - base) / probe);
  const int64_t guess = (room(p) - base) / each / g * g;
  int64_t rows = std::clamp(guess + 2 * g, g, most);
  while (rows > g && bytes_with(p, plan, rows) > room(p)) rows -= g;
  return balanced_rows(p, plan, rows);
}

// Ranks exchange row states chunk by chunk, so all must cut alike: by an even share of the
// vocabulary in plain layout and for one chip, whatever the own shard and chip are.
DeviceFacts common_chip() {
  DeviceFacts chip;
  chip.sm = 90;
  chip.sm_count = 132;
  return chip;
}
Problem even_share(Problem p) {
  p.vocab_local = p.vocab_stored = (p.vocab + p.world - 1) / p.world;
  p.weight_row_stride = p.dw_row_stride = p.hidden;
  p.weight_col_stride = p.dw_col_stride = 1;
  p.wants_loss = true;  // perhaps of one rank only
  p.wants_accuracy = p.wants_argmax = p.wants_accuracy || p.wants_argmax;
  return p;
}

// All of the plan but the rows of a chunk.
Plan layout_of(const Problem& p, const DeviceFacts& device) {
  Plan r;
  r.compute = p.weight_dtype;
  r.choose_tiles = device.sm >= 90;
  r.memory = memory_speed(p, device);
  if (r.choose_tiles && is_16bit(r.compute)) r.multiprocessors = device.sm_count;
  r.with_gradient = p.backward();
  r.granule_rows = is_16bit(r.compute) ? 128 : 32;
  // Without a gradient no row's logits are needed at once: a panel of them is a part of the row.
  r.panel_columns = r.with_gradient ? p.vocab_local : std::min(p.vocab_local, part_columns);
  r.logits_stride = round_up(std::max<int64_t>(r.panel_columns, 1), 64);
  r.x_stride = round_up(std::max<int64_t>(p.hidden, 1), 16);
  r.dx_stride = round_up(std::max<int64_t>(p.hidden, 1), 4);
  r.parts = std::max<int64_t>(1, (p.vocab_local + part_columns - 1) / part_columns);
  r.kept = candidates_kept(p);
  if (is_16bit(r.compute) && p.vocab_local % 8 != 0) r.tail = p.vocab_local % tail_width;
  r.copies_weight = (p.hidden > 1 && p.weight_col_stride != 1) ||
                    (p.vocab_stored > 1 && p.weight_row_stride < p.hidden);
  // A sum of V equal terms drifts by V roundings; panels bound the drift. 16-bit problems round
  // their terms far more coarsely and keep the one product.
  r.dx_panel = is_16bit(r.compute) ? round_up(p.vocab_local, tail_width)
                                   : round_up(std::max<int64_t>(32, p.vocab_local / 128), 32);
  r.gather_tokens = p.sequence_parallel && p.world > 1;
  r.scaled_rows = r.compute == DType::f16;
  // Not by the number of tokens or ranks: a row's dX must not depend on them.
  r.two_terms =
      is_16bit(r.compute) && forced.two_terms.value_or(p.vocab * p.hidden <= small_weight);
  const bool dense = (p.hidden <= 1 || p.dw_col_stride == 1) &&
                     (p.vocab_stored <= 1 || p.dw_row_stride >= p.hidden);
  r.dw_in_place = p.wants_dw && p.dw_dtype == DType::f32 && dense;
  // dW in the dtype of the weight from chunk to chunk, where the caller has asked for that. Not of
  // soft targets, whose share of a row has no element of its own to keep back.
  if (p.wants_dw && dense && !p.accumulate_dw && r.compute == DType::bf16 && !r.two_terms &&
      p.soft_targets == SoftTargets::none)
    r.dw_direct = r.targets_apart = p.dw_dtype == r.compute && p.options.dw_sum == r.compute;
  // Two terms meet in fp32: a 16-bit dW between them would be rounded twice.
  if (p.world == 1 && p.wants_dw && dense && !p.accumulate_dw && p.dw_dtype == r.compute &&
      is_16bit(r.compute) && !r.two_terms) {
    Plan direct = r;  // worth it only where the whole batch fits one chunk
    direct.dw_direct = true, direct.targets_apart = false;
    const int64_t all = std::max(r.granule_rows, round_up(p.tokens, r.granule_rows));
    if (bytes_with(p, direct, all) <= room(p) || all == r.granule_rows)
      r.dw_direct = true, r.targets_apart = false;
  }
  return r;
}

}  // namespace

Plan plan(const Problem& p, const DeviceFacts& device) {
  Plan r = layout_of(p, device);
  const Problem even = even_share(p);
  r.chunk_rows =
      p.world > 1 ? fitting_rows(even, layout_of(even, common_chip())) : fitting_rows(p, r);
  r.chunks = (p.tokens + r.chunk_rows - 1) / r.chunk_rows;
  r.over_limit = bytes_with(p, r, r.chunk_rows) > room(p);
  return r;
}

// Three products, the passes over the logits between them, and what short chunks pay: the sum of dW
// is read and written by each, in part beside its product.
double predicted_ms(const Problem& p, const Plan& plan) {
  if (!plan.with_gradient || !p.wants_dw || !is_16bit(plan.compute) || p.world > 1) return 0;
  constexpr double flops = 670e9, launches = 0.1, row_bytes = 14;
  const double bytes = 4.0e9 * plan.memory;
  const double dv = static_cast<double>(p.hidden) * static_cast<double>(p.vocab_local);
  const double rows = static_cast<double>(round_up(std::min(plan.chunk_rows, p.tokens), 128)),
               chunks = static_cast<double>(plan.chunks);
  const double product = 2 * rows * dv / flops;
  const double sum = plan.dw_direct ? (plan.chunks > 1 ? 4 : 2) : 8;
  const double added = sum * dv / bytes;
  const double dw = std::max(product, added) + 0.6 * std::min(product, added);
  const double others = (p.wants_dx ? 2 : 1) * std::max(product, 2 * dv / bytes);
  const double passes = row_bytes * rows * static_cast<double>(p.vocab_local) / bytes;
  const double rounding = plan.dw_in_place || plan.dw_direct ? 0 : 6 * dv / bytes;
  return chunks * (dw + others + passes + launches) + rounding;
}

std::vector<Panel> panels(const Problem& p, const Plan& plan) {
  std::vector<Panel> all;
  for (int64_t begin = 0; begin < std::max<int64_t>(p.vocab_local, 1);
       begin += std::max<int64_t>(plan.panel_columns, 1)) {
    const int64_t columns = std::min(plan.panel_columns, p.vocab_local - begin);
    all.push_back(
        {begin, columns, std::max<int64_t>(1, (columns + part_columns - 1) / part_columns)});
  }
  return all;
}

std::vector<Piece> pieces(const Plan& plan, int64_t rows, int64_t buffer) {
  if (!is_16bit(plan.compute) || !plan.with_gradient) return {{0, rows, 0}};  // in place
  const int64_t g = plan.granule_rows, granules = (rows + g - 1) / g;
  const int64_t last = (2 * granules + 7) / 14, middle = (4 * granules + 7) / 14;
  std::vector<Piece> all;
  int64_t begin = 0;
  for (const int64_t n : {granules - middle - last, middle, last}) {
    if (n == 0) continue;
    all.push_back({begin, n * g, buffer - 2 * n * g});
    begin += n * g;
  }
  return all;
}

int64_t buffer_rows(const Plan& plan, int64_t rows) {
  if (!is_16bit(plan.compute)) return rows;
  if (!plan.with_gradient) return 2 * rows;
  const int64_t slack = plan.granule_rows / 4;  // dz of the first rows lies before any logits
  int64_t most = 0;
  for (const Piece& piece : pieces(plan, rows, 0))
    most = std::max(most, piece.begin + 2 * piece.rows);
  return rows == 0 ? 0 : most + slack;
}

Buffers::Buffers(Arena& a, const Problem& p, const Plan& plan, int64_t rows) {
  const int64_t n = p.tokens, d = p.hidden, v = p.vocab_local;
  const bool exchanged = p.world > 1, sparse = p.soft_targets == SoftTargets::sparse;
  facts = a.take<BatchFacts>(1);
  terms = a.take<LossTerms<double>>(1);
  scalars = a.take<float>(3);
  partials = a.take<TargetPartial>((n + examined_rows - 1) / examined_rows);
  kind = a.take<RowKind>(n);
  order = a.take<int64_t>(n);
  row_loss = a.take<double>(p.wants_loss ? n : 0);
  hit = a.take<int8_t>(p.wants_accuracy ? n : 0);
  const int64_t padded = round_up(v, tail_width);  // kernels read whole vectors of columns
  bias = a.take<float>(p.has_bias ? padded : 0);
  class_weight = a.take<float>(p.has_class_weight ? padded : 0);
  db = a.take<double>(p.wants_db ? v : 0);
  dw = a.take<float>(p.wants_dw && !plan.dw_in_place && !plan.dw_direct ? v * d : 0);
  const int64_t tail_rows = plan.tail > 0 ? tail_width : 0;
  tail_weight = a.take<char>(tail_rows * plan.x_stride * size_of(plan.compute));
  tail_dw = a.take<float>(p.wants_dw ? tail_rows * d : 0);
  const int64_t apart = plan.targets_apart ? n : 0;
  shares.share = a.take<float>(apart);
  shares.column = a.take<int32_t>(apart);
  shares.next = a.take<int32_t>(apart);
  shares.head = a.take<int8_t>(apart);
  weight = a.take<char>(plan.copies_weight ? v * plan.x_stride * size_of(plan.compute) : 0);
  x_all = a.take<char>(plan.gather_tokens ? n * d * size_of(plan.compute) : 0);
  dx_all = a.take<float>(plan.gather_tokens && p.wants_dx ? (n + n / p.world) * d : 0);
  products = a.take<char>(device::product_workspace_bytes);
  dz = a.take<char>(buffer_rows(plan, rows) * plan.logits_stride * size_of(plan.compute));
  x = a.take<char>(rows * plan.x_stride * size_of(plan.compute));
  dx = a.take<float>(p.wants_dx ? rows * plan.dx_stride : 0);
  const int64_t parts = plan.parts + (sparse ? 1 : 0);
  const int64_t most = rows == 0 ? 0 : pieces(plan, rows, 0).front().rows;  // of a piece
  partial_states = a.take<RowState<double>>(most * parts);
  own_states = a.take<RowState<double>>(exchanged ? most : 0);
  all_states = a.take<RowState<double>>(exchanged ? most * p.world : 0);
  partial_best = a.take<Candidate<float>>(most * plan.parts * plan.kept);
  own_best = a.take<Candidate<float>>(exchanged ? most * plan.kept : 0);
  all_best = a.take<Candidate<float>>(exchanged ? most * plan.kept * p.world : 0);
  rest = a.take<char>(plan.two_terms && p.backward() ? rows * plan.logits_stride * 2 : 0);
  sparse_logits = a.take<float>(sparse ? most * p.soft_k : 0);
  factors = a.take<RowFactors>(rows);
}

int64_t bytes_of(const Problem& p, const Plan& plan) {
  return bytes_with(p, plan, plan.chunk_rows);
}

}  // namespace talea::lce::cuda
