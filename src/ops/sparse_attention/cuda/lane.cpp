// What: the table entry of lane cuda: gathered chunks, batched library products, own row kernels.
// Why: every option on any NVIDIA GPU from sm_80.
// Never: declines in silence, or holds more than the workspace limit.
#include <limits>

#include "ops/sparse_attention/cuda/loss_run.hpp"
#include "ops/sparse_attention/cuda/run.hpp"
#include "ops/sparse_attention/sharded.hpp"

namespace talea::sparse_attention {
namespace {

std::optional<std::string> decline_shape(const Problem& p) {
  if (p.pass == Pass::select) {
    if (p.slots > 8192) return fmt::format("top_k = {}: this lane selects at most 8192", p.slots);
    if (p.index_dim % 8 != 0)
      return fmt::format("index_dim = {}: not a multiple of 8", p.index_dim);
    return std::nullopt;
  }
  if (p.dim % 16 != 0 || p.value_dim % 16 != 0)
    return fmt::format("dim = {}, value_dim = {}: not multiples of 16", p.dim, p.value_dim);
  return std::nullopt;
}

struct Cuda {
  static std::optional<std::string> decline(const Problem& p, const DeviceFacts& d);
  static Planned plan(const Problem& p, const DeviceFacts&);
  static std::vector<std::string> details(const Problem& p, const Planned& planned);
  static void run(const Call& c, const Planned& planned);
};

std::optional<std::string> Cuda::decline(const Problem& p, const DeviceFacts& d) {
  if (p.device != DeviceKind::cuda) return "host tensors: this lane reads device memory";
  if (d.cuda_devices == 0) return d.cuda_problem.empty() ? "no CUDA device" : d.cuda_problem;
  if (d.sm < 80) return fmt::format("sm_{}: needs sm_80 or later", d.sm);
  if (!d.cublaslt_problem.empty()) return d.cublaslt_problem;
  const DType own = p.pass == Pass::select ? p.index_q_dtype : p.q_dtype;
  if (own == DType::f64) return "fp64: lane reference computes it, on the host";
  if (p.pass != Pass::select && p.options.kv_storage != KvStorage::plain &&
      p.options.fp8_path == Fp8Path::in_kernel)
    return "fp8_path = in_kernel: this lane multiplies a dequantised copy of the selected rows";
  if (p.pass == Pass::index_loss)
    if (auto reason = cuda::decline_loss(p)) return reason;
  return decline_shape(p);
}

Planned Cuda::plan(const Problem& p, const DeviceFacts&) {
  const device::DeviceGuard guard(p.device_index);
  if (p.pass == Pass::index_loss) {
    const cuda::LossPlan loss = cuda::plan_loss(p);
    return planned(cuda::bytes_of(p, loss), 0, loss);
  }
  const cuda::ChunkPlan chunks = cuda::plan_chunks(p);
  return planned(cuda::bytes_of(p, chunks), 0, chunks);
}

std::vector<std::string> Cuda::details(const Problem& p, const Planned& planned) {
  if (p.pass == Pass::index_loss) {
    const auto& loss = planned.as<cuda::LossPlan>();
    return {fmt::format("chunk_queries = {}", loss.queries),
            fmt::format("operands = {}, of the indexer {}", name_of(loss.attention),
                        name_of(loss.index)),
            fmt::format("{} = {}", loss.dense ? "keys_padded" : "slots_padded", loss.padded)};
  }
  const auto& plan = planned.as<cuda::ChunkPlan>();
  std::vector<std::string> said = {fmt::format("chunk_queries = {}", plan.queries),
                                   fmt::format("operands = {}", name_of(plan.operands))};
  if (p.pass != Pass::select) said.push_back(fmt::format("slots_padded = {}", plan.padded));
  return said;
}

void tell(const Call& c, const cuda::ChunkPlan& plan) {
  const Problem& p = c.problem;
  Result& r = c.result;
  if (p.pass == Pass::select) {
    r.scores_home = "chunk of queries in the workspace, fp32";
    r.scores_tile_rows = plan.queries;
    r.scores_tile_keys = p.keys_stored;
    r.scores_tile_bytes = 4 * plan.queries * p.keys_stored;
    return;
  }
  r.scores_home = "chunk of queries in the workspace, fp32";
  r.scores_tile_rows = plan.queries * plan.heads;
  r.scores_tile_keys = plan.padded;
  r.scores_tile_bytes = 4 * plan.queries * plan.heads * plan.padded;
  r.gathered_kv_bytes = plan.queries * plan.padded * p.dim * size_of(plan.operands);
  r.kv_path = p.options.kv_storage == KvStorage::plain
                  ? "selected rows copied, a chunk of queries at a time"
                  : "selected rows dequantised in fp32 and rounded once, a chunk of queries at a "
                    "time";
  r.delta_source = !p.has_saved       ? "sum of P dP, fp32"
                   : p.has_o_residual ? "saved o and its residual"
                                      : "saved o";
  r.accumulator_o = r.accumulator_dq = r.accumulator_dkv = "fp32";
  if (p.wants_dkv && p.options.dkv_sum == DkvSum::atomic) {
    r.dkv_sum = "atomic";
    r.dkv_order = "order of arrival";
  } else {
    r.dkv_order = "query, slot";
  }
}

void tell_loss(const Call& c, const cuda::LossPlan& plan) {
  constexpr double on_device = std::numeric_limits<double>::quiet_NaN();
  const Problem& p = c.problem;
  Result& r = c.result;
  const bool given = p.denominator == LossDenominator::given;
  r.scores_home = "chunk of queries in the workspace, fp32";
  r.scores_tile_rows = plan.queries * std::max(p.heads, p.index_heads);
  r.scores_tile_keys = plan.padded;
  r.scores_tile_bytes = 4 * r.scores_tile_rows * plan.padded;
  r.kv_path = plan.dense ? "a copy of all keys of a batch entry"
                         : "selected rows copied, a chunk of queries at a time";
  r.gathered_kv_bytes =
      plan.dense ? 0 : plan.queries * plan.padded * p.dim * size_of(plan.attention);
  r.accumulator_dq = r.accumulator_dkv = "fp32";
  r.dkv_order = "query, slot";
  if (p.wants_dindex_k && p.options.dkv_sum == DkvSum::atomic) {
    r.dkv_sum = "atomic";
    r.dkv_order = "order of arrival";
  }
  r.loss = on_device;
  r.denominator = given ? p.denominator_value : on_device;
  r.denominator_kind = given ? "given" : "valid rows";
  r.denominator_scope = p.denominator_scope == LossScope::global ? "global" : "local";
}

void Cuda::run(const Call& c, const Planned& planned) {
  if (c.problem.pass == Pass::index_loss) {
    const auto& loss = planned.as<cuda::LossPlan>();
    const device::DeviceGuard guard(c.problem.device_index);
    device::refuse_earlier_error(device::cuda_stream(c.stream));
    tell_loss(c, loss);
    return cuda::LossRun(c, loss).run();
  }
  const auto& plan = planned.as<cuda::ChunkPlan>();
  const device::DeviceGuard guard(c.problem.device_index);
  device::refuse_earlier_error(device::cuda_stream(c.stream));
  cuda::Run call(c, plan);
  tell(c, plan);
  switch (c.problem.pass) {
    case Pass::forward:
      return call.forward();
    case Pass::backward:
      return call.backward();
    case Pass::select:
      return call.select();
    case Pass::index_loss:
      return;
  }
}

}  // namespace

Lane cuda_lane() {
  return lane_of_ranks<Cuda>(
      {.name = "cuda", .kind = "library composition", .runs_on = DeviceKind::cuda});
}

}  // namespace talea::sparse_attention
