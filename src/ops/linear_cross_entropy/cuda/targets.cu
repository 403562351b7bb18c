// What: on the device, what the targets say about the batch, the order of the valid rows, and the
// scalars.
// Why: invalid rows are set aside without the host knowing how many there are; the order is all
// that this lane's gather needs, and its sums go over tokens, so the rules of rows/ are walked
// here.
// Never: uses an atomic; every sum has a fixed order.
#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/cuda/chunk.hpp"
#include "ops/linear_cross_entropy/rows/tokens.cuh"

namespace talea::lce::cuda {
namespace {

using device::block_reduce;
using device::Sum;
using device::warp_size;
using device::whole_warp;

// One thread a token. Within a block the valid rows are numbered by ballots.
//
//   own = what the rules say of token t                                       rows/tokens.cuh
//   kinds [t] = valid, ignored or poisoned
//   partials [block] = sums of own over the block
//   order [block, number of t among its valid tokens] = t
__global__ void examine_kernel(Shape s, TargetPartial* partials, RowKind* kinds, int64_t* order) {
  __shared__ double doubles[examined_rows / warp_size];
  __shared__ int64_t integers[examined_rows / warp_size];
  const int64_t t = blockIdx.x * examined_rows + threadIdx.x;
  const bool exists = t < s.tokens;
  TokenFacts own;
  if (exists) own = TokenFacts(s.rule, s.class_weights, s.terms.token_weight, t);
  TokenSums sums;
  if (exists) add(sums, own, t);
  sums = over_block(sums, integers, doubles);
  if (threadIdx.x == 0) partials[blockIdx.x] = {sums, 0};
  if (exists) kinds[t] = own.kind;

  // The number of this row among the valid rows of its block, kept where the row itself stood.
  const unsigned ballot = __ballot_sync(whole_warp, own.kind == RowKind::valid);
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  if (lane == 0) integers[warp] = __popc(ballot);
  __syncthreads();
  int64_t number = __popc(ballot & ((1u << lane) - 1));
  for (int w_ = 0; w_ < warp; ++w_) number += integers[w_];
  // order[] first holds the block-local order; place_kernel moves it to its global place.
  if (own.kind == RowKind::valid) order[blockIdx.x * examined_rows + number] = t;
}

// One block: offsets of the blocks and the sums over them.
__global__ void total_kernel(Shape s, BatchFacts* facts, TargetPartial* partials, int64_t blocks) {
  __shared__ int64_t integers[32];
  __shared__ double doubles[32];
  TokenSums sums;
  for (int64_t b = threadIdx.x; b < blocks; b += blockDim.x) add(sums, partials[b].sums);
  sums = over_block(sums, integers, doubles);
  if (threadIdx.x != 0) return;
  *facts = batch_facts(sums, s.rule);
  int64_t offset = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    partials[b].offset = offset;
    offset += partials[b].sums.valid;
  }
}

// Moves the block-local orders together. Blocks go from the front: a block's destination never
// lies behind its source, and one block does it all, so no source is overwritten unread.
__global__ void place_kernel(const TargetPartial* partials, int64_t* order, int64_t blocks) {
  for (int64_t b = 0; b < blocks; ++b) {
    const bool mine = threadIdx.x < partials[b].sums.valid;
    const int64_t t = mine ? order[b * examined_rows + threadIdx.x] : 0;
    __syncthreads();
    if (mine) order[partials[b].offset + threadIdx.x] = t;
    __syncthreads();
  }
}

__global__ void scalars_kernel(Shape s, const BatchFacts* facts, const double* row_loss,
                               const int8_t* hit) {
  __shared__ double doubles[32];
  double sum = 0, hits = 0;
  for (int64_t t = threadIdx.x; t < s.tokens; t += blockDim.x) {
    if (row_loss) sum += row_loss[t];
    if (hit) hits += hit[t];
  }
  sum = block_reduce(sum, Sum(), doubles);
  hits = block_reduce(hits, Sum(), doubles);
  if (threadIdx.x == 0) lce::write_scalars(s.loss, s.accuracy, *facts, s.mean, sum, hits);
}

}  // namespace

void examine_targets(const Shape& s, BatchFacts* facts, TargetPartial* partials, RowKind* kind,
                     int64_t* order, cudaStream_t stream) {
  const int64_t blocks = (s.tokens + examined_rows - 1) / examined_rows;
  if (blocks > 0) {
    examine_kernel<<<static_cast<unsigned>(blocks), examined_rows, 0, stream>>>(s, partials, kind,
                                                                                order);
    device::check_launch("examine_targets");
  }
  total_kernel<<<1, 256, 0, stream>>>(s, facts, partials, blocks);
  device::check_launch("total_targets");
  if (blocks > 1) {
    place_kernel<<<1, examined_rows, 0, stream>>>(partials, order, blocks);
    device::check_launch("place_targets");
  }
}

void write_scalars(const Shape& s, const BatchFacts* facts, const double* row_loss,
                   const int8_t* hit, cudaStream_t stream) {
  scalars_kernel<<<1, 1024, 0, stream>>>(s, facts, row_loss, hit);
  device::check_launch("write_scalars");
}

}  // namespace talea::lce::cuda
