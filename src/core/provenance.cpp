// What: gathers provenance: build facts, CPU, system, library versions.
// Why: one place, so that every kind of receipt names the same facts.
// Never: fails: a fact that cannot be had is "unknown".
#include "core/provenance.hpp"

#include <gnu/libc-version.h>
#include <sys/utsname.h>

#include <chrono>
#include <ctime>
#include <fstream>

#include "build_facts.inc"
#include "core/device_facts.hpp"
#include "core/fail.hpp"
#include "git_facts.inc"
#if __has_include(<oneapi/dnnl/dnnl_version.h>)
#include <oneapi/dnnl/dnnl_version.h>
#endif

namespace talea {
namespace {

std::string cpu_model() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name")) {
      const size_t colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
  return "unknown";
}

std::string system_name() {
  utsname name{};
  if (::uname(&name) != 0) return "unknown";
  return fmt::format("{} {} {}", name.sysname, name.release, name.machine);
}

TextPairs library_versions() {
  TextPairs versions;
  versions.emplace_back("glibc", ::gnu_get_libc_version());
  versions.emplace_back("fmt", std::to_string(FMT_VERSION));
#ifdef _OPENMP
  versions.emplace_back("openmp", std::to_string(_OPENMP));
#endif
#ifdef DNNL_VERSION_MAJOR
  versions.emplace_back("onednn", fmt::format("{}.{}.{}", DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR,
                                              DNNL_VERSION_PATCH));
#endif
  return versions;
}

BuildInfo make_build_info() {
  BuildInfo info;
  info.version = TALEA_VERSION;
  info.git_revision = TALEA_GIT_REVISION;
  info.git_dirty = TALEA_GIT_DIRTY;
  info.compiler = TALEA_COMPILER;
  info.type = TALEA_BUILD_TYPE;
  info.flags = TALEA_BUILD_FLAGS;
#ifdef TALEA_WITH_CUDA
  info.options.push_back("cuda");
#endif
#ifdef TALEA_MUTANTS
  info.options.push_back("mutants");
#endif
  if (*TALEA_BUILD_SANITIZE) info.options.push_back("sanitize=" TALEA_BUILD_SANITIZE);
  return info;
}

}  // namespace

const BuildInfo& build_info() {
  static const BuildInfo info = make_build_info();
  return info;
}

std::string utc_now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  const std::time_t seconds = static_cast<std::time_t>(ms / 1000);
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900,
                     utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, ms % 1000);
}

Provenance gather_provenance(std::vector<std::string> argv, TextPairs environment) {
  Provenance p;
  p.build = build_info();
  p.argv = std::move(argv);
  const DeviceFacts facts = gather_device_facts(0);
  p.cpu = cpu_model();
  p.isa = facts.isa.empty() ? "unknown" : facts.isa;
  p.os = system_name();
  p.threads = facts.threads;
  p.libraries = library_versions();
  p.environment = std::move(environment);
  p.start_time = utc_now();
  return p;
}

}  // namespace talea
