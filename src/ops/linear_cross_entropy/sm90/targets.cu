// What: what the targets say: the rows that count, their order, the denominator.
// Why: ignored rows cost nothing and leak nothing, without the host knowing their number. One
// launch writes all that this lane keeps of a row; the rules are those of rows/.
// Never: depends on timing: every order is the order of the tokens.
#include <bit>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>

#include "core/kernel_mutant.hpp"
#include "device/common/cuda_check.hpp"
#include "device/sm90/follow.cuh"
#include "ops/linear_cross_entropy/rows/tokens.cuh"
#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"

namespace talea::lce {
namespace {

constexpr int kBlock = 1024;
constexpr int kFewBlock = static_cast<int>(kFewTokens);

// column: of the target in this rank's shard, or -1.
__device__ void write_row(const CompactParams& p, int place, int64_t t, int64_t column,
                          double class_weight) {
  p.rows.index[place] = static_cast<int>(t);
  p.rows.target[place] = static_cast<int>(column);
  p.rows.peak[place] = kNoPeak;
  p.rows.target_logit[place] = -INFINITY;
  p.rows.shift[place] = p.token_shift ? p.token_shift[t] : 0.f;
  if (p.rows.scale) p.rows.scale[place] = static_cast<float>(read(p.rule.token_scale, t, 1));
  p.row_class_weight[place] = static_cast<float>(class_weight);
  if (p.sort_keys) {
    const uint64_t key = column >= 0 ? static_cast<uint64_t>(column) : 0xffffffffu;
    const bool rows = !mutant(KernelMutant::sort_by_word_alone);
    p.sort_keys[place] = key << 32 | static_cast<uint32_t>(rows ? place : 0);
  }
}

__device__ void write_facts(const CompactParams& p, const TokenSums& sums) {
  BatchFacts facts = batch_facts(sums, p.rule);
  set_denominator(facts, p.mean);
  *p.facts = facts;
}

// One block: the batch is a few thousand tokens and the order of the sums must not change.
//
//   for each kThreads tokens [t, t + kThreads):
//     own = what the rules say of token t                      rows/tokens.cuh
//     place[t] = rows used + valid tokens before t of these    a scan over the block
//     index, target, scale, shift, class weight, sort key [place[t]] = those of t, where valid
//   keys of the places beyond the valid rows = all ones
//   facts = sums over the block, M
template <int kThreads>
__device__ void compact(const CompactParams& p) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage scan;
  __shared__ int64_t integers[kThreads / 32];
  __shared__ double doubles[kThreads / 32];
  int used = 0;
  TokenSums sums;
  for (int64_t base = 0; base < p.tokens; base += kThreads) {
    const int64_t t = base + threadIdx.x;
    TokenFacts own;
    if (t < p.tokens) {
      own = TokenFacts(p.rule, p.class_weight, p.token_weight, t);
      add(sums, own, t);
    }
    int place = 0, total = 0;
    Scan(scan).ExclusiveSum(own.kind == RowKind::valid ? 1 : 0, place, total);
    __syncthreads();
    if (own.kind == RowKind::valid) write_row(p, used + place, t, own.column, own.class_weight);
    used += total;
  }
  if (p.sort_keys)
    for (int64_t i = used + threadIdx.x; i < p.tokens; i += kThreads) p.sort_keys[i] = ~uint64_t{0};
  sums = over_block(sums, integers, doubles);
  if (threadIdx.x == 0) write_facts(p, sums);
}

__global__ void __launch_bounds__(kBlock) compact_kernel(CompactParams p) { compact<kBlock>(p); }

// The tokens of few, one a thread: their kinds, counted over the block.
struct FewTokens {
  static constexpr int kWarps = kFewBlock / 32;
  RowKind kind = RowKind::ignored;
  int place = 0;  // of a valid one in the compacted order
  int valid = 0, poisoned = 0, ignored = 0;

  __device__ FewTokens(const CompactParams& p, int (*warps)[kWarps]) {
    const int t = static_cast<int>(threadIdx.x), lane = t % 32;
    const bool exists = t < p.tokens;
    if (exists) kind = kind_of(p.rule, t);
    const unsigned mine = __ballot_sync(0xffffffffu, kind == RowKind::valid);
    const unsigned bad = __ballot_sync(0xffffffffu, kind == RowKind::poisoned);
    if (lane == 0) warps[0][t / 32] = __popc(mine), warps[1][t / 32] = __popc(bad);
    __syncthreads();
    place = __popc(mine & ((1u << lane) - 1));
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < t / 32) place += warps[0][w];
      valid += warps[0][w], poisoned += warps[1][w];
    }
    ignored = static_cast<int>(p.tokens) - valid - poisoned;
  }
};

// What compact() does where no token is poisoned and none has a weight: in few instructions, since
// they are fetched anew after each read of a large weight.
__device__ void compact_few(const CompactParams& p, const FewTokens& own) {
  const int t = static_cast<int>(threadIdx.x);
  int64_t column = -1;
  if (own.kind == RowKind::valid) {
    column = target_column(p.rule, t);
    write_row(p, own.place, t, column, 1);
  }
  const int in_partition = __syncthreads_count(column >= 0);
  if (t != 0) return;
  TokenSums sums;
  sums.valid = own.valid, sums.ignored = own.ignored, sums.in_partition = in_partition;
  sums.counted = sums.weighted = own.valid;
  write_facts(p, sums);
}

// The first block compacts; each other finds the row of X that belongs in its place by itself, so
// that one launch does both.
__global__ void __launch_bounds__(kFewBlock) few_rows_kernel(FewRowsParams p) {
  __shared__ int found;
  alignas(16) __shared__ int warps[2][FewTokens::kWarps];  // loads of 16 bytes do not reach `found`
  talea::sm90::begin_after_earlier_kernels();
  if (threadIdx.x == 0) found = -1;
  const FewTokens own(p.compact, warps);
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) *p.zeroed = 0;
    const bool weighted = p.compact.class_weight.data || p.compact.token_weight.data;
    if (weighted || own.poisoned > 0) return compact<kFewBlock>(p.compact);
    return compact_few(p.compact, own);
  }
  const int place = static_cast<int>(blockIdx.x) - 1;
  if (own.kind == RowKind::valid && own.place == place) found = static_cast<int>(threadIdx.x);
  __syncthreads();
  const uint16_t* from = static_cast<const uint16_t*>(p.hidden) + found * p.stride;
  auto* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.to) + place * p.columns);
#pragma unroll 2
  for (int64_t i = threadIdx.x; i < p.columns / 8; i += kFewBlock)
    to[i] = found < 0 ? uint4{0, 0, 0, 0} : reinterpret_cast<const uint4*>(from)[i];
}

__global__ void token_kernel(TokenParams p) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= p.tokens) return;
  const bool valid = kind_of(p.rule, t) == RowKind::valid;
  p.target[t] = valid ? static_cast<int>(target_column(p.rule, t)) : -1;
  if (p.scale) p.scale[t] = static_cast<float>(read(p.rule.token_scale, t, 1));
}

__global__ void spread_kernel(SpreadParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < p.facts->in_use) p.shift[row] = p.token_shift[p.index[row]];
}

}  // namespace

void prepare_tokens(const TokenParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  token_kernel<<<static_cast<unsigned>((p.tokens + 255) / 256), 256, 0, stream>>>(p);
  device::check_launch("prepare_tokens");
}

void compact_rows(const CompactParams& p, cudaStream_t stream) {
  compact_kernel<<<1, kBlock, 0, stream>>>(p);
  device::check_launch("compact_rows");
}

void find_few_rows(const FewRowsParams& p, cudaStream_t stream) {
  talea::sm90::launch_following(few_rows_kernel, {1 + p.places, kFewBlock, p.follows}, p, stream,
                                "find_few_rows");
}

void sort_keys(const uint64_t* from, uint64_t* to, int64_t tokens, int64_t vocab, void* scratch,
               int64_t scratch_bytes, cudaStream_t stream) {
  auto bytes = static_cast<size_t>(scratch_bytes);
  // Rows ascend already and the sort is stable. As many bits of the target as hold `vocab`: there
  // what has no target, all ones, stays above every id.
  const int end = 32 + std::bit_width(static_cast<uint64_t>(vocab | 1));
  device::check(cub::DeviceRadixSort::SortKeys(scratch, bytes, from, to, tokens, 32, end, stream),
                "sort of the targets");
}

void spread_shifts(const SpreadParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  spread_kernel<<<static_cast<unsigned>((p.tokens + 255) / 256), 256, 0, stream>>>(p);
  device::check_launch("spread_shifts");
}

}  // namespace talea::lce
