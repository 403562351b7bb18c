// What: the step of a twin run and its comparisons.
// Why: same-state error and free-running drift are different questions, answered apart.
// Never: compares a value with itself: probe and reference are fp64 runs of their own.
#include "train/twin.hpp"

#include <chrono>
#include <cmath>

#include "core/fail.hpp"
#include "train/random.hpp"
#include "train/variants.hpp"

namespace talea::train {
namespace {

// The window's micro-steps, drawn once for all runs.
std::vector<Batch> draw(Stream& stream, int64_t cursor, Window& window) {
  std::vector<Batch> batches;
  window.micros = stream.window(cursor);
  for (int64_t i = 0; i < window.micros; ++i) {
    batches.push_back(stream.micro(cursor + i));
    window.valid += batches.back().valid();
  }
  return batches;
}

template <typename T>
StepReport run_window(Trainer<T>& trainer, const std::vector<Batch>& batches,
                      const Window& window) {
  for (const Batch& b : batches) trainer.micro(b, window);
  return trainer.update();
}

template <typename T>
Drift drift_of(const Trainer<T>& run, const StepReport& mine, double params_before,
               const Trainer<double>& reference, const StepReport& theirs) {
  Drift d;
  d.loss = std::fabs(mine.loss - theirs.loss);
  d.params_before = params_before;
  d.grads = relative_l2(run.state().grads, reference.state().grads);
  d.params = relative_l2(run.state().params, reference.state().params);
  d.m = relative_l2(run.state().m, reference.state().m);
  d.v = relative_l2(run.state().v, reference.state().v);
  return d;
}

// NaN wins.
void widen(double& band, double value) {
  if (!std::isnan(band) && !(value <= band)) band = value;
}

void widen(Drift& band, const Drift& d) {
  widen(band.loss, d.loss);
  widen(band.grads, d.grads);
  widen(band.params_before, d.params_before);
  widen(band.params, d.params);
  widen(band.m, d.m);
  widen(band.v, d.v);
}

}  // namespace

void move_one_ulp(std::vector<float>& values, uint64_t seed) {
  const Random random(seed, 2);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = std::nextafter(values[i], random.bits(i) & 1 ? INFINITY : -INFINITY);
}

int64_t planned_steps(const TrainConfig& config, const Stream& stream) {
  const int64_t all = config.data.epochs * stream.windows_per_epoch();
  return config.max_steps > 0 ? std::min(config.max_steps, all) : all;
}

TwinRun::TwinRun(const TrainConfig& config, const Corpus& corpus, const TwinOptions& options)
    : config_(config),
      options_(options),
      stream_(config, corpus),
      total_steps_(planned_steps(config, stream_)),
      candidate_(config, is_loss_mutant(options.mutant) ? options.mutant : config.loss_lane,
                 options.mutant, total_steps_),
      reference_(config, config.reference_lane, "", total_steps_),
      probe_(config, config.reference_lane, "", total_steps_),
      initial_(candidate_.state().params) {
  for (int i = 0; options.twins > 0 && i <= options.twins; ++i) {
    twins_.emplace_back(config, config.reference_lane, "", total_steps_);
    if (i > 0)
      move_one_ulp(twins_.back().state().params, config.seed + 1000 + static_cast<uint64_t>(i));
  }
}

SameState TwinRun::same_state(const std::vector<HeadResult<float>>& heads,
                              const std::vector<Batch>& batches, const Window& window) {
  SameState s;
  copy_state(probe_.state(), *before_);
  double grad_error = 0;
  for (size_t i = 0; i < batches.size(); ++i) {
    const HeadResult<double> truth = probe_.micro(batches[i], window);
    widen(s.lse, relative_max(heads[i].lse, truth.lse, 1.0));
    widen(s.logp, relative_max(heads[i].logp, truth.logp, 1.0));
  }
  for (const Slice& slice : candidate_.layout().slices()) {
    const double e = relative_l2(candidate_.state().grads.data() + slice.offset,
                                 probe_.state().grads.data() + slice.offset, slice.size());
    if (!(e <= grad_error) && !std::isnan(grad_error)) {
      grad_error = e;
      s.worst_tensor = slice.name;
    }
  }
  s.grads = grad_error;
  return s;
}

void TwinRun::compare_updates(SameState& s, const StepReport& mine,
                              const StepReport& theirs) const {
  s.loss = std::fabs(mine.loss - theirs.loss) / std::max(1.0, std::fabs(theirs.loss));
  if (std::isnan(mine.loss)) s.loss = mine.loss;
  s.norm = relative(mine.grad_norm, theirs.grad_norm);
  s.clip = relative(mine.clip, theirs.clip);
  s.params = relative_l2(candidate_.state().params, probe_.state().params);
  s.m = relative_l2(candidate_.state().m, probe_.state().m);
  s.v = relative_l2(candidate_.state().v, probe_.state().v);
}

void TwinRun::run_twins(const std::vector<Batch>& batches, const Window& window,
                        const std::vector<double>& before, StepRecord& r) {
  for (size_t i = 0; i < twins_.size(); ++i) {
    const StepReport twin = run_window(twins_[i], batches, window);
    const std::vector<float>& base = twins_[0].state().params;
    if (i == 0) {
      r.apart = relative_l2(candidate_.state().params, base);
      continue;
    }
    r.twin_loss = twin.loss;
    widen(r.band, drift_of(twins_[i], twin, before[i], reference_, r.reference));
    widen(r.apart_band, relative_l2(twins_[i].state().params, base));
  }
}

StepRecord TwinRun::step() {
  using Clock = std::chrono::steady_clock;
  StepRecord r;
  Window window;
  const std::vector<Batch> batches = draw(stream_, candidate_.state().cursor, window);
  before_ = candidate_.state();
  const double before = relative_l2(candidate_.state().params, reference_.state().params);
  std::vector<double> twins_before;
  for (const auto& t : twins_)
    twins_before.push_back(relative_l2(t.state().params, reference_.state().params));

  const auto start = Clock::now();
  std::vector<HeadResult<float>> heads;
  for (const Batch& b : batches) heads.push_back(candidate_.micro(b, window));
  auto spent = Clock::now() - start;
  if (options_.plant_nan_at == candidate_.state().step + 1) candidate_.state().window_loss = NAN;
  if (options_.same_state) r.same = same_state(heads, batches, window);
  const auto again = Clock::now();
  r.candidate = candidate_.update();
  spent += Clock::now() - again;
  r.seconds = std::chrono::duration<double>(spent).count();
  if (options_.same_state) compare_updates(r.same, r.candidate, probe_.update());

  r.reference = run_window(reference_, batches, window);
  r.drift = drift_of(candidate_, r.candidate, before, reference_, r.reference);
  run_twins(batches, window, twins_before, r);
  r.params_moved = relative_l2(candidate_.state().params, initial_);
  r.lane = candidate_.lane();
  return r;
}

std::string TwinRun::localise(double tolerance) {
  if (!before_) return "";
  const TrainState<float> after = candidate_.state();
  candidate_.state() = *before_;
  copy_state(probe_.state(), *before_);
  Window window;
  const std::vector<Batch> batches = draw(stream_, before_->cursor, window);
  std::string found;
  for (size_t i = 0; i < batches.size() && found.empty(); ++i) {
    Trace mine, theirs;
    mine.prefix = theirs.prefix = fmt::format("micro {}: ", i);
    candidate_.micro(batches[i], window, &mine);
    probe_.micro(batches[i], window, &theirs);
    for (const Slice& s : candidate_.layout().slices()) {
      mine.add("gradient of " + s.name, candidate_.state().grads.data() + s.offset, s.size());
      theirs.add("gradient of " + s.name, probe_.state().grads.data() + s.offset, s.size());
    }
    for (size_t k = 0; k < mine.entries.size() && found.empty(); ++k) {
      const double e = relative_l2(mine.entries[k].values, theirs.entries[k].values);
      if (!(e <= tolerance)) found = fmt::format("{}, relative L2 {:.3g}", mine.entries[k].name, e);
    }
  }
  if (found.empty()) {
    candidate_.update();
    probe_.update();
    const TrainState<float>& a = candidate_.state();
    const std::pair<const char*, double> parts[] = {
        {"optimizer: m", relative_l2(a.m, probe_.state().m)},
        {"optimizer: v", relative_l2(a.v, probe_.state().v)},
        {"optimizer: params", relative_l2(a.params, probe_.state().params)}};
    for (const auto& [name, e] : parts)
      if (!(e <= tolerance) && found.empty())
        found = fmt::format("{}, relative L2 {:.3g}", name, e);
  }
  candidate_.state() = after;
  return found;
}

}  // namespace talea::train
