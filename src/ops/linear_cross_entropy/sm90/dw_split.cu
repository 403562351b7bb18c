// What: the dW product that adds to a sum of two numbers, built for its shape.
// Why: each instantiation compiles on its own.
// Never: decides whether it runs.
#include "device/sm90/launch.cuh"
#include "ops/linear_cross_entropy/sm90/coded.cuh"
#include "ops/linear_cross_entropy/sm90/dw_call.cuh"
#include "ops/linear_cross_entropy/sm90/split.cuh"

namespace talea::lce::sm90 {
namespace {

template <class S, class E>
void run(const DwCall& c, const Launch& launch) {
  SplitParams p;
  static_cast<DwParams&>(p) = dw_params(c, Element::bf16);
  p.rest = static_cast<char*>(c.rest.data);
  p.ends = c.ends;
  p.pieces = static_cast<int>(Rest::pieces(c.dw.columns));
  launch_gemm<S, E>({c.exp.data, c.exp.rows, c.exp.columns, c.exp.stride},
                    {c.x.data, c.x.rows, c.x.columns, c.x.stride}, dw_extents(c), p, launch.blocks,
                    c.beside_dx, launch.stream);
}

template <int kBits>
using SplitShape =
    Shape<192, 128, 4, true, Major::mn, Major::mn, false, SplitEpilogue<kBits>::kStagingBytes>;
template <int kBits>
void run(const DwCall& c, const Launch& launch) {
  run<SplitShape<kBits>, SplitEpilogue<kBits>>(c, launch);
}

}  // namespace

void split_dw_product(const DwCall& call, const Launch& launch) {
  if (call.rest.bits == 8) return run<8>(call, launch);
  if (call.rest.bits == 4) return run<4>(call, launch);
  if (call.rest.is_coded()) return run<CodedEpilogue::S, CodedEpilogue>(call, launch);
  run<0>(call, launch);
}

}  // namespace talea::lce::sm90
