// What: by whom, on what, from which source and when a receipt's work was done.
// Why: a figure without this cannot be repeated or compared.
// Never: reads the environment or asks a GPU; the caller hands those facts in.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace talea {

struct BuildInfo {
  std::string version, git_revision;  // "unknown" outside a checkout
  int git_dirty = -1;                 // 1, 0, or -1: not known
  std::string compiler, type, flags;
  std::vector<std::string> options;  // e.g. "cuda", "mpi", "mutants", "sanitize=address"
};
const BuildInfo& build_info();

struct DeviceProvenance {
  std::string name, driver, runtime, clocks, throttle_reasons;
};

// Variables that can change a result or a time; a caller passes those that are set.
inline constexpr const char* relevant_environment[] = {
    "OMP_NUM_THREADS", "OMP_PROC_BIND",        "OMP_PLACES",           "DNNL_MAX_CPU_ISA",
    "DNNL_VERBOSE",    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "NCCL_ALGO",
    "NCCL_PROTO",      "NCCL_NVLS_ENABLE"};

using TextPairs = std::vector<std::pair<std::string, std::string>>;

struct Provenance {
  BuildInfo build;
  std::vector<std::string> argv;
  std::string cpu, isa, os;
  int threads = 0;
  std::optional<DeviceProvenance> device;
  TextPairs libraries, environment;
  std::string start_time, end_time;  // ISO 8601, UTC; end_time is set when the receipt is written
};

// Everything the library can know by itself, with start_time = now.
Provenance gather_provenance(std::vector<std::string> argv, TextPairs environment);

std::string utc_now();

}  // namespace talea
