// What: flags to values.
// Why: see flags.hpp.
// Never: reads a file.
#include "flags.hpp"

#include <CLI/CLI.hpp>

#include "core/fail.hpp"

namespace talea::cli::scan {

void OptionFlags::add(CLI::App& sub, bool with_lane) {
  sub.add_flag("--head-norm", head_norm, "RMS norm over the head's columns, before the gate");
  sub.add_option("--norm-eps", norm_eps, "of the norm")->capture_default_str();
  sub.add_option("--rotary-pairs", rotary_pairs,
                 "columns that rotate together: (2i, 2i+1), or (i, i + N/2); automatic: "
                 "interleaved without a rank axis, halves with one")
      ->check(CLI::IsMember({"automatic", "interleaved", "halves"}))
      ->capture_default_str();
  sub.add_option("--chunk", chunk, "tokens of a chunk; 0: the lane's")->capture_default_str();
  sub.add_option("--schedule", schedule, "of the chunks of a sequence")
      ->check(CLI::IsMember({"automatic", "sequential", "parallel"}))
      ->capture_default_str();
  if (with_lane)
    sub.add_option("--lane", lane, "auto, or a lane by name (it runs or says why not)")
        ->capture_default_str();
  sub.add_option("--threads", threads, "of the host lanes; 0: all")->capture_default_str();
  add_isa(sub);
  sub.add_option("--workspace-limit", workspace_limit, "bytes, e.g. 64MiB")->capture_default_str();
}

mamba3::Options OptionFlags::options() const {
  using namespace mamba3;
  Options o;
  require(head_norm || norm_eps == OptionFlags{}.norm_eps, ErrorKind::usage,
          "--norm-eps {}: needs --head-norm", norm_eps);
  o.head_norm = head_norm;
  o.norm_eps = parse_number("--norm-eps", norm_eps);
  if (rotary_pairs != "automatic")
    o.rotary_pairs = rotary_pairs == "interleaved" ? RotaryPairs::interleaved : RotaryPairs::halves;
  if (schedule != "automatic")
    o.schedule = schedule == "sequential" ? Schedule::sequential : Schedule::parallel;
  o.chunk = chunk;
  o.lane = lane;
  o.threads = threads;
  o.workspace_limit_bytes = parse_bytes("--workspace-limit", workspace_limit);
  return o;
}

void SizeFlags::add(CLI::App& sub) {
  const auto size = CLI::Range(int64_t{0}, int64_t{1} << 40);
  sub.add_option("--batch", batch, "sequences of equal length")->check(size)->capture_default_str();
  sub.add_option("--tokens", tokens, "of a sequence")->check(size)->capture_default_str();
  sub.add_option("--heads", heads, "of v")->check(size)->capture_default_str();
  sub.add_option("--groups", groups, "of q and k; divide the heads")
      ->check(size)
      ->capture_default_str();
  sub.add_option("--state-dim", state_dim, "columns of q and k")
      ->check(size)
      ->capture_default_str();
  sub.add_option("--head-dim", head_dim, "columns of v")->check(size)->capture_default_str();
  sub.add_option("--rank", rank, "1: SISO; above: MIMO with projections")
      ->check(CLI::Range(int64_t{1}, int64_t{64}))
      ->capture_default_str();
}

void OptionFlags::drop_unread_of_step(const Context& context, const CLI::App& sub) {
  note_unread(context, sub, {"--chunk", "--schedule"}, "a step has no chunks");
  chunk = OptionFlags{}.chunk;
  schedule = OptionFlags{}.schedule;
}

mamba3::Pass parse_pass(const std::string& text) {
  for (mamba3::Pass p : {mamba3::Pass::forward, mamba3::Pass::backward, mamba3::Pass::step})
    if (text == (p == mamba3::Pass::forward    ? "forward"
                 : p == mamba3::Pass::backward ? "backward"
                                               : "step"))
      return p;
  fail(ErrorKind::usage, "--pass {}: one of forward, backward, step", text);
}

}  // namespace talea::cli::scan
