// What: one head of one sequence in fp64: its rows, steps and states, token by token.
// Why: forward, backward and step read the definition's section 1.2 in one place.
// Never: uses a chunk, or stores rows of more than one token.
#pragma once

#include <utility>

#include "core/arena.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/host_outputs.hpp"

namespace talea::mamba3::reference {

// Working memory of one head; all of one thread.
struct Memory {
  Memory(Arena& arena, const Problem& p);

  int64_t segment = 1;  // tokens of a segment of backward
  int64_t* ends;
  uint64_t* turns;                      // [S, A]
  double *taint, *cosine, *sine;        // [S, A]; of one token [A]
  double *q, *k, *v, *k_prev, *v_prev;  // rows of one token [R, N] or [R, P]
  double *h, *e;                        // [P, N]
  double *y, *dy, *normed;              // [R, P]
  double *dq, *dk, *dv, *next_dk, *next_dv;
  double* dtheta;                     // [A]
  double *checkpoints, *before;       // [segments, P, N], [segment, P, N]
  double *sum_q, *sum_k, *sum_angle;  // [S, R, N] of a group, [S, A]
  double* parameters;                 // [H, parameter_count]
};

// What a token does to the state.
struct Step {
  double dt, lambda, other, gamma, b, alpha;  // other = 1 - lambda
};

class Head {
 public:
  Head(const Call& call, Memory& memory, const Sequence& sequence, int64_t head);

  void forward();
  void backward();

 private:
  void angles();  // turns and taints of all tokens
  void start();   // h, k_prev, v_prev from the initial states
  Step step(int64_t t) const;
  void turn(int64_t t);  // cosine and sine of token t
  void rotate(double* row, double direction) const;
  void rows(int64_t t, double* q, double* k, double* v);
  double torque(const double* row, const double* gradient, int64_t pair) const;
  void advance(const Step& s);  // h of t - 1 to h of t; memory.h and rows of t
  void hold();                  // rows of t become those of the token before
  void raw_output();            // y of the token
  void finish(int64_t t);
  void finish_adjoint(int64_t t);  // dy, d_z and the finish's parameters
  void final_states();
  void pass_through();  // an empty sequence
  void checkpoint_pass();
  void segment_back(int64_t first, int64_t last);
  void token_back(int64_t t, const double* before);
  void store_token_gradients(int64_t t, const Step& s, double dgamma, double db, double dadt);
  void turn_back(int64_t t);
  void initial_gradients();
  std::pair<int64_t, int64_t> pair_columns(int64_t pair) const;

  const Call& c_;
  const Problem& p_;
  Memory& m_;
  const Sequence s_;
  const int64_t h_, g_, T_, R_, N_, P_, A_;
  double* parameter_;  // of this head
};

}  // namespace talea::mamba3::reference
