// What: `talea doctor`: what this machine and build offer, why a lane is off, and the mend.
// Why: "it runs slower than I hoped" has a cause, and the tool can name it.
// Never: changes anything.
#include <dlfcn.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "context.hpp"
#include "core/device_facts.hpp"
#include "core/fail.hpp"
#include "device/cpu/onednn.hpp"
#include "device/cpu/pair_product.hpp"
#include "mamba3/register.hpp"
#include "memory.hpp"
#include "sparse_attention/register.hpp"
#include "table.hpp"
#include "talea/linear_cross_entropy.hpp"
#include "talea/mamba3.hpp"
#include "talea/ranks.hpp"
#include "talea/sparse_attention.hpp"

namespace talea::cli {
namespace {

struct Finding {
  std::string subject, state, mend;
};

std::string first_line(const char* path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

bool loads(const char* library) {
  void* handle = ::dlopen(library, RTLD_LAZY | RTLD_LOCAL);
  if (handle) ::dlclose(handle);
  return handle != nullptr;
}

bool on_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  for (const std::string& folder : split(path ? path : "", ':'))
    if (::access((folder + "/" + program).c_str(), X_OK) == 0) return true;
  return false;
}

std::vector<Finding> machine_findings(const DeviceFacts& facts, const Provenance& provenance) {
  std::vector<Finding> list;
  list.push_back({"CPU", provenance.cpu, ""});
  list.push_back(
      {"instruction set",
       facts.isa + (cpu::native_bf16() ? ", native bf16" : ", bf16 and fp16 as fp32 tiles"), ""});
  list.push_back({"threads", fmt::format("{} (OpenMP)", facts.threads), ""});
  const int64_t memory = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  list.push_back({"memory", human_bytes(memory), ""});
  list.push_back({"oneDNN", cpu::onednn_version(), ""});
  list.push_back({"memory hook", memory_is_measured() ? "on" : "off (sanitizer build)", ""});
  const std::string driver = first_line("/proc/driver/nvidia/version");
  list.push_back({"NVIDIA driver", driver.empty() ? "none" : driver,
                  driver.empty() ? "install the driver of the GPU, or stay on lane cpu" : ""});
  list.push_back({"CUDA build", facts.cuda_built ? "yes" : "no",
                  facts.cuda_built ? "" : "make cuda (needs nvcc)"});
  list.push_back({"GPUs",
                  facts.cuda_devices > 0       ? fmt::format("{} x {} (sm_{})", facts.cuda_devices,
                                                             facts.device_name, facts.sm)
                  : facts.cuda_problem.empty() ? "none seen"
                                               : facts.cuda_problem,
                  ""});
  const bool nccl = loads("libnccl.so.2");
  list.push_back({"NCCL", nccl ? "libnccl.so.2 found" : "not found",
                  nccl ? "" : "install libnccl2, for ranks over GPUs"});
  const bool mpirun = on_path("mpirun"), mpi = !mpi_plugin().empty();
  const char* const build = "build again with -DTALEA_MPI=ON";
  list.push_back({"MPI",
                  fmt::format("{}, {}", mpi ? "plug-in found" : "no plug-in",
                              mpirun ? "mpirun found" : "no mpirun"),
                  mpi && mpirun ? ""
                  : mpi         ? "apt install openmpi-bin"
                  : mpirun      ? fmt::format("apt install libopenmpi-dev, {}", build)
                           : fmt::format("apt install openmpi-bin libopenmpi-dev, {}", build)});
  return list;
}

std::string mend_of(const std::string& reason, const DeviceFacts& facts) {
  if (reason.starts_with("not built")) return "make cuda (needs nvcc)";
  if (reason.find("only when asked for") != std::string::npos) return "--lane unfused";
  if (facts.cuda_built && facts.cuda_devices == 0) return "a machine with an NVIDIA GPU";
  return "";
}

Finding finding_of(const std::string& lane, const LaneChoice& c, const DeviceFacts& facts) {
  const std::string reason = c.declined.empty() ? "" : c.declined[0].reason;
  return {lane, c.lane.empty() ? "off: " + reason : "on: " + c.lane_kind,
          c.lane.empty() ? mend_of(reason, facts) : ""};
}

// A lane runs where the lane of that name of the first operator does.
DeviceKind place_of(const std::string& lane) {
  for (const LaneInfo& known : linear_cross_entropy_lane_table())
    if (known.name == lane) return known.runs_on;
  return DeviceKind::cpu;
}

struct OperatorLanes {
  const char *name, *title;
  std::vector<std::string> (*lanes)();
  LaneChoice (*choice)(const std::string& lane, DeviceKind where);
};
constexpr OperatorLanes other_operators[] = {
    {"sparse_attention", "Lanes of sparse attention", sparse_attention::lanes,
     ordinary_sparse_attention},
    {"mamba3", "Lanes of the Mamba-3 scan", mamba3::lanes, ordinary_scan},
};

std::vector<Finding> lane_findings(const OperatorLanes& of, const DeviceFacts& facts) {
  std::vector<Finding> list;
  for (const std::string& lane : of.lanes())
    list.push_back(finding_of(lane, of.choice(lane, place_of(lane)), facts));
  return list;
}

std::vector<Finding> lane_findings(const DeviceFacts& facts) {
  std::vector<Finding> list;
  for (const LaneInfo& lane : linear_cross_entropy_lane_table()) {
    const bool device = lane.runs_on == DeviceKind::cuda;
    LinearCrossEntropyProblem p;  // an ordinary step
    p.tokens = 4096;
    p.hidden = p.hidden_row_stride = p.weight_row_stride = 1024;
    p.vocab = p.vocab_stored = p.vocab_local = 32000;
    p.device = lane.runs_on;
    p.hidden_dtype = p.weight_dtype = p.dx_dtype = p.dw_dtype = device ? DType::bf16 : DType::f32;
    p.has_targets = p.wants_loss = p.wants_dx = p.wants_dw = true;
    p.options.lane = lane.name;
    p.options.workspace_limit_bytes = std::numeric_limits<int64_t>::max();  // not the question here
    list.push_back(finding_of(lane.name, explain(p), facts));
  }
  return list;
}

nlohmann::ordered_json as_json(const std::vector<Finding>& list) {
  auto j = nlohmann::ordered_json::array();
  for (const Finding& f : list)
    j.push_back({{"subject", f.subject}, {"state", f.state}, {"mend", f.mend}});
  return j;
}

void print(const char* title, const std::vector<Finding>& list) {
  heading(title);
  Table table({"", "", "mend"});
  for (const Finding& f : list) table.row({f.subject, f.state, f.mend});
  table.print();
  fmt::print("\n");
}

void run(Context& context) {
  const DeviceFacts facts = gather_device_facts(0);
  const auto machine = machine_findings(facts, provenance_of(context));
  const auto lanes = lane_findings(facts);
  if (context.machine()) {
    nlohmann::ordered_json j;
    j["version"] = build_info().version;
    j["machine"] = as_json(machine);
    j["lanes"] = as_json(lanes);
    for (const OperatorLanes& of : other_operators)
      j["lanes_of"][of.name] = as_json(lane_findings(of, facts));
    fmt::print("{}\n", j.dump(context.jsonl ? -1 : 2));
    return;
  }
  print("Machine", machine);
  print("Lanes of linear cross-entropy", lanes);
  for (const OperatorLanes& of : other_operators) print(of.title, lane_findings(of, facts));
  int on = 0;
  for (const Finding& f : lanes) on += f.state.rfind("on", 0) == 0;
  verdict(on > 0, fmt::format("{} of {} lanes can run here", on, lanes.size()));
}

}  // namespace

void register_doctor(CLI::App& app, Context& context) {
  CLI::App* sub = add_subcommand(
      app, context,
      {"doctor", "what this machine offers and why any lane is off", "talea doctor", ""});
  sub->callback([&context] { run(context); });
}

}  // namespace talea::cli
