// What: a training run in JSON: its configuration, one record a step, and the receipt's sections.
// Why: everything needed to repeat the run is in its receipt; a resumed run rereads its own steps.
// Never: writes a file.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "train/step_checks.hpp"

namespace talea::train {

// One line of steps.jsonl. Numbers that are not finite are strings.
std::string to_line(const StepRecord& record);
// Error(invalid_data) naming `file` and the field.
StepRecord from_line(const std::string& file, std::string_view line);

nlohmann::json to_json(const TrainConfig& config);
nlohmann::json to_json(const Check& check);

struct RunFacts {
  TrainConfig config;
  TwinOptions options;
  std::string corpus_hash;
  int64_t corpus_bytes = 0;
  int64_t parameters = 0;
  int64_t total_steps = 0;
  std::string lane;           // that ran
  std::string first_stage;    // of the localiser, where something failed
  int64_t resumed_from = -1;  // step of the checkpoint
  int64_t curve_points = 0;   // of each curve in the receipt, about; 0: every step
};

// The "train" section of a receipt.
nlohmann::json train_section(const RunFacts& facts, const std::vector<StepRecord>& steps,
                             const StepChecks& checks);
// The "gates" section of a plain run: one entry a check.
nlohmann::json gates_of(const StepChecks& checks);

const char* name_of(OptimizerKind kind);
const char* name_of(Schedule schedule);
const char* name_of(Accumulation accumulation);

}  // namespace talea::train
