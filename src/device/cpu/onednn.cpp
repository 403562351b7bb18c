// What: the only file that includes oneDNN; its C interface is the same in versions 2 and 3.
// Why: Debian 12 ships 2.6, Ubuntu 24.04 ships 3.x; neither may leak into the rest.
// Never: keeps a primitive or a buffer between calls.
#include "device/cpu/onednn.hpp"

#include <dnnl.h>
#include <dnnl_debug.h>

#include "core/fail.hpp"

namespace talea::cpu {

void onednn_product(const PlainProduct& p) {
  const dnnl_status_t status =
      dnnl_sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', p.m, p.n, p.k, 1.0f, p.a,
                 p.a_stride, p.b, p.b_stride, 0.0f, p.c, p.c_stride);
  require(status == dnnl_success, ErrorKind::runtime,
          "oneDNN: product [{}, {}] x [{}, {}] failed with status {}", p.m, p.k, p.k, p.n,
          static_cast<int>(status));
}

std::string onednn_version() {
  const dnnl_version_t* v = dnnl_version();
  return fmt::format("{}.{}.{}", v->major, v->minor, v->patch);
}

void onednn_limit_to_avx2() {
  const dnnl_status_t status = dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
  require(status == dnnl_success, ErrorKind::runtime,
          "oneDNN: cannot be limited to avx2 (status {}): it is in use already",
          static_cast<int>(status));
}

std::string onednn_isa() { return dnnl_cpu_isa2str(dnnl_get_effective_cpu_isa()); }

bool onednn_may_use_bf16() {
  const int isa = dnnl_get_effective_cpu_isa(), wanted = dnnl_cpu_isa_avx512_core_bf16;
  return (isa & wanted) == wanted;  // a set of bits, one an extension
}

}  // namespace talea::cpu
