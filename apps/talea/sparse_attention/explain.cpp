// What: `talea explain --operator sparse_attention`: which lane a pass would take, and what it
// costs. Why: a choice that cannot be asked about is a choice in silence. Never: touches data; the
// tensors have addresses nobody reads.
#include <nlohmann/json.hpp>

#include "../table.hpp"
#include "core/fail.hpp"
#include "io/host_tensor.hpp"
#include "sizes.hpp"

namespace talea::cli {
namespace {

struct Flags {
  SparseSizes sizes;
  std::string device = "cpu", lane = "auto";
};

// Tensors at made-up addresses that do not overlap.
Place made_up(DeviceKind device) {
  return
      [device, next = uintptr_t{4096}](DType dtype, std::initializer_list<int64_t> shape) mutable {
        const Tensor t = make_tensor(reinterpret_cast<void*>(next), dtype, shape, device);
        double bytes = static_cast<double>(size_of(dtype));
        for (const int64_t extent : shape) bytes *= static_cast<double>(extent);
        require(bytes < 0x1p58, ErrorKind::usage, "shape {}: more bytes than 64 bits can count",
                io::shape_text(t));
        next += (static_cast<uintptr_t>(bytes) / 4096 + 2) * 4096;
        return t;
      };
}

LaneChoice choice_of(const Flags& f, const std::string& lane) {
  const auto device = f.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  return sa::explain(tensors_of(f.sizes, lane, made_up(device)).problem());
}

std::string reason_of(const LaneChoice& c) {
  return c.declined.empty() ? "" : c.declined[0].reason;
}

void print_json(const Context& context, const Flags& f, const LaneChoice& chosen,
                const std::vector<std::pair<std::string, LaneChoice>>& each) {
  nlohmann::ordered_json j;
  j["operator"] = "sparse_attention";
  j["pass"] = f.sizes.pass;
  j["lane"] = chosen.lane.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(chosen.lane);
  j["lanes"] = nlohmann::ordered_json::array();
  for (const auto& [name, c] : each) {
    nlohmann::ordered_json lane;
    lane["name"] = name;
    lane["accepts"] = !c.lane.empty();
    if (c.lane.empty()) {
      lane["reason"] = reason_of(c);
    } else {
      lane["kind"] = c.lane_kind;
      lane["workspace_bytes"] = c.workspace_bytes;
      lane["flops"] = c.flops;
      lane["details"] = c.details;
    }
    j["lanes"].push_back(lane);
  }
  fmt::print("{}\n", j.dump(context.jsonl ? -1 : 2));
}

void run(Context& context, const Flags& f) {
  const LaneChoice chosen = choice_of(f, f.lane);
  std::vector<std::pair<std::string, LaneChoice>> each;
  for (const std::string& name : sa::lanes())
    if (f.lane == "auto" || f.lane == name) each.emplace_back(name, choice_of(f, name));
  context.exit_code = chosen.lane.empty() ? static_cast<int>(ErrorKind::unavailable) : 0;
  if (context.machine()) return print_json(context, f, chosen, each);
  const SparseSizes& z = f.sizes;
  const double dense = 4.0 * static_cast<double>(z.tokens) * static_cast<double>(z.keys) *
                       static_cast<double>(z.heads);
  fmt::print(
      "{} of {} queries over {} of {} keys, {} heads, {}/{}, {} on {}: {} flops; dense fp32 "
      "scores would take {}\n\n",
      z.pass, grouped(z.tokens), grouped(z.top_k), grouped(z.keys), z.heads, z.dim, z.value_dim,
      z.dtype, f.device, chosen.lane.empty() ? "-" : human_count(chosen.flops),
      human_bytes(static_cast<int64_t>(dense)));
  Table table({"lane", "takes it", ">workspace", "why, or how"});
  for (const auto& [name, c] : each) {
    std::string how;
    for (const std::string& d : c.details) how += (how.empty() ? "" : "; ") + d;
    if (c.lane.empty())
      table.row({name, "no", "", reason_of(c)});
    else
      table.row({name, name == chosen.lane ? "chosen" : "yes", human_bytes(c.workspace_bytes),
                 c.lane_kind + (how.empty() ? "" : ": " + how)});
  }
  table.print();
  fmt::print("\n");
  verdict(!chosen.lane.empty(), chosen.lane.empty()
                                    ? "no lane takes this problem"
                                    : fmt::format("lane {} would run", chosen.lane));
}

}  // namespace

void register_explain_sparse_attention(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub =
      add_subcommand(app, context,
                     {"explain", "which lane a pass would take, why, and what it would cost",
                      "talea explain --operator sparse_attention --tokens 4096 --keys 8192 --heads "
                      "128 --top-k 2048",
                      ""});
  f->sizes.add(*sub);
  sub->add_option("--dtype", f->sizes.dtype, "fp32, bf16, fp16 or fp64")->capture_default_str();
  sub->add_option("--device", f->device, "where the tensors lie")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  sub->add_option("--lane", f->lane, "auto, or a lane by name")->capture_default_str();
  sub->callback([f, &context] { run(context, *f); });
}

}  // namespace talea::cli
