// What: one chunk of one head at a time, in the memory of one thread.
// Why: forward, the states of backward and its gradients share how a chunk is read.
// Never: waits for another thread.
#pragma once

#include "device/cpu/tile_product.hpp"
#include "ops/mamba3/cpu/plan.hpp"
#include "ops/mamba3/cpu/rows.hpp"

namespace talea::mamba3::cpu {

// Element (n, p) of a state [N, P] in panels.
inline int64_t in_panels(int64_t n, int64_t p, int64_t columns) {
  const int64_t w = talea::cpu::lanes();
  return p / w * columns * w + n * w + p % w;
}

class Worker {
 public:
  Worker(const Call& call, const Plan& plan, ThreadMemory& memory)
      : c_(call), p_(call.problem), plan_(plan), m_(memory) {}

  // The head that the next calls are about.
  void begin(const Sequence& sequence, int64_t head);
  int64_t chunks() const { return (T_ + plan_.tokens - 1) / plan_.tokens; }

  // All of forward. `saved`: this head's checkpoints [segments, N, P], or null.
  void forward(float* saved);

  // Backward: turns (and, but for `from`, states) at each segment's start; those of each level
  // below, from `chunk`, where one of the level above lies.
  void checkpoints(HeadMemory& u, const float* from);
  void block_states(HeadMemory& u, int level, int64_t chunk, const float* from);
  void start_gradients(HeadMemory& u);
  void chunk_gradients(HeadMemory& u, int64_t chunk);  // the last chunk first
  void end_gradients(HeadMemory& u);
  void pass_through();

  // The same in steps, for chunks side by side. `turns`: as kept before the chunk.
  void start(float* state, uint32_t* turns);
  void turn_sum(int64_t chunk, uint32_t* to);
  float chunk_summary(int64_t chunk, const uint32_t* turns, float* own);  // gives its decay
  void chunk_outputs(int64_t chunk, const uint32_t* turns, const float* state, float* saved);
  void start_back(HeadMemory& u);
  void unpack(const float* kept, float* state) const;  // [N, P] as `saved` has it
  struct ChunkAt {
    int64_t chunk, slot;
    const uint32_t* turns;
    const float *state, *gradient;  // before and, one further, behind the chunk; behind it
  };
  float gradient_summary(const ChunkAt& at, float* own);  // gives the chunk's decay
  void find_ends(HeadMemory& u, const ChunkAt& last);
  void gradients_of(HeadMemory& u, const ChunkAt& at);
  void close_chunk(HeadMemory& u, int64_t slot, const float* sums);
  const float* sums() const { return m_.parameters; }

 private:
  // What of a chunk is loaded.
  void tokens(int64_t chunk);
  void turns(bool columns);
  void key_and_value();
  void query();
  void start_state(float* state);
  void start_turns();
  void keep_turns(uint32_t* to) const;
  void take_turns(const uint32_t* from);
  float summary(float* own);   // T of the loaded chunk; gives its decay
  void advance(float* state);  // over the loaded chunk
  void load(int64_t chunk, const uint32_t* turns);
  void chunk_back(HeadMemory& u, const ChunkAt& at, bool find_last);
  float* rows_of(float* rows, int64_t slot) const {
    return rows + slot * plan_.room * plan_.columns;
  }
  void scores();                     // Q K^T, decays, what each row sees
  void outputs(const float* state);  // y
  void store_outputs();
  void finished_rows(const float* state);  // of the loaded chunk: y to out
  void keep_state(int64_t chunk, const float* state, float* saved) const;
  void final_states(const float* state);
  // gradients, in the order in which a chunk is worked off
  void upstream(const float* state);  // dy, in panels o
  void pair_products();               // W and what follows from it alone
  void query_gradients(const ChunkAt& at, float* dq);
  void key_gradients(const ChunkAt& at, float* dk);
  void value_gradients(const ChunkAt& at);
  void anchor_turns(const ChunkAt& at);
  float gradient_summary(float* own);
  void last_turns(HeadMemory& u);
  void turn_gradients(float* dq, float* dk, bool last);
  void token_gradients(HeadMemory& u, int64_t slot);
  void store_token(const Pending& p, double db);
  void store_values();
  // Columns u and w of pair i.
  struct Pair {
    int64_t u, w;
  };
  Pair pair(int64_t i) const {
    return halves_ ? Pair{i, i + p_.state_dim / 2} : Pair{2 * i, 2 * i + 1};
  }
  Rotation rotation() const;

  // Row i to `to` + i * ranks * padded, filled up with zeros to `padded`.
  void load_rows(const Tensor& t, int64_t first, int64_t stride_rows, int64_t rows, int64_t stride,
                 int64_t n, int64_t padded, float* to, int64_t ranks = 1);
  void load_parameter(const Tensor& t, int64_t n, int64_t padded, float* to);
  // Products of panels over the rows of the chunk. ahead: rows of its tokens that are wanted next.
  void whole(const float* a, const float* b, int64_t depth, int64_t b_rows, int64_t columns,
             float* to, const talea::cpu::Ahead& ahead = {});
  void lower(const float* a, const float* b, int64_t columns, float* to);
  void upper(const float* a, const float* b, int64_t columns, float* to);
  void pairs(const float* a, const float* b, int64_t depth, float* to,
             const talea::cpu::Ahead& ahead = {});
  talea::cpu::Ahead rows_ahead(const Tensor& t, int64_t stride, int64_t first) const;
  void into_state(const float* a, const float* b, float* state);

  const Call& c_;
  const Problem& p_;
  const Plan& plan_;
  ThreadMemory& m_;
  Sequence s_;
  int64_t h_ = 0, g_ = 0, T_ = 0;
  int64_t first_ = 0, n_ = 0, rows_ = 0;  // of the loaded chunk: first token, tokens, rows
  float skip_ = 0;
  bool halves_ = false;
  double sum_skip_ = 0, energy_ = 0;
};

}  // namespace talea::mamba3::cpu
