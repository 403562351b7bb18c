// What: one head of one sequence in the chunk form, every intermediate stored in the input's dtype.
// Why: what eager tensor code computes: the yardstick of accuracy, and a comparison by name.
// Never: an anchor, an exact sum, or a product kept in registers.
#pragma once

#include "core/arena.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/host_outputs.hpp"

namespace talea::mamba3::unfused {

// A dense matrix in memory, in the dtype of q or in fp32.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0, columns = 0;

  float at(int64_t i, int64_t j) const;
  void set(int64_t i, int64_t j, float value) const;  // rounded once
  Matrix slice(int64_t first, int64_t count) const;   // of rows
};

struct Memory {
  Memory(Arena& arena, const Problem& p);

  int64_t chunk;
  int64_t* ends;
  Matrix cosine, sine;                                      // [S, A]
  Matrix q, k, v, y, dy, dq, dk, dv;                        // [S R, N or P]
  Matrix states, state, gradient, copy;                     // [chunks P, N]; [P, N] fp32; [P, N]
  Matrix scores, decay, weighted, products, pairs, shaped;  // [m, m]; pairs, shaped [m, N]
  float *L, *alpha, *gamma, *b, *lambda, *dt, *tanh;        // [S]; tanh [S, A]
  double *ddecay, *dgamma, *db, *turn;                      // [S]; turn [S, A]
  float* result;                                            // of a product
  float* scratch;
  float *sum_q, *sum_k, *sum_angle;  // [S, R, N], [S, A]
  double* parameters;
};

inline int64_t chunk_of(const Problem& p) {
  if (p.options.chunk > 0) return p.options.chunk;
  return p.rank >= 64 ? 1 : 64 / p.rank;
}

class Head {
 public:
  Head(const Call& call, Memory& memory, const Sequence& sequence, int64_t head);
  void run();

 private:
  struct Chunk {
    int64_t first, tokens, rows;  // of tokens; rows = tokens R
  };
  void pass_through();
  void tokens();  // decays, steps, cosine and sine
  void rows();    // q, k, v
  void start();   // state from the initial ones
  void forward(const Chunk& c, int64_t number);
  void weights(const Chunk& c);  // L and the decay matrix with s and gamma
  void finish(int64_t t);
  void finish_adjoint(int64_t t);
  void final_states();
  void backward(const Chunk& c, int64_t number);
  void weight_gradients(const Chunk& c);
  void value_gradients(const Chunk& c);
  void turns(const Chunk& c);
  void token_gradients();
  void row_gradients(int64_t t);
  void initial_gradients();
  float scale(int64_t t) const;                  // s
  float left(const Chunk& c, int64_t i) const;   // e^L of row i
  float right(const Chunk& c, int64_t j) const;  // e^(L_C - L)
  void product(const Matrix& a, bool ta, const Matrix& b, bool tb, const Matrix& to, float old);
  void rotate(float* row, int64_t t, float direction) const;
  std::pair<int64_t, int64_t> columns_of(int64_t pair) const;

  const Call& c_;
  const Problem& p_;
  Memory& m_;
  const Sequence s_;
  const int64_t h_, g_, T_, R_, N_, P_, A_;
  double* parameter_;
};

}  // namespace talea::mamba3::unfused
