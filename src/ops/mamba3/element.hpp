// What: single elements of tensors of any rank, as fp64.
// Why: host lanes and ranks read parameters and states of any dtype and stride in one way.
// Never: used in a hot loop.
#pragma once

#include "core/half.hpp"

namespace talea::mamba3 {

template <typename... Index>
int64_t offset_of(const Tensor& t, Index... index) {
  int64_t offset = 0;
  int axis = 0;
  ((offset += static_cast<int64_t>(index) * t.stride[axis++]), ...);
  return offset;
}
template <typename... Index>
double get(const Tensor& t, Index... index) {
  return load_element(t.data, t.dtype, offset_of(t, index...));
}
template <typename... Index>
double get_or(double neutral, const Tensor& t, Index... index) {
  return t ? get(t, index...) : neutral;
}
template <typename... Index>
void set(const Tensor& t, double value, Index... index) {
  store_element(t.data, t.dtype, offset_of(t, index...), value);
}
// Adds where asked, else overwrites.
template <typename... Index>
void add_or_set(bool add, const Tensor& t, double value, Index... index) {
  set(t, add ? get(t, index...) + value : value, index...);
}

}  // namespace talea::mamba3
