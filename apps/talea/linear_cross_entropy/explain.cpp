// What: `talea explain`: which lane a problem would take, why the others decline, what it costs.
// Why: a choice that cannot be asked about is a choice in silence.
// Never: touches data; the tensors have addresses nobody reads.
#include <CLI/CLI.hpp>

#include "explain_ranks.hpp"
#include "io/host_tensor.hpp"
#include "lane_choices.hpp"
#include "options.hpp"
#include "table.hpp"

namespace talea::cli {
namespace {

struct Flags {
  OptionFlags options;
  ShapeFlags shape;
  std::string dtype = "fp32", outputs = "loss,dx,dw", device = "cpu";
  bool bias = false, class_weight = false, token_weight = false;
  PlanFlags plan;
};

// Tensors at made-up addresses that do not overlap.
class Shapes {
 public:
  explicit Shapes(DeviceKind device) : device_(device) {}
  Tensor make(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = make_tensor(reinterpret_cast<void*>(next_), dtype, shape, device_);
    double bytes = static_cast<double>(size_of(dtype));
    for (const int64_t extent : shape) bytes *= static_cast<double>(extent);
    require(bytes < 0x1p58, ErrorKind::usage, "shape {}: more bytes than 64 bits can count",
            io::shape_text(t));
    next_ += (static_cast<uintptr_t>(bytes) / 4096 + 2) * 4096;
    return t;
  }

 private:
  DeviceKind device_;
  uintptr_t next_ = 4096;
};

LinearCrossEntropyProblem problem_of(const Flags& f, const LinearCrossEntropyOptions& options) {
  const DType dtype = parse_dtype(f.dtype), wide = dtype == DType::f64 ? DType::f64 : DType::f32;
  Shapes s(f.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu);
  const int64_t n = f.shape.tokens, d = f.shape.hidden, v = f.shape.vocab;
  LinearCrossEntropyInputs in;
  in.hidden = s.make(dtype, {n, d});
  in.weight = s.make(dtype, {v, d});
  in.targets = s.make(DType::i64, {n});
  if (f.bias) in.bias = s.make(dtype, {v});
  if (f.class_weight) in.class_weight = s.make(DType::f32, {v});
  if (f.token_weight) in.token_weight = s.make(DType::f32, {n});
  const Wanted w = parse_outputs(f.outputs);
  LinearCrossEntropyOutputs out;
  if (w.loss && options.reduction == Reduction::none) out.loss = s.make(wide, {n});
  if (w.loss && options.reduction != Reduction::none) out.loss = s.make(wide, {});
  if (w.lse) out.lse = s.make(wide, {n});
  if (w.target_logprob) out.target_logprob = s.make(wide, {n});
  if (w.entropy) out.entropy = s.make(wide, {n});
  if (w.argmax) out.argmax = s.make(DType::i64, {n});
  if (w.accuracy) out.accuracy = s.make(wide, {});
  if (w.top_k > 0) out.topk_values = s.make(wide, {n, w.top_k});
  if (w.dx) out.dx = s.make(dtype, {n, d});
  if (w.dw) out.dw = s.make(dtype, {v, d});
  if (w.db) out.db = s.make(dtype, {v});
  return describe(in, out, options);
}

void run(Context& context, const Flags& f) {
  const LinearCrossEntropyOptions options = f.options.options();
  const LinearCrossEntropyProblem problem = problem_of(f, options);
  if (f.plan.ranks > 1) return explain_ranks(context, f.plan, problem);
  const LaneChoices choices =
      ask_lanes(linear_cross_entropy_lanes(), options.lane, [&](const std::string& lane) {
        LinearCrossEntropyProblem named = problem;
        named.options.lane = lane;
        return explain(named);
      });
  const double logits = static_cast<double>(problem.tokens) * static_cast<double>(problem.vocab) *
                        static_cast<double>(size_of(problem.hidden_dtype));
  const auto title = [&](const std::string& flops) {
    return fmt::format(
        "{} tokens, hidden {}, vocabulary {}, {} on {}: {} flops; unfused logits would take {} and "
        "their gradient as much",
        grouped(problem.tokens), grouped(problem.hidden), grouped(problem.vocab), f.dtype, f.device,
        flops, human_bytes(static_cast<int64_t>(logits)));
  };
  print_choices(context, {{"operator", "linear_cross_entropy"}}, title, choices);
}

}  // namespace

void register_explain(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub =
      add_subcommand(app, context,
                     {"explain", "which lane a problem would take, why, and what it would cost",
                      "talea explain --tokens 8192 --hidden 4096 --vocab 128256", ""});
  f->shape.add(*sub);
  sub->add_option("--dtype", f->dtype, "fp32, bf16, fp16 or fp64")->capture_default_str();
  sub->add_option("--device", f->device, "where the tensors lie")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  sub->add_option("--outputs", f->outputs, "as of loss")->capture_default_str();
  sub->add_flag("--bias", f->bias, "with a bias");
  sub->add_flag("--class-weight", f->class_weight, "with class weights");
  sub->add_flag("--token-weight", f->token_weight, "with token weights");
  f->options.add(*sub, false);
  f->plan.add(*sub);
  sub->callback([f, sub, &context] {
    check_unread_options(context, *sub, parse_outputs(f->outputs), f->options.values.reduction);
    f->plan.refuse_unread_rates(*sub);
    blame_flags([&] { run(context, *f); });
  });
}

}  // namespace talea::cli
