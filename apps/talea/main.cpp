// What: the command line tool: the table of subcommands, and exceptions as exit codes.
// Why: exit codes are a contract (docs/cli.md); they are decided in one place.
// Never: does a subcommand's work.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>
#include <system_error>

#include "context.hpp"
#include "core/fail.hpp"
#include "ranks.hpp"

namespace talea::cli {
namespace {

// One line a subcommand.
constexpr void (*subcommands[])(CLI::App&, Context&) = {
    register_loss,   register_check,   register_bench, register_explain, register_doctor,
    register_report, register_compare, register_train, register_repro,
};

int say(int code, const char* what) {
  fmt::print(stderr, "talea: {}\n", what);
  return code;
}

int run(int argc, char** argv) {
  CLI::App app{"Exact fused output projection and cross-entropy, with receipts.", "talea"};
  app.set_version_flag("--version", std::string("talea ") + build_info().version);
  app.require_subcommand(1);
  Context context;
  context.argv.assign(argv, argv + argc);
  // Where the tool lies on this machine is nobody's business in a receipt.
  if (argc > 0) context.argv[0] = std::filesystem::path(argv[0]).filename();
  for (auto* add : subcommands) add(app, context);
  check_whole_numbers(app);
  try {
    app.parse(argc, argv);
    return context.exit_code;
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
