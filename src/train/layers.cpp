// What: the layers' arithmetic.
// Why: sums over a row run in fp64 in one order, so that any thread count gives the same bits.
// Never: approximates exp.
#include "train/layers.hpp"

#include <cmath>

namespace talea::train {

template <typename T>
void embedding(T* y, const T* table, const int32_t* ids, Rows s) {
  for (int64_t t = 0; t < s.rows; ++t)
    for (int64_t i = 0; i < s.columns; ++i) y[t * s.columns + i] = table[ids[t] * s.columns + i];
}

template <typename T>
void embedding_backward(T* grad_table, const T* dy, const int32_t* ids, Rows s) {
  for (int64_t t = 0; t < s.rows; ++t)
    for (int64_t i = 0; i < s.columns; ++i)
      grad_table[ids[t] * s.columns + i] += dy[t * s.columns + i];
}

template <typename T>
void rms_norm(T* y, T* inverse, const T* x, const T* gain, double eps, Rows s) {
  for (int64_t t = 0; t < s.rows; ++t, x += s.columns, y += s.columns) {
    double squares = 0;
    for (int64_t i = 0; i < s.columns; ++i) squares += double(x[i]) * double(x[i]);
    inverse[t] = static_cast<T>(1.0 / std::sqrt(squares / double(s.columns) + eps));
    for (int64_t i = 0; i < s.columns; ++i) y[i] = gain[i] * (x[i] * inverse[t]);
  }
}

template <typename T>
void rms_norm_backward(T* dx, T* grad_gain, const T* dy, const T* x, const T* inverse,
                       const T* gain, Rows s) {
  for (int64_t t = 0; t < s.rows; ++t, x += s.columns, dy += s.columns, dx += s.columns) {
    // d/dx of x_i r(x): r (gy_i - x_i r^2 mean(gy . x)), gy = gain * dy.
    double dot = 0;
    for (int64_t i = 0; i < s.columns; ++i) dot += double(gain[i]) * double(dy[i]) * double(x[i]);
    const double r = inverse[t];
    const T pull = static_cast<T>(dot * r * r * r / static_cast<double>(s.columns));
    for (int64_t i = 0; i < s.columns; ++i) {
      grad_gain[i] += dy[i] * (x[i] * inverse[t]);
      dx[i] += gain[i] * dy[i] * inverse[t] - x[i] * pull;
    }
  }
}

template <typename T>
void swiglu(T* y, const T* gate, const T* up, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = gate[i] / (T(1) + std::exp(-gate[i])) * up[i];
}

template <typename T>
void swiglu_backward(T* dgate, T* dup, const T* dy, const T* gate, const T* up, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const T s = T(1) / (T(1) + std::exp(-gate[i]));
    dup[i] = dy[i] * gate[i] * s;
    dgate[i] = dy[i] * up[i] * s * (T(1) + gate[i] * (T(1) - s));
  }
}

template <typename T>
void add(T* y, const T* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] += x[i];
}

#define TALEA_INSTANTIATE(T)                                                             \
  template void embedding(T*, const T*, const int32_t*, Rows);                           \
  template void embedding_backward(T*, const T*, const int32_t*, Rows);                  \
  template void rms_norm(T*, T*, const T*, const T*, double, Rows);                      \
  template void rms_norm_backward(T*, T*, const T*, const T*, const T*, const T*, Rows); \
  template void swiglu(T*, const T*, const T*, int64_t);                                 \
  template void swiglu_backward(T*, T*, const T*, const T*, const T*, int64_t);          \
  template void add(T*, const T*, int64_t);
TALEA_INSTANTIATE(float)
TALEA_INSTANTIATE(double)

}  // namespace talea::train
