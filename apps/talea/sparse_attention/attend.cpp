// What: `talea attend`: sparse attention on the user's own tensors, forward and backward.
// Why: from files to files, with everything that happened on record.
// Never: writes anything before the call has succeeded.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "../memory.hpp"
#include "../table.hpp"
#include "core/fail.hpp"
#include "files.hpp"
#include "io/receipt_file.hpp"
#include "io/safetensors.hpp"
#include "shares.hpp"

namespace talea::cli {
namespace {

constexpr FileFlag<sa::Inputs> file_flags[] = {
    {"q", "[B, S, H, D]; B may be missing", &sa::Inputs::q},
    {"kv", "[B, S_kv, G, D]; B and G may be missing; paged: [pages, rows, ...]", &sa::Inputs::kv},
    {"indices", "[B, S, G, K] int32 or int64; -1 is absent", &sa::Inputs::indices},
    {"q-scale", "fp32 of e4m3 q: scalar, [S] or [S, H]", &sa::Inputs::q_scale},
    {"kv-scale", "fp32 of fp8_scaled: scalar, [S_kv] or [S_kv, ceil(D / 128)]",
     &sa::Inputs::kv_scale},
    {"topk-length", "[B, S] or [B] int32: slots behind it are absent", &sa::Inputs::topk_length},
    {"sink", "[H] fp32: a logit without a value", &sa::Inputs::sink},
    {"cu-seqlens-q", "[n + 1] int32, with --layout thd", &sa::Inputs::cu_seqlens_q},
    {"cu-seqlens-k", "[n + 1] int32, with --layout thd", &sa::Inputs::cu_seqlens_k},
    {"q-positions", "[B, S] int32, for --causal", &sa::Inputs::q_positions},
    {"block-table", "[B, blocks] int32: pages of a sequence", &sa::Inputs::block_table},
    {"kv-lengths", "[B] int32: keys of a sequence of a paged kv", &sa::Inputs::kv_lengths},
    {"upstream", "as o: its gradient; asks for backward", &sa::Inputs::d_o},
    {"upstream-lse", "[B, S, H] fp32: gradient of lse", &sa::Inputs::d_lse}};
// Tensors of a token, which --layout sbhd turns, and the least rank at which they have a B; the
// others keep their order.
struct PerToken {
  Tensor sa::Inputs::*member;
  int least_rank;
};
constexpr PerToken per_token[] = {{&sa::Inputs::indices, 3},     {&sa::Inputs::q_scale, 2},
                                  {&sa::Inputs::topk_length, 2}, {&sa::Inputs::q_positions, 2},
                                  {&sa::Inputs::d_o, 4},         {&sa::Inputs::d_lse, 3}};
constexpr PerToken per_key[] = {{&sa::Inputs::kv, 3}, {&sa::Inputs::kv_scale, 2}};
const std::vector<std::string> output_names = {"o",  "lse", "row_max", "o_residual",
                                               "dq", "dkv", "d_sink"};

struct Flags {
  FileFlags<sa::Inputs, std::size(file_flags)> files{file_flags};
  CutFlags cut;
  int64_t value_dim = 0, q_position_base = 0;
  std::string scale, layout = "bshd", index_space = "rows", index_check = "ignore";
  std::string kv_storage = "plain", fp8_path = "any", dkv_sum = "deterministic";
  std::string operands = "native", out_dtype = "input", lane = "auto", workspace_limit = "256MiB";
  std::string outputs, main_grad, out, receipt;
  bool causal = false;
  int threads = 0;

  bool given(Tensor sa::Inputs::*file) const { return !files.argument(file).empty(); }
  bool backward() const { return given(&sa::Inputs::d_o) || given(&sa::Inputs::d_lse); }
};

sa::Options options_of(const Flags& f) {
  sa::Options o;
  o.value_dim = f.value_dim;
  if (!f.scale.empty()) o.scale = parse_number("--scale", f.scale);
  o.causal = f.causal;
  o.q_position_base = f.q_position_base;
  o.index_space = choice<sa::IndexSpace>(f.index_space, {"rows", "sequence", "slots"});
  o.index_check = choice<sa::IndexCheck>(f.index_check, {"ignore", "report", "checked"});
  o.kv_storage = choice<sa::KvStorage>(f.kv_storage, {"plain", "fp8_scaled", "fp8_656"});
  o.fp8_path = choice<sa::Fp8Path>(f.fp8_path, {"any", "in_kernel"});
  o.dkv_sum = choice<sa::DkvSum>(f.dkv_sum, {"deterministic", "atomic"});
  o.operands = choice<sa::Operands>(f.operands, {"native", "split"});
  o.threads = f.threads;
  o.lane = f.lane;
  o.workspace_limit_bytes = parse_bytes("--workspace-limit", f.workspace_limit);
  return o;
}

bool has(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// What is asked for; without --outputs all that the inputs allow.
std::vector<std::string> outputs_of(const Flags& f) {
  if (f.outputs.empty()) {
    std::vector<std::string> all = {"o", "lse"};
    if (f.backward()) all.insert(all.end(), {"dq", "dkv"});
    if (f.backward() && f.given(&sa::Inputs::sink)) all.emplace_back("d_sink");
    return all;
  }
  const std::vector<std::string> names = parse_names("--outputs", f.outputs, output_names);
  const bool gradients = has(names, "dq") || has(names, "dkv") || has(names, "d_sink");
  require(!gradients || f.backward(), ErrorKind::usage,
          "--outputs {}: a gradient needs --upstream or --upstream-lse", f.outputs);
  require(gradients || !f.backward(), ErrorKind::usage,
          "--upstream {}: needs dq, dkv or d_sink among --outputs",
          f.files.argument(f.given(&sa::Inputs::d_o) ? &sa::Inputs::d_o : &sa::Inputs::d_lse));
  require(!has(names, "d_sink") || f.given(&sa::Inputs::sink), ErrorKind::usage,
          "--outputs d_sink: needs --sink");
  return names;
}

std::vector<std::string> wanted_of(const Flags& f) {
  std::vector<std::string> names = outputs_of(f);
  require(f.main_grad.empty() || has(names, "dkv"), ErrorKind::usage,
          "--main-grad {}: needs --upstream, and dkv among --outputs", f.main_grad);
  // With dkv the lanes say so themselves.
  require(
      f.dkv_sum == "deterministic" || has(names, "dkv"), ErrorKind::unavailable,
      "--dkv-sum {}: the lanes of this host sum in a fixed order only; needs --upstream, and dkv "
      "among --outputs",
      f.dkv_sum);
  return names;
}

void check_flags(const Flags& f) {
  require(f.out.empty() || f.out.ends_with(".safetensors") || f.out.starts_with("/dev/"),
          ErrorKind::usage, "--out {}: the outputs are written as .safetensors", f.out);
  std::vector<std::string> read = f.files.arguments();
  read.push_back(f.main_grad);
  require_other_file("--out", f.out, read);
  read.push_back(f.out);
  require_other_file("--receipt", f.receipt, read);
  require_causal(f.causal, {{"q-positions", f.given(&sa::Inputs::q_positions)},
                            {"q-position-base", f.q_position_base != 0}});
  const bool sequences = f.given(&sa::Inputs::cu_seqlens_q) && f.given(&sa::Inputs::cu_seqlens_k);
  require((f.layout == "thd") == sequences, ErrorKind::usage, "--layout {}: {}", f.layout,
          sequences ? "--cu-seqlens-q and --cu-seqlens-k mean --layout thd"
                    : "thd needs --cu-seqlens-q and --cu-seqlens-k");
  f.cut.check();
}

// Whether --layout sbhd turns what has a row for each key: pages of a cache are no sequence.
bool turns_keys(const Flags& f) {
  return f.layout == "sbhd" && !f.given(&sa::Inputs::block_table) && f.index_space != "slots";
}

// As [B, S, ...], in a layout of [S, B, ...] and a batch of so many; B may be missing where it
// is 1.
Tensor batch_first(const Tensor& t, int least_rank, int64_t batch) {
  return t.rank < least_rank || (batch == 1 && t.shape[1] != 1) ? t : swapped(t);
}

// The inputs of the files, in the order [B, S, ...].
sa::Inputs read_inputs(const Flags& f, TensorFiles& files) {
  sa::Inputs in = f.files.read(files);
  require(in.q.rank == 3 || in.q.rank == 4, ErrorKind::invalid_data,
          "--q {}: shape {} where [B, S, H, D] or [S, H, D] is needed",
          f.files.argument(&sa::Inputs::q), io::shape_text(in.q));
  require(f.value_dim >= 1 && f.value_dim <= in.q.shape[static_cast<size_t>(in.q.rank - 1)],
          ErrorKind::usage, "--value-dim {}: must lie in [1, {}], the columns of --q {}",
          f.value_dim, in.q.shape[static_cast<size_t>(in.q.rank - 1)],
          f.files.argument(&sa::Inputs::q));
  if (f.layout != "sbhd") return in;
  require(in.q.rank == 4, ErrorKind::invalid_data,
          "--q {}: shape {} where --layout sbhd needs [S, B, H, D]",
          f.files.argument(&sa::Inputs::q), io::shape_text(in.q));
  in.q = swapped(in.q);
  for (const PerToken& t : per_token)
    in.*t.member = batch_first(in.*t.member, t.least_rank, in.q.shape[0]);
  if (turns_keys(f))
    for (const PerToken& t : per_key)
      in.*t.member = batch_first(in.*t.member, t.least_rank, in.q.shape[0]);
  return in;
}

// Outputs under their names, as the file lays them out and as the call sees them.
struct Made {
  sa::Outputs views;
  std::vector<io::NamedTensor> named;
  std::vector<io::HostTensor> owners;
};

struct Allocator {
  Made& made;
  const Flags& f;
  const std::vector<std::string>& wanted;

  // `shape` in the order of the call; per-token tensors lie as --layout has them.
  Tensor operator()(const char* name, DType dtype, std::vector<int64_t> shape, bool token) {
    const bool turned = token && f.layout == "sbhd" && shape.size() >= 2;
    if (turned) std::swap(shape[0], shape[1]);
    made.owners.push_back(io::allocate_tensor(dtype, shape));
    const Tensor view = made.owners.back().view;
    if (has(wanted, name)) made.named.push_back({name, view});
    return turned ? swapped(view) : view;
  }
};

std::vector<int64_t> shape_of(const Tensor& t) {
  return {t.shape.begin(), t.shape.begin() + t.rank};
}

DType narrow_of(const Tensor& t) { return t.dtype == DType::f8_e4m3 ? DType::bf16 : t.dtype; }

Tensor read_main_grad(const Flags& f, TensorFiles& files, const Tensor& kv) {
  if (f.main_grad.empty()) return {};
  Tensor sum = files.read("main-grad", f.main_grad);
  require(sum.dtype == DType::f32, ErrorKind::invalid_data,
          "--main-grad {}: {} where fp32 is needed", f.main_grad, name_of(sum.dtype));
  if (turns_keys(f) && sum.rank >= 3) sum = swapped(sum);
  require(shape_of(sum) == shape_of(kv), ErrorKind::invalid_data,
          "--main-grad {}: shape {} where kv has {}", f.main_grad, io::shape_text(sum),
          io::shape_text(kv));
  return sum;
}

Made allocate(const Flags& f, const std::vector<std::string>& wanted, const sa::Inputs& in,
              const Tensor& main_grad) {
  Made made;
  Allocator add{made, f, wanted};
  sa::Outputs& v = made.views;
  const bool wide = f.out_dtype == "fp32";
  const DType o = wide ? DType::f32 : narrow_of(in.q);
  std::vector<int64_t> rows = shape_of(in.q), values = rows;
  rows.pop_back();
  values.back() = f.value_dim;
  const bool backward = f.backward();
  const bool residual =
      has(wanted, "o_residual") || (backward && f.operands == "split" && is_16bit(o));
  if (has(wanted, "o") || backward) v.o = add("o", o, values, true);
  if (has(wanted, "lse") || backward) v.lse = add("lse", DType::f32, rows, true);
  if (has(wanted, "row_max")) v.row_max = add("row_max", DType::f32, rows, true);
  if (residual) v.o_residual = add("o_residual", o, values, true);
  if (has(wanted, "dq"))
    v.dq = add("dq", wide ? DType::f32 : narrow_of(in.q), shape_of(in.q), true);
  if (has(wanted, "dkv")) {
    const bool plain = is_floating(in.kv.dtype) && in.kv.dtype != DType::f8_e4m3;
    const DType kind = wide || main_grad || !plain ? DType::f32 : in.kv.dtype;
    v.dkv = add("dkv", kind, shape_of(in.kv), turns_keys(f) && in.kv.rank >= 3);
    if (main_grad) copy_elements(main_grad, v.dkv);
    v.accumulate_dkv = main_grad.present;
  }
  if (has(wanted, "d_sink")) v.d_sink = add("d_sink", DType::f32, shape_of(in.sink), false);
  v.status = add("status", DType::i64, {4}, false);
  const int64_t fresh[] = {0, -1, 0, 0};
  std::copy(std::begin(fresh), std::end(fresh), static_cast<int64_t*>(v.status.data));
  return made;
}

sa::CallFacts facts_of(const PassDone& done, const Flags& f, const TensorFiles& files,
                       const std::vector<std::string>& wanted, const RankWorld& world) {
  sa::CallFacts facts;
  facts.problem = done.problem;
  facts.result = done.result;
  facts.layout = f.layout;
  facts.inputs = files.facts();
  facts.outputs = wanted;
  if (world.size() > 1) facts.cut = f.cut.cut, facts.collective = world.engine();
  facts.shares = done.shares;
  facts.measured_peak_extra_bytes = done.peak_extra_bytes;
  if (memory_is_measured()) facts.measured_by = "every heap allocation of the process counted";
  facts.time = time_stats({done.ms});
  return facts;
}

void print_people(const Flags& f, const std::vector<PassDone>& passes, const Made& made) {
  Table table({"output", "dtype", "shape", ">|.|"});
  for (const io::NamedTensor& t : made.named)
    table.row({t.name, name_of(t.tensor.dtype), io::shape_text(t.tensor),
               fmt::format("{:.6g}", l2_norm(t.tensor))});
  table.print();
  fmt::print("\n");
  Facts facts;
  for (const PassDone& done : passes) {
    const sa::Result& r = done.result;
    facts.add("pass", fmt::format("{}: lane {} ({}), {}", sa::name_of(r.pass), r.lane, r.lane_kind,
                                  human_ms(done.ms)));
    for (const LaneDecline& d : r.declined)
      facts.add("declined", fmt::format("{}: {}", d.lane, d.reason));
    for (const std::string& note : r.notes) facts.add("note", note);
    for (const sa::ShareFact& s : done.shares)
      facts.add(fmt::format("rank {}", s.rank),
                fmt::format("{} [{}, {}), {}", f.cut.cut == "heads" ? "heads" : "queries", s.begin,
                            s.end, human_ms(s.ms)));
    facts.add("memory", fmt::format("{} measured, {} declared", human_bytes(done.peak_extra_bytes),
                                    human_bytes(r.workspace_bytes)));
  }
  const sa::Result& first = passes.front().result;
  facts.add("slots", fmt::format("{} given, {} valid, {} absent", grouped(first.slots_given),
                                 grouped(first.slots_valid), grouped(first.slots_absent)));
  if (first.slots_foreign > 0)
    facts.add("foreign",
              fmt::format("{} indices; the first in slot {} is {}", grouped(first.slots_foreign),
                          first.first_foreign_slot, first.first_foreign_value));
  if (!f.out.empty()) facts.add("tensors", f.out);
  if (!f.receipt.empty()) facts.add("receipt", f.receipt);
  facts.print();
}

std::vector<PassDone> run_passes(const Flags& f, const WholeAttention& whole,
                                 const TensorFiles& files, const RankWorld& world) try {
  WholeAttention ahead = whole;
  ahead.in.d_o = ahead.in.d_lse = {};
  ahead.out.dq = ahead.out.dkv = ahead.out.d_sink = {};
  ahead.out.accumulate_dkv = false;
  WholeAttention behind = whole;
  behind.pass = sa::Pass::backward;
  behind.in.o = whole.out.o;
  behind.in.lse = whole.out.lse;
  behind.in.o_residual = whole.out.o_residual;
  behind.out.o = behind.out.o_residual = behind.out.lse = behind.out.row_max = {};
  behind.out.status = {};  // counted once
  if (f.backward())
    require_limit(whole.options.workspace_limit_bytes,
                  {least_limit(ahead, f.cut.cut, world), least_limit(behind, f.cut.cut, world)});
  if (world.size() > 1) check_indices(ahead);
  std::vector<PassDone> passes = {run_pass(ahead, f.cut.cut, world)};
  check_interrupt();
  if (f.backward()) passes.push_back(run_pass(behind, f.cut.cut, world));
  return passes;
} catch (const Error& error) {
  throw with_file(error, files.given());
}

void run(Context& context, const Flags& f) {
  const sa::Options options = options_of(f);
  const std::vector<std::string> wanted = wanted_of(f);
  check_flags(f);
  const RankWorld world(f.cut.ranks);
  Receipt receipt(ReceiptKind::attend, provenance_of(context));
  TensorFiles files;
  const sa::Inputs in = read_inputs(f, files);
  const Tensor main_grad = read_main_grad(f, files, in.kv);
  log_inputs(context, files.facts());
  const Made made = allocate(f, wanted, in, main_grad);
  const std::vector<PassDone> passes = run_passes(f, {in, made.views, options}, files, world);
  check_interrupt();
  if (world.speaks()) {
    for (const PassDone& done : passes)
      receipt.call(sa::call_json(facts_of(done, f, files, wanted, world)));
    receipt.title("Sparse attention").verdict(Verdict::not_checked);
    if (!f.out.empty()) io::write_safetensors(f.out, made.named);
    if (!f.receipt.empty()) io::write_receipt(f.receipt, receipt);
    if (!context.machine()) print_people(f, passes, made);
    const std::string text = receipt.text();
    if (context.machine())
      fmt::print("{}\n", context.jsonl ? nlohmann::json::parse(text).dump() : text);
  }
  const sa::Result& first = passes.front().result;
  require(options.index_check != sa::IndexCheck::report || first.slots_foreign <= 0,
          ErrorKind::invalid_data,
          "--indices {}: {} foreign indices; the first, in flat slot {}, is {}",
          f.files.argument(&sa::Inputs::indices), first.slots_foreign, first.first_foreign_slot,
          first.first_foreign_value);
}

}  // namespace

void register_attend(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(
      app, context,
      {"attend", "sparse attention on your own tensors, forward and backward",
       "talea attend --q q.npy --kv kv.npy --indices i.npy --value-dim 512 --upstream do.npy \\\n"
       "                --out gradients.safetensors --receipt attend.json",
       "", " (a foreign index under report or checked)"});
  f->files.add(*sub);
  for (const char* name : {"--q", "--kv", "--indices"}) sub->get_option(name)->required();
  sub->add_option("--value-dim", f->value_dim, "columns of a row that are its value")->required();
  sub->add_option("--scale", f->scale, "of the logits; default, and 0: D^-1/2");
  sub->add_flag("--causal", f->causal, "key position <= query position");
  sub->add_option("--q-position-base", f->q_position_base, "position of the first query")
      ->capture_default_str();
  const auto pick = [&](const char* flag, std::string& to, std::vector<std::string> names,
                        const char* help) {
    sub->add_option(flag, to, help)->check(CLI::IsMember(std::move(names)))->capture_default_str();
  };
  pick("--layout", f->layout, {"bshd", "sbhd", "thd"}, "of the tensors of a token");
  pick("--index-space", f->index_space, {"rows", "sequence", "slots"}, "what an index counts");
  pick("--index-check", f->index_check, {"ignore", "report", "checked"}, "of foreign indices");
  pick("--kv-storage", f->kv_storage, {"plain", "fp8_scaled", "fp8_656"}, "what lies in --kv");
  pick("--fp8-path", f->fp8_path, {"any", "in_kernel"}, "whether kv may be dequantised as a whole");
  pick("--dkv-sum", f->dkv_sum, {"deterministic", "atomic"}, "order of the sum");
  pick("--operands", f->operands, {"native", "split"}, "P and dS in 16-bit products");
  pick("--out-dtype", f->out_dtype, {"input", "fp32"}, "of o, dq and dkv");
  sub->add_option("--main-grad", f->main_grad, "as kv, fp32: dkv is this sum plus the gradient");
  sub->add_option("--lane", f->lane, "auto, or a lane by name (it runs or says why not)")
      ->capture_default_str();
  sub->add_option("--threads", f->threads, "of the cpu lanes; 0: all")->capture_default_str();
  add_isa(*sub);
  f->cut.add(*sub);
  sub->add_option("--workspace-limit", f->workspace_limit, "bytes, e.g. 64MiB")
      ->capture_default_str();
  sub->add_option("--outputs", f->outputs,
                  "o,lse,row_max,o_residual,dq,dkv,d_sink; default o,lse and, with --upstream, all "
                  "gradients");
  sub->add_option("--out", f->out, "write the outputs, .safetensors");
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  sub->callback([f, sub, &context] {
    if (f->kv_storage == "plain")
      note_unread(context, *sub, {"--fp8-path"}, "needs --kv-storage fp8_scaled or fp8_656");
    run(context, *f);
  });
}

}  // namespace talea::cli
