// What: the gates that are twin runs over streams.
// Why: what only shows over many steps is looked for over many steps.
// Never: looks at one stream only: each has once been the one that showed the bug.
#include <chrono>

#include "train/gates.hpp"
#include "train/presets.hpp"

namespace talea::train {
namespace {

Accumulation rule_of(const std::string& stream) {
  // Uneven windows are where the two rules differ.
  return stream == "varlen" ? Accumulation::total_tokens : Accumulation::mean_of_means;
}

GateResult over_streams(const char* name, const char* preset_name,
                        const std::vector<std::string>& streams, const GateContext& g) {
  GateResult result;
  result.name = name;
  const auto start = std::chrono::steady_clock::now();
  for (const std::string& stream : streams) {
    if (!g.stream.empty() && g.stream != stream) continue;
    // The mutants' arithmetic knows ids only.
    if (stream == "soft" && is_loss_mutant(g.mutant)) continue;
    result.streams.push_back(stream);
    RunOptions o;
    o.config = preset(preset_name);
    o.config.data.stream = stream;
    o.config.data.text_files = g.text_files;
    o.config.accumulation = rule_of(stream);
    o.config.loss_lane = g.loss_lane;
    o.config.seed = g.seed;
    o.config.threads = g.threads;
    o.twin.mutant = g.mutant;
    if (g.mutant == "nan-blind-gate") o.twin.plant_nan_at = 10;
    const RunResult run = run_training(
        o,
        g.on_step ? g.on_step : [](const StepRecord&, const StepChecks&, int64_t) { return true; });
    for (Check c : run.checks.checks()) {
      c.name = stream + ": " + c.name;
      result.checks.push_back(c);
    }
    if (result.first_stage.empty() && !run.facts.first_stage.empty())
      result.first_stage = stream + ": " + run.facts.first_stage;
    if ((result.stopped = run.stopped)) break;
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace

GateResult drift_smoke(const GateContext& g) {
  return over_streams("drift_smoke", "smoke", stream_names(), g);
}

GateResult realistic_long_horizon(const GateContext& g) {
  return over_streams("realistic_long_horizon", "long", stream_names(), g);
}

}  // namespace talea::train
