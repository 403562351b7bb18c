// What: the gradients of a slice, of one row a token; and which kernel has those of more.
// Why: a file a rank compiles beside the others.
// Never: anything that gradients_kernel.cuh does not say.
#include "ops/mamba3/sm90/gradients_kernel.cuh"

namespace talea::mamba3::sm90 {

void launch_gradients(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                      cudaStream_t stream) {
  if (!cut.whole) {
    if (args.size.rank == 1) return gradients::launch_slabs_one_row(args, wave, b, stream);
    if (args.size.rank == 2) return gradients::launch_slabs_two_rows(args, wave, b, stream);
    if (args.size.rank == 8) return gradients::launch_slabs_eight_rows(args, wave, b, stream);
    return gradients::launch_slabs_four_rows(args, wave, b, stream);
  }
  if (args.size.rank == 1) return gradients::launch_rank<1>(args, wave, b, stream);
  if (args.size.rank == 2) return gradients::launch_two_rows(args, wave, b, stream);
  if (args.size.rank == 8) return gradients::launch_eight_rows(args, wave, b, stream);
  gradients::launch_four_rows(args, wave, b, stream);
}

}  // namespace talea::mamba3::sm90
