// What: what lane cuda says of a problem: why not, how it would run, and how it ran.
// Why: a decision that nobody can read is a silent one.
// Never: decides; plan.cpp and products.cpp do.
#include <algorithm>
#include <cmath>

#include "ops/linear_cross_entropy/cuda/products.hpp"

namespace talea::lce::cuda {
namespace {

std::string tiles_of_dx(const Plan& plan, int64_t hidden) {
  using Tiles = device::Product::Tiles;
  std::string all;
  for (const DxPart& part : dx_cut(plan.chunk_rows, hidden, plan.multiprocessors).parts)
    all += fmt::format("{}{} rows by {}", all.empty() ? "" : ", ", part.rows,
                       part.tiles == Tiles::large    ? "256 x 128"
                       : part.tiles == Tiles::square ? "128 x 128"
                       : part.tiles == Tiles::narrow ? "128 x 160"
                                                     : "the library's choice");
  return all;
}

std::string over_limit(const Problem& p, const Plan& plan) {
  return fmt::format("workspace_limit: the smallest plan needs {} bytes{}", bytes_of(p, plan),
                     plan.dw_in_place || !p.wants_dw
                         ? ""
                         : "; an fp32 dw or main gradient needs no sum in the workspace");
}

}  // namespace

std::optional<std::string> decline(const Problem& p, const DeviceFacts& device) {
  if (p.device != DeviceKind::cuda) return "the tensors are in host memory";
  if (device.cuda_devices == 0)
    return "no CUDA device: " + (device.cuda_problem.empty() ? "none" : device.cuda_problem);
  if (!device.cuda_problem.empty()) return device.cuda_problem;
  if (device.sm < 80)
    return fmt::format("compute capability {}.{}: 8.0 or later is needed", device.sm / 10,
                       device.sm % 10);
  if (!device.cublaslt_problem.empty()) return device.cublaslt_problem;
  if (p.hidden_dtype == DType::f64) return "fp64 tensors: only the reference lane, on the host";
  if (sums_dx_in_bf16(p)) return "dx_sum = bf16: this lane sums the ranks' shares in fp32";
  if (p.vocab_local > INT32_MAX) return fmt::format("vocab = {}: above 2^31", p.vocab_local);
  return std::nullopt;
}

constexpr const char* kRoundedByEachChunk = "bf16, rounded by each chunk (dw_sum)";

std::vector<std::string> details(const Problem& p, const Planned& planned) {
  const auto& r = planned.as<Plan>();
  std::vector<std::string> all = {
      fmt::format("products = cuBLASLt {}, {} operands, fp32 accumulation, inner dimension whole",
                  device::cublaslt_version(), name_of(r.compute)),
      fmt::format("chunk_rows = {}", r.chunk_rows), fmt::format("chunks = {}", r.chunks),
      fmt::format("chunk_buffer_bytes = {}",
                  buffer_rows(r, r.chunk_rows) * r.logits_stride * size_of(r.compute)),
      fmt::format("dw = {}", !p.wants_dw     ? "not wanted"
                             : r.dw_in_place ? "added by the products into the caller's fp32"
                             : r.dw_direct
                                 ? r.chunks > 1 ? kRoundedByEachChunk : "one product, rounded once"
                                 : "summed in fp32 in the workspace, stored once")};
  if (p.wants_dx) all.push_back("dx = " + tiles_of_dx(r, p.hidden));
  if (r.tail > 0)
    all.push_back(fmt::format("tail = the last {} columns, padded to {} in products of their own",
                              r.tail, tail_width));
  if (!r.with_gradient) all.push_back(fmt::format("panel_columns = {}", r.panel_columns));
  if (r.over_limit) all.push_back(over_limit(p, r));
  return all;
}

void report(const Call& call, const Plan& plan, const Buffers& b, int64_t chunks, bool counted) {
  const Problem& p = call.problem;
  Result& r = call.result;
  r.logits_home = "fp32 rows of a piece of a chunk in the workspace, overwritten by later rows";
  r.logits_tile_rows = pieces(plan, plan.chunk_rows, 0).front().rows;
  r.logits_tile_columns = plan.panel_columns;
  r.logits_tile_bytes = r.logits_tile_rows * plan.logits_stride * 4;
  r.full_logits_tensor = false;
  r.chunk_rows = plan.chunk_rows;
  r.chunks = chunks;
  r.accumulator_softmax = "fp32 within a part of a row, fp64 between parts";
  r.accumulator_dx = r.accumulator_dw = "fp32";
  if (plan.dw_direct && chunks > 1) r.accumulator_dw = kRoundedByEachChunk;
  r.accumulator_loss = "fp64, fixed order";
  r.upstream_handling = "applied to each row where its gradient is formed";
  r.merges = "parts of a row (on the device)";
  if (p.world > 1)
    r.merges += fmt::format(", ranks (all_gather of row states, {})", call.vocab.engine());
  r.denominator = NAN;
  if (plan.over_limit) r.notes.push_back(over_limit(p, plan));
  if (p.backward() && is_16bit(plan.compute))
    r.notes.push_back(plan.two_terms ? "gradient factors in two 16-bit terms"
                                     : "gradient factors rounded once");
  if (plan.copies_weight)
    r.notes.push_back(fmt::format(
        "weight: strides {}, {} suit no product; a dense copy was made in the workspace",
        p.weight_row_stride, p.weight_col_stride));
  if (counted) return;
  const auto offset =
      reinterpret_cast<const char*>(b.facts) - static_cast<const char*>(call.workspace.data);
  r.notes.push_back(fmt::format(
      "token counts stay on the device: int64 valid, ignored, out_of_range, in_partition at "
      "workspace byte {}, readable once the stream has run",
      offset));
  r.notes.push_back(
      "ignored rows are set aside, but the products of the chunks they leave empty still run: "
      "their number is not known to the host (target_check = checked skips them)");
}

}  // namespace talea::lce::cuda
