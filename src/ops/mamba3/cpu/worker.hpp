// What: one chunk of one head at a time, in the memory of one thread.
// Why: forward, the states of backward and its gradients share how a chunk is read.
// Never: waits for another thread.
#pragma once

#include "ops/mamba3/cpu/plan.hpp"
#include "ops/mamba3/cpu/rows.hpp"

namespace talea::mamba3::cpu {

class Worker {
 public:
  Worker(const Call& call, const Plan& plan, ThreadMemory& memory)
      : c_(call), p_(call.problem), plan_(plan), m_(memory) {}

  // The head that the next calls are about.
  void begin(const Sequence& sequence, int64_t head);
  int64_t chunks() const { return (T_ + plan_.tokens - 1) / plan_.tokens; }

  // All of forward. `saved`: this head's checkpoints [segments, N, P], or null.
  void forward(float* saved);

  // Backward: turns (and, but for `from`, states) at each segment's start.
  void checkpoints(HeadMemory& u, const float* from);
  void segment_states(HeadMemory& u, int64_t segment, const float* from);
  void start_gradients(HeadMemory& u);
  void chunk_gradients(HeadMemory& u, int64_t chunk);
  void end_gradients(HeadMemory& u);
  void pass_through();

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
  void advance(float* state);        // over the loaded chunk
  void scores();                     // Q K^T, decays, what each row sees
  void outputs(const float* state);  // y
  void store_outputs();
  void final_states(const float* state);
  // gradients, in the order in which a chunk is worked off
  void upstream(const float* state);  // dy, in panels o
  void pair_products();               // W and what follows from it alone
  void query_gradients(HeadMemory& u, const float* state);
  void key_gradients(HeadMemory& u);
  void value_gradients(HeadMemory& u);
  void last_turns(HeadMemory& u);
  void turn_gradients(HeadMemory& u, bool last);
  void token_gradients(HeadMemory& u, double energy);
  void store_token(int64_t token, const HeadMemory::Pending& p, double db);
  void store_values(HeadMemory& u);
  void advance_gradient(HeadMemory& u);
  void first_pair(int64_t i, int64_t& u, int64_t& w) const;
  Rotation rotation() const;

  // Row i to `to` + i * ranks * padded, filled up with zeros to `padded`.
  void load_rows(const Tensor& t, int64_t first, int64_t stride_rows, int64_t rows, int64_t stride,
                 int64_t n, int64_t padded, float* to, int64_t ranks = 1);
  void load_parameter(const Tensor& t, int64_t n, int64_t padded, float* to);
  // Products of panels over the rows of the chunk.
  void whole(const float* a, const float* b, int64_t depth, int64_t b_rows, int64_t columns,
             float* to);
  void lower(const float* a, const float* b, int64_t columns, float* to);
  void upper(const float* a, const float* b, int64_t columns, float* to);
  void pairs(const float* a, const float* b, int64_t depth, float* to);
  void into_state(const float* a, const float* b, float* state);

  const Call& c_;
  const Problem& p_;
  const Plan& plan_;
  ThreadMemory& m_;
  Sequence s_;
  int64_t h_ = 0, g_ = 0, T_ = 0;
  int64_t first_ = 0, n_ = 0, rows_ = 0;  // of the loaded chunk: first token, tokens, rows
  float skip_ = 0;
  double sum_skip_ = 0;
};

}  // namespace talea::mamba3::cpu
