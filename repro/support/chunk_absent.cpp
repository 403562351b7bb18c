// What: stands in for the kernels of chunk.cu in a build without CUDA.
// Why: the reproducers ask, and say what is missing.
// Never: computes.
#include <cmath>

#include "repro/support/chunk.hpp"

namespace talea::repro {

bool has_chunk_kernels(std::string& why) {
  why = "this build has no CUDA";
  return false;
}

ChunkKernels::ChunkKernels(const ChunkProblem&) {}
ChunkGradients ChunkKernels::run(const ChunkForm&) { return {}; }
double ChunkKernels::error(const ChunkGradients&, int64_t) { return NAN; }
bool describes_blocks(bool) { return false; }

}  // namespace talea::repro
