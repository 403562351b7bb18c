// What: the JSON forms.
// Why: one list of fields serves writing and reading a step.
// Never: drops a number that is not finite.
#include "train/record.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "core/receipt.hpp"
#include "core/strict_json.hpp"

namespace talea::train {
namespace {

using nlohmann::json;

json number(double x) {
  if (std::isnan(x)) return "NaN";
  if (std::isinf(x)) return x > 0 ? "Infinity" : "-Infinity";
  return x;
}

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
  visit("same_loss", r.same.loss);
  visit("same_lse", r.same.lse);
  visit("same_logp", r.same.logp);
  visit("same_grads", r.same.grads);
  visit("same_norm", r.same.norm);
  visit("same_clip", r.same.clip);
  visit("same_params", r.same.params);
  visit("same_m", r.same.m);
  visit("same_v", r.same.v);
  visit("drift_loss", r.drift.loss);
  visit("drift_grads", r.drift.grads);
  visit("drift_params_before", r.drift.params_before);
  visit("drift_params", r.drift.params);
  visit("drift_m", r.drift.m);
  visit("drift_v", r.drift.v);
  visit("band_loss", r.band.loss);
  visit("band_grads", r.band.grads);
  visit("band_params_before", r.band.params_before);
  visit("band_params", r.band.params);
  visit("band_m", r.band.m);
  visit("band_v", r.band.v);
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

template <typename F>
json curve(const char* name, const char* label, const std::vector<StepRecord>& steps, F value) {
  json x = json::array(), y = json::array();
  for (const StepRecord& r : steps) {
    x.push_back(r.candidate.step);
    y.push_back(number(value(r)));
  }
  return {{"name", name}, {"y_label", label}, {"steps", x}, {"values", y}};
}

json curves_of(const std::vector<StepRecord>& steps, const TwinOptions& o) {
  using R = const StepRecord&;
  json c = json::array();
  c.push_back(curve("loss", "nats", steps, [](R r) { return r.candidate.loss; }));
  c.push_back(curve("reference loss", "nats", steps, [](R r) { return r.reference.loss; }));
  c.push_back(curve("loss difference", "nats", steps, [](R r) { return r.drift.loss; }));
  if (o.twins > 0)
    c.push_back(curve("loss noise band", "nats", steps, [](R r) { return r.band.loss; }));
  c.push_back(curve("parameter drift", "relative L2", steps, [](R r) { return r.drift.params; }));
  if (o.twins > 0) {
    c.push_back(
        curve("parameter noise band", "relative L2", steps, [](R r) { return r.band.params; }));
    c.push_back(
        curve("parameters from fp32 base", "relative L2", steps, [](R r) { return r.apart; }));
    c.push_back(
        curve("twins from fp32 base", "relative L2", steps, [](R r) { return r.apart_band; }));
  }
  c.push_back(curve("gradient norm", "L2", steps, [](R r) { return r.candidate.grad_norm; }));
  c.push_back(
      curve("reference gradient norm", "L2", steps, [](R r) { return r.reference.grad_norm; }));
  c.push_back(curve("clip scale", "", steps, [](R r) { return r.candidate.clip; }));
  c.push_back(curve("parameters moved", "relative L2", steps, [](R r) { return r.params_moved; }));
  if (o.same_state) {
    c.push_back(
        curve("same-state gradient error", "relative L2", steps, [](R r) { return r.same.grads; }));
    c.push_back(curve("same-state loss error", "relative", steps, [](R r) { return r.same.loss; }));
  }
  return c;
}

// How the report groups the curves.
json charts_of(const TwinOptions& o) {
  auto chart = [](const char* title, const char* text, bool log_y, std::vector<std::string> names) {
    return json{{"title", title}, {"text", text}, {"log_y", log_y}, {"curves", names}};
  };
  json c = json::array();
  c.push_back(chart("Loss", "Candidate and fp64 reference; they should be one line.", false,
                    {"loss", "reference loss"}));
  c.push_back(chart("Loss difference",
                    "|candidate - fp64| and the noise band: the largest of the fp32 twins whose "
                    "weights were moved by one ulp.",
                    true, {"loss difference", "loss noise band"}));
  c.push_back(chart("Parameter drift",
                    "Distance from the fp64 run, and from the unmoved fp32 run with the reference "
                    "lane.",
                    true,
                    {"parameter drift", "parameter noise band", "parameters from fp32 base",
                     "twins from fp32 base"}));
  c.push_back(chart("Gradient norm", "Before clipping.", false,
                    {"gradient norm", "reference gradient norm"}));
  c.push_back(chart("Clip scale and parameters moved",
                    "What clipping left of the gradient; how far the weights are from the start.",
                    false, {"clip scale", "parameters moved"}));
  if (o.same_state)
    c.push_back(chart("Error of one step",
                      "Against the same step in fp64 from the candidate's own state.", true,
                      {"same-state gradient error", "same-state loss error"}));
  return c;
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
  each_number(r, [&](const char* name, double value) { j[name] = number(value); });
  j["same_worst_tensor"] = r.same.worst_tensor;
  j["lane"] = r.lane;
  return j.dump();
}

StepRecord from_line(const std::string& file, std::string_view line) {
  const json j = parse_strict_json(file, line, 2);
  StepRecord r;
  auto field = [&](const char* name) -> const json& {
    require(j.is_object() && j.contains(name), ErrorKind::invalid_data, "{}: field {} is missing",
            file, name);
    return j.at(name);
  };
  each_count(r, [&](const char* name, int64_t& value) {
    require(field(name).is_number_integer(), ErrorKind::invalid_data,
            "{}: field {} is not an integer", file, name);
    value = field(name).get<int64_t>();
  });
  each_number(r, [&](const char* name, double& value) { value = number_of(field(name)); });
  for (auto [name, text] : {std::pair<const char*, std::string*>{"lane", &r.lane},
                            {"same_worst_tensor", &r.same.worst_tensor}}) {
    require(field(name).is_string(), ErrorKind::invalid_data, "{}: field {} is not a string", file,
            name);
    *text = field(name).get<std::string>();
  }
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
          {"threads", c.threads}};
}

json to_json(const Check& c) {
  return {{"name", c.name},
          {"passed", c.passed},
          {"value", number(c.worst)},
          {"limit", number(c.tolerance)},
          {"worst_step", c.worst_step},
          {"first_step_past", c.first_past},
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
            {"resumed_from_step", f.resumed_from},
            {"candidate_seconds", seconds}};
  if (!each_ms.empty()) j["seconds_per_update"] = talea::to_json(time_stats(each_ms));
  if (!steps.empty()) {
    j["first_loss"] = number(steps.front().candidate.loss);
    j["final_loss"] = number(steps.back().candidate.loss);
    j["final_reference_loss"] = number(steps.back().reference.loss);
  }
  j["curves"] = curves_of(steps, f.options);
  j["charts"] = charts_of(f.options);
  return j;
}

}  // namespace talea::train
