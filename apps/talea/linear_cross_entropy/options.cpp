// What: flags to values.
// Why: a flag an option, from the operator's own list: a new option is a new flag.
// Never: reads a file.
#include "options.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "core/fail.hpp"
#include "ops/linear_cross_entropy/fields.hpp"

namespace talea::cli {

namespace {

// --label-smoothing for label_smoothing.
std::string flag_of(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

template <class Value, class F>
void add_flag(CLI::App& sub, Value& value, const F& field) {
  const std::string flag = flag_of(field.name);
  if constexpr (std::is_enum_v<Value>) {
    std::vector<std::string> words(std::begin(Words<Value>::list), std::end(Words<Value>::list));
    sub.add_option_function<std::string>(
           flag,
           [&value, words](const std::string& given) {
             value =
                 static_cast<Value>(std::find(words.begin(), words.end(), given) - words.begin());
           },
           field.about)
        ->check(CLI::IsMember(words))
        ->default_str(word(value));
  } else {
    sub.add_option(flag, value, field.about)->capture_default_str();
  }
}

}  // namespace

void OptionFlags::add(CLI::App& sub, bool with_vocab) {
  for_each_field(lce::option_fields, [&](const auto& field) {
    const std::string name = field.name;
    if (name == "denominator")
      sub.add_option("--denominator", denominator, field.about)->capture_default_str();
    else if (name == "workspace_limit_bytes")
      sub.add_option("--workspace-limit", workspace_limit, field.about)->capture_default_str();
    else if (name == "softcap")
      sub.add_option("--softcap", softcap, field.about);
    else if (name == "vocab" && with_vocab)
      sub.add_option("--vocab", vocab, field.about);
    else if (name != "vocab" && name != "denominator_value" && name != "denominator_scope")
      add_flag(sub, values.*field.member, field);
  });
  add_isa(sub);
}

LinearCrossEntropyOptions OptionFlags::options() const {
  LinearCrossEntropyOptions o = values;
  if (denominator == "weighted") {
    o.denominator = Denominator::weighted;
  } else if (denominator != "valid") {
    o.denominator = Denominator::given;
    o.denominator_value = parse_number("--denominator", denominator);
  }
  require(vocab.value_or(1) > 0, ErrorKind::usage, "--vocab {}: must be > 0", *vocab);
  o.vocab = vocab.value_or(0);
  if (!softcap.empty()) {
    o.softcap = parse_number("--softcap", softcap);
    require(o.softcap > 0, ErrorKind::usage, "--softcap {}: must be > 0", softcap);
  }
  o.workspace_limit_bytes = workspace_limit == "auto"
                                ? workspace_auto
                                : parse_bytes("--workspace-limit", workspace_limit);
  return o;
}

void check_unread_options(const Context& context, const CLI::App& sub, const Wanted& wanted,
                          Reduction reduction) {
  if (!wanted.loss && !wanted.dx && !wanted.dw && !wanted.db)
    note_unread(context, sub,
                {"--reduction", "--denominator", "--on-empty", "--label-smoothing", "--z-loss",
                 "--class-weight", "--token-weight"},
                "of the loss; needs loss or a gradient among --outputs");
  else if (reduction != Reduction::mean)
    note_unread(context, sub, {"--denominator", "--on-empty"}, "of --reduction mean");
  if (!wanted.dx) refuse_unread(sub, {"--dx-sum"}, "needs dx among --outputs");
  if (!wanted.dw) refuse_unread(sub, {"--dw-sum"}, "needs dw among --outputs");
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

void ShapeFlags::add(CLI::App& sub) {
  const auto size = CLI::Range(int64_t{0}, int64_t{1} << 40);
  sub.add_option("--tokens", tokens, "rows of hidden")->check(size)->capture_default_str();
  sub.add_option("--hidden", hidden, "columns of hidden")->check(size)->capture_default_str();
  sub.add_option("--vocab", vocab, "rows of the weight")->check(size)->capture_default_str();
}

}  // namespace talea::cli
