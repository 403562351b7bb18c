// What: the three matrix products of a linear layer, for small and middle sizes.
// Why: bitwise equal for any number of threads: each output element is one sum in one order.
// Never: reads the environment or keeps a state.
#pragma once

#include <cstdint>

namespace talea::train {

struct Extents {
  int64_t m, n, k;  // c is [m, n], the sum runs over k
};

// c = a b^T (+ c), a [m, k], b [n, k]: the forward of a linear layer with weight b.
template <typename T>
void product_nt(T* c, const T* a, const T* b, Extents e, bool accumulate, int threads);

// c = a b (+ c), a [m, k], b [k, n]: the gradient of its input.
template <typename T>
void product_nn(T* c, const T* a, const T* b, Extents e, bool accumulate, int threads);

// c = a^T b (+ c), a [k, m], b [k, n]: the gradient of its weight.
template <typename T>
void product_tn(T* c, const T* a, const T* b, Extents e, bool accumulate, int threads);

}  // namespace talea::train
