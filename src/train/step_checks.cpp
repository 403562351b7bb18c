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
constexpr char band_name[] = "band of the twins: parameters";

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
    : same_state_(o.same_state),
      band_(o.twins > 0),
      tolerances_(t),
      plain_(std::size(same_names)),
      drift_(std::size(drift_names)),
      beside_(o.beside.size()) {
  const bool blind = o.mutant == "nan-blind-gate";
  auto add = [&](const std::string& name, double tolerance, bool drift = false) {
    quantities_.push_back({.name = name, .worst = Worst(tolerance, blind), .drift = drift});
  };
  add("comparison fails on NaN", 0);
  add("numbers that are not finite", 0);
  if (same_state_)
    for (const auto& [field, name] : same_names) add(name, allowed(t, field));
  if (band_) {
    add(band_name, t.void_above);
    add(from_base, t.band, true);  // first: all fp32 runs leave fp64 alike, few leave the base
    for (const auto& [field, name] : drift_names) add(name, t.band, true);
    for (const std::string& lane : o.beside)
      for (const char* what : {"loss", "parameters"}) add(beside_name(lane, what), t.band, true);
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
  if (same_state_) see_same(r);
  if (!band_) return;
  see_band(r);
  see_beside(r);
}

void StepChecks::see_same(const StepRecord& r) {
  for (size_t i = 0; i < plain_.size(); ++i) {
    const auto& [field, name] = same_names[i];
    plain_[i].see(r.plain.*field);
    const double fixed = allowed(tolerances_, field);
    const double measured = tolerances_.band * plain_[i].largest();  // NaN allows nothing
    quantity(name).see(r.same.*field, r.candidate.step, measured > fixed ? measured : fixed);
  }
}

void StepChecks::see_band(const StepRecord& r) {
  const int64_t s = r.candidate.step;
  quantity(band_name).see(r.band.params, s);
  if (first_void_ < 0 && !(r.band.params <= tolerances_.void_above)) first_void_ = s;
  if (first_void_ >= 0) return;
  last_ratio_ = 0;
  for (size_t i = 0; i < drift_.size(); ++i) {
    const auto& [field, name] = drift_names[i];
    // The loss is compared in nats, all else relative to its own size.
    const double size = field == &Drift::loss ? std::max(1.0, std::fabs(r.reference.loss)) : 1.0;
    drift_[i].see(r.drift.*field, r.band.*field);
    const double ratio = drift_[i].ratio(ulp * size);
    quantity(name).see(ratio, s);
    widen(last_ratio_, ratio);
  }
  from_base_.see(r.apart, r.apart_band);
  quantity(from_base).see(from_base_.ratio(ulp), s);
  widen(last_ratio_, from_base_.ratio(ulp));
}

// The base, first of the lanes beside, is the yardstick of `from_base` and judged by it.
void StepChecks::see_beside(const StepRecord& r) {
  if (first_void_ >= 0) return;
  for (size_t i = 1; i < r.beside.size(); ++i) {
    const Beside& b = r.beside[i];
    BesidePairs& pairs = beside_[i - 1];
    pairs.loss.see(b.drift_loss, r.band.loss);
    pairs.params.see(b.drift_params, r.band.params);
    const double size = std::max(1.0, std::fabs(r.reference.loss));
    quantity(beside_name(b.lane, "loss")).see(pairs.loss.ratio(ulp * size), r.candidate.step);
    quantity(beside_name(b.lane, "parameters")).see(pairs.params.ratio(ulp), r.candidate.step);
  }
}

std::vector<Check> StepChecks::checks() const {
  std::vector<Check> list;
  for (const Quantity& q : quantities_)
    list.push_back({.name = q.name,
                    .worst = q.worst.worst(),
                    .tolerance = q.worst.tolerance(),
                    .worst_step = q.worst.worst_step(),
                    .first_past = q.worst.first_past(),
                    .seen = q.worst.seen(),
                    .passed = q.worst.passed(),
                    .is_void = q.drift && first_void_ >= 0});
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
