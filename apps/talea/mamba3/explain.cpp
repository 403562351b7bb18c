// What: `talea explain --operator mamba3`: which lane a scan would take, and why the others
// decline.
// Why: a choice that cannot be asked about is a choice in silence.
// Never: touches data; the tensors have addresses nobody reads.
#include <CLI/CLI.hpp>

#include "data.hpp"
#include "lane_choices.hpp"
#include "register.hpp"
#include "table.hpp"

namespace talea::cli {
namespace {

using namespace scan;

struct Flags {
  scan::OptionFlags options;
  SizeFlags size;
  std::string dtype = "fp32", pass = "forward", device = "cpu";
};

void run(Context& context, const Flags& f) {
  const mamba3::Options options = f.options.options();
  const Drawn drawn = draw_empty(f.size, parse_dtype(f.dtype),
                                 f.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu);
  const mamba3::Problem problem = problem_of(drawn, parse_pass(f.pass), options);
  const LaneChoices choices =
      ask_lanes(mamba3::lanes(), options.lane, [&](const std::string& lane) {
        mamba3::Problem named = problem;
        named.options.lane = lane;
        return explain(named);
      });
  const SizeFlags& s = f.size;
  const int64_t tokens = problem.tokens;  // a step has one
  const double form = static_cast<double>(s.batch * s.heads) * static_cast<double>(tokens) *
                      static_cast<double>(tokens) * 4;
  const auto title = [&](const std::string& flops) {
    return fmt::format(
        "{} of {} sequences, {} tokens, {} heads, {} groups, N {}, P {}, rank {}, {} on {}: {} "
        "useful flops; the quadratic form would take {}",
        f.pass, grouped(s.batch), grouped(tokens), grouped(s.heads), grouped(s.groups), s.state_dim,
        s.head_dim, s.rank, f.dtype, f.device, flops,
        human_bytes(static_cast<int64_t>(std::min(form, 0x1p62))));
  };
  print_choices(context, {{"operator", "mamba3"}, {"pass", f.pass}}, title, choices);
}

}  // namespace

LaneChoice ordinary_scan(const std::string& lane, DeviceKind where) {
  mamba3::Options options;
  options.lane = lane;
  options.workspace_limit_bytes = int64_t{1} << 40;  // not the question here
  const DType dtype = where == DeviceKind::cuda ? DType::bf16 : DType::f32;
  return explain(problem_of(draw_empty({}, dtype, where), mamba3::Pass::forward, options));
}

void register_scan_explain(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(
      app, context,
      {"explain", "which lane a scan would take, why, and what it would cost",
       "talea explain --operator mamba3 --tokens 4096 --heads 64 --rank 4 --dtype bf16", ""});
  f->size.add(*sub);
  sub->add_option("--dtype", f->dtype, "fp32, bf16, fp16 or fp64")->capture_default_str();
  sub->add_option("--pass", f->pass, "forward, backward or step")
      ->check(CLI::IsMember({"forward", "backward", "step"}))
      ->capture_default_str();
  sub->add_option("--device", f->device, "where the tensors lie")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  f->options.add(*sub, true);
  sub->callback([f, sub, &context] {
    if (f->pass == "step") f->options.drop_unread_of_step(context, *sub);
    blame_flags([&] { run(context, *f); });
  });
}

}  // namespace talea::cli
