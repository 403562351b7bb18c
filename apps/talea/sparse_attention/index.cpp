// What: `talea index`: the selection of keys and the indexer's loss on the user's own tensors.
// Why: a trained index list is only as good as the rule that made it; both are files and a receipt.
// Never: writes anything before the call has succeeded.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "../memory.hpp"
#include "../table.hpp"
#include "core/fail.hpp"
#include "core/half.hpp"
#include "files.hpp"
#include "io/receipt_file.hpp"
#include "io/safetensors.hpp"
#include "shares.hpp"

namespace talea::cli {
namespace {

using In = sa::IndexLossInputs;
constexpr FileFlag<In> file_flags[] = {
    {"index-q", "[B, S, Hi, di]; B may be missing", &In::index_q},
    {"index-k", "[B, S_kv, di]", &In::index_k},
    {"index-weights", "[B, S, Hi] fp32 or bf16", &In::index_weights},
    {"index-q-scale", "[B, S, Hi] fp32 of e4m3", &In::index_q_scale},
    {"index-k-scale", "[B, S_kv] fp32 of e4m3", &In::index_k_scale},
    {"begin", "[B, S] int32: keys [begin, end) of a query", &In::begin},
    {"end", "[B, S] int32", &In::end},
    {"cu-seqlens-q", "[n + 1] int32", &In::cu_seqlens_q},
    {"cu-seqlens-k", "[n + 1] int32", &In::cu_seqlens_k},
    {"q-positions", "[B, S] int32, for --causal", &In::q_positions},
    {"q", "--loss: [B, S, H, D] of the attention", &In::q},
    {"kv", "--loss: [B, S_kv, D] of the attention", &In::kv},
    {"indices", "--loss sparse: [B, S, K] of an earlier selection", &In::indices},
    {"topk-length", "--loss sparse: [B, S] int32", &In::topk_length},
    {"lse", "--loss: [B, S, H] of attention over the same keys", &In::lse},
    {"row-weight", "--loss: [B, S] fp32", &In::row_weight}};
const std::vector<std::string> output_names = {
    "indices", "topk_length", "scores", "index_loss", "dindex_q", "dindex_k", "dindex_weights"};
constexpr const char* loss_only[] = {"index_loss", "dindex_q", "dindex_k", "dindex_weights"};

struct Flags {
  FileFlags<In, std::size(file_flags)> files{file_flags};
  CutFlags cut;
  int64_t top_k = -1;  // below 0: not given
  int64_t q_position_base = 0, key_stride = 1, value_dim = 0;
  std::string act = "relu", loss, scale, denominator = "valid", scope = "local", lane = "auto";
  std::string workspace_limit = "256MiB", outputs, out, receipt;
  double coeff = 1;
  bool causal = false;
  int threads = 0;

  bool given(Tensor In::*file) const { return !files.argument(file).empty(); }
};

bool has(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

struct Wanted {
  std::vector<std::string> names;
  bool select = false;
};

Wanted wanted_of(const Flags& f) {
  Wanted w;
  std::string text = f.outputs;
  if (text.empty())
    text = f.loss.empty() ? "indices,topk_length" : "index_loss,dindex_q,dindex_k,dindex_weights";
  w.names = parse_names("--outputs", text, output_names);
  bool any = false;
  for (const char* name : loss_only) {
    any = any || has(w.names, name);
    require(!f.loss.empty() || !has(w.names, name), ErrorKind::usage,
            "--outputs {}: needs --loss sparse or --loss dense", name);
  }
  require(f.loss.empty() || any, ErrorKind::usage,
          "--loss {}: needs index_loss or a gradient among --outputs", f.loss);
  w.select = has(w.names, "indices") || has(w.names, "topk_length") || has(w.names, "scores") ||
             (f.loss == "sparse" && !f.given(&In::indices));
  require(!w.select || f.top_k >= 0, ErrorKind::usage, "--top-k: needed for a selection");
  return w;
}

// Flags of a selection where none is made, and of a list where the selection makes its own.
void check_selection_flags(const Flags& f, bool selects) {
  const bool listed = f.given(&In::indices);
  require(!f.given(&In::topk_length) || listed, ErrorKind::usage,
          "--topk-length {}: of --indices; a selection has its own",
          f.files.argument(&In::topk_length));
  if (selects) return;
  if (f.loss != "sparse") return;
  require(f.key_stride == 1, ErrorKind::usage,
          "--key-stride {}: of a selection; --loss sparse runs over --indices {}", f.key_stride,
          f.files.argument(&In::indices));
  for (const auto member : {&In::begin, &In::end})
    require(!f.given(member), ErrorKind::usage,
            "--{} {}: of a selection; --loss sparse runs over --indices {}",
            f.files.spelling(member), f.files.argument(member), f.files.argument(&In::indices));
}

void check_flags(const Flags& f, bool selects) {
  require(f.out.empty() || f.out.ends_with(".safetensors") || f.out.starts_with("/dev/"),
          ErrorKind::usage, "--out {}: the outputs are written as .safetensors", f.out);
  std::vector<std::string> read = f.files.arguments();
  require_other_file("--out", f.out, read);
  read.push_back(f.out);
  require_other_file("--receipt", f.receipt, read);
  for (const auto member : {&In::q, &In::kv}) {
    require(f.loss.empty() || f.given(member), ErrorKind::usage, "--loss {}: needs --{}", f.loss,
            f.files.spelling(member));
  }
  require(f.loss.empty() || f.value_dim > 0, ErrorKind::usage, "--loss {}: needs --value-dim",
          f.loss);
  for (const auto& [name, given] :
       {std::pair{"scale", !f.scale.empty()}, std::pair{"denominator", f.denominator != "valid"},
        std::pair{"denominator-scope", f.scope != "local"}, std::pair{"coeff", f.coeff != 1},
        std::pair{"value-dim", f.value_dim != 0}})
    require(!f.loss.empty() || !given, ErrorKind::usage,
            "--{}: of the loss; needs --loss sparse or --loss dense", name);
  for (const auto member :
       {&In::q, &In::kv, &In::indices, &In::topk_length, &In::lse, &In::row_weight})
    require(!f.loss.empty() || !f.given(member), ErrorKind::usage,
            "--{} {}: of the loss; needs --loss sparse or --loss dense", f.files.spelling(member),
            f.files.argument(member));
  require(f.loss != "dense" || !f.given(&In::indices), ErrorKind::usage,
          "--indices {}: --loss dense runs over all keys in bounds",
          f.files.argument(&In::indices));
  require_causal(f.causal, {{"q-positions", f.given(&In::q_positions)},
                            {"q-position-base", f.q_position_base != 0},
                            {"key-stride", f.key_stride != 1}});
  check_selection_flags(f, selects);
  f.cut.check();
}

std::vector<int64_t> shape_of(const Tensor& t) {
  return {t.shape.begin(), t.shape.begin() + t.rank};
}

struct Made {
  sa::SelectOutputs select;
  sa::IndexLossOutputs loss;
  std::vector<io::NamedTensor> named;
  std::vector<io::HostTensor> owners;
};

Tensor make(Made& made, const char* name, DType dtype, const std::vector<int64_t>& shape,
            const std::vector<std::string>& wanted) {
  made.owners.push_back(io::allocate_tensor(dtype, shape));
  const Tensor view = made.owners.back().view;
  if (has(wanted, name)) made.named.push_back({name, view});
  return view;
}

DType gradient_dtype(const Tensor& t) { return t.dtype == DType::f8_e4m3 ? DType::f32 : t.dtype; }

Made allocate(const Flags& f, const Wanted& w, const In& in) {
  Made made;
  std::vector<int64_t> rows = shape_of(in.index_q);
  rows.resize(rows.size() - 2);
  std::vector<int64_t> slots = rows;
  slots.push_back(f.top_k);
  if (w.select) {
    made.select.indices = make(made, "indices", DType::i32, slots, w.names);
    made.select.topk_length = make(made, "topk_length", DType::i32, rows, w.names);
    if (has(w.names, "scores"))
      made.select.scores = make(made, "scores", DType::f32, slots, w.names);
  }
  if (f.loss.empty()) return made;
  const DType wide = in.index_q.dtype == DType::f64 ? DType::f64 : DType::f32;
  made.loss.loss = make(made, "index_loss", wide, {}, w.names);
  const auto gradient = [&](const char* name, const Tensor& like, Tensor& to) {
    if (has(w.names, name)) to = make(made, name, gradient_dtype(like), shape_of(like), w.names);
  };
  gradient("dindex_q", in.index_q, made.loss.dindex_q);
  gradient("dindex_k", in.index_k, made.loss.dindex_k);
  gradient("dindex_weights", in.index_weights, made.loss.dindex_weights);
  return made;
}

sa::SelectOptions select_options(const Flags& f) {
  sa::SelectOptions o;
  o.top_k = f.top_k;
  o.act = choice<sa::Activation>(f.act, {"relu", "identity"});
  o.causal = f.causal;
  o.q_position_base = f.q_position_base;
  o.key_stride = f.key_stride;
  o.threads = f.threads;
  o.lane = f.lane;
  o.workspace_limit_bytes = parse_bytes("--workspace-limit", f.workspace_limit);
  return o;
}

sa::IndexLossOptions loss_options(const Flags& f) {
  sa::IndexLossOptions o;
  o.keys = choice<sa::LossKeys>(f.loss, {"sparse", "dense"});
  o.coeff = f.coeff;
  if (f.denominator != "valid") {
    o.denominator = sa::LossDenominator::given;
    o.denominator_value = parse_number("--denominator", f.denominator);
    require(o.denominator_value > 0, ErrorKind::usage, "--denominator {}: must be > 0",
            f.denominator);
  }
  // Ranks that share out the queries divide by the rows of all of them, as one rank would.
  const bool counted = o.denominator == sa::LossDenominator::valid;
  const bool shared = f.scope == "global" || (f.cut.cut == "sequence" && counted);
  o.denominator_scope = shared ? sa::LossScope::global : sa::LossScope::local;
  o.act = choice<sa::Activation>(f.act, {"relu", "identity"});
  if (!f.scale.empty()) o.scale = parse_number("--scale", f.scale);
  o.causal = f.causal;
  o.q_position_base = f.q_position_base;
  if (o.keys == sa::LossKeys::dense) o.key_stride = f.key_stride;
  o.threads = f.threads;
  o.lane = f.lane;
  o.workspace_limit_bytes = parse_bytes("--workspace-limit", f.workspace_limit);
  return o;
}

sa::CallFacts facts_of(const PassDone& done, const Flags& f, const TensorFiles& files,
                       const Wanted& wanted, const RankWorld& world) {
  sa::CallFacts facts;
  facts.problem = done.problem;
  // The loss multiplies no values; what the attention has of them is what was asked.
  if (done.result.pass == sa::Pass::index_loss) facts.problem.value_dim = f.value_dim;
  facts.result = done.result;
  if (f.given(&In::cu_seqlens_q)) facts.layout = "thd";
  facts.inputs = files.facts();
  facts.outputs = wanted.names;
  if (world.size() > 1) facts.cut = f.cut.cut, facts.collective = world.engine();
  facts.shares = done.shares;
  facts.measured_peak_extra_bytes = done.peak_extra_bytes;
  if (memory_is_measured()) facts.measured_by = "every heap allocation of the process counted";
  facts.time = time_stats({done.ms});
  return facts;
}

std::string value_text(const Tensor& t) {
  if (t.rank == 0) return fmt::format("{:.9g}", load_element(t.data, t.dtype, 0));
  return is_floating(t.dtype) ? fmt::format("|.| {:.6g}", l2_norm(t)) : "";
}

void print_people(const Flags& f, const std::vector<PassDone>& passes, const Made& made) {
  Table table({"output", "dtype", "shape", ">value"});
  for (const io::NamedTensor& t : made.named)
    table.row({t.name, name_of(t.tensor.dtype), io::shape_text(t.tensor), value_text(t.tensor)});
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
    if (r.pass == sa::Pass::select) facts.add("rule", r.selection_rule);
    if (r.nan_scores > 0) facts.add("NaN scores", grouped(r.nan_scores));
    if (r.pass == sa::Pass::index_loss)
      facts.add("denominator", fmt::format("{:.9g} ({}, {})", r.denominator, r.denominator_kind,
                                           r.denominator_scope));
    facts.add("memory", fmt::format("{} measured, {} declared", human_bytes(done.peak_extra_bytes),
                                    human_bytes(r.workspace_bytes)));
  }
  if (!f.out.empty()) facts.add("tensors", f.out);
  if (!f.receipt.empty()) facts.add("receipt", f.receipt);
  facts.print();
}

std::vector<PassDone> run_passes(const Flags& f, const Wanted& w, In in, const Made& made,
                                 const TensorFiles& files, const RankWorld& world) try {
  const sa::SelectInputs s{in.index_q,       in.index_q_scale, in.index_k, in.index_k_scale,
                           in.index_weights, in.begin,         in.end,     in.cu_seqlens_q,
                           in.cu_seqlens_k,  in.q_positions};
  const WholeSelect select{s, made.select, select_options(f)};
  if (f.loss == "sparse" && !in.indices) {
    in.indices = made.select.indices;
    in.topk_length = made.select.topk_length;
  }
  if (f.loss == "sparse") in.begin = in.end = {};
  const bool loses = !f.loss.empty();
  const WholeIndexLoss loss{in, made.loss, loses ? loss_options(f) : sa::IndexLossOptions{}};
  if (w.select && loses)
    require_limit(loss.options.workspace_limit_bytes,
                  {least_limit(select, f.cut.cut, world), least_limit(loss, f.cut.cut, world)});
  std::vector<PassDone> passes;
  if (w.select) passes.push_back(run_pass(select, f.cut.cut, world));
  check_interrupt();
  if (loses) passes.push_back(run_pass(loss, f.cut.cut, world));
  if (f.top_k >= 0 && !w.select)
    passes.front().result.notes.push_back(
        fmt::format("--top-k {}: no output asks for a selection", f.top_k));
  return passes;
} catch (const Error& error) {
  throw with_file(error, files.given());
}

void run(Context& context, const Flags& f) {
  const Wanted wanted = wanted_of(f);
  check_flags(f, wanted.select);
  const RankWorld world(f.cut.ranks);
  Receipt receipt(ReceiptKind::index, provenance_of(context));
  TensorFiles files;
  const In in = f.files.read(files);
  require(in.index_q.rank == 3 || in.index_q.rank == 4, ErrorKind::invalid_data,
          "--index-q {}: shape {} where [B, S, Hi, di] or [S, Hi, di] is needed",
          f.files.argument(&In::index_q), io::shape_text(in.index_q));
  require(
      f.loss.empty() || f.value_dim <= in.q.shape[static_cast<size_t>(std::max(in.q.rank - 1, 0))],
      ErrorKind::usage, "--value-dim {}: --q {} has {} columns", f.value_dim,
      f.files.argument(&In::q), in.q.shape[static_cast<size_t>(std::max(in.q.rank - 1, 0))]);
  log_inputs(context, files.facts());
  const Made made = allocate(f, wanted, in);
  const std::vector<PassDone> passes = run_passes(f, wanted, in, made, files, world);
  check_interrupt();
  if (!world.speaks()) return;
  for (const PassDone& done : passes)
    receipt.call(sa::call_json(facts_of(done, f, files, wanted, world)));
  receipt.title("Index of sparse attention").verdict(Verdict::not_checked);
  if (!f.out.empty()) io::write_safetensors(f.out, made.named);
  if (!f.receipt.empty()) io::write_receipt(f.receipt, receipt);
  if (!context.machine()) return print_people(f, passes, made);
  const std::string text = receipt.text();
  fmt::print("{}\n", context.jsonl ? nlohmann::json::parse(text).dump() : text);
}

}  // namespace

void register_index(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(
      app, context,
      {"index", "the keys that an indexer selects, and the indexer's loss, on your own tensors",
       "talea index --index-q iq.npy --index-k ik.npy --index-weights iw.npy --top-k 2048 \\\n"
       "               --causal --out selected.safetensors --receipt index.json",
       ""});
  f->files.add(*sub);
  for (const char* name : {"--index-q", "--index-k", "--index-weights"})
    sub->get_option(name)->required();
  sub->add_option("--top-k", f->top_k, "slots of a query")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  sub->add_option("--act", f->act, "between product and weight")
      ->check(CLI::IsMember({"relu", "identity"}))
      ->capture_default_str();
  sub->add_flag("--causal", f->causal, "a query sees no key behind its position");
  sub->add_option("--q-position-base", f->q_position_base, "position of the first query")
      ->capture_default_str();
  sub->add_option("--key-stride", f->key_stride, "with --causal: floor((t + 1) / stride) keys")
      ->capture_default_str();
  sub->add_option("--loss", f->loss, "over the selected keys, or all in bounds")
      ->check(CLI::IsMember({"sparse", "dense"}));
  sub->add_option("--value-dim", f->value_dim, "--loss: columns of a row that are its value");
  sub->add_option("--scale", f->scale, "--loss: of the attention's logits; default, and 0: D^-1/2");
  sub->add_option("--coeff", f->coeff, "--loss: factor of the loss")->capture_default_str();
  sub->add_option("--denominator", f->denominator, "--loss: valid, or a number")
      ->capture_default_str();
  sub->add_option("--denominator-scope", f->scope, "--loss: local, or global over the ranks")
      ->check(CLI::IsMember({"local", "global"}))
      ->capture_default_str();
  sub->add_option("--lane", f->lane, "auto, or a lane by name (it runs or says why not)")
      ->capture_default_str();
  sub->add_option("--threads", f->threads, "of the cpu lanes; 0: all")->capture_default_str();
  add_isa(*sub);
  f->cut.add(*sub);
  sub->add_option("--workspace-limit", f->workspace_limit, "bytes, e.g. 64MiB")
      ->capture_default_str();
  sub->add_option("--outputs", f->outputs,
                  "indices,topk_length,scores,index_loss,dindex_q,dindex_k,dindex_weights; default "
                  "the first two, with --loss the last four");
  sub->add_option("--out", f->out, "write the outputs, .safetensors");
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  sub->callback([f, &context] { run(context, *f); });
}

}  // namespace talea::cli
