// What: the dW product, built for its shape.
// Why: each instantiation compiles on its own.
// Never: decides whether it runs.
#include "device/sm90/launch.cuh"
#include "ops/linear_cross_entropy/sm90/dw_call.cuh"

namespace talea::lce::sm90 {

namespace {

// kStages and staging bytes a warp: both come out of the same shared memory.
template <bool kF16, bool kDirect, int kStages = 5, int kStagingBytes = 2048>
void run(const DwCall& c, const Launch& launch) {
  using S = Shape<192, 128, kStages, true, Major::mn, Major::mn, kF16, kStagingBytes>;
  static_assert(S::kBlockM == Readers::kWords, "what it counts");
  constexpr Element kOut = !kDirect ? Element::f32 : kF16 ? Element::f16 : Element::bf16;
  const DwParams p = dw_params(c, kOut);
  launch_gemm<S, DwEpilogue<kF16, kDirect>>({c.exp.data, c.exp.rows, c.exp.columns, c.exp.stride},
                                            {c.x.data, c.x.rows, c.x.columns, c.x.stride},
                                            dw_extents(c), p, launch.blocks, c.beside_dx,
                                            launch.stream);
}

}  // namespace

void dw_product(const DwCall& call, const Launch& launch) {
  if (call.f16)
    call.rounds ? run<true, true>(call, launch) : run<true, false>(call, launch);
  else if (call.read && !call.rounds)  // on few multiprocessors the way out of them counts
    run<false, false, 4, 8192>(call, launch);
  else
    call.rounds ? run<false, true>(call, launch) : run<false, false>(call, launch);
}

}  // namespace talea::lce::sm90
