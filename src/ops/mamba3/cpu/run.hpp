// What: a call of lane cpu: which thread works off what, and what is summed over heads.
// Why: heads in turn or chunks side by side are two ways through the same pieces, bit for bit.
// Never: a sum whose order depends on the threads.
#pragma once

#include <omp.h>

#include "ops/mamba3/cpu/worker.hpp"

namespace talea::mamba3::cpu {

class Run {
 public:
  Run(const Call& c, const Plan& plan)
      : c_(c),
        p_(c.problem),
        plan_(plan),
        arena_(c.workspace),
        m_(arena_, c.problem, plan_, c.in.saved.present) {}

  void all();

 private:
  int64_t sequences() const { return p_.pass == Pass::step ? p_.batch : p_.sequences; }
  Sequence sequence(int64_t n) const { return sequence_of(p_, m_.ends, n); }
  int64_t chunks_of(int64_t n) const {
    return (sequence(n).tokens() + plan_.tokens - 1) / plan_.tokens;
  }
  // Checkpoints of a sequence, and of those before it; where a head's lie in `saved`.
  int64_t kept(int64_t n) const { return (chunks_of(n) + plan_.segment() - 1) / plan_.segment(); }
  int64_t kept_before(int64_t sequence) const;
  float* saved_of(const Tensor& t, int64_t before, int64_t n, int64_t h) const;
  Worker worker() { return {c_, plan_, m_.threads[omp_get_thread_num()]}; }

  // Heads in turn.
  void forward();
  void backward();
  void wave(int64_t first, int64_t last);
  template <typename F>
  void each_head(int64_t first, int64_t last, F f);

  // Chunks side by side (side_by_side.cpp): a segment at a time.
  void forward_side_by_side();
  void backward_side_by_side();
  template <typename F>
  void each_chunk(int64_t segment, F f);
  template <typename F>
  void each_unit(F f);
  void segment_turns(int64_t segment);
  void segment_states(int64_t segment);
  void segment_gradients(int64_t segment);
  void checkpoints_side_by_side();
  void carry(HeadMemory& u, int64_t count);
  int64_t count_of(int64_t n, int64_t segment) const;
  float* state_of(const HeadMemory& u, int64_t slot) const {
    return u.states[1] + slot * plan_.state();
  }
  uint32_t* turns_of(const HeadMemory& u, int64_t slot) const {
    return u.turns[1] + slot * 3 * plan_.pairs;
  }

  // Rows of all heads of sequence n at a chunk: the sums over the heads of each group.
  struct Sums {
    int64_t sequence, chunk, slot;
    const HeadMemory* heads;
  };
  void token_sums(const Sums& at, int64_t t);
  void add_parameters(const HeadMemory& u, int64_t h);
  void record();

  const Call& c_;
  const Problem& p_;
  const Plan& plan_;
  Arena arena_;
  Memory m_;
};

}  // namespace talea::mamba3::cpu
