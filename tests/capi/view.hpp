// What: a dense talea_tensor over memory of the test.
// Why: C leaves strides to the caller; the tests write a shape.
// Never: includes a header of the C++ interface.
#pragma once

#include <talea/talea.h>

#include <initializer_list>

inline talea_tensor view(void* data, int32_t dtype, std::initializer_list<int64_t> shape) {
  talea_tensor t{};
  t.data = data;
  t.dtype = dtype;
  t.present = 1;
  for (int64_t extent : shape) t.shape[t.rank++] = extent;
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.stride[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}
