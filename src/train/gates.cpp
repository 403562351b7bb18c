// What: the table of gates and the table of mutants against them.
// Why: a gate that no mutant fails proves nothing, and the table shows which do.
// Never: counts a mutant as killed by a gate that did not run.
#include "train/gates.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/fail.hpp"

namespace talea::train {
namespace {

constexpr std::array<Gate, 5> table = {{
    {"drift_smoke", "70 updates on every stream: same-state error and drift against the noise band",
     drift_smoke},
    {"realistic_long_horizon",
     "850 updates of 8 micro-steps on every stream: the same, over a long horizon",
     realistic_long_horizon},
    {"optimizer_parity", "AdamW against torch's, 1000 steps, three sizes", optimizer_parity},
    {"fd_gradients",
     "every tensor's gradient, through every lane, against central differences in fp64",
     fd_gradients},
    {"replay_determinism", "two runs and other thread counts: every bit of the state",
     replay_determinism},
}};

// Whether the mutant's part takes part in the gate at all.
bool concerns(const MutantInfo& m, const std::string& gate) {
  const bool run = gate == "drift_smoke" || gate == "realistic_long_horizon";
  if (std::strcmp(m.kind, "loss") == 0) return gate != "optimizer_parity";
  if (std::strcmp(m.kind, "optimizer") == 0) return gate == "optimizer_parity" || run;
  return run;
}

}  // namespace

std::span<const Gate> gates() { return table; }

bool GateResult::passed() const {
  return !stopped && !checks.empty() &&
         std::all_of(checks.begin(), checks.end(), [](const Check& c) { return c.passed; });
}

GateResult run_gate(const std::string& name, const GateContext& context) {
  for (const Gate& g : table)
    if (name == g.name) {
      GateResult r = g.run(context);
      r.name = g.name;
      r.text = g.text;
      return r;
    }
  fail(ErrorKind::usage,
       "gate = {}: no such gate (drift_smoke, realistic_long_horizon, optimizer_parity, "
       "fd_gradients, replay_determinism)",
       name);
}

bool MutantRow::killed() const {
  return std::find(killed_by.begin(), killed_by.end(), named_gate) != killed_by.end();
}

std::vector<MutantRow> mutant_table(const GateContext& context, bool quick,
                                    const std::function<void(const MutantRow&)>& on_row) {
  std::vector<MutantRow> rows;
  for (const MutantInfo& m : mutants()) {
    MutantRow row{m.name, m.text, m.gate, {}, {}};
    for (const Gate& g : table) {
      const bool named = std::strcmp(g.name, m.gate) == 0;
      if (!concerns(m, g.name)) continue;
      if (quick && !named && std::strcmp(g.name, "realistic_long_horizon") == 0) continue;
      GateContext planted = context;
      planted.mutant = m.name;
      planted.stream = std::strlen(m.stream) > 0 ? m.stream : "text";
      row.examined.push_back(g.name);
      if (!run_gate(g.name, planted).passed()) row.killed_by.push_back(g.name);
    }
    on_row(row);
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace talea::train
