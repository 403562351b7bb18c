// What: maximum, sum of exponentials and scaled exponentials of one contiguous fp32 row.
// Why: the softmax of materialised logits runs at vector speed, as it does in any framework.
// Never: parallel, and never in an order that depends on anything but the row's length.
#pragma once

#include <cstdint>

namespace talea::cpu {

float row_max(const float* z, int64_t n);                        // NaN if any is
float row_exp_sum(const float* z, int64_t n, float max);         // sum of exp(z - max)
void row_exp(const float* z, int64_t n, float shift, float* p);  // exp(z - shift)

}  // namespace talea::cpu
