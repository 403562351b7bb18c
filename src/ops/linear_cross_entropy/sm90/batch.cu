// Compaction of the rows that count, blanks for those that do not, the dense copy of a chunk's
// rows. Exists so that ignored rows cost nothing and leak nothing, without the host knowing their
// number. Never depends on timing: every order is the order of the tokens.
#include <cuda_fp16.h>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>

#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/sm90/device_vector.cuh"

namespace talea::lce {
namespace {

constexpr int kBlock = 1024;

enum class Kind { valid, ignored, poisoned };
__device__ __forceinline__ Kind kind_of(int64_t target, int64_t ignore, int64_t vocab) {
  if (target == ignore) return Kind::ignored;
  return target >= 0 && target < vocab ? Kind::valid : Kind::poisoned;
}

__device__ void write_row(const CompactParams& p, int place, int64_t t, int64_t target) {
  const int64_t local = target - p.vocab_begin;
  const bool here = local >= 0 && local < p.vocab_local;
  p.rows.index[place] = static_cast<int>(t);
  p.rows.target[place] = here ? static_cast<int>(local) : -1;
  p.rows.peak[place] = kNoPeak;
  p.rows.target_logit[place] = -INFINITY;
  p.rows.shift[place] = p.token_shift ? p.token_shift[t] : 0.f;
  if (p.rows.scale) p.rows.scale[place] = static_cast<float>(read(p.token_scale, t, 1));
  p.row_class_weight[place] = static_cast<float>(read(p.class_weight, target, 1));
  if (p.sort_keys) {
    const uint64_t key = here ? static_cast<uint64_t>(local) : 0xffffffffu;
    p.sort_keys[place] = key << 32 | static_cast<uint32_t>(place);
  }
}

// One block: the batch is a few thousand tokens and the order of the sums must not change.
__global__ void __launch_bounds__(kBlock) compact_kernel(CompactParams p) {
  using Scan = cub::BlockScan<int, kBlock>;
  using Sum = cub::BlockReduce<double, kBlock>;
  __shared__ union {
    typename Scan::TempStorage scan;
    typename Sum::TempStorage sum;
  } shared;
  int used = 0, poisoned = 0;
  double weight = 0;
  for (int64_t base = 0; base < p.tokens; base += kBlock) {
    const int64_t t = base + threadIdx.x;
    int64_t target = p.ignore_index;
    if (t < p.tokens) target = read_index(p.targets, t);
    const Kind kind = t < p.tokens ? kind_of(target, p.ignore_index, p.vocab) : Kind::ignored;
    int place = 0, total = 0;
    Scan(shared.scan).ExclusiveSum(kind == Kind::valid ? 1 : 0, place, total);
    __syncthreads();
    if (kind == Kind::valid) write_row(p, used + place, t, target);
    if (kind == Kind::poisoned) ++poisoned;
    if (kind != Kind::ignored) {
      const double c = kind == Kind::valid ? read(p.class_weight, target, 1) : 1.0;
      weight += p.denominator == 1 ? c * read(p.token_weight, t, 1) : c;
    }
    used += total;
  }
  const double all_weight = Sum(shared.sum).Sum(weight);
  __syncthreads();
  const double all_poisoned = Sum(shared.sum).Sum(static_cast<double>(poisoned));
  if (p.sort_keys)
    for (int64_t i = used + threadIdx.x; i < p.tokens; i += kBlock) p.sort_keys[i] = ~uint64_t{0};
  if (threadIdx.x != 0) return;
  BatchFacts facts;
  facts.valid = used;
  facts.poisoned = static_cast<int>(all_poisoned);
  facts.denominator = p.denominator == 3   ? 1.0
                      : p.denominator == 2 ? p.denominator_value
                                           : all_weight;
  facts.inverse = used == 0 ? 0.0 : 1.0 / facts.denominator;
  *p.facts = facts;
}

__global__ void token_kernel(TokenParams p) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= p.tokens) return;
  const int64_t target = read_index(p.targets, t), local = target - p.vocab_begin;
  const bool here = kind_of(target, p.ignore_index, p.vocab) == Kind::valid && local >= 0 &&
                    local < p.vocab_local;
  p.target[t] = here ? static_cast<int>(local) : -1;
  if (p.scale) p.scale[t] = static_cast<float>(read(p.token_scale, t, 1));
}

__global__ void blank_kernel(BlankParams p) {
  const int64_t t = blockIdx.x;
  const Kind kind = kind_of(read_index(p.targets, t), p.ignore_index, p.vocab);
  if (kind == Kind::valid) return;
  const bool nan = kind == Kind::poisoned;
  if (threadIdx.x == 0) {
    const double x = nan ? static_cast<double>(NAN) : 0.0;
    write(p.loss, t, x);
    write(p.lse, t, x);
    write(p.logprob, t, x);
    write(p.entropy, t, x);
  }
  if (!p.dx) return;
  auto* row = static_cast<uint16_t*>(p.dx) + t * p.dx_stride;
  for (int64_t d = threadIdx.x; d < p.hidden; d += blockDim.x) row[d] = nan ? 0x7fff : 0;
}

// columns % 8 == 0 and 16-byte aligned rows: what the copy engine needs anyway.
__global__ void gather_kernel(GatherParams p) {
  const int64_t row = blockIdx.x;
  const bool real = p.begin + row < p.facts->valid;
  const int64_t vectors = p.columns / 8;
  auto* to = static_cast<uint4*>(p.to) + row * vectors;
  if (!real) {
    for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) to[i] = uint4{0, 0, 0, 0};
    return;
  }
  const auto* from = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.hidden) +
                                                    p.index[p.begin + row] * p.stride);
  for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) to[i] = from[i];
}

}  // namespace

DeviceVector device_vector(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype, t.rank == 0 ? 0 : t.stride[0]};
}

void prepare_tokens(const TokenParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  token_kernel<<<static_cast<unsigned>((p.tokens + 255) / 256), 256, 0, stream>>>(p);
  device::check_launch("prepare_tokens");
}

void compact_rows(const CompactParams& p, cudaStream_t stream) {
  compact_kernel<<<1, kBlock, 0, stream>>>(p);
  device::check_launch("compact_rows");
}

void blank_rows(const BlankParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  blank_kernel<<<static_cast<unsigned>(p.tokens), 128, 0, stream>>>(p);
  device::check_launch("blank_rows");
}

void gather_rows(const GatherParams& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  gather_kernel<<<static_cast<unsigned>(p.rows), 128, 0, stream>>>(p);
  device::check_launch("gather_rows");
}

void sort_keys(const uint64_t* from, uint64_t* to, int64_t tokens, void* scratch,
               int64_t scratch_bytes, cudaStream_t stream) {
  auto bytes = static_cast<size_t>(scratch_bytes);
  device::check(cub::DeviceRadixSort::SortKeys(scratch, bytes, from, to, tokens, 0, 64, stream),
                "sort of the targets");
}

}  // namespace talea::lce
