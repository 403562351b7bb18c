// What: the list of quantities and how each is read from a step.
// Why: one place decides what is compared.
// Never: compares a running maximum that a NaN could hide from.
#include "train/step_checks.hpp"

#include <cmath>

#include "core/fail.hpp"

namespace talea::train {
namespace {

// One fp32 ulp, relative: a drift below it is no drift, whatever the twins did.
constexpr double ulp = 6e-8;

// What people call the fields; the order of the verdict's table.
constexpr std::pair<double SameState::*, const char*> same_names[] = {
    {&SameState::loss, "same state: loss"},
    {&SameState::logits, "same state: logits"},
    {&SameState::lse, "same state: lse"},
    {&SameState::logp, "same state: log-probability"},
    {&SameState::grads, "same state: gradients"},
    {&SameState::norm, "same state: gradient norm"},
    {&SameState::clip, "same state: clip scale"},
    {&SameState::clipped, "same state: clipped gradients"},
    {&SameState::clipped_norm, "same state: norm after clipping"},
    {&SameState::params, "same state: parameters"},
    {&SameState::m, "same state: m"},
    {&SameState::v, "same state: v"},
};

// The state before a step is the one after the step before it, so that it needs no line of its own.
constexpr std::pair<double Drift::*, const char*> drift_names[] = {
    {&Drift::loss, "drift over band: loss"},
    {&Drift::logits, "drift over band: logits"},
    {&Drift::grads, "drift over band: gradients"},
    {&Drift::norm, "drift over band: gradient norm"},
    {&Drift::clip, "drift over band: clip scale"},
    {&Drift::params, "drift over band: parameters"},
    {&Drift::m, "drift over band: m"},
    {&Drift::v, "drift over band: v"},
};
constexpr char from_base[] = "drift over band: parameters from base";

double allowed(const Tolerances& t, double SameState::*field) {
  if (field == &SameState::loss) return t.loss;
  if (field == &SameState::logits || field == &SameState::lse || field == &SameState::logp)
    return t.rows;
  if (field == &SameState::grads || field == &SameState::clipped) return t.grads;
  if (field == &SameState::params) return t.params;
  return field == &SameState::m || field == &SameState::v ? t.moments : t.norm;
}

std::string beside_name(const std::string& lane, const char* what) {
  return fmt::format("lane {} over band: {}", lane, what);
}

}  // namespace

StepChecks::StepChecks(const Tolerances& t, const TwinOptions& o)
    : same_state_(o.same_state), band_(o.twins > 0), tolerances_(t) {
  const bool blind = o.mutant == "nan-blind-gate";
  auto add = [&](const std::string& name, double tolerance) {
    quantities_.push_back({name, Worst(tolerance, blind)});
  };
  add("comparison fails on NaN", 0);
  add("numbers that are not finite", 0);
  if (same_state_)
    for (const auto& [field, name] : same_names) add(name, allowed(t, field));
  if (band_) {
    for (const auto& [field, name] : drift_names) add(name, t.band);
    add(from_base, t.band);
    for (const std::string& lane : o.beside)
      for (const char* what : {"loss", "parameters"}) add(beside_name(lane, what), t.band);
  }
  Worst probe(1.0, blind);
  probe.see(NAN, 0);
  quantity("comparison fails on NaN").see(probe.passed() ? 1 : 0, 0);
}

Worst& StepChecks::quantity(const std::string& name) {
  for (Quantity& q : quantities_)
    if (q.name == name) return q.worst;
  fail(ErrorKind::runtime, "step checks: no comparison {}", name);
}

void StepChecks::see(const StepRecord& r) {
  const int64_t s = r.candidate.step;
  int64_t bad = 0;
  for (double x : {r.candidate.loss, r.candidate.grad_norm, r.candidate.clip, r.reference.loss,
                   r.reference.grad_norm, r.params_moved})
    bad += std::isfinite(x) ? 0 : 1;
  for (const auto& [name, field] : drift_fields) bad += std::isfinite(r.drift.*field) ? 0 : 1;
  quantity("numbers that are not finite").see(static_cast<double>(bad), s);
  if (same_state_)
    for (const auto& [field, name] : same_names) {
      widen(largest_plain_.*field, r.plain.*field);
      const double fixed = allowed(tolerances_, field);
      const double measured = tolerances_.band * largest_plain_.*field;  // NaN allows nothing
      quantity(name).see(r.same.*field, s, measured > fixed ? measured : fixed);
    }
  if (!band_) return;
  see_band(r);
  see_beside(r);
}

void StepChecks::see_band(const StepRecord& r) {
  widen(largest_, r.drift);
  widen(largest_band_, r.band);
  widen(largest_apart_, r.apart);
  widen(largest_apart_band_, r.apart_band);
  const int64_t s = r.candidate.step;
  last_ratio_ = 0;
  for (const auto& [field, name] : drift_names) {
    // The loss is compared in nats, all else relative to its own size.
    const double size = field == &Drift::loss ? std::max(1.0, std::fabs(r.reference.loss)) : 1.0;
    const double ratio = largest_.*field / (largest_band_.*field + ulp * size);
    quantity(name).see(ratio, s);
    widen(last_ratio_, ratio);
  }
  const double apart = largest_apart_ / (largest_apart_band_ + ulp);
  quantity(from_base).see(apart, s);
  widen(last_ratio_, apart);
}

// The base, first of the lanes beside, is the yardstick of `from_base` and judged by it.
void StepChecks::see_beside(const StepRecord& r) {
  largest_beside_.resize(r.beside.size());
  for (size_t i = 1; i < r.beside.size(); ++i) {
    const Beside& b = r.beside[i];
    widen(largest_beside_[i].drift_loss, b.drift_loss);
    widen(largest_beside_[i].drift_params, b.drift_params);
    const double size = std::max(1.0, std::fabs(r.reference.loss));
    quantity(beside_name(b.lane, "loss"))
        .see(largest_beside_[i].drift_loss / (largest_band_.loss + ulp * size), r.candidate.step);
    quantity(beside_name(b.lane, "parameters"))
        .see(largest_beside_[i].drift_params / (largest_band_.params + ulp), r.candidate.step);
  }
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
