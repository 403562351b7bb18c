// What: the whole state of a twin run in one file, and back.
// Why: a resumed run equals the uninterrupted one bit for bit; a kill loses at most one step.
// Never: overwrites a good checkpoint with half of one.
#pragma once

#include <string>

#include "train/twin.hpp"

namespace talea::train {

// A safetensors file: for every run ("candidate", "reference", "base", "twin1", ...) its parameters
// by name, moments, the gradients of an open window and the counters; and what the run is, as a
// hash of configuration and corpus. The generator is counter-based: seed and cursor are its state.
void save_checkpoint(const std::string& path, TwinRun& run, uint64_t identity);

// Error(invalid_data) naming file and field when the file is of another run, another shape or
// damaged.
void load_checkpoint(const std::string& path, TwinRun& run, uint64_t identity);

// Initial or trained parameters alone, by name: for other programs.
void save_parameters(const std::string& path, const Layout& layout,
                     const std::vector<float>& params);

// What a checkpoint must agree on: everything in the configuration that changes a bit of the run,
// the mutant, and the corpus. The run's length may differ (a longer run may continue) unless the
// schedule depends on it; the number of threads may always differ.
uint64_t run_identity(const TrainConfig& config, const TwinOptions& options, const Corpus& corpus);

}  // namespace talea::train
