// What: sizes of lane cpu: chunk, segments, what one thread and one head of a sequence work in.
// Why: the workspace formula is this layout run without memory.
// Never: a size that depends on the number of threads, but how many working sets there are.
#pragma once

#include "core/arena.hpp"
#include "ops/mamba3/contract.hpp"

namespace talea::mamba3::cpu {

constexpr int64_t up16(int64_t n) { return (n + 15) / 16 * 16; }

struct Plan {
  int64_t tokens = 0;   // C of a chunk
  int64_t rows = 0;     // C R
  int64_t room = 0;     // rows up to 16
  int64_t columns = 0;  // N up to 16
  int64_t values = 0;   // P up to 16
  int64_t pairs = 0;    // A up to 16
  int64_t turned = 0;   // row of cosines and sines
  int64_t rank = 1;
  int64_t segment = 1;  // J chunks
  int64_t chunks = 0;   // of the longest sequence there could be
  int64_t wave = 1;     // sequences whose heads go through backward side by side
  int64_t threads = 1;
  bool needs_y = false;  // backward
  int64_t state() const { return columns * values; }
  int64_t segments() const { return (chunks + segment - 1) / segment; }
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
  float *y, *out, *state;
  uint32_t *high_turn, *low_turn;
  float* taint;
  float* scratch;
  // backward
  float *vt, *o, *w, *w_decay, *w_seen, *transposed, *dy, *dv, *dz;
  float *turn, *dot, *ds, *anchor, *extra, *parameters, *sum;
  const float** pointers;
};

// What one head of one sequence keeps between the chunks of backward.
struct HeadMemory {
  HeadMemory() = default;
  HeadMemory(Arena& arena, const Problem& p, const Plan& plan, bool saved);

  float *gradient, *states, *checkpoints;  // [N, P] in panels; J + 1; one a segment
  uint32_t *segment_turns, *chunk_turns;   // 3 A numbers each: high, low, taint
  float *first_anchor, *last_turn;         // [N]
  float *dq, *dk, *dangle;
  double* parameters;
  struct Pending {
    double ddt, dgamma;
    float lambda, other, dt;
    int64_t token;  // -1: none
  } pending;
};

struct Memory {
  Memory(Arena& arena, const Problem& p, const Plan& plan, bool saved);
  int64_t* ends;
  double* parameters;
  ThreadMemory* threads;
  HeadMemory* heads;
};

}  // namespace talea::mamba3::cpu
