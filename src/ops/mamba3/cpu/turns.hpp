// What: angles, decays and gates of a chunk on vectors.
// Why: exact turns and decays cost a few instructions a lane; every pass uses the same.
// Never: an order that depends on threads.
#pragma once

#include <cstdint>

#include "device/cpu/tile_product.hpp"

namespace talea::mamba3::cpu {

// Turns of the pairs of a head: 64-bit integers of 2^-64 turn in two halves, and NaN for the pairs
// that something not finite has reached.
struct TurnState {
  uint32_t *high, *low;
  float* taint;
};

struct TurnJob {
  int64_t tokens = 0, pairs = 0, padded = 0;  // padded: pairs, up to whole vectors
  const float* rates = nullptr;               // [tokens, padded], before tanh; null: no turn
  const float* dt = nullptr;
  TurnState at{};                           // on return behind the last token
  float *tanh = nullptr, *slope = nullptr;  // [tokens, padded] or null: 1 - tanh^2
  // [tokens, stride]: for each column c and s of x' = x c + partner(x) s; or null.
  float *cosine = nullptr, *sine = nullptr;
  int64_t stride = 0, columns = 0;
  bool halves = false;
  talea::cpu::Ahead ahead;
};
void turn(const TurnJob& job);

// Row t of [tokens, stride]: exp(L_t - L_j) for j < t, 0 for j >= t. L = high + low.
void decay_matrix(const float* high, const float* low, int64_t tokens, int64_t stride, float* to);
void exp_row(const float* x, int64_t n, float* to);

// y [rows, columns of stride] of one head to rows of out, or back to dy. Rows are (token, r).
struct FinishJob {
  int64_t tokens = 0, rank = 1, columns = 0, stride = 0;
  bool norm = false;
  float eps = 0;
  const float* y = nullptr;         // [tokens R, stride]
  const float* z = nullptr;         // [tokens, stride] or null
  const float* weight = nullptr;    // [stride] or null
  const float* mimo_z = nullptr;    // [R, stride] or null
  const float* mimo_out = nullptr;  // the same
  bool reduce = true;
  float* out = nullptr;          // [tokens or tokens R, stride]
  const float* d_out = nullptr;  // backward: the same
  float* dy = nullptr;           // [tokens R, stride]
  float* d_z = nullptr;          // [tokens, stride] or null
  // Sums over the chunk's tokens, or null: [R, stride], [R, stride], [stride].
  float *d_mimo_z = nullptr, *d_mimo_out = nullptr, *d_weight = nullptr;
};
void finish(const FinishJob& job);
void finish_adjoint(const FinishJob& job);

}  // namespace talea::mamba3::cpu
