// What: the shared flags, sizes, signals and provenance of the command line.
// Why: every subcommand parses, stops and signs its receipts in the same way.
// Never: prints a result.
#include "context.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "core/receipt.hpp"
#include "device/cpu/isa.hpp"

namespace talea::cli {
namespace {

volatile std::sig_atomic_t pending_signal = 0;

void remember(int signal) {
  pending_signal = signal;
  std::signal(signal, SIG_DFL);  // a second one ends the program at once
}

struct InstallHandlers {
  InstallHandlers() {
    std::signal(SIGINT, remember);
    std::signal(SIGTERM, remember);
    std::signal(SIGPIPE, SIG_IGN);
  }
};

}  // namespace

CLI::App* add_subcommand(CLI::App& app, Context& context, const SubcommandHelp& help) {
  static const InstallHandlers handlers;
  CLI::App* sub = app.add_subcommand(help.name, help.job);
  sub->add_flag("--json", context.json, "result as one JSON document on stdout");
  sub->add_flag("--jsonl", context.jsonl, "result as JSON, one object a line")->excludes("--json");
  // Its letter is the program's (main.cpp): here a letter may be a tensor, such as --q.
  sub->add_flag("--quiet", context.quiet, "no progress and no notes on stderr; also -q");
  sub->fallthrough();
  sub->add_option("--progress", context.progress, "progress on stderr")
      ->check(CLI::IsMember({"auto", "plain", "json", "none"}))
      ->capture_default_str();
  sub->footer(fmt::format(
      "Exit codes: 0 done{}; 2 usage; 3 no lane takes it, or this machine lacks something, named;\n"
      "            4 run-time failure; 5 invalid input data{}; 130, 143 on signals.\n"
      "Example:    {}\n",
      help.exits, help.data, help.example));
  return sub;
}

void add_isa(CLI::App& sub) {
  sub.add_option_function<std::string>(
         "--isa",
         [](const std::string& name) {
           cpu::limit_isa(name == "avx2" ? cpu::IsaLimit::avx2 : cpu::IsaLimit::best);
         },
         "ceiling on the instruction sets of lanes and plain products: best (default), avx2")
      ->check(CLI::IsMember({"best", "avx2"}));
}

void note(const Context& context, const std::string& line) {
  if (context.quiet) return;
  if (context.progress == "json")
    fmt::print(stderr, "{}\n", nlohmann::json{{"note", line}}.dump());
  else
    fmt::print(stderr, "talea: {}\n", line);
}

void log(const Context& context, const std::string& line) {
  if (context.verbose) note(context, line);
}

void log_inputs(const Context& context, const std::vector<InputFact>& inputs) {
  for (const InputFact& i : inputs)
    log(context, fmt::format("{} is {}: {} [{}]", i.name, i.source, name_of(i.dtype),
                             fmt::join(i.shape, ", ")));
}

void check_interrupt() {
  if (pending_signal) throw Interrupted{pending_signal};
}

Provenance provenance_of(const Context& context) {
  TextPairs environment;
  for (const char* name : relevant_environment)
    if (const char* value = std::getenv(name)) environment.emplace_back(name, value);
  Provenance provenance = gather_provenance(context.argv, environment);
  provenance.start_time = context.start_time;
  provenance.isa += fmt::format(" (in use: {})", cpu::isa_in_use());
  return provenance;
}

double parse_number(const std::string& flag, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  require(!text.empty() && *end == 0 && std::isfinite(value), ErrorKind::usage,
          "{} {}: not a finite number", flag, text);
  return value;
}

int64_t parse_bytes(const std::string& flag, const std::string& text) {
  const size_t unit_at = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string digits = text.substr(0, unit_at);
  char* end = nullptr;
  const double number = std::strtod(digits.c_str(), &end);
  require(!digits.empty() && *end == 0, ErrorKind::usage,
          "{} '{}': not a number of bytes, such as 64MiB", flag, text);
  const std::string unit = text.substr(unit_at);
  static const std::pair<const char*, double> units[] = {
      {"", 1},     {"B", 1},    {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"kB", 1e3},
      {"MB", 1e6}, {"GB", 1e9}, {"K", 0x1p10},   {"M", 0x1p20},   {"G", 0x1p30}};
  for (const auto& [name, factor] : units) {
    if (unit != name) continue;
    require(number * factor < 0x1p62, ErrorKind::usage, "{} {}: too large", flag, text);
    return static_cast<int64_t>(number * factor);
  }
  fail(ErrorKind::usage, "{} {}: unknown unit '{}'; one of B, KiB, MiB, GiB, kB, MB, GB", flag,
       text, unit);
}

void require_limit(int64_t limit, std::initializer_list<int64_t> needs) {
  const int64_t least = std::max(needs);
  require(least <= limit, ErrorKind::usage,
          "workspace_limit = {} bytes: cannot be kept; the passes of this command need at least {} "
          "bytes",
          limit, least);
}

DType parse_dtype(const std::string& text) {
  for (DType d : {DType::f32, DType::bf16, DType::f16, DType::f64})
    if (text == name_of(d)) return d;
  fail(ErrorKind::usage, "--dtype {}: unknown; one of fp32, bf16, fp16, fp64", text);
}

std::vector<std::string> split(const std::string& text, char mark) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(mark, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

Error with_file(const Error& error, const std::vector<GivenFile>& given) {
  const std::string said = error.what();
  for (const GivenFile& one : given) {
    const size_t next = one.tensor.size();  // "targets[3]", "weight: dtype"
    if (said.starts_with(one.tensor) && next < said.size() &&
        (said[next] == ':' || said[next] == '['))
      return Error(error.kind(), fmt::format("{} {}: {}", one.flag, one.file, said));
  }
  return error;
}

void blame_flags(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::invalid_data) throw;
    throw Error(ErrorKind::usage, error.what());
  }
}

namespace {

// "--flag value" where it says something else than its default; else "".
std::string said(const CLI::Option& option) {
  if (option.count() == 0) return "";
  const bool flag = option.get_items_expected_max() == 0;
  const std::string value = flag ? "" : option.results().front();
  if (!flag && option.results().size() == 1 && value == option.get_default_str()) return "";
  return fmt::format("{}{}{}", option.get_name(), flag ? "" : " ", value);
}

void refuse(const CLI::Option& option, const std::string& why) {
  const std::string words = said(option);
  require(words.empty(), ErrorKind::usage, "{}: {}", words, why);
}

}  // namespace

void refuse_unread(const CLI::App& sub, std::initializer_list<const char*> flags,
                   const std::string& why) {
  for (const char* flag : flags)
    if (const CLI::Option* option = sub.get_option_no_throw(flag)) refuse(*option, why);
}

void note_unread(const Context& context, const CLI::App& sub,
                 std::initializer_list<const char*> flags, const std::string& why) {
  for (const char* flag : flags) {
    const CLI::Option* option = sub.get_option_no_throw(flag);
    const std::string words = option ? said(*option) : "";
    if (!words.empty()) note(context, fmt::format("{}: not read: {}", words, why));
  }
}

void refuse_others(const CLI::App& sub, std::initializer_list<const char*> flags,
                   const std::string& why) {
  std::vector<std::string> read(flags.begin(), flags.end());
  read.insert(read.end(), {"--json", "--jsonl", "--quiet", "--progress", "--operator", "--help"});
  for (const CLI::Option* option : sub.get_options())
    if (std::find(read.begin(), read.end(), option->get_name()) == read.end()) refuse(*option, why);
}

void require_other_file(const std::string& flag, const std::string& out,
                        const std::vector<std::string>& others) {
  namespace fs = std::filesystem;
  std::error_code none;
  require(!fs::is_directory(out, none), ErrorKind::runtime, "{} {}: is a folder", flag, out);
  if (out.empty() || (fs::exists(out, none) && !fs::is_regular_file(out, none))) return;
  const fs::path folder = fs::path(out).parent_path();
  require(folder.empty() || fs::is_directory(folder, none), ErrorKind::runtime,
          "{} {}: {} is no folder", flag, out, folder.string());
  for (const std::string& argument : others) {
    const size_t key = argument.find(".safetensors:");
    const std::string other =
        key == std::string::npos ? argument : argument.substr(0, argument.find(':', key));
    if (other.empty()) continue;
    const bool same = fs::equivalent(out, other, none) ||
                      fs::weakly_canonical(out, none) == fs::weakly_canonical(other, none);
    require(!same, ErrorKind::usage, "{} {}: is also {}, which it would replace", flag, out,
            argument);
  }
}

void refuse_no_values(CLI::App& app) {
  for (CLI::App* sub : app.get_subcommands({}))
    for (CLI::Option* option : sub->get_options()) {
      if (option->get_items_expected_max() == 0) continue;
      const bool range = option->get_type_name().rfind("FLOAT:FLOAT in", 0) == 0;
      option->check(CLI::Validator(
          [range](std::string& text) -> std::string {
            if (text.empty()) return "an empty value";
            return range && std::isnan(std::strtod(text.c_str(), nullptr)) ? text + ": no number"
                                                                           : "";
          },
          ""));
    }
}

void check_whole_numbers(CLI::App& app) {
  for (CLI::App* sub : app.get_subcommands({}))
    for (CLI::Option* option : sub->get_options()) {
      const bool natural = option->get_type_name().rfind("UINT", 0) == 0;
      if (!natural && option->get_type_name().rfind("INT", 0) != 0) continue;
      option->check(CLI::Validator(
          [natural](std::string& text) -> std::string {
            int64_t whole = 0;
            uint64_t count = 0;
            const char *begin = text.data(), *end = begin + text.size();
            const auto read =
                natural ? std::from_chars(begin, end, count) : std::from_chars(begin, end, whole);
            const bool octal = text.find_first_of("123456789") > text.find('0');
            if (read.ec == std::errc() && read.ptr == end && (!octal || text == "0")) return "";
            return text + (natural ? ": not a whole number from 0 to 2^64 - 1"
                                   : ": not a whole number of 64 bits");
          },
          ""));
    }
}

}  // namespace talea::cli
