// What: sizes of the device lanes: chunk, segments, slices, and where each piece lies.
// Why: a pure function of problem and device; the workspace formula is this layout without memory.
// Never: reads a tensor, or lets a limit change a bit of a result.
#pragma once

#include "core/device_facts.hpp"
#include "ops/mamba3/rows/cut.hpp"
#include "talea/mamba3.hpp"

namespace talea {
class Arena;
}

namespace talea::mamba3::cuda {

// In what rows are multiplied: fp32 as three products of tf32, one product of tf32, bf16.
enum class Engine : int32_t { three_tf32 = 0, tf32 = 1, bf16 = 2 };
const char* name_of(Engine engine);

inline constexpr int most_rows = 128;
// Tiles of 16 x 32 of the state that a warp of forward holds in registers.
inline constexpr int kept_tiles = 2;

struct Plan {
  Engine engine = Engine::three_tf32;
  int64_t chunk = 1;       // C tokens
  int64_t chunks = 0;      // of the longest sequence there could be
  int64_t segment = 1;     // J, or more chunks where backward has room for them
  int64_t segments = 0;    // of the longest sequence
  int64_t kept_every = 0;  // J, where segments are longer
  int64_t wave = 0;        // sequences whose heads go side by side, where not all do
  int64_t slice = 1;       // chunks whose rows by head exist at a time
  int64_t blocks = 0;      // of the largest launch
  bool keeps = false;      // forward: the state lies in registers
  int threads = 512;       // of a block of forward; backward has 512
  ChunkPlaces forward, states, backward;
  int64_t columns = 0, values = 0;  // N and P of a unit, where heads are cut
  int64_t parts = 0;        // of the heads of a group, where the chunks of a slice go side by side
  int64_t ahead = 0;        // chunks whose tokens are formed ahead of forward
  bool rates = false;       // of angles that heads share, formed once ahead of forward
  bool beside = false;      // those of the next chunks beside forward of these
  int64_t stretch = 0;      // chunks; of a sequence, `abreast` of them go side by side in forward
  bool hands = false;       // states, or gradients of them, are handed in or on
  bool by_segment = false;  // backward: turns before the pieces of one segment at a time
  // A pack in rounds: how many there are at most, and the chunks and stretches of one; 0: each
  // sequence as if it were as long as all.
  int64_t rounds = 0, room = 0, abreast = 0;
  int64_t cut_every = 1;   // chunks
  int64_t group = 0;       // rounds whose states are kept at a time; 0: all
  bool uses_saved = true;  // backward: states of `saved` lie where a sequence is cut
};

// Of packed sequences: chunks of all, and rounds of `room` chunks and `abreast` stretches, at most.
int64_t most_chunks(const Problem& p, int64_t chunk);
int64_t most_rounds(const Problem& p, const Plan& plan);
// Of lane cuda.
Plan make_plan(const Problem& p, const DeviceFacts& device);

// The problem as its units are one, and how they lie in its heads.
Problem in_units(const Problem& p, const Plan& plan);
Cut cut_of(const Problem& p, const Plan& plan);
// Scratch of a block of its largest kernel.
int64_t scratch_of(const Plan& plan, const Problem& p);
Sizes sizes_of(const Problem& p, const Plan& plan);

struct Buffers {
  int64_t *ends = nullptr, *kept = nullptr, *status = nullptr;
  double* totals = nullptr;
  char* scratch = nullptr;
  UnitBuffers units;
  Cut cut;
  PackRounds pack;
};
Buffers lay_out(Arena& arena, const Problem& p, const Plan& plan);
int64_t workspace_of(const Problem& p, const Plan& plan);
// J: chunks between two checkpoints.
int64_t kept_every(const Plan& plan);
// Checkpoints of all sequences; of packed ones the bound.
int64_t saved_of(const Problem& p, const Plan& plan);

}  // namespace talea::mamba3::cuda
