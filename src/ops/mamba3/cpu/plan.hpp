// What: sizes of lane cpu: chunk, segments, what one thread and one head of a sequence work in.
// Why: the workspace formula is this layout run without memory.
// Never: a size that depends on the number of threads, but how many working sets there are.
#pragma once

#include <array>

#include "core/arena.hpp"
#include "ops/mamba3/contract.hpp"

namespace talea::mamba3::cpu {

constexpr int64_t up16(int64_t n) { return (n + 15) / 16 * 16; }

constexpr int most_levels = 6;        // of checkpoints
constexpr int64_t short_chunks = 32;  // in one segment

struct Plan {
  int64_t tokens = 0;   // C of a chunk
  int64_t rows = 0;     // C R
  int64_t room = 0;     // rows up to 16
  int64_t columns = 0;  // N up to 16
  int64_t values = 0;   // P up to 16
  int64_t pairs = 0;    // A up to 16
  int64_t turned = 0;   // row of cosines and sines
  int64_t rank = 1;
  // Backward keeps a state every stride[0] chunks of the sequence, within the one at work every
  // stride[1], .. down to every chunk. Two levels unless the workspace limit asks for more.
  int levels = 2;
  int64_t base = 1;  // of the strides: each is so many of the next
  std::array<int64_t, most_levels> stride{};
  bool parallel = false;  // the chunks of a segment side by side
  int64_t chunks = 0;     // of the longest sequence there could be
  int64_t wave = 1;       // sequences whose heads go through backward side by side
  int64_t threads = 1;
  bool needs_y = false;  // backward
  int64_t state() const { return columns * values; }
  int64_t segment() const { return stride[0]; }  // J chunks
  int64_t segments() const { return (chunks + segment() - 1) / segment(); }
  // States that level k keeps; the last also has the one behind its chunks.
  int64_t states_of(int k) const { return k == 0 ? segments() : base + (k == levels - 1 ? 1 : 0); }
  int64_t side_by_side() const { return parallel ? segment() : 1; }
  int64_t parameters() const { return rank * (2 * columns + 3 * values) + values; }
};
Plan make_plan(const Problem& p, const DeviceFacts& device);

int64_t workspace_of(const Problem& p, const Plan& plan);
// One state a segment, head and sequence; packed lengths are not known here, only their bound.
int64_t saved_of(const Problem& p, const Plan& plan);
// The products of a call, each with how often a chunk forms it.
std::vector<ProductFact> products_of(const Problem& p, const Plan& plan);

// The working set of one thread.
struct ThreadMemory {
  ThreadMemory() = default;
  ThreadMemory(Arena& arena, const Problem& p, const Plan& plan);

  float *dt, *lambda, *other, *gamma, *b, *s, *adt, *high, *low, *left, *right, *some;  // [C + 16]
  float *left_rows, *right_rows, *key_rows;                                             // [rows]
  float *rates, *tanh, *cosine, *sine, *decay;
  float *q_bias, *k_bias, *mimo_v, *mimo_z, *mimo_out, *weight;
  float *raw, *v_raw, *z_raw;      // rows as they were loaded
  float *q, *k, *kt, *v, *scaled;  // in panels
  float *scores, *seen;            // [room, room] in panels
  float *y, *out, *state, *joined;
  uint32_t *high_turn, *low_turn;
  float* taint;
  float* scratch;
  // backward
  float *vt, *o, *w, *w_decay, *w_seen, *transposed, *dy, *dv, *dz;
  float* slope;  // of tanh
  float *turn, *ds, *anchor, *extra, *parameters, *sum;
  double *dot, *turned;  // [tokens]; [N], summed over later tokens
  const float** pointers;
};

// Of a token whose gradients wait for those of the chunk before.
struct Pending {
  double ddt = 0, dgamma = 0;
  float lambda = 0, other = 0, dt = 0;
  int64_t token = -1;  // none
};

// What the gradients of one chunk leave for its head.
struct ChunkLeft {
  Pending first;
  float last_ds = 0;
  double skip = 0;
};

// What one head of one sequence keeps between its chunks: in backward, and where chunks are worked
// off side by side.
struct HeadMemory {
  HeadMemory() = default;
  HeadMemory(Arena& arena, const Problem& p, const Plan& plan, bool saved);

  float* states[most_levels];    // [N, P] in panels each; of level 0 none where `saved` has them
  uint32_t* turns[most_levels];  // beside each state 3 A numbers: high, low, taint
  float *gradient, *gradients;   // behind the chunk at work; of a segment, where it is side by side
  float* decays;                 // [J]
  double *first_anchor, *last_turn;  // [N]
  float *dq, *dk, *dangle, *sums;    // of each chunk that is side by side
  ChunkLeft* left;
  double* parameters;
  Pending pending;
};

struct Memory {
  Memory(Arena& arena, const Problem& p, const Plan& plan, bool saved);
  int64_t* ends;
  double* parameters;
  ThreadMemory* threads;
  HeadMemory* heads;
};

}  // namespace talea::mamba3::cpu
