// What: which problems lane sm90 takes, and which it leaves to another lane unless it is named.
// Why: a lane that declines says why, by pure functions of (problem, device facts).
// Never: says how a problem would run: config.cpp does.
#include "core/fail.hpp"
#include "ops/linear_cross_entropy/outputs.hpp"
#include "ops/linear_cross_entropy/sm90/config.hpp"
#include "ops/linear_cross_entropy/sm90/cost.hpp"

namespace talea::lce::sm90 {
namespace {

std::optional<std::string> decline_layout(const Problem& p) {
  auto stride_of = [](const char* name, int64_t row, int64_t column) -> std::optional<std::string> {
    if (column != 1) return fmt::format("{}: column stride {}; 1 is needed", name, column);
    if (row % 8 != 0) return fmt::format("{}: row stride {}; a multiple of 8 is needed", name, row);
    return {};
  };
  if (p.hidden % 8 != 0 || p.hidden == 0)
    return fmt::format("hidden = {}: a positive multiple of 8 is needed (16-byte rows)", p.hidden);
  if (p.alignment_bytes < 16)
    return fmt::format("a matrix is aligned to {} bytes; 16 are needed", p.alignment_bytes);
  if (auto r = stride_of("hidden", p.hidden_row_stride, p.hidden_col_stride)) return r;
  if (p.hidden_row_stride < p.hidden)
    return fmt::format("hidden: row stride {} below {} columns", p.hidden_row_stride, p.hidden);
  if (auto r = stride_of("weight", p.weight_row_stride, p.weight_col_stride)) return r;
  if (p.weight_row_stride < p.hidden)
    return fmt::format("weight: row stride {} below {} columns", p.weight_row_stride, p.hidden);
  if (p.wants_dx)
    if (auto r = stride_of("dx", p.dx_row_stride, p.dx_col_stride)) return r;
  if (p.wants_dw)
    if (auto r = stride_of("dw", p.dw_row_stride, p.dw_col_stride)) return r;
  if (p.tokens == 0) return "tokens = 0: nothing to multiply";
  if (p.vocab_local > (int64_t{1} << 30) || p.tokens > (int64_t{1} << 30))
    return fmt::format("tokens = {}, vocab = {}: at most 2^30 each", p.tokens, p.vocab_local);
  return {};
}

}  // namespace

std::optional<std::string> decline(const Problem& p, const DeviceFacts& device) {
  if (p.device != DeviceKind::cuda) return "the tensors are in host memory";
  if (device.cuda_devices == 0)
    return device.cuda_problem.empty() ? "no CUDA device" : device.cuda_problem;
  if (device.sm != 90) return fmt::format("compute capability {}: 90 is needed", device.sm);
  if (!is_16bit(p.hidden_dtype) || p.weight_dtype != p.hidden_dtype)
    return fmt::format("hidden {} and weight {}: both bf16 or both fp16 are needed",
                       name_of(p.hidden_dtype), name_of(p.weight_dtype));
  if (p.wants_dx && p.dx_dtype != DType::f32 && p.dx_dtype != p.hidden_dtype)
    return fmt::format("dx {}: {} or fp32 is needed", name_of(p.dx_dtype), name_of(p.hidden_dtype));
  if (p.wants_dw && p.dw_dtype != DType::f32 && p.dw_dtype != p.weight_dtype)
    return fmt::format("dw {}: {} or fp32 is needed", name_of(p.dw_dtype), name_of(p.weight_dtype));
  if (sums_dx_in_bf16(p) && (p.sequence_parallel || p.hidden_dtype != DType::bf16))
    return fmt::format("dx_sum = bf16: replicated bf16 hidden is needed, not {}{}",
                       p.sequence_parallel ? "sequence parallel " : "", name_of(p.hidden_dtype));
  return decline_layout(p);
}

std::optional<std::string> yields(const Problem& p) {
  if (p.hidden_dtype != DType::f16) return {};
  if (p.backward())
    return "gradients in fp16: its fp32 logits leave room for shorter chunks than lane cuda's";
  const int64_t limit = p.options.workspace_limit_bytes;
  const int64_t least = kPairRows * round_up(p.vocab_local, 64) * int64_t{sizeof(float)};
  if (least <= limit) return {};
  return fmt::format("fp16: the fp32 logits of {} rows take {} bytes, the limit is {}", kPairRows,
                     least, limit);
}

}  // namespace talea::lce::sm90
