// What: named configurations of training runs.
// Why: the demonstration, the gates and the documentation mean the same numbers by one name.
// Never: chooses a lane or reads a file.
#pragma once

#include <string>
#include <vector>

#include "train/config.hpp"

namespace talea::train {

// demo: a few minutes on two cores, the loss of real text falls by half. smoke: 70 updates.
// long: 850 updates of 8 micro-steps of 8 tokens, AdamW at 1e-3. Error(usage) for another name.
TrainConfig preset(const std::string& name);
std::vector<std::string> preset_names();

}  // namespace talea::train
