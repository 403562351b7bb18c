// What: onednn.hpp for a build without oneDNN (TALEA_ONEDNN=OFF, as in the Python wheel).
// Why: no lane needs it, only the yardstick of the tool's benches; a wheel need not carry it.
// Never: computes a product by other means: the yardstick would have another meaning.
#include "core/fail.hpp"
#include "device/cpu/onednn.hpp"

namespace talea::cpu {

void onednn_product(const PlainProduct& p) {
  fail(ErrorKind::unavailable,
       "plain product [{}, {}] x [{}, {}]: this build is without oneDNN (TALEA_ONEDNN=OFF)", p.m,
       p.k, p.k, p.n);
}

std::string onednn_version() { return "not built"; }
void onednn_limit_to_avx2() {}
std::string onednn_isa() { return "not built"; }
bool onednn_may_use_bf16() { return true; }  // the caller asks the CPU itself

}  // namespace talea::cpu
