// What: the gates of training parity, each a run that can fail and a list of what it compared.
// Why: one name stands for configuration, comparisons and tolerances.
// Never: passes because nothing was compared.
#pragma once

#include <functional>
#include <span>

#include "train/run.hpp"
#include "train/variants.hpp"

namespace talea::train {

struct GateContext {
  std::vector<std::string> text_files;
  std::string loss_lane = "auto";
  std::string mutant;  // the candidate's planted mistake; empty: none
  std::string stream;  // only this one; empty: all the gate's own
  uint64_t seed = 42;
  int threads = 1;
  OnStep on_step;  // may be empty
};

struct GateResult {
  std::string name, text;
  std::vector<Check> checks;         // names carry the stream, where a gate has several
  std::string first_stage;           // where the first failure began, of a twin run
  std::vector<std::string> streams;  // that a twin run was made on
  bool stopped = false;
  double seconds = 0;

  bool passed() const;
};

struct Gate {
  const char* name;
  const char* text;
  GateResult (*run)(const GateContext&);
};

// drift_smoke, realistic_long_horizon, optimizer_parity, fd_gradients, replay_determinism.
std::span<const Gate> gates();
// Error(usage) for an unknown name.
GateResult run_gate(const std::string& name, const GateContext& context);

// Every mutant against every gate; and nothing planted against every gate.
struct MutantRow {
  std::string name, text, named_gate;
  std::vector<std::string> killed_by;
  std::vector<std::string> examined;  // the gates that could run with it
  bool killed() const;                // by the gate named for it
};
// quick leaves the long horizon to the mutants named for it.
std::vector<MutantRow> mutant_table(const GateContext& context, bool quick,
                                    const std::function<void(const MutantRow&)>& on_row);

GateResult drift_smoke(const GateContext&);
GateResult realistic_long_horizon(const GateContext&);
GateResult optimizer_parity(const GateContext&);
GateResult fd_gradients(const GateContext&);
GateResult replay_determinism(const GateContext&);

}  // namespace talea::train
