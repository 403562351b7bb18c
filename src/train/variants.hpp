// What: the historical wrong ways to end a model, as named mutants beside the right lanes.
// Why: a gate is worth what it can fail on; each of these trained somebody's model for a while.
// Never: chosen unless asked for by name.
#pragma once

#include <span>

#include "train/loss.hpp"

namespace talea::train {

struct MutantInfo {
  const char* name;
  const char* kind;  // "loss", "window", "optimizer" or "gate": which part is replaced
  const char* text;
  const char* gate;    // the gate named for it: it must fail there
  const char* stream;  // where its gate looks for it
};

std::span<const MutantInfo> mutants();
// Null when there is no such mutant.
const MutantInfo* find_mutant(const std::string& name);

bool is_loss_mutant(const std::string& name);
template <typename T>
std::unique_ptr<Loss<T>> make_loss_mutant(const std::string& name, const TrainConfig& config);

}  // namespace talea::train
