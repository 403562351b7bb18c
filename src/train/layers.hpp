// What: the element-wise and row-wise layers of the training stack, each with its own backward.
// Why: hand-written gradients of a few lines each can be read, and checked one by one.
// Never: allocates; buffers are the model's.
#pragma once

#include <cstdint>

namespace talea::train {

struct Rows {
  int64_t rows, columns;
};

// y[t] = table[ids[t]]; backward adds dy[t] to grad_table[ids[t]] in the order of t.
template <typename T>
void embedding(T* y, const T* table, const int32_t* ids, Rows shape);
template <typename T>
void embedding_backward(T* grad_table, const T* dy, const int32_t* ids, Rows shape);

// y = gain * x / sqrt(mean(x^2) + eps); inverse[t] keeps 1 / sqrt(...).
template <typename T>
void rms_norm(T* y, T* inverse, const T* x, const T* gain, double eps, Rows shape);
// dx is added to; grad_gain is added to.
template <typename T>
void rms_norm_backward(T* dx, T* grad_gain, const T* dy, const T* x, const T* inverse,
                       const T* gain, Rows shape);

// y = silu(gate) * up.
template <typename T>
void swiglu(T* y, const T* gate, const T* up, int64_t count);
template <typename T>
void swiglu_backward(T* dgate, T* dup, const T* dy, const T* gate, const T* up, int64_t count);

// y += x
template <typename T>
void add(T* y, const T* x, int64_t count);

}  // namespace talea::train
