// What: the steps of a late factor on the tensors of a device.
// Why: the checks of its arguments are the same with and without CUDA.
// Never: synchronises.
#pragma once

#include "talea/linear_cross_entropy.hpp"

namespace talea::lce {

// Columns of dx_rest: a byte, the exponent that 64 elements of dx share.
constexpr int64_t dx_rest_columns(int64_t hidden) { return (hidden + 63) / 64; }

// What a device found after the call had returned; read by the host without waiting.
struct Fault {
  volatile int32_t raised = 0;
  float expected = 0, got = 0;
};
// The process's one; in memory that every device can write, once a device has asked for it.
Fault* known_fault();  // null: none has been asked for

// Lane sm90: what it formed and kept a rest of.
void multiply_with_rests(const LinearCrossEntropyLate& late, Stream stream);
void late_on_device(const LinearCrossEntropyLate& late, Stream stream);

}  // namespace talea::lce
