// What: one line a flag.
// Why: --help is the reference of the command, so the words stand here.
// Never: checks a value that the library checks itself.
#include "train_options.hpp"

#include <CLI/CLI.hpp>

#include "train/presets.hpp"

namespace talea::cli {
namespace {

using train::TrainConfig;

// A flag that overrides one value of the preset.
template <typename T, typename F>
CLI::Option* over(CLI::App& c, TrainFlags& f, const char* name, const char* text, F set) {
  return c.add_option_function<T>(
      name,
      [&f, set](const T& value) {
        f.overrides.push_back([set, value](TrainConfig& config) { set(config, value); });
      },
      text);
}

void bind_data(CLI::App& c, TrainFlags& f) {
  using C = TrainConfig;
  over<std::vector<std::string>>(c, f, "--text", "text files: the bytes are the tokens",
                                 [](C& x, auto& v) { x.data.text_files = v; })
      ->type_name("FILE");
  c.add_option_function<std::string>(
       "--stream",
       [&f](const std::string& v) {
         f.stream = v;
         f.overrides.push_back([v](C& x) { x.data.stream = v; });
       },
       "what the micro-steps hold")
      ->check(CLI::IsMember(train::stream_names()));
  over<int64_t>(c, f, "--epochs", "passes over the tokens",
                [](C& x, auto v) { x.data.epochs = v; });
  over<int64_t>(c, f, "--seq-len", "tokens of a sequence",
                [](C& x, auto v) { x.data.seq_len = v; });
  over<int64_t>(c, f, "--batch", "sequences of a micro-step",
                [](C& x, auto v) { x.data.batch = v; });
  over<int64_t>(c, f, "--total-tokens", "tokens of an epoch; 0: the whole text",
                [](C& x, auto v) { x.data.total_tokens = v; });
  over<int64_t>(c, f, "--grad-accum", "micro-steps of an update",
                [](C& x, auto v) { x.grad_accum = v; });
  over<std::string>(c, f, "--accumulation", "how micro-steps share the loss", [](C& x, auto& v) {
    x.accumulation = v == "total-tokens" ? train::Accumulation::total_tokens
                                         : train::Accumulation::mean_of_means;
  })->check(CLI::IsMember({"mean-of-means", "total-tokens"}));
  over<int64_t>(c, f, "--max-steps", "updates at most; 0: all epochs",
                [](C& x, auto v) { x.max_steps = v; });
  over<uint64_t>(c, f, "--seed", "of weights and data", [](C& x, auto v) { x.seed = v; });
}

void bind_model(CLI::App& c, TrainFlags& f) {
  using C = TrainConfig;
  over<std::string>(c, f, "--model", "form of the model", [](C& x, auto& v) {
    x.model.form = v;
  })->check(CLI::IsMember({"transformer", "tiny"}));
  over<std::string>(c, f, "--mixer", "of the transformer's blocks", [](C& x, auto& v) {
    x.model.mixer = v;
  })->check(CLI::IsMember(train::mixer_names()));
  over<int64_t>(c, f, "--hidden", "width", [](C& x, auto v) { x.model.hidden = v; });
  over<int64_t>(c, f, "--ffn", "width of SwiGLU", [](C& x, auto v) { x.model.ffn = v; });
  over<int64_t>(c, f, "--heads", "attention heads", [](C& x, auto v) { x.model.heads = v; });
  over<int64_t>(c, f, "--layers", "blocks", [](C& x, auto v) { x.model.layers = v; });
  c.add_flag_callback(
      "--tied", [&f] { f.overrides.push_back([](C& x) { x.model.tied = true; }); },
      "the head is the embedding");
}

void bind_optimizer(CLI::App& c, TrainFlags& f) {
  using C = TrainConfig;
  over<std::string>(c, f, "--optimizer", "update rule", [](C& x, auto& v) {
    x.optimizer.kind = v == "sgd" ? train::OptimizerKind::sgd : train::OptimizerKind::adamw;
  })->check(CLI::IsMember({"adamw", "sgd"}));
  over<double>(c, f, "--lr", "learning rate", [](C& x, auto v) { x.optimizer.lr = v; });
  over<double>(c, f, "--min-lr", "where a schedule ends",
               [](C& x, auto v) { x.optimizer.min_lr = v; });
  over<double>(c, f, "--beta1", "of AdamW", [](C& x, auto v) { x.optimizer.beta1 = v; });
  over<double>(c, f, "--beta2", "of AdamW", [](C& x, auto v) { x.optimizer.beta2 = v; });
  over<double>(c, f, "--eps", "of AdamW", [](C& x, auto v) { x.optimizer.eps = v; });
  over<double>(c, f, "--momentum", "of SGD", [](C& x, auto v) { x.optimizer.momentum = v; });
  over<double>(c, f, "--weight-decay", "decoupled with AdamW",
               [](C& x, auto v) { x.optimizer.weight_decay = v; });
  over<double>(c, f, "--clip", "largest gradient norm; 0: no clipping",
               [](C& x, auto v) { x.optimizer.clip_norm = v; });
  over<int64_t>(c, f, "--warmup-steps", "updates with a rising rate",
                [](C& x, auto v) { x.optimizer.warmup_steps = v; });
  over<std::string>(c, f, "--schedule", "of the learning rate", [](C& x, auto& v) {
    x.optimizer.schedule = v == "linear"   ? train::Schedule::linear
                           : v == "cosine" ? train::Schedule::cosine
                                           : train::Schedule::constant;
  })->check(CLI::IsMember({"constant", "linear", "cosine"}));
}

void bind_loss(CLI::App& c, TrainFlags& f) {
  using C = TrainConfig;
  over<std::string>(c, f, "--loss-lane", "lane of the candidate's loss, or auto",
                    [](C& x, auto& v) { x.loss_lane = v; });
  over<std::string>(c, f, "--reference-lane", "lane of the fp64 reference and of the noise twins",
                    [](C& x, auto& v) { x.reference_lane = v; });
  over<double>(c, f, "--label-smoothing", "in [0, 1)", [](C& x, auto v) { x.label_smoothing = v; });
  over<double>(c, f, "--z-loss", "factor of lse^2", [](C& x, auto v) { x.z_loss = v; });
  over<int>(c, f, "--threads", "1; 0: as many as there are", [](C& x, auto v) { x.threads = v; });
  c.add_option("--twins", f.run.twin.twins,
               "fp32 runs moved by one ulp at the start: the noise band; 0: none")
      ->check(CLI::NonNegativeNumber);
  c.add_option("--beside", f.run.twin.beside,
               "further lanes to train side by side, judged by the same band")
      ->type_name("LANE");
  c.add_flag_callback(
      "--no-same-state", [&f] { f.run.twin.same_state = false; },
      "leave out the fp64 step from the candidate's state");
  std::vector<std::string> names;
  for (const train::MutantInfo& m : train::mutants()) names.emplace_back(m.name);
  c.add_option("--mutant", f.run.twin.mutant, "plant a historical mistake in the candidate")
      ->check(CLI::IsMember(names));
}

}  // namespace

void bind_train_flags(CLI::App& c, TrainFlags& f) {
  c.add_option("--preset", f.preset, "configuration that the other flags change")
      ->check(CLI::IsMember(train::preset_names()));
  bind_data(c, f);
  bind_model(c, f);
  bind_optimizer(c, f);
  bind_loss(c, f);
  f.ranks.add(c);
  std::vector<std::string> names;
  for (const train::Gate& g : train::gates()) names.emplace_back(g.name);
  c.add_option("--gate", f.gates, "run this gate instead (repeat for more)")
      ->check(CLI::IsMember(names));
  c.add_flag("--mutant-table", f.mutant_table, "every mutant against every gate");
  c.add_flag("--quick", f.quick, "mutant table: the long horizon only where it is the named gate");
  c.add_option("--json-out", f.json_out, "receipt")->type_name("FILE");
  c.add_option("--report", f.report, "HTML page of the receipt")->type_name("FILE");
  c.add_option("--curve-points", f.run.curve_points,
               "points of each curve in the receipt, about; 0: every update")
      ->check(CLI::NonNegativeNumber);
  auto* folder =
      c.add_option("--checkpoint", f.run.checkpoint_dir, "directory of checkpoint and journal");
  c.add_option("--checkpoint-every", f.run.checkpoint_every, "updates between checkpoints")
      ->check(CLI::PositiveNumber)
      ->needs(folder);
  c.add_flag("--resume", f.run.resume, "continue from the checkpoint, if there is one")
      ->needs(folder);
  c.add_option("--initial-parameters-out", f.run.initial_parameters_out,
               "write the initial weights as .safetensors");
}

void settle_train_flags(TrainFlags& f) {
  f.run.config = train::preset(f.preset);
  for (const auto& change : f.overrides) change(f.run.config);
}

}  // namespace talea::cli
