// What: isa.hpp for Highway's dispatch; oneDNN's ceiling is set beside it.
// Why: a ratio of a lane to the plain products means something only under the same ceiling.
// Never: reads the environment.
#include "device/cpu/isa.hpp"

#include <cstring>

#include "core/fail.hpp"
#include "device/cpu/onednn.hpp"
#include "device/cpu/tile_product.hpp"
#include "hwy/targets.h"

namespace talea::cpu {

void limit_isa(IsaLimit limit) {
  if (limit == IsaLimit::best) return;
#if HWY_ARCH_X86
  require((hwy::SupportedTargets() & HWY_AVX2) != 0, ErrorKind::unavailable,
          "instruction set avx2: this CPU has {}", isa_name());
  hwy::DisableTargets(HWY_AVX2 - 1);  // better targets have lower bits
  onednn_limit_to_avx2();
  require(std::strcmp(isa_name(), "AVX2") == 0, ErrorKind::runtime,
          "instruction set avx2: the vector code uses {}", isa_name());
#else
  fail(ErrorKind::unavailable, "instruction set avx2: an x86-64 CPU has it, this is another");
#endif
}

std::string isa_in_use() { return fmt::format("{}, oneDNN {}", isa_name(), onednn_isa()); }

}  // namespace talea::cpu
