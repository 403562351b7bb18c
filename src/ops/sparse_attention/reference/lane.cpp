// What: the table entry of lane reference: fp64 loops that take everything.
// Why: the oracle of every other lane; what it computes is the definition.
// Never: chosen where another lane accepts.
#include "ops/sparse_attention/reference/reference.hpp"
#include "ops/sparse_attention/sharded.hpp"

namespace talea::sparse_attention {
namespace {

struct Reference {
  static std::optional<std::string> decline(const Problem& p, const DeviceFacts&);
  static Planned plan(const Problem& p, const DeviceFacts&) {
    const bool attention = p.pass == Pass::forward || p.pass == Pass::backward;
    return {.workspace_bytes =
                attention ? reference::attention_bytes(p) : reference::index_bytes(p)};
  }
  static std::vector<std::string> details(const Problem&, const Planned&) {
    return {"numbers = fp64", "order = query, head, slot"};
  }
  static void run(const Call& c, const Planned& plan);
};

std::optional<std::string> Reference::decline(const Problem& p, const DeviceFacts&) {
  if (p.device != DeviceKind::cpu) return "device tensors: this lane reads host memory";
  if (p.options.dkv_sum == DkvSum::atomic)
    return "dkv_sum = atomic: host lanes sum in a fixed order only";
  return std::nullopt;
}

void Reference::run(const Call& c, const Planned&) {
  Result& r = c.result;
  r.scores_home = "a row of one head in host memory";
  r.scores_tile_rows = 1;
  r.scores_tile_keys = c.problem.slots;
  r.scores_tile_bytes = 8 * c.problem.slots;
  r.kv_path = "rows of one query widened to fp64";
  r.operands = "fp64";
  r.delta_source = c.problem.has_saved ? "saved o" : "o of the repeated forward, fp64";
  r.accumulator_o = r.accumulator_dq = r.accumulator_dkv = "fp64";
  r.dkv_order = "query, head, slot";
  switch (c.problem.pass) {
    case Pass::forward:
      return reference::forward(c);
    case Pass::backward:
      return reference::backward(c);
    case Pass::select:
      return reference::select(c);
    case Pass::index_loss:
      return reference::index_loss(c);
  }
}

}  // namespace

Lane reference_lane() {
  return lane_of_ranks<Reference>({.name = "reference", .kind = "reference"});
}

}  // namespace talea::sparse_attention
