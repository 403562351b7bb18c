// What: flags to values.
// Why: see options.hpp.
// Never: reads a file.
#include "options.hpp"

#include "core/fail.hpp"

namespace talea::cli {

void OptionFlags::add(CLI::App& sub, bool with_vocab) {
  sub.add_option("--reduction", reduction, "of the loss")
      ->check(CLI::IsMember({"mean", "sum", "none"}))
      ->capture_default_str();
  sub.add_option("--denominator", denominator, "of the mean: valid, weighted, or a number")
      ->capture_default_str();
  sub.add_option("--denominator-scope", denominator_scope, "local, or global over the batch ranks")
      ->check(CLI::IsMember({"local", "global"}))
      ->capture_default_str();
  sub.add_option("--on-empty", on_empty, "mean of a batch without a valid row")
      ->check(CLI::IsMember({"nan", "zero"}))
      ->capture_default_str();
  sub.add_option("--target-check", target_check, "targets outside the vocabulary")
      ->check(CLI::IsMember({"automatic", "checked", "poison"}))
      ->capture_default_str();
  sub.add_option("--ignore-index", ignore_index, "target that takes no part")
      ->capture_default_str();
  sub.add_option("--label-smoothing", label_smoothing, "in [0, 1)")->capture_default_str();
  sub.add_option("--z-loss", z_loss, "weight of lse^2")->capture_default_str();
  sub.add_option("--softcap", softcap, "k of k * tanh(logit / k), > 0; default off");
  sub.add_option("--logit-scale", logit_scale, "1 / temperature")->capture_default_str();
  if (with_vocab)
    sub.add_option("--vocab", vocab, "logical vocabulary; rows of the weight above it are padding");
  sub.add_option("--lane", lane, "auto, or a lane by name (it runs or says why not)")
      ->capture_default_str();
  sub.add_option("--threads", threads, "of the cpu lanes; 0: all")->capture_default_str();
  add_isa(sub);
  sub.add_option("--workspace-limit", workspace_limit,
                 "bytes, e.g. 64MiB; one that cannot be kept is an error that names the least")
      ->capture_default_str();
}

LinearCrossEntropyOptions OptionFlags::options() const {
  LinearCrossEntropyOptions o;
  o.reduction = reduction == "mean"  ? Reduction::mean
                : reduction == "sum" ? Reduction::sum
                                     : Reduction::none;
  if (denominator == "weighted") {
    o.denominator = Denominator::weighted;
  } else if (denominator != "valid") {
    o.denominator = Denominator::given;
    o.denominator_value = parse_number("--denominator", denominator);
  }
  if (denominator_scope == "global") o.denominator_scope = DenominatorScope::global;
  if (on_empty == "zero") o.on_empty = OnEmpty::zero;
  if (target_check != "automatic")
    o.target_check = target_check == "checked" ? TargetCheck::checked : TargetCheck::poison;
  o.ignore_index = ignore_index;
  require(vocab.value_or(1) > 0, ErrorKind::usage, "--vocab {}: must be > 0", *vocab);
  o.vocab = vocab.value_or(0);
  o.label_smoothing = label_smoothing;
  o.z_loss = z_loss;
  if (!softcap.empty()) {
    o.softcap = parse_number("--softcap", softcap);
    require(o.softcap > 0, ErrorKind::usage, "--softcap {}: must be > 0", softcap);
  }
  o.logit_scale = logit_scale;
  o.lane = lane;
  o.threads = threads;
  o.workspace_limit_bytes = parse_bytes("--workspace-limit", workspace_limit);
  return o;
}

Wanted parse_outputs(const std::string& text) {
  Wanted w;
  const std::pair<const char*, bool*> flags[] = {
      {"loss", &w.loss},       {"lse", &w.lse},       {"target_logprob", &w.target_logprob},
      {"entropy", &w.entropy}, {"argmax", &w.argmax}, {"accuracy", &w.accuracy},
      {"dx", &w.dx},           {"dw", &w.dw},         {"db", &w.db}};
  for (const std::string& name : split(text, ',')) {
    bool known = false;
    for (const auto& [flag, wanted] : flags)
      if (name == flag) known = *wanted = true;
    if (name.rfind("topk:", 0) == 0) {
      require(w.top_k == 0, ErrorKind::usage, "--outputs {}: topk is given twice", text);
      const double k = parse_number("--outputs topk", name.substr(5));
      require(k >= 1 && k <= max_top_k && k == static_cast<double>(static_cast<int64_t>(k)),
              ErrorKind::usage, "--outputs {}: k must be a whole number from 1 to {}", name,
              max_top_k);
      w.top_k = static_cast<int64_t>(k);
      known = true;
    }
    require(known, ErrorKind::usage,
            "--outputs {}: unknown; one of loss, lse, target_logprob, entropy, argmax, accuracy, "
            "topk:K, dx, dw, db",
            name);
  }
  return w;
}

DType parse_dtype(const std::string& text) {
  for (DType d : {DType::f32, DType::bf16, DType::f16, DType::f64})
    if (text == name_of(d)) return d;
  fail(ErrorKind::usage, "--dtype {}: unknown; one of fp32, bf16, fp16, fp64", text);
}

void ShapeFlags::add(CLI::App& sub) {
  const auto size = CLI::Range(int64_t{0}, int64_t{1} << 40);
  sub.add_option("--tokens", tokens, "rows of hidden")->check(size)->capture_default_str();
  sub.add_option("--hidden", hidden, "columns of hidden")->check(size)->capture_default_str();
  sub.add_option("--vocab", vocab, "rows of the weight")->check(size)->capture_default_str();
}

}  // namespace talea::cli
