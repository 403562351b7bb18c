// What: a call shared by ranks: heads cut, tokens cut, or both, around a lane that knows neither.
// Why: pieces of a sequence merge like chunks; every host lane takes part without a line of its
// own. Never: waits for another rank's scan, or lets a result depend on who arrived first.
#include "ops/mamba3/ranks.hpp"

#include "core/fail.hpp"

namespace talea::mamba3 {

int64_t ranked_workspace(const Problem& p, const Lane& lane, const DeviceFacts& device) {
  return lane.workspace_bytes(p, device);
}

void run_ranked(const Lane& lane, const Call& call, const Ranks&) {
  require(call.problem.heads_world == 1 && call.problem.sequence_world == 1, ErrorKind::unavailable,
          "mamba3: heads or tokens over several ranks");
  lane.run(call);
}

}  // namespace talea::mamba3
