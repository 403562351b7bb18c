// What: what every reproducer shares: data, the fp64 truth, our call, and the report of sentinels.
// Why: a sentinel can only be printed from a figure that was measured by a path that ran.
// Never: holds a broken pattern; those stand in the reproducers themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/device_session.hpp"
#include "talea/linear_cross_entropy.hpp"

namespace talea::repro {

// Inputs in fp32 on the host. Empty vectors are options not used.
struct Data {
  int64_t tokens = 0, hidden = 0, vocab = 0, stored = 0;  // stored >= vocab: padded rows
  std::vector<float> x, w, bias, class_weight, token_weight, upstream;
  std::vector<int64_t> y;
  LinearCrossEntropyOptions options;
};

// Normal hidden and weight, uniform targets. spread: standard deviation of the logits.
Data make_data(int64_t tokens, int64_t hidden, int64_t vocab, uint64_t seed, double spread = 2.0,
               int64_t padding = 0);

struct Answer {
  double loss = 0;             // scalar reductions
  std::vector<double> losses;  // reduction none
  std::vector<double> lse;
  std::vector<double> dx, dw;
  std::string lane;
  int64_t workspace_bytes = 0;
  bool full_logits = false;
};

// Runs the operator: "reference" is the truth, on the host; "auto" is ours.
Answer run(const Data& data, const std::string& lane);

// From here on "auto" runs on this device, through its own memory; null: on the host again.
void run_on(DeviceSession* device);
DeviceSession* device_in_use();  // null: the host

// A workspace limit that leaves this to a lane: on a device cuBLASLt takes 4 MiB for itself.
int64_t limit_for(int64_t bytes);

// fp32 logits [tokens, stored] by plain loops: what a broken pattern starts from.
std::vector<float> logits_of(const Data& data);

float round_to_bf16(float value);

// ||a - b|| / ||b||; NaN anywhere gives NaN.
double relative_l2(const std::vector<double>& a, const std::vector<double>& b);
double relative(double a, double b);

// What a reproducer found. A sentinel stands only beside the figure that earned it.
struct Finding {
  std::string sentinel;  // BUG_REPRODUCED, FIX_VALIDATED, MEMORY_SAVE_VERIFIED; "" where not earned
  std::string what;
  double measured = 0;
  double bound = 0;
};

class Report {
 public:
  // fix_disabled: a test's switch; `ours` then runs the broken path, so that its sentinel must
  // fall.
  explicit Report(bool fix_disabled) : fix_disabled_(fix_disabled) {}

  // BUG_REPRODUCED where the error is above the bound (NaN counts: a broken result is broken).
  void broken(std::string what, double error, double bound);
  // FIX_VALIDATED where the error is finite and within the bound.
  void ours(std::string what, double error, double bound);
  // MEMORY_SAVE_VERIFIED where ours, measured, is at most the share of the other, measured; with a
  // device in use a figure without a verdict.
  void memory(std::string what, double ours_bytes, double other_bytes, double share);
  // A number to read, without a verdict.
  void figure(std::string what, double value);

  // The answer of our path: `ours()` normally, `broken()` when the fix is switched off.
  Answer fixed(const std::function<Answer()>& ours, const std::function<Answer()>& broken) const {
    return fix_disabled_ ? broken() : ours();
  }
  bool fix_disabled() const { return fix_disabled_; }
  const std::vector<Finding>& findings() const { return findings_; }
  // Every expectation earned its sentinel.
  bool complete() const;

 private:
  bool fix_disabled_;
  std::vector<Finding> findings_;
  int missed_ = 0;
};

struct Reproducer {
  const char* name;
  const char* museum;   // ids of docs/museum.md
  const char* summary;  // one line
  void (*run)(Report&);
  const char* on_host = nullptr;  // why it stays there whatever the device
};

// All of them, in the order of the museum.
const std::vector<Reproducer>& all();

}  // namespace talea::repro
