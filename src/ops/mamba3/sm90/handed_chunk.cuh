// What: what a chunk's gradients have of gradients of final states, and leave for the first angle.
// Why: both kernels of gradients add it where they would round, and only where states are handed.
// Never: part of a chunk of a call that has none.
#pragma once

#include "ops/mamba3/sm90/rows.cuh"

namespace talea::mamba3::sm90 {

// What turns pair i of every token of the sequence alike, as launch_behind has left it.
__device__ __forceinline__ float turn_behind(const Args& a, const UnitBuffers& b, const Unit& u,
                                             int head, int i) {
  if (!b.ends || i >= a.size.pairs) return 0;
  return b.ends[(u.sequence * a.size.heads + head) * a.size.pairs + i];
}
// Whole turn of the chunk's first token.
__device__ __forceinline__ void store_first_angle(const Args& a, const Unit& u, const Part& p,
                                                  int head, int i, float whole) {
  const View& to = a.grad.initial.angle;
  if (to.data && p.first == 0) cuda::store(to, cuda::at(to, u.row, head, i), whole);
}
// The last key's gradient, turned back, to the rows of its token.
template <int R>
__device__ __forceinline__ void add_last_key(const Args& a, const UnitBuffers& b, const Unit& u,
                                             const Part& p, int head, float (&g)[64]) {
  if (!b.last_keys || p.more) return;
  const float* const from = b.last_keys + (u.sequence * a.size.heads + head) * (R * columns);
  each_two(g, [&](int row, int n, float& x, float& y) {
    if (row / R != p.n - 1) return;
    const float2 more = *reinterpret_cast<const float2*>(from + row % R * columns + n);
    x += more.x, y += more.y;
  });
}
// The last value's, to columns c and c + 1 of its token.
__device__ __forceinline__ void add_last_value(const Args& a, const Unit& u, int head, int c,
                                               float& x, float& y) {
  const View& from = a.last.v;
  x += cuda::load(from, cuda::at(from, u.row, head, c));
  y += cuda::load(from, cuda::at(from, u.row, head, c + 1));
}

}  // namespace talea::mamba3::sm90
