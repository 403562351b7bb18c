// What: the loop.
// Why: journal first, checkpoint second: whatever moment a kill picks, the two can be joined again.
// Never: writes a receipt; that is for whoever asked for the run, when it has completed.
#include "train/run.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/fail.hpp"

namespace talea::train {
namespace {

namespace fs = std::filesystem;

// steps.jsonl: one line a step, appended and flushed. Lines after the checkpoint are dropped when a
// run resumes, and so is a line that a kill cut short.
class Journal {
 public:
  Journal() = default;
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;
  ~Journal() {
    if (file_) std::fclose(file_);
  }

  // The steps up to `last`; the file is cut to them.
  std::vector<StepRecord> open(const std::string& path, int64_t last) {
    path_ = path;
    std::vector<StepRecord> kept;
    std::ifstream in(path, std::ios::binary);
    std::string line;
    uintmax_t bytes = 0;
    while (static_cast<int64_t>(kept.size()) < last && std::getline(in, line) && !in.eof()) {
      kept.push_back(from_line(path, line));
      bytes += line.size() + 1;
    }
    in.close();
    require(static_cast<int64_t>(kept.size()) == last, ErrorKind::invalid_data,
            "{}: {} steps, the checkpoint has {}", path, kept.size(), last);
    if (fs::exists(path)) fs::resize_file(path, bytes);
    file_ = std::fopen(path.c_str(), "ab");
    require(file_ != nullptr, ErrorKind::runtime, "{}: {}", path, std::strerror(errno));
    return kept;
  }

  void append(const StepRecord& record) {
    if (!file_) return;
    const std::string line = to_line(record) + "\n";
    const bool ok =
        std::fwrite(line.data(), 1, line.size(), file_) == line.size() && std::fflush(file_) == 0;
    require(ok, ErrorKind::runtime, "{}: {}", path_, std::strerror(errno));
  }

 private:
  std::string path_;
  FILE* file_ = nullptr;
};

void make_directory(const std::string& dir) {
  std::error_code failed;
  fs::create_directories(dir, failed);
  require(!failed, ErrorKind::runtime, "checkpoint directory {}: {}", dir, failed.message());
}

// A killed run may have left what it was writing beside its checkpoint.
void remove_leftovers(const std::string& checkpoint) {
  const fs::path file(checkpoint);
  const std::string beside = file.filename().string() + ".tmp-";
  std::error_code failed;
  for (const auto& entry : fs::directory_iterator(file.parent_path(), failed))
    if (entry.path().filename().string().starts_with(beside)) fs::remove(entry.path(), failed);
}

}  // namespace

RunResult run_training(const RunOptions& o, const OnStep& on_step) {
  const Corpus corpus = read_corpus(o.config.data.text_files);
  TwinRun run(o.config, corpus, o.twin);
  RunResult result{{}, {}, StepChecks(o.tolerances, o.twin)};
  result.facts = {o.config,
                  o.twin,
                  corpus.hash,
                  static_cast<int64_t>(corpus.bytes.size()),
                  run.candidate().layout().size(),
                  run.total_steps(),
                  "",
                  "",
                  -1,
                  o.curve_points};
  if (!o.initial_parameters_out.empty())
    save_parameters(o.initial_parameters_out, run.candidate().layout(),
                    run.candidate().state().params);
  const uint64_t identity = run_identity(o.config, o.twin, corpus);
  const std::string checkpoint = o.checkpoint_dir + "/checkpoint.safetensors";
  Journal journal;
  if (!o.checkpoint_dir.empty()) {
    make_directory(o.checkpoint_dir);
    if (o.resume) remove_leftovers(checkpoint);
    if (o.resume && fs::exists(checkpoint)) {
      load_checkpoint(checkpoint, run, identity);
      result.facts.resumed_from = run.candidate().state().step;
    } else {
      require(o.resume || !fs::exists(checkpoint), ErrorKind::usage,
              "{}: exists; resume it, or choose another directory", checkpoint);
    }
    result.steps = journal.open(o.checkpoint_dir + "/steps.jsonl", run.candidate().state().step);
    for (const StepRecord& r : result.steps) result.checks.see(r);
    if (!result.steps.empty() && !on_step(result.steps.back(), result.checks, run.total_steps()))
      result.stopped = true;
  }
  while (!run.done() && !result.stopped) {
    StepRecord r = run.step();
    const int64_t before = result.checks.first_past();
    result.checks.see(r);
    if (before < 0 && result.checks.first_past() >= 0)
      result.facts.first_stage = run.localise(o.tolerances.grads);
    journal.append(r);
    result.steps.push_back(std::move(r));
    result.stopped = !on_step(result.steps.back(), result.checks, run.total_steps());
    const bool last = run.done() || result.stopped;
    if (!o.checkpoint_dir.empty() &&
        (last || run.candidate().state().step % o.checkpoint_every == 0))
      save_checkpoint(checkpoint, run, identity);
  }
  if (!result.steps.empty()) result.facts.lane = result.steps.back().lane;
  return result;
}

}  // namespace talea::train
