// What: the chain of the pieces of a sequence that is cut over ranks: the state before a piece, and
//       the gradients behind it.
// Why: one text for host tensors and for kernels on device tensors; an element asks for nothing but
//      what the ranks have gathered.
// Never: knows who exchanged it, or divides by a decay.
#pragma once

#include <cmath>
#include <cstdint>

#include "algebra/scan_state.hpp"
#include "ops/mamba3/mutants.hpp"
#include "talea/tensor.hpp"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define TALEA_PIECE __device__ __forceinline__
#else
#include "core/half.hpp"
#define TALEA_PIECE inline
#endif

namespace talea::mamba3 {

// Elements of a tensor of at most four axes, in fp64; an absent one has no address.
struct PieceView {
  void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  DType dtype = DType::f32;
};
struct PieceStates {
  PieceView angle, ssm, k, v;
};

TALEA_PIECE int64_t at(const PieceView& v, int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0) {
  return a * v.stride[0] + b * v.stride[1] + c * v.stride[2] + d * v.stride[3];
}
#ifdef __CUDACC__
TALEA_PIECE double element(const PieceView& v, int64_t place) {
  if (v.dtype == DType::bf16)
    return __bfloat162float(static_cast<const __nv_bfloat16*>(v.data)[place]);
  if (v.dtype == DType::f16) return __half2float(static_cast<const __half*>(v.data)[place]);
  return static_cast<const float*>(v.data)[place];
}
TALEA_PIECE void put_element(const PieceView& v, int64_t place, double value) {
  const auto x = static_cast<float>(value);
  if (v.dtype == DType::bf16)
    static_cast<__nv_bfloat16*>(v.data)[place] = __float2bfloat16_rn(x);
  else if (v.dtype == DType::f16)
    static_cast<__half*>(v.data)[place] = __float2half_rn(x);
  else
    static_cast<float*>(v.data)[place] = x;
}
#else
TALEA_PIECE double element(const PieceView& v, int64_t place) {
  return load_element(v.data, v.dtype, place);
}
TALEA_PIECE void put_element(const PieceView& v, int64_t place, double value) {
  store_element(v.data, v.dtype, place, value);
}
#endif
TALEA_PIECE double element_or(double neutral, const PieceView& v, int64_t place) {
  return v.data ? element(v, place) : neutral;
}

// What all ranks have gathered, by rank, and the ends of the whole sequences.
struct Pieces {
  int64_t world = 1, sequences = 0, heads = 0;
  int64_t columns = 0, values = 0, rows = 1, pairs = 0;  // N, P, R, A
  bool halves = false;
  // Of rank 0: tokens [n]; what is left behind it and the b of its first token [n, H, 2]; turns
  // [n, H, A]. Those of the next rank lie `words` numbers of 8 bytes on.
  const int64_t* lengths = nullptr;
  const double* decays = nullptr;
  const uint64_t* turns = nullptr;
  int64_t words = 0;
  // The state that rank 0's piece makes of nothing, its last key and value; what it adds to the
  // gradient of the state before it. Elements from one rank to the next.
  PieceStates own;
  int64_t own_apart = 0;
  PieceView feedback;
  int64_t feedback_apart = 0;
  PieceView mimo_v;
  PieceStates initial, d_final;
};

// The pieces of one head of one sequence.
class Chain {
 public:
  TALEA_PIECE Chain(const Pieces& of, int64_t sequence, int64_t head)
      : x(of), n(sequence), h(head) {}

  // Where E behind a piece has been put down, for sums over it; of no other rank then.
  PieceView known{};

  TALEA_PIECE bool has_tokens(int64_t r) const { return x.lengths[r * x.words + n] > 0; }
  // The nearest piece with tokens before rank r's, or -1; behind it, or `world`.
  TALEA_PIECE int64_t nearest_before(int64_t r) const {
    while (--r >= 0 && !has_tokens(r)) {
    }
    return r;
  }
  TALEA_PIECE int64_t nearest_behind(int64_t r) const {
    while (++r < x.world && !has_tokens(r)) {
    }
    return r;
  }

  // Row q of the last key of rank r's piece, and its last value; of -1 the initial ones.
  TALEA_PIECE double key(int64_t r, int64_t q, int64_t i) const {
    if (r < 0) return element_or(0, x.initial.k, at(x.initial.k, n, q, h, i));
    return element(x.own.k, r * x.own_apart + at(x.own.k, n, q, h, i));
  }
  TALEA_PIECE double value(int64_t r, int64_t p) const {
    if (r < 0) return element_or(0, x.initial.v, at(x.initial.v, n, h, p));
    return element(x.own.v, r * x.own_apart + at(x.own.v, n, h, p));
  }
  TALEA_PIECE double projection(int64_t q, int64_t p) const {
    return element_or(1, x.mimo_v, at(x.mimo_v, h, q, p));
  }
  TALEA_PIECE double left(int64_t r) const { return decay(r, 0); }
  TALEA_PIECE double b(int64_t r) const { return decay(r, 1); }

  // h before rank r's piece; r = world: behind all.
  TALEA_PIECE double before(int64_t r, int64_t p, int64_t i) const {
    double state = element_or(0, x.initial.ssm, at(x.initial.ssm, n, h, p, i));
    int64_t last = -1;
    for (int64_t other = 0; other < r; ++other) {
      if (!has_tokens(other)) continue;
      const double own = element(x.own.ssm, other * x.own_apart + at(x.own.ssm, n, h, p, i));
      state = held(state, last, other, p, i);
      const double a = left(other);
      state = mutant(Mutant::m3_merge_out_of_order) ? state + a * own : joined(state, a, own);
      last = other;
    }
    return state;
  }
  // The same with the token held over: what the first token of rank r's piece finds.
  TALEA_PIECE double found(int64_t r, int64_t p, int64_t i) const {
    return held(before(r, p, i), nearest_before(r), r, p, i);
  }
  // E behind rank r's piece; r = -1: before all, h with the token held over.
  TALEA_PIECE double gradient(int64_t r, int64_t p, int64_t i) const {
    if (known.data) return element(known, at(known, n, h, p, i));
    double e = element_or(0, x.d_final.ssm, at(x.d_final.ssm, n, h, p, i));
    for (int64_t other = x.world; --other > r;) {
      if (!has_tokens(other)) continue;
      e = joined(e, left(other),
                 element(x.feedback, other * x.feedback_apart + at(x.feedback, n, h, p, i)));
    }
    return e;
  }

  // The gradients of the key, the value and the angle that rank r hands on. sum(count, f): of f(i).
  template <class Sum>
  TALEA_PIECE double key_gradient(int64_t r, int64_t q, int64_t i, Sum sum) const {
    const int64_t next = nearest_behind(r);
    if (next == x.world) return element_or(0, x.d_final.k, at(x.d_final.k, n, q, h, i));
    const int64_t last = nearest_before(next);
    return sum(x.values, [&](int64_t p) {
      return b(next) * projection(q, p) * value(last, p) * gradient(r, p, i);
    });
  }
  template <class Sum>
  TALEA_PIECE double value_gradient(int64_t r, int64_t p, Sum sum) const {
    const int64_t next = nearest_behind(r);
    if (next == x.world) return element_or(0, x.d_final.v, at(x.d_final.v, n, h, p));
    const int64_t last = nearest_before(next);
    double all = 0;
    for (int64_t q = 0; q < x.rows; ++q)
      all += b(next) * projection(q, p) *
             sum(x.columns, [&](int64_t i) { return gradient(r, p, i) * key(last, q, i); });
    return all;
  }
  // What lies behind the sequence turns all of it alike; what lies between, by its torque.
  template <class Sum>
  TALEA_PIECE double angle_gradient(int64_t r, int64_t i, Sum sum) const {
    const double own = element_or(0, x.d_final.angle, at(x.d_final.angle, n, h, i));
    const int64_t next = nearest_behind(r);
    if (next == x.world) return own;
    const int64_t u = x.halves ? i : 2 * i, w = x.halves ? i + x.columns / 2 : 2 * i + 1;
    const int64_t last = nearest_before(x.world);
    const PieceStates& d = x.d_final;
    const double states = sum(x.values, [&](int64_t p) {
      const double whole = d.ssm.data
                               ? before(x.world, p, u) * element(d.ssm, at(d.ssm, n, h, p, w)) -
                                     before(x.world, p, w) * element(d.ssm, at(d.ssm, n, h, p, u))
                               : 0;
      return whole -
             (found(next, p, u) * gradient(r, p, w) - found(next, p, w) * gradient(r, p, u));
    });
    double keys = 0;
    for (int64_t q = 0; d.k.data && q < x.rows; ++q)
      keys += key(last, q, u) * element(d.k, at(d.k, n, q, h, w)) -
              key(last, q, w) * element(d.k, at(d.k, n, q, h, u));
    return own + states + keys;
  }

 private:
  TALEA_PIECE double decay(int64_t r, int which) const {
    return x.decays[r * x.words + (n * x.heads + h) * 2 + which];
  }
  // + b sum over q of v_q k_q^T of the token before rank r's piece.
  TALEA_PIECE double held(double state, int64_t last, int64_t r, int64_t p, int64_t i) const {
    for (int64_t q = 0; q < x.rows; ++q)
      state += b(r) * value(last, p) * projection(q, p) * key(last, q, i);
    return state;
  }

  const Pieces& x;
  const int64_t n, h;
};

}  // namespace talea::mamba3
