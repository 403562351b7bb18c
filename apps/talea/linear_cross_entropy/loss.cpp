// What: `talea loss`: the operator on the user's own tensors, to tensors and a receipt.
// Why: the main job: from files to files, with everything that happened on record.
// Never: writes anything before the call has succeeded.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "call.hpp"
#include "core/fail.hpp"
#include "core/half.hpp"
#include "core/receipt.hpp"
#include "io/read_tensor.hpp"
#include "io/receipt_file.hpp"
#include "memory.hpp"
#include "on_device.hpp"
#include "ops/linear_cross_entropy/receipt.hpp"
#include "table.hpp"

namespace talea::cli {
namespace {

struct Flags {
  OptionFlags options;
  ShardFlags ranks;
  std::string hidden, weight, targets, bias, class_weight, token_weight, token_scale;
  std::string soft_ids, soft_probs, upstream, upstream_lse, upstream_entropy;
  std::string outputs = "loss", device = "auto", main_grad, out, receipt;
};

struct Read {
  LinearCrossEntropyInputs in;
  std::vector<io::HostTensor> owners;
  std::vector<InputFact> facts;
  std::vector<int64_t> hidden_shape;  // as the file has it
  int64_t sequence = -1, batch = -1;  // [S, B] of the first input that has it
};

Tensor read(Read& to, const char* name, const std::string& argument) {
  if (argument.empty()) return {};
  io::HostTensor t;
  try {
    t = io::read_tensor(argument);
  } catch (const Error& e) {
    throw Error(e.kind(), fmt::format("--{}: {}", name, e.what()));
  }
  InputFact fact{name, argument, t.view.dtype, {}, io::tensor_sha256(t.view)};
  fact.shape.assign(t.view.shape.begin(), t.view.shape.begin() + t.view.rank);
  to.facts.push_back(std::move(fact));
  to.owners.push_back(t);
  return t.view;
}

// The flag with its file, as the caller wrote them.
std::string named(const Read& r, const std::string& name) {
  for (const InputFact& fact : r.facts)
    if (fact.name == name) return fmt::format("--{} {}", name, fact.source);
  return "--" + name;
}

// [S, B, ...] as [S * B, ...]: the leading two dimensions of a tensor that lies in one piece. [B,
// S] has as many rows, each of another token: all inputs must agree.
Tensor flatten(Read& r, const char* name, const Tensor& t, int rank) {
  if (!t || t.rank != rank + 1) return t;
  require(t.contiguous(), ErrorKind::invalid_data,
          "{}: shape {} can only be flattened when it lies row by row", named(r, name),
          io::shape_text(t));
  if (r.sequence < 0) r.sequence = t.shape[0], r.batch = t.shape[1];
  require(t.shape[0] == r.sequence && t.shape[1] == r.batch, ErrorKind::invalid_data,
          "{}: shape {} beside [{}, {}] of the other tokens", named(r, name), io::shape_text(t),
          r.sequence, r.batch);
  Tensor flat = t;
  flat.rank = rank;
  flat.shape[0] = t.shape[0] * t.shape[1];
  for (int i = 1; i < rank; ++i) flat.shape[i] = t.shape[i + 1];
  for (int i = 0; i < rank; ++i) flat.stride[i] = t.stride[i + 1];
  return flat;
}

Tensor scalar_if_one(const Tensor& t, const LinearCrossEntropyOptions& options) {
  if (!t || options.reduction == Reduction::none || t.rank != 1 || t.shape[0] != 1) return t;
  Tensor scalar = t;
  scalar.rank = 0;
  return scalar;
}

Read read_inputs(const Flags& f, const LinearCrossEntropyOptions& options) {
  Read r;
  const Tensor hidden = read(r, "hidden", f.hidden);
  r.hidden_shape.assign(hidden.shape.begin(), hidden.shape.begin() + hidden.rank);
  r.in.hidden = flatten(r, "hidden", hidden, 2);
  r.in.weight = read(r, "weight", f.weight);
  r.in.targets = flatten(r, "targets", read(r, "targets", f.targets), 1);
  r.in.bias = read(r, "bias", f.bias);
  r.in.class_weight = read(r, "class-weight", f.class_weight);
  r.in.token_weight = flatten(r, "token-weight", read(r, "token-weight", f.token_weight), 1);
  r.in.token_scale = flatten(r, "token-scale", read(r, "token-scale", f.token_scale), 1);
  r.in.soft_target_ids = flatten(r, "soft-target-ids", read(r, "soft-target-ids", f.soft_ids), 2);
  r.in.soft_target_probs =
      flatten(r, "soft-target-probs", read(r, "soft-target-probs", f.soft_probs), 2);
  r.in.upstream =
      scalar_if_one(flatten(r, "upstream", read(r, "upstream", f.upstream), 1), options);
  r.in.upstream_lse = flatten(r, "upstream-lse", read(r, "upstream-lse", f.upstream_lse), 1);
  r.in.upstream_entropy =
      flatten(r, "upstream-entropy", read(r, "upstream-entropy", f.upstream_entropy), 1);
  return r;
}

// A gradient of an output enters dX, dW and db alone.
void check_upstream(const Flags& f, const Wanted& wanted) {
  for (const auto& [flag, file] :
       {std::pair("--upstream", &f.upstream), std::pair("--upstream-lse", &f.upstream_lse),
        std::pair("--upstream-entropy", &f.upstream_entropy)})
    require(file->empty() || wanted.dx || wanted.dw || wanted.db, ErrorKind::usage,
            "{} {}: needs dx, dw or db among --outputs", flag, *file);
}

void check_files(const Flags& f) {
  require(f.out.empty() || f.out.ends_with(".safetensors") || f.out.starts_with("/dev/"),
          ErrorKind::usage, "--out {}: the outputs are written as .safetensors", f.out);
  std::vector<std::string> read = {
      f.hidden,       f.weight,           f.targets,  f.bias,       f.class_weight,
      f.token_weight, f.token_scale,      f.soft_ids, f.soft_probs, f.upstream,
      f.upstream_lse, f.upstream_entropy, f.main_grad};
  require_other_file("--out", f.out, read);
  read.push_back(f.out);
  require_other_file("--receipt", f.receipt, read);
}

// The fp32 sum that dW is added to: the shape of the weight, row by row.
Tensor read_main_grad(const Flags& f, const Wanted& wanted, Read& r) {
  if (f.main_grad.empty()) return {};
  require(wanted.dw, ErrorKind::usage, "--main-grad {}: needs dw among --outputs", f.main_grad);
  const Tensor sum = read(r, "main-grad", f.main_grad), &w = r.in.weight;
  require(sum.dtype == DType::f32, ErrorKind::invalid_data, "{}: {} where fp32 is needed",
          named(r, "main-grad"), name_of(sum.dtype));
  require(sum.rank == 2 && sum.shape[0] == w.shape[0] && sum.shape[1] == w.shape[1],
          ErrorKind::invalid_data, "{}: shape {} where the weight has {}", named(r, "main-grad"),
          io::shape_text(sum), io::shape_text(w));
  require(sum.contiguous(), ErrorKind::invalid_data, "{}: shape {} must lie row by row",
          named(r, "main-grad"), io::shape_text(sum));
  return sum;
}

double l2(const Tensor& t) {
  double sum = 0;
  for (int64_t i = 0; i < t.elements(); ++i) {
    const double v = load_element(t.data, t.dtype, i);
    sum += v * v;
  }
  return std::sqrt(sum);
}

lce::CallFacts call_facts(const MeasuredCall& call, const Read& read, const HostOutputs& out,
                          const ShardWorld& world, const Device& device) {
  lce::CallFacts facts;
  facts.problem = call.problem;
  facts.result = call.result;
  if (read.hidden_shape.size() == 3) facts.layout = "[S,B,D]";
  if (world.size() > 1) {
    facts.layout += fmt::format(", logits [{},V/{}]",
                                facts.layout.substr(1, facts.layout.size() - 4), world.size());
    add_ranks(world, call.ranks, facts);
  }
  facts.inputs = read.facts;
  facts.measured_peak_extra_bytes = call.peak_extra_bytes;
  if (device.session)
    facts.measured_by =
        "the workspace given, and the device's free memory before and after the call";
  else if (memory_is_measured())
    facts.measured_by = "every heap allocation of the process counted";
  facts.full_logits_measured = call.full_logits_excluded() || call.result.full_logits_tensor;
  facts.time = time_stats({call.ms});
  for (const io::NamedTensor& t : out.named)
    if (t.tensor.rank == 0)
      facts.values.emplace_back(t.name, load_element(t.tensor.data, t.tensor.dtype, 0));
  return facts;
}

MeasuredCall call_with_files(const Read& read, const lce::ShardedCall& call,
                             const ShardWorld& world, Device& device) try {
  if (device.session) return call_on_device(device, call.in, call.out, call.options);
  return measured_call(call, world);
} catch (const Error& error) {
  std::vector<GivenFile> given;
  for (const InputFact& input : read.facts) {
    std::string name = input.name;
    std::replace(name.begin(), name.end(), '-', '_');
    given.push_back({name, "--" + input.name, input.source});
  }
  throw with_file(error, given);
}

std::string logits_line(const MeasuredCall& call) {
  if (call.result.full_logits_tensor) return "a full [tokens, vocab] tensor existed";
  return call.full_logits_excluded()
             ? "no full [tokens, vocab] tensor existed (measured)"
             : "no full tensor by the lane's own account (too small a problem to measure)";
}

void print_people(const Flags& f, const MeasuredCall& call, const HostOutputs& out) {
  const auto& r = call.result;
  Table table({"output", "dtype", "shape", ">value"});
  for (const io::NamedTensor& t : out.named)
    table.row({t.name, name_of(t.tensor.dtype), io::shape_text(t.tensor),
               t.tensor.rank == 0
                   ? fmt::format("{:.9g}", load_element(t.tensor.data, t.tensor.dtype, 0))
               : is_floating(t.tensor.dtype) ? fmt::format("|.| {:.6g}", l2(t.tensor))
                                             : ""});
  table.print();
  fmt::print("\n");
  Facts facts;
  facts.add("lane", fmt::format("{} ({})", r.lane, r.lane_kind));
  for (const LaneDecline& d : r.declined)
    facts.add("declined", fmt::format("{}: {}", d.lane, d.reason));
  for (size_t rank = 0; rank < call.ranks.size(); ++rank)
    facts.add(fmt::format("rank {}", rank),
              fmt::format("vocabulary rows [{}, {}), {} targets, {}", call.ranks[rank].begin,
                          call.ranks[rank].end, grouped(call.ranks[rank].targets_in_partition),
                          human_ms(call.ranks[rank].ms)));
  facts.add("tokens",
            fmt::format("{} valid, {} ignored, denominator {:.9g}", grouped(r.valid_tokens),
                        grouped(r.ignored_tokens), r.denominator));
  facts.add("logits", logits_line(call));
  facts.add("memory", fmt::format("{} measured, {} declared", human_bytes(call.peak_extra_bytes),
                                  human_bytes(r.workspace_bytes)));
  facts.add("time", human_ms(call.ms));
  if (!f.out.empty()) facts.add("tensors", f.out);
  if (!f.receipt.empty()) facts.add("receipt", f.receipt);
  facts.print();
}

void run(Context& context, const Flags& f) {
  const LinearCrossEntropyOptions options = f.options.options();
  Wanted wanted = parse_outputs(f.outputs);
  check_files(f);
  check_upstream(f, wanted);
  const ShardWorld world(f.ranks);
  Device device = open_device(f.device, options.lane);
  require(!device.session || world.size() == 1, ErrorKind::usage,
          "--ranks {}: on the host only; over GPUs, ranks are processes of your own", world.size());
  Provenance provenance = provenance_of(context);
  if (device.session)
    provenance.device = device_provenance(*device.session, {device.session->clocks()});
  Receipt receipt(ReceiptKind::loss, provenance);
  Read read = read_inputs(f, options);
  require(read.in.hidden.rank == 2 && read.in.weight.rank == 2, ErrorKind::invalid_data,
          "{}: shape {} where two dimensions are needed",
          named(read, read.in.hidden.rank == 2 ? "weight" : "hidden"),
          io::shape_text(read.in.hidden.rank == 2 ? read.in.weight : read.in.hidden));
  wanted.main_grad = read_main_grad(f, wanted, read);
  log_inputs(context, read.facts);
  const HostOutputs out = allocate_outputs(wanted, read.in, options);
  const MeasuredCall call = call_with_files(
      read, {read.in, out.views, options, f.ranks.sequence_parallel}, world, device);
  check_interrupt();
  if (!world.speaks()) return;
  receipt.call(lce::call_json(call_facts(call, read, out, world, device)))
      .verdict(Verdict::not_checked);
  if (!f.out.empty()) {
    std::vector<io::NamedTensor> shaped = out.named;
    for (io::NamedTensor& t : shaped)
      if (t.name == "dx" && read.hidden_shape.size() == 3)
        t.tensor = make_tensor(t.tensor.data, t.tensor.dtype,
                               {read.hidden_shape[0], read.hidden_shape[1], read.hidden_shape[2]});
    io::write_safetensors(f.out, shaped);
  }
  if (!f.receipt.empty()) io::write_receipt(f.receipt, receipt);
  if (!context.machine()) return print_people(f, call, out);
  const std::string text = receipt.text();
  fmt::print("{}\n", context.jsonl ? nlohmann::json::parse(text).dump() : text);
}

}  // namespace

void register_loss(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(
      app, context,
      {"loss", "the operator on your own tensors (.npy, .safetensors, FILE:KEY)",
       "talea loss --hidden x.npy --weight w.safetensors:lm_head.weight --targets y.npy \\\n"
       "              --outputs loss,dx,dw --out gradients.safetensors --receipt loss.json",
       ""});
  sub->add_option("--hidden", f->hidden, "[tokens, hidden] or [S, B, hidden]")->required();
  sub->add_option("--weight", f->weight, "[vocab, hidden]")->required();
  sub->add_option("--targets", f->targets, "[tokens] int32 or int64");
  sub->add_option("--bias", f->bias, "[vocab]");
  sub->add_option("--class-weight", f->class_weight, "[vocab] fp32");
  sub->add_option("--token-weight", f->token_weight, "[tokens] fp32");
  sub->add_option("--token-scale", f->token_scale, "[tokens] fp32: logit scale per token");
  sub->add_option("--soft-target-ids", f->soft_ids, "[tokens, k]");
  sub->add_option("--soft-target-probs", f->soft_probs, "[tokens, k], or dense [tokens, vocab]");
  sub->add_option("--upstream", f->upstream, "gradient of the loss: scalar or [tokens]");
  sub->add_option("--upstream-lse", f->upstream_lse, "[tokens] gradient of lse");
  sub->add_option("--upstream-entropy", f->upstream_entropy, "[tokens] gradient of entropy");
  f->options.add(*sub, true);
  f->ranks.add(*sub);
  f->ranks.add_dx_sum(*sub);
  sub->add_option("--outputs", f->outputs,
                  "loss,lse,target_logprob,entropy,argmax,accuracy,topk:K,dx,dw,db")
      ->capture_default_str();
  sub->add_option("--device", f->device,
                  "where the call runs: cpu, cuda or cuda:1; auto: where the lane named does")
      ->capture_default_str();
  sub->add_option("--main-grad", f->main_grad,
                  "[vocab, hidden] fp32: dw is this sum plus the gradient of the weight");
  sub->add_option("--out", f->out, "write the outputs, .safetensors");
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  sub->callback([f, sub, &context] {
    check_unread_options(context, *sub, parse_outputs(f->outputs), f->options.values.reduction);
    if (f->targets.empty())
      note_unread(context, *sub, {"--ignore-index", "--target-check"}, "needs --targets");
    run(context, *f);
  });
}

}  // namespace talea::cli
