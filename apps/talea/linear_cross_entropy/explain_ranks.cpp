// What: see explain_ranks.hpp.
// Why: see explain_ranks.hpp.
// Never: decides anything; lce::predict does.
#include "explain_ranks.hpp"

#include <CLI/CLI.hpp>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/fail.hpp"
#include "table.hpp"

namespace talea::cli {
namespace {

struct Line {
  int64_t ranks, nodes;
  lce::RankPrediction p;
};

lce::RankShape shape_of(const LinearCrossEntropyProblem& p, const PlanFlags& plan) {
  lce::RankShape s;
  s.tokens = p.tokens;
  s.hidden = p.hidden;
  s.vocab = p.vocab;
  s.element_bytes = size_of(p.weight_dtype);
  s.dw_bytes = size_of(p.dw_dtype);
  s.backward = p.backward();
  s.sequence_parallel = plan.sequence_parallel;
  s.dx_beside_dw = plan.dx_beside_dw;
  if (p.options.workspace_limit_bytes != workspace_auto)
    s.workspace_limit_bytes = p.options.workspace_limit_bytes;
  return s;
}

void print_json(const Context& context, const lce::RankRates& rates,
                const std::vector<Line>& lines) {
  nlohmann::ordered_json j;
  j["operator"] = "linear_cross_entropy";
  j["rates"] = {{"product_flops_per_s", rates.product_flops_per_s},
                {"link_bytes_per_s", rates.link_bytes_per_s},
                {"link_latency_s", rates.link_latency_s},
                {"node_bytes_per_s", rates.node_bytes_per_s},
                {"node_latency_s", rates.node_latency_s}};
  j["plan"] = nlohmann::ordered_json::array();
  for (const Line& l : lines)
    j["plan"].push_back({{"ranks", l.ranks},
                         {"nodes", l.nodes},
                         {"vocab_rows", l.p.vocab_rows},
                         {"memory_bytes", l.p.memory_bytes},
                         {"weight_bytes", l.p.weight_bytes},
                         {"dw_bytes", l.p.dw_bytes},
                         {"hidden_bytes", l.p.hidden_bytes},
                         {"dx_bytes", l.p.dx_bytes},
                         {"workspace_bytes", l.p.workspace_bytes},
                         {"chunks", l.p.chunks},
                         {"flops", l.p.flops},
                         {"states_bytes", l.p.states_bytes},
                         {"dx_wire_bytes", l.p.dx_wire_bytes},
                         {"hidden_wire_bytes", l.p.hidden_wire_bytes},
                         {"node_bytes", l.p.node_bytes},
                         {"products_s", l.p.products_s},
                         {"states_s", l.p.states_s},
                         {"dx_s", l.p.dx_s},
                         {"dx_exposed_s", l.p.dx_exposed_s},
                         {"hidden_s", l.p.hidden_s},
                         {"seconds", l.p.seconds},
                         {"efficiency", l.p.efficiency}});
  fmt::print("{}\n", j.dump(context.jsonl ? -1 : 2));
}

std::string bytes(double n) { return human_bytes(static_cast<int64_t>(n)); }

}  // namespace

PlanFlags::PlanFlags() {
  const lce::RankRates r;
  product_tflops = r.product_flops_per_s / 1e12;
  link_gb = r.link_bytes_per_s / 1e9;
  link_us = r.link_latency_s * 1e6;
  node_gb = r.node_bytes_per_s / 1e9;
  node_us = r.node_latency_s * 1e6;
}

void PlanFlags::add(CLI::App& sub) {
  const auto count = CLI::Range(int64_t{1}, int64_t{4096});
  auto* plan =
      sub.add_option("--ranks", ranks, "plan for this many ranks of the vocabulary")->check(count);
  sub.add_option("--nodes", nodes, "machines that hold the ranks")->check(count)->needs(plan);
  sub.add_flag("--sequence-parallel", sequence_parallel, "plan: tokens are spread as well")
      ->needs(plan);
  sub.add_flag("--dx-beside-dw", dx_beside_dw, "plan: dX is summed while dW is multiplied")
      ->needs(plan);
  const auto rate = [&](const char* name, double& value, const char* text) {
    sub.add_option(name, value, text)
        ->check(CLI::Range(1e-6, 1e9))
        ->capture_default_str()
        ->needs(plan);
  };
  rate("--product-tflops", product_tflops, "plan: of one rank, a whole call");
  rate("--link-gb", link_gb, "plan: GB/s of a ring within a node");
  rate("--link-us", link_us, "plan: microseconds of a collective within a node");
  rate("--node-gb", node_gb, "plan: GB/s of one rank between nodes");
  rate("--node-us", node_us, "plan: microseconds of a step between nodes");
}

void PlanFlags::refuse_unread_rates(const CLI::App& sub) const {
  if (ranks == 1)
    refuse_unread(sub,
                  {"--nodes", "--sequence-parallel", "--dx-beside-dw", "--product-tflops",
                   "--link-gb", "--link-us", "--node-gb", "--node-us"},
                  "needs --ranks above 1");
  else
    refuse_others(
        sub,
        {"--ranks", "--nodes", "--sequence-parallel", "--dx-beside-dw", "--product-tflops",
         "--link-gb", "--link-us", "--node-gb", "--node-us", "--tokens", "--hidden", "--vocab",
         "--dtype", "--outputs", "--reduction", "--workspace-limit"},
        "no part of a plan of --ranks");
  if (nodes == 1) refuse_unread(sub, {"--node-gb", "--node-us"}, "needs --nodes above 1");
}

void explain_ranks(const Context& context, const PlanFlags& plan,
                   const LinearCrossEntropyProblem& problem) {
  require(plan.ranks % plan.nodes == 0, ErrorKind::usage,
          "--nodes {}: {} ranks do not divide among them", plan.nodes, plan.ranks);
  require(!plan.sequence_parallel || problem.tokens % plan.ranks == 0, ErrorKind::usage,
          "--sequence-parallel: {} tokens do not divide among {} ranks", problem.tokens,
          plan.ranks);
  for (const auto& [flag, rate] :
       {std::pair("--product-tflops", plan.product_tflops), std::pair("--link-gb", plan.link_gb),
        std::pair("--link-us", plan.link_us), std::pair("--node-gb", plan.node_gb),
        std::pair("--node-us", plan.node_us)})
    require(std::isfinite(rate), ErrorKind::usage, "{} {}: not a finite number", flag, rate);
  const lce::RankRates rates{plan.product_tflops * 1e12, plan.link_gb * 1e9, plan.link_us * 1e-6,
                             plan.node_gb * 1e9, plan.node_us * 1e-6};
  const int64_t each = plan.ranks / plan.nodes;
  std::vector<Line> lines;
  for (int64_t r = 1;; r = std::min(r * 2, plan.ranks)) {
    lce::RankShape s = shape_of(problem, plan);
    s.ranks = r;
    s.nodes = r > each ? (r + each - 1) / each : 1;
    if (r % s.nodes == 0) lines.push_back({s.ranks, s.nodes, lce::predict(s, rates)});
    if (r == plan.ranks) break;
  }
  if (context.machine()) return print_json(context, rates, lines);
  fmt::print(
      "{} tokens, hidden {}, vocabulary {}: predicted from {:.0f} TFLOP/s, {:.0f} GB/s "
      "within a node, {:.0f} GB/s a rank between nodes\n\n",
      grouped(problem.tokens), grouped(problem.hidden), grouped(problem.vocab), plan.product_tflops,
      plan.link_gb, plan.node_gb);
  Table table({">ranks", ">nodes", ">memory a rank", ">flops", ">states sent", ">dX sent",
               ">between nodes", ">products", ">states", ">dX not hidden", ">time", ">efficiency"});
  for (const Line& l : lines)
    table.row({grouped(l.ranks), grouped(l.nodes), human_bytes(l.p.memory_bytes),
               human_count(l.p.flops), bytes(l.p.states_bytes), bytes(l.p.dx_wire_bytes),
               bytes(l.p.node_bytes), human_ms(l.p.products_s * 1e3), human_ms(l.p.states_s * 1e3),
               human_ms(l.p.dx_exposed_s * 1e3), human_ms(l.p.seconds * 1e3),
               fmt::format("{:.3f}", l.p.efficiency)});
  table.print();
}

}  // namespace talea::cli
