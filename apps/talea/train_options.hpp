// What: the flags of `talea train` bound to a run's options.
// Why: the list of flags is long; the command itself stays short.
// Never: runs anything.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "linear_cross_entropy/shards.hpp"
#include "train/gates.hpp"

namespace CLI {
class App;
}

namespace talea::cli {

struct TrainFlags {
  train::RunOptions run;
  std::string preset = "long";
  std::string json_out, report;
  std::string stream;  // as given; a gate runs all of its own without it
  std::vector<std::string> gates;
  bool mutant_table = false, quick = false;
  ShardFlags ranks;
  // Explicit flags win over the preset, in whatever order they stand.
  std::vector<std::function<void(train::TrainConfig&)>> overrides;
};

void bind_train_flags(CLI::App& command, TrainFlags& flags);

// Applies the preset and then the explicit flags. After parsing, before the run.
void settle_train_flags(TrainFlags& flags);

}  // namespace talea::cli
