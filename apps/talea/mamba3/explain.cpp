// What: `talea explain --operator mamba3`: which lane a scan would take, and why the others
// decline. Why: a choice that cannot be asked about is a choice in silence. Never: touches data;
// the tensors have addresses nobody reads.
#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "data.hpp"
#include "options.hpp"
#include "register.hpp"
#include "table.hpp"

namespace talea::cli {
namespace {

using namespace scan;

struct Flags {
  scan::OptionFlags options;
  SizeFlags size;
  std::string dtype = "fp32", pass = "forward", device = "cpu";
};

void print_json(const Context& context, const std::string& chosen, const std::string& pass,
                const std::vector<std::pair<std::string, LaneChoice>>& each) {
  nlohmann::ordered_json j;
  j["operator"] = "mamba3";
  j["pass"] = pass;
  j["lane"] = chosen.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(chosen);
  j["lanes"] = nlohmann::ordered_json::array();
  for (const auto& [name, c] : each) {
    nlohmann::ordered_json lane;
    lane["name"] = name;
    lane["accepts"] = !c.lane.empty();
    if (c.lane.empty()) {
      lane["reason"] = c.declined.empty() ? "" : c.declined[0].reason;
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

void print_people(const Flags& f, const LaneChoice& chosen,
                  const std::vector<std::pair<std::string, LaneChoice>>& each) {
  const SizeFlags& s = f.size;
  const double form = static_cast<double>(s.batch * s.heads) * static_cast<double>(s.tokens) *
                      static_cast<double>(s.tokens) * 4;
  fmt::print(
      "{} of {} sequences, {} tokens, {} heads, {} groups, N {}, P {}, rank {}, {} on {}: {} "
      "useful flops; the quadratic form would take {}\n\n",
      f.pass, grouped(s.batch), grouped(s.tokens), grouped(s.heads), grouped(s.groups), s.state_dim,
      s.head_dim, s.rank, f.dtype, f.device, chosen.lane.empty() ? "-" : human_count(chosen.flops),
      human_bytes(static_cast<int64_t>(std::min(form, 0x1p62))));
  Table table({"lane", "takes it", ">workspace", "why, or how"});
  for (const auto& [name, c] : each) {
    std::string how;
    for (const std::string& d : c.details) how += (how.empty() ? "" : "; ") + d;
    if (c.lane.empty())
      table.row({name, "no", "", c.declined.empty() ? "" : c.declined[0].reason});
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

void run(Context& context, const Flags& f) {
  const mamba3::Options options = f.options.options();
  const Drawn drawn = draw_empty(f.size, parse_dtype(f.dtype),
                                 f.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu);
  const mamba3::Problem problem = problem_of(drawn, parse_pass(f.pass), options);
  const LaneChoice chosen = explain(problem);
  std::vector<std::pair<std::string, LaneChoice>> each;
  for (const std::string& name : mamba3::lanes()) {
    if (options.lane != "auto" && options.lane != name) continue;
    mamba3::Problem named = problem;
    named.options.lane = name;
    each.emplace_back(name, explain(named));
  }
  context.exit_code = chosen.lane.empty() ? static_cast<int>(ErrorKind::unavailable) : 0;
  if (context.machine()) return print_json(context, chosen.lane, f.pass, each);
  print_people(f, chosen, each);
}

}  // namespace

void register_scan_explain(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(
      app, context,
      {"explain", "which lane a scan would take, why, and what it would cost",
       "talea explain --operator mamba3 --tokens 4096 --heads 64 --rank 4 --dtype bf16", ""});
  f->size.add(*sub);
  sub->add_option("--dtype", f->dtype, "fp32, bf16, fp16 or fp64")->capture_default_str();
  sub->add_option("--pass", f->pass, "forward, backward or step")
      ->check(CLI::IsMember({"forward", "backward", "step"}))
      ->capture_default_str();
  sub->add_option("--device", f->device, "where the tensors lie")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  f->options.add(*sub, true);
  sub->callback([f, &context] { run(context, *f); });
}

}  // namespace talea::cli
