// What: twin runs from outside: parity, resume, kills, damaged checkpoints, gates that fail.
// Why: what a run promises (nothing lost, nothing passed by accident) is only true when tried.
// Never: depends on timing for its verdict.
#include "train/run.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <tuple>

#include "talea/error.hpp"
#include "train/curves.hpp"
#include "train/gates.hpp"
#include "train/presets.hpp"
#include "train/random.hpp"

namespace talea::train {
namespace {

namespace fs = std::filesystem;

class TrainRun : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() /
           ("talea_train_" + std::to_string(::getpid()) + "_" +
            ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(dir_);
    std::ofstream text(dir_ / "text.txt");
    const Random random(5, 6);
    for (uint64_t i = 0; i < 6000; ++i) text.put("etaoin shrdlu\n"[random.below(i, 14)]);
  }
  void TearDown() override { fs::remove_all(dir_); }

  RunOptions options(int64_t steps) const {
    RunOptions o;
    o.config = preset("smoke");
    o.config.data.text_files = {(dir_ / "text.txt").string()};
    o.config.max_steps = steps;
    o.config.model.hidden = 16;
    o.config.model.ffn = 16;
    o.config.model.heads = 2;
    o.config.model.layers = 1;
    o.config.grad_accum = 2;
    o.config.data.total_tokens = 8 * 7;  // seven micro-steps: the last window of an epoch is short
    o.config.data.epochs = 1000;
    o.twin.twins = 1;
    return o;
  }
  std::string checkpoint() const { return (dir_ / "state").string(); }

  fs::path dir_;
};

bool go_on(const StepRecord&, const StepChecks&, int64_t) { return true; }

std::string bytes_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST_F(TrainRun, ACleanRunPasses) {
  const RunResult r = run_training(options(200), go_on);
  EXPECT_TRUE(r.passed());
  EXPECT_EQ(r.steps.size(), 200u);
  EXPECT_EQ(r.facts.first_stage, "");
  double first = 0, last = 0;
  for (size_t i = 0; i < 20; ++i) {
    first += r.steps[i].candidate.loss;
    last += r.steps[180 + i].candidate.loss;
  }
  EXPECT_LT(last, 0.9 * first);
}

TEST_F(TrainRun, FiniteDifferencesGoThroughEveryLane) {
  const GateResult r = run_gate("fd_gradients", {});
  for (const char* lane : {"lane reference", "lane unfused", "lane cpu"}) {
    int64_t seen = 0;
    for (const Check& c : r.checks) {
      if (c.name.find(lane) == std::string::npos) continue;
      ++seen;
      EXPECT_TRUE(c.passed) << c.name << ": " << c.worst;
    }
    EXPECT_GT(seen, 20) << lane;
  }
}

TEST_F(TrainRun, AShortTailWindowDividesByWhatItHolds) {
  const RunResult r = run_training(options(8), go_on);
  ASSERT_TRUE(r.passed());
  // Windows of 2, 2, 2 and then 1 micro-step of 8 tokens.
  EXPECT_EQ(r.steps[2].candidate.tokens, 16);
  EXPECT_EQ(r.steps[3].candidate.tokens, 8);
  EXPECT_GT(r.steps[3].candidate.loss, 0.6 * r.steps[2].candidate.loss);
}

TEST_F(TrainRun, ResumeIsBitwiseTheUninterruptedRun) {
  RunOptions whole = options(12);
  whole.checkpoint_dir = checkpoint() + "_whole";
  run_training(whole, go_on);
  RunOptions parts = options(12);
  parts.checkpoint_dir = checkpoint();
  parts.resume = true;
  for (int64_t stop_at : {1, 5, 6, 12})
    run_training(parts, [&](const StepRecord& r, const StepChecks&, int64_t) {
      return r.candidate.step < stop_at;
    });
  EXPECT_EQ(bytes_of(parts.checkpoint_dir + "/checkpoint.safetensors"),
            bytes_of(whole.checkpoint_dir + "/checkpoint.safetensors"));
}

TEST_F(TrainRun, AnOpenWindowIsPartOfTheState) {
  const RunOptions o = options(4);
  const Corpus corpus = read_corpus(o.config.data.text_files);
  Stream stream(o.config, corpus);
  Trainer<float> one(o.config, "reference", "", 4), two(o.config, "reference", "", 4);
  const Window window{2, stream.micro(0).valid() + stream.micro(1).valid()};
  one.micro(stream.micro(0), window);
  two.state() = one.state();  // between two micro-steps
  one.micro(stream.micro(1), window);
  two.micro(stream.micro(1), window);
  EXPECT_EQ(one.update().loss, two.update().loss);
  EXPECT_EQ(one.state().params, two.state().params);
}

TEST_F(TrainRun, ADamagedCheckpointIsRefusedAndChangesNothing) {
  RunOptions o = options(3);
  o.checkpoint_dir = checkpoint();
  run_training(o, go_on);
  const fs::path file = checkpoint() + "/checkpoint.safetensors";
  const std::string good = bytes_of(file);
  const Corpus corpus = read_corpus(o.config.data.text_files);
  TwinRun run(o.config, corpus, o.twin);
  const uint64_t identity = run_identity(o.config, o.twin, corpus);
  const auto before = run.candidate().state().params;
  const Random random(2, 2);
  const size_t header = 8 + static_cast<uint8_t>(good[0]) + 256 * static_cast<uint8_t>(good[1]);
  for (uint64_t i = 0; i < 60; ++i) {
    std::string bad = good;
    const auto at =
        header + static_cast<size_t>(random.below(i, static_cast<int64_t>(good.size() - header)));
    bad[at] = static_cast<char>(bad[at] ^ (1 << (i % 8)));
    if (i % 3 == 0) bad.resize(at);
    std::ofstream(file, std::ios::binary) << bad;
    EXPECT_THROW(load_checkpoint(file, run, identity), Error) << i;
    EXPECT_EQ(run.candidate().state().params, before);
  }
  std::ofstream(file, std::ios::binary) << good;
  EXPECT_THROW(load_checkpoint(file, run, identity + 1), Error);
  EXPECT_NO_THROW(load_checkpoint(file, run, identity));
}

TEST_F(TrainRun, ADifferentConfigurationDoesNotContinueARun) {
  RunOptions o = options(2);
  o.checkpoint_dir = checkpoint();
  run_training(o, go_on);
  o.resume = true;
  o.config.optimizer.lr = 5e-4;
  EXPECT_THROW(run_training(o, go_on), Error);
  o.config.optimizer.lr = 1e-3;
  o.config.max_steps = 4;  // a longer run may
  o.config.threads = 2;
  EXPECT_EQ(run_training(o, go_on).steps.size(), 4u);
  o.resume = false;
  EXPECT_THROW(run_training(o, go_on), Error);
}

// What was there stays, too: interruptions.py (NoRoom).
TEST_F(TrainRun, AFullDiskUnderTheJournalIsAnErrorAndNoCheckpoint) {
  RunOptions o = options(2);
  // The journal on a device that is always full.
  const fs::path other = dir_ / "full";
  fs::create_directories(other);
  fs::create_symlink("/dev/full", other / "steps.jsonl");
  o.checkpoint_dir = other.string();
  EXPECT_THROW(run_training(o, go_on), std::exception);
  EXPECT_FALSE(fs::exists(other / "checkpoint.safetensors"));
}

TEST_F(TrainRun, JournalLinesReadBackTheSame) {
  StepRecord r;
  r.candidate.step = 7;
  r.candidate.loss = NAN;
  r.drift.params = INFINITY;
  r.same.grads = 1.0 / 3;
  r.lane = "cpu";
  r.same.worst_tensor = "block0.norm1";
  r.beside = {{"reference", 1.5, NAN, 1e-7}, {"unfused", 1.25, 2e-9, 0}};
  EXPECT_EQ(to_line(from_line("journal", to_line(r))), to_line(r));
  EXPECT_THROW(from_line("journal", "{}"), Error);
  std::string odd = to_line(r);
  odd.replace(odd.find("\"drift_loss\":\"NaN\""), 18, "\"drift_lost\":\"NaN\"");
  EXPECT_THROW(from_line("journal", odd), Error);
  EXPECT_THROW(from_line("journal", "{\"step\": 1"), Error);
}

TEST_F(TrainRun, EveryMutantIsFailedByTheGateNamedForIt) {
  GateContext g;
  g.text_files = {(dir_ / "text.txt").string()};
  for (const MutantInfo& m : mutants()) {
    if (std::strcmp(m.gate, "realistic_long_horizon") == 0) continue;  // receipts hold its run
    g.mutant = m.name;
    g.stream = std::strlen(m.stream) > 0 ? m.stream : "text";
    EXPECT_FALSE(run_gate(m.gate, g).passed()) << m.name;
  }
}

// A mutant must be failed by its bug, not by being code of its own: where the data give the bug
// nothing to bite on, the same arithmetic passes the same gate.
TEST_F(TrainRun, MutantsPassWhereTheirBugChangesNothing) {
  GateContext g;
  g.text_files = {(dir_ / "text.txt").string()};
  g.stream = "text";  // no ignored rows, windows of equal micro-steps
  for (const char* mutant :
       {"wrong-denominator", "ignore-counted", "mean-of-means", "unordered-sum"}) {
    g.mutant = mutant;
    const GateResult r = run_gate("drift_smoke", g);
    for (const Check& c : r.checks)
      EXPECT_TRUE(c.passed) << mutant << ": " << c.name << ": " << c.worst << " of " << c.tolerance;
    EXPECT_TRUE(r.passed()) << mutant;
  }
}

TEST_F(TrainRun, NothingPlantedPassesTheGates) {
  GateContext g;
  g.text_files = {(dir_ / "text.txt").string()};
  for (const char* gate :
       {"drift_smoke", "optimizer_parity", "fd_gradients", "replay_determinism"}) {
    const GateResult r = run_gate(gate, g);
    for (const Check& c : r.checks)
      EXPECT_TRUE(c.passed) << gate << ": " << c.name << ": " << c.worst << " of " << c.tolerance;
  }
}

TEST_F(TrainRun, LanesBesideAreResumedToTheBit) {
  RunOptions whole = options(9);
  whole.twin.beside = {"unfused"};
  whole.checkpoint_dir = checkpoint() + "_whole";
  const RunResult r = run_training(whole, go_on);
  EXPECT_TRUE(r.passed());
  ASSERT_EQ(r.steps.back().beside.size(), 2u);
  EXPECT_EQ(r.steps.back().beside[0].lane, "reference");
  EXPECT_EQ(r.steps.back().beside[1].lane, "unfused");
  EXPECT_GT(r.steps.back().beside[1].drift_params, 0);
  RunOptions parts = whole;
  parts.checkpoint_dir = checkpoint();
  parts.resume = true;
  run_training(
      parts, [](const StepRecord& s, const StepChecks&, int64_t) { return s.candidate.step < 4; });
  const RunResult again = run_training(parts, go_on);
  EXPECT_EQ(bytes_of(parts.checkpoint_dir + "/checkpoint.safetensors"),
            bytes_of(whole.checkpoint_dir + "/checkpoint.safetensors"));
  for (size_t i = 0; i < r.steps.size(); ++i) {
    StepRecord a = r.steps[i], b = again.steps[i];
    a.seconds = b.seconds = 0;
    EXPECT_EQ(to_line(a), to_line(b));
  }
}

// A quantity that is looked at must be able to fail: each field, made wrong alone, fails its line.
TEST_F(TrainRun, EveryComparedFieldCanFail) {
  TwinOptions o;
  StepRecord good;
  good.candidate.step = 1;
  good.reference.loss = 2;
  good.beside = {{"reference", 2, 0, 0}};
  StepChecks clean(Tolerances{}, o);
  clean.see(good);
  EXPECT_TRUE(clean.passed());
  for (const double wrong : {1e-3, double(NAN)}) {
    for (const auto& [name, field] : same_fields) {
      StepRecord bad = good;
      bad.same.*field = wrong;
      StepChecks checks(Tolerances{}, o);
      checks.see(bad);
      EXPECT_FALSE(checks.passed()) << "same state " << name;
    }
    for (const auto& [name, field] : drift_fields) {
      // The state before a step is compared as the state after the one before.
      const bool before = std::string(name).ends_with("_before");
      StepRecord bad = good;
      bad.drift.*field = wrong;
      StepChecks checks(Tolerances{}, o);
      checks.see(bad);
      EXPECT_EQ(checks.passed(), before && !std::isnan(wrong)) << "drift " << name;
    }
  }
}

// The same step in fp32 with the reference lane widens what is allowed, where it costs more itself;
// a lane's mistake does not widen it, and neither does a NaN.
TEST_F(TrainRun, AnIllConditionedStepIsJudgedByThePlainOne) {
  TwinOptions o;
  o.twins = 0;
  const Tolerances t;
  for (const auto& [error, plain, passes] : {std::tuple{1e-3, 3e-4, true},
                                             {1e-3, 2e-4, false},
                                             {1e-3, 0.0, false},
                                             {1e-3, double(NAN), false},
                                             {t.grads, 0.0, true}}) {
    StepRecord r;
    r.candidate.step = 1;
    r.same.grads = error;
    r.plain.grads = plain;
    StepChecks checks(t, o);
    checks.see(r);
    EXPECT_EQ(checks.passed(), passes) << error << " beside " << plain;
  }
}

TEST_F(TrainRun, CurvesAreThinnedAndKeepBothEnds) {
  EXPECT_EQ(curve_stride(850, 0), 1);
  EXPECT_EQ(curve_stride(850, 34), 25);
  EXPECT_EQ(curve_stride(10, 100), 1);
  std::vector<StepRecord> steps(11);
  for (size_t i = 0; i < steps.size(); ++i) steps[i].candidate.step = static_cast<int64_t>(i) + 1;
  TwinOptions o;
  o.twins = 0;
  const auto curves = curves_of(steps, o, 5);
  EXPECT_EQ(curves[0]["steps"].dump(), "[1,5,10,11]");
}

TEST_F(TrainRun, TheLocaliserNamesTheStage) {
  RunOptions o = options(2);
  o.twin.mutant = "halved-gradient";
  EXPECT_EQ(run_training(o, go_on).facts.first_stage.substr(0, 18), "micro 0: head: dx,");
  o.twin.mutant = "coupled-decay";
  EXPECT_EQ(run_training(o, go_on).facts.first_stage.substr(0, 13), "optimizer: m,");
  // Nothing differs within one step: it says so and names what differs most.
  const Corpus corpus = read_corpus(o.config.data.text_files);
  TwinRun clean(o.config, corpus, TwinOptions{});
  clean.step();
  EXPECT_EQ(clean.localise(1e-3).substr(0, 23), "none by more than 0.001");
}

}  // namespace
}  // namespace talea::train
