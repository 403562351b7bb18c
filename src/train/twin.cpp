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
      plain_(config, config.reference_lane, "", total_steps_),
      initial_(candidate_.state().params) {
  for (int i = 0; has_base() && i <= options.twins; ++i) {
    others_.emplace_back(config, config.reference_lane, "", total_steps_);
    if (i > 0)
      move_one_ulp(others_.back().state().params, config.seed + 1000 + static_cast<uint64_t>(i));
  }
  for (const std::string& lane : options.beside)
    others_.emplace_back(config, lane, "", total_steps_);
}

Taken<float> TwinRun::candidate_step(const std::vector<Batch>& batches, const Window& window,
                                     StepRecord& r) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  OpenStep<float> mine = open_step(candidate_, batches, window);
  auto spent = Clock::now() - start;
  mine.logits = logits_of(candidate_, mine.heads, config_);
  if (options_.plant_nan_at == candidate_.state().step + 1) candidate_.state().window_loss = NAN;
  OpenStep<double> truth;
  OpenStep<float> plain;
  if (options_.same_state) {
    copy_state(probe_.state(), *before_);
    truth = open_step(probe_, batches, window);
    truth.logits = logits_of(probe_, truth.heads, config_);
    plain_.state() = *before_;
    plain = open_step(plain_, batches, window);
    plain.logits = logits_of(plain_, plain.heads, config_);
    before_clipping(r.same, candidate_, mine, probe_, truth);
    before_clipping(r.plain, plain_, plain, probe_, truth);
  }
  const auto again = Clock::now();
  const StepReport report = candidate_.update();
  spent += Clock::now() - again;
  r.seconds = std::chrono::duration<double>(spent).count();
  if (options_.same_state) {
    const StepReport theirs = probe_.update();
    after_update(r.same, candidate_, report, probe_, theirs);
    after_update(r.plain, plain_, plain_.update(), probe_, theirs);
  }
  return {report, std::move(mine.logits)};
}

void TwinRun::other_steps(const std::vector<Batch>& batches, const Window& window,
                          const std::vector<Drift>& before, const Taken<double>& theirs,
                          StepRecord& r) {
  const size_t first_beside = has_base() ? static_cast<size_t>(options_.twins) + 1 : 0;
  for (size_t i = 0; i < others_.size(); ++i) {
    const Taken<float> other = take_step(others_[i], batches, window, config_);
    const Drift drift = drift_after(before[i], others_[i], other, reference_, theirs);
    const std::vector<float>& base = others_[0].state().params;
    if (has_base() && i == 0) r.apart = relative_l2(candidate_.state().params, base);
    if (i > 0 && i < first_beside) {
      r.twin_loss = other.report.loss;
      widen(r.band, drift);
      widen(r.apart_band, relative_l2(others_[i].state().params, base));
    } else {
      const std::string& lane =
          has_base() && i == 0 ? config_.reference_lane : options_.beside[i - first_beside];
      r.beside.push_back({lane, other.report.loss, drift.loss, drift.params});
    }
  }
}

StepRecord TwinRun::step() {
  StepRecord r;
  Window window;
  const std::vector<Batch> batches = draw(stream_, candidate_.state().cursor, window);
  before_ = candidate_.state();
  const Drift before = drift_before(candidate_, reference_);
  std::vector<Drift> others_before;
  for (const auto& t : others_) others_before.push_back(drift_before(t, reference_));

  const Taken<float> mine = candidate_step(batches, window, r);
  const Taken<double> theirs = take_step(reference_, batches, window, config_);
  r.candidate = mine.report;
  r.reference = theirs.report;
  r.drift = drift_after(before, candidate_, mine, reference_, theirs);
  other_steps(batches, window, others_before, theirs, r);
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
  std::string found, largest;
  double most = 0;
  auto see = [&](const std::string& name, double e) {
    const std::string text = fmt::format("{}, relative L2 {:.3g}", name, e);
    if (found.empty() && !(e <= tolerance)) found = text;
    if (e > most) most = e, largest = text;
  };
  for (size_t i = 0; i < batches.size() && found.empty(); ++i) {
    Trace mine, theirs;
    mine.prefix = theirs.prefix = fmt::format("micro {}: ", i);
    candidate_.micro(batches[i], window, &mine);
    probe_.micro(batches[i], window, &theirs);
    for (size_t k = 0; k < mine.entries.size(); ++k)
      see(mine.entries[k].name, relative_l2(mine.entries[k].values, theirs.entries[k].values));
    for (const Slice& s : candidate_.layout().slices())
      see(mine.prefix + "gradient of " + s.name,
          relative_l2(candidate_.state().grads.data() + s.offset,
                      probe_.state().grads.data() + s.offset, s.size()));
  }
  if (found.empty()) {
    candidate_.update();
    probe_.update();
    see("optimizer: m", relative_l2(candidate_.state().m, probe_.state().m));
    see("optimizer: v", relative_l2(candidate_.state().v, probe_.state().v));
    see("optimizer: params", relative_l2(candidate_.state().params, probe_.state().params));
  }
  candidate_.state() = after;
  if (!found.empty()) return found;
  return fmt::format("none by more than {:g} within the step; most: {}", tolerance, largest);
}

}  // namespace talea::train
