// What: on the device, what the targets say about the batch, the order of the valid rows, and the
// outputs of all other rows.
// Why: ignored and invalid rows are set aside without the host knowing how many there are.
// Never: uses an atomic; every sum has a fixed order.
#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "device/common/reduce.cuh"
#include "ops/linear_cross_entropy/cuda/chunk.hpp"

namespace talea::lce::cuda {
namespace {

using device::block_reduce;
using device::Max;
using device::Min;
using device::Sum;
using device::warp_size;
using device::whole_warp;

enum Kind : int8_t { valid = 0, ignored = 1, poisoned = 2 };

__device__ bool inside(const Shape& s, int64_t id) {
  const int64_t end = mutant(Mutant::b8_sentinel_matches_padding) ? s.vocab_stored : s.vocab;
  return id >= 0 && id < end;
}

__device__ Kind kind_of_target(const Shape& s, int64_t t) {
  if (s.has_targets) {
    const int64_t y = s.targets.load_index(t);
    if (y == s.ignore_index) return ignored;
    return inside(s, y) ? valid : poisoned;
  }
  if (s.soft != SoftTargets::sparse || s.soft_k == 0) return valid;
  bool all_ignored = true, all_inside = true;
  for (int64_t j = 0; j < s.soft_k; ++j) {
    const int64_t id = s.soft_ids.load_index(t, j);
    all_ignored = all_ignored && id == s.ignore_index;
    all_inside = all_inside && inside(s, id);
  }
  if (all_ignored) return ignored;
  return all_inside ? valid : poisoned;
}

// One thread a token. Within a block the valid rows are numbered by ballots.
__global__ void examine_kernel(Shape s, TargetPartial* partials, int8_t* kinds, int64_t* order) {
  __shared__ double doubles[examined_rows / warp_size];
  __shared__ int64_t integers[examined_rows / warp_size];
  const int64_t t = blockIdx.x * examined_rows + threadIdx.x;
  const bool exists = t < s.tokens;
  Kind kind = exists ? kind_of_target(s, t) : ignored;
  const bool bad_target = kind == poisoned;
  bool bad_scale = false;
  if (kind == valid && s.token_scale) {
    const double scale = s.token_scale.load(t);
    bad_scale = scale == 0 || !isfinite(scale);
    if (bad_scale) kind = poisoned;
  }
  double c = kind == ignored ? 0 : 1;
  if (mutant(Mutant::b24_invalid_leaves_denominator) && kind == poisoned) c = 0;
  bool mine = false;
  if (kind == valid && s.has_targets) {
    const int64_t y = s.targets.load_index(t);
    if (s.class_weights) c = s.class_weights.load(y);
    mine = y >= s.vocab_begin && y < s.vocab_begin + s.vocab_local;
  }
  const double w = c != 0 && s.token_weight ? c * s.token_weight.load(t) : c;
  TargetPartial p;
  p.valid = block_reduce<int64_t>(kind == valid, Sum(), integers);
  p.ignored = block_reduce<int64_t>(exists && kind == ignored, Sum(), integers);
  p.out_of_range = block_reduce<int64_t>(kind == poisoned, Sum(), integers);
  p.in_partition = block_reduce<int64_t>(mine, Sum(), integers);
  p.first_bad = block_reduce<int64_t>(bad_target ? t : INT64_MAX, Min(), integers);
  p.first_bad_scale = block_reduce<int64_t>(bad_scale ? t : INT64_MAX, Min(), integers);
  p.valid_weight = block_reduce(c, Sum(), doubles);
  p.weighted = block_reduce(w, Sum(), doubles);
  p.offset = 0;
  if (threadIdx.x == 0) partials[blockIdx.x] = p;
  if (exists) kinds[t] = kind;

  // The number of this row among the valid rows of its block, kept where the row itself stood.
  const unsigned ballot = __ballot_sync(whole_warp, kind == valid);
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  if (lane == 0) integers[warp] = __popc(ballot);
  __syncthreads();
  int64_t number = __popc(ballot & ((1u << lane) - 1));
  for (int w_ = 0; w_ < warp; ++w_) number += integers[w_];
  // order[] first holds the block-local order; place_kernel moves it to its global place.
  if (kind == valid) order[blockIdx.x * examined_rows + number] = t;
}

// One block: offsets of the blocks and the sums over them.
__global__ void total_kernel(Shape s, Totals* totals, TargetPartial* partials, int64_t blocks) {
  __shared__ int64_t integers[32];
  __shared__ double doubles[32];
  TargetPartial mine = {0, 0, 0, 0, INT64_MAX, INT64_MAX, 0, 0, 0};
  for (int64_t b = threadIdx.x; b < blocks; b += blockDim.x) {
    const TargetPartial& p = partials[b];
    mine.valid += p.valid;
    mine.ignored += p.ignored;
    mine.out_of_range += p.out_of_range;
    mine.in_partition += p.in_partition;
    mine.first_bad = Min()(mine.first_bad, p.first_bad);
    mine.first_bad_scale = Min()(mine.first_bad_scale, p.first_bad_scale);
    mine.valid_weight += p.valid_weight;
    mine.weighted += p.weighted;
  }
  Totals t;
  t.valid = block_reduce(mine.valid, Sum(), integers);
  t.ignored = block_reduce(mine.ignored, Sum(), integers);
  t.out_of_range = block_reduce(mine.out_of_range, Sum(), integers);
  t.in_partition = block_reduce(mine.in_partition, Sum(), integers);
  t.first_bad = block_reduce(mine.first_bad, Min(), integers);
  t.first_bad_scale = block_reduce(mine.first_bad_scale, Min(), integers);
  t.first_bad_weight = INT64_MAX;
  t.valid_weight = block_reduce(mine.valid_weight, Sum(), doubles);
  t.weighted = block_reduce(mine.weighted, Sum(), doubles);
  t.present = static_cast<double>(t.valid + t.out_of_range);
  t.class_weight_sum = static_cast<double>(s.vocab);
  t.class_weight_max = 1;
  if (threadIdx.x != 0) return;
  t.first_bad_value =
      t.first_bad != INT64_MAX && s.has_targets ? s.targets.load_index(t.first_bad) : 0;
  *totals = t;
  int64_t offset = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    partials[b].offset = offset;
    offset += partials[b].valid;
  }
}

// Moves the block-local orders together. Blocks go from the front: a block's destination never
// lies behind its source, and one block does it all, so no source is overwritten unread.
__global__ void place_kernel(const TargetPartial* partials, int64_t* order, int64_t blocks) {
  for (int64_t b = 0; b < blocks; ++b) {
    const bool mine = threadIdx.x < partials[b].valid;
    const int64_t t = mine ? order[b * examined_rows + threadIdx.x] : 0;
    __syncthreads();
    if (mine) order[partials[b].offset + threadIdx.x] = t;
    __syncthreads();
  }
}

__global__ void class_weight_kernel(Shape s, Totals* totals) {
  __shared__ double doubles[32];
  __shared__ int64_t integers[32];
  double sum = 0, most = 0;
  int64_t bad = INT64_MAX;
  for (int64_t v = threadIdx.x; v < s.vocab; v += blockDim.x) {
    const double c = s.class_weights.load(v);
    if (!(c >= 0) || isinf(c)) bad = Min()(bad, v);
    sum += c;
    most = fmax(most, c);
  }
  sum = block_reduce(sum, Sum(), doubles);
  most = block_reduce(most, Max(), doubles);
  bad = block_reduce(bad, Min(), integers);
  if (threadIdx.x != 0) return;
  // A weight that breaks the contract poisons the whole call: nothing of it may look right.
  totals->class_weight_sum = bad == INT64_MAX ? sum : NAN;
  totals->class_weight_max = most;
  totals->first_bad_weight = bad;
  if (bad != INT64_MAX) totals->valid_weight = totals->weighted = NAN;
}

__global__ void terms_kernel(Shape s, const Totals* totals, Terms* terms) {
  double denominator = 1;
  if (s.reduction == Reduction::mean)
    denominator = s.denominator == Denominator::valid      ? totals->valid_weight
                  : s.denominator == Denominator::weighted ? totals->weighted
                                                           : s.denominator_value;
  Terms t;
  t.denominator = denominator;
  t.empty = totals->present == 0;
  t.loss.label_smoothing = s.label_smoothing;
  t.loss.z_loss = s.z_loss;
  t.loss.vocab = static_cast<double>(s.vocab);
  if (mutant(Mutant::b9_smoothing_local)) t.loss.vocab = static_cast<double>(s.vocab_stored);
  t.loss.class_weight_sum = totals->class_weight_sum;
  // A class weight out of contract reaches the gradient of every reduction.
  t.loss.inverse_denominator =
      totals->first_bad_weight == INT64_MAX ? 1.0 / denominator : static_cast<double>(NAN);
  *terms = t;
}

__global__ void blank_kernel(Shape s, const int8_t* kinds, double* row_loss, int8_t* hit) {
  const int64_t t = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (t >= s.tokens || kinds[t] == valid) return;
  const double value = kinds[t] == poisoned ? NAN : 0.0;
  if (row_loss) row_loss[t] = value;
  if (hit) hit[t] = 0;
  if (s.loss && s.reduction == Reduction::none) s.loss.store(t, value);
  if (s.lse) s.lse.store(t, value);
  if (s.logprob) s.logprob.store(t, value);
  if (s.entropy) s.entropy.store(t, value);
  if (s.argmax) s.argmax.store(t, -1);
  for (int64_t j = 0; j < s.top_k; ++j) {
    if (s.topk_values) s.topk_values.store(t, j, value);
    if (s.topk_ids) s.topk_ids.store(t, j, -1);
    if (s.topk_logprobs) s.topk_logprobs.store(t, j, value);
  }
}

__global__ void scalars_kernel(Shape s, const Totals* totals, const Terms* terms,
                               const double* row_loss, const int8_t* hit) {
  __shared__ double doubles[32];
  double sum = 0, hits = 0;
  for (int64_t t = threadIdx.x; t < s.tokens; t += blockDim.x) {
    if (row_loss) sum += row_loss[t];
    if (hit) hits += hit[t];
  }
  sum = block_reduce(sum, Sum(), doubles);
  hits = block_reduce(hits, Sum(), doubles);
  if (threadIdx.x != 0) return;
  if (s.loss && s.reduction != Reduction::none) {
    double loss = sum;
    if (s.reduction == Reduction::mean) {
      const bool empty = terms->empty && s.denominator != Denominator::given;
      loss = !empty ? sum / terms->denominator : s.on_empty == OnEmpty::nan ? NAN : 0.0;
    }
    s.loss.store(0, loss);
  }
  if (s.accuracy) s.accuracy.store(0, hits / static_cast<double>(totals->valid));
}

}  // namespace

void examine_targets(const Shape& s, Totals* totals, TargetPartial* partials, int8_t* kind,
                     int64_t* order, cudaStream_t stream) {
  const int64_t blocks = (s.tokens + examined_rows - 1) / examined_rows;
  if (blocks > 0) {
    examine_kernel<<<static_cast<unsigned>(blocks), examined_rows, 0, stream>>>(s, partials, kind,
                                                                                order);
    device::check_launch("examine_targets");
  }
  total_kernel<<<1, 256, 0, stream>>>(s, totals, partials, blocks);
  device::check_launch("total_targets");
  if (blocks > 1) {
    place_kernel<<<1, examined_rows, 0, stream>>>(partials, order, blocks);
    device::check_launch("place_targets");
  }
}

void examine_class_weights(const Shape& s, Totals* totals, cudaStream_t stream) {
  class_weight_kernel<<<1, 1024, 0, stream>>>(s, totals);
  device::check_launch("examine_class_weights");
}

void form_terms(const Shape& s, const Totals* totals, Terms* terms, cudaStream_t stream) {
  terms_kernel<<<1, 1, 0, stream>>>(s, totals, terms);
  device::check_launch("form_terms");
}

void write_blank_rows(const Shape& s, const int8_t* kind, double* row_loss, int8_t* hit,
                      cudaStream_t stream) {
  if (s.tokens == 0) return;
  blank_kernel<<<static_cast<unsigned>((s.tokens + 255) / 256), 256, 0, stream>>>(s, kind, row_loss,
                                                                                  hit);
  device::check_launch("write_blank_rows");
}

void write_scalars(const Shape& s, const Totals* totals, const Terms* terms, const double* row_loss,
                   const int8_t* hit, cudaStream_t stream) {
  scalars_kernel<<<1, 1024, 0, stream>>>(s, totals, terms, row_loss, hit);
  device::check_launch("write_scalars");
}

}  // namespace talea::lce::cuda
