// What: what every subcommand shares: output mode, progress mode, exit code, stop requests.
// Why: one pattern: each subcommand file exports one register function; main knows the table only.
// Never: holds a subcommand's own options.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/provenance.hpp"
#include "talea/error.hpp"
#include "talea/tensor.hpp"

namespace CLI {
class App;
}
namespace talea {
struct InputFact;
}

namespace talea::cli {

struct Context {
  std::vector<std::string> argv;
  bool json = false, jsonl = false, quiet = false, verbose = false;
  std::string progress = "auto";       // auto, plain, json, none
  std::string start_time = utc_now();  // of the process: a receipt's start is not its end
  int exit_code = 0;                   // set by the subcommand that ran

  bool machine() const { return json || jsonl; }
};

struct SubcommandHelp {
  const char* name;
  const char* job;        // one line
  const char* example;    // runs in the project's root
  const char* exits;      // exit codes beyond those all share
  const char* data = "";  // what else is invalid data
};

// A subcommand with the flags that all share; the footer holds exit codes and the example.
CLI::App* add_subcommand(CLI::App& app, Context& context, const SubcommandHelp& help);

// --isa: a ceiling on the instruction sets, applied as the flag is read.
void add_isa(CLI::App& sub);

// A line on stderr, as JSON where progress is; --quiet keeps it back. log: only under -v.
void note(const Context& context, const std::string& line);
void log(const Context& context, const std::string& line);
// What was read, a line a file.
void log_inputs(const Context& context, const std::vector<InputFact>& inputs);

// Throws Interrupted once SIGINT or SIGTERM has come. Call between units of work.
void check_interrupt();
struct Interrupted {
  int signal;
};

// argv, relevant environment and machine, with start_time = now.
Provenance provenance_of(const Context& context);

// "256MiB", "1.5GB", "4096" -> bytes. Error(usage) naming the flag.
int64_t parse_bytes(const std::string& flag, const std::string& text);
// Before the first of several passes runs: `needs` are the least limits that each could keep.
void require_limit(int64_t limit, std::initializer_list<int64_t> needs);
// A finite number, or Error(usage) naming the flag.
double parse_number(const std::string& flag, const std::string& text);
DType parse_dtype(const std::string& text);  // fp32, bf16, fp16, fp64
std::vector<std::string> split(const std::string& text, char mark);

// An output must not take the place of a file that is read, or written beside it. Error(usage)
// naming both; an empty name is no file, and devices (/dev/null) are no place to take. Its folder
// must be there before hours of work, not after: Error(runtime).
void require_other_file(const std::string& flag, const std::string& out,
                        const std::vector<std::string>& others);
// The library names a tensor; who called it from a shell knows a flag and a file. The error with
// both before its text, where the tensor that it begins with is one of these.
struct GivenFile {
  std::string tensor, flag, file;
};
Error with_file(const Error& error, const std::vector<GivenFile>& given);
// Calls what has its problem from flags alone: what the library calls invalid data there is a
// flag's fault, Error(usage).
void blame_flags(const std::function<void()>& run);
// A flag that this call would not read is Error(usage) with the reason: the first of `flags`, or
// the first but `flags`, that says something else than its default.
void refuse_unread(const CLI::App& sub, std::initializer_list<const char*> flags,
                   const std::string& why);
// What describes the problem and a call or a pass of it does not read is a note on stderr, a line
// a flag: the same words serve all of them.
void note_unread(const Context& context, const CLI::App& sub,
                 std::initializer_list<const char*> flags, const std::string& why);
void refuse_others(const CLI::App& sub, std::initializer_list<const char*> flags,
                   const std::string& why);
// Numbers of an INT or UINT flag as they are written: no wrapping, no octal, no clamping.
void check_whole_numbers(CLI::App& app);
// A value that is empty, as of a shell variable that is not set, is no value: it would be taken as
// a flag that is not there. Nor is NaN where a range is asked for, which it passes.
void refuse_no_values(CLI::App& app);

void register_loss(CLI::App& app, Context& context);
void register_attend(CLI::App& app, Context& context);
void register_index(CLI::App& app, Context& context);
void register_check(CLI::App& app, Context& context);
void register_bench(CLI::App& app, Context& context);
void register_explain(CLI::App& app, Context& context);
void register_doctor(CLI::App& app, Context& context);
void register_report(CLI::App& app, Context& context);
void register_compare(CLI::App& app, Context& context);
void register_repro(CLI::App& app, Context& context);
void register_train(CLI::App& app, Context& context);

}  // namespace talea::cli
