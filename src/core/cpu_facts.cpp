// What: which instruction sets this CPU has, as far as the lanes care.
// Why: the choice between native 16-bit products and converted tiles is a fact, not a guess.
// Never: limits anything by an environment variable of our own.
#include "core/device_facts.hpp"

namespace talea {

void gather_cpu_facts(DeviceFacts& facts) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  facts.isa = avx512 ? "AVX-512" : __builtin_cpu_supports("avx2") ? "AVX2" : "SSE";
  facts.fast_bf16 = __builtin_cpu_supports("avx512bf16");
#endif
}

}  // namespace talea
