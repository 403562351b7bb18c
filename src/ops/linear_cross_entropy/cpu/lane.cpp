// What: lane cpu: chunks of rows sized by the workspace limit, products by register tiles, row
// passes
//       while a tile is hot.
// Why: the product lane on a host: exact, bounded, and bitwise the same for any number of threads.
// Never: holds logits of more than one chunk, or allocates.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/half.hpp"
#include "core/mutant.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/linear_cross_entropy/cpu/run.hpp"

namespace talea::lce::cpu {

using talea::cpu::store_row;

Run::Run(const Call& call, const Plan& plan)
    : c_(call),
      p_(call.problem),
      plan_(plan),
      arena_(call.workspace),
      b_(arena_, call.problem, plan_),
      lanes_(talea::cpu::lanes()),
      k_(candidates_kept(call.problem)) {}

void Run::all() {
  facts_ = examine(p_, c_.in);
  m_ = normaliser(p_, facts_, c_.batch);
  record(facts_, m_, c_.result);
  terms_ = {p_.options.label_smoothing, p_.options.z_loss, static_cast<double>(p_.vocab),
            facts_.class_weight_sum, m_.inverse};
  if (mutant(Mutant::b9_smoothing_local)) terms_.vocab = static_cast<double>(p_.vocab_stored);
  begin();
  for (int64_t first = 0; first < active_; first += chunk_rows_) {
    chunk_ = {first, std::min(chunk_rows_, active_ - first), 0, first == 0};
    chunk_.padded = round_up(chunk_.rows, talea::cpu::max_lanes);
    chunk();
    ++chunks_;
  }
  finish_outputs();
  write_scalars(p_, c_.out, facts_, m_, loss_sum_, hits_);
  record_facts();
  if (mutant(Mutant::workspace_overrun))
    static_cast<char*>(c_.workspace.data)[c_.workspace.bytes] = 0x5a;
}

void Run::begin() {
  const Tensor& dw = c_.out.dw;
  dw_direct_ = p_.wants_dw && (plan_.dw_in_workspace || dw_in_place(p_));
  dw_ = plan_.dw_in_workspace ? b_.dw : static_cast<float*>(dw.data);
  dw_stride_ = plan_.dw_in_workspace ? p_.hidden : dw.stride[0];
  gather_hidden();
  for (int64_t t = 0; t < p_.tokens; ++t) {
    const RowKind kind = row_kind(p_, c_.in, t);
    if (kind == RowKind::valid || (mutant(Mutant::ignored_row_leaks) && kind == RowKind::ignored))
      b_.active[active_++] = t;
    else
      blank(t, kind);
  }
  // Equal chunks of full panels. Ranks have the same rows but other shards: the smallest counts.
  int64_t most = plan_.chunk_rows;
  if (p_.world > 1) {
    // `all_states` is free until the first exchange.
    auto* proposals = reinterpret_cast<int64_t*>(b_.all_states);
    c_.vocab.all_gather(&most, proposals, sizeof(int64_t), nullptr);
    most = *std::min_element(proposals, proposals + p_.world);
  }
  const int64_t chunks = std::max<int64_t>(1, blocks(active_, most));
  chunk_rows_ = std::min(most, round_up(blocks(active_, chunks), talea::cpu::max_lanes));
}

void Run::blank(int64_t t, RowKind kind) {
  const RowReport row = blank_row(kind);
  write_row(p_, c_.out, t, row);
  loss_sum_ += row.loss;
  if (!p_.wants_dx) return;
  float value = kind == RowKind::poisoned ? NAN : 0.0f;
  if (mutant(Mutant::b16_all_ignored) && m_.empty) value = static_cast<float>(0 * (1 / 0.0));
  if (p_.sequence_parallel && p_.world > 1) {
    std::fill_n(b_.dx_all + t * p_.hidden, p_.hidden, p_.rank == 0 ? value : 0.0f);
    return;
  }
  const Tensor& out = c_.out.dx;
  for (int64_t i = 0; i < p_.hidden; ++i)
    store_element(out.data, out.dtype, t * out.stride[0] + i * out.stride[1], value);
}

void Run::gather_hidden() {
  const Tensor& x = c_.in.hidden;
  x_ = {x.data, x.dtype, x.stride[0], x.stride[1]};
  if (!p_.sequence_parallel || p_.world == 1) return;
  const int64_t rows = x.shape[0], d = p_.hidden, size = size_of(x.dtype);
  char* own = b_.gathered + p_.rank * rows * d * size;
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t i = 0; i < d; ++i)
      std::memcpy(own + (t * d + i) * size,
                  static_cast<const char*>(x.data) + (t * x.stride[0] + i * x.stride[1]) * size,
                  static_cast<size_t>(size));
  c_.vocab.all_gather(own, b_.gathered, rows * d * size, nullptr);
  x_ = {b_.gathered, x.dtype, d, 1};
}

void Run::chunk() {
  row_terms();
  pack_hidden();
  for (window_ = 0; window_ == 0 || window_ < plan_.tiles;
       window_ += std::max<int64_t>(1, plan_.window_tiles)) {
    logits();
    reduce_rows();
  }
  window_ = 0;
  if (p_.world > 1) exchange();
  finish_rows();
  if (p_.backward()) backward();
}

// dX of all ranks' tokens, summed; this rank keeps its own.
void Run::finish_dx() {
  const Tensor& out = c_.out.dx;
  const int64_t d = p_.hidden, rows = out.shape[0];
  c_.vocab.reduce_scatter_sum(b_.dx_all, b_.dx_own, rows * d, DType::f32, nullptr);
  for (int64_t t = 0; t < rows; ++t)
    store_row(b_.dx_own + t * d, d, out.data, out.dtype, t * out.stride[0], out.stride[1]);
}

void Run::finish_outputs() {
  const Outputs& out = c_.out;
  const int64_t d = p_.hidden;
  if (p_.wants_dx && p_.sequence_parallel && p_.world > 1) finish_dx();
  if (p_.wants_dw) {
    const bool add = out.accumulate_dw && !mutant(Mutant::main_grad_overwritten);
#pragma omp parallel for num_threads(plan_.threads)
    for (int64_t v = 0; v < p_.vocab_stored; ++v) {
      const bool padding = v >= plan_.columns;
      const int64_t first = v * out.dw.stride[0];
      if (!padding && active_ > 0 && plan_.dw_in_workspace)
        store_row(b_.dw + v * d, d, out.dw.data, out.dw.dtype, first, out.dw.stride[1]);
      else if ((padding || active_ == 0) && !add)
        for (int64_t i = 0; i < d; ++i)
          store_element(out.dw.data, out.dw.dtype, first + i * out.dw.stride[1], 0.0);
    }
  }
  for (int64_t v = 0; p_.wants_db && v < p_.vocab_stored; ++v) {
    const double value = v < plan_.columns && active_ > 0 ? b_.db[v] : 0.0;
    if (!out.accumulate_db)
      put(out.db, v, value);
    else if (v < plan_.columns)
      put(out.db, v, at(out.db, v) + value);
  }
}

namespace {

std::string product_path(const Problem& p, const Plan& plan) {
  if (plan.native_bf16)
    return "native bf16 (AVX512-BF16), summed in fp32; gradient factors rounded to bf16, large "
           "ones in "
           "two terms";
  const bool widened = is_16bit(p.hidden_dtype) || is_16bit(p.weight_dtype);
  return widened ? "16-bit tensors widened to fp32" : "fp32";
}

}  // namespace

void Run::record_facts() {
  Result& r = c_.result;
  r.logits_home =
      plan_.recompute
          ? "fp32, a window of the vocabulary in the workspace, multiplied again for the gradient"
          : "fp32 rows of a chunk in the workspace, tile by tile through the cache";
  r.logits_tile_rows = std::min(tile_rows, chunk_rows_);
  r.logits_tile_columns = std::min(tile_columns, plan_.columns);
  r.logits_tile_bytes = r.logits_tile_rows * r.logits_tile_columns * 4;
  r.full_logits_tensor =
      chunks_ == 1 && chunk_rows_ >= p_.tokens && p_.world == 1 && !plan_.recompute;
  r.chunk_rows = chunk_rows_;
  r.chunks = chunks_;
  r.accumulator_softmax = "fp32 within a tile of 256 columns, fp64 across tiles, chunks and ranks";
  r.accumulator_dx = "fp32, rounded once";
  r.accumulator_dw = "fp32, rounded once";
  r.accumulator_loss = "fp64 in row order";
  r.upstream_handling = "applied to each row in the chunk that forms its gradient";
  r.merges = "tile (registers), tiles of a row (fp64)";
  if (p_.world > 1)
    r.merges += std::string(", ranks (all_gather of row states, ") + c_.vocab.engine() + ")";
  const double one = 2.0 * static_cast<double>(active_) * static_cast<double>(p_.hidden) *
                     static_cast<double>(plan_.columns);
  r.flops = one * (1 + (plan_.recompute ? 1 : 0) + (p_.wants_dx ? 1 : 0) + (p_.wants_dw ? 1 : 0));
  r.notes.push_back(std::string("row passes: ") + talea::cpu::isa_name() +
                    "; products: " + product_path(p_, plan_));
}

}  // namespace talea::lce::cpu

namespace talea::lce {
namespace {

std::optional<std::string> decline(const Problem& p, const DeviceFacts&) {
  if (p.device != DeviceKind::cpu)
    return "reads host memory only; the tensors are on a CUDA device";
  if (p.hidden_dtype == DType::f64) return "fp64 hidden: this lane multiplies in fp32";
  if (sums_dx_in_bf16(p)) return "dx_sum = bf16: this lane sums the ranks' shares in fp32";
  return std::nullopt;
}

Planned plan(const Problem& p, const DeviceFacts& device) {
  const cpu::Plan plan = cpu::make_plan(p, device);
  return planned(plan.bytes, product_flops(p), plan);
}

std::vector<std::string> details(const Problem& p, const Planned& planned) {
  const auto& plan = planned.as<cpu::Plan>();
  return {std::string("isa = ") + talea::cpu::isa_name(),
          "threads = " + std::to_string(plan.threads),
          "tile_columns = " + std::to_string(cpu::tile_columns),
          "chunk_rows = " + std::to_string(plan.chunk_rows),
          "window_columns = " + std::to_string(plan.window_columns),
          "products = " + cpu::product_path(p, plan),
          std::string("dw = ") + (plan.dw_in_workspace ? "fp32 sums in the workspace, rounded once"
                                                       : "straight into the output")};
}

}  // namespace

Lane cpu_lane() {
  return {
      .name = "cpu",
      .kind = "native kernel",
      .decline = decline,
      .plan = plan,
      .details = details,
      .run = [](const Call& c, const Planned& plan) { cpu::Run(c, plan.as<cpu::Plan>()).all(); }};
}

}  // namespace talea::lce
