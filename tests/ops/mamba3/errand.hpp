// What: one call of the scan on a lane, with its tensors where that lane reads them.
// Why: the same suite serves host lanes, the device's, and the device's text run on a host.
// Never: judges, or changes what a call says.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "talea/mamba3.hpp"
#include "yardsticks/place.hpp"

namespace talea::yardsticks::mamba3 {

// The kernels of the device lane, run by one thread of a host (host_machine.hpp): fp32 as fp32, and
// with bf16 rows as that lane multiplies them.
inline constexpr const char* device_text = "device_text";

// Lanes of this build that are no yardstick; those of a device last.
std::vector<std::string> tested_lanes();
std::vector<std::string> host_lanes();
// Lanes of a device that take chosen sizes alone: they have suites of their own.
std::vector<std::string> lanes_of_sizes();
// What a device lane counts it writes into `status`; it does not say it.
bool counts_on_device(const std::string& lane);
// Null for lanes that read host memory; throws where the device is missing.
testing::Place* place_of(const std::string& lane);
// Why the lane cannot run on this machine; empty: it can.
std::string missing(const std::string& lane);

// Calls that came back, of this process.
inline std::atomic<int64_t> calls_made = 0;

class Errand {
 public:
  Errand(std::string lane, talea::mamba3::Pass pass, const talea::mamba3::Inputs& in,
         const talea::mamba3::Outputs& out, const talea::mamba3::Options& options,
         const talea::mamba3::Ranks& ranks = {});
  Errand(std::string lane, const talea::mamba3::StepArguments& step,
         const talea::mamba3::Options& options);
  ~Errand();
  Errand(const Errand&) = delete;
  Errand& operator=(const Errand&) = delete;

  // A block of host memory that tensors lie in, or the workspace. On a device a copy of it is used,
  // and comes back with the end of the run.
  void bring(std::vector<std::byte>& block);
  int64_t workspace_bytes() const;
  int64_t saved_bytes() const;
  talea::mamba3::Result run(Workspace workspace);

 private:
  struct Mirrored {
    std::byte *here, *there;
    int64_t bytes;
  };
  void* there(void* data) const;
  talea::mamba3::Problem problem() const;
  talea::mamba3::Result run_text(const talea::mamba3::Problem& p, Workspace workspace) const;

  std::string lane_;
  bool stepping_ = false;
  talea::mamba3::Pass pass_ = talea::mamba3::Pass::forward;
  talea::mamba3::Inputs in_;
  talea::mamba3::Outputs out_;
  talea::mamba3::StepArguments step_;
  talea::mamba3::Options options_;
  talea::mamba3::Ranks ranks_;
  testing::Place* place_ = nullptr;
  std::vector<Mirrored> blocks_;
};

}  // namespace talea::yardsticks::mamba3
