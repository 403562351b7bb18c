// What: the JSON forms.
// Why: one list of fields serves writing and reading a step.
// Never: drops a number that is not finite.
#include "train/record.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "core/receipt.hpp"
#include "core/strict_json.hpp"
#include "train/curves.hpp"

namespace talea::train {
namespace {

using nlohmann::json;

// visit(name, value) for every number of a step; R is StepRecord or const StepRecord.
template <typename R, typename F>
void each_number(R& r, F visit) {
  visit("loss", r.candidate.loss);
  visit("lr", r.candidate.lr);
  visit("grad_norm", r.candidate.grad_norm);
  visit("clip", r.candidate.clip);
  visit("reference_loss", r.reference.loss);
  visit("reference_grad_norm", r.reference.grad_norm);
  visit("reference_clip", r.reference.clip);
  visit("twin_loss", r.twin_loss);
  for (const auto& [name, field] : same_fields) visit(std::string("same_") + name, r.same.*field);
  for (const auto& [name, field] : same_fields) visit(std::string("plain_") + name, r.plain.*field);
  for (const auto& [name, field] : drift_fields) {
    visit(std::string("drift_") + name, r.drift.*field);
    visit(std::string("band_") + name, r.band.*field);
  }
  visit("apart", r.apart);
  visit("apart_band", r.apart_band);
  visit("params_moved", r.params_moved);
  visit("seconds", r.seconds);
}

template <typename R, typename F>
void each_count(R& r, F visit) {
  visit("step", r.candidate.step);
  visit("tokens", r.candidate.tokens);
  visit("valid", r.candidate.valid);
}

Beside beside_of(const std::string& file, const json& j) {
  for (const char* name : {"lane", "loss", "drift_loss", "drift_params"})
    require(j.is_object() && j.contains(name), ErrorKind::invalid_data,
            "{}: field beside/{} is missing", file, name);
  require(j["lane"].is_string(), ErrorKind::invalid_data, "{}: field beside/lane is not a string",
          file);
  return {j["lane"], number_of(j["loss"]), number_of(j["drift_loss"]),
          number_of(j["drift_params"])};
}

}  // namespace

const char* name_of(OptimizerKind kind) { return kind == OptimizerKind::adamw ? "adamw" : "sgd"; }
const char* name_of(Schedule s) {
  return s == Schedule::constant ? "constant" : s == Schedule::linear ? "linear" : "cosine";
}
const char* name_of(Accumulation a) {
  return a == Accumulation::mean_of_means ? "mean-of-means" : "total-tokens";
}

std::string to_line(const StepRecord& r) {
  json j;
  each_count(r, [&](const char* name, int64_t value) { j[name] = value; });
  each_number(r, [&](const std::string& name, double value) { j[name] = number(value); });
  j["same_worst_tensor"] = r.same.worst_tensor;
  j["lane"] = r.lane;
  j["beside"] = json::array();
  for (const Beside& b : r.beside)
    j["beside"].push_back({{"lane", b.lane},
                           {"loss", number(b.loss)},
                           {"drift_loss", number(b.drift_loss)},
                           {"drift_params", number(b.drift_params)}});
  return j.dump();
}

StepRecord from_line(const std::string& file, std::string_view line) {
  const json j = parse_strict_json(file, line, 3);
  StepRecord r;
  auto field = [&](const std::string& name) -> const json& {
    require(j.is_object() && j.contains(name), ErrorKind::invalid_data, "{}: field {} is missing",
            file, name);
    return j.at(name);
  };
  each_count(r, [&](const char* name, int64_t& value) {
    require(field(name).is_number_integer(), ErrorKind::invalid_data,
            "{}: field {} is not an integer", file, name);
    value = field(name).get<int64_t>();
  });
  each_number(r, [&](const std::string& name, double& value) { value = number_of(field(name)); });
  for (auto [name, text] : {std::pair<const char*, std::string*>{"lane", &r.lane},
                            {"same_worst_tensor", &r.same.worst_tensor}}) {
    require(field(name).is_string(), ErrorKind::invalid_data, "{}: field {} is not a string", file,
            name);
    *text = field(name).get<std::string>();
  }
  require(field("beside").is_array(), ErrorKind::invalid_data, "{}: field beside is not a list",
          file);
  for (const json& b : field("beside")) r.beside.push_back(beside_of(file, b));
  r.reference.step = r.candidate.step;
  r.reference.lr = r.candidate.lr;
  r.reference.tokens = r.candidate.tokens;
  r.reference.valid = r.candidate.valid;
  return r;
}

json to_json(const TrainConfig& c) {
  const ModelConfig& m = c.model;
  const OptimizerConfig& o = c.optimizer;
  const DataConfig& d = c.data;
  return {{"model",
           {{"form", m.form},
            {"mixer", m.mixer},
            {"vocab", m.vocab},
            {"hidden", m.hidden},
            {"ffn", m.ffn},
            {"heads", m.heads},
            {"layers", m.layers},
            {"tied", m.tied},
            {"rope_base", m.rope_base},
            {"norm_eps", m.norm_eps}}},
          {"optimizer",
           {{"kind", name_of(o.kind)},
            {"lr", o.lr},
            {"beta1", o.beta1},
            {"beta2", o.beta2},
            {"eps", o.eps},
            {"weight_decay", o.weight_decay},
            {"momentum", o.momentum},
            {"clip_norm", o.clip_norm},
            {"schedule", name_of(o.schedule)},
            {"warmup_steps", o.warmup_steps},
            {"schedule_steps", o.schedule_steps},
            {"min_lr", o.min_lr}}},
          {"data",
           {{"stream", d.stream},
            {"text_files", d.text_files},
            {"seq_len", d.seq_len},
            {"batch", d.batch},
            {"epochs", d.epochs},
            {"total_tokens", d.total_tokens}}},
          {"accumulation", name_of(c.accumulation)},
          {"grad_accum", c.grad_accum},
          {"max_steps", c.max_steps},
          {"seed", c.seed},
          {"label_smoothing", c.label_smoothing},
          {"z_loss", c.z_loss},
          {"loss_lane", c.loss_lane},
          {"reference_lane", c.reference_lane},
          {"threads", c.threads},
          {"ranks", c.world ? c.world->size() : c.ranks},
          {"sequence_parallel", c.sequence_parallel}};
}

json to_json(const Check& c) {
  return {{"name", c.name},
          {"passed", c.passed},
          {"value", number(c.worst)},
          {"limit", number(c.tolerance)},
          {"text", fmt::format("worst at step {} of {} comparisons", c.worst_step, c.seen)},
          {"worst_step", c.worst_step},
          {"first_step_past", c.first_past},
          {"void", c.is_void},
          {"comparisons", c.seen}};
}

json gates_of(const StepChecks& checks) {
  json list = json::array();
  for (const Check& c : checks.checks()) list.push_back(to_json(c));
  return list;
}

json train_section(const RunFacts& f, const std::vector<StepRecord>& steps,
                   const StepChecks& checks) {
  std::string name;
  const int64_t first = checks.first_past(&name);
  double seconds = 0;
  int64_t tokens = 0;
  std::vector<double> each_ms;
  for (const StepRecord& r : steps) {
    seconds += r.seconds;
    tokens += r.candidate.tokens;
    each_ms.push_back(r.seconds * 1e3);
  }
  json j = {{"config", to_json(f.config)},
            {"twins", f.options.twins},
            {"beside", f.options.beside},
            {"same_state", f.options.same_state},
            {"mutant", f.options.mutant},
            {"corpus", {{"bytes", f.corpus_bytes}, {"hash", f.corpus_hash}}},
            {"parameters", f.parameters},
            {"updates", steps.size()},
            {"planned_updates", f.total_steps},
            {"tokens", tokens},
            {"loss_lane_that_ran", f.lane},
            {"first_step_past_a_tolerance", first},
            {"first_quantity_past_its_tolerance", name},
            {"first_stage_that_differs", f.first_stage},
            {"first_step_whose_band_is_void", checks.first_void()},
            {"resumed_from_step", f.resumed_from},
            {"candidate_seconds", seconds}};
  if (!each_ms.empty()) j["seconds_per_update"] = talea::to_json(time_stats(each_ms));
  if (!steps.empty()) {
    j["first_loss"] = number(steps.front().candidate.loss);
    j["final_loss"] = number(steps.back().candidate.loss);
    j["final_reference_loss"] = number(steps.back().reference.loss);
  }
  const int64_t stride = curve_stride(static_cast<int64_t>(steps.size()), f.curve_points);
  j["curve_stride"] = stride;
  j["curves"] = curves_of(steps, f.options, stride);
  j["charts"] = charts_of(f.options);
  return j;
}

}  // namespace talea::train
