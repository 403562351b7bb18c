// What: twin runs from outside: parity, resume, kills, damaged checkpoints, gates that fail.
// Why: what a run promises (nothing lost, nothing passed by accident) is only true when tried.
// Never: depends on timing for its verdict.
#include "train/run.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "talea/error.hpp"
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

// Each child continues the run and is killed at a random moment of it.
TEST_F(TrainRun, TwoHundredKillsLoseAtMostOneStep) {
  RunOptions o = options(400);
  o.twin.twins = 0;
  o.twin.same_state = false;
  o.checkpoint_dir = checkpoint();
  o.resume = true;
  const Random random(9, 9);
  int64_t last = 0;
  int killed = 0;
  for (uint64_t round = 0; killed < 200; ++round) {
    ASSERT_LT(round, 2000u);
    int fd[2];
    ASSERT_EQ(::pipe(fd), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      int64_t step = 0;
      run_training(o, [&](const StepRecord& r, const StepChecks&, int64_t) {
        step = r.candidate.step;
        return ::write(fd[1], &step, sizeof step) == sizeof step;
      });
      ::_exit(0);
    }
    ::close(fd[1]);
    int64_t reported = last;
    // Wait for a sign of life, then kill somewhere within the next few steps.
    if (::read(fd[0], &reported, sizeof reported) != sizeof reported) reported = last;
    ::usleep(static_cast<useconds_t>(random.below(round, 4000)));
    ::kill(child, SIGKILL);
    int64_t step;
    while (::read(fd[0], &step, sizeof step) == sizeof step) reported = step;
    ::close(fd[0]);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) ++killed;
    const Corpus corpus = read_corpus(o.config.data.text_files);
    TwinRun run(o.config, corpus, o.twin);
    if (fs::exists(checkpoint() + "/checkpoint.safetensors"))
      load_checkpoint(checkpoint() + "/checkpoint.safetensors", run,
                      run_identity(o.config, o.twin, corpus));
    last = run.candidate().state().step;
    // The step that was reported may not be saved yet; every step before it is.
    ASSERT_GE(last, reported - 1);
    if (last >= 400) {
      fs::remove_all(checkpoint());
      last = 0;
    }
  }
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

TEST_F(TrainRun, AFullDiskEndsWithAnErrorAndTheOldCheckpoint) {
  RunOptions o = options(2);
  o.checkpoint_dir = checkpoint();
  run_training(o, go_on);
  const std::string good = bytes_of(checkpoint() + "/checkpoint.safetensors");
  fs::remove(checkpoint() + "/steps.jsonl");
  o.checkpoint_dir = checkpoint();
  // The journal on a device that is always full.
  const fs::path other = dir_ / "full";
  fs::create_directories(other);
  fs::create_symlink("/dev/full", other / "steps.jsonl");
  o.checkpoint_dir = other.string();
  EXPECT_THROW(run_training(o, go_on), std::exception);
  EXPECT_FALSE(fs::exists(other / "checkpoint.safetensors"));
  EXPECT_EQ(bytes_of(checkpoint() + "/checkpoint.safetensors"), good);
}

TEST_F(TrainRun, JournalLinesReadBackTheSame) {
  StepRecord r;
  r.candidate.step = 7;
  r.candidate.loss = NAN;
  r.drift.params = INFINITY;
  r.same.grads = 1.0 / 3;
  r.lane = "cpu";
  r.same.worst_tensor = "block0.norm1";
  EXPECT_EQ(to_line(from_line("journal", to_line(r))), to_line(r));
  EXPECT_THROW(from_line("journal", "{}"), Error);
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

TEST_F(TrainRun, TheLocaliserNamesTheStage) {
  RunOptions o = options(2);
  o.twin.mutant = "halved-gradient";
  EXPECT_EQ(run_training(o, go_on).facts.first_stage.substr(0, 18), "micro 0: head: dx,");
  o.twin.mutant = "coupled-decay";
  EXPECT_EQ(run_training(o, go_on).facts.first_stage.substr(0, 13), "optimizer: m,");
}

}  // namespace
}  // namespace talea::train
