// What: `talea scan`: the Mamba-3 scan on the user's own tensors, to tensors and receipts.
// Why: the main job: from files to files, with everything that happened on record.
// Never: writes anything before the calls have succeeded.
#include <CLI/CLI.hpp>
#include <cmath>
#include <nlohmann/json.hpp>

#include "axes.hpp"
#include "call.hpp"
#include "core/fail.hpp"
#include "core/half.hpp"
#include "core/receipt.hpp"
#include "flags.hpp"
#include "io/read_tensor.hpp"
#include "io/receipt_file.hpp"
#include "memory.hpp"
#include "ops/mamba3/fields.hpp"
#include "ranks.hpp"
#include "register.hpp"
#include "table.hpp"
#include "talea/ranks.hpp"

namespace talea::cli {
namespace {

using namespace scan;

struct FileFlag {
  const char* field;  // as fields.hpp names it
  const char* flag;
  const char* help;
  bool required;
};

constexpr FileFlag file_flags[] = {
    {"q", "--q", "[B,S,R,G,N], R = 1 also [B,S,G,N] (the model's C)", true},
    {"k", "--k", "as q (the model's B)", true},
    {"v", "--v", "[B,S,H,P] (the model's x)", true},
    {"adt", "--adt", "[B,H,S] fp32: log of a step's decay", true},
    {"dt", "--dt", "[B,H,S] fp32: a step's length", true},
    {"trap", "--trap", "[B,H,S] logit of lambda", true},
    {"angles", "--angles", "[B,S,H,A] or [B,S,1,A]: rates, before tanh", false},
    {"z", "--z", "[B,S,H,P] gate", false},
    {"q_bias", "--q-bias", "[H,R,N], R = 1 also [H,N]", false},
    {"k_bias", "--k-bias", "as q-bias", false},
    {"d", "--d", "[H] skip", false},
    {"mimo_v", "--mimo-v", "[H,R,P]", false},
    {"mimo_z", "--mimo-z", "[H,R,P]; needs --z", false},
    {"mimo_out", "--mimo-out", "[H,R,P]", false},
    {"norm_weight", "--norm-weight", "[H,P]; needs --head-norm", false},
    {"initial_angle", "--initial-angle", "[n,H,A] radians", false},
    {"initial_ssm", "--initial-ssm", "[n,H,P,N]", false},
    {"initial_k", "--initial-k", "[n,R,H,N]: biased, rotated key of the token before", false},
    {"initial_v", "--initial-v", "[n,H,P]: its v", false},
    {"cu_seqlens", "--cu-seqlens", "[n+1] int32: packed sequences, B = 1", false},
    {"d_out", "--upstream", "gradient of out", false},
    {"d_final_angle", "--upstream-final-angle", "gradient of final_angle", false},
    {"d_final_ssm", "--upstream-final-ssm", "gradient of final_ssm", false},
    {"d_final_k", "--upstream-final-k", "gradient of final_k", false},
    {"d_final_v", "--upstream-final-v", "gradient of final_v", false},
};

bool is_upstream(const FileFlag& f) { return std::string_view(f.flag).starts_with("--upstream"); }

struct Flags {
  OptionFlags options;
  std::string files[std::size(file_flags)];
  std::string layout = "bsrgn", cut, outputs, out, receipt;
  RankFlags ranks;
  bool step = false;
};

struct Read {
  mamba3::Inputs in;
  std::vector<io::HostTensor> owners;
  std::vector<InputFact> facts;
};

Tensor read_one(Read& to, const FileFlag& flag, const std::string& argument,
                const std::string& layout) {
  io::HostTensor t;
  try {
    t = io::read_tensor(argument);
  } catch (const Error& e) {
    throw Error(e.kind(), fmt::format("{}: {}", flag.flag, e.what()));
  }
  InputFact fact{flag.field, argument, t.view.dtype, {}, io::tensor_sha256(t.view)};
  fact.shape.assign(t.view.shape.begin(), t.view.shape.begin() + t.view.rank);
  to.facts.push_back(std::move(fact));
  to.owners.push_back(t);
  try {
    const std::string axes = axes_of(flag.field, t.view.rank);
    // It says how many final states there are.
    require(flag.field != std::string_view("cu_seqlens") || t.view.shape[0] >= 1,
            ErrorKind::invalid_data, "cu_seqlens: shape [0] where [n + 1] is needed");
    return in_order(t.view, file_axes(flag.field, t.view.rank, layout), axes);
  } catch (const Error& e) {
    throw Error(e.kind(), fmt::format("{} {}: {}", flag.flag, argument, e.what()));
  }
}

Read read_inputs(const Flags& f) {
  Read r;
  for (size_t i = 0; i < std::size(file_flags); ++i) {
    if (f.files[i].empty()) continue;
    const Tensor t = read_one(r, file_flags[i], f.files[i], f.layout);
    mamba3::for_inputs(r.in, [&](const char* name, Tensor& field) {
      if (std::string_view(name) == file_flags[i].field) field = t;
    });
  }
  return r;
}

void check_flags(const Flags& f) {
  const auto given = [&](std::string_view flag) {
    for (size_t i = 0; i < std::size(file_flags); ++i)
      if (flag == file_flags[i].flag) return !f.files[i].empty();
    return false;
  };
  require(!given("--mimo-z") || given("--z"), ErrorKind::usage, "--mimo-z: needs --z, the gate");
  require(!given("--norm-weight") || f.options.head_norm, ErrorKind::usage,
          "--norm-weight: needs --head-norm");
  require(f.ranks.ranks == 1 || !f.cut.empty(), ErrorKind::usage,
          "--ranks {}: needs --cut heads or --cut tokens", f.ranks.ranks);
  require(f.ranks.said || f.cut.empty() || under_mpirun(), ErrorKind::usage,
          "--cut {}: needs --ranks", f.cut);
  require(!under_mpirun() || !f.cut.empty(), ErrorKind::usage,
          "mpirun started this process: needs --cut heads or --cut tokens");
  require(!f.step || f.cut.empty(), ErrorKind::usage, "--step: a step is not shared by ranks");
  require(f.out.empty() || f.out.ends_with(".safetensors") || f.out.starts_with("/dev/"),
          ErrorKind::usage, "--out {}: the outputs are written as .safetensors", f.out);
  std::vector<std::string> read(std::begin(f.files), std::end(f.files));
  require_other_file("--out", f.out, read);
  read.push_back(f.out);
  require_other_file("--receipt", f.receipt, read);
}

double l2(const Tensor& t) {
  double sum = 0;
  for (int64_t i = 0; i < t.elements(); ++i) {
    const double v = load_element(t.data, t.dtype, i);
    sum += v * v;
  }
  return std::sqrt(sum);
}

mamba3::CallFacts call_facts(const Flags& f, const Ran& ran, const Read& read, const Outputs& out,
                             const RankWorld& world) {
  mamba3::CallFacts facts;
  facts.problem = ran.problem;
  facts.result = ran.result;
  facts.layout = f.layout;
  facts.inputs = read.facts;
  facts.pieces = ran.pieces;
  facts.collective = world.engine();
  facts.measured_peak_extra_bytes = ran.peak_extra_bytes;
  if (memory_is_measured()) facts.measured_by = "every heap allocation of the process counted";
  facts.time = time_stats({ran.ms});
  for (const io::NamedTensor& t : out.named) facts.values.emplace_back(t.name, l2(t.tensor));
  return facts;
}

void print_pass(const Ran& ran) {
  const mamba3::Result& r = ran.result;
  Facts facts;
  facts.add(word(r.pass), fmt::format("lane {} ({})", r.lane, r.lane_kind));
  for (const LaneDecline& d : r.declined)
    facts.add("declined", fmt::format("{}: {}", d.lane, d.reason));
  for (const mamba3::PieceFact& p : ran.pieces)
    facts.add(fmt::format("rank {}", p.rank),
              fmt::format("heads [{}, {}), tokens [{}, {})", p.head_begin, p.head_end,
                          p.token_begin, p.token_end));
  for (const mamba3::ExchangeFact& e : r.exchanges)
    facts.add("exchange", fmt::format("{}: {}, {}", e.name, e.collective, human_bytes(e.bytes)));
  facts.add("chunk", r.chunk_tokens > 0 ? fmt::format("{} tokens, {} rows, {}", r.chunk_tokens,
                                                      r.chunk_rows, word(r.schedule))
                                        : "none: token by token");
  facts.add("pairs", word(r.rotary_pairs));
  facts.add("memory", fmt::format("{} measured, {} declared", human_bytes(ran.peak_extra_bytes),
                                  human_bytes(r.workspace_bytes)));
  facts.add("time", human_ms(ran.ms));
  facts.print();
}

std::vector<Ran> run_passes(const Flags& f, const Read& read, const Outputs& out,
                            const mamba3::Options& options, const World& world) try {
  using enum mamba3::Pass;
  mamba3::Inputs ahead = read.in;
  ahead.d_out = {};
  ahead.d_final_states = {};
  mamba3::Outputs made = out.views, gradients = out.views;
  made.d = {};
  gradients.out = {};
  gradients.final_states = {};
  if (out.forward && out.backward)
    require_limit(options.workspace_limit_bytes,
                  {least_limit(forward, ahead, made, options, world),
                   least_limit(backward, read.in, gradients, options, world)});
  std::vector<Ran> runs;
  if (out.forward)
    runs.push_back(f.step ? run_steps(ahead, made, options)
                          : run_pass(forward, ahead, made, options, world));
  check_interrupt();
  if (out.backward) runs.push_back(run_pass(backward, read.in, gradients, options, world));
  check_interrupt();
  return runs;
} catch (const Error& error) {
  std::vector<GivenFile> given;
  for (size_t i = 0; i < std::size(file_flags); ++i)
    if (!f.files[i].empty()) given.push_back({file_flags[i].field, file_flags[i].flag, f.files[i]});
  throw with_file(error, given);
}

void run(Context& context, const Flags& f) {
  check_flags(f);
  const mamba3::Options options = f.options.options();
  Receipt receipt(ReceiptKind::scan, provenance_of(context));
  const Read read = read_inputs(f);
  log_inputs(context, read.facts);
  const Outputs out = allocate_outputs(
      f.outputs.empty() ? all_outputs(read.in) : split(f.outputs, ','), read.in, f.layout);
  require(!f.step || !out.backward, ErrorKind::usage, "--step: forms no gradient; --outputs {}",
          f.outputs.empty() ? "follow from an upstream" : f.outputs);
  for (size_t i = 0; i < std::size(file_flags); ++i)
    require(out.backward || f.files[i].empty() || !is_upstream(file_flags[i]), ErrorKind::usage,
            "{} {}: needs a d_* among --outputs", file_flags[i].flag, f.files[i]);
  const RankWorld ranks(f.ranks);
  const World world{ranks.size(), f.cut == "tokens", f.ranks.timeout_s, ranks.mpi()};
  const std::vector<Ran> runs = run_passes(f, read, out, options, world);
  if (!ranks.speaks()) return;
  for (const Ran& ran : runs) receipt.call(mamba3::call_json(call_facts(f, ran, read, out, ranks)));
  receipt.title("Mamba-3 scan").verdict(Verdict::not_checked);
  if (!f.out.empty()) io::write_safetensors(f.out, out.named);
  if (!f.receipt.empty()) io::write_receipt(f.receipt, receipt);
  if (context.machine()) {
    const std::string text = receipt.text();
    fmt::print("{}\n", context.jsonl ? nlohmann::json::parse(text).dump() : text);
    return;
  }
  Table table({"output", "dtype", "shape", ">norm"});
  for (const io::NamedTensor& t : out.named)
    table.row({t.name, name_of(t.tensor.dtype), io::shape_text(t.tensor),
               fmt::format("{:.6g}", l2(t.tensor))});
  table.print();
  for (const Ran& ran : runs) {
    fmt::print("\n");
    print_pass(ran);
  }
}

}  // namespace

void register_scan(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(
      app, context,
      {"scan", "the Mamba-3 scan on your own tensors (.npy, .safetensors, FILE:KEY)",
       "talea scan --q q.npy --k k.npy --v v.npy --adt adt.npy --dt dt.npy --trap trap.npy \\\n"
       "              --upstream g.npy --outputs out,d_q,d_dt --out o.safetensors",
       ""});
  for (size_t i = 0; i < std::size(file_flags); ++i)
    sub->add_option(file_flags[i].flag, f->files[i], file_flags[i].help)
        ->required(file_flags[i].required);
  f->options.add(*sub, true);
  sub->add_option("--layout", f->layout,
                  "order of the axes of q and k in their files; sbrgn: S before B in v, z, angles, "
                  "upstream and out, too")
      ->check(CLI::IsMember({"bsrgn", "bsgrn", "sbrgn"}))
      ->capture_default_str();
  sub->add_flag("--step", f->step,
                "one step a token on a state that is handed on, as in generation; no gradients");
  f->ranks.add(*sub, "ranks");
  sub->add_option("--cut", f->cut, "what the ranks share")
      ->check(CLI::IsMember({"heads", "tokens"}));
  f->ranks.add_timeout(*sub);
  sub->add_option("--outputs", f->outputs,
                  "out,final_angle,final_ssm,final_k,final_v, and d_ with the name of a tensor; "
                  "default out, with an upstream all gradients too");
  sub->add_option("--out", f->out, "write the outputs, .safetensors");
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  sub->callback([f, sub, &context] {
    if (sub->count("--angles") + sub->count("--initial-angle") == 0)
      note_unread(context, *sub, {"--rotary-pairs"}, "needs --angles or --initial-angle");
    if (f->step) f->options.drop_unread_of_step(context, *sub);
    run(context, *f);
  });
}

}  // namespace talea::cli
