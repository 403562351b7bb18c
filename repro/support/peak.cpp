// What: the measured peak memory of a piece of work, in a child process of its own.
// Why: MEMORY_SAVE_VERIFIED must come from a measurement; a child starts from a clean peak.
// Never: estimates.
#include "repro/support/peak.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>

#include "repro/support/repro.hpp"

namespace talea::repro {
namespace {

double field_bytes(const char* field) {
  double kib = 0;
  char line[256];
  std::FILE* file = std::fopen("/proc/self/status", "r");
  while (file && std::fgets(line, sizeof line, file))
    if (std::strncmp(line, field, std::strlen(field)) == 0)
      std::sscanf(line + std::strlen(field), "%lf", &kib);
  if (file) std::fclose(file);
  return kib * 1024;
}

[[noreturn]] void child(const std::function<void()>& work, double limit_bytes, int out) {
  if (std::FILE* clear = std::fopen("/proc/self/clear_refs", "w")) {
    std::fputs("5", clear);  // resets the peak to the present
    std::fclose(clear);
  }
  const double before = field_bytes("VmRSS:");
  if (limit_bytes > 0) {
    const auto most = static_cast<rlim_t>(field_bytes("VmSize:") + limit_bytes);
    const rlimit limit{most, most};
    setrlimit(RLIMIT_AS, &limit);
  }
  run_on(nullptr);  // host memory is what is measured, and no driver survives a fork
  try {
    work();
  } catch (...) {
    _exit(1);
  }
  const double peak = field_bytes("VmHWM:") - before;
  _exit(write(out, &peak, sizeof peak) == sizeof peak ? 0 : 1);
}

}  // namespace

Peak measure_peak(const std::function<void()>& work, double limit_bytes) {
  int ends[2];
  Peak peak;
  if (pipe(ends) != 0) return peak;
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    child(work, limit_bytes, ends[1]);
  }
  close(ends[1]);
  const bool told = read(ends[0], &peak.bytes, sizeof peak.bytes) == sizeof peak.bytes;
  close(ends[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  peak.finished = told && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  return peak;
}

}  // namespace talea::repro
