// What: what both passes form of the states they are handed: h before the first token, and what an
//       empty sequence passes on.
// Why: forward and backward start from the same state, and hand nothing through in another way.
// Never: knows of which pass it is a part.
#pragma once

#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/rows.cuh"

namespace talea::mamba3::sm90 {

inline constexpr int handed_threads = 256;
using cuda::StateViews;

// f(p, n) of every element of a state, by a block: some at a time, for a load does not go ahead of
// a store.
template <class F>
__device__ __forceinline__ void put_state(float* to, F f) {
  constexpr int at_once = 8, rows_apart = handed_threads / columns;
  const int n = static_cast<int>(threadIdx.x) % columns;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) / columns; first < values;
       first += at_once * rows_apart) {
    float found[at_once];
#pragma unroll
    for (int j = 0; j < at_once; ++j) found[j] = f(first + j * rows_apart, n);
#pragma unroll
    for (int j = 0; j < at_once; ++j) to[(first + j * rows_apart) * columns + n] = found[j];
  }
}

// An element of h before the first token, with the token held over; p and n of the unit.
class FirstState {
 public:
  __device__ __forceinline__ FirstState(const Args& args, const Cut& of, const Unit& unit)
      : a(args), cut(of), u(unit) {
    held = a.initial.k.data && a.initial.v.data && !mutant(Mutant::m3_22_initial_token_ignored);
    if (held)
      b0 = cuda::read(a.dt, cuda::at(a.dt, u.batch, u.head, u.begin)) *
           cuda::sigmoid(-cuda::read(a.trap, cuda::at(a.trap, u.batch, u.head, u.begin)));
  }
  __device__ __forceinline__ float at(int p, int n) const {
    const StateViews& f = a.initial;
    const int own = cut.own_column(part_of_columns(cut, u), n), c = first_value(cut, u) + p;
    if (!cut.has(own)) return 0;
    float x = cuda::load_or(0, f.ssm, cuda::at(f.ssm, u.row, u.head, c, own));
    if (held) {
      const float v = b0 * cuda::load(f.v, cuda::at(f.v, u.row, u.head, c));
      for (int r = 0; r < a.size.rank; ++r)
        x += v * cuda::read_or(1, a.mimo_v, cuda::at(a.mimo_v, u.head, r, c)) *
             cuda::load(f.k, cuda::at(f.k, u.row, r, u.head, own));
    }
    return x;
  }
  // All of it, by a block.
  __device__ __forceinline__ void put(float* to) const {
    put_state(to, [&](int p, int n) { return at(p, n); });
  }

 private:
  const Args& a;
  const Cut& cut;
  const Unit& u;
  bool held;
  float b0 = 0;
};

// What an empty sequence is handed goes through, by the first unit of a head; of gradients the
// other way, whose angles are not reduced.
__device__ __forceinline__ void pass_through(const Args& a, const Cut& cut, const Unit& u,
                                             const StateViews& from, const StateViews& to,
                                             bool reduce) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int N = cut.whole ? columns : cut.columns, P = values << cut.slab_bits;
  const int A = cut.whole ? a.size.pairs : cut.pairs;
  if ((number_of(cut, u) & ((1 << cut.bits()) - 1)) != 0) return;
  for (int i = thread; i < A && to.angle.data; i += handed_threads) {
    const float x = cuda::load_or(0, from.angle, cuda::at(from.angle, u.row, u.head, i));
    const uint64_t turn = cuda::turn_of_radians(x);
    const float reduced = turn == cuda::no_turn ? NAN : cuda::radians(turn);
    cuda::store(to.angle, cuda::at(to.angle, u.row, u.head, i), reduce ? reduced : x);
  }
  for (int i = thread; i < N * P && to.ssm.data; i += handed_threads)
    cuda::store(to.ssm, cuda::at(to.ssm, u.row, u.head, i / N, i % N),
                cuda::load_or(0, from.ssm, cuda::at(from.ssm, u.row, u.head, i / N, i % N)));
  for (int i = thread; i < a.size.rank * N && to.k.data; i += handed_threads)
    cuda::store(to.k, cuda::at(to.k, u.row, i / N, u.head, i % N),
                cuda::load_or(0, from.k, cuda::at(from.k, u.row, i / N, u.head, i % N)));
  for (int i = thread; i < P && to.v.data; i += handed_threads)
    cuda::store(to.v, cuda::at(to.v, u.row, u.head, i),
                cuda::load_or(0, from.v, cuda::at(from.v, u.row, u.head, i)));
}

}  // namespace talea::mamba3::sm90
