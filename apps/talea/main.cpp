// What: the command line tool: the table of subcommands, and exceptions as exit codes.
// Why: exit codes are a contract (docs/cli.md); they are decided in one place.
// Never: does a subcommand's work.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>
#include <string_view>
#include <system_error>

#include "context.hpp"
#include "core/fail.hpp"
#include "mamba3/register.hpp"
#include "ranks.hpp"
#include "sparse_attention/register.hpp"
#include "table.hpp"

namespace talea::cli {
namespace {

using Register = void (*)(CLI::App&, Context&);

// One line a subcommand.
constexpr Register subcommands[] = {
    register_loss,    register_attend, register_index, register_doctor, register_report,
    register_compare, register_train,  register_repro, register_scan,
};

// The subcommands that every operator has, each with flags of its own; --operator says whose. One
// line an operator; the first is the default.
struct OperatorCommands {
  const char* name;
  Register check, bench, explain;
};
constexpr OperatorCommands operators[] = {
    {"linear_cross_entropy", register_check, register_bench, register_explain},
    {"sparse_attention", register_check_sparse_attention, register_bench_sparse_attention,
     register_explain_sparse_attention},
    {"mamba3", register_scan_check, register_scan_bench, register_scan_explain},
};

// The value of --operator, which decides what flags there are; of a name that is none, the default,
// whose flag says so.
const OperatorCommands& operator_of(int argc, char** argv) {
  std::string_view name;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    constexpr std::string_view flag = "--operator", joined = "--operator=";
    if (word == flag && i + 1 < argc) name = argv[i + 1];
    if (word.substr(0, joined.size()) == joined) name = word.substr(joined.size());
  }
  for (const OperatorCommands& o : operators)
    if (name == o.name) return o;
  return operators[0];
}

void add_operator_commands(CLI::App& app, Context& context, const OperatorCommands& chosen) {
  static std::string name;
  name = chosen.name;
  std::vector<std::string> names;
  for (const OperatorCommands& o : operators) names.emplace_back(o.name);
  for (const Register add : {chosen.check, chosen.bench, chosen.explain}) {
    add(app, context);
    app.get_subcommands({})
        .back()
        ->add_option("--operator", name, "whose flags these are")
        ->check(CLI::IsMember(names))
        ->capture_default_str();
  }
}

int say(int code, const char* what) {
  fmt::print(stderr, "talea: {}\n", what);
  return code;
}

// CLI11 says of a word that is no subcommand that one is required.
void check_subcommand(CLI::App& app, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (argv[i][0] == '-') continue;
    std::string names;
    for (const CLI::App* sub : app.get_subcommands({})) {
      if (sub->get_name() == argv[i]) return;
      names += (names.empty() ? "" : ", ") + sub->get_name();
    }
    fail(ErrorKind::usage, "{}: no such subcommand; one of {}", argv[i], names);
  }
}

// And of a flag that it does not know, only where nothing else is missing.
std::string unknown_flag(const CLI::App& app) {
  for (const std::string& word : app.remaining(true))
    if (word.size() > 1 && word[0] == '-' && !std::isdigit(static_cast<unsigned char>(word[1])))
      return word;
  return "";
}

// What -v says first, and last: on failures, too.
void log_start(const Context& context) {
  const BuildInfo& build = build_info();
  log(context, fmt::format("{} of {}, {}; this is {}", build.version, build.git_revision,
                           build.type, provenance_of(context).isa));
}
struct LogEnd {
  const Context& context;
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  ~LogEnd() {
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - begin;
    rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
    log(context, fmt::format("took {}, at most {} resident", human_ms(ms.count()),
                             human_bytes(int64_t{1024} * used.ru_maxrss)));
  }
};

int run(int argc, char** argv) {
  CLI::App app{"Exact fused output projection and cross-entropy, with receipts.", "talea"};
  Context context;
  const LogEnd log_end{context};
  app.set_version_flag("--version", std::string("talea ") + build_info().version);
  app.require_subcommand(1);
  app.add_flag("-q", context.quiet, "no progress and no notes on stderr; before or after COMMAND");
  app.add_flag("-v", context.verbose,
               "say more on stderr: the build, files read, what it took; before or after COMMAND");
  app.parse_complete_callback([&context] { log_start(context); });
  context.argv.assign(argv, argv + argc);
  // Where the tool lies on this machine is nobody's business in a receipt.
  if (argc > 0) context.argv[0] = std::filesystem::path(argv[0]).filename();
  for (const Register add : subcommands) add(app, context);
  add_operator_commands(app, context, operator_of(argc, argv));
  check_whole_numbers(app);
  refuse_no_values(app);
  try {
    check_subcommand(app, argc, argv);
    app.parse(argc, argv);
    return context.exit_code;
  } catch (const CLI::RequiredError& e) {
    const std::string flag = unknown_flag(app);
    const std::string what = flag.empty() ? e.what() : flag + ": no such flag; " + e.what();
    return say(static_cast<int>(ErrorKind::usage), (what + " (--help says more)").c_str());
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : static_cast<int>(ErrorKind::usage);
  } catch (const Error& e) {
    return say(static_cast<int>(e.kind()), e.what());
  } catch (const Interrupted& e) {
    say(0, "interrupted; what was finished is kept");
    return 128 + e.signal;
  } catch (const std::system_error& e) {
    // The reader of stdout went away (head, less): what was to be done is done.
    if (e.code().value() == EPIPE) return context.exit_code;
    return say(static_cast<int>(ErrorKind::runtime), e.what());
  } catch (const std::bad_alloc&) {
    return say(static_cast<int>(ErrorKind::runtime), "out of host memory");
  } catch (const std::exception& e) {
    return say(static_cast<int>(ErrorKind::runtime), e.what());
  }
}

}  // namespace
}  // namespace talea::cli

int main(int argc, char** argv) {
  const int code = talea::cli::run(argc, argv);
  // After an error MPI is not finalised, and must not be met again on the way out.
  if (code != 0 && talea::cli::under_mpirun()) {
    std::fflush(stdout);
    std::_Exit(code);
  }
  // A reader that went away (head, less) is no failure; a full disk under a redirection is.
  errno = 0;
  if ((std::fflush(stdout) != 0 || std::ferror(stdout)) && errno != EPIPE && errno != 0)
    return code == 0 ? talea::cli::say(4, "stdout: cannot be written") : code;
  return code;
}
