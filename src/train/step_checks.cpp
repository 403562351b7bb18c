// What: the list of quantities and how each is read from a step.
// Why: one place decides what is compared.
// Never: compares a running maximum that a NaN could hide from.
#include "train/step_checks.hpp"

#include <cmath>

namespace talea::train {
namespace {

// One fp32 ulp, relative: a drift below it is no drift, whatever the twins did.
constexpr double ulp = 6e-8;

void raise(double& largest, double value) {
  if (!std::isnan(largest) && !(value <= largest)) largest = value;
}

}  // namespace

StepChecks::StepChecks(const Tolerances& t, bool same_state, bool band, bool blind)
    : same_state_(same_state), band_(band) {
  auto add = [&](const char* name, double tolerance) {
    quantities_.push_back({name, Worst(tolerance, blind)});
  };
  add("comparison fails on NaN", 0);
  add("numbers that are not finite", 0);
  if (same_state) {
    add("same state: loss", t.loss);
    add("same state: lse", t.rows);
    add("same state: log-probability", t.rows);
    add("same state: gradients", t.grads);
    add("same state: gradient norm", t.norm);
    add("same state: clip scale", t.norm);
    add("same state: parameters", t.params);
    add("same state: m", t.moments);
    add("same state: v", t.moments);
  }
  if (band) {
    add("drift over band: loss", t.band);
    add("drift over band: parameters", t.band);
    add("drift over band: parameters from base", t.band);
  }
  Worst probe(1.0, blind);
  probe.see(NAN, 0);
  quantity("comparison fails on NaN").see(probe.passed() ? 1 : 0, 0);
}

Worst& StepChecks::quantity(const char* name) {
  for (Quantity& q : quantities_)
    if (q.name == name) return q.worst;
  return quantities_.front().worst;
}

void StepChecks::see(const StepRecord& r) {
  const int64_t s = r.candidate.step;
  const double numbers[] = {
      r.candidate.loss,      r.candidate.grad_norm, r.candidate.clip, r.reference.loss,
      r.reference.grad_norm, r.drift.params,        r.drift.m,        r.drift.v,
      r.params_moved};
  int64_t bad = 0;
  for (double x : numbers) bad += std::isfinite(x) ? 0 : 1;
  quantity("numbers that are not finite").see(static_cast<double>(bad), s);
  if (same_state_) {
    quantity("same state: loss").see(r.same.loss, s);
    quantity("same state: lse").see(r.same.lse, s);
    quantity("same state: log-probability").see(r.same.logp, s);
    quantity("same state: gradients").see(r.same.grads, s);
    quantity("same state: gradient norm").see(r.same.norm, s);
    quantity("same state: clip scale").see(r.same.clip, s);
    quantity("same state: parameters").see(r.same.params, s);
    quantity("same state: m").see(r.same.m, s);
    quantity("same state: v").see(r.same.v, s);
  }
  if (band_) see_band(r);
}

void StepChecks::see_band(const StepRecord& r) {
  raise(largest_.loss, r.drift.loss);
  raise(largest_.params, r.drift.params);
  raise(largest_apart_, r.apart);
  raise(largest_band_.loss, r.band.loss);
  raise(largest_band_.params, r.band.params);
  raise(largest_apart_band_, r.apart_band);
  const double floor = ulp * std::max(1.0, std::fabs(r.reference.loss));
  const double loss = largest_.loss / (largest_band_.loss + floor);
  const double params = largest_.params / (largest_band_.params + ulp);
  const double apart = largest_apart_ / (largest_apart_band_ + ulp);
  const int64_t s = r.candidate.step;
  quantity("drift over band: loss").see(loss, s);
  quantity("drift over band: parameters").see(params, s);
  quantity("drift over band: parameters from base").see(apart, s);
  last_ratio_ = 0;
  for (double x : {loss, params, apart}) raise(last_ratio_, x);
}

std::vector<Check> StepChecks::checks() const {
  std::vector<Check> list;
  for (const Quantity& q : quantities_)
    list.push_back({q.name, q.worst.worst(), q.worst.tolerance(), q.worst.worst_step(),
                    q.worst.first_past(), q.worst.seen(), q.worst.passed()});
  return list;
}

bool StepChecks::passed() const {
  for (const Quantity& q : quantities_)
    if (!q.worst.passed()) return false;
  return true;
}

int64_t StepChecks::first_past(std::string* name) const {
  int64_t first = -1;
  for (const Quantity& q : quantities_) {
    const int64_t at = q.worst.first_past();
    if (at < 0 || (first >= 0 && at >= first)) continue;
    first = at;
    if (name) *name = q.name;
  }
  return first;
}

}  // namespace talea::train
