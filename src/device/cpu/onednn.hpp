// What: plain fp32 products by oneDNN.
// Why: the yardstick of speed: what the three products of a step cost with nothing around them.
// Never: used by a lane; its packing memory is its own and its bits depend on shapes (decision
// 0001).
#pragma once

#include <cstdint>
#include <string>

namespace talea::cpu {

// Row-major C [m, n] = op(A) op(B), op(A) [m, k], op(B) [k, n]; strides in elements. Throws Error.
struct PlainProduct {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;
  int64_t a_stride = 0;
  const float* b = nullptr;
  int64_t b_stride = 0;
  float* c = nullptr;
  int64_t c_stride = 0;
};
void onednn_product(const PlainProduct& p);

std::string onednn_version();

// device/cpu/isa.hpp sets the ceiling; both here because no other file includes oneDNN.
void onednn_limit_to_avx2();
std::string onednn_isa();
bool onednn_may_use_bf16();  // the CPU has AVX512-BF16 and DNNL_MAX_CPU_ISA allows it

}  // namespace talea::cpu
