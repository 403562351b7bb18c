// What: the verdict on a twin run: every per-step quantity against its tolerance.
// Why: gates, the command line and the mutant table judge by one list.
// Never: passes a value that is not finite, or a quantity that was never seen.
#pragma once

#include <string>
#include <vector>

#include "train/twin.hpp"

namespace talea::train {

// Largest allowed errors, relative. The same-state ones are what fp32 arithmetic costs in most runs
// (docs/train.md has the measured values). Where a state is ill conditioned, so that the same step
// in fp32 with the reference lane has just cost more (Trailing), `band` times that is allowed.
// The band of the drift is in units of the twins' own, both over the last steps. Twins that have
// left each other by more than `void_above`, relative, are no yardstick any more: from that step on
// the run's drift is not judged, and the run does not pass.
struct Tolerances {
  double loss = 5e-7;    // to max(1, loss)
  double rows = 4e-6;    // lse and log-probabilities, to max(1, largest)
  double grads = 5e-5;   // L2 of each tensor's gradient
  double norm = 4e-6;    // of the gradient norm and the clip scale
  double params = 1e-6;  // L2 of all parameters after the step
  double moments = 1e-5;
  double band = 4;
  double void_above = 1e-3;
};

struct Check {
  std::string name;
  double worst = 0, tolerance = 0;
  int64_t worst_step = -1, first_past = -1, seen = 0;
  bool passed = false;
  bool is_void = false;  // a drift beyond whose first_void nothing was compared
};

class StepChecks {
 public:
  // The comparisons that a run with these options owes. The mutant nan-blind-gate plants the
  // historical gate that a NaN passes.
  StepChecks(const Tolerances& tolerances, const TwinOptions& options);

  void see(const StepRecord& record);
  std::vector<Check> checks() const;
  bool passed() const;
  // The first step whose band was too wide to compare with; -1: none. Such a run is void, whatever
  // else it shows, and `passed` is false.
  int64_t first_void() const { return first_void_; }
  // The first step past any tolerance, and whose; -1 and empty where all passed.
  int64_t first_past(std::string* name = nullptr) const;
  // The candidate's drift over the twins', of the last steps: 1 is the band's edge in their
  // units, the tolerance is `Tolerances::band`.
  double band_ratio() const { return last_ratio_; }

 private:
  struct Quantity {
    std::string name;
    Worst worst;
    bool drift = false;
  };
  // Numerator and denominator of a ratio to the twins' band.
  struct Pair {
    Trailing mine, band;
    void see(double value, double of_twins) {
      mine.see(value);
      band.see(of_twins);
    }
    double ratio(double floor) const { return mine.rms() / (band.rms() + floor); }
  };
  struct BesidePairs {
    Pair loss, params;
  };
  Worst& quantity(const std::string& name);
  void see_same(const StepRecord& record);
  void see_band(const StepRecord& record);
  void see_beside(const StepRecord& record);

  std::vector<Quantity> quantities_;
  bool same_state_, band_;
  Tolerances tolerances_;
  std::vector<Trailing> plain_;  // by field of the same state
  std::vector<Pair> drift_;      // by field of the drift
  Pair from_base_;
  std::vector<BesidePairs> beside_;
  int64_t first_void_ = -1;
  double last_ratio_ = 0;
};

}  // namespace talea::train
