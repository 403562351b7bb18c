// What: the table entry of lane cpu: what it declines, needs and says.
// Why: vectors of whatever CPU this is, threads over queries, rows gathered once for all heads.
// Never: computes by itself; the passes have files of their own.
#include <algorithm>

#include "ops/sparse_attention/cpu/attention.hpp"
#include "ops/sparse_attention/cpu/loss.hpp"
#include "ops/sparse_attention/cpu/select.hpp"
#include "ops/sparse_attention/sharded.hpp"

namespace talea::sparse_attention {
namespace {

int threads_of(const Problem& p, const DeviceFacts& device) {
  const int64_t rows = std::max<int64_t>(p.queries, 1);
  return static_cast<int>(
      std::min<int64_t>(p.options.threads > 0 ? p.options.threads : device.threads, rows));
}

struct Config {
  int threads = 1;
  cpu::Plan attention;  // of forward and backward
};

struct Cpu {
  static std::optional<std::string> decline(const Problem& p, const DeviceFacts&);
  static Planned plan(const Problem& p, const DeviceFacts& device);
  static std::vector<std::string> details(const Problem& p, const Planned& plan);
  static void run(const Call& c, const Planned& plan);
};

std::optional<std::string> Cpu::decline(const Problem& p, const DeviceFacts&) {
  if (p.device != DeviceKind::cpu) return "device tensors: this lane reads host memory";
  if (p.q_dtype == DType::f64 || p.index_q_dtype == DType::f64) return "fp64: lane reference only";
  if (mutant(Mutant::sa31_dimensions_hard_wired) && p.dim != 576 && p.pass != Pass::select)
    return "D: only 576";
  if (p.options.dkv_sum == DkvSum::atomic)
    return "dkv_sum = atomic: host lanes sum in a fixed order only";
  return std::nullopt;
}

Planned Cpu::plan(const Problem& p, const DeviceFacts& device) {
  const Config own = {threads_of(p, device), {}};
  if (p.pass == Pass::select) return planned(cpu::select_bytes(p, own.threads), 0, own);
  if (p.pass == Pass::index_loss) return planned(cpu::loss_bytes(p, own.threads), 0, own);
  const cpu::Plan attention = cpu::make_plan(p, device);
  return planned(attention.bytes, 0, Config{attention.threads, attention});
}

std::vector<std::string> Cpu::details(const Problem& p, const Planned& planned) {
  const auto& own = planned.as<Config>();
  std::vector<std::string> said = {fmt::format("isa = {}", talea::cpu::isa_name()),
                                   fmt::format("threads = {}", own.threads)};
  const cpu::Plan& plan = own.attention;
  if (p.pass == Pass::index_loss) {
    said.emplace_back("tile_keys = 64");
  } else if (p.pass == Pass::select) {
    said.emplace_back("scores = one row a thread, never all");
  } else {
    said.push_back(fmt::format("tile_keys = {}", plan.tile));
    said.push_back(
        fmt::format("rows of kv = {}", plan.in_place ? "read in place" : "widened per tile"));
    said.push_back(fmt::format("chunk_queries = {}", plan.chunk));
  }
  return said;
}

void Cpu::run(const Call& c, const Planned& planned) {
  const auto& own = planned.as<Config>();
  const Problem& p = c.problem;
  Result& r = c.result;
  if (p.pass == Pass::select) {
    r.scores_home = "one row of a query in each thread's workspace";
    r.scores_tile_rows = 1;
    r.scores_tile_keys = p.keys;
    r.scores_tile_bytes = 4 * p.keys;
    return cpu::select(c, own.threads);
  }
  if (p.pass == Pass::index_loss) {
    r.scores_home = "a tile of keys x heads in the second cache";
    r.scores_tile_keys = 64;
    r.scores_tile_rows = std::max(p.heads, p.index_heads);
    r.scores_tile_bytes = 4 * r.scores_tile_keys * r.scores_tile_rows;
    r.kv_path = "rows gathered for a tile, once for all heads";
    return cpu::index_loss(c, own.threads);
  }
  const cpu::Plan& plan = own.attention;
  r.scores_home = "a tile of keys x heads in the second cache";
  r.scores_tile_rows = plan.heads;
  r.scores_tile_keys = plan.tile;
  r.scores_tile_bytes = plan.tile * plan.padded * 4;
  r.kv_path = plan.in_place ? "rows read where they lie, once for all heads"
                            : "rows of a tile widened to fp32, once for all heads";
  r.gathered_kv_bytes = plan.in_place ? 0 : plan.threads * plan.tile * p.dim * 4;
  r.operands = p.options.operands == Operands::split
                   ? "split: P and dS enter the products in fp32"
                   : "native: P and dS enter the products in fp32";
  r.accumulator_o = r.accumulator_dq = r.accumulator_dkv = "fp32";
  r.delta_source = plan.repeats_forward ? "o of the repeated forward, fp32"
                   : p.has_o_residual   ? "saved o and o_residual"
                                        : "saved o";
  r.dkv_order = "heads of a slot, then (query, slot) of each key";
  cpu::Attention attention(c, plan);
  p.pass == Pass::forward ? attention.forward() : attention.backward();
}

}  // namespace

Lane cpu_lane() { return lane_of_ranks<Cpu>({.name = "cpu", .kind = "native kernel"}); }

}  // namespace talea::sparse_attention
